"""NPUMoE (000) in decoding: its graphs, what is known of one token, and shares that several layouts lay out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engines.decode_layout import DecodeLayout
from engines.dispatch import DispatchPlan, Routing
from engines.errors import EngineError
from engines.model.experts import execute
from engines.oracle import mix_experts
from engines.profile import Profile
from engines.residency import Counts
from engines.techniques.base import Technique
from engines.techniques.context import BuildContext, ChunkPhase, LayerInput, ModelSizes
from engines.techniques.layout.tiers import TiersParameters
from engines.techniques.parameters import CustomParameters
from tests.techniques import built
from tests.test_experts import random_experts
from tests.test_npumoe import PHI, Prices, routing_of, technique

pytestmark = pytest.mark.numbers


# --- decoding --------------------------------------------------------------------------------------------------------


def decoded(plan: DispatchPlan) -> list[tuple[str, int, int]]:
    return [(call.unit, len(call.experts), call.n_rows) for call in plan.calls]


@pytest.mark.parametrize(
    ("graphs", "calls"),
    [
        ("single", [("npu", 1, 32), ("npu", 1, 32)]),
        ("same", [("npu", 4, 256), ("npu", 4, 128)]),
        ("cpu", [("cpu", 1, 1), ("cpu", 1, 1)]),
    ],
)
def test_decode_graphs(graphs: str, calls: list[tuple[str, int, int]]) -> None:
    one = Routing(torch.tensor([[1, 9]]), torch.ones(1, 2), 16)
    plan = technique("npumoe-tg", 256, decode_graphs=graphs).plan(LayerInput(0, "decode", one))
    assert decoded(plan) == calls
    assert plan.dropped_pairs == 0


def general_way(own: Technique, seen: LayerInput) -> DispatchPlan:
    """Of the same technique, without what it knows of one token beforehand."""
    own._known = {seen.layer: None}  # type: ignore[attr-defined]
    return own.plan(seen)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("dropless", {}),
        ("npumoe-t", {}),
        ("npumoe-tg", {}),
        ("npumoe", {}),
        ("npumoe-t", {"decode_graphs": "cpu"}),
        ("npumoe-base", {}),
        ("coreml-naive", {}),
        ("coreml-naive", {"align": 16}),
        ("coreml-naive", {"decode_graphs": "single"}),
        ("blockwise", {}),
        ("dropping", {}),
        ("selective", {}),
        ("selective", {"switch_alpha": 0.1}),
        ("all-experts", {}),
        ("npumoe-t", {"decode_graphs": "same"}),
        ("npumoe-tg", {"decode_graphs": "same"}),
        ("npumoe-tg", {"decode_graphs": "same", "group_size": 16, "graph_bytes": 10**11, "multiples": (2,)}),
    ],
)
def test_one_token_is_planned_as_many_are(name: str, parameters: dict[str, object]) -> None:
    generator = np.random.default_rng(3)
    for _ in range(20):
        ids = torch.from_numpy(generator.permutation(16)[None, :2].copy())
        one = Routing(ids, torch.from_numpy(generator.uniform(size=(1, 2)).astype(np.float32)), 16)
        counts = Counts(1, 16)
        counts.add(0, "prefill", torch.tensor([[1], [2], [1]]))
        seen = LayerInput(0, "decode", one, torch.ones(1), counts=counts)
        known, general = technique(name, 256, **parameters), technique(name, 256, **parameters)
        a, b = known.plan(seen), general_way(general, seen)
        assert known._known[0] is not None, "what is tested is known"  # type: ignore[attr-defined]
        assert a.calls == b.calls
        assert a.token_R.tolist() == b.token_R.tolist()
        assert a.weight_R.tolist() == b.weight_R.tolist()
        assert a.counters() == b.counters()


def test_decode_layouts_say_what_plans_do() -> None:
    phases: tuple[ChunkPhase, ...] = ("decode",)
    one = Routing(torch.tensor([[1, 9]]), torch.ones(1, 2), 16)
    for graphs in ("single", "same", "cpu"):
        own = technique("npumoe-tg", 256, decode_graphs=graphs)
        said = own.decode_layout(0)
        assert isinstance(said, DecodeLayout)
        for phase in phases:
            plan = own.plan(LayerInput(0, phase, one))
            rows = dict(zip(plan.calls.expert_S.tolist(), plan.calls.rows_S.tolist(), strict=True))
            chosen = {1, 9}
            if said.group_of_E is not None:
                chosen = {e for e in range(16) if said.group_of_E[e] in {said.group_of_E[1], said.group_of_E[9]}}
            assert rows == {e: 1 if said.rows_E is None else said.rows_E[e] for e in chosen}


def test_defaults_are_those_of_the_source() -> None:
    tiers = TiersParameters()
    assert (tiers.multiples, tiers.base, tiers.align) == (None, "BK/E", 16)


def test_costs_are_asked_at_a_named_shape() -> None:
    """Two experts a graph: of Phi-3.5-MoE's size one launch on the NPU beats two calls of the CPU, which read 150 MiB
    each; of 64 columns its launch (2.5 ms) does not beat theirs (1.2 ms each)."""
    profile = Profile({0: (1,) * 16}, 2, 1)
    small = ModelSizes(16, 2, 64, 64, 6 * 64 * 64, 1, 1)
    loads = LayerInput(0, "prefill", routing_of([2] * 16), torch.ones(32))

    def units(**parameters: object) -> set[str]:
        placed = built("npumoe", 1024, profile, small, group_size=2, **parameters)
        return {call.unit for call in placed.plan(loads).calls}

    assert units(as_shape="phi-3.5-moe") == {"npu"}
    assert units() == {"cpu"}
    with pytest.raises(EngineError, match="no shape 'phi-4'"):
        units(as_shape="phi-4")


def test_decoding_is_placed_as_its_own_layout_says() -> None:
    """Graphs of single experts run on the NPU; every other layout finds experts where residency left them."""
    one = Routing(torch.tensor([[0, 9]]), torch.ones(1, 2), 16)
    profile = Profile({0: (13,) * 4 + (1,) * 12}, 2, 1)
    for decode, units in (
        (None, ["npu", "npu"]),
        ({"kind": "tiers", "decode_graphs": "single"}, ["npu", "npu"]),
        ({"kind": "tiers", "decode_graphs": "same"}, ["npu", "cpu"]),
        ({"kind": "tiers", "decode_graphs": "cpu"}, ["cpu", "cpu"]),
        ({"kind": "capacity"}, ["npu", "cpu"]),
    ):
        chosen = {"place": {"kind": "by_cost"}, "layout": {"kind": "tiers", "grouped": True, "align": 1}}
        named = {} if decode is None else {"decode": decode}
        placed = CustomParameters.model_validate(chosen | named).build(BuildContext(32, PHI, profile, Prices()))
        assert [call.unit for call in placed.plan(LayerInput(0, "decode", one)).calls] == units, decode


# --- shares and what else is laid out --------------------------------------------------------------------------------


DECODE_LAYOUTS = (
    {"kind": "tiers", "grouped": True, "decode_graphs": "same", "align": 2, "multiples": [100]},
    {"kind": "capacity", "factor": 100},
    {"kind": "blocks", "block_size": 2},
    {"kind": "all_experts"},
)


@pytest.mark.parametrize("decode", DECODE_LAYOUTS, ids=str)
def test_each_share_computes_its_own_experts_whatever_lays_them_out(decode: dict[str, object]) -> None:
    """Expert 0 lies on the NPU; graphs of all four, and layouts that launch all, reach into both shares."""
    profile, sizes = Profile({0: (70, 10, 10, 10, 0, 0)}, 1, 1), ModelSizes(6, 1, 16, 24, 6 * 16 * 24, 1, 1)
    chosen = {
        "place": {"kind": "by_cost"},
        "layout": {"kind": "tiers", "align": 1},
        "decode": decode,
    }
    placed = CustomParameters.model_validate(chosen).build(BuildContext(16, sizes, profile, Prices()))
    experts, generator = random_experts(hidden=16, width=24), torch.Generator().manual_seed(4)
    hidden = torch.randn(12, 16, generator=generator)
    routing = Routing(torch.tensor([[0]] * 3 + [[1]] * 6 + [[2]] * 3), torch.ones(12, 1), 6)
    plan = placed.plan(LayerInput(0, "decode", routing, torch.ones(12)))
    assert {(call.unit, expert) for call in plan.calls for expert in call.experts} == {
        ("npu", 0),
        ("cpu", 1),
        ("cpu", 2),
    }
    assert plan.dropped_pairs == 0
    torch.testing.assert_close(
        execute(plan, hidden, experts), mix_experts(hidden, routing, experts), atol=1e-5, rtol=1e-5
    )
