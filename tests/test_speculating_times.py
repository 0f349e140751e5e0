"""Time per token of source 003 from our plans, on demand and ahead, and the bytes that a token moves."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.dispatch import DispatchPlan, Prediction, Routing
from engines.model.model_config import parse_model_config
from engines.reference import own_sizes
from engines.shown import Shown
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import NOTHING, BuildContext, LayerInput, ModelSizes
from engines.techniques.layout.exact import Exact
from engines.techniques.move.two_buffers import TwoBuffers
from engines.techniques.place.units import OneUnitParameters
from engines.techniques.route import RoutersChoice
from tests.fakes.published import PUBLISHED

# --- TPOT, from plans -----------------------------------------------------------------------------------------------

N_EXPERTS, TOP_K = 8, 2
Seconds = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=2, max_size=6)
"""Of each layer: its compute, the copy of its experts."""


class ToldTruly:
    """Predicts what the next layer's router will choose."""

    asks = NOTHING

    def __init__(self, chosen: list[Routing]) -> None:
        self._chosen = chosen

    def executed(self, seen: LayerInput) -> Routing:
        return seen.routing if seen.predicted is None else seen.predicted

    def predict(self, seen: LayerInput) -> Prediction | None:
        ahead = seen.layer + 1
        return Prediction(ahead, self._chosen[ahead]) if ahead < len(self._chosen) else None


def step_plans(n_layers: int, prefetch: bool) -> list[DispatchPlan]:
    """Of one decoded token, by the engine's technique: fetched when a layer asks, or told truly and fetched ahead."""
    sizes = ModelSizes(N_EXPERTS, TOP_K, 8, 12, 100, n_layers, n_layers)
    chosen = [Routing(torch.tensor([[n % 8, (n + 3) % 8]]), torch.full((1, 2), 0.5), 8) for n in range(n_layers)]
    context = BuildContext(1, sizes)
    gpu, exact = OneUnitParameters(unit="gpu").build(context, Exact()), Exact()
    move = TwoBuffers(dict(pairwise(range(n_layers))), N_EXPERTS, sizes.expert_bytes, prefetch)
    route = ToldTruly(chosen) if prefetch else RoutersChoice()
    technique = ComposedTechnique("told", route, gpu, {"prefill": exact, "decode": exact}, move, context)
    shown, plans = Shown(technique.asks, sizes), []
    shown.start_step(0)
    for layer, routing in enumerate(chosen):
        seen = shown.layer(layer, "decode", routing, None, None)
        plans.append(technique.plan(seen))
        shown.ran(seen, plans[-1])
    return plans


def tpot(plans: list[DispatchPlan], times: list[tuple[float, float]]) -> float:
    """When the last layer is done: one stream copies, one computes. A layer's calls wait for all its experts; what its
    plan moves is copied from when the layer before is done (its router has then chosen), in the plan's order."""
    computed = copied = 0.0
    arrives = dict.fromkeys(range(len(plans)), 0.0)
    for layer, (plan, (compute, _)) in enumerate(zip(plans, times, strict=True)):
        own = [t for t in plan.transfers if t.layer == layer]
        ahead = [t for t in plan.transfers if t.layer != layer]
        decided = computed
        for transfer in own:
            copied = max(copied, decided) + times[layer][1] / TOP_K
            arrives[transfer.layer] = copied
        begins = max(computed, arrives[layer])
        for transfer in ahead:  # Algorithm 1, line 9: waits for this layer's experts, then copies the next one's
            copied = max(copied, begins) + times[transfer.layer][1] / TOP_K
            arrives[transfer.layer] = copied
        computed = begins + compute
    return computed


@given(Seconds)
def test_time_per_token_of_our_plans_is_the_sources_sums(times: list[tuple[float, float]]) -> None:
    """On demand: the sum of compute and copy. Ahead: the first copy, then in each layer the longer of its compute and
    the copy of the next one's experts. The difference is the sum of the shorter ones."""
    on_demand, ahead = (tpot(step_plans(len(times), prefetch), times) for prefetch in (False, True))
    assert on_demand == pytest.approx(sum(map(sum, times)))
    pairs = [(compute, copy) for (compute, _), (_, copy) in zip(times, [*times[1:], (0.0, 0.0)], strict=True)]
    assert ahead == pytest.approx(times[0][1] + sum(map(max, pairs)))
    assert on_demand - ahead == pytest.approx(sum(map(min, pairs)), abs=1e-9)


def test_a_token_moves_the_bytes_of_its_experts() -> None:
    """Qwen3-30B-A3B on demand: 48 layers, 8 experts of 9.44 MB each, 3.62 GB."""
    config = parse_model_config(PUBLISHED["Qwen3-30B-A3B"].config, None)
    sizes = own_sizes(config)
    assert sizes is not None
    move = TwoBuffers({}, sizes.n_experts, sizes.expert_bytes, prefetch=False)
    context = BuildContext(1, sizes)
    gpu, exact = OneUnitParameters(unit="gpu").build(context, Exact()), Exact()
    technique = ComposedTechnique("a", RoutersChoice(), gpu, {"prefill": exact, "decode": exact}, move, context)
    shown = Shown(technique.asks, sizes)
    routing = Routing(torch.arange(8)[None], torch.full((1, 8), 1 / 8), 128)
    plans = [technique.plan(shown.layer(layer, "decode", routing, None, None)) for layer in range(sizes.n_layers)]
    assert sum(plan.counters().bytes_moved for plan in plans) == 48 * 8 * 3 * 2048 * 768 * 2
    assert round(48 * 8 * 3 * 2048 * 768 * 2 / 1e9, 2) == 3.62
