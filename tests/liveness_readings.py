"""Energies of one window of traces that stop, freeze or fail in it."""

from __future__ import annotations

import numpy as np

from results.energy import energy_between
from results.records import EnergyReading, PowerTrace
from tests.fakes.stopped import INTERVAL_S, WINDOW_S
from tests.fakes.waveforms import Array, trace


def energy(*traces: PowerTrace, component: str = "total") -> EnergyReading:
    return energy_between(traces, [(0.0, WINDOW_S)], "all", "m", component)


def within(reading: EnergyReading, true_j: float, sigmas: float) -> bool:
    """Whether the truth is where the reading says; a reading without energy claims nothing."""
    if reading.energy_j is None:
        return bool(reading.reason)
    assert reading.uncertainty_j is not None
    return abs(reading.energy_j - true_j) <= sigmas * reading.uncertainty_j + 1e-9


TIMES_S = np.arange(-0.5, WINDOW_S + 0.5, INTERVAL_S)


def sensor(watts: Array, **fields: object) -> PowerTrace:
    return trace("power", TIMES_S, watts, INTERVAL_S, resolution=1e-6, **fields)
