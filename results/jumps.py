"""Single steps of a counter that hold far more than any other: short bursts, or jumps that nothing used.

Its readings cannot tell. A burst that lasts shows more high steps beside it; one between two marks is shorter than the
sampling interval, and is left alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LONE_FACTOR = 2.0
"""Times the highest other power: steps above stand alone,"""
MOST_LONE, LONE_SHARE = 3, 0.07
"""where they are no more than so many, or than so much of all,"""
MOST_BESIDE = 2
"""and no more than so many in a row: what stands higher for longer is a burst."""
FEWEST_STEPS = 10
WHOLE_INTERVAL = 0.8
"""Of the sampling interval: shorter steps were bounded by marks, around what they measure."""


class LoneStep(NamedTuple):
    """The step, and how much of it is beyond the power beside it."""

    start_s: float
    end_s: float
    step_j: float
    excess_j: float


def lone_steps(times_s: Array, shown_j: Array, interval_s: float, update_s: float) -> list[LoneStep]:
    changed = np.flatnonzero(np.diff(shown_j) > 0) + 1
    if len(changed) <= FEWEST_STEPS:
        return []
    at_s, steps_j = times_s[changed], np.diff(shown_j[changed])
    lasted_s = np.maximum(np.diff(at_s), max(interval_s, update_s))
    watts = steps_j / lasted_s
    most = max(MOST_LONE, int(LONE_SHARE * len(watts)))
    highest = np.argsort(watts)[::-1][: most + 1]
    n_lone = max((k for k in range(1, most + 1) if watts[highest[k - 1]] > LONE_FACTOR * watts[highest[k]]), default=0)
    is_lone = np.zeros(len(watts), dtype=np.bool_)
    is_lone[highest[:n_lone]] = True
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_lone.astype(np.int8), [0]]))).reshape(-1, 2)
    beside_w = np.full(len(watts), np.inf)
    for first, behind in edges.tolist():
        # Of the steps beside them the lower tells what flowed at least.
        beside_w[first:behind] = min(
            watts[first - 1] if first else np.inf, watts[behind] if behind < len(watts) else np.inf
        )
        is_lone[first:behind] = behind - first <= MOST_BESIDE
    # One that came before its time is no renewal, and nothing of it may have flowed.
    flowed_j = np.where(np.diff(at_s) >= WHOLE_INTERVAL * max(interval_s, update_s), beside_w * lasted_s, 0.0)
    return [
        LoneStep(float(at_s[i]), float(at_s[i + 1]), float(steps_j[i]), float(steps_j[i] - flowed_j[i]))
        for i in np.flatnonzero(is_lone).tolist()
        if at_s[i + 1] - at_s[i] >= WHOLE_INTERVAL * interval_s
    ]
