"""Gauges that show a value until they have a new one: how often they renew it, which readings say something new.

Batteries of phones, and the energy gauge of iOS, are read more often than they update. How often that is no maker
states, so it is observed, and it rules the uncertainty of what is derived from them.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MIN_POWER_W, MAX_POWER_W = 0.05, 25.0
"""What a phone draws from its battery: from asleep to the most that its connector bears."""
STUCK_UPDATES = 12
"""A gauge with noise in its last digit does not repeat itself so often; one that does has stopped."""


def plausible_power(watts: Array) -> tuple[NDArray[np.bool_], str]:
    """Which readings can be a phone's, and what to say of the others: empty where there are none."""
    plausible = np.isfinite(watts) & (watts >= MIN_POWER_W) & (watts <= MAX_POWER_W)
    n_left_out = int((~plausible).sum())
    if not n_left_out:
        return plausible, ""
    limits = f"{MIN_POWER_W:g} to {MAX_POWER_W:g} W"
    return plausible, f"; {n_left_out} of {len(watts)} readings are not in {limits}: left out"


def observed_update_period_s(times_s: Array, shown: Array) -> float:
    """How often the gauge gave a new value: the median distance of changes; all the time there was, below three.

    A gauge that is stuck, or that a constant load leaves alone, has not been seen to update: it resolves nothing.
    """
    if len(times_s) < 2:
        return 0.0
    changed_s = times_s[1:][np.diff(shown) != 0]
    if len(changed_s) >= 3:
        return float(np.median(np.diff(changed_s)))
    return float(times_s[-1] - times_s[0]) / (len(changed_s) + 1)


def stuck_stretches_s(times_s: Array, shown: Array, update_period_s: float) -> tuple[tuple[float, float], ...]:
    """Stretches of more than `STUCK_UPDATES` updates over which the reading is the same to the last digit."""
    if len(times_s) < 2:
        return ()
    edges = np.concatenate([[0], np.flatnonzero(np.diff(shown) != 0) + 1, [len(times_s) - 1]])
    runs_s = [(float(times_s[i]), float(times_s[j])) for i, j in pairwise(edges.tolist())]
    return tuple(run for run in runs_s if run[1] - run[0] > STUCK_UPDATES * update_period_s > 0)


def left_out_stretches_s(
    times_s: Array, kept: NDArray[np.bool_], update_period_s: float
) -> tuple[tuple[float, float], ...]:
    """Stretches of left-out readings that are longer than an update: the value before does not stand for so long."""
    at_s = times_s[kept]
    between = np.diff(np.flatnonzero(kept)) > 1
    runs_s = zip(at_s[:-1][between].tolist(), at_s[1:][between].tolist(), strict=True)
    return tuple(run for run in runs_s if run[1] - run[0] > 2 * update_period_s)


def smallest_step(values: Array) -> float:
    """The smallest change from one reading to the next; 0 where nothing changed."""
    steps = np.abs(np.diff(values))
    return float(steps[steps > 0].min()) if (steps > 0).any() else 0.0


def renewed_readings(times_s: Array, shown: Array, update_period_s: float) -> NDArray[np.intp]:
    """Which readings to keep: new values, one an update where the value stands, and the ends.

    A repeated value says nothing new, and its short distance to the next one would feign a knowledge of when the power
    changed: the arithmetic takes the distance of readings for the time in which it may have.
    """
    kept = [0] if len(times_s) else []
    for i in range(1, len(times_s)):
        is_new = shown[i] != shown[i - 1] or times_s[i] - times_s[kept[-1]] >= update_period_s
        if is_new or i == len(times_s) - 1:
            kept.append(i)
    return np.asarray(kept, dtype=np.intp)
