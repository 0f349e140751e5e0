"""Recorded routing in the place of a model's: played through techniques as an engine plays its own.

A layer of a step is shown to the technique, its plan is made and applied to what lies where: the same code, in the same
order, as in a run. Nothing is computed.

Legend: T tokens, L layers, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.dispatch import DispatchPlan, Integers
from engines.pricing.played import routing_of
from engines.pricing.routing_sources import read_trace
from engines.profile import Profile
from engines.shown import Shown
from engines.techniques.base import Technique
from engines.techniques.context import ChunkPhase, ModelSizes
from tests.data_folder import data_folder

GPT_OSS_20B = ModelSizes(
    n_experts=32, top_k=4, hidden=2880, expert_width=2880, expert_bytes=6 * 2880 * 2880, n_layers=24, n_sparse_layers=24
)
"""In bf16."""


def gpt_oss_sequences() -> list[Integers]:
    """experts_TLK of each recorded answer of gpt-oss-20b: its generated tokens, the heaviest expert first. Skips the
    test where the data are not there."""
    path = data_folder() / "traces" / "moe" / "gpt-oss-20b_decode_trace.npz"
    sequences = read_trace(path, "gpt-oss-20b", GPT_OSS_20B.n_experts).sequences
    return [experts_TLK.astype(np.int64) for experts_TLK in sequences]


def counted(sequences: Iterable[Integers], sizes: ModelSizes = GPT_OSS_20B) -> Profile:
    """How often each expert was chosen."""
    counts_LE, n_sequences = np.zeros((sizes.n_layers, sizes.n_experts), dtype=np.int64), 0
    for experts_TLK in sequences:
        n_sequences += 1
        for layer, ids_TK in enumerate(experts_TLK.transpose(1, 0, 2)):
            counts_LE[layer] += np.bincount(ids_TK.reshape(-1), minlength=sizes.n_experts)
    return Profile({layer: tuple(own.tolist()) for layer, own in enumerate(counts_LE)}, sizes.top_k, n_sequences)


class Event(NamedTuple):
    """One layer of one step."""

    sequence: int
    phase: ChunkPhase
    layer: int
    plan: DispatchPlan


def played(
    technique: Technique, sequences: Sequence[Integers], sizes: ModelSizes = GPT_OSS_20B, prompt_share: float = 0.0
) -> Iterator[Event]:
    """One sequence after another, each a request; what lies where stays between them.

    prompt_share: of a sequence's tokens, the first so many are read as its prompt, in one step; all others are decoded
    one by one. All weights are 1 / K.
    """
    shown = Shown(technique.asks, sizes)
    for number, experts_TLK in enumerate(sequences):
        shown.start_request()
        n_prompt = round(prompt_share * len(experts_TLK))
        steps = [(experts_TLK[t : t + 1], "decode") for t in range(n_prompt, len(experts_TLK))]
        if n_prompt:
            steps.insert(0, (experts_TLK[:n_prompt], "prefill"))
        for step_TLK, phase in steps:
            shown.start_step(0)
            for layer, ids_TK in enumerate(step_TLK.swapaxes(0, 1)):
                routing = routing_of(ids_TK, sizes.n_experts)
                seen = shown.layer(layer, phase, routing, None, None)  # type: ignore[arg-type]
                plan = technique.plan(seen)
                shown.ran(seen, plan)
                yield Event(number, phase, layer, plan)  # type: ignore[arg-type]


def fewest_loads(events: Iterable[Sequence[int]], n_slots: int) -> int:
    """Belady's optimum, written apart from every cache here: of all caches of so many slots that load what an event
    calls and hold all of it together, the fewest loads. What is called again latest goes.

    events: what each calls, without repeats, n_slots at most.
    """
    events = [list(event) for event in events]
    next_of: list[dict[int, int]] = []
    coming: dict[int, int] = {}
    for number in range(len(events) - 1, -1, -1):
        next_of.append({called: coming.get(called, len(events)) for called in events[number]})
        coming.update(dict.fromkeys(events[number], number))
    next_of.reverse()
    held: dict[int, int] = {}
    """With the number of the event that calls it next."""
    loads = 0
    for event, after in zip(events, next_of, strict=True):
        missing = [called for called in event if called not in held]
        loads += len(missing)
        n_over = len(held) + len(missing) - n_slots
        if n_over > 0:
            idle = sorted((own for own in held if own not in after), key=lambda own: -held[own])
            for own in idle[:n_over]:
                del held[own]
        held |= after
        assert len(held) <= n_slots
    return loads


def calls_by_layer(sequences: Sequence[Integers]) -> list[NDArray[np.int64]]:
    """experts_TK of each layer, over all sequences."""
    return list(np.concatenate(sequences).transpose(1, 0, 2))
