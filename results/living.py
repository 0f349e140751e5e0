"""The power of a counter between its renewals, where it neither stood still nor was left unread."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LATE_RENEWALS = 2
"""Over so many renewals behind a stand it may catch up."""
FEWEST_STEPS = 2
"""Of one alone an update's phase is in its power."""
LENGTHS_AN_OCTAVE = 8
"""Means are taken over so many lengths, and no other: what hundreds of stands ask for is computed once."""


class Living:
    """Mean powers at the renewals of one counter. All lookups take the same time, however many renewals there are."""

    def __init__(self, times_s: Array, shown_j: Array, is_still: NDArray[np.bool_]) -> None:
        """times_s, shown_j: at its renewals [n]; is_still [n - 1]: the steps between them that tell no power."""
        self._t, self._j = times_s, shown_j
        n_still = np.concatenate([[0], np.cumsum(is_still)])
        self._first = np.searchsorted(n_still, n_still, side="left")
        self._last = np.searchsorted(n_still, n_still, side="right") - 1
        self._means = lru_cache(maxsize=None)(self._all_before_w)

    def moving_after(self, k: int) -> int:
        """The renewal `LATE_RENEWALS` after the k-th, or the last before it stands still again."""
        return min(int(self._last[k]), k + LATE_RENEWALS)

    def late_w(self, k: int, peak_w: float) -> float:
        """Mean power over the step behind the k-th, with what came right after it at more than the highest power."""
        resumed, behind = k + 1, self.moving_after(k + 1)
        more_j = float(self._j[behind] - self._j[resumed]) - peak_w * float(self._t[behind] - self._t[resumed])
        return (float(self._j[resumed] - self._j[k]) + max(0.0, more_j)) / float(self._t[resumed] - self._t[k])

    def before_w(self, k: int, over_s: float) -> float | None:
        """Mean power up to the k-th renewal, as far back as it moved, or for over_s, or two steps that took longer."""
        back = min(int(np.searchsorted(self._t, self._t[k] - over_s)), k - FEWEST_STEPS)
        return self._mean_w(max(int(self._first[k]), back), k)

    def after_w(self, k: int, over_s: float) -> float | None:
        behind = max(int(np.searchsorted(self._t, self._t[k] + over_s)), k + FEWEST_STEPS)
        return self._mean_w(k, min(int(self._last[k]), behind))

    def peak_w(self, over_s: float) -> float:
        """The highest mean over so long a time while it moved; over less only where it never moved for so long.

        Whole updates in a short time may be anything: the first value has been shown since nobody knows when.
        """
        found_w, is_whole = self._means(over_s)
        whole_w = found_w[is_whole]
        return float(whole_w.max() if len(whole_w) else found_w.max(initial=0.0))

    def range_w(self, over_s: float) -> tuple[float, float] | None:
        """The lowest and the highest of the means over about so long a time; None where it hardly moved."""
        length_s = 2.0 ** (math.floor(LENGTHS_AN_OCTAVE * math.log2(over_s)) / LENGTHS_AN_OCTAVE)
        found_w, _ = self._means(length_s)
        return (float(found_w.min()), float(found_w.max())) if len(found_w) else None

    def _all_before_w(self, over_s: float) -> tuple[Array, NDArray[np.bool_]]:
        """`before_w` at all renewals where it is known, and whether it moved for so long before."""
        k = np.arange(len(self._t))
        back = np.minimum(np.searchsorted(self._t, self._t - over_s), k - FEWEST_STEPS)
        first = np.maximum(self._first, back)
        known = k - first >= FEWEST_STEPS
        k, first = k[known], first[known]
        found_w = (self._j[k] - self._j[first]) / (self._t[k] - self._t[first])
        return found_w, self._t[k] - self._t[self._first[k]] >= over_s

    def _mean_w(self, first: int, last: int) -> float | None:
        """None where the steps are too few."""
        if last - first < FEWEST_STEPS:
            return None
        return float((self._j[last] - self._j[first]) / (self._t[last] - self._t[first]))
