"""What plans cost to make, and what a technique's calls cost beside dropless calls of the same rows.

python -m tests.benchmarks.dispatch_plans

One thread. Plans: one layer, 128 experts, top 8, uniform routing. Execution: 512 tokens, experts of width 1024;
the yardstick computes as many rows of each expert in a call of its own, every row a token's, none padded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engines.calls import CallKind, Calls
from engines.dispatch import DispatchPlan, Prediction, Routing
from engines.model.checkpoints import load_checkpoint
from engines.model.experts import ExpertWeights, GatedWeights, execute
from engines.model.transformer import Transformer
from engines.prediction import KnownState
from engines.profile import Profile
from engines.residency import Counts
from engines.shown import Shown
from engines.techniques.base import Technique
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import BuildContext, HiddenState, LayerInput, ModelSizes
from engines.techniques.layout.exact import Exact
from engines.techniques.move.two_buffers import TwoBuffersParameters
from engines.techniques.place.units import OneUnitParameters
from engines.techniques.presets import preset_parameters
from engines.techniques.route import PredictedRoute
from tests.benchmarks.measurement import Measurement, measured, write_page
from tests.benchmarks.timing import Figure, Turns, timed
from tests.techniques import that_plan_alone

N_TOKENS, N_EXPERTS, TOP_K = 4096, 128, 8
PREFILL_MS, DECODE_US, EXECUTION = 2.0, 30.0, 1.15
N_TURNS = 15
FEW_EXPERTS, CHUNK, HIDDEN, WIDTH = 16, 512, 512, 1024
STATIC = ("npumoe-base", "npumoe-t", "npumoe-tg", "npumoe", "blockwise", "dropping", "coreml-naive")


def random_routing(n_tokens: int, n_experts: int, top_k: int) -> Routing:
    generator = torch.Generator().manual_seed(n_tokens)
    ids_TK = torch.rand(n_tokens, n_experts, generator=generator).argsort(-1)[:, :top_k].contiguous()
    return Routing(ids_TK, torch.rand(n_tokens, top_k, generator=generator), n_experts)


def built(name: str, routing: Routing, sizes: ModelSizes) -> Technique:
    counts = tuple(routing.tokens_per_expert_E().tolist())
    profile = Profile({0: counts}, routing.expert_ids_TK.shape[1], 1)
    chunk = len(routing.expert_ids_TK)
    return preset_parameters(name)().build(BuildContext(chunk, sizes, profile))


def seconds_of(work: Callable[[], object], times: int) -> Figure:
    """Of one call, the median of the quiet turns."""
    turns = Turns()
    work()
    for _ in range(N_TURNS):
        found = timed(lambda: [work() for _ in range(times)])
        turns.add(found.seconds / times, found.is_quiet)
    return turns.figure(N_TURNS // 3)


def plan_costs() -> list[Measurement]:
    found = []
    routing = random_routing(N_TOKENS, N_EXPERTS, TOP_K)
    one = Routing(routing.expert_ids_TK[:1].clone(), routing.weights_TK[:1].clone(), N_EXPERTS)
    saliency_T = torch.rand(N_TOKENS, generator=torch.Generator().manual_seed(1))
    conditions = f"{N_EXPERTS} experts, top {TOP_K}"
    for name in that_plan_alone():
        technique = built(name, routing, ModelSizes(N_EXPERTS, TOP_K, 2048, 768, 6 * 2048 * 768, 1, 1))
        seen = LayerInput(0, "prefill", routing, saliency_T)
        counts = Counts(1, N_EXPERTS)
        counts.add(0, "prefill", routing.expert_ids_TK)
        first = LayerInput(0, "decode", one, counts=counts if technique.asks.counts else None)
        chunk, token = (
            seconds_of(lambda seen=seen, own=technique: own.plan(seen), 20),
            seconds_of(lambda seen=first, own=technique: own.plan(seen), 500),
        )
        found.append(
            measured(
                f"plan of {N_TOKENS} tokens",
                chunk.median * 1e3,
                "ms",
                f"{name}, {conditions}",
                target=PREFILL_MS,
                note=chunk.turns,
            )
        )
        found.append(
            measured(
                "plan of one decoded token",
                token.median * 1e6,
                "us",
                f"{name}, {conditions}",
                target=DECODE_US,
                note=token.turns,
            )
        )
    return [*found, *plan_costs_beside_a_gpu(routing, one), *plan_costs_of_what_moves(routing, one)]


def plan_costs_beside_a_gpu(routing: Routing, one: Routing) -> list[Measurement]:
    """Of techniques that ask what lies in the GPU's memory: none, one or all of a token's experts."""
    found = []
    sizes = ModelSizes(N_EXPERTS, TOP_K, 2048, 768, 6 * 2048 * 768, 1, 1)
    for name, lie_there in (("ndp-tp-lb", 0), *((name, n) for name in ("ndp-tp-pre", "ndp") for n in (0, 1, TOP_K))):
        technique = built(name, routing, sizes)
        shown = Shown(technique.asks, sizes)
        shown.start_step(0)
        if shown.residency is not None and shown.counts is not None:
            shown.residency.whole_LE("gpu")[0, one.expert_ids_TK[0][:lie_there].numpy()] = True
            shown.counts.decode_LE[0, 0] = 1  # the prompt's experts came before
        conditions = f"{name}, {lie_there} on the GPU, {N_EXPERTS} experts, top {TOP_K}"
        asked = [
            ("plan of one decoded token", shown.layer(0, "decode", one, None, None), 500, 1e6, "us", DECODE_US),
            (f"plan of {N_TOKENS} tokens", shown.layer(0, "prefill", routing, None, None), 20, 1e3, "ms", PREFILL_MS),
        ]
        for metric, seen, times, scale, unit, target in asked[: 1 if lie_there else 2]:
            cost = seconds_of(lambda seen=seen, own=technique: own.plan(seen), times)
            found.append(measured(metric, cost.median * scale, unit, conditions, target=target, note=cost.turns))
    return found


class GuessAtHand:
    """Tells the next layer's experts in no time: what making a guess takes is no part of a plan."""

    def __init__(self, guess: Routing) -> None:
        self._guess = guess

    def predict(self, known: KnownState) -> Prediction | None:
        return Prediction(known.layer + 1, self._guess)

    def rule(self, layer: int) -> None: ...


