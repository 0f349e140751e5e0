from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from engines.dispatch import Routing
from engines.model.architecture import RouterConfig
from engines.model.router import RouterWeights, route

pytestmark = pytest.mark.numbers


def softmax_route(hidden_TH: torch.Tensor, router_EH: torch.Tensor, top_k: int, normalise: bool) -> Routing:
    return route(hidden_TH, RouterWeights(router_EH), RouterConfig("softmax", top_k, normalise))


def test_equal_scores_choose_the_lower_expert_index() -> None:
    # Experts 3, 5 and 9 share the best row, 0 and 1 the second best; the rest score lower.
    router_EH = torch.zeros(12, 4)
    router_EH[[3, 5, 9]] = 2.0
    router_EH[[0, 1]] = 1.0
    routing = softmax_route(torch.ones(6, 4), router_EH, top_k=4, normalise=True)
    assert routing.expert_ids_TK.tolist() == [[3, 5, 9, 0]] * 6


def test_all_scores_equal_choose_the_first_experts() -> None:
    # Wide enough that an unstable sort would show.
    routing = softmax_route(torch.ones(3, 8), torch.zeros(512, 8), top_k=8, normalise=False)
    assert routing.expert_ids_TK.tolist() == [list(range(8))] * 3
    torch.testing.assert_close(routing.weights_TK, torch.full((3, 8), 1 / 512))


@pytest.mark.parametrize("normalise", [True, False])
def test_choice_and_weights_agree_with_transformers(normalise: bool) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    theirs = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=32, num_experts=16, num_experts_per_tok=4, norm_topk_prob=normalise)
    )
    generator = torch.Generator().manual_seed(1)
    hidden, router = torch.randn(50, 32, generator=generator), torch.randn(16, 32, generator=generator)
    with torch.no_grad():
        theirs.weight.copy_(router)
        _, weights, ids = theirs(hidden)
    ours = softmax_route(hidden, router, top_k=4, normalise=normalise)
    assert torch.equal(ours.expert_ids_TK, ids)
    torch.testing.assert_close(ours.weights_TK, weights)


@pytest.mark.parametrize("scoring", ["softmax", "softmax of chosen"])
@pytest.mark.parametrize("n_experts", [16, 37, 128])
@pytest.mark.parametrize("n_tokens", [1, 8, 9, 33, 200])
def test_any_number_of_tokens_is_routed_as_in_double_precision(
    n_tokens: int, n_experts: int, scoring: Literal["softmax", "softmax of chosen"]
) -> None:
    generator = torch.Generator().manual_seed(n_tokens)
    hidden = torch.randn(n_tokens, 200, generator=generator)
    weights = RouterWeights(
        torch.randn(n_experts, 200, generator=generator), torch.randn(n_experts, generator=generator)
    )
    routing = route(hidden, weights, RouterConfig(scoring, 4, True))
    assert weights.bias_E is not None
    logits = hidden.double() @ weights.weight_EH.double().T + weights.bias_E.double()
    best = logits.sort(dim=-1, descending=True)
    # Of random logits no two are so near that fp32 could take one for the other.
    assert (best.values[:, :4] - best.values[:, 1:5]).min() > 1e-5
    assert torch.equal(routing.expert_ids_TK, best.indices[:, :4])
    # Scores of the chosen that add up to 1 are the softmax over the chosen, either way.
    torch.testing.assert_close(routing.weights_TK, best.values[:, :4].softmax(-1).float())


def test_a_token_is_routed_alike_whatever_many_stand_beside_it() -> None:
    """So that the choice does not hang on how a prompt is cut into chunks."""
    generator = torch.Generator().manual_seed(3)
    hidden, router = torch.randn(200, 96, generator=generator), torch.randn(40, 96, generator=generator)
    whole = softmax_route(hidden, router, top_k=4, normalise=True)
    for first, n in ((0, 9), (50, 33), (103, 97)):
        part = softmax_route(hidden[first : first + n], router, top_k=4, normalise=True)
        assert torch.equal(part.expert_ids_TK, whole.expert_ids_TK[first : first + n])
        assert torch.equal(part.weights_TK, whole.weights_TK[first : first + n])


