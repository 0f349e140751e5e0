"""How well readings determine an energy: variances of what the meter did not show, without its gain.

Standard uncertainty (one sigma; dP is a change of power, w the time in which it may have happened):

    power, held   dP sqrt(dt^2 + 4 u^2) / sqrt(12) a change (held: 4 dt^2): anywhere between two readings dt apart,
                  and shown up to one update period u late;
                  |P1 - P0| u / 2 from the window's start to its end: changes show late, by half an update on average
                  (held: and half a reading);
                  s d a value that was shown for one reading or update d only: see scatter
    counter       P w / sqrt(12) an edge: the age of its value; the value's step: q / sqrt(12);
                  dP dt f (1 - f): an edge at fraction f of the distance dt between two readings;
                  s dt sqrt(f (1 - f) + w / 2 dt): what varies from step to step is on either side of the edge

**Scatter** s: what comes and goes faster than it is read was met by chance. Its variance at a value x between its
neighbours is (x - x_before)(x - x_after) on average: the variance where values are independent, the square of a lone
spike, 0 beside a step of the power, less on a ramp.

Terms are added in quadrature, but those of changes at the edges linearly: the power changes at every phase edge, in the
same direction, and so does the error. Elsewhere changes are taken to fall anywhere between readings, each for itself: a
load that alternates in step with the sampler errs more than stated here, and its readings cannot tell.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from results.records import PowerTrace

Array = NDArray[np.float64]

ONCE_FACTOR = 1.5
"""A value that stood for less than this many readings or updates was shown once."""
NEAR_STEPS = 5
"""Steps of a counter on either side of an edge that tell how they scatter."""


def power_variance_j2(trace: PowerTrace, edges: Array) -> float:
    """Of the changes that the intervals [n, 2] may have felt, and of the reading's step over the whole.

    A change shows at most one update period after it happened, so those that show until then after an edge count.
    """
    t, v, update_s = trace.times_s, trace.values, trace.update_period_s
    between = 4.0 if trace.kind == "held" else 1.0
    change_j = np.abs(np.diff(v)) * np.sqrt((between * np.diff(t) ** 2 + 4 * update_s**2) / 12)
    sum_j = np.concatenate([[0.0], np.cumsum(change_j)])
    sum_j2 = np.concatenate([[0.0], np.cumsum(change_j**2)])
    first = np.clip(np.searchsorted(t, edges, side="right") - 1, 0, len(t) - 1)
    last = np.clip(np.searchsorted(t, edges + update_s, side="left"), 0, len(t) - 1)
    at_edges_j, at_edges_j2 = (sum_j[last] - sum_j[first]).sum(), (sum_j2[last] - sum_j2[first]).sum()
    inside_j2 = max(0.0, float((sum_j2[last[:, 1]] - sum_j2[first[:, 0]]).sum() - at_edges_j2))
    scatter_j2 = _scatter_j2(trace, change_j, first[:, 0], last[:, 1])
    late_j = float((v[last[:, 1]] - v[first[:, 0]]).sum()) * _lateness_s(trace, int(first.min()), int(last.max()))
    total_s = float((edges[:, 1] - edges[:, 0]).sum())
    return inside_j2 + scatter_j2 + late_j**2 + float(at_edges_j) ** 2 + (trace.resolution * total_s) ** 2 / 12


def _lateness_s(trace: PowerTrace, first: int, last: int) -> float:
    """How late changes show between two readings, on average: half an update; a held value by half its stand too."""
    if trace.kind == "held" and last > first:
        return (trace.update_period_s + float(np.median(np.diff(trace.times_s[first : last + 1])))) / 2
    return trace.update_period_s / 2


def _scatter_j2(trace: PowerTrace, change_j: Array, first: NDArray[np.intp], last: NDArray[np.intp]) -> float:
    """The scatter of values that were shown once, between readings first and last, beyond what their changes count.

    From n such values it is known as their number is: up to (1 + sqrt(n))^2 / n of what was seen (Gehrels 1986, eq. 7).
    """
    t, v = trace.times_s, trace.values
    begins = np.flatnonzero(np.concatenate([[True], np.diff(v) != 0]))
    if len(begins) < 3:
        return 0.0
    before, shown, after = begins[:-2], begins[1:-1], begins[2:]
    shown_s = t[after] - t[shown]
    once = shown_s < ONCE_FACTOR * max(trace.update_period_s, trace.sample_interval_s)
    opened = np.bincount(first + 1, minlength=len(t) + 2) - np.bincount(last + 1, minlength=len(t) + 2)
    inside = (np.cumsum(opened)[shown] > 0) & once
    found_j2 = ((v[shown] - v[before]) * (v[shown] - v[after]) * shown_s**2)[inside]
    counted_j2 = (change_j[shown - 1] ** 2 + change_j[after - 1] ** 2)[inside]
    stands_out = found_j2 > 0
    n = int(stands_out.sum())
    if n == 0:
        return 0.0
    at_most_j2 = float(found_j2.sum()) * float((1 + np.sqrt(n)) ** 2) / n
    return max(0.0, at_most_j2 - float(counted_j2[stands_out].sum()))


def counter_variance_j2(times_s: Array, watts: Array, renewed_within_s: Array, step_j: float, edges: Array) -> float:
    """Of the edges [n, 2] of the intervals, between the readings [m] of a counter; watts: of its steps [m - 1]."""
    at_s = edges.reshape(-1)
    i = np.clip(np.searchsorted(times_s, at_s, side="right") - 1, 0, len(watts) - 1)
    dt = times_s[i + 1] - times_s[i]
    f = np.clip((at_s - times_s[i]) / dt, 0.0, 1.0)
    near_w = np.stack([watts[np.maximum(i - 1, 0)], watts[i], watts[np.minimum(i + 1, len(watts) - 1)]])
    within_s = renewed_within_s
    age_j2 = (((1 - f) * near_w[0] * within_s[i]) ** 2 + (f * watts[i] * within_s[i + 1]) ** 2) / 12
    interpolated_j = np.ptp(near_w, axis=0) * dt * f * (1 - f)
    either_side = np.minimum(f * (1 - f) + within_s[i] / (2 * dt), 0.25)
    scatter_j2 = _scatter_near_w2(watts, i) * dt**2 * either_side
    return float((age_j2 + scatter_j2 + step_j**2 / 12).sum() + interpolated_j.sum() ** 2)


def _scatter_near_w2(watts: Array, i: NDArray[np.intp]) -> Array:
    """Variance of a counter's steps around the i-th of them, as power."""
    if len(watts) < 3:
        return np.zeros(len(i))
    sum_w2 = np.concatenate([[0.0], np.cumsum((watts[1:-1] - watts[:-2]) * (watts[1:-1] - watts[2:]))])
    low = np.clip(i - 1 - NEAR_STEPS, 0, len(watts) - 2)
    high = np.clip(i + NEAR_STEPS, low + 1, len(watts) - 2)
    low = np.minimum(low, high - 1)
    found: Array = np.maximum((sum_w2[high] - sum_w2[low]) / (high - low), 0.0)
    return found
