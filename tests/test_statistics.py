"""Intervals and percentiles against scipy, closed forms and repeated draws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from results.statistics import (
    BOOTSTRAP_FROM,
    NORMAL_95,
    SERIES_FROM,
    Summary,
    mean_interval,
    percentile,
    relative_width,
    summarise,
)

FIGURES_PAGE = Path(__file__).parent.parent / "docs" / "figures.md"

values_lists = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=BOOTSTRAP_FROM - 1)


@given(values=values_lists)
def test_interval_of_few_values_is_scipys_student_interval(values: list[float]) -> None:
    x = np.array(values)
    assume(np.ptp(x) > 0)  # scipy divides by the spread
    expected = stats.ttest_1samp(x, 0.0).confidence_interval(0.95)
    assert mean_interval(x) == pytest.approx((expected.low, expected.high), rel=1e-9, abs=1e-9)


def test_interval_of_three_values_by_hand() -> None:
    # mean 4, s = 2, t(0.975, 2) = 4.302653: 4 +- 4.302653 * 2 / sqrt(3).
    summary = summarise([2.0, 4.0, 6.0])
    assert (summary.mean, summary.median) == (4.0, 4.0)
    assert (summary.ci_low, summary.ci_high) == pytest.approx((-0.968275, 8.968275), abs=1e-5)


def test_of_skewed_values_the_median_is_not_the_mean() -> None:
    summary = summarise([1.0, 2.0, 9.0])
    assert (summary.mean, summary.median, summary.p50) == (4.0, 2.0, 2.0)


def test_student_interval_holds_the_mean_in_95_of_100_samples() -> None:
    rng = np.random.default_rng(3)
    covered = [low <= 10 <= high for low, high in (mean_interval(rng.normal(10, 3, 5)) for _ in range(1000))]
    # 0.95 +- three binomial standard deviations.
    assert np.mean(covered) == pytest.approx(0.95, abs=0.021)


@pytest.mark.parametrize("draw", ["normal", "lognormal"])
def test_bootstrap_interval_of_many_values_holds_the_mean(draw: str) -> None:
    rng = np.random.default_rng(5)
    true_mean = 0.0 if draw == "normal" else float(np.exp(0.5 * 0.4**2))
    samples = [rng.normal(0, 2, 40) if draw == "normal" else rng.lognormal(0, 0.4, 40) for _ in range(100)]
    intervals = [mean_interval(x, seed=i) for i, x in enumerate(samples)]
    # BCa covers a little less than it promises at n = 40; 0.88 is two binomial standard deviations below 0.93.
    assert np.mean([low <= true_mean <= high for low, high in intervals]) >= 0.88


def test_bootstrap_is_as_wide_as_students_interval_for_normal_values() -> None:
    x = np.random.default_rng(2).normal(50, 5, 60)
    low, high = mean_interval(x)
    half = stats.t.ppf(0.975, 59) * x.std(ddof=1) / np.sqrt(60)
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)


@pytest.mark.parametrize("n", [BOOTSTRAP_FROM, 40, SERIES_FROM - 1])
def test_bootstrap_of_even_values_is_no_narrower_than_students_interval(n: int) -> None:
    # Quantiles of a normal distribution: Student's interval is exact for what they stand for. At a level of 95 % the
    # bootstrap of 20 has sqrt(19 / 20) 1.960 / 2.093 = 0.913 of its width. Resamples of 2000 place an end to 2 %.
    x = stats.norm.ppf((np.arange(n) + 0.5) / n)
    half = stats.t.ppf(0.975, n - 1) * x.std(ddof=1) / np.sqrt(n)
    widths = [(high - low) / 2 / half for low, high in (mean_interval(x, seed) for seed in range(20))]
    assert np.mean(widths) == pytest.approx(1.0, abs=0.015)


def test_bootstrap_is_the_same_for_the_same_seed() -> None:
    x = np.random.default_rng(1).lognormal(size=30)
    assert mean_interval(x, seed=4) == mean_interval(x, seed=4)
    assert mean_interval(x, seed=4) != mean_interval(x, seed=5)


@pytest.mark.filterwarnings("error")
@settings(max_examples=30)
@example(common=1.0, other=1.0 + 2**-52, n=20)
@example(common=0.0, other=1e-200, n=20)
@given(common=st.floats(-1e3, 1e3), other=st.floats(-1e3, 1e3), n=st.integers(BOOTSTRAP_FROM, 40))
def test_interval_is_finite_and_holds_the_mean_for_nearly_equal_values(common: float, other: float, n: int) -> None:
    x = np.array([common] * (n - 1) + [other])
    low, high = mean_interval(x)
    slack = 1e-9 * (1 + abs(common) + abs(other))
    assert low - slack <= x.mean() <= high + slack


def test_equal_values_have_an_interval_of_no_width() -> None:
    for value, n in ((3.5, 5), (3.5, 25), (0.7, 3), (0.7, 25)):  # three of 0.7 add up to less than 2.1
        summary = summarise([value] * n)
        assert (summary.mean, summary.ci_low, summary.ci_high) == (value, value, value)


def test_one_value_has_no_interval_but_a_reason() -> None:
    summary = summarise([3.0])
    assert (summary.n, summary.mean, summary.median) == (1, 3.0, 3.0)
    assert (summary.ci_low, summary.ci_high, summary.p50) == (None, None, None)
    assert summary.reason == "n = 1: no interval from one value"


def test_no_value_has_nothing_but_a_reason() -> None:
    summary = summarise([], n_failed=4)
    assert summary == Summary(n=0, n_failed=4, reason="no successful trial")


def test_failed_trials_are_carried_not_averaged() -> None:
    summary = summarise([1.0, 2.0, 3.0], n_failed=2)
    assert (summary.n, summary.n_failed, summary.mean) == (3, 2, 2.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_value_that_is_not_a_number_is_refused_not_averaged(bad: float) -> None:
    with pytest.raises(ValueError, match="1 of 3 values are not finite"):
        summarise([1.0, bad, 2.0])


@pytest.mark.parametrize(("q", "enough"), [(0.5, 2), (0.90, 10), (0.95, 20), (0.99, 100)])
def test_percentile_needs_values_beyond_it(q: float, enough: int) -> None:
    assert percentile([float(v) for v in range(enough - 1)], q) is None
    # Linear interpolation between order statistics: q (n - 1) for 0, 1, ..., n - 1.
    assert percentile([float(v) for v in range(enough)], q) == pytest.approx(q * (enough - 1))


def test_summary_gives_the_percentiles_its_size_allows() -> None:
    twenty = summarise([float(v) for v in range(20)])
    assert (twenty.p50, twenty.p90, twenty.p95) == pytest.approx((9.5, 17.1, 18.05))
    assert twenty.p99 is None
    assert (summarise([1.0] * 9).p90, summarise([1.0] * 10).p90) == (None, 1.0)


def test_relative_width_is_half_the_interval_over_the_mean() -> None:
    assert relative_width(Summary(n=5, mean=-20.0, ci_low=-21.0, ci_high=-19.0)) == pytest.approx(0.05)


def test_relative_width_is_unknown_without_interval_or_around_zero() -> None:
    assert relative_width(summarise([4.0])) is None
    assert relative_width(Summary(n=5, mean=0.0, ci_low=-1.0, ci_high=1.0)) is None


def drifting(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Of variance 1, half of each the one before it."""
    values = rng.normal(0.0, 1.0, shape)
    for i in range(1, shape[1]):
        values[:, i] = 0.5 * values[:, i - 1] + 0.75**0.5 * values[:, i]
    return values