def guessing(executes: bool, guess: Routing, context: BuildContext) -> Technique:
    """router-pf, or prefetch-hint, with a guess at hand."""
    place = OneUnitParameters(unit="gpu").build(context, Exact())
    layouts = {"prefill": Exact(), "decode": Exact()}
    route = PredictedRoute(GuessAtHand(guess), executes_prediction=executes, speculates_prefill=False)
    move = TwoBuffersParameters().build(context)
    return ComposedTechnique("guess at hand", route, place, layouts, move, replace(context, units=("gpu",)))  # type: ignore[arg-type]


def plan_costs_of_what_moves(routing: Routing, one: Routing) -> list[Measurement]:
    """Of techniques that fetch experts, or that lie on several ranks: what else they ask for lies at hand."""
    model = Transformer(load_checkpoint("bundled:tiny-qwen3-moe", torch.float32))
    assert model.config.moe is not None
    layers = model.config.moe.sparse_layers
    sizes = ModelSizes(N_EXPERTS, TOP_K, 2048, 768, 6 * 2048 * 768, len(layers), len(layers))
    counts = tuple(routing.tokens_per_expert_E().tolist())
    profile = Profile(dict.fromkeys(layers, counts), TOP_K, 1)
    context = BuildContext(N_TOKENS, sizes, profile, None, model)

    def preset(name: str, n_ranks: int = 1, **changes: object) -> Technique:
        parameters = preset_parameters(name).model_validate(changes)
        return parameters.build(replace(context, ranks=n_ranks))

    few = one.expert_ids_TK[0][: TOP_K // 2]
    asked: list[tuple[str, Technique, Tensor | None]] = [
        ("fiddler, none on the GPU", preset("fiddler"), None),
        ("fiddler of the least max, none on the GPU", preset("fiddler", objective="max"), None),
        ("monde, none on the GPU", preset("monde"), None),
        *((f"{name}, all in slots", preset(name, slots=N_EXPERTS), one.expert_ids_TK[0])
          for name in ("lru", "lfu", "static", "moe-ondemand")),
        *((f"{name}, half of them in slots", preset(name, slots=N_EXPERTS // 2), few) for name in ("lru", "static")),
        ("on-demand", preset("on-demand"), None),
        ("prefetch-hint, its guess at hand", guessing(False, one, context), None),
        ("router-pf, its guess at hand", guessing(True, one, context), None),
        *((f"{name} over 4 ranks", preset(name, 4), None)
          for name in ("tensor-parallel", "expert-parallel", "tp-ep", "eplb")),
    ]  # fmt: skip
    found = []
    for conditions, technique, lie_there in asked:
        shown = Shown(technique.asks, sizes)
        if lie_there is not None and shown.residency is not None:
            for unit in technique.asks.slots:
                shown.residency.whole_LE(unit)[0, lie_there.numpy()] = True
        state = HiddenState(torch.zeros(1, 1), torch.zeros(1, 1), None)
        first = shown.layer(0, "decode", one, None, state)
        token = seconds_of(lambda seen=first, own=technique: own.plan(seen), 500)
        where = f"{conditions}, {N_EXPERTS} experts, top {TOP_K}"
        metric = "plan of one decoded token"
        found.append(measured(metric, token.median * 1e6, "us", where, target=DECODE_US, note=token.turns))
        if lie_there is None:
            whole = shown.layer(0, "prefill", routing, None, state)
            chunk = seconds_of(lambda seen=whole, own=technique: own.plan(seen), 20)
            metric = f"plan of {N_TOKENS} tokens"
            found.append(measured(metric, chunk.median * 1e3, "ms", where, target=PREFILL_MS, note=chunk.turns))
    return found


def random_experts() -> ExpertWeights:
    generator = torch.Generator().manual_seed(3)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    experts = (
        GatedWeights(matrix(WIDTH, HIDDEN), matrix(WIDTH, HIDDEN), matrix(HIDDEN, WIDTH)) for _ in range(FEW_EXPERTS)
    )
    return ExpertWeights(tuple(experts))


def same_rows_dropless(plan: DispatchPlan) -> DispatchPlan:
    """As many rows of each expert, in one call, every one a token's."""
    rows_E = np.bincount(plan.calls.expert_S, weights=plan.calls.rows_S, minlength=FEW_EXPERTS).astype(np.int64)
    expert_S = rows_E.nonzero()[0]
    rows_S = rows_E[expert_S]
    calls = Calls(expert_S, rows_S, rows_S, rows_S.cumsum() - rows_S, np.arange(len(expert_S)), (CallKind(),))
    n_rows = int(rows_S.sum())
    token_R = torch.arange(n_rows) % plan.n_tokens
    return replace(
        plan, token_R=token_R, weight_R=torch.ones(n_rows), calls=calls, dropped_pairs=plan.routed_pairs - n_rows
    )


def execution_ratios() -> list[Measurement]:
    experts, routing = random_experts(), random_routing(CHUNK, FEW_EXPERTS, 2)
    generator = torch.Generator().manual_seed(4)
    hidden_TH, saliency_T = torch.randn(CHUNK, HIDDEN, generator=generator), torch.rand(CHUNK, generator=generator)
    found = []
    for name in STATIC:
        technique = built(name, routing, ModelSizes(FEW_EXPERTS, 2, HIDDEN, WIDTH, 6 * HIDDEN * WIDTH, 1, 1))
        plan = technique.plan(LayerInput(0, "prefill", routing, saliency_T))
        plain = same_rows_dropless(plan)
        ours, theirs = Turns(), Turns()
        for own in (plan, plain):
            execute(own, hidden_TH, experts)
        # In turns, so that what slows the machine slows both.
        for _ in range(N_TURNS):
            for turns, own in ((ours, plan), (theirs, plain)):
                taken = timed(lambda own=own: [execute(own, hidden_TH, experts) for _ in range(3)])
                turns.add(taken.seconds / 3, taken.is_quiet)
        a, b = ours.figure(N_TURNS // 3), theirs.figure(N_TURNS // 3)
        conditions = (
            f"{name}, {CHUNK} tokens, {FEW_EXPERTS} experts, top 2, {len(plan.token_R)} rows, {len(plan.calls)} calls"
        )
        ratio = a.median / b.median
        found.append(
            measured(
                "execution, of dropless with the same rows",
                ratio,
                "x",
                conditions,
                target=EXECUTION,
                note=f"{a.turns}; {a.median * 1e3:.2f} ms",
            )
        )
    return found


def main() -> None:
    torch.set_num_threads(1)
    began_s = time.perf_counter()
    with torch.inference_mode():
        found = [*plan_costs(), *execution_ratios()]
    write_page(
        "dispatch-plans",
        "Dispatch plans",
        found,
        "Lower is better everywhere; targets are upper bounds. A plan is made for every sparse layer of every step. A"
        f" technique's calls compute padding like any other row. The whole took {time.perf_counter() - began_s:.0f} s.",
    )


if __name__ == "__main__":
    main()
