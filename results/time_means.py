"""How well means of a time that is known determine an energy: of power that is averaged longer than it is read.

A reading is the mean of the `M` before it, read or renewed each `s`. Taken for the power in the middle of that time,
means that meet or overlap miss nothing: their integral is that of the power, but at the edges of a window, which they
blur. Variances, one sigma:

    edge      D (M^2 + s^2) / 8 M at most, where the power steps by D at an edge, for any place of the edge between two
              readings: / sqrt(3). Of all edges linearly: the power changes at every phase edge, in the same direction.
              Means that overlap show what comes and goes within them: two readings dt apart that differ by d tell that
              the power was d M / dt higher than M before. D is the largest that was seen so near that it may be felt
    scatter   of means that hardly overlap, what varies from one to the next (`results.uncertainty`) is on either side
              of an edge: its variance times (M^2 + s^2) / 12 an edge, each for itself
    renewals  as of every power that is renewed (`results.uncertainty`): when each was, and how late all of them may be
    between   what lies between two means that do not meet (s > M) is met by chance, as that between two instants

A load that comes and goes within every mean alike looks steady: what of it lies before an edge is not told.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from results.records import PowerTrace
from results.uncertainty import PowerErrors, Scatter

Array = NDArray[np.float64]


class TimeMeanErrors:
    """What such means leave open of any window: what is the same for all windows is worked out once."""

    def __init__(self, trace: PowerTrace, averaged_s: float) -> None:
        """trace: what its readings stand for (`results.cumulative.power_samples`), one a renewal."""
        t, v = trace.times_s, trace.values
        self._trace, self._averaged_s = trace, averaged_s
        self._scatter = Scatter(v)
        self._apart_s = float(np.median(np.diff(t)))
        self._seen_s = min(trace.update_period_s, trace.sample_interval_s or trace.update_period_s)
        change_w = np.abs(np.diff(v))
        # Renewals whose times are known badly may seem to be closer than they were.
        self._rose_w = change_w * averaged_s / np.maximum(np.diff(t), self._apart_s / 2)
        self._sum_j2 = np.concatenate([[0.0], np.cumsum((change_w * self._seen_s) ** 2 / 6)])
        # Of stretches that nobody saw, as if nothing was seen of their surroundings once they are as long as the means.
        self._missed = min(1.0, 2 * max(0.0, 1 - averaged_s / self._apart_s))
        self._between = PowerErrors(trace) if self._missed > 0 else None

    def variance_j2(self, edges: Array) -> float:
        """Of the intervals [n, 2] together."""
        trace, averaged_s = self._trace, self._averaged_s
        t, v = trace.times_s, trace.values
        at_s = edges.reshape(-1)
        first = np.clip(np.searchsorted(t, at_s - averaged_s, side="right") - 1, 0, len(t) - 2)
        behind = np.clip(np.searchsorted(t, at_s + averaged_s, side="left"), first + 1, len(t) - 1)
        most_w = np.maximum(_largest(self._rose_w, first, behind), _range(v, first, behind + 1))
        reach_s2 = averaged_s**2 + min(self._apart_s, averaged_s) ** 2
        blurred_j = float(most_w.sum()) * reach_s2 / (8 * averaged_s) / math.sqrt(3)
        scatter_j2 = float(self._scatter.near_w2(np.searchsorted(t, at_s)).sum()) * reach_s2 / 12
        near = np.clip(np.searchsorted(t, edges), 0, len(t) - 1)
        renewed_j2 = float((self._sum_j2[near[:, 1]] - self._sum_j2[near[:, 0]]).sum())
        late_j = float((v[near[:, 1]] - v[near[:, 0]]).sum()) * self._seen_s / math.sqrt(12)
        missed_j2 = self._between.variance_j2(edges) * self._missed**2 if self._between is not None else 0.0
        total_s = float((edges[:, 1] - edges[:, 0]).sum())
        varies_j2 = scatter_j2 + renewed_j2 + missed_j2
        return blurred_j**2 + varies_j2 + late_j**2 + (trace.resolution * total_s) ** 2 / 12


def _largest(values: Array, first: NDArray[np.intp], behind: NDArray[np.intp]) -> Array:
    """Of values[first:behind], for each of these."""
    bounds = np.stack([first, behind], axis=1).reshape(-1)
    return np.asarray(np.maximum.reduceat(np.append(values, -np.inf), bounds)[::2])


def _range(values: Array, first: NDArray[np.intp], behind: NDArray[np.intp]) -> Array:
    return _largest(values, first, behind) + _largest(-values, first, behind)
