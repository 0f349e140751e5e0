from __future__ import annotations

import pytest
import torch

from engines.errors import EngineError
from engines.sampling import check_sampling, choose_token, token_probabilities
from results.records import Sampling

pytestmark = pytest.mark.numbers


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=1.3, top_p=0.6),
        Sampling(temperature=0.8, top_k=20, top_p=0.9),
        Sampling(temperature=1.0, top_p=1e-6),
        Sampling(temperature=1.0, top_k=10_000),
    ],
    ids=str,
)
def test_probabilities_agree_with_transformers(sampling: Sampling) -> None:
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    warpers.append(TopPLogitsWarper(sampling.top_p))
    logits = 3 * torch.randn(500, generator=torch.Generator().manual_seed(5))
    expected = torch.softmax(warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None]), dim=-1)[0]
    torch.testing.assert_close(token_probabilities(logits, sampling), expected)


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    generator = torch.Generator().manual_seed(0)
    draws = [choose_token(logits[None], Sampling(temperature=1.0), generator) for _ in range(4000)]
    # Standard error of a share of 4000 draws is below 0.008.
    for token, share in enumerate((0.5, 0.3, 0.2)):
        assert draws.count(token) / 4000 == pytest.approx(share, abs=0.03)


def test_smallest_top_p_keeps_the_likeliest_token() -> None:
    probability = token_probabilities(torch.tensor([0.1, 4.0, 3.9]), Sampling(temperature=1.0, top_p=5e-324))
    assert probability.tolist() == [0.0, 1.0, 0.0]


def test_temperature_zero_is_greedy_whatever_the_seed() -> None:
    logits = torch.tensor([0.1, 4.0, 3.9])
    assert {choose_token(logits[None], Sampling(), torch.Generator().manual_seed(seed)) for seed in range(20)} == {1}


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=-0.1), Sampling(top_p=0.0), Sampling(top_p=1.5), Sampling(top_k=-1)], ids=str
)
def test_values_without_a_distribution_are_refused(sampling: Sampling) -> None:
    with pytest.raises(EngineError, match=r"temperature|top_p|top_k"):
        check_sampling(sampling, "request r")
