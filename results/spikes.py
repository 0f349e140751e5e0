"""Readings of power that no machine can have drawn, and single ones far above all others.

What is above the limit is no reading: it is filled in from those around it, as one of 0 W is (`results.liveness`), and
a window that holds more than a moment of it has no energy. A moment of twice the highest other power may be a burst or
an error of the sensor; its readings cannot tell, and it is treated as a counter's lone step (`results.jumps`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from results.jumps import FEWEST_STEPS, LONE_FACTOR, MOST_LONE, LoneStep
from results.liveness import MAX_POWER_W, Stand
from results.records import PowerTrace

Array = NDArray[np.float64]

LONGEST_SPIKE_READINGS = 3
"""A burst that lasts shows more,"""
MOST_OF_TIME = 0.05
"""and a load that comes and goes is high for more of the trace's time."""


def without_impossible(trace: PowerTrace) -> tuple[PowerTrace, tuple[Stand, ...]]:
    """The trace with its readings above what can flow filled in, and where they were.

    Where all are, nothing is left that could fill them in: the trace as it is, and a stand that nothing bounds.
    """
    t, watts = trace.times_s, trace.values
    if trace.kind == "counter" or trace.method in ("modelled", "relative gauge"):
        return trace, ()
    limit_w = trace.max_power_w or MAX_POWER_W
    beyond = watts > limit_w
    if not beyond.any():
        return trace, ()
    shown_w = watts[~beyond]
    lowest_w, highest_w = (float(shown_w.min()), float(shown_w.max())) if len(shown_w) else (0.0, np.inf)
    filled_w = np.interp(t, t[~beyond], shown_w) if len(shown_w) else np.zeros(len(t))
    so_far_j = np.concatenate([[0.0], np.cumsum((filled_w[:-1] + filled_w[1:]) / 2 * np.diff(t))])
    stands = []
    for first, behind in runs_of(beyond):
        i, j = max(first - 1, 0), min(behind, len(t) - 1)
        length_s = float(t[j] - t[i])
        bounds_j = lowest_w * length_s, highest_w * length_s
        what = f"it showed {float(watts[first:behind].max()):.4g} W, and no more than {limit_w:.4g} W can flow there,"
        stands.append(
            Stand(
                float(t[i]), float(t[j]), 0.0, *bounds_j, float(so_far_j[j] - so_far_j[i]),
                (bounds_j[1] - bounds_j[0]) ** 2 / 12, "around", what,
            )
        )  # fmt: skip
    return replace(trace, values=np.where(beyond, filled_w, watts)), tuple(stands)


def lone_spikes(trace: PowerTrace) -> list[LoneStep]:
    """Up to `MOST_LONE` moments of more than `LONE_FACTOR` times the highest power of all others."""
    trace, _ = without_impossible(trace)
    t, watts = trace.times_s, trace.values
    if len(t) <= FEWEST_STEPS:
        return []
    # Of coarse updates one shows in many readings.
    period_s = max(trace.update_period_s, trace.sample_interval_s)
    longest_s = LONGEST_SPIKE_READINGS * period_s
    order_w = np.sort(watts)[::-1]
    found: list[LoneStep] = []
    for above in order_w[:-1][(order_w[1:] > 0) & (order_w[:-1] > LONE_FACTOR * order_w[1:])].tolist():
        runs = runs_of(watts >= above)
        lasts_s = [float(t[min(behind, len(t) - 1)] - t[max(first - 1, 0)]) for first, behind in runs]
        is_load = sum(lasts_s) > MOST_OF_TIME * (t[-1] - t[0]) or max(lasts_s) > longest_s + 2 * period_s
        if len(runs) > MOST_LONE or is_load:
            break
        found = [_spike(t, watts, first, behind) for first, behind in runs]
    return found


def _spike(t: Array, watts: Array, first: int, behind: int) -> LoneStep:
    """As a line between the readings draws it; what it holds above the lower of the two beside it is in doubt."""
    i, j = max(first - 1, 0), min(behind, len(t) - 1)
    step_j = float(((watts[i:j] + watts[i + 1 : j + 1]) / 2 * np.diff(t[i : j + 1])).sum())
    beside_w = float(min(watts[i], watts[j]))  # at an end of the trace one of the two is its own, which is higher
    return LoneStep(float(t[i]), float(t[j]), step_j, step_j - beside_w * float(t[j] - t[i]))


def runs_of(found: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(first, behind the last) of each run."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], found.astype(np.int8), [0]])))
    return [(int(first), int(behind)) for first, behind in edges.reshape(-1, 2).tolist()]
