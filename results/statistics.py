"""Statistics over the repeats of a cell, with an interval or a reason why there is none.

n values x_1..x_n. Intervals are two-sided 95 % intervals of the mean: Student's t below `BOOTSTRAP_FROM` values (the
bootstrap is too narrow there), BCa bootstrap from there on, and its closed form from `SERIES_FROM` on. Resamples
scatter by (n - 1) / n too little, and know no t: the bootstrap's level is raised by both. A percentile q is given from
n >= 1 / (1 - q) on: below that it would only repeat the largest value under a grander name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from results.records import Record

CONFIDENCE = 0.95
NORMAL_95 = 1.959964
"""Standard normal quantile at 97.5 %."""
BOOTSTRAP_FROM = 20
SERIES_FROM = 200
BOOTSTRAP_RESAMPLES = 2000


class Summary(Record):
    """A metric over the repeats of a cell. Interval and spread are None for n < 2."""

    n: int
    n_failed: int = 0
    mean: float | None = None
    median: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    reason: str | None = None


def summarise(values: Sequence[float], n_failed: int = 0, seed: int = 0) -> Summary:
    """Summary of the values that succeeded. Everything but n is None without values; interval None for n < 2."""
    x = np.asarray(values, dtype=np.float64)
    if x.size and not np.all(np.isfinite(x)):
        raise ValueError(
            f"summarise: {int((~np.isfinite(x)).sum())} of {x.size} values are not finite; drop them first"
        )
    if x.size == 0:
        return Summary(n=0, n_failed=n_failed, reason="no successful trial")
    if x.size == 1:
        return Summary(
            n=1, n_failed=n_failed, mean=float(x[0]), median=float(x[0]), reason="n = 1: no interval from one value"
        )
    low, high = mean_interval(x, seed)
    return Summary(
        n=int(x.size),
        n_failed=n_failed,
        mean=mean_of(x),
        median=float(np.median(x)),
        p50=float(np.median(x)),
        p90=percentile(x, 0.90),
        p95=percentile(x, 0.95),
        p99=percentile(x, 0.99),
        ci_low=low,
        ci_high=high,
    )


def percentile(values: Sequence[float] | NDArray[np.float64], q: float) -> float | None:
    """Quantile q in (0, 1), linearly interpolated; None where n < 1 / (1 - q)."""
    x = np.asarray(values, dtype=np.float64)
    # 1 / (1 - 0.9) is 10.000000000000002 in floating point.
    return float(np.quantile(x, q)) if x.size >= 1.0 / (1.0 - q) - 1e-9 else None


def mean_interval(x: NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean of n >= 2 values."""
    if x.size < BOOTSTRAP_FROM or float(np.ptp(x)) == 0.0:
        return student_interval(x)
    if x.size >= SERIES_FROM:
        return skewed_interval(x)
    from scipy import stats

    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        interval = stats.bootstrap(
            (x,),
            np.mean,
            confidence_level=_bootstrap_level(x.size),
            n_resamples=BOOTSTRAP_RESAMPLES,
            method="BCa",
            rng=np.random.default_rng(seed),
        ).confidence_interval
    if not np.isfinite([interval.low, interval.high]).all():
        # Values that differ by rounding only leave BCa nothing to correct by.
        return student_interval(x)
    return float(interval.low), float(interval.high)


def _bootstrap_level(n: int) -> float:
    """The level at which the bootstrap of n values holds their mean as often as `CONFIDENCE` says.

    1 - 2 Phi(-sqrt(n / (n - 1)) t): for even values the interval is as wide as Student's then (Hesterberg 2015, 3.3).
    """
    from scipy import special

    t = float(special.stdtrit(n - 1, 0.5 + CONFIDENCE / 2))
    return float(1 - 2 * special.ndtr(-math.sqrt(n / (n - 1)) * t))


def skewed_interval(x: NDArray[np.float64]) -> tuple[float, float]:
    """mean + g s (1 + 2 t^2) / (6 n) +- t s / sqrt(n), with g the skewness (Johnson 1978).

    BCa's interval of a mean differs from it by terms in 1 / n alone, and by the noise of its resamples (Efron 1987).
    """
    low, high = student_interval(x)
    s, mean = float(x.std(ddof=1)), float(x.mean())
    if s == 0.0:
        return low, high
    skewness = float(np.mean(((x - mean) / s) ** 3))
    t = (high - mean) * math.sqrt(x.size) / s
    shift = skewness * s * (1 + 2 * t * t) / (6 * x.size)
    return low + shift, high + shift


def student_interval(x: NDArray[np.float64]) -> tuple[float, float]:
    """mean +- t_{0.975, n-1} s / sqrt(n)."""
    from scipy import special

    mean = mean_of(x)
    if float(np.ptp(x)) == 0.0:  # else the rounding of their sum is taken for a spread
        return mean, mean
    half = float(special.stdtrit(x.size - 1, 0.5 + CONFIDENCE / 2)) * float(x.std(ddof=1)) / math.sqrt(x.size)
    return mean - half, mean + half


def mean_of(x: NDArray[np.float64]) -> float:
    """The mean, never outside the values: three of 0.7 add up to 2.0999999999999996."""
    return float(np.clip(x.mean(), x.min(), x.max()))


def relative_width(summary: Summary) -> float | None:
    """Half the interval over the mean: what a stopping rule bounds. None while there is no interval."""
    if summary.ci_low is None or summary.ci_high is None or not summary.mean:
        return None
    return (summary.ci_high - summary.ci_low) / 2 / abs(summary.mean)
