"""Where the level of a series changed: E-divisive splits (Matteson and James 2014) of points with error bars.

x_i: the figure of run i, in the order of the runs (logarithms, so that a step is a ratio). s_i: its standard error as
the run itself tells it. s: what runs of the same thing scatter beyond that. A point weighs w_i = 1 / (s_i^2 + s^2).

    split      of a stretch [a, b): the t and k, a < t < k <= b, with the largest
               Q = W1 W2 / (W1 + W2) (2 E|x - y| - E|x - x'| - E|y - y'|), x of [a, t), y of [t, k), all means weighted;
               W are sums of weights. k before the end finds a step that goes back later. Both parts have
               `LEAST_SEGMENT` points at least.
    test       the part before the split and the part behind it, by t of their weighted means, with the scatter of both
               pooled. p counts every place where a split could have been (Bonferroni). Where that decides nothing, the
               points of the stretch are shuffled: the share of shufflings whose largest Q is as large. Below `P_VALUE`
               it is a change. They are `SHUFFLES` at most, and the first whose Q is as large ends it.
    merge      once all splits are found, neighbours that do not differ at `P_VALUE` become one again, weakest first.

A change within `LEAST_SEGMENT` points of either end of a series can't be found: so the ends are unsure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from results.history.places import LEAST_SEGMENT, P_VALUE, Places

Array = NDArray[np.float64]

LEAST_POINTS: Final = 2 * LEAST_SEGMENT
"""Fewer hold no change that could be found."""
MOST_POINTS: Final = 400
"""The last ones of a longer series are looked at: every pair of them is."""
ROUNDING: Final = 1e-6
"""The least standard deviation of points, in logarithms or shares: of figures that come out alike every time."""
MEDIAN_CHI2: Final = 0.4549364
"""Median of the square of a standard normal value."""


@dataclass(frozen=True)
class Segment:
    """Points [first, end) of one level. error: standard error of the mean."""

    first: int
    end: int
    mean: float
    error: float

    @property
    def n(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Change:
    """at: the first point of the new level. size: new minus old. low, high: its 95 % interval."""

    at: int
    size: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Levels:
    """scatter: standard deviation of runs of the same level, without what their own error bars explain. noise: of such
    a run, with it; degrees: of freedom behind it. weights: of the points."""

    segments: tuple[Segment, ...]
    changes: tuple[Change, ...]
    scatter: float
    noise: float
    degrees: int
    weights: Array


def find_levels(values: Sequence[float] | Array, errors: Sequence[float] | Array, seed: int = 0) -> Levels:
    """values: finite, in the order of the runs. errors: standard error of each, 0 where none is known."""
    x, own = (np.asarray(v, dtype=np.float64) for v in (values, errors))
    if len(x) != len(own) or not len(x) or not np.isfinite(x).all() or not np.isfinite(own).all() or (own < 0).any():
        raise ValueError("a series is of finite values, each with a standard error that is not negative")
    if len(x) > MOST_POINTS:
        raise ValueError(f"{len(x)} points: give the last {MOST_POINTS}")
    # The scatter decides the weights, and steps must not be in it: twice, the second time within what was found. The
    # first time without steps that only shufflings tell: they are too small to move it much.
    ends = [len(x)]
    for shuffler in (None, np.random.default_rng(seed)):
        scatter = _scatter_within(x, own, ends) if len(ends) > 1 else _scatter_of_neighbours(x, own)
        weights = 1.0 / (own**2 + max(scatter, ROUNDING) ** 2)
        ends = _merged(x, weights, [*sorted(_splits(x, weights, 0, len(x), shuffler)), len(x)])
    return _levels(x, own, weights, ends, _scatter_within(x, own, ends))


def _levels(x: Array, own: Array, weights: Array, ends: Sequence[int], scatter: float) -> Levels:
    from scipy.special import stdtrit

    starts = [0, *ends[:-1]]
    variance, degrees = _pooled(x, weights, ends)
    segments = tuple(
        Segment(a, b, _mean(x, weights, a, b), math.sqrt(variance / float(weights[a:b].sum())))
        for a, b in zip(starts, ends, strict=True)
    )
    changes = []
    for before, after in pairwise(segments):
        size, p = after.mean - before.mean, _p_between(x, weights, before.first, after.first, after.end)
        half = float(stdtrit(max(degrees, 1), 0.975)) * math.hypot(before.error, after.error)
        changes.append(Change(after.first, size, size - half, size + half, p))
    noise = max(math.sqrt(scatter**2 + float(np.mean(own**2))), ROUNDING)
    return Levels(segments, tuple(changes), scatter, noise, degrees, weights)


def _pooled(x: Array, weights: Array, ends: Sequence[int]) -> tuple[float, int]:
    """Weighted squares around the levels over their degrees of freedom: 1 where error bars and scatter are true. With
    none left, it is taken as that."""
    degrees = len(x) - len(ends)
    if degrees < 1:
        return 1.0, 0
    squares = sum(_squares(x, weights, a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True))
    return squares / degrees, degrees


def _mean(x: Array, weights: Array, a: int, b: int) -> float:
    return float((x[a:b] * weights[a:b]).sum() / weights[a:b].sum())


def _squares(x: Array, weights: Array, a: int, b: int) -> float:
    return float((weights[a:b] * (x[a:b] - _mean(x, weights, a, b)) ** 2).sum())


# --- how much runs of the same thing scatter -------------------------------------------------------------------------


def _scatter_of_neighbours(x: Array, own: Array) -> float:
    """By the distances of neighbours, whose median a few steps do not move."""
    if len(x) < 3:
        return 0.0
    apart2, explained2 = np.diff(x) ** 2, own[1:] ** 2 + own[:-1] ** 2
    return _least_scatter(lambda s2: float(np.median(apart2 / (explained2 + 2 * s2))) > MEDIAN_CHI2, apart2)


def _scatter_within(x: Array, own: Array, ends: Sequence[int]) -> float:
    """Paule and Mandel 1982: with it, weighted squares around the levels are as many as degrees of freedom."""
    degrees = len(x) - len(ends)
    if degrees < 1:
        return 0.0
    edges = list(pairwise([0, *ends]))

    def is_too_small(s2: float) -> bool:
        weights = 1.0 / (own**2 + s2)
        return sum(_squares(x, weights, a, b) for a, b in edges) > degrees

    return _least_scatter(is_too_small, (x - x.mean()) ** 2 * len(x))


def _least_scatter(is_too_small: Callable[[float], bool], squares: Array) -> float:
    """The least s, to a thousandth, for whose square that does not hold. squares: beyond their largest it can't be."""
    low2, high2 = ROUNDING**2, float(squares.max())
    if high2 <= low2 or not is_too_small(low2):
        return 0.0
    while high2 / low2 > 1.002:
        middle2 = math.sqrt(low2 * high2)
        low2, high2 = (middle2, high2) if is_too_small(middle2) else (low2, middle2)
    return math.sqrt(high2)


