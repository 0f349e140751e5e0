"""What executing predicted experts does to the answers of the bundled model, against the recall of the predictions.

python -m tests.benchmarks.prediction_accuracy

Predictors: the next router from q and from s, estimators of several training lengths and seeds, and the router's own
choice for a part of the tokens, which fills the curve up to a recall of 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pandas as pd
import torch

from devices.base import Unit
from engines.base import unheard
from engines.dispatch import Routing
from engines.estimator import EstimatorRecipe
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.model.transformer import Transformer
from engines.prediction import EstimatorPredictor, ExpertPredictor, RouterPredictor, next_routers
from engines.prediction_accuracy import StateKeeper, foreseen
from engines.profile import Learnt
from engines.profiling import profile_of, read_prompts
from engines.reference import ReferenceEngine
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import BuildContext, LayerInput
from engines.techniques.layout.exact import Exact
from engines.techniques.move.nothing import NothingMoves
from engines.techniques.place.units import OneUnitParameters
from engines.techniques.presets import DroplessParameters
from engines.techniques.route import PredictedRoute
from harness.schema import WORKLOAD
from tests.benchmarks.measurement import FOLDER, Measurement, measured, write_page
from workloads.base import Workload

NAME = "prediction-accuracy"
MODEL = "bundled:tiny-qwen3-moe"
TASKS = {"one needle": "ruler_niah_single_2", "four needles": "ruler_niah_multikey_1"}
LENGTH, N_SAMPLES, N_PROMPTS, N_HELD_OUT, CHUNK = 512, 40, 16, 4, 512
STEPS = (30, 300, 3000)
SEEDS = (0, 1, 2)
SHARES = (0.5, 0.75, 0.9)
"""Of the tokens that take their router's choice in place of a prediction from q."""
WHERE = {False: "decoded tokens", True: "all tokens"}


class Arm(NamedTuple):
    name: str
    predictor: ExpertPredictor
    share_true: float = 0.0


class Mixed(PredictedRoute):
    """The router's choice for a part of the tokens of each layer, drawn from a seed."""

    def __init__(self, arm: Arm, speculates_prefill: bool) -> None:
        super().__init__(arm.predictor, executes_prediction=True, speculates_prefill=speculates_prefill)
        self._share_true = arm.share_true
        self._generator = torch.Generator().manual_seed(0)
        self.n_pairs = self.n_recalled = 0

    def executed(self, seen: LayerInput) -> Routing:
        own, told = seen.routing, seen.predicted
        if told is None:
            return own
        is_true_T1 = torch.rand((len(own.expert_ids_TK), 1), generator=self._generator) < self._share_true
        ids_TK = torch.where(is_true_T1, own.expert_ids_TK, told.expert_ids_TK)
        self.n_pairs += ids_TK.numel()
        self.n_recalled += int((own.expert_ids_TK[:, :, None] == ids_TK[:, None, :]).any(-1).sum())
        return Routing(ids_TK, torch.where(is_true_T1, own.weights_TK, told.weights_TK), own.n_experts)


class Speculating:
    """`TechniqueParameters` of one arm."""

    technique = NAME
    static_shapes, lossless, loads_from_file, wanted_prompts = False, False, False, 0
    learns: frozenset[Learnt] = frozenset()
    units: tuple[Unit, ...] = ("cpu",)
    backbone: Unit = "cpu"

    def __init__(self, route: PredictedRoute) -> None:
        self._route = route

    def build(self, context: BuildContext) -> ComposedTechnique:
        place = OneUnitParameters().build(context, Exact())
        return ComposedTechnique(
            NAME, self._route, place, {"prefill": Exact(), "decode": Exact()}, NothingMoves(), context
        )


def task(name: str) -> Workload:
    spec = WORKLOAD.read({"name": TASKS[name], "length": LENGTH, "limit": N_SAMPLES})
    return spec.build(None, allow_code=False)


def arms(checkpoint: Checkpoint) -> tuple[list[Arm], list[Measurement]]:
    """And the recall, cosine and rank alignment of each predictor on held-out prompts of the same tasks."""
    model, own, held = Transformer(checkpoint), StateKeeper(), StateKeeper()
    prompts, others = [], []
    for name in TASKS:
        n = N_PROMPTS + N_HELD_OUT
        given = task(name).calibration_prompts(checkpoint.tokenizer, checkpoint.config.max_length, n)
        prompts += given[:N_PROMPTS]
        others += given[N_PROMPTS:]
    profile = profile_of(model, model.new_cache(), prompts, CHUNK, True, also=own)
    read_prompts(model, model.new_cache(), others, CHUNK, [held])
    states = {"calibration": own.states(), "held out": held.states()}
    routers, vectors_EH = next_routers(model.config, model.weights), profile.default_vectors_EH
    assert vectors_EH is not None
    router_q = RouterPredictor(routers, "q", vectors_EH)
    found = [Arm("router, s", RouterPredictor(routers, "s")), Arm("router, q", router_q)]
    found += [Arm(f"router, q; {100 * share:.0f} % true", router_q, share) for share in SHARES]
    rows: list[Measurement] = []
    n_routers = len(found)
    for n_steps, seed in [*((n, 0) for n in STEPS), *((STEPS[-1], seed) for seed in SEEDS[1:])]:
        seen = foreseen(profile, model, states, EstimatorRecipe(n_steps=n_steps, seed=seed))  # type: ignore[arg-type]
        assert seen.estimator is not None
        name = f"estimator, {n_steps} steps, seed {seed}"
        found.append(Arm(name, EstimatorPredictor(routers, vectors_EH, seen.estimator)))
        for row in seen.accuracies:
            if row.predictor == "estimator" or (row.predictor != "hybrid" and len(found) == n_routers + 1):
                shown = name if row.predictor == "estimator" else row.predictor.replace(" ", ", ")
                where = f"{shown}, layer {row.layer}, {row.data}"
                ranks = " ".join(f"{share:.2f}" for share in row.rank_alignment)
                cosine = "" if row.cosine is None else f", cosine {row.cosine:.3f}"
                rows.append(
                    measured("recall of true states", 100 * row.recall, "%", where, note=f"by rank {ranks}{cosine}")
                )
    return found, rows


