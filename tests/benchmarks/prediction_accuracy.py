"""What executing predicted experts does to the answers of the bundled model, against the recall of the predictions.

python -m tests.benchmarks.prediction_accuracy

Predictors: the next router from q and from s, estimators of several training lengths and seeds, a hybrid; and guesses
of known recall, which take the router's own choice for a part of the tokens, drawn from a seed, and draw the others'
experts, so that there are points from chance to a recall of 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from devices.base import Unit
from engines.base import unheard
from engines.dispatch import Routing
from engines.estimator import EstimatorRecipe
from engines.fidelity import kl_divergence
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.model.transformer import Transformer
from engines.prediction import EstimatorPredictor, ExpertPredictor, HybridPredictor, RouterPredictor, next_routers
from engines.prediction_accuracy import StateKeeper, foreseen
from engines.profile import Learnt
from engines.profiling import profile_of, read_prompts
from engines.reference import ReferenceEngine, own_sizes
from engines.shown import Shown
from engines.techniques.base import Technique
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import BuildContext, LayerInput
from engines.techniques.layout.exact import Exact
from engines.techniques.move.nothing import NothingMoves
from engines.techniques.place.units import OneUnitParameters
from engines.techniques.presets import DroplessParameters, dropless
from engines.techniques.route import PredictedRoute
from harness.schema import WORKLOAD
from tests.benchmarks.measurement import FOLDER, Measurement, measured, write_page
from workloads.base import Workload

NAME = "prediction-accuracy"
MODEL = "bundled:tiny-qwen3-moe"
CHUNK = 512
TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "one needle, 2048": ({"name": "ruler_niah_single_2", "length": 2048, "limit": 30}, "string_match_all"),
    "endings": ({"name": "hellaswag", "data": "generated", "num_fewshot": 2, "limit": 60}, "acc"),
}
PROSE = {"name": "fidelity", "length": 256, "limit": 12}
"""Its first half is read, its second half is asked about."""
LEARNT, HELD_OUT = {"one needle, 2048": 3, "endings": 24, "prose": 24}, 4
"""Prompts that predictors learn from, and one in so many of them more."""
STEPS = (30, 300, 2000)
SEEDS = (0, 1, 2)
ALL, DECODED = "all tokens", "decoded tokens"
DRAWN = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.96)
"""Tokens that take the router's choice, where those of all others are drawn."""
FROM_Q = (0.5, 0.75, 0.9)
"""The same, where all others take the prediction from q."""
TOP, KL = "same top 1", "KL"
Kind = Literal["predicted", "q, in part true", "drawn, in part true"]


class Arm(NamedTuple):
    """predictor: of the tokens that do not take their router's choice; None: their experts are drawn."""

    name: str
    kind: Kind
    predictor: ExpertPredictor
    share_true: float = 0.0
    draws: bool = False


class Mixed(PredictedRoute):
    """The router's choice for a part of the tokens of each layer, drawn from a seed; the first layer routes truly.

    Experts that are drawn have the weights of those in whose place they are.
    """

    def __init__(self, arm: Arm, speculates_prefill: bool) -> None:
        super().__init__(arm.predictor, executes_prediction=True, speculates_prefill=speculates_prefill)
        self._share_true, self._draws = arm.share_true, arm.draws
        self._generator = torch.Generator().manual_seed(0)
        self._n_pairs = self._n_recalled = 0

    def executed(self, seen: LayerInput) -> Routing:
        own, told = seen.routing, seen.predicted
        if told is None:
            return own
        n_tokens, top_k = own.expert_ids_TK.shape
        is_true_T1 = torch.rand((n_tokens, 1), generator=self._generator) < self._share_true
        if self._draws:
            drawn_TE = torch.rand((n_tokens, own.n_experts), generator=self._generator)
            told = Routing(drawn_TE.argsort(-1)[:, :top_k], own.weights_TK, own.n_experts)
        ids_TK = torch.where(is_true_T1, own.expert_ids_TK, told.expert_ids_TK)
        self._n_pairs += ids_TK.numel()
        self._n_recalled += int((own.expert_ids_TK[:, :, None] == ids_TK[:, None, :]).any(-1).sum())
        return Routing(ids_TK, torch.where(is_true_T1, own.weights_TK, told.weights_TK), own.n_experts)

    def rules(self, layers: Sequence[int]) -> None:
        """What is executed is drawn when a plan is made."""

    def take_recall(self) -> float:
        """Percent, since it was last asked: of the experts that routers chose, those that were executed."""
        found = 100 * self._n_recalled / self._n_pairs
        self._n_pairs = self._n_recalled = 0
        return found