# --- splits ----------------------------------------------------------------------------------------------------------


def _splits(x: Array, weights: Array, a: int, b: int, rng: np.random.Generator | None) -> Iterator[int]:
    """Without a generator: those that need no shuffling."""
    if b - a < LEAST_POINTS:
        return
    part, own = x[a:b], weights[a:b]
    places = Places(part, own)
    q, split, end = places.best()
    if not q > 0:
        return
    n_places = (b - a) * (b - a - 1) / 2
    p = _p_between(part, own, 0, split, end)
    if p > P_VALUE:
        return
    if p * n_places >= P_VALUE and (rng is None or not places.is_rare(q, split, end, rng)):
        return
    yield a + split
    yield from _splits(x, weights, a, a + split, rng)
    yield from _splits(x, weights, a + split, b, rng)


def _p_between(x: Array, weights: Array, a: int, t: int, b: int) -> float:
    """Two-sided, of the levels of [a, t) and [t, b)."""
    from scipy.special import stdtr

    degrees = b - a - 2
    if degrees < 1:
        return 1.0
    squares = _squares(x, weights, a, t) + _squares(x, weights, t, b)
    per_weight = 1 / float(weights[a:t].sum()) + 1 / float(weights[t:b].sum())
    # Points that come out alike scatter by their rounding.
    variance = max(squares / degrees, float(np.max(weights[a:b])) * ROUNDING**2)
    size = _mean(x, weights, t, b) - _mean(x, weights, a, t)
    return 2 * float(stdtr(degrees, -abs(size) / math.sqrt(variance * per_weight)))


def _merged(x: Array, weights: Array, ends: Sequence[int]) -> list[int]:
    """Ends of the segments that are left."""
    kept = list(ends)
    while len(kept) > 1:
        edges = [0, *kept]
        ps = [_p_between(x, weights, edges[i], edges[i + 1], edges[i + 2]) for i in range(len(kept) - 1)]
        weakest = int(np.argmax(ps))
        if ps[weakest] < P_VALUE:
            break
        del kept[weakest]
    return kept
