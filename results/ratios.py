"""Times a baseline: the ratio of two means, with its 95 % interval.

Of time and energy: A = sum over workloads of the mean over repeats of an arm, B the same of the baseline. Repeat i of
both arms is a pair, because what drifts in a run drifts for both. Fieller's theorem (1954) takes every ratio r that
a t test of d_i = a_i - r b_i does not reject; with V the squared standard errors and their covariance,

    (B^2 - t^2 V_bb) r^2 - 2 (A B - t^2 V_ab) r + (A^2 - t^2 V_aa) = 0

Several workloads add their variances; t has Welch and Satterthwaite's degrees of freedom. Where B is not known to
differ from 0 the set of ratios has no end, and there is no interval.

Of shares of right answers: Bonett and Price 2006 for paired proportions, with counts divided by the design effect as
`results.compare` does. It has a width where all answers are right. Of perplexities: e to the mean of the paired
differences of their samples' logarithms, and to its interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from results.compare import SAME, SampleScores, compare_scores, design_effect, items_of
from results.statistics import CONFIDENCE, NORMAL_95

Array = NDArray[np.float64]
ONE_PAIR = "n = 1: no interval from one pair"
BASELINE = "the baseline"
"""In reasons, for who knows its name."""


@dataclass(frozen=True)
class Ratio:
    """Of an arm's mean to the baseline's. Without a value or an interval `reason` says why. n: pairs, of the workload
    that has fewest."""

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    reason: str | None = None

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high


def ratio_of_means(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Ratio:
    """pairs: by workload, the arm's values and the baseline's, of the same repeats in the same order."""
    from scipy.special import stdtrit

    arms, bases = ([np.asarray(own[side], dtype=np.float64) for own in pairs] for side in (0, 1))
    n = min(len(own) for own in arms)
    total, base_total = (math.fsum(float(own.mean()) for own in side) for side in (arms, bases))
    if base_total == 0:
        return Ratio(None, n=n, reason=f"{BASELINE}'s mean is 0")
    ratio = total / base_total
    found = Ratio(ratio, n=n)
    if n < 2:
        return replace(found, reason=ONE_PAIR)
    v_aa, v_bb, v_ab, v_dd, over_freedom = 0.0, 0.0, 0.0, 0.0, 0.0
    for arm, base in zip(arms, bases, strict=True):
        own, other, scale = arm - arm.mean(), base - base.mean(), 1 / (len(arm) * (len(arm) - 1))
        difference = own - ratio * other
        variance = float(difference @ difference) * scale
        v_aa, v_bb, v_ab = (
            v + float(x @ y) * scale for v, x, y in ((v_aa, own, own), (v_bb, other, other), (v_ab, own, other))
        )
        v_dd, over_freedom = v_dd + variance, over_freedom + variance**2 / (len(arm) - 1)
    if math.sqrt(v_dd) <= SAME * abs(total):
        return replace(found, reason=f"the {n} pairs do not scatter around their ratio: nothing to judge by")
    t2 = float(stdtrit(v_dd**2 / over_freedom, 0.5 + CONFIDENCE / 2)) ** 2
    square, half, constant = base_total**2 - t2 * v_bb, total * base_total - t2 * v_ab, total**2 - t2 * v_aa
    inside = half**2 - square * constant
    if square <= 0 or inside < 0:
        return replace(found, reason=f"{BASELINE} scatters too widely over {n} pairs for an interval")
    root = math.sqrt(inside)
    return replace(found, low=max(0.0, (half - root) / square), high=(half + root) / square)


def widened(ratio: Ratio, relative_error: float) -> Ratio:
    """With an uncertainty of the ratio (one relative standard deviation) that its pairs do not show, because it is the
    same in all of them. In logarithms, so that no end falls below 0."""
    if not (ratio.value and ratio.low is not None and ratio.high is not None and relative_error > 0):
        return ratio
    below, above = (
        math.hypot(math.log(end / ratio.value) if end > 0 else math.inf, NORMAL_95 * relative_error)
        for end in (ratio.low, ratio.high)
    )
    return replace(ratio, low=ratio.value * math.exp(-below), high=ratio.value * math.exp(above))


def ratio_of_exponentials(arm: SampleScores, baseline: SampleScores) -> Ratio:
    """Of e to the means of logarithms of the same samples: e to the mean of their differences, and to its interval."""
    found = compare_scores(baseline, arm, is_binary=False)
    if found.low is None or found.high is None:
        return Ratio(math.exp(found.mean), n=found.n, reason=found.reason)
    try:
        return Ratio(math.exp(found.mean), math.exp(found.low), math.exp(found.high), found.n, found.reason)
    except OverflowError:
        return Ratio(math.exp(found.mean), n=found.n, reason="its interval ends beyond any number")


def ratio_of_shares(arm: SampleScores, baseline: SampleScores) -> Ratio:
    """Scores of 0 or 1 of the same samples. Repeats that both have are compared."""
    samples = sorted(baseline)
    n_repeats = min(len(own) for scores in (arm, baseline) for own in scores.values())
    after, before = (np.asarray([scores[s][:n_repeats] for s in samples]) > 0 for scores in (arm, baseline))
    n = len(samples)
    if not before.any():
        return Ratio(None, n=n, reason=f"{BASELINE} has no answer right")
    effect = design_effect(after.astype(np.int64) - before, items_of(samples))
    right_both, right_after, right_before = (
        float(x.sum()) / effect for x in (after & before, after & ~before, before & ~after)
    )
    n_any = right_both + right_after + right_before
    share_after, share_before = (right_both + own for own in (right_after, right_before))
    spread = math.sqrt((right_after + right_before + 2) / ((share_after + 1) * (share_before + 1)))
    alone = sum(math.sqrt((1 - (own + 1) / (n_any + 2)) / (own + 1)) for own in (share_after, share_before))
    z = NORMAL_95 * spread / alone
    (after_low, after_high), (before_low, before_high) = (
        _wilson_with(own, n_any, z) for own in (share_after, share_before)
    )
    return Ratio(share_after / share_before, after_low / before_high, after_high / before_low, n)


def _wilson_with(count: float, n: float, z: float) -> tuple[float, float]:
    middle = (2 * count + z**2) / (2 * (n + z**2))
    half = z * math.sqrt(z**2 + 4 * count * (1 - count / n)) / (2 * (n + z**2))
    return middle - half, middle + half
