"""NPUMoE (000): its worked examples of graphs and placement, and its pruning read a second time, slowly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.dispatch import DispatchPlan, Routing
from engines.errors import EngineError
from engines.model.experts import execute
from engines.pricing.costs import SheetCosts, costs_of
from engines.profile import Profile
from engines.techniques.base import Technique
from engines.techniques.context import BuildContext, LayerInput, ModelSizes
from engines.techniques.layout.tiers import GRAPH_BYTES
from engines.techniques.presets import preset_parameters
from tests.techniques import built
from tests.test_experts import random_experts
from tests.toy_sheet import toy_sheet

pytestmark = pytest.mark.numbers

MIB = 1 << 20
PHI = ModelSizes(
    n_experts=16, top_k=2, hidden=4096, expert_width=6400, expert_bytes=150 * MIB, n_layers=1, n_sparse_layers=1
)
SKEWED = (64, 62, 61, 60, *[20] * 12)
"""Of 16 experts: four above the mean of 30.4 and twelve below it."""


def routing_of(loads: Sequence[int], top_k: int = 1) -> Routing:
    """One choice a token, so many for each expert."""
    experts = [expert for expert, load in enumerate(loads) for _ in range(load)]
    ids_TK = torch.tensor(experts).reshape(-1, top_k)
    return Routing(ids_TK, torch.ones(ids_TK.shape), len(loads))


def technique(name: str, chunk: int, counts: Sequence[int] = SKEWED, top_k: int = 2, **parameters: object) -> Technique:
    profile = Profile({0: tuple(counts)}, top_k, 1)
    return built(name, chunk, profile, PHI, **parameters)


def shapes(plan: DispatchPlan) -> list[tuple[int, int]]:
    """(experts, rows of each) of every call."""
    assert all(len(set(call.rows_per_expert)) == 1 for call in plan.calls), "a graph has one capacity"
    return [(len(call.experts), call.rows_per_expert[0]) for call in plan.calls]


# --- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk", "high", "low"), [(256, 64, 32), (512, 128, 64)])
def test_graphs_of_a_chunk(chunk: int, high: int, low: int) -> None:
    """One 4 x 64 and three 4 x 32 at chunk 256; 128 and 64 at 512: each group in order of popularity."""
    plan = technique("npumoe-tg", chunk).plan(LayerInput(0, "prefill", routing_of([2] * 16), torch.ones(32)))
    assert shapes(plan) == [(4, high), *[(4, low)] * 3]
    assert [call.experts for call in plan.calls][:2] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_slots_for_each_routed_pair() -> None:
    """Table 3: (1 - dropped) / (1 - padded) of its rows. A quarter at 4 B/E, the rest at 2 B/E: 1.25 of top 2."""
    rows = [(14.66, 31.73), (10.63, 34.77), (21.77, 37.49), (21.00, 37.00)]
    slots = [(1 - dropped / 100) / (1 - padded / 100) for dropped, padded in rows]
    assert slots == pytest.approx([1.250, 1.370, 1.251, 1.254], abs=5e-4)
    plan = technique("npumoe-tg", 256).plan(LayerInput(0, "prefill", routing_of([32] * 16, 2), torch.ones(256)))
    assert len(plan.token_R) / plan.routed_pairs == 1.25


@pytest.mark.parametrize(
    ("limit", "group_size", "largest"), [(GRAPH_BYTES, 16, 8), (GRAPH_BYTES, 4, 4), (150 * MIB, 16, 1)]
)
def test_graphs_keep_below_the_limit_of_weights(limit: int, group_size: int, largest: int) -> None:
    """8 experts of 150 MiB make 1.17 GiB and fit; 16 do not."""
    balanced = technique("npumoe-tg", 256, counts=(1,) * 16, group_size=group_size, graph_bytes=limit)
    plan = balanced.plan(LayerInput(0, "prefill", routing_of([2] * 16), torch.ones(32)))
    assert max(len(call.experts) for call in plan.calls) == largest
    assert 8 * 150 * MIB <= GRAPH_BYTES < 16 * 150 * MIB


def test_an_expert_above_the_limit_of_weights_has_no_graph() -> None:
    with pytest.raises(EngineError, match=r"graph_bytes = 157286399 holds no expert of 157286400 bytes"):
        technique("npumoe-tg", 256, graph_bytes=150 * MIB - 1)


def test_graphs_without_tokens_are_not_launched() -> None:
    loads = [0] * 16
    loads[5] = loads[6] = 3
    plan = technique("npumoe-tg", 256).plan(LayerInput(0, "prefill", routing_of(loads), torch.ones(6)))
    (call,) = plan.calls
    assert call.experts == (4, 5, 6, 7)
    assert call.valid_per_expert == (0, 3, 3, 0)


# --- what overflows --------------------------------------------------------------------------------------------------


def kept_slowly(experts: list[list[int]], saliency: list[float], capacity: Sequence[int]) -> set[tuple[int, int]]:
    """An expert keeps its most salient tokens, of equals the earlier."""
    kept = set()
    for expert, rows in enumerate(capacity):
        own = [token for token, chosen in enumerate(experts) if expert in chosen]
        own.sort(key=lambda token: (-saliency[token], token))
        kept |= {(token, expert) for token in own[:rows]}
    return kept


def kept_of(plan: DispatchPlan) -> set[tuple[int, int]]:
    kept = set()
    for call in plan.calls:
        row = call.first_row
        for expert, n_rows, n_valid in zip(call.experts, call.rows_per_expert, call.valid_per_expert, strict=True):
            tokens = plan.token_R[row : row + n_rows].tolist()
            assert tokens[n_valid:] == [-1] * (n_rows - n_valid)
            assert not plan.weight_R[row + n_valid : row + n_rows].any()
            assert not kept & {(token, expert) for token in tokens[:n_valid]}
            kept |= {(token, expert) for token in tokens[:n_valid]}
            row += n_rows
    return kept


choices = st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True), min_size=1, max_size=60)


@given(choices, st.lists(st.integers(0, 4), min_size=60, max_size=60), st.sampled_from(["npumoe-t", "npumoe-tg"]))
def test_tiers_prune_the_least_salient(experts: list[list[int]], norms: list[int], name: str) -> None:
    counts = (40, 30, 20, 10, 5, 5, 5, 5)
    pruning = technique(name, 24, counts, multiples=(1.0, 0.5, 0.25), align=1)
    # Mean 15; loads 16, 12, 8, 4, 2, 2, 2, 2 of a chunk of 24; tiers 6, 3, 2 (1.5 rounded up).
    capacity = (6, 6, 6, 6, 2, 2, 2, 2)
    saliency = [float(n) for n in norms[: len(experts)]]
    routing = Routing(torch.tensor(experts), torch.ones(len(experts), 2), 8)
    plan = pruning.plan(LayerInput(0, "prefill", routing, torch.tensor(saliency)))
    expected = kept_slowly(experts, saliency, capacity)
    assert kept_of(plan) == expected
    assert plan.dropped_pairs == 2 * len(experts) - len(expected)


@given(choices, st.lists(st.integers(0, 4), min_size=60, max_size=60))
def test_one_fixed_shape_prunes_the_least_salient(experts: list[list[int]], norms: list[int]) -> None:
    saliency = [float(n) for n in norms[: len(experts)]]
    routing = Routing(torch.tensor(experts), torch.ones(len(experts), 2), 8)
    base = built("npumoe-base", 24, None, ModelSizes(8, 2, 8, 8, 8, 1, 1), factor=1.0, align=1)
    plan = base.plan(LayerInput(0, "prefill", routing, torch.tensor(saliency)))
    assert kept_of(plan) == kept_slowly(experts, saliency, [6] * 8)
    assert len(plan.calls) == 8, "all experts are launched"
    assert all(call.unit == "npu" and call.static for call in plan.calls)


# --- residency -------------------------------------------------------------------------------------------------------


class Prices:
    """A second a launch on the NPU, nothing a row; a tenth of a second a row on the CPU."""

    def call_s(self, unit: str, n_experts: int, n_rows: float) -> float:
        return 1.0 if unit == "npu" else 0.1 * n_rows

    def call_j(self, unit: str, n_experts: int, n_rows: float) -> float:
        return 1.0 if unit == "npu" else 10.0 * n_rows


def resident(counts: Sequence[int], **parameters: object) -> Technique:
    profile = Profile({0: tuple(counts)}, 2, 1)
    return preset_parameters("npumoe").model_validate(parameters).build(BuildContext(32, PHI, profile, Prices()))


def test_cold_graphs_take_exact_rows_on_the_cpu() -> None:
    """64 pairs a chunk. Hot: 4 experts of 13 expected rows cost 5.2 s on the CPU. Cold: 4 of 1 row cost 0.4 s."""
    placed = resident([13] * 4 + [1] * 12, align=1)
    loads = [7, 3, 0, 2, *[1] * 11, 0]
    routing = Routing(torch.tensor([e for e, n in enumerate(loads) for _ in range(n)])[:, None], torch.ones(23, 1), 16)
    plan = placed.plan(LayerInput(0, "prefill", routing, torch.ones(23)))
    hot, *cold = plan.calls
    assert (hot.unit, hot.static, hot.experts) == ("npu", True, (0, 1, 2, 3))
    assert [(c.unit, c.static, c.experts, c.rows_per_expert) for c in cold] == [
        ("cpu", False, (e,), (1,)) for e in range(4, 15)
    ]
    assert kept_of(plan) == {(t, int(e)) for t, e in enumerate(routing.expert_ids_TK[:, 0])}


def test_units_that_overlap_change_nothing_but_the_price() -> None:
    loads = routing_of([13] * 4 + [1] * 12)
    seen = LayerInput(0, "prefill", loads, torch.arange(64.0))
    serial, at_once = (resident([13] * 4 + [1] * 12, align=1, overlap=overlap).plan(seen) for overlap in (False, True))
    assert not any(call.kind.overlaps for call in serial.calls)
    assert {call.unit for call in at_once.calls if call.kind.overlaps} == {"npu", "cpu"}
    assert [replace(call, kind=replace(call.kind, overlaps=False)) for call in at_once.calls] == list(serial.calls)
    assert at_once.token_R.equal(serial.token_R)
    assert at_once.weight_R.equal(serial.weight_R)
    experts, hidden_TH = random_experts(16), torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    assert execute(at_once, hidden_TH, experts).equal(execute(serial, hidden_TH, experts))


def test_a_place_by_cost_follows_the_prices() -> None:
    loads = routing_of([2] * 16)
    units = {call.unit for call in resident([1] * 16).plan(LayerInput(0, "prefill", loads, torch.ones(32))).calls}
    # 4 expected rows each: a graph of 4 experts costs 1.6 s on the CPU.
    assert units == {"npu"}
    few = resident([1] * 16, group_size=2)
    assert {call.unit for call in few.plan(LayerInput(0, "prefill", loads, torch.ones(32))).calls} == {"cpu"}


def test_a_graph_lies_where_it_costs_least_of_the_objective() -> None:
    """Two experts of 4 rows: 0.8 s on the CPU, 1 s on the NPU; but 80 J on the CPU, 1 J on the NPU."""
    seen = LayerInput(0, "prefill", routing_of([2] * 16), torch.ones(32))
    for objective, unit in (("seconds", "cpu"), ("joules", "npu")):
        placed = resident([1] * 16, group_size=2, objective=objective)
        assert {call.unit for call in placed.plan(seen).calls} == {unit}


def test_joules_of_a_call_are_those_of_its_unit_and_of_the_memory() -> None:
    """By the toy sheet: 2 experts of 1500 bytes and 5 rows of 3 x 8 x 4 values, so 960 FLOP. CPU: 1.92 s at 8 + 1 W.
    NPU: 0.5 + 3.0 + 0.096 s at 0.5 + 1 W, and 0.96 J. Seven experts are above its limit of 10000 bytes."""
    costs = SheetCosts(toy_sheet(), ModelSizes(4, 1, 8, 4, 1500, 1, 1))
    assert costs.call_j("cpu", 2, 5) == pytest.approx(1.92 * 9)
    assert costs.call_s("npu", 2, 5) == pytest.approx(3.596)
    assert costs.call_j("npu", 2, 5) == pytest.approx(3.596 * 1.5 + 0.96)
    assert costs.call_j("npu", 7, 5) == costs.call_s("npu", 7, 5) == math.inf


def test_experts_that_are_rarely_chosen_are_worth_no_launch_of_all() -> None:
    """Of 64 pairs a chunk, 63 are expected of expert 0, and a quarter of one of each of 1 to 4; the rest calibration
    never saw. By themselves, each of the four has tokens in 1 - (1 - 1/256)^64 = 22 % of chunks: 0.22 s on the NPU
    and 0.1 * 0.25 s on the CPU. All that was never seen costs nothing on the CPU."""
    asked: list[tuple[str, int, float]] = []

    class Asked(Prices):
        def call_s(self, unit: str, n_experts: int, n_rows: float) -> float:
            asked.append((unit, n_experts, n_rows))
            return super().call_s(unit, n_experts, n_rows)

    profile = Profile({0: (252, 1, 1, 1, 1, *[0] * 11)}, 2, 1)
    parameters = preset_parameters("npumoe")(group_size=1, align=1)
    placed = parameters.build(BuildContext(32, PHI, profile, Asked()))
    loads = routing_of([1] * 16)
    plan = placed.plan(LayerInput(0, "prefill", loads, torch.ones(16)))
    assert {call.experts for call in plan.calls if call.unit == "npu"} == {(0,)}
    chance = 1 - (255 / 256) ** 64
    # A call that is made has its rows of the chunks in which it is made.
    rows = [n for unit, _, n in asked if unit == "cpu"]
    assert rows == pytest.approx([63.0, *[0.25 / chance] * 4])


class CallsOnly:
    """A call is all that costs: 1 s on the NPU for whatever many experts, 0.6 s on the CPU for each."""

    def call_s(self, unit: str, n_experts: int, n_rows: float) -> float:
        return 1.0 if unit == "npu" else 0.6


def test_a_call_is_charged_by_the_chance_that_it_is_made() -> None:
    """Two of a graph of four were seen, and of 64 pairs each expects a quarter: called on the CPU in 22 % of chunks,
    0.27 s together; the graph in 39 %, which costs more. Were the calls sure, they would cost 1.2 s and it 1 s."""
    profile = Profile({0: (127, 127, *[0] * 12, 1, 1)}, 2, 1)
    placed = preset_parameters("npumoe")(align=1).build(BuildContext(32, PHI, profile, CallsOnly()))
    plan = placed.plan(LayerInput(0, "prefill", routing_of([1] * 16), torch.ones(16)))
    hot = {expert for call in plan.calls if call.unit == "npu" for expert in call.experts}
    assert hot == {0, 1}
    chance, either = 1 - (255 / 256) ** 64, 1 - (254 / 256) ** 64
    assert either > 2 * 0.6 * chance
    assert 2 * 0.6 > 1


def test_host_and_modelled_machine_have_the_same_graphs_of_one_arm() -> None:
    """At the size of Phi-3.5-MoE a graph takes 8 experts, of the small model that computes 16 and more."""
    profile, small = Profile({0: (100,) * 16}, 2, 1), ModelSizes(16, 2, 128, 64, 6 * 128 * 64, 1, 1)
    parameters = preset_parameters("npumoe")(as_shape="phi-3.5-moe", group_size=16)
    on_host = parameters.build(BuildContext(256, small, profile, None))
    on_model = parameters.build(BuildContext(256, PHI, profile, costs_of("m2-ultra", PHI)))
    loads = LayerInput(0, "prefill", routing_of([2] * 16), torch.ones(32))
    found = [[(c.unit, len(c.experts)) for c in placed.plan(loads).calls] for placed in (on_host, on_model)]
    assert found == [[("npu", 8), ("npu", 8)]] * 2


def test_a_graph_above_the_limit_of_the_sheet_lies_on_the_cpu() -> None:
    """16 experts of 150 MiB: the machine would run them on its CPU, with their padding."""
    profile = Profile({0: (100,) * 16}, 2, 1)
    parameters = preset_parameters("npumoe")(group_size=16, graph_bytes=10**11)
    placed = parameters.build(BuildContext(256, PHI, profile, costs_of("m2-ultra", PHI)))
    plan = placed.plan(LayerInput(0, "prefill", routing_of([2] * 16), torch.ones(32)))
    assert [(call.unit, call.n_rows) for call in plan.calls] == [("cpu", 2)] * 16