class Speculating:
    """`TechniqueParameters` of one arm."""

    technique = NAME
    lossless, loads_from_file, wanted_prompts = False, False, 0
    learns: frozenset[Learnt] = frozenset()
    units: tuple[Unit, ...] = ("cpu",)
    backbone: Unit = "cpu"

    def __init__(self, route: PredictedRoute) -> None:
        self._route = route

    def build(self, context: BuildContext) -> ComposedTechnique:
        place = OneUnitParameters().build(context, Exact())
        layouts = {"prefill": Exact(), "decode": Exact()}
        return ComposedTechnique(NAME, self._route, place, layouts, NothingMoves(), context)  # type: ignore[arg-type]


class Point(NamedTuple):
    """recall, value, error: percent, but nats of KL; error is a standard one."""

    arm: str
    kind: str
    where: str
    what: str
    recall: float
    value: float
    error: float


def workload(spec: dict[str, Any]) -> Workload:
    return WORKLOAD.read(spec).build(None, allow_code=False)


# --- predictors ------------------------------------------------------------------------------------------------------


def arms(checkpoint: Checkpoint) -> tuple[list[Arm], list[Measurement]]:
    """And the recall, cosine and rank alignment of each predictor, by layer."""
    model, own, held = Transformer(checkpoint), StateKeeper(), StateKeeper()
    prompts, others = [], []
    for name, n in LEARNT.items():
        asked = workload(PROSE if name == "prose" else TASKS[name][0])
        given = asked.calibration_prompts(checkpoint.tokenizer, checkpoint.config.max_length, n + -(-n // HELD_OUT))
        prompts += given[:n]
        others += given[n:]
    profile = profile_of(model, model.new_cache(), prompts, CHUNK, True, also=own)
    read_prompts(model, model.new_cache(), others, CHUNK, [held])
    states = {"calibration": own.states(), "held out": held.states()}
    routers, vectors_EH = next_routers(model.config, model.weights), profile.default_vectors_EH
    assert vectors_EH is not None
    router_q = RouterPredictor(routers, "q", vectors_EH)
    found = [Arm("router, s", "predicted", RouterPredictor(routers, "s")), Arm("router, q", "predicted", router_q)]
    rows: list[Measurement] = []
    for n_steps, seed in [*((n, SEEDS[0]) for n in STEPS), *((STEPS[-1], seed) for seed in SEEDS[1:])]:
        seen = foreseen(profile, model, states, EstimatorRecipe(n_steps=n_steps, seed=seed))  # type: ignore[arg-type]
        assert seen.estimator is not None
        name, estimator = f"{n_steps} steps, seed {seed}", EstimatorPredictor(routers, vectors_EH, seen.estimator)
        found.append(Arm(f"estimator, {name}", "predicted", estimator))
        names = {"estimator": f"estimator, {name}"}
        if n_steps == STEPS[-1] and seed == SEEDS[0]:
            hybrid = HybridPredictor(router_q, estimator, frozenset(seen.estimated_layers))
            found.append(Arm(f"hybrid, {name}", "predicted", hybrid))
            names |= {"hybrid": f"hybrid, {name}", "router q": "router, q", "router s": "router, s"}
        for row in seen.accuracies:
            if row.predictor in names:
                ranks = " ".join(f"{share:.2f}" for share in row.rank_alignment)
                note = f"by rank {ranks}" + ("" if row.cosine is None else f", cosine {row.cosine:.3f}")
                where = f"{names[row.predictor]}, layer {row.layer}, {row.data}"
                rows.append(measured("recall of true states", 100 * row.recall, "%", where, note=note))
    found += [Arm(f"q, {100 * p:.0f} % true", "q, in part true", router_q, p) for p in FROM_Q]
    found += [Arm(f"drawn, {100 * p:.0f} % true", "drawn, in part true", router_q, p, True) for p in DRAWN]
    return found, rows


# --- what it does ----------------------------------------------------------------------------------------------------


def task_score(checkpoint: Checkpoint, technique: Any, name: str) -> tuple[float, float]:
    """Percent right of all samples, and its standard error."""
    spec, metric = TASKS[name]
    engine, asked = ReferenceEngine(checkpoint, technique, CHUNK), workload(spec)
    requests = asked.requests(checkpoint.tokenizer, engine.max_length)
    completions = [engine.run(request, unheard) for request in requests]
    scores = asked.score(requests, completions)
    values = [s.value for s in scores if s.sample_id is not None and s.metric == metric]
    return 100 * mean_of(values)[0], 100 * mean_of(values)[1]


def mean_of(values: Sequence[float]) -> tuple[float, float]:
    """And its standard error."""
    told = torch.tensor(values, dtype=torch.float64)
    return float(told.mean()), float(told.std() / len(values) ** 0.5)


def texts(checkpoint: Checkpoint) -> list[tuple[Tensor, Tensor]]:
    """(read, asked about)."""
    requests = workload(PROSE).requests(checkpoint.tokenizer, checkpoint.config.max_length)
    return [(torch.tensor(r.prompt_ids), torch.tensor(r.continuation_ids)) for r in requests]


@torch.inference_mode()
def spoken(model: Transformer, technique: Technique, read_T: Tensor, asked_T: Tensor, decodes: bool) -> Tensor:
    """Log-probabilities of what follows each asked token. decodes: one by one; else all is read as a prompt."""
    sizes = own_sizes(model.config)
    shown, cache = Shown(technique.asks, sizes), model.new_cache()
    cache.start(len(read_T) + len(asked_T))
    steps = [read_T, *asked_T.split(1)] if decodes else [torch.cat([read_T, asked_T])]
    found = []
    for number, step_T in enumerate(steps):
        shown.start_step(0)
        phase: Any = "decode" if number else "prefill"
        hidden_TH, _ = model.forward(step_T, cache, technique, phase, None, shown=shown)
        found.append(model.logits(hidden_TH[-len(asked_T) :]).float())
    return torch.cat(found)[-len(asked_T) :].log_softmax(-1)


def prose_scores(
    model: Transformer,
    technique: Technique,
    asked: Sequence[tuple[Tensor, Tensor]],
    own: Sequence[Tensor],
    decodes: bool,
) -> dict[str, tuple[float, float]]:
    """Against what the model says of itself, own: of each text."""
    same, kl = [], []
    for (read_T, asked_T), own_AL in zip(asked, own, strict=True):
        told_AL = spoken(model, technique, read_T, asked_T, decodes)
        same.append(100 * float((own_AL.argmax(-1) == told_AL.argmax(-1)).double().mean()))
        kl.append(float(kl_divergence(own_AL, told_AL).mean()))
    return {TOP: mean_of(same), KL: mean_of(kl)}


def points(checkpoint: Checkpoint, given: Sequence[Arm]) -> Iterator[Point]:
    model, asked = Transformer(checkpoint), texts(checkpoint)
    own = [spoken(model, dropless(), *text, decodes=False) for text in asked]
    for name in TASKS:
        yield Point(
            "the router's own", "predicted", ALL, name, 100.0, *task_score(checkpoint, DroplessParameters(), name)
        )
    for where in (ALL, DECODED):
        for what, value in ((TOP, 100.0), (KL, 0.0)):
            yield Point("the router's own", "predicted", where, what, 100.0, value, 0.0)
    for arm in given:
        for name in TASKS:
            route = Mixed(arm, speculates_prefill=True)
            score = task_score(checkpoint, Speculating(route), name)
            yield Point(arm.name, arm.kind, ALL, name, route.take_recall(), *score)
        for where in (ALL, DECODED):
            route = Mixed(arm, speculates_prefill=where == ALL)
            technique = Speculating(route).build(BuildContext(CHUNK, own_sizes(checkpoint.config), model=model))
            found = prose_scores(model, technique, asked, own, where == DECODED)
            recall = route.take_recall()
            for what, score in found.items():
                yield Point(arm.name, arm.kind, where, what, recall, *score)


# --- the page --------------------------------------------------------------------------------------------------------

COLUMNS = [(ALL, name) for name in TASKS] + [(where, what) for where in (ALL, DECODED) for what in (TOP, KL)]


def table(found: Sequence[Point]) -> str:
    by = {(p.arm, p.where, p.what): p for p in found}
    head = [f"{what}{', nat' if what == KL else ', %'} ({where})" for where, what in COLUMNS]
    lines = [f"| arm | recall, % | {' | '.join(head)} |", "|" + "---|" * (2 + len(head))]
    for arm in dict.fromkeys(p.arm for p in found):
        own = [by[arm, *column] for column in COLUMNS]
        recalls = sorted(p.recall for p in own)
        told = f"{recalls[0]:.0f} to {recalls[-1]:.0f}" if recalls[-1] - recalls[0] > 0.5 else f"{recalls[-1]:.0f}"
        cells = [f"{p.value:.2g} ± {p.error:.1g}" if p.what == KL else f"{p.value:.1f} ± {p.error:.1f}" for p in own]
        lines.append(f"| {arm} | {told} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: Sequence[Point]) -> None:
    import altair as alt

    frame = pd.DataFrame(found)
    frame["low"], frame["high"] = frame["value"] - frame["error"], frame["value"] + frame["error"]
    frame["shown"] = [f"{p.what}, {p.where}" if p.what in (TOP, KL) else p.what for p in found]
    panels = []
    for title, whats, of in (
        ("samples right, %", tuple(TASKS), ALL),
        ("same likeliest token, %", (TOP,), None),
        ("KL, nat", (KL,), None),
    ):
        own = frame[frame["what"].isin(whats) & ((frame["where"] == of) if of else True)]
        if whats == (KL,):
            own = own[own["recall"] < 100]
        scale = alt.Scale(type="log") if whats == (KL,) else alt.Scale(domain=[0, 100])
        base = alt.Chart(own).encode(
            x=alt.X("recall:Q", title="recall of the predictions, %", scale=alt.Scale(domain=[0, 100])),
            color=alt.Color("shown:N", title=None, legend=alt.Legend(orient="bottom", labelLimit=260, columns=1)),
        )
        bars = base.mark_rule(opacity=0.5).encode(y=alt.Y("low:Q", scale=scale, title=title), y2="high:Q")
        marks = base.mark_point(filled=True, size=55).encode(
            y=alt.Y("value:Q", scale=scale, title=title),
            shape=alt.Shape("kind:N", title=None, legend=alt.Legend(orient="bottom", columns=1)),
        )
        line = base.transform_filter("datum.kind == 'drawn, in part true'").mark_line(opacity=0.4).encode(y="value:Q")
        panels.append((bars + line + marks).properties(width=260, height=260))
    alt.hconcat(*panels).resolve_scale(color="independent", shape="shared").save(FOLDER / f"{NAME}.svg")


REMARKS = """The bundled model answers while it executes predicted experts, those of its second to fourth layer. For all
tokens (`speculate_prefill = true`): needles in 2048 tokens, twice what training showed ({n_needles} samples); endings
of stories ({n_endings} samples), which are read only; and what it says of the next token of generated prose ({n_texts}
texts, the second {n_asked} tokens of each), against what it says with its own experts: the share of positions with the
same likeliest token, and the KL divergence. For decoded tokens, as the source does: the same prose, its first half read
truly and its second decoded token by token on predicted experts.

± is a standard error over samples or texts. Recall: of the experts that the routers chose in that run, the share that
was executed; where it differs between the columns both ends are given. "True": that part of the tokens of each layer
took its router's choice; the others took the prediction from q, or experts drawn evenly with the weights of those in
whose place they stand (chance recalls {chance:.1f} %). Estimators learnt from {n_prompts} prompts of the same kinds,
which are not asked.

{table}

![Answers against recall](prediction-accuracy.svg)

{lost}

Spread of {n_seeds} estimators that differ in their seed alone: {spread}.

At one recall predictions cost far less than drawn experts; of a token's two experts they miss mostly the lighter one
(by rank, below).

Every figure. "Recall of true states" is of predictions on the states of the model as it is, layer by layer: of tokens
that the estimator learnt from, of tokens of the same prompts that were held back from it, and of other prompts. The
note has the share of tokens whose expert of that rank by weight is right, and the cosine of what the router is shown
with its true input:"""


def lost(found: Sequence[Point]) -> str:
    """From which recall of drawn guesses on a task is worse than with the model's own experts."""
    parts = []
    for name in TASKS:
        own = next(p for p in found if p.what == name)
        worse = [
            p for p in found
            if p.what == name and p.kind == "drawn, in part true" and p.value + 2 * p.error < own.value - 2 * own.error
        ]  # fmt: skip
        least = min((p for p in found if p.what == name), key=lambda p: p.recall)
        begins = f"from a recall of {max(p.recall for p in worse):.0f} % down" if worse else "nowhere"
        parts.append(f"{name} {begins} ({own.value:.0f} % right, {least.value:.0f} % at chance)")
    return (
        "Where drawn guesses cost samples beyond two standard errors of both: "
        + "; ".join(parts)
        + ". Four endings are"
        " offered, so a quarter is right by chance."
    )


def spread(found: Sequence[Point]) -> str:
    own = pd.DataFrame([p for p in found if p.arm.startswith(f"estimator, {STEPS[-1]} steps")])
    parts = []
    for (where, what), group in own.groupby(["where", "what"], sort=False):
        unit, form = (" nat", ".2g") if what == KL else (" %", ".1f")
        low, high = group["value"].min(), group["value"].max()
        parts.append(f"{what} ({where}) {low:{form}} to {high:{form}}{unit}")
    return f"recall {own['recall'].min():.1f} to {own['recall'].max():.1f} %; " + ", ".join(parts)


def main() -> None:
    checkpoint = load_checkpoint(MODEL, torch.float32)
    given, rows = arms(checkpoint)
    found = list(points(checkpoint, given))
    for p in found:
        unit = "nat" if p.what == KL else "%"
        note = f"standard error {p.error:.2g}, recall as executed {p.recall:.1f} %"
        rows.append(measured(p.what, p.value, unit, f"{p.arm}, {p.where}", note=note))
    draw(found)
    write_page(NAME, "What predicted experts do to the answers", rows, remarks(checkpoint, found))


def remarks(checkpoint: Checkpoint, found: Sequence[Point]) -> str:
    assert checkpoint.config.moe is not None
    return REMARKS.format(
        n_needles=TASKS["one needle, 2048"][0]["limit"],
        n_endings=TASKS["endings"][0]["limit"],
        n_texts=PROSE["limit"],
        n_asked=PROSE["length"] // 2,  # type: ignore[operator]
        chance=100 * checkpoint.config.moe.top_k / checkpoint.config.moe.n_experts,
        n_prompts=sum(LEARNT.values()),
        table=table(found),
        lost=lost(found),
        n_seeds=len(SEEDS),
        spread=spread(found),
    )


if __name__ == "__main__":
    main()
