from __future__ import annotations

import pytest
import torch

from engines.architecture import RouterConfig
from engines.dispatch import Routing
from engines.router import RouterWeights, route


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


def test_scores_are_fp32_even_for_narrow_weights() -> None:
    # 1.0 and 1.001 are one number in bf16: rounded scores would choose expert 0.
    router_EH = torch.tensor([[1.0], [1.001]])
    routing = softmax_route(torch.ones(1, 1), router_EH, top_k=1, normalise=False)
    assert routing.expert_ids_TK.item() == 1
    assert routing.weights_TK.dtype == torch.float32
