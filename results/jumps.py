"""A single step of a counter that holds far more than any other: a short burst, or a jump that nothing used.

Its readings cannot tell. A burst that lasts shows high steps beside it; one between two marks is shorter than the
sampling interval, and is left alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LONE_FACTOR = 5.0
"""Times the highest other power: a step above stands alone."""
FEWEST_STEPS = 10
WHOLE_INTERVAL = 0.8
"""Of the sampling interval: shorter steps were bounded by marks, around what they measure."""


class LoneStep(NamedTuple):
    """The step, and how much of it is beyond the highest other power."""

    start_s: float
    end_s: float
    step_j: float
    excess_j: float


def lone_step(times_s: Array, shown_j: Array, interval_s: float, update_s: float) -> LoneStep | None:
    changed = np.flatnonzero(np.diff(shown_j) > 0) + 1
    if len(changed) <= FEWEST_STEPS:
        return None
    at_s, steps_j = times_s[changed], np.diff(shown_j[changed])
    lasted_s = np.maximum(np.diff(at_s), max(interval_s, update_s))
    watts = steps_j / lasted_s
    i = int(np.argmax(watts))
    others_w = float(np.delete(watts, i).max())
    if watts[i] <= LONE_FACTOR * others_w or at_s[i + 1] - at_s[i] < WHOLE_INTERVAL * interval_s:
        return None
    excess_j = float(steps_j[i] - others_w * lasted_s[i])
    return LoneStep(float(at_s[i]), float(at_s[i + 1]), float(steps_j[i]), excess_j)
