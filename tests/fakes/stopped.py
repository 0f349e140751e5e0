"""Counters that stand still for a while, under loads whose energy is a closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from results.records import PowerTrace
from tests.fakes.waveforms import StepPower, counter_trace

WINDOW_S = 9.0
INTERVAL_S = 0.05


def request(rng: np.random.Generator) -> StepPower:
    """Idle, prefill, decode, idle."""
    return StepPower(np.array([-5.0, 0.0, 3.0, 9.0, 40.0]), np.array([10, 120, 70, 10]) * rng.uniform(0.8, 1.2, 4))


def steady(rng: np.random.Generator) -> StepPower:
    edges_s = np.arange(-5.0, 40.0, 0.05)
    return StepPower(edges_s, 100 * (1 + 0.05 * rng.standard_normal(len(edges_s) - 1)))


def read(power: StepPower, update_s: float, rng: np.random.Generator, stated_s: float | None = None) -> PowerTrace:
    """As the meters read: closely before the window, then on a grid, up to a fifth of the interval late."""
    grid_s = np.arange(-0.05, WINDOW_S + 0.2, INTERVAL_S)
    close_s = np.arange(-0.05 - 5 * update_s, -0.05, max(update_s / 8, 1e-3))
    times_s = np.unique(np.concatenate([close_s, grid_s + rng.uniform(0, 0.2 * INTERVAL_S, len(grid_s))]))
    taken = counter_trace(power, times_s, update_s, rng.uniform(0, update_s), step_j=1e-3)
    return replace(taken, sample_interval_s=INTERVAL_S, update_period_s=update_s if stated_s is None else stated_s)


def frozen(taken: PowerTrace, start_s: float, end_s: float, keeps_count: bool = False) -> PowerTrace:
    """The counter shows one value from start to end; then it goes on from it, or catches up."""
    t, values = taken.times_s, taken.values.copy()
    inside = (t >= start_s) & (t < end_s)
    first, behind = np.searchsorted(t, [start_s, end_s])
    held_j = values[max(first - 1, 0)]
    if not keeps_count:
        values[behind:] -= values[behind - 1] - held_j
    values[inside] = held_j
    return replace(taken, values=np.round(values, 6))


def unread(taken: PowerTrace, start_s: float, end_s: float) -> PowerTrace:
    """Without the readings from start to end: a call that hung."""
    kept = (taken.times_s < start_s) | (taken.times_s >= end_s)
    return replace(taken, times_s=taken.times_s[kept], values=taken.values[kept])


LOADS: dict[str, Callable[[np.random.Generator], StepPower]] = {
    "idle, prefill, decode, idle": request,
    "steady, 5 % noise": steady,
}
