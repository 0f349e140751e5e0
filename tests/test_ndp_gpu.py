"""What the GPU of a GPU-NDP system computes (001): experts and slices that balance, and experts fetched ahead.

Prices here are plain numbers, so that E_g and E_max follow by hand. N units, K experts of a token.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from devices.base import DeviceError
from engines.calls import Width
from engines.dispatch import Routing
from engines.model.checkpoints import load_checkpoint
from engines.model.experts import execute
from engines.model.transformer import Transformer
from engines.oracle import Oracle, mix_experts
from engines.sizes import own_sizes
from engines.techniques.context import BuildContext, ChunkPhase
from engines.techniques.parameters import CustomParameters
from engines.techniques.presets import preset_parameters
from tests.fakes.families import CASES, write_family
from tests.ndp_units import EIGHT, ON_GPU, TWO_AND_A_THIRD, Anything, Engine, Plain, built, on_gpu, routed
from tests.techniques import seen
from tests.test_experts import random_experts, random_routing, unusual_experts
from tests.test_ndp import FAMILIES, PHASES, SIZES, WIDTH, columns_of, logits
from tests.test_presets import int8_experts

pytestmark = pytest.mark.numbers

# --- balance ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_a_fraction_of_an_expert_is_a_slice_of_its_columns(phase: ChunkPhase) -> None:
    """E_g = 7/3 of 24 columns: two experts whole, 8 columns of a third; the others stay in slices."""
    routing = routed([9, 1, 2, 5, 6, 7, 8, 4], n_experts=12)
    plan = built("ndp-tp-lb", TWO_AND_A_THIRD, EIGHT, ndps=2).plan(seen(routing, phase))
    found = columns_of(plan)
    assert on_gpu(plan) == {1: (0, 24), 2: (0, 24), 4: (0, 8)}
    assert found[4] == [(0, 8), (8, 16), (16, 24)]
    assert all(found[expert] == [(0, 12), (12, 24)] for expert in (5, 6, 7, 8, 9))
    assert [(t.expert, t.width, t.n_bytes, t.stays) for t in plan.transfers] == [
        (1, (0, 24), SIZES.expert_bytes, False),
        (2, (0, 24), SIZES.expert_bytes, False),
        (4, (0, 8), SIZES.expert_bytes // 3, False),
    ]
    assert {(t.source, t.target, t.layer) for t in plan.transfers} == {("cpu", "gpu", 0)}
    out, back = plan.exchanges
    assert (out.kind, back.kind) == ("broadcast", "reduce")
    assert out.units == back.units == ("gpu", "ndp:0", "ndp:1")
    assert sum(map(sum, out.bytes_NN)) == sum(map(sum, back.bytes_NN)) == 2 * 16 * 4


def test_where_nothing_is_left_for_the_units_nothing_is_sent_to_them() -> None:
    """Units that take a million times as long balance nowhere: all K come to the GPU."""
    plan = built("ndp-tp-lb", Plain(1, 1, 1e6), EIGHT).plan(seen(routed(range(8), n_experts=12), "decode"))
    assert on_gpu(plan) == dict.fromkeys(range(8), (0, 24))
    assert plan.exchanges == ()
    assert plan.transfers.width_M2 is None
    assert len(plan.calls) == 8


def test_the_busiest_experts_of_a_step_go_to_the_gpu() -> None:
    """Expert 4 has 3 tokens, 2 and 0 have 2, 5 has 1: mean 2 rows, four experts of four tokens. T_w 1, T_g 0 a row,
    T_n 1 a row, no activations: E_g = 4 x 2 / (1 + 2) = 8/3. Of equal loads the lower number goes first."""
    routing = routed([4, 2], [4, 0], [4, 2], [5, 0])
    plan = built("ndp-tp-lb", Plain(1, 0, 1, by_rows=True), ndps=3).plan(seen(routing, "prefill"))
    assert on_gpu(plan) == {4: (0, 24), 0: (0, 24), 2: (0, 16)}


def test_a_prompt_leaves_the_gpu_less_by_its_activations() -> None:
    """Eq. 2, T_w = T_n = 1, T_g = 0, T_a = 1/8, N = 2, four experts: 2 E_g = 3/8 + 4 - (S - 1) / 4, so each further
    token takes 1/8 of an expert from the GPU: 35/16 of one token, 31/16 of three. In a batch of a decode step too."""
    for phase in PHASES:
        for tokens, whole, columns in ((1, 2, 4.5), (3, 1, 22.5)):
            routing = routed(*[range(4)] * tokens)
            plan = built("ndp-tp-lb", Plain(1, 0, 1, 1 / 8), ndps=2).plan(seen(routing, phase))
            assert [end for _, end in on_gpu(plan).values()] == [24] * whole + [round(columns)]


prices = st.floats(0.05, 20)


@given(
    prices,
    prices,
    prices,
    st.floats(0, 1),
    st.integers(1, 8),
    st.integers(1, 20),
    st.integers(1, 6),
    st.integers(0, 99),
)
def test_every_column_is_computed_once_whatever_balances(
    fetch: float, gpu: float, ndp: float, activation: float, n_units: int, n_tokens: int, top_k: int, seed: int
) -> None:
    """And what the GPU has is what traveled, byte for byte of its columns."""
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(n_tokens, 6, generator=generator).argsort(-1)[:, :top_k]
    routing = Routing(ids_TK, torch.rand(n_tokens, top_k, generator=generator), 6)
    own = built("ndp-tp-lb", Plain(fetch, gpu, ndp, activation), SIZES._replace(top_k=top_k), ndps=n_units)
    for phase in PHASES:
        plan = own.plan(seen(routing, phase))
        found = columns_of(plan)
        assert set(found) == set(ids_TK.reshape(-1).tolist())
        for parts in found.values():
            assert [first for first, _ in parts] == [0, *(end for _, end in parts[:-1])]
            assert parts[-1].end == WIDTH
        traveled = {t.expert: t.width or Width(0, WIDTH) for t in plan.transfers}
        assert traveled == on_gpu(plan)
        assert all(t.n_bytes == SIZES.expert_bytes * (t.width or (0, WIDTH))[1] // WIDTH for t in plan.transfers)


@pytest.mark.parametrize("n_units", range(1, 7))
@pytest.mark.parametrize("kind", ["plain", "biased", "input", "int8", "gelu"])
@pytest.mark.parametrize("n_tokens", [1, 2, 13])
def test_fractions_of_experts_are_the_oracle(n_units: int, kind: str, n_tokens: int) -> None:
    """A bias is added once: by the slice that has the first column."""
    experts = {"plain": random_experts, "int8": int8_experts}.get(kind, lambda: unusual_experts(kind))()
    hidden, routing = random_routing(n_tokens)
    cut = set()
    for ndp in (0.4, 1.1, 3.7, 40):
        own = built("ndp-tp-lb", Plain(1, 0.5, ndp), ndps=n_units)
        for phase in PHASES:
            plan = own.plan(seen(routing, phase))
            cut |= {end for _, end in on_gpu(plan).values()} - {WIDTH}
            assert plan.counters().computed_rows == 2 * n_tokens
            expected = mix_experts(hidden, routing, experts)
            torch.testing.assert_close(execute(plan, hidden, experts), expected, atol=1e-5, rtol=1e-5)
    assert len(cut) >= 2, "fractions of several sizes"


def test_slices_of_one_step_are_not_kept() -> None:
    """Every step of a prompt has other widths: a copy of all experts for each would fill the memory."""
    experts, (hidden, routing) = random_experts(), random_routing(1)
    plan = built("ndp-tp-lb", TWO_AND_A_THIRD, SIZES, ndps=2).plan(seen(routing, "decode"))
    execute(plan, hidden, experts)
    kept = {kind for kind in plan.calls.kinds if (kind.width, kind.hidden, kind.is_first_slice) in experts._parts}
    assert {kind.width for kind in kept} == {(0, 12), (12, 24)}
    assert {kind.width for kind in plan.calls.kinds if kind.once} - {(0, 12), (12, 24)}


# --- one token as many -----------------------------------------------------------------------------------------------


@given(st.permutations(range(12)), st.sets(st.integers(0, 11)), st.sampled_from(ON_GPU), st.floats(0.1, 9))
def test_one_token_is_planned_as_many_are(order: list[int], lie_there: set[int], name: str, gpu: float) -> None:
    plans = []
    for knows in (True, False):
        engine = Engine(built(name, Plain(2, gpu, 1, 0.1), EIGHT, ndps=3), EIGHT)
        if engine.shown.residency is not None:
            engine.shown.residency._whole_LE["gpu"][0, sorted(lie_there)] = True
            assert engine.shown.counts is not None
            engine.shown.counts.decode_LE[0, 0] = 1
        if not knows:
            engine.technique._known = {0: None}
        weights = torch.arange(8.0)[None]
        engine.shown.start_step(0)
        one = engine.shown.layer(0, "decode", Routing(torch.tensor([order[:8]]), weights, 12), None, None)  # type: ignore[arg-type]
        plans.append(engine.technique.plan(one))
        assert (engine.technique._known[0] is not None) == knows
    a, b = plans
    assert (a.calls, a.exchanges, a.counters()) == (b.calls, b.exchanges, b.counters())
    assert list(a.transfers) == list(b.transfers)
    assert (a.token_R.tolist(), a.weight_R.tolist()) == (b.token_R.tolist(), b.weight_R.tolist())


# --- on models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_gives_the_oracles_answers(case: str, tmp_path: Path) -> None:
    """At the sheet's prices, and at such as cut an expert."""
    write_family(tmp_path, CASES[case])
    checkpoint = load_checkpoint(str(tmp_path), torch.float32)
    model, sizes = Transformer(checkpoint), own_sizes(checkpoint.config)
    expected = logits(model, Oracle(), sizes)
    for name in ON_GPU:
        for costs in (None, Anything(1.0, 0.7, 1.3)):
            own = preset_parameters(name).model_validate({"ndps": 5}).build(BuildContext(16, sizes, None, costs, model))
            assert float((logits(model, own, sizes) - expected).norm() / expected.norm()) < 1e-5


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "move", "told"),
    [
        (
            {"kind": "ndp"},
            {"kind": "slices"},
            "place ndp computes nothing on the GPU, and move slices brings it experts",
        ),
        ({"kind": "ndp", "balanced": True}, {"kind": "nothing"}, "found move nothing; use slices"),
        ({"kind": "ndp", "balanced": True}, {"kind": "fetch"}, "found move fetch; use slices"),
        ({"kind": "ndp", "resident": True}, {"kind": "slices"}, "nothing is kept there; set prefetch = true"),
        (
            {"kind": "ndp", "balanced": True},
            {"kind": "slices", "prefetch": True},
            "none is computed there; set resident",
        ),
        (
            {"kind": "one_unit"},
            {"kind": "slices"},
            "move slices brings experts to the GPU of place ndp, and found place one_unit",
        ),
        ({"kind": "ndp", "costs_of": "m2-ultra"}, {"kind": "nothing"}, "costs_of needs balanced = true or resident"),
        ({"kind": "ndp", "balanced": True}, {"kind": "slices", "slots": 2}, "slots needs prefetch = true"),
    ],
)
def test_what_does_not_go_together_says_why(place: dict[str, object], move: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        CustomParameters.model_validate({"place": place, "move": move})


def test_a_sheet_without_the_units_is_refused() -> None:
    for sheet, told in (("m2-ultra", "m2-ultra"), ("rtx5080-ndp", "ndp:6")):
        with pytest.raises(DeviceError, match=told):
            preset_parameters("ndp").model_validate({"ndps": 7, "costs_of": sheet}).build(BuildContext(64, SIZES))