def scored(checkpoint: Checkpoint, technique: Any) -> dict[str, float]:
    engine = ReferenceEngine(checkpoint, technique, CHUNK)
    found = {}
    for name in TASKS:
        workload = task(name)
        requests = workload.requests(checkpoint.tokenizer, engine.max_length)
        completions = [engine.run(request, unheard) for request in requests]
        found[name] = 100 * next(s.value for s in workload.score(requests, completions) if s.sample_id is None)
    return found


def points(checkpoint: Checkpoint, given: Sequence[Arm]) -> Iterator[dict[str, Any]]:
    reference = scored(checkpoint, DroplessParameters())
    for where in WHERE.values():
        yield {"arm": "the router's own", "where": where, "recall": 100.0} | reference
    for arm in given:
        for speculates_prefill, where in WHERE.items():
            route = Mixed(arm, speculates_prefill)
            accuracy = scored(checkpoint, Speculating(route))
            yield {"arm": arm.name, "where": where, "recall": 100 * route.n_recalled / route.n_pairs} | accuracy


def table(found: Sequence[dict[str, Any]]) -> str:
    head = [f"{where}: {what} %" for where in WHERE.values() for what in ("recall", *TASKS)]
    lines = [f"| arm | {' | '.join(head)} |", "|" + "---|" * (1 + len(head))]
    for arm in dict.fromkeys(point["arm"] for point in found):
        own = {point["where"]: point for point in found if point["arm"] == arm}
        cells = [f"{own[where][what]:.1f}" for where in WHERE.values() for what in ("recall", *TASKS)]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: Sequence[dict[str, Any]]) -> None:
    import altair as alt

    long = pd.DataFrame(found).melt(["arm", "where", "recall"], list(TASKS), "task", "accuracy")
    base = alt.Chart(long).encode(
        x=alt.X("recall:Q", title="recall of the predictions, %", scale=alt.Scale(zero=False)),
        y=alt.Y("accuracy:Q", title="samples right, %", scale=alt.Scale(domain=[0, 100])),
        color=alt.Color("task:N", title=None),
    )
    halves = [
        (own.mark_line(opacity=0.4) + own.mark_point(filled=True, size=60)).properties(
            width=330, height=300, title=f"predicted for {where}"
        )
        for where in WHERE.values()
        for own in [base.transform_filter(alt.datum.where == where)]
    ]
    alt.hconcat(*halves).save(FOLDER / f"{NAME}.svg")


REMARKS = """The bundled model finds needles in {length} tokens while it executes predicted experts: those of its
second to fourth layer, for decoded tokens only, as the source does, or for the tokens of the prompt too. {n} samples a
cell, so that 50 % has a standard error of 8 points. Recall: of the experts that the routers chose in that run, the
share that was executed. "True": for that part of the tokens and layers the router's choice was executed in place of the
prediction from q. Estimators learnt from {prompts} prompts of each task, which are not asked.

{table}

![Accuracy against recall](prediction-accuracy.svg)

{fall}

Spread of {n_seeds} estimators that differ in their seed alone: {spread}.

Every figure. "Recall of true states" is of predictions on the states of the model as it is, layer by layer; the note
has the share of tokens whose expert of that rank by weight is right, and the cosine of what the router is shown with
its true input:"""


def fall(found: Sequence[dict[str, Any]]) -> str:
    """What the curve comes to."""
    if all(point[name] == found[0][name] for point in found for name in TASKS):
        least = min(point["recall"] for point in found)
        return (
            "No arm lost a sample: these needles leave more room than such errors take, so the curve is flat down to a"
            f" recall of {least:.0f} %."
        )
    return "Accuracy falls with recall."


def spread(found: Sequence[dict[str, Any]]) -> str:
    own = pd.DataFrame([p for p in found if p["arm"].startswith(f"estimator, {STEPS[-1]} steps")])
    parts = []
    for where, group in own.groupby("where", sort=False):
        for what in ("recall", *TASKS):
            parts.append(f"{what} over {where} {group[what].min():.1f} to {group[what].max():.1f} %")
    return ", ".join(parts)


def main() -> None:
    checkpoint = load_checkpoint(MODEL, torch.float32)
    given, rows = arms(checkpoint)
    found = list(points(checkpoint, given))
    for point in found:
        for what, metric in (("recall", "recall as executed"), *((name, name) for name in TASKS)):
            rows.append(measured(metric, point[what], "%", f"{point['arm']}, {point['where']}"))
    draw(found)
    remarks = REMARKS.format(
        fall=fall(found),
        length=LENGTH,
        n=N_SAMPLES,
        prompts=N_PROMPTS,
        table=table(found),
        n_seeds=len(SEEDS),
        spread=spread(found),
    )
    write_page(NAME, "What predicted experts do to the answers", rows, remarks)


if __name__ == "__main__":
    main()
