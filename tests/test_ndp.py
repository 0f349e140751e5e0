"""Experts in slices on NDP units (001): the oracle's answers, every column once, what travels, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engines.calls import Width
from engines.dispatch import DispatchPlan, Routing
from engines.errors import EngineError
from engines.model.checkpoints import load_checkpoint
from engines.model.experts import execute
from engines.model.transformer import Transformer
from engines.oracle import Oracle, mix_experts
from engines.reference import own_sizes
from engines.shown import Shown
from engines.techniques.base import Technique
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import BuildContext, ChunkPhase, ModelSizes
from engines.techniques.parameters import CustomParameters
from engines.techniques.presets import preset_parameters
from tests.fakes.families import CASES, write_family
from tests.techniques import seen
from tests.test_experts import random_experts, random_routing, unusual_experts
from tests.test_presets import int8_experts

pytestmark = pytest.mark.numbers

WIDTH = 24
SIZES = ModelSizes(
    n_experts=6, top_k=2, hidden=16, expert_width=WIDTH, expert_bytes=3 * 16 * WIDTH * 2, n_layers=1, n_sparse_layers=1
)
FAMILIES = ["mixtral", "olmoe", "qwen2-moe", "phi-moe", "deepseek-v2-groups", "deepseek-v3", "llama4", "glm4-moe",
            "gpt-oss", "llama4-top2"]  # fmt: skip
PHASES: tuple[ChunkPhase, ...] = ("prefill", "decode")


def built(name: str, **parameters: object) -> ComposedTechnique:
    found = preset_parameters(name).model_validate(parameters).build(BuildContext(64, SIZES))
    assert isinstance(found, ComposedTechnique)
    return found


def logits(model: Transformer, technique: Technique, sizes: ModelSizes | None) -> torch.Tensor:
    """Of a prompt in two chunks and four decoded tokens."""
    tokens = torch.randint(1, 2000, (30,), generator=torch.Generator().manual_seed(8))
    cache, shown = model.new_cache(), Shown(technique.asks, sizes)
    cache.start(len(tokens))
    hidden = []
    with torch.inference_mode():
        for chunk in tokens.split([16, 10, 1, 1, 1, 1]):
            shown.start_step(0 if len(chunk) < 16 else 10)
            phase: ChunkPhase = "prefill" if len(chunk) > 1 else "decode"
            hidden.append(model.forward(chunk, cache, technique, phase, shown=shown)[0])
        return model.logits(torch.cat(hidden))


def columns_of(plan: DispatchPlan) -> dict[int, list[Width]]:
    """Of each expert, the columns of its calls, by their first."""
    found: dict[int, list[Width]] = {}
    for call in plan.calls:
        for expert in call.experts:
            found.setdefault(expert, []).append(call.kind.width or Width(0, WIDTH))
    return {expert: sorted(parts) for expert, parts in found.items()}


# --- partial sums ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_units", range(1, 7))
@pytest.mark.parametrize("kind", ["plain", "biased", "input", "int8", "gelu"])
@pytest.mark.parametrize("n_tokens", [1, 2, 13])
def test_partial_sums_of_n_units_are_the_oracle(n_units: int, kind: str, n_tokens: int) -> None:
    """24 columns in five slices are of unequal widths; a bias is added once."""
    experts = {"plain": random_experts, "int8": int8_experts}.get(kind, lambda: unusual_experts(kind))()
    hidden, routing = random_routing(n_tokens)
    for phase in PHASES:
        plan = built("ndp-tp", ndps=n_units).plan(seen(routing, phase))
        assert {call.unit for call in plan.calls} == {f"ndp:{i}" for i in range(n_units)}
        assert plan.counters().computed_rows == 2 * n_tokens
        torch.testing.assert_close(
            execute(plan, hidden, experts), mix_experts(hidden, routing, experts), atol=1e-5, rtol=1e-5
        )


@given(st.integers(1, WIDTH), st.integers(1, 30), st.integers(1, 3), st.integers(0, 2**31))
def test_slices_hold_every_column_of_every_expert_once(n_units: int, n_tokens: int, top_k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(n_tokens, 6, generator=generator).argsort(-1)[:, :top_k]
    routing = Routing(ids_TK, torch.rand(n_tokens, top_k, generator=generator), 6)
    for phase in PHASES:
        plan = built("ndp-tp", ndps=n_units).plan(seen(routing, phase))
        found = columns_of(plan)
        assert set(found) == set(ids_TK.reshape(-1).tolist())
        for parts in found.values():
            assert [first for first, _ in parts] == [0, *(end for _, end in parts[:-1])]
            assert parts[-1].end == WIDTH
            assert max(end - first for first, end in parts) - min(end - first for first, end in parts) <= 1


@pytest.mark.parametrize("case", FAMILIES)
def test_slices_are_the_oracle_in_every_family(case: str, tmp_path: Path) -> None:
    write_family(tmp_path, CASES[case])
    checkpoint = load_checkpoint(str(tmp_path), torch.float32)
    model, sizes = Transformer(checkpoint), own_sizes(checkpoint.config)
    own = preset_parameters("ndp-tp").model_validate({"ndps": 5}).build(BuildContext(16, sizes))
    expected = logits(model, Oracle(), sizes)
    assert float((logits(model, own, sizes) - expected).norm() / expected.norm()) < 1e-5


def test_one_token_that_takes_all_experts() -> None:
    experts, (hidden, routing) = random_experts(), random_routing(1, top_k=6)
    plan = built("ndp-tp", ndps=3).plan(seen(routing, "decode"))
    assert len(plan.calls) == 18
    torch.testing.assert_close(
        execute(plan, hidden, experts), mix_experts(hidden, routing, experts), atol=1e-5, rtol=1e-5
    )


# --- what travels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [1, 13])
@pytest.mark.parametrize("phase", PHASES)
def test_a_token_goes_to_every_unit_and_a_sum_comes_back_from_each(n_tokens: int, phase: ChunkPhase) -> None:
    """16 values of 4 bytes a token: what a unit computed of its experts is added up there."""
    plan = built("ndp-tp", ndps=3).plan(seen(random_routing(n_tokens)[1], phase))
    out, back = plan.exchanges
    n = n_tokens * 16 * 4
    assert (out.kind, back.kind) == ("broadcast", "reduce")
    assert out.units == back.units == ("gpu", "ndp:0", "ndp:1", "ndp:2")
    assert out.bytes_NN == ((0, n, n, n), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0))
    assert back.bytes_NN == ((0, 0, 0, 0), (n, 0, 0, 0), (n, 0, 0, 0), (n, 0, 0, 0))
    assert plan.counters().bytes_exchanged == 6 * n
    assert plan.counters().bytes_moved == 0


def test_one_token_is_planned_as_many_are() -> None:
    for number in range(20):
        routing = random_routing(1, top_k=1 + number % 6)[1]
        ids_TK = routing.expert_ids_TK[:, torch.randperm(routing.expert_ids_TK.shape[1])]
        one = seen(Routing(ids_TK.contiguous(), routing.weights_TK, 6), "decode")
        known, general = built("ndp-tp"), built("ndp-tp")
        general._known = {0: None}
        a, b = known.plan(one), general.plan(one)
        assert known._known[0] is not None
        assert (a.calls, a.exchanges, a.counters()) == (b.calls, b.exchanges, b.counters())
        assert (a.token_R.tolist(), a.weight_R.tolist()) == (b.token_R.tolist(), b.weight_R.tolist())


# --- what is refused -------------------------------------------------------------------------------------------------


def test_units_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"ndps\n.*greater than or equal to 1"):
        preset_parameters("ndp-tp").model_validate({"ndps": 0})
    with pytest.raises(EngineError, match="25 NDP units cannot share 24 columns of an expert; give fewer ndps"):
        built("ndp-tp", ndps=25)
    with pytest.raises(EngineError, match="this one is dense; use dropless"):
        preset_parameters("ndp-tp")().build(BuildContext(64))


def test_what_does_not_go_with_slices_is_refused() -> None:
    with pytest.raises(ValidationError, match="place ndp computes exact rows; found layout blocks; use exact"):
        CustomParameters.model_validate({"place": {"kind": "ndp"}, "layout": {"kind": "blocks"}})
