"""Shares of samples that are right: Wilson's interval against scipy's, and which metrics are such shares."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest, t

from results.binary_scores import (
    binary_metrics,
    is_share,
    metrics_from_0,
    metrics_within_0_and_1,
    score_interval,
    wilson_interval,
)
from results.records import Score
from results.trials import Trial
from tests.run_builders import cell, run, trial


@pytest.mark.parametrize("n", [1, 2, 4, 7, 20, 1319])
def test_the_interval_of_a_share_is_scipys(n: int) -> None:
    for n_right in {0, 1, n // 2, n - 1, n}:
        expected = binomtest(n_right, n).proportion_ci(method="wilson")
        assert wilson_interval(n_right / n, n) == pytest.approx((expected.low, expected.high), rel=1e-7, abs=1e-12)


def answered(cell_id: str, metric: str, *values: float, higher_is_better: bool = True) -> Trial:
    scores = [
        Score(metric=metric, value=value, sample_id=f"s{i}", higher_is_better=higher_is_better)
        for i, value in enumerate(values)
    ]
    return trial(cell_id, scores=tuple(scores))


def test_a_metric_is_right_or_wrong_where_no_sample_of_any_arm_says_otherwise() -> None:
    cells = [cell("a"), cell("b"), cell("other", workload="boolq")]
    trials = [
        answered("a", "acc", 1, 0, 1),
        answered("b", "acc", 0, 0, 0),
        answered("a", "4096", 1, 1),
        answered("b", "4096", 1, 0.5),
        answered("a", "kl_nats", 0, 0, higher_is_better=False),
        answered("other", "acc", 0.25, 1),
    ]
    assert binary_metrics(run(cells, trials)) == {"gsm8k": {"acc"}, "boolq": set()}
    assert metrics_within_0_and_1(run(cells, trials)) == {"gsm8k": {"acc", "4096"}, "boolq": {"acc"}}
    beyond = answered("b", "4096", 37.5)
    assert "4096" not in metrics_within_0_and_1(run(cells, [*trials, beyond]))["gsm8k"]


def test_nats_are_no_share_however_few_they_are() -> None:
    """A reference is 0 nats from itself: with Wilson's interval that was up to 0.32 of 8 texts, beside an arm whose
    interval ended at 0.000003. Of a share where less is better some sample has 1."""
    cells = [cell("a"), cell("b")]
    trials = [
        answered("a", "kl_nats", 0, 0, higher_is_better=False),
        answered("b", "kl_nats", 2e-6, 3e-6, higher_is_better=False),
    ]
    assert metrics_within_0_and_1(run(cells, trials)) == {"gsm8k": set()}
    assert metrics_within_0_and_1(run(cells[:1], trials[:1])) == {"gsm8k": set()}
    assert metrics_from_0(run(cells, trials)) == {"gsm8k": {"kl_nats"}}
    assert metrics_from_0(run(cells, [*trials, answered("b", "kl_nats", -4e-9)])) == {"gsm8k": set()}
    stereotypes = answered("a", "pct_stereotype", 0, 1, higher_is_better=False)
    assert metrics_within_0_and_1(run(cells[:1], [stereotypes])) == {"gsm8k": {"pct_stereotype"}}


def test_no_overlap_of_words_is_no_wrong_answer() -> None:
    names = ("bleu_max", "bleu_diff", "rouge1_max", "rouge_l", "bleu_acc", "rougeL_acc")
    found = binary_metrics(run([cell("a")], [answered("a", name, 0, 0) for name in names]))
    assert found == {"gsm8k": {"bleu_acc", "rougeL_acc"}}


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [("acc", 0.75, True), ("acc/stem", 1.0, True), ("acc", 1 / 3, False), ("acc_norm", 0.75, False)],
)
def test_a_mean_over_unlike_subjects_is_no_share_of_its_samples(metric: str, value: float, expected: bool) -> None:
    assert is_share(Score(metric=metric, value=value, n=4), frozenset({"acc"})) is expected


def test_scores_between_have_students_interval_and_no_end_outside_of_what_scores_can_be() -> None:
    assert score_interval(0.4, 0.05, 8, False) == pytest.approx(t.interval(0.95, 7, 0.4, 0.05))
    assert score_interval(-3.0, 0.5, 30, False) == pytest.approx(t.interval(0.95, 29, -3.0, 0.5))
    assert score_interval(0.95, 0.05, 4, True) == pytest.approx((t.interval(0.95, 3, 0.95, 0.05)[0], 1.0))
    assert score_interval(1.0, 0.0, 4, True) == wilson_interval(1.0, 4)
    assert score_interval(0.5, 0.0, 4, True) == (0.5, 0.5), "halves are no shares of right answers"
    assert score_interval(2.0, 2.0, 4, False, True) == pytest.approx((0.0, t.interval(0.95, 3, 2.0, 2.0)[1]))
    assert score_interval(1.0, 0.0, 4, False) == (1.0, 1.0), "of a score that may be 37 nothing else is known"


def test_questions_of_one_passage_are_held_as_often_as_the_page_says() -> None:
    """docs/figures.md says 84 of 100: 20 passages of 5 questions, of which a beta law with a correlation of 0.2 says
    how many are right (numpy alone, 20,000 runs); of 4000 it is known to 0.6."""
    rng = np.random.default_rng(20261130)
    right = rng.binomial(5, rng.beta(0.5 * 4, 0.5 * 4, (4000, 20))).sum(axis=1)
    held = [low <= 0.5 <= high for low, high in (wilson_interval(n / 100, 100) for n in right)]
    assert np.mean(held) == pytest.approx(0.84, abs=0.03)


@pytest.mark.parametrize(("n", "share"), [(5, 0.95), (10, 0.99), (20, 0.99), (50, 0.99), (50, 0.5)])
def test_the_interval_of_four_needles_found_apart_holds_their_mean(n: int, share: float) -> None:
    """Each of four with this probability. 1.96 standard errors held it in 64, 33, 55, 87 and 94 of 100 draws."""
    draws = np.random.default_rng(20261127).binomial(4, share, (2000, n)) / 4
    held = [
        low <= share <= high
        for x in draws
        for low, high in [score_interval(float(x.mean()), float(x.std(ddof=1)) / n**0.5, n, True)]
    ]
    assert np.mean(held) > 0.935


@pytest.mark.parametrize(("n", "told"), [(50, 0.88), (200, 0.91)])
def test_the_page_says_how_often_the_interval_of_scores_just_above_0_holds_their_mean(n: int, told: float) -> None:
    """One item in 20 has a part. docs/figures.md has these; of 4000 draws a share is known to 0.5 %."""
    rng = np.random.default_rng(20261201)
    draws = np.where(rng.random((4000, n)) < 0.05, rng.random((4000, n)), 0.0)
    held = [
        low <= 0.025 <= high
        for x in draws
        for low, high in [score_interval(float(x.mean()), float(x.std(ddof=1)) / n**0.5, n, True)]
    ]
    assert np.mean(held) == pytest.approx(told, abs=0.02)
