from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engines.calls import CallKind, Calls, ExpertCall, Width
from engines.dispatch import DispatchPlan, Routing
from engines.model.architecture import GatedUnit
from engines.model.experts import ExpertWeights, GatedWeights, execute, gather_rows
from engines.oracle import Oracle, mix_experts
from engines.techniques.base import Technique
from engines.techniques.presets import dropless
from tests.techniques import seen

pytestmark = pytest.mark.numbers


def stacks(n_experts: int = 6, hidden: int = 16, width: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up_EJH, gate rows above up rows, and down_EHI."""
    generator = torch.Generator().manual_seed(11)
    return (
        torch.randn(n_experts, 2 * width, hidden, generator=generator) / hidden**0.5,
        torch.randn(n_experts, hidden, width, generator=generator) / width**0.5,
    )


def random_experts(n_experts: int = 6, hidden: int = 16, width: int = 24) -> ExpertWeights:
    pairs = zip(*stacks(n_experts, hidden, width), strict=True)
    return ExpertWeights(tuple(GatedWeights(*gate_up_JH.chunk(2), down_HI) for gate_up_JH, down_HI in pairs))


def biases() -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up_bias_EJ and down_bias_EH."""
    generator = torch.Generator().manual_seed(12)
    return torch.randn(6, 48, generator=generator), torch.randn(6, 16, generator=generator)


def unusual_experts(kind: str) -> ExpertWeights:
    """What families add: biases with GPT-OSS's unit, weights on the input (Llama 4), GELU."""
    if kind == "input":
        return replace(random_experts(), weights_input=True)
    if kind == "gelu":
        return replace(random_experts(), unit=GatedUnit("gelu_tanh"))
    biased = tuple(
        replace(one, gate_bias_I=gate_up_J[:24], up_bias_I=gate_up_J[24:], down_bias_H=down_H)
        for one, gate_up_J, down_H in zip(random_experts().experts, *biases(), strict=True)
    )
    return ExpertWeights(biased, unit=GatedUnit(alpha=1.702, limit=1.0))


def random_routing(n_tokens: int, top_k: int = 2, n_experts: int = 6) -> tuple[torch.Tensor, Routing]:
    generator = torch.Generator().manual_seed(n_tokens)
    ids = torch.rand(n_tokens, n_experts, generator=generator).argsort(-1)[:, :top_k]
    weights = torch.rand(n_tokens, top_k, generator=generator)
    return torch.randn(n_tokens, 16, generator=generator), Routing(ids, weights, n_experts)


def test_oracle_agrees_with_transformers_experts() -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    experts, (hidden, routing) = random_experts(), random_routing(40)
    config = Qwen3MoeConfig(hidden_size=16, moe_intermediate_size=24, num_experts=6)
    config._experts_implementation = "eager"
    theirs = Qwen3MoeExperts(config)
    with torch.no_grad():
        theirs.gate_up_proj.copy_(stacks()[0])
        theirs.down_proj.copy_(stacks()[1])
        expected = theirs(hidden, routing.expert_ids_TK, routing.weights_TK)
    torch.testing.assert_close(mix_experts(hidden, routing, experts), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("technique", [dropless(), Oracle()], ids=["dropless", "oracle plan"])
def test_executed_lossless_plans_equal_the_oracle(technique: Technique, n_tokens: int) -> None:
    experts, (hidden, routing) = random_experts(), random_routing(n_tokens)
    plan = technique.plan(seen(routing))
    torch.testing.assert_close(
        execute(plan, hidden, experts), mix_experts(hidden, routing, experts), atol=1e-5, rtol=1e-5
    )
    counters = plan.counters()
    assert (counters.routed_pairs, counters.computed_rows, counters.padded_rows) == (2 * n_tokens, 2 * n_tokens, 0)


@pytest.mark.parametrize("kind", ["biased", "input", "gelu"])
def test_experts_of_every_kind_equal_the_oracle(kind: str) -> None:
    experts, (hidden, routing) = unusual_experts(kind), random_routing(9)
    plan = dropless().plan(seen(routing))
    expected = mix_experts(hidden, routing, experts)
    torch.testing.assert_close(execute(plan, hidden, experts), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(expected, mix_experts(hidden, routing, random_experts()), atol=1e-2)


def test_oracle_agrees_with_transformers_experts_that_have_biases_and_limits() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts, (hidden, routing) = unusual_experts("biased"), random_routing(40)
    config = GptOssConfig(hidden_size=16, intermediate_size=24, num_local_experts=6, swiglu_limit=1.0)
    config._experts_implementation = "eager"
    theirs = GptOssExperts(config)
    in_turns = torch.arange(48).view(2, 24).T.flatten()
    with torch.no_grad():
        theirs.gate_up_proj.copy_(stacks()[0][:, in_turns].mT)
        theirs.gate_up_proj_bias.copy_(biases()[0][:, in_turns])
        theirs.down_proj.copy_(stacks()[1].mT)
        theirs.down_proj_bias.copy_(biases()[1])
        expected = theirs(hidden, routing.expert_ids_TK, routing.weights_TK)
    torch.testing.assert_close(mix_experts(hidden, routing, experts), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["biased", "input"])
def test_padding_reaches_no_token_even_where_an_expert_of_nothing_is_something(kind: str) -> None:
    """With biases a zero row has a result; the plan discards it. Expert 4 with weight 0 is token 0 not choosing it."""
    experts, (hidden, _) = unusual_experts(kind), random_routing(3)
    chosen = Routing(torch.tensor([[2, 4], [4, 2]]), torch.tensor([[2.0, 0.0], [0.5, 3.0]]), 6)
    expected = mix_experts(hidden[:2], chosen, experts)
    got = execute(padded_plan(), hidden, experts)
    torch.testing.assert_close(got[:2], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(got[2], torch.zeros(16))


def padded_plan() -> DispatchPlan:
    """Two experts in one call, three rows each: expert 4 holds token 1, expert 2 holds tokens 0 and 1."""
    return DispatchPlan(
        n_tokens=3,
        token_R=torch.tensor([1, -1, -1, 0, 1, -1]),
        weight_R=torch.tensor([0.5, 0.0, 0.0, 2.0, 3.0, 0.0]),
        calls=Calls.of([ExpertCall((4, 2), (3, 3), (1, 2), first_row=0, kind=CallKind(static=True))]),
        routed_pairs=3,
        dropped_pairs=0,
    )


def test_rows_of_a_grouped_call_reach_their_own_expert_and_padding_reaches_no_token() -> None:
    experts, (hidden, _) = random_experts(), random_routing(3)

    def expert(index: int, token: int) -> torch.Tensor:
        routing = Routing(torch.tensor([[index]]), torch.ones(1, 1), 6)
        return mix_experts(hidden[token : token + 1], routing, experts)[0]

    expected = torch.stack([2 * expert(2, 0), 0.5 * expert(4, 1) + 3 * expert(2, 1), torch.zeros(16)])
    torch.testing.assert_close(execute(padded_plan(), hidden, experts), expected, atol=1e-5, rtol=1e-5)


def test_padding_rows_are_zeros_and_are_computed() -> None:
    hidden = torch.randn(3, 16) + 5
    rows = gather_rows(padded_plan(), hidden)
    assert torch.equal(rows, torch.stack([hidden[1], *torch.zeros(2, 16), hidden[0], hidden[1], torch.zeros(16)]))

    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        execute(padded_plan(), hidden.double(), random_experts())  # in fp64 by torch alone, which the counter sees
    # 6 rows, 2 FLOP for each of the 3 * hidden * width weights of an expert.
    assert counter.get_total_flops() == 6 * 2 * 3 * 16 * 24


def test_plan_without_calls_gives_zeros() -> None:
    nothing = DispatchPlan(2, torch.empty(0, dtype=torch.int64), torch.empty(0), Calls.of([]), 4, 4)
    assert torch.equal(execute(nothing, torch.ones(2, 16), random_experts()), torch.zeros(2, 16))


def test_bytes_of_an_expert_count_gate_up_and_down_as_stored() -> None:
    experts = random_experts()
    one = experts.experts[0]
    narrow = ExpertWeights((GatedWeights(*(m.to(torch.bfloat16) for m in (one.gate_IH, one.up_IH, one.down_HI))),))
    assert unusual_experts("biased").n_bytes_per_expert == (3 * 16 * 24 + 48 + 16) * 4
    assert (experts.n_bytes_per_expert, narrow.n_bytes_per_expert) == (3 * 16 * 24 * 4, 3 * 16 * 24 * 2)


def test_parts_of_ever_new_widths_do_not_pile_up() -> None:
    """Columns 0 to n of 24, for every n: what is kept are four wholes at most, the last used; each is what it was."""
    experts = random_experts()
    kinds = [CallKind(width=Width(0, n)) for n in range(1, 24)]
    first = [experts.parts(kind).experts[0].down_HI.clone() for kind in kinds]
    assert sum(kept_key(key)[0].end for key in experts._parts) <= 4 * 24
    assert experts.parts(kinds[-1]) is experts.parts(kinds[-1])
    for kind, before in zip(kinds, first, strict=True):
        assert torch.equal(experts.parts(kind).experts[0].down_HI, before)


def kept_key(key: tuple[Width | None, Width | None, bool]) -> tuple[Width, Width | None, bool]:
    width, hidden, is_first = key
    assert width is not None
    return width, hidden, is_first
