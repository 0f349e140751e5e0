"""Recorded routing of gpt-oss-20b through every cache of experts, and through guesses that need counts alone.

python -m tests.benchmarks.trace_caches

The trace stands in the place of the model's routers; caches, prefetch and what lies where are the engine's own
(`tests.played_traces`). Counted, so the same on every machine. Needs the data folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

from engines.dispatch import Integers, Prediction, Routing
from engines.profile import Profile
from engines.techniques.base import Technique
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import Asks, BuildContext, LayerInput
from engines.techniques.layout.exact import Exact
from engines.techniques.move.two_buffers import TwoBuffers
from engines.techniques.place.units import OneUnitParameters
from engines.techniques.presets import preset_parameters
from tests.benchmarks.measurement import FOLDER, Measurement, measured, write_page
from tests.played_traces import GPT_OSS_20B, Event, calls_by_layer, counted, fewest_loads, gpt_oss_sequences, played

NAME = "trace-caches"
EVERY = 10
"""Which n-th answer is played; the others are what calibration counts."""
SLOTS = (4, 6, 8, 12, 16, 20, 24, 28, 32)
CACHES = {
    "lru": "lru",
    "lfu": "lfu",
    "static": "static, most chosen",
    "moe-ondemand": "moe-ondemand, first ones",
}
OWN, SHARED = "best of all, each layer its own slots", "best of all, slots of all layers and 4 more"
WIDTHS = (1, 2, 4, 8, 16)
"""Experts that are guessed for a token and layer."""
HALF = 0.5
"""Of an answer: read as the prompt where counts of a prompt are wanted, for the trace has no prompts."""
L, E, K = GPT_OSS_20B.n_layers, GPT_OSS_20B.n_experts, GPT_OSS_20B.top_k


class Share(NamedTuple):
    """Hits of all calls, %, and its standard error over the answers."""

    percent: float
    error: float


def share(events: Iterable[Event], first_layer: int = 0) -> Share:
    """Of decoded tokens."""
    hits: dict[int, int] = {}
    calls: dict[int, int] = {}
    for event in events:
        if event.phase == "decode" and event.layer >= first_layer:
            assert event.plan.hits is not None
            assert event.plan.misses is not None
            hits[event.sequence] = hits.get(event.sequence, 0) + event.plan.hits
            calls[event.sequence] = calls.get(event.sequence, 0) + event.plan.hits + event.plan.misses
    total = sum(hits.values()) / sum(calls.values())
    # Of a ratio of sums: answers differ in length.
    off = np.array([hits[n] - total * calls[n] for n in calls])
    error = np.sqrt((off**2).sum() * len(off) / (len(off) - 1)) / sum(calls.values())
    return Share(100 * total, 100 * float(error))


# --- caches ----------------------------------------------------------------------------------------------------------


def cached(name: str, slots: int, sequences: Sequence[Integers], profile: Profile) -> Share:
    technique = preset_parameters(name).model_validate({"slots": slots}).build(BuildContext(1, GPT_OSS_20B, profile))
    return share(played(technique, sequences))


def best_of_own(slots: int, sequences: Sequence[Integers]) -> float:
    layers = calls_by_layer(sequences)
    return 100 * (1 - sum(fewest_loads(ids_TK.tolist(), slots) for ids_TK in layers) / sum(ids.size for ids in layers))


def best_of_shared(slots: int, sequences: Sequence[Integers]) -> float:
    """Of the memory that `static` has: the slots of all layers, and K more."""
    calls_XK = (np.concatenate(sequences) + E * np.arange(L)[:, None]).reshape(-1, K)
    return 100 * (1 - fewest_loads(calls_XK.tolist(), min(slots, E) * L + K) / calls_XK.size)


def cache_rows(sequences: Sequence[Integers], profile: Profile) -> Iterator[Measurement]:
    for slots in SLOTS:
        where = f"{slots} slots a layer"
        for name, what in CACHES.items():
            found = cached(name, slots, sequences, profile)
            yield hits(found.percent, f"{what}, {where}", f"standard error {found.error:.1f}")
        yield hits(best_of_own(slots, sequences), f"{OWN}, {where}")
        yield hits(best_of_shared(slots, sequences), f"{SHARED}, {where}")


def hits(percent: float, conditions: str, note: str = "") -> Measurement:
    loads = f"{(100 - percent) / 100 * L * K:.1f} loads a token"
    return measured("hits", percent, "%", conditions, note="; ".join(filter(None, [note, loads])))


# --- guesses ---------------------------------------------------------------------------------------------------------


class CountedGuess:
    """A route that executes the router's choice and guesses the next layer's experts from counts."""

    asks = Asks(counts=True)

    def __init__(self, scores_E: Callable[[LayerInput, int], Integers], width: int) -> None:
        """scores_E: of what is seen and the layer to guess; the most are guessed, of equal ones the lower number."""
        self._scores_E, self._width = scores_E, width

    def executed(self, seen: LayerInput) -> Routing:
        return seen.routing

    def predict(self, seen: LayerInput) -> Prediction | None:
        ahead = seen.layer + 1
        if seen.phase == "prefill" or ahead == L:
            return None
        ids_X = np.argsort(-self._scores_E(seen, ahead), kind="stable")[: self._width]
        ids_1X = torch.from_numpy(ids_X)[None]
        return Prediction(ahead, Routing(ids_1X, torch.full(ids_1X.shape, 1 / self._width), E))


def guesses(profile: Profile, others: Sequence[Integers]) -> dict[str, Callable[[LayerInput, int], Integers]]:
    """By name, what each goes by."""
    popular_LE = np.array([profile.tokens_per_expert[layer] for layer in range(L)])
    together_LEE = followers(others)

    def of_prompt(seen: LayerInput, ahead: int) -> Integers:
        assert seen.counts is not None
        return seen.counts.prefill_LE[ahead]

    def so_far(seen: LayerInput, ahead: int) -> Integers:
        assert seen.counts is not None
        return seen.counts.prefill_LE[ahead] + seen.counts.decode_LE[ahead]

    def after_these(seen: LayerInput, ahead: int) -> Integers:
        found_E: Integers = together_LEE[seen.layer, seen.routing.expert_ids_TK[0].numpy()].sum(0)
        return found_E

    return {
        "most chosen by other answers": lambda seen, ahead: popular_LE[ahead],
        "most chosen in the first half": of_prompt,
        "most chosen so far": so_far,
        "most chosen by others after these experts": after_these,
    }


def followers(sequences: Sequence[Integers]) -> Integers:
    """[L, E, E]: how many tokens chose the one in a layer and the other in the next."""
    found_LEE = np.zeros((L, E, E), dtype=np.int64)
    for layer, (one_TK, next_TK) in enumerate(pairwise(calls_by_layer(sequences))):
        pair_TKK = one_TK[:, :, None] * E + next_TK[:, None, :]
        found_LEE[layer] = np.bincount(pair_TKK.reshape(-1), minlength=E * E).reshape(E, E)
    return found_LEE


def guessing(scores_E: Callable[[LayerInput, int], Integers], width: int) -> Technique:
    context = BuildContext(1, GPT_OSS_20B)
    place = OneUnitParameters(unit="gpu").build(context, Exact())
    move = TwoBuffers(dict(pairwise(range(L))), E, GPT_OSS_20B.expert_bytes, prefetch=True)
    layouts = {"prefill": Exact(), "decode": Exact()}
    return ComposedTechnique("guessing", CountedGuess(scores_E, width), place, layouts, move, context)  # type: ignore[arg-type]


def guess_rows(sequences: Sequence[Integers], others: Sequence[Integers], profile: Profile) -> Iterator[Measurement]:
    for name, scores_E in guesses(profile, others).items():
        for width in WIDTHS:
            found = share(played(guessing(scores_E, width), sequences, prompt_share=HALF), first_layer=1)
            yield measured(
                "recall", found.percent, "%", f"{name}, {width} guessed", note=f"standard error {found.error:.1f}"
            )


def prefetch_rows(sequences: Sequence[Integers]) -> Iterator[Measurement]:
    """001's: the most chosen of the prompt lie on the GPU while it is answered."""
    for width in WIDTHS:
        technique = preset_parameters("ndp-tp-pre").model_validate({"slots": width}).build(BuildContext(1, GPT_OSS_20B))
        found = share(played(technique, sequences, prompt_share=HALF))
        where = f"ndp-tp-pre, {width} kept of each layer"
        yield measured("hits", found.percent, "%", where, note=f"standard error {found.error:.1f}")


