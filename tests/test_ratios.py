"""Ratios of two means: closed forms, published tables, and how often their intervals hold the truth."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from results.ratios import Ratio, ratio_of_exponentials, ratio_of_means, ratio_of_shares, widened

FIGURES_PAGE = Path(__file__).parent.parent / "docs" / "figures.md"


def test_the_interval_holds_the_ratios_that_a_paired_t_test_does_not_reject() -> None:
    """At either end r, the differences a - r b have p = 0.05 by scipy's test."""
    rng = np.random.default_rng(3)
    base = rng.normal(2.0, 0.3, 6)
    arm = 0.6 * base + rng.normal(0.0, 0.1, 6)
    found = ratio_of_means([(arm.tolist(), base.tolist())])
    assert found.value == pytest.approx(arm.mean() / base.mean())
    assert found.low is not None
    assert found.high is not None
    for end in (found.low, found.high):
        # Fieller's set takes the degrees of freedom of one sample, as the t test does.
        assert stats.ttest_1samp(arm - end * base, 0.0).pvalue == pytest.approx(0.05)
    assert found.is_clear


def test_drift_that_both_arms_share_cancels() -> None:
    drift = np.array([1.0, 2.0, 3.0, 4.0])
    alike = ratio_of_means([((0.5 * drift + 0.01 * np.array([1, -1, 1, -1])).tolist(), drift.tolist())])
    assert alike.low is not None
    assert alike.high is not None
    assert alike.low > 0.45
    assert alike.high < 0.55


def test_workloads_add_up() -> None:
    """Totals 3 + 30 over 2 + 20; the second workload alone has scatter."""
    found = ratio_of_means([([3.0, 3.0], [2.0, 2.0]), ([29.0, 31.0], [20.0, 20.0])])
    assert found.value == pytest.approx(1.5)
    # One degree of freedom: t = 12.706; V_aa = 2 / 2, B = 22.
    assert found.high == pytest.approx(1.5 + 12.7062 * 1.0 / 22)


@pytest.mark.parametrize(
    ("arm", "base", "reason"),
    [
        ([1.0], [2.0], "n = 1"),
        ([1.0, 2.0], [2.0, 4.0], "2 pairs do not scatter around their ratio"),
        # No pair has the ratio of another: one alone decides, or the arm has 0 wherever the baseline has something.
        ([0.4, 9e-22], [0.1, 3e-21], "2 pairs do not scatter around their ratio"),
        ([0.0, 0.0], [0.25, 0.0], "2 pairs do not scatter around their ratio"),
        ([1.0, 1.1], [0.01, 2.0], "scatters too widely"),
        ([1.0, 1.1], [0.0, 0.0], "baseline's mean is 0"),
    ],
)
def test_where_there_is_no_interval_a_reason_stands(arm: list[float], base: list[float], reason: str) -> None:
    found = ratio_of_means([(arm, base)])
    assert (found.low, found.high) == (None, None)
    assert reason in (found.reason or "")
    assert not found.is_clear


@pytest.mark.parametrize(("n", "n_workloads", "spread"), [(3, 1, 0.05), (3, 4, 0.2), (10, 2, 0.3)])
def test_intervals_of_means_hold_the_truth_in_95_of_100_runs(n: int, n_workloads: int, spread: float) -> None:
    """Skewed noise (lognormal) on each arm, and a drift of 20 % that pairs share."""
    rng, n_runs, truth = np.random.default_rng(5), 400, 0.7
    held = 0
    for _ in range(n_runs):
        pairs = []
        for workload in range(1, n_workloads + 1):
            drift = workload * np.exp(0.2 * rng.standard_normal(n))
            noise = np.exp(spread * rng.standard_normal((2, n)) - spread**2 / 2)
            pairs.append(((truth * drift * noise[0]).tolist(), (drift * noise[1]).tolist()))
        found = ratio_of_means(pairs)
        held += found.low is None or found.high is None or found.low <= truth <= found.high
    assert held / n_runs >= 0.93


def test_an_error_that_pairs_share_widens_both_ends_by_logarithms() -> None:
    """Both ends lie 2 times away, and the error takes 3 more: sqrt(ln 2 ^ 2 + ln 3 ^ 2). Below 1 too."""
    found = widened(Ratio(0.5, 0.25, 1.0, 4), math.log(3) / stats.norm.ppf(0.975))
    away = math.exp(math.sqrt(math.log(2) ** 2 + math.log(3) ** 2))
    assert (found.value, found.n) == (0.5, 4)
    assert (found.low, found.high) == pytest.approx((0.5 / away, 0.5 * away))


