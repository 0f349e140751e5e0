"""A decoded token between a GPU and where its experts lie, and over ranks: planned at once as the general way plans it.

Other places: tests/test_npumoe_decode.py, tests/test_ndp_gpu.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.dispatch import DispatchPlan, Routing
from engines.model.checkpoints import load_checkpoint
from engines.model.transformer import Transformer
from engines.profile import Profile
from engines.shown import Shown
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import BuildContext, ModelSizes
from engines.techniques.over_ranks import OverRanks
from engines.techniques.parameters import CustomParameters
from engines.techniques.presets import preset_parameters
from tests.fakes.random_models import BUNDLED
from tests.test_hosts import ToyCosts

N_EXPERTS, TOP_K = 16, 5
SIZES = ModelSizes(N_EXPERTS, TOP_K, 16, 24, 2 * 3 * 16 * 24, 4, 4)
LOADS = Profile({layer: tuple((7 * e + layer) % 23 + 40 * (e == 3) for e in range(N_EXPERTS)) for layer in range(4)},
                TOP_K, 1)  # fmt: skip
"""Unlike, so that some experts have replicas on two ranks or more."""
TOKENS = st.permutations(range(N_EXPERTS)).map(lambda order: order[:TOP_K])
SECONDS = st.integers(0, 40).map(float)
HOSTS: list[dict[str, Any]] = [
    {"place": {"kind": "cheaper"}, "move": {"kind": "fetch"}},
    {"place": {"kind": "cheaper", "objective": "max"}, "move": {"kind": "fetch"}},
    {"place": {"kind": "hottest"}, "move": {"kind": "fetch"}},
    {"place": {"kind": "hottest", "ndps": 2, "h": 3}, "move": {"kind": "fetch"}},
    {"place": {"kind": "hottest", "ndps": 3, "h": "factor"}, "move": {"kind": "fetch"}},
    {"place": {"kind": "hottest", "ndps": 1}},
]
RANKS: list[tuple[str, int, dict[str, Any]]] = [
    ("tensor-parallel", 3, {}),
    ("expert-parallel", 4, {}),
    ("tp-ep", 4, {}),
    ("tp-ep", 2, {"tensor_ranks": 1}),
    ("eplb", 4, {"spare_slots": 2}),
    ("eplb", 4, {"spare_slots": 3, "nodes": 2, "groups": 4}),
]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(load_checkpoint(str(BUNDLED), torch.float32))


def same(one: DispatchPlan, other: DispatchPlan) -> bool:
    assert one.calls == other.calls
    assert list(one.transfers) == list(other.transfers)
    assert one.exchanges == other.exchanges
    assert one.counters() == other.counters()
    return (one.token_R.tolist(), one.weight_R.tolist()) == (other.token_R.tolist(), other.weight_R.tolist())


@pytest.mark.parametrize("chosen", HOSTS, ids=str)
@given(TOKENS, st.sets(st.integers(0, N_EXPERTS - 1)), SECONDS, SECONDS, SECONDS)
def test_a_token_between_two_units_is_planned_as_many_tokens_are(
    model: Transformer, chosen: dict[str, Any], token: list[int], lie_there: set[int], gpu: float, other: float,
    fetch: float,
) -> None:  # fmt: skip
    costs = ToyCosts({"gpu": gpu, "cpu": other, "ndp": other}, {"gpu": 0.25, "cpu": 1.0, "ndp": 1.0}, fetch + 0.5)
    parameters = CustomParameters.model_validate(chosen | {"backbone": "gpu"})
    plans = []
    for knows in (True, False):
        own = parameters.build(BuildContext(64, SIZES, LOADS, costs, model))
        assert isinstance(own, ComposedTechnique)
        shown = Shown(own.asks, SIZES)
        if shown.residency is not None:
            shown.residency.whole_LE("gpu")[2, sorted(lie_there)] = True
        if not knows:
            own._known = {2: None}
        weights_TK = torch.arange(1.0, TOP_K + 1)[None]
        seen = shown.layer(2, "decode", Routing(torch.tensor([token]), weights_TK, N_EXPERTS), None, None)
        plans.append(own.plan(seen))
        assert (own._known[2] is not None) == knows
    assert same(*plans)


@pytest.mark.parametrize(("name", "n_ranks", "parameters"), RANKS)
@given(TOKENS, st.integers(0, 3))
def test_a_token_over_ranks_is_planned_as_many_tokens_are(
    name: str, n_ranks: int, parameters: dict[str, Any], token: list[int], layer: int
) -> None:
    plans = []
    for knows in (True, False):
        own = preset_parameters(name).model_validate(parameters).build(BuildContext(64, SIZES, LOADS, ranks=n_ranks))
        assert isinstance(own, OverRanks)
        inner = own._technique
        assert isinstance(inner, ComposedTechnique)
        if not knows:
            inner._known = {layer: None}
        shown, weights_TK = Shown(own.asks, SIZES), torch.arange(1.0, TOP_K + 1)[None]
        seen = shown.layer(layer, "decode", Routing(torch.tensor([token]), weights_TK, N_EXPERTS), None, None)
        plans.append(own.plan(seen))
        assert (inner._known[layer] is not None) == knows
    assert same(*plans)
    n_calls = n_ranks if name == "tensor-parallel" else parameters.get("tensor_ranks", 2) if name == "tp-ep" else 1
    assert len(plans[0].calls) == n_calls * TOP_K