# --- the page --------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Measurement], corner: str) -> str:
    """Of rows whose conditions are "row, N ..."; columns by N."""
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        name, _, column = row.conditions.rpartition(", ")
        error = (row.note or "").partition("standard error ")[2].partition(";")[0]
        cells.setdefault(name, {})[int(column.split()[0])] = f"{row.ours:.1f}" + (f" ± {error}" if error else "")
    columns = list(dict.fromkeys(n for own in cells.values() for n in own))
    lines = [f"| {corner} | {' | '.join(map(str, columns))} |", "|" + "---|" * (1 + len(columns))]
    lines += [f"| {name} | {' | '.join(own[n] for n in columns)} |" for name, own in cells.items()]
    return "\n".join(lines)


def draw(rows: Sequence[Measurement]) -> None:
    import altair as alt

    points = []
    for row in rows:
        name, _, column = row.conditions.rpartition(", ")
        points.append({"cache": name, "slots": int(column.split()[0]), "hits": row.ours})
    chart = alt.Chart(pd.DataFrame(points)).mark_line(point=True)
    chart = chart.encode(
        x=alt.X("slots:Q", title=f"slots a layer, of {E} experts"),
        y=alt.Y("hits:Q", title="hits, % of the experts called", scale=alt.Scale(domain=[0, 100])),
        color=alt.Color("cache:N", title=None, sort=[*CACHES.values(), OWN, SHARED], legend=alt.Legend(labelLimit=320)),
    )
    chart.properties(width=420, height=300).save(FOLDER / f"{NAME}.svg")


