from __future__ import annotations

import pytest
import torch

from engines.dispatch import Routing
from engines.observers import SparseLayerStep
from engines.profile import ChoiceCounts, Profile


def test_imbalance_is_the_busiest_expert_over_the_mean() -> None:
    profile = Profile({0: (30, 10, 0, 0), 3: (5, 5, 5, 5)}, top_k=2, n_prompts=1)
    assert profile.imbalance(0) == 3.0
    assert profile.imbalance(3) == 1.0
    assert profile.relative_load(0) == (3.0, 1.0, 0.0, 0.0)


def test_popularity_ranks_by_count_then_by_index() -> None:
    assert Profile({0: (1, 9, 4, 9)}, top_k=1, n_prompts=1).popularity(0) == (1, 3, 2, 0)


def test_choices_are_counted_per_layer_over_all_steps() -> None:
    def step(layer: int, *choices: tuple[int, ...]) -> SparseLayerStep:
        ids, nothing = torch.tensor(choices), torch.empty(len(choices), 0)
        return SparseLayerStep(layer, "prefill", nothing, nothing, Routing(ids, torch.ones(ids.shape), 4), nothing)

    counts = ChoiceCounts()
    for seen in (step(1, (0, 1), (1, 2)), step(2, (3, 2)), step(1, (1, 3)), step(2, (3, 0))):
        counts.layer(seen)
    profile = counts.profile(top_k=2, n_prompts=2)
    assert profile.tokens_per_expert == {1: (1, 3, 1, 1), 2: (1, 0, 1, 2)}
    assert (profile.top_k, profile.n_prompts) == (2, 2)


def test_profile_cannot_be_changed() -> None:
    profile = Profile({0: (1, 1)}, top_k=1, n_prompts=1)
    with pytest.raises(AttributeError):
        profile.top_k = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        profile.tokens_per_expert[0] = (2, 2)  # type: ignore[index]