@pytest.mark.parametrize(
    ("scatter", "draw"),
    [
        ("even (normal)", lambda rng, shape: rng.normal(0.0, 1.0, shape)),
        ("to one side (exponential)", lambda rng, shape: rng.exponential(1.0, shape) - 1.0),
        (
            "one trial in ten takes three times as long",
            lambda rng, shape: np.where(rng.random(shape) < 0.1, 3.0, 1.0) * rng.normal(1.0, 0.03, shape) - 1.2,
        ),
        ("each is like the one before it (correlation 0.5)", drifting),
    ],
)
def test_the_page_says_how_often_an_interval_of_few_values_holds_the_mean(
    scatter: str, draw: Callable[[np.random.Generator, tuple[int, int]], NDArray[np.float64]]
) -> None:
    """All have a mean of 0; of 3000 cells a share is known to 0.9 %. The page's are numpy's alone, of 40,000."""
    rows = [
        [cell.strip() for cell in line.strip("| \n").split("|")]
        for line in FIGURES_PAGE.read_text().splitlines()
        if line.startswith(("| trials |", f"| {scatter} |"))
    ]
    assert [row[0] for row in rows] == ["trials", scatter]
    rng = np.random.default_rng(20261127)
    for n, told in zip(rows[0][1:], rows[1][1:], strict=True):
        cells = draw(rng, (3000, int(n)))
        held = [low <= 0.0 <= high for low, high in map(mean_interval, cells)]
        assert np.mean(held) == pytest.approx(float(told.removesuffix(" %")) / 100, abs=0.03)


@pytest.mark.parametrize("draw", ["exponential", "lognormal", "normal"])
def test_the_closed_form_of_many_values_is_the_bootstraps_interval(draw: str) -> None:
    """scipy's BCa with ten times our resamples; its own noise is about 2 % of half the interval."""
    x = getattr(np.random.default_rng(7), draw)(size=400)
    expected = stats.bootstrap((x,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(1))
    low, high = mean_interval(x)
    half = (expected.confidence_interval.high - expected.confidence_interval.low) / 2
    assert low == pytest.approx(expected.confidence_interval.low, abs=0.06 * half)
    assert high == pytest.approx(expected.confidence_interval.high, abs=0.06 * half)


@pytest.mark.parametrize("n_high", [10, 190])
def test_the_interval_of_many_values_is_shifted_to_the_longer_side_by_johnsons_term(n_high: int) -> None:
    """Of 200 values of 0 and 1 with a share p of ones: third moment p (1 - p) (1 - 2 p), s^2 = p (1 - p) 200 / 199."""
    p, n, t = n_high / 200, 200, float(stats.t.ppf(0.975, 199))
    x = np.array([1.0] * n_high + [0.0] * (n - n_high))
    variance = p * (1 - p) * n / (n - 1)
    third_moment = p * (1 - p) * (1 - 2 * p)
    low, high = mean_interval(x)
    # Johnson (1978): mean + m3 / (6 s^2 n) and m3 (mean - mu)^2 / (3 s^4) at t s / sqrt(n).
    assert (low + high) / 2 - p == pytest.approx(
        third_moment / (6 * variance * n) + third_moment * t**2 / (3 * variance * n)
    )
    assert high - low == pytest.approx(2 * t * (variance / n) ** 0.5)


def test_the_normal_quantile_is_scipys() -> None:
    assert pytest.approx(stats.norm.ppf(0.975), abs=1e-6) == NORMAL_95


def test_the_closed_form_holds_the_mean_of_skewed_values_as_often_as_it_says() -> None:
    rng = np.random.default_rng(20261122)
    samples = rng.exponential(1.0, (2000, SERIES_FROM))
    covered = np.mean([low <= 1.0 <= high for low, high in map(mean_interval, samples)])
    # 95 % with a standard error of 0.5 %.
    assert 0.935 <= covered <= 0.965