REMARKS = """What gpt-oss-20b's routers chose for {n_tokens} generated tokens of {n_played} recorded answers, played
through the caches of this project: {layers} layers, {experts} experts each, {top_k} a token, so {calls} calls a token.
Calibration counted the {n_others} other answers. One answer after another; what lies in the slots stays. No prompts
were recorded, so all tokens are decoded. ± is a standard error over answers.

Hits, % of the experts called, by slots a layer:

{caches}

![Hits against slots](trace-caches.svg)

Slots are empty at first. `static` and `moe-ondemand` have {top_k} slots more, which all layers share: what does not
stay passes through these. "Best of all": Belady's optimum, which knows the future and gives up what is called latest,
in two memories. The slots of each layer are its own, as those of `lru` and `lfu` are; or all layers share them and have
{top_k} more, which bounds every row above it.

Guesses of the next layer's experts from counts alone: recall, the share of a layer's {top_k} experts that was among
those guessed and fetched into the second of two buffers, by how many were guessed. The first half of each answer is
read as its prompt, the second is decoded; of layers 1 to {last}, for nothing is told before the first. Guesses at
random recall 3.1 % for each expert guessed.

{guesses}

`ndp-tp-pre` (GPU-NDP, 001) keeps the most chosen of the prompt on the GPU while it is answered; hits, % of the experts
called in all layers, by how many of each layer it keeps, of the same halves. Top {top_k} is its own ablation:

{prefetched}

Every figure:"""


def main() -> None:
    try:
        sequences = gpt_oss_sequences()
    except pytest.skip.Exception as absent:
        sys.exit(str(absent))
    own, others = sequences[::EVERY], [one for n, one in enumerate(sequences) if n % EVERY]
    profile = counted(others)
    caches = list(cache_rows(own, profile))
    guessed = list(guess_rows(own, others, profile))
    prefetched = list(prefetch_rows(own))
    draw(caches)
    remarks = REMARKS.format(
        n_tokens=sum(map(len, own)),
        n_played=len(own),
        n_others=len(others),
        layers=L,
        experts=E,
        top_k=K,
        calls=L * K,
        last=L - 1,
        caches=table(caches, "slots a layer"),
        guesses=table(guessed, "guessed"),
        prefetched=table(prefetched, "kept"),
    )
    write_page(NAME, "What caches and counts make of recorded routing", [*caches, *guessed, *prefetched], remarks)


if __name__ == "__main__":
    main()
