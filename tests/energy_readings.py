"""Energies of traces, read whole or with the reason why there is none."""

from __future__ import annotations

from typing import Any

import numpy as np

from results.energy import energy_between
from results.intervals import Interval
from results.records import EnergyReading, PowerTrace
from tests.fakes.waveforms import StepPower, trace

GRID_S = np.arange(0.0, 10.0001, 0.01)


def energy(one: PowerTrace | list[PowerTrace], *intervals: Interval, **more: Any) -> EnergyReading:
    traces = one if isinstance(one, list) else [one]
    return energy_between(traces, intervals, "all", "m", **more)


def reason(one: PowerTrace | list[PowerTrace], *intervals: Interval) -> str:
    """The reason, after checking that nothing else is claimed."""
    reading = energy(one, *intervals)
    assert (reading.energy_j, reading.uncertainty_j, reading.net_energy_j) == (None, None, None)
    assert reading.reason is not None
    return reading.reason


def steps(*pairs: tuple[float, float], until_s: float = 100.0) -> StepPower:
    """(from, watts) pairs."""
    return StepPower(np.array([s for s, _ in pairs] + [until_s]), np.array([w for _, w in pairs]))


def counted(watts: float, component: str, start_s: float, end_s: float, **fields: Any) -> PowerTrace:
    times_s = np.arange(start_s, end_s + 1e-9, 0.01)
    return trace("counter", times_s, 5.0 + watts * (times_s - start_s), 0.01, component=component, **fields)
