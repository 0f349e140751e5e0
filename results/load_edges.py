"""Power that steps at known edges: a window's, or a phase's, where the load begins, changes or ends.

A line between two readings spreads such a step over the time between them. Where a load begins and ends with its
window, both ends then lie partly outside of it, and the joules are always too low: by D dt / 6 an edge on average where
instants dt apart see a step by D, by more where their times are known to a part of an update. So what changes at an
edge is put there. What a line follows (`results.uncertainty`) is no step, and stays.

A gauge shows an instant, or the mean of the update before it. A mean that an edge cuts at a share s of its update lies
between two levels, and the next one is 1 - s of the whole step off: no more of the next change is put to the edge too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from results.records import PowerTrace
from results.uncertainty import sudden_steps_w

Array = NDArray[np.float64]


class LoadEdges:
    """Readings of power, and how they change: what is the same for all windows is worked out once."""

    def __init__(self, trace: PowerTrace, older_s: float) -> None:
        """trace: what its readings stand for, `older_s` before their renewal (`results.cumulative.power_samples`)."""
        self._at_s, self._update_s, self._older_s = trace.times_s, trace.update_period_s, older_s
        self._change_w = np.copysign(sudden_steps_w(trace), np.diff(trace.values))

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