def test_scores_are_fp32_even_for_narrow_weights() -> None:
    # 1.0 and 1.001 are one number in bf16: rounded scores would choose expert 0.
    router_EH = torch.tensor([[1.0], [1.001]])
    routing = softmax_route(torch.ones(1, 1), router_EH, top_k=1, normalise=False)
    assert routing.expert_ids_TK.item() == 1
    assert routing.weights_TK.dtype == torch.float32


# --- every family's router against transformers' own -----------------------------------------------------------------

N_EXPERTS, HIDDEN = 16, 32
GROUPS = {"n_routed_experts": N_EXPERTS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
ROUTERS: dict[str, tuple[str, str, dict[str, Any], RouterConfig]] = {
    "mixtral": ("Mixtral", "TopKRouter", {"num_local_experts": N_EXPERTS}, RouterConfig("softmax", 4, True)),
    "olmoe": ("Olmoe", "TopKRouter", {"num_experts": N_EXPERTS}, RouterConfig("softmax", 4)),
    "qwen2-moe": (
        "Qwen2Moe",
        "TopKRouter",
        {"num_experts": N_EXPERTS, "norm_topk_prob": True},
        RouterConfig("softmax", 4, True),
    ),
    "phi-moe": (
        "Phimoe",
        "TopKRouter",
        {"num_local_experts": N_EXPERTS, "router_jitter_noise": 0.1},
        RouterConfig("sparsemixer", 2, jitter=0.1),
    ),
    "gpt-oss": (
        "GptOss",
        "TopKRouter",
        {"num_local_experts": N_EXPERTS},
        RouterConfig("softmax of chosen", 4, has_bias=True),
    ),
    "deepseek-v2": (
        "DeepseekV2",
        "TopkRouter",
        {**GROUPS, "topk_method": "group_limited_greedy"},
        RouterConfig("softmax", 4, scale=2.5, n_groups=4, top_groups=2, group_score="best"),
    ),
    "deepseek-v3": (
        "DeepseekV3",
        "TopkRouter",
        GROUPS,
        RouterConfig("sigmoid", 4, True, 2.5, 4, 2, "two best", has_correction=True),
    ),
    "glm4-moe": (
        "Glm4Moe",
        "TopkRouter",
        {"n_routed_experts": N_EXPERTS, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5},
        RouterConfig("sigmoid", 4, True, 1.5, has_correction=True),
    ),
}


def their_choice(family: str, suffix: str, changes: dict[str, Any], weights: RouterWeights, top_k: int) -> Any:
    """(weights, ids) of transformers' router module; eval mode, for some add noise while training."""
    import importlib

    import transformers

    snake = {"Qwen2Moe": "qwen2_moe", "GptOss": "gpt_oss", "DeepseekV2": "deepseek_v2", "DeepseekV3": "deepseek_v3"}
    name = snake.get(family, "glm4_moe" if family == "Glm4Moe" else family.lower())
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = getattr(transformers, family + "Config")(hidden_size=HIDDEN, num_experts_per_tok=top_k, **changes)
    router = getattr(module, family + suffix)(config).eval()
    with torch.no_grad():
        router.weight.copy_(weights.weight_EH)
        if weights.bias_E is not None:
            router.bias.copy_(weights.bias_E)
        if weights.correction_E is not None:
            router.e_score_correction_bias.copy_(weights.correction_E)
        _, chosen_weights, ids = router(hidden_states())
    return chosen_weights, ids


def hidden_states() -> torch.Tensor:
    return torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(1))