def test_an_end_at_0_stays_there() -> None:
    assert widened(Ratio(0.5, 0.0, 1.0, 4), 0.1).low == 0.0


# --- shares of right answers -----------------------------------------------------------------------------------------


def scores(right: list[int]) -> dict[str, tuple[float, ...]]:
    return {f"s{i}": (float(value),) for i, value in enumerate(right)}


def test_the_interval_of_paired_shares_is_bonett_and_prices() -> None:
    """Their form of 2006 by hand: 20 right with both, 3 with the arm alone, 12 with the baseline alone, 2 with none."""
    arm = scores([1] * 20 + [1] * 3 + [0] * 12 + [0] * 2)
    base = scores([1] * 20 + [0] * 3 + [1] * 12 + [0] * 2)
    found = ratio_of_shares(arm, base)
    n_any, n_arm, n_base = 35, 23, 32

    def score_interval(count: int, z: float) -> tuple[float, float]:
        middle, half = 2 * count + z**2, z * math.sqrt(z**2 + 4 * count * (1 - count / n_any))
        return (middle - half) / (2 * (n_any + z**2)), (middle + half) / (2 * (n_any + z**2))

    a = math.sqrt((3 + 12 + 2) / ((n_arm + 1) * (n_base + 1)))
    b, c = (math.sqrt((1 - (count + 1) / (n_any + 2)) / (count + 1)) for count in (n_arm, n_base))
    z = a / (b + c) * 1.959964
    (arm_low, arm_high), (base_low, base_high) = score_interval(n_arm, z), score_interval(n_base, z)
    assert found.value == pytest.approx(23 / 32)
    assert (found.low, found.high) == pytest.approx((arm_low / base_high, arm_high / base_low))


def test_all_right_twice_is_no_certainty() -> None:
    found = ratio_of_shares(scores([1] * 30), scores([1] * 30))
    assert found.value == 1.0
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.95 < 1.05 < found.high


@pytest.mark.parametrize(
    ("n", "n_repeats", "right", "lost", "won"),
    [(60, 1, 0.5, 0.3, 0.3), (100, 1, 0.3, 0.1, 0.4), (40, 3, 0.9, 0.1, 0.0)],
)
def test_intervals_of_shares_hold_the_truth_in_95_of_100_runs(
    n: int, n_repeats: int, right: float, lost: float, won: float
) -> None:
    rng, n_runs = np.random.default_rng(6), 400
    truth, held = (right * (1 - lost) + (1 - right) * won) / right, 0
    for _ in range(n_runs):
        before, chance = rng.random((n, n_repeats)) < right, rng.random((n, n_repeats))
        after = np.where(before, chance >= lost, chance < won)
        arm, base = ({str(i): tuple(own) for i, own in enumerate(x.astype(float).tolist())} for x in (after, before))
        found = ratio_of_shares(arm, base)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= truth <= found.high
    assert held / n_runs >= 0.93


@pytest.mark.parametrize(("lost_of_100", "held"), [(2, 87), (3, 95)])
def test_the_page_says_how_often_the_ratio_of_an_arm_that_only_loses_is_held(lost_of_100: int, held: int) -> None:
    """No draw: how many of 100 are lost is binomial, and each number of them has one interval."""
    told = " ".join(FIGURES_PAGE.read_text().split())
    sentences = {
        2: "If it loses 2 % of them in the long run, the interval holds the ratio in 87 of 100 runs of 100 items",
        3: "If it loses 3 %, that is 95.",
    }
    assert sentences[lost_of_100] in told
    truth, share = 1 - lost_of_100 / 100, 0.0
    for n_lost in range(40):
        found = ratio_of_shares(scores([1] * (100 - n_lost) + [0] * n_lost), scores([1] * 100))
        assert found.low is not None
        assert found.high is not None
        if found.low <= truth <= found.high:
            share += float(stats.binom.pmf(n_lost, 100, lost_of_100 / 100))
    assert round(100 * share) == held


def test_an_interval_of_exponentials_that_ends_beyond_any_number_is_none() -> None:
    """Differences of 598 and -0.5 nats: mean 298.75; 12.706 times 598.5 / 2 above it lies beyond 709.8, e to which is
    the largest double."""
    found = ratio_of_exponentials({"a": (600.0,), "b": (2.0,)}, {"a": (2.0,), "b": (2.5,)})
    assert found.value == pytest.approx(math.exp(298.75))
    assert (found.low, found.high, found.is_clear) == (None, None, False)
    assert found.reason == "its interval ends beyond any number"
