"""The arithmetic behind docs/measurements/quantisation.md, against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from engines.model.checkpoints import load_checkpoint
from engines.model.quantised import Quantisation
from tests.benchmarks import quantisation as benchmark


def test_deviation_of_two_known_distributions() -> None:
    """Two sequences of two tokens: p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4); the text asks the first."""
    exact = torch.tensor([0.5, 0.25, 0.25]).log().expand(2, 2, 3)
    found = torch.tensor([0.25, 0.5, 0.25]).log().expand(2, 2, 3)
    one = benchmark.deviation(exact, found, torch.zeros(2, 2, dtype=torch.int64))
    assert one.largest == pytest.approx(math.log(2))
    assert one.relative_rms == pytest.approx(
        math.sqrt(2 * math.log(2) ** 2 / (math.log(2) ** 2 + 2 * math.log(4) ** 2))
    )
    assert one.same_first_share == 0
    assert one.kl == pytest.approx(0.25 * math.log(2))
    assert one.perplexity == pytest.approx(4)
    assert one.nll_change == pytest.approx(math.log(2))
    assert one.nll_change_error == pytest.approx(0, abs=1e-9)


def test_standard_error_is_of_paired_differences() -> None:
    exact = torch.ones(1, 3, 2)
    found = exact + torch.tensor([[0.0, 0.0], [0.0, math.log(3)], [0.0, 0.0]])
    one = benchmark.deviation(exact, found, torch.tensor([[0, 0, 0]]))
    # The two asked tokens lose nothing and log 4 - log 2: a mean of log(2) / 2, each as far from it.
    assert one.nll_change == pytest.approx(math.log(2) / 2)
    assert one.nll_change_error == pytest.approx(math.log(2) / 2)


def test_unigrams_of_a_uniform_text_are_as_perplexed_as_the_vocabulary_is_large() -> None:
    ids = torch.arange(benchmark.VOCABULARY)
    assert benchmark.unigram_perplexity(ids, ids.view(64, 32)) == pytest.approx(benchmark.VOCABULARY)


def test_bytes_of_components_are_counted_from_the_model() -> None:
    """The bundled model: 4 layers, hidden 192, 16 experts of 128, query 256, key and value 128 wide, 2048 rows."""
    weights = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32, Quantisation(experts="int8")).weights
    assert benchmark.component_bytes(weights) == {
        "experts": 4 * 16 * (3 * 128 * 192 + 4 * (128 + 128 + 192)),
        "dense": 0,
        "attention": 4 * 4 * 192 * (256 + 128 + 128 + 256),
        "head": 4 * 2048 * 192,
    }


def test_page_has_a_row_for_each_component_and_form() -> None:
    found = benchmark.Deviation(0.5, 0.01, 0.999, 1e-3, 10.0, 2e-3, 3e-4)
    rows = [
        row
        for component in benchmark.COMPONENTS
        for arm in benchmark.ARMS
        for row in benchmark.rows(component, arm, 4_000_000, 16_000_000, found, 9.5)
    ]
    lines = benchmark.page(rows, "The model.").splitlines()
    assert "| experts | int8 | 8.00 | 4.00 | 0.500 | 1.00 | 99.90 | 1.00 | 2.0 ± 0.3 | 10.00 |" in lines
    assert sum(line.startswith(f"| {component} |") for component in benchmark.COMPONENTS for line in lines) == 75
    assert sum(line.startswith("| head | int4-g32 by int8 |") for line in lines) == 1