def router_weights(config: RouterConfig, twins: bool) -> RouterWeights:
    """Random rows; with twins, experts 2i and 2i + 1 always score alike."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        return values[torch.arange(N_EXPERTS) // 2] if twins else values

    weight, bias, correction = draw(N_EXPERTS, HIDDEN) / 4, draw(N_EXPERTS), 0.2 * draw(N_EXPERTS)
    return RouterWeights(weight, bias if config.has_bias else None, correction if config.has_correction else None)


def by_expert(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weights [T, E] of the chosen experts, -1 elsewhere: the order of the choice does not show."""
    return torch.full((len(ids), N_EXPERTS), -1.0).scatter(1, ids, weights)


@pytest.mark.parametrize("twins", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("name", ROUTERS)
def test_every_family_chooses_and_weighs_as_transformers_does(name: str, twins: bool) -> None:
    family, suffix, changes, config = ROUTERS[name]
    weights = router_weights(config, twins)
    expected, ids = their_choice(family, suffix, changes, weights, config.top_k)
    ours = route(hidden_states(), weights, config)
    assert ours.expert_ids_TK.unique().numel() > N_EXPERTS // 2
    torch.testing.assert_close(by_expert(ours.expert_ids_TK, ours.weights_TK), by_expert(ids, expected))


@pytest.mark.parametrize("name", [name for name in ROUTERS if ROUTERS[name][3].top_k == 4])
def test_tie_at_the_edge_of_the_choice_takes_the_lower_index_and_the_same_weights(name: str) -> None:
    """Three of twins: one pair is cut. transformers leaves open which twin it takes; the weights are the same."""
    family, suffix, changes, config = ROUTERS[name]
    config = replace(config, top_k=3)
    weights = router_weights(config, twins=True)
    expected, _ = their_choice(family, suffix, changes, weights, 3)
    ours = route(hidden_states(), weights, config)
    torch.testing.assert_close(ours.weights_TK.sort().values, expected.sort().values)
    assert (ours.expert_ids_TK[:, 2] % 2 == 0).all(), "the cut twin is the lower one"
    assert (ours.expert_ids_TK[:, 0] + 1 == ours.expert_ids_TK[:, 1]).all(), "whole pairs come in order"


@pytest.mark.parametrize("twins", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_llama4_scores_agree_with_transformers(top_k: int, twins: bool) -> None:
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4Router

    config = RouterConfig("sigmoid of chosen", top_k)
    weights = router_weights(config, twins and top_k == 2)
    router = Llama4Router(Llama4TextConfig(hidden_size=HIDDEN, num_local_experts=N_EXPERTS, num_experts_per_tok=top_k))
    with torch.no_grad():
        router.weight.copy_(weights.weight_EH)
        expected, _ = router(hidden_states())
    ours = route(hidden_states(), weights, config)
    got = torch.zeros(200, N_EXPERTS).scatter(1, ours.expert_ids_TK, ours.weights_TK)
    torch.testing.assert_close(got, expected)


def test_sparsemixer_by_hand() -> None:
    """Logits 4, 3.9, 2, -1 and epsilon 0.1: within a fifth of 4 lies only 3.9; within a fifth of 3.9 only itself."""
    routing = route(
        torch.eye(1),
        RouterWeights(torch.tensor([[2.0], [4.0], [-1.0], [3.9]])),
        RouterConfig("sparsemixer", 2, jitter=0.1),
    )
    assert routing.expert_ids_TK.tolist() == [[1, 3]]
    torch.testing.assert_close(routing.weights_TK, torch.tensor([[1 / (1 + 2.718281828**-0.1), 1.0]]))


def test_groups_hide_a_good_expert_of_a_poor_group() -> None:
    """Two groups of two, one may be chosen: 3 is the best expert, and 2 + 2 beat 3 - 9."""
    router = RouterWeights(torch.tensor([[3.0], [-9.0], [2.0], [2.0]]))
    best = RouterConfig("softmax", 2, n_groups=2, top_groups=1, group_score="best")
    two_best = RouterConfig("sigmoid", 2, n_groups=2, top_groups=1, group_score="two best")
    assert route(torch.eye(1), router, best).expert_ids_TK.tolist() == [[0, 1]]
    assert route(torch.eye(1), router, two_best).expert_ids_TK.tolist() == [[2, 3]]
