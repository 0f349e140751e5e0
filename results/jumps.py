"""Single steps of a counter that hold far more than any other: short bursts, or jumps that nothing used.

Its readings cannot tell. A burst that lasts shows high steps beside it; one between two marks is shorter than the
sampling interval, and is left alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LONE_FACTOR = 2.0
"""Times the highest other power: steps above stand alone,"""
MOST_LONE = 3
"""where they are no more than so many, and none beside another."""
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
    highest = np.argsort(watts)[::-1][: MOST_LONE + 1]
    n_lone = max(
        (k for k in range(1, MOST_LONE + 1) if watts[highest[k - 1]] > LONE_FACTOR * watts[highest[k]]), default=0
    )
    lone = np.sort(highest[:n_lone])
    if not n_lone or np.any(np.diff(lone) == 1):
        return []
    # Of the steps beside it the lower tells what flowed at least.
    beside_w = np.minimum(np.append(np.inf, watts[:-1]), np.append(watts[1:], np.inf))
    # One that came before its time is no renewal, and nothing of it may have flowed.
    flowed_j = np.where(np.diff(at_s) >= WHOLE_INTERVAL * max(interval_s, update_s), beside_w * lasted_s, 0.0)
    return [
        LoneStep(float(at_s[i]), float(at_s[i + 1]), float(steps_j[i]), float(steps_j[i] - flowed_j[i]))
        for i in lone.tolist()
        if at_s[i + 1] - at_s[i] >= WHOLE_INTERVAL * interval_s
    ]
