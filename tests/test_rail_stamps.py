"""Stamps of a phone's power-stats HAL that cannot be those of its readings: never a confident wrong joule."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from results.energy import energy_between
from results.records import EnergyReading
from tests.fakes.instruments import END_S, RAIL_POLL_S, START_S, rails_read
from tests.fakes.waveforms import Array, StepPower

WATTS = 5.2
FRESH: Callable[[Array], Array] = lambda looked_s: looked_s - 0.003  # noqa: E731 - one of three ways to look


def every_3_s(looked_s: Array) -> Array:
    return np.maximum(np.floor((looked_s - 1.1) / 3) * 3 + 1.1, 0.0)


def energy(stamped: Callable[[Array], Array], valued: Callable[[Array], Array]) -> EnergyReading:
    """Ten seconds of 5.2 W. stamped, valued: of which time stamp and energy are, by the time of the look."""
    power = StepPower(np.array([0.0, 100.0]), np.array([WATTS]))
    looked_s = np.arange(0.04, END_S + 0.5, RAIL_POLL_S)
    taken = rails_read(power, looked_s, stamped(looked_s), valued(looked_s), np.random.default_rng(0))
    return energy_between([taken], [(START_S, END_S)], "all", taken.meter)


@pytest.mark.parametrize("step_s", [3.0, -3.0])
def test_stamps_that_step_are_not_believed(step_s: float) -> None:
    """36 J of 52 J, before: three seconds without energy."""
    reading = energy(lambda looked_s: FRESH(looked_s) + np.where(looked_s > 6.0, step_s, 0.0), FRESH)
    assert reading.energy_j == pytest.approx(52.0, rel=0.02)


def test_stamps_that_stay_while_the_energy_goes_on_are_not_believed() -> None:
    assert energy(every_3_s, FRESH).energy_j == pytest.approx(52.0, rel=0.02)


@pytest.mark.parametrize("stamped", [every_3_s, FRESH])
def test_energy_that_is_renewed_every_three_seconds_does_not_resolve_ten(stamped: Callable[[Array], Array]) -> None:
    reading = energy(stamped, every_3_s)
    assert (reading.energy_j, reading.uncertainty_j) == (None, None)
