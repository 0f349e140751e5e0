"""Power that steps at known edges: a window's, or a phase's, where the load begins, changes or ends.

A line between two readings spreads such a step over the time between them. Where a load begins and ends with its
window, both ends then lie partly outside of it, and the joules are always too low: by D dt / 6 an edge on average where
instants dt apart see a step by D, by more where their times are known to a part of an update. So what changes at an
edge is put there. What a line follows (`results.uncertainty`) is no step, and stays.

A gauge shows an instant, or the mean of the update before it. A mean that an edge cuts at a share s of its update lies
between two levels, and the next one is 1 - s of the whole step off: no more of the next change is put to the edge too.

A mean of a time M that is known, and that ends M behind a start, or at an end, holds nothing of what is on the other
side of that edge: its joules are those of that time, whatever the power did. A line through the means has D M / 8 less
where a load begins with power D, and as much where it ends.

Some gauges show a step later than that, by a delay of their own, or as work keeps them waiting. Where an edge shows
next to nothing, and the largest step of the next updates comes later, what flowed meanwhile may be missing, or be too
much where power falls. Rises and falls inside a window make up for each other where both are late. One standard
uncertainty is 1 / sqrt(3) of their sum. A single one is no delay of the gauge's; but one that stands still as the load
begins, and leaps later, may have been stuck then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from results.cumulative import Cumulative, energy_at
from results.intervals import Interval
from results.records import PowerTrace
from results.uncertainty import sudden_steps_w

Array = NDArray[np.float64]


LATE_UPDATES = 5.0
"""So long behind an edge its step may be shown,"""
LATE_FACTOR = 3.0
"""where it is so many times what was shown at the edge itself."""
MOSTLY_LATE = 0.5
"""Of the rises, or of the falls: fewer are late by what the load does,"""
STUCK_FACTOR, STUCK_UPDATES = 20.0, 12.0
"""but where all changes before the step are so many times smaller, for up to so many updates: longer ones are gaps
(`devices.gauges`)."""
SHORT_UPDATES = 2.0
"""Less says nothing of its own."""


class LoadEdges:
    """Readings of power, and how they change: what is the same for all windows is worked out once."""

    def __init__(self, trace: PowerTrace, older_s: float) -> None:
        """trace: what its readings stand for, `older_s` before their renewal (`results.cumulative.power_samples`)."""
        self._at_s, self._update_s, self._older_s = trace.times_s, trace.update_period_s, older_s
        self._steps_w = sudden_steps_w(trace)
        self._change_w = np.copysign(self._steps_w, np.diff(trace.values))

    def stepped_j(self, edges: Array) -> float:
        """Joules that intervals [n, 2] have more than by lines between the watts, where power steps at their edges.

        Two edges between the same two readings saw no step that would be of one of them: these stay.
        """
        at_s, change_w, edge_s = self._at_s, self._change_w, edges.reshape(-1)
        # A reading at an edge shows the power behind it.
        i = np.clip(np.searchsorted(at_s, edge_s - self._older_s, side="left") - 1, 0, len(change_w) - 1)
        _, which, n_edges = np.unique(i, return_inverse=True, return_counts=True)
        found_j = change_w[i] * _moved_s(at_s, i, edge_s)
        if self._update_s > 0:
            k = np.minimum(i + 1, len(change_w) - 1)
            cut = np.clip((at_s[k] + self._older_s - edge_s) / self._update_s, 0.0, 1.0)
            whole_w = change_w[i] + change_w[k]
            goes_on = (k > i) & (change_w[i] * change_w[k] > 0)
            rest_w = np.sign(whole_w) * np.minimum(np.abs(change_w[k]), (1 - cut) * np.abs(whole_w))
            found_j += np.where(goes_on, rest_w, 0.0) * _moved_s(at_s, k, edge_s)
        return float(found_j[n_edges[which] == 1].sum())

    def late_j2(self, stretches: Array) -> float:
        """Variance of what these [n, 2] may have more, or less, as the steps at their starts were shown late."""
        # Of each direction: what is missing behind each step, 0 where it was shown in time.
        missing_j: dict[bool, list[float]] = {True: [], False: []}
        stuck_j: dict[bool, list[float]] = {True: [], False: []}
        for start_s, end_s in _long_enough(stretches, SHORT_UPDATES * self._update_s):
            found = self._largest_behind(start_s, end_s, LATE_UPDATES)
            if found is None:
                continue
            missing_j[found.is_rise].append(found.missing_j if found.is_late else 0.0)
            found = self._largest_behind(start_s, end_s, STUCK_UPDATES) or found
            if found.was_stuck:
                stuck_j[found.is_rise].append(found.missing_j)
        late_j, alone_j2 = 0.0, 0.0
        for is_rise, own in missing_j.items():
            if np.count_nonzero(own) >= MOSTLY_LATE * len(own):
                late_j += math.fsum(own)
            else:
                alone_j2 += math.fsum(one**2 for one in stuck_j[is_rise])
        return (late_j**2 + alone_j2) / 3

    def _largest_behind(self, start_s: float, end_s: float, updates: float) -> _Step | None:
        """Within so many updates. None where too little of them was seen."""
        at_s, steps_w, update_s, older_s = self._at_s, self._steps_w, self._update_s, self._older_s
        k = max(int(at_s.searchsorted(start_s - older_s)) - 1, 0)
        last = int(at_s.searchsorted(min(start_s + updates * update_s, end_s) - older_s, side="right"))
        if last <= k + 2:
            return None
        step = k + int(np.argmax(steps_w[k:last]))
        before_w = steps_w[k:step]
        # Of a gauge of means two changes are of one step, the first by as much as the edge cuts off its update.
        cut = min(max((at_s[k + 1] + older_s - start_s) / update_s, 0.0), 1.0) if step == k + 1 else 1.0
        change_w, late_s = float(self._change_w[step]), float((at_s[step] + at_s[step + 1]) / 2 + older_s - start_s)
        return _Step(
            is_rise=change_w > 0,
            missing_j=change_w * late_s,
            is_late=step > k and bool(cut * steps_w[step] > LATE_FACTOR * before_w[:2].max()),
            was_stuck=step > k + 1 and bool(steps_w[step] > STUCK_FACTOR * before_w.max()),
        )


def means_at_edges_j(curve: Cumulative, averaged_s: float, edges: Array) -> float:
    """Joules that intervals [n, 2] have more than by lines between means of so long, by the first and the last mean in
    each; those that hold no two of them stay."""
    assert curve.watts is not None
    starts_s, ends_s = edges[edges[:, 1] - edges[:, 0] >= 2 * averaged_s].T
    begins_s = np.concatenate([starts_s, ends_s - averaged_s])
    # None of a time that reaches across the edge.
    first = np.searchsorted(curve.times_s, starts_s + averaged_s / 2)
    last = np.searchsorted(curve.times_s, ends_s - averaged_s / 2, side="right") - 1
    means_w = curve.watts[np.concatenate([first, last])]
    by_lines_j = energy_at(curve, begins_s + averaged_s) - energy_at(curve, begins_s)
    return float((means_w * averaged_s - by_lines_j).sum())


class _Step(NamedTuple):
    """The largest behind a start, and what is missing if it was there."""

    is_rise: bool
    missing_j: float
    is_late: bool
    was_stuck: bool


def _long_enough(stretches: Array, least_s: float) -> Iterator[Interval]:
    """Those [n, 2] that are; the step of a short one is looked for in the one right behind it, too."""
    begun_s = math.inf
    for (start_s, end_s), next_s in pairwise([*stretches.tolist(), [math.inf, math.inf]]):
        begun_s = min(begun_s, start_s)
        if end_s - start_s >= least_s:
            yield begun_s, end_s
            begun_s = math.inf
        elif end_s - begun_s >= least_s or next_s[0] != end_s:
            begun_s = math.inf


def _moved_s(at_s: Array, i: NDArray[np.intp], edge_s: Array) -> Array:
    """By how much longer the power behind a step holds within its interval, where the step is at the edge and not
    drawn by a line from reading i to the next. edge_s: starts and ends in turns; at an end it is less."""
    begins_s, ends_s = at_s[i], at_s[i + 1]
    lasts_s = ends_s - begins_s
    inside = np.clip(edge_s, begins_s, ends_s)
    behind_s = (ends_s - inside) ** 2 / (2 * lasts_s) + np.maximum(begins_s - edge_s, 0.0)
    before_s = (inside - begins_s) ** 2 / (2 * lasts_s) + np.maximum(edge_s - ends_s, 0.0)
    is_start = np.arange(len(edge_s)) % 2 == 0
    return np.where(is_start, behind_s, -before_s)
