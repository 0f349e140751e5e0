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


LAGS: dict[str, Callable[[Array], Array]] = {
    "4 s": lambda looked_s: np.full(len(looked_s), 4.0),
    "3.5 s, then 0.5 s": lambda looked_s: np.where(looked_s < 8.0, 3.5, 0.5),
    "4 s, then none": lambda looked_s: np.where(looked_s < 11.5, 4.0, 0.0),
    "drifts from 0 to 4 s": lambda looked_s: looked_s / 3,
    "6 s": lambda looked_s: np.full(len(looked_s), 6.0),
    "4 to 6 s": lambda looked_s: 4.0 + looked_s / 6,
}


@pytest.mark.parametrize("lag", LAGS)
def test_stamps_that_lag_are_not_believed(lag: str) -> None:
    """2 W, and 8 W from 3 to 9 s: 2 x 4 + 8 x 6 = 56 J in the window from 2 to 12 s. 31 to 60 J, before."""
    power = StepPower(np.array([0.0, 3.0, 9.0, 100.0]), np.array([2.0, 8.0, 2.0]))
    looked_s = np.arange(0.04, END_S + 0.5, RAIL_POLL_S)
    stamps_s = FRESH(looked_s) - LAGS[lag](looked_s)
    taken = rails_read(power, looked_s, stamps_s, FRESH(looked_s), np.random.default_rng(0))
    reading = energy_between([taken], [(START_S, END_S)], "all", taken.meter)
    assert reading.energy_j == pytest.approx(56.0, abs=0.6)
    assert "stamped by perfetto" in str(taken.note)


def test_stamps_of_a_hal_that_renews_more_slowly_than_it_is_read_are_its_own() -> None:
    """Every 250 ms, read every 100: a stamp is first seen up to 100 ms later, and repeated up to 250 ms."""

    def renewed(looked_s: Array) -> Array:
        return np.maximum(np.floor((looked_s - 0.01) / 0.25) * 0.25 + 0.01, 0.0)

    power = StepPower(np.array([0.0, 3.0, 9.0, 100.0]), np.array([2.0, 8.0, 2.0]))
    looked_s = np.arange(0.04, END_S + 0.5, RAIL_POLL_S)
    taken = rails_read(power, looked_s, renewed(looked_s), renewed(looked_s), np.random.default_rng(0))
    assert "stamped by its HAL" in str(taken.note)
    reading = energy_between([taken], [(START_S, END_S)], "all", taken.meter)
    assert reading.energy_j == pytest.approx(56.0, abs=0.2)


@pytest.mark.parametrize("stamped", [every_3_s, FRESH])
def test_energy_that_is_renewed_every_three_seconds_does_not_resolve_ten(stamped: Callable[[Array], Array]) -> None:
    reading = energy(stamped, every_3_s)
    assert (reading.energy_j, reading.uncertainty_j) == (None, None)


STEPS: dict[str, Callable[[Array], Array]] = {
    "50 ms ahead": lambda looked_s: looked_s + 0.05,
    "200 ms ahead": lambda looked_s: looked_s + 0.2,
    "cut to 50 ms": lambda looked_s: np.floor(looked_s / 0.05) * 0.05,
    "cut to 100 ms": lambda looked_s: np.floor(looked_s / 0.1) * 0.1,
}


@pytest.mark.parametrize("stamps", STEPS)
def test_stamps_ahead_of_their_packets_or_in_steps_are_not_believed(stamps: str) -> None:
    """2 W, and 8 W from 3 s on: 2 + 8 x 9 = 74 J in the window. 200 ms ahead, it lacks 1.2 J of them."""
    power = StepPower(np.array([0.0, 3.0, 100.0]), np.array([2.0, 8.0]))
    for begins_s in (0.02, 0.03, 0.045, 0.07):
        rng = np.random.default_rng(0)
        looked_s = np.arange(begins_s, END_S + 0.5, RAIL_POLL_S)
        read_s = looked_s - rng.uniform(0.5e-3, 5e-3, len(looked_s))
        taken = rails_read(power, looked_s, STEPS[stamps](read_s), read_s, rng)
        reading = energy_between([taken], [(START_S, END_S)], "all", taken.meter)
        assert "stamped by perfetto" in str(taken.note)
        assert reading.energy_j is not None
        assert reading.uncertainty_j is not None
        assert abs(reading.energy_j - 74.0) <= 2 * reading.uncertainty_j


def test_stamps_ahead_by_what_a_call_takes_are_the_readings_own() -> None:
    power = StepPower(np.array([0.0, 3.0, 100.0]), np.array([2.0, 8.0]))
    rng = np.random.default_rng(0)
    looked_s = np.arange(0.04, END_S + 0.5, RAIL_POLL_S)
    read_s = looked_s + rng.uniform(1e-3, 15e-3, len(looked_s))
    taken = rails_read(power, looked_s, read_s, read_s, rng)
    assert "stamped by its HAL" in str(taken.note)
    assert energy_between([taken], [(START_S, END_S)], "all", taken.meter).energy_j == pytest.approx(74.0, abs=0.1)


@pytest.mark.parametrize("apart_s", [0.2e-3, 0.6e-3, 8e-3])
def test_a_trace_that_begins_right_before_its_next_look_keeps_its_stamps(apart_s: float) -> None:
    """Perfetto looks at once, then at multiples of 100 ms; the HAL took the two readings within one millisecond.

    Of a window of half a second, whose ten updates a counter of 100 ms does not have: one rail in 200 lost its stamps.
    """
    power = StepPower(np.array([0.0, 3.0, 100.0]), np.array([2.0, 8.0]))
    grid_s = np.arange(2.0, END_S + 0.5, RAIL_POLL_S)
    looked_s = np.concatenate([[2.0 - apart_s], grid_s])
    read_s = np.concatenate([[2.0002], grid_s + 0.0006])
    taken = rails_read(power, looked_s, read_s, read_s, np.random.default_rng(0))
    assert "stamped by its HAL" in str(taken.note)
    assert np.diff(taken.times_s).min() > 0.05
    reading = energy_between([taken], [(2.8, 3.3)], "all", taken.meter)
    assert reading.energy_j == pytest.approx(0.2 * 2 + 0.3 * 8, abs=0.02)
