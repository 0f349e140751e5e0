"""What an untrained model can do with copying weights, held against what they are meant to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.tiny.first_weights import BACK, MATCHER, set_copying_weights
from engines.tiny.model import CONFIG

pytestmark = pytest.mark.numbers


def new_model(copying: bool, **changed: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: CONFIG[key] for key in CONFIG if key not in ("architectures", "dtype", "torch_dtype")} | changed
    torch.manual_seed(0)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.constant_(parameter, 1.5)
    if copying:
        set_copying_weights(model, seed=3)
    return model


def random_ids(n_tokens: int) -> torch.Tensor:
    return torch.randint(5, 2048, (1, n_tokens), generator=torch.Generator().manual_seed(1))


def test_heads_that_look_back_see_the_token_at_their_distance() -> None:
    with torch.inference_mode():
        attentions = new_model(True)(random_ids(1000), output_attentions=True).attentions[0][0]
    at = torch.arange(500, 1000)
    for head, distance in enumerate(BACK[0]):
        assert distance is not None
        assert attentions[head, at, at - distance].mean() > 0.75


def test_the_matching_head_sees_what_followed_an_earlier_equal_token() -> None:
    once = random_ids(100)
    twice = torch.cat([once, once], dim=1)
    at = torch.arange(110, 199)
    seen = {}
    for copying in (False, True):
        with torch.inference_mode():
            attention = new_model(copying)(twice, output_attentions=True).attentions[MATCHER][0, 0]
        seen[copying] = float(attention[at, at - 99].mean())
    # One token of 150 on average gets 0.007.
    assert seen[False] < 0.03
    assert seen[True] > 0.1


def test_the_same_seed_gives_the_same_weights() -> None:
    one, again = new_model(True).state_dict(), new_model(True).state_dict()
    assert all(torch.equal(one[name], again[name]) for name in one)


def test_other_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="4 query heads on 2 key heads"):
        new_model(True, num_attention_heads=8)
