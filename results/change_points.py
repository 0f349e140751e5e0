"""Where the level of a series changes: E-divisive with a permutation test.

The split that parts a stretch best has the largest energy statistic, (nm / (n + m)) (2 E|X - Y| - E|X - X'| -
E|Y - Y'|); it counts where fewer than one in a hundred reorderings of the stretch part as well by their best split.
Both sides are split again. (Matteson and James 2014, A nonparametric approach for multiple change point analysis of
multivariate data.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEAST_SEGMENT = 4
"""Values on each side of a split."""
PERMUTATIONS = 199
SIGNIFICANCE = 0.01


def change_points(values: Sequence[float] | NDArray[np.float64], seed: int = 0) -> list[int]:
    """Indices at which a new level begins, ascending. Values: some hundreds at most, as time grows with n squared."""
    x = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    found: list[int] = []
    open_ = [(0, x.size)]
    while open_:
        start, end = open_.pop()
        at = _split(x[start:end], rng)
        if at is not None:
            found.append(start + at)
            open_ += [(start, start + at), (start + at, end)]
    return sorted(found)


def _split(x: NDArray[np.float64], rng: np.random.Generator) -> int | None:
    if x.size < 2 * LEAST_SEGMENT or float(np.ptp(x)) == 0.0:
        return None
    distances = np.abs(x[:, None] - x[None, :])
    at, best = _best(distances)
    above = 0
    for _ in range(PERMUTATIONS):
        order = rng.permutation(x.size)
        above += _best(distances[np.ix_(order, order)])[1] >= best
        if above + 1 >= SIGNIFICANCE * (PERMUTATIONS + 1):
            return None
    return at


def _best(distances: NDArray[np.float64]) -> tuple[int, float]:
    """(where, the statistic) of the best split of a stretch, by its matrix of distances."""
    n = len(distances)
    corner = distances.cumsum(axis=0).cumsum(axis=1)
    k = np.arange(LEAST_SEGMENT, n - LEAST_SEGMENT + 1)
    within_left = corner[k - 1, k - 1]
    across = corner[k - 1, n - 1] - within_left
    within_right = corner[n - 1, n - 1] - within_left - 2 * across
    m = n - k
    statistics = k * m / n * (2 * across / (k * m) - within_left / k**2 - within_right / m**2)
    best = int(np.argmax(statistics))
    return int(k[best]), float(statistics[best])
