"""Sources that lose energy where no reading stands still, or stick beside others: never a confident wrong joule."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from results.energy import energy_between
from results.records import EnergyReading, PowerTrace
from tests.fakes.stopped import INTERVAL_S, WINDOW_S
from tests.fakes.waveforms import StepPower, counter_trace, trace


def energy(*traces: PowerTrace, component: str = "total") -> EnergyReading:
    return energy_between(traces, [(0.0, WINDOW_S)], "all", "m", component)


def within(reading: EnergyReading, true_j: float, sigmas: float = 2.0) -> bool:
    """Whether the truth is where the reading says; a reading without energy claims nothing."""
    if reading.energy_j is None:
        return bool(reading.reason)
    assert reading.uncertainty_j is not None
    return abs(reading.energy_j - true_j) <= sigmas * reading.uncertainty_j + 1e-9


# --- power sensors beside each other ---------------------------------------------------------------------------------


def gpus(*watts: float) -> list[PowerTrace]:
    """Each draws its watts, and a tenth of it until 1 s and from 8 s on, with noise of 1 %."""
    rng = np.random.default_rng(0)
    t = np.arange(-0.5, WINDOW_S + 0.5, INTERVAL_S)
    load = np.where((t >= 1.0) & (t < 8.0), 1.0, 0.1)
    shown_w = [w * load * (1 + 0.01 * rng.standard_normal(len(t))) for w in watts]
    fields = [{"component": f"gpu{i}", "resolution": 1e-3} for i in range(len(watts))]
    return [trace("power", t, np.round(w, 3), INTERVAL_S, **more) for w, more in zip(shown_w, fields, strict=True)]


def stuck(taken: PowerTrace, start_s: float, end_s: float) -> PowerTrace:
    inside = (taken.times_s >= start_s) & (taken.times_s < end_s)
    return replace(taken, values=np.where(inside, taken.values[int(np.argmax(inside))], taken.values))


def test_a_power_sensor_that_sticks_beside_others_leaves_a_total_where_it_is_small() -> None:
    """10 of 500 W, as long as 7.2 s of the whole load; one that sticks at idle for 2 s of it shows 18 J too little."""
    small, large = gpus(10.0, 490.0)
    reading = energy(stuck(small, 0.2, 3.0), large)
    assert reading.energy_j is not None
    assert within(reading, 500.0 * 7.2)
    assert "m gpu0: its reading was stuck at one value for 2.7" in str(reading.remark)
    one, other = gpus(100.0, 100.0)
    reading = energy(stuck(one, 0.5, 5.0), other)
    assert reading.energy_j is None
    assert "m gpu0: its reading was stuck at one value for 4." in str(reading.reason)


def test_a_small_power_sensor_that_sticks_and_shows_0_watts_errs_by_both() -> None:
    small, large = gpus(10.0, 990.0)
    broken = stuck(small, 0.2, 3.0)
    broken.values[(broken.times_s > 4.0) & (broken.times_s < 4.5)] = 0.0
    reading = energy(broken, large)
    assert within(reading, 1000.0 * 7.2)
    assert "it showed 0 W for" in str(reading.remark)
    assert "stuck at one value" in str(reading.remark)


# --- rests ------------------------------------------------------------------------------------------------------------


def test_a_rail_that_rests_again_and_again_for_half_an_hour_is_derived_in_seconds() -> None:
    """3 W in every second 2.5 s, beside 0.6 W; 360 rests took 21 s when each looked at all renewals."""
    end_s = 1800.0
    t = np.arange(-0.3, end_s + 0.3, 0.1)
    t = t + np.random.default_rng(0).uniform(0, 0.01, len(t))
    edges_s = np.arange(-5.0, end_s + 5.0, 2.5)
    watts = {"npu": np.where(np.arange(len(edges_s) - 1) % 2 == 0, 3.0, 0.0), "rest": np.full(len(edges_s) - 1, 0.6)}
    rails = [
        counter_trace(StepPower(edges_s, w), t, 0.001, step_j=1e-6, component=name, can_rest=True)
        for name, w in watts.items()
    ]
    start_s = time.perf_counter()
    reading = energy_between(rails, [(0.0, end_s)], "all", "m")
    assert time.perf_counter() - start_s < 6.0
    assert within(reading, 1.5 * end_s + 0.6 * end_s)
    assert reading.energy_j == pytest.approx(2.1 * end_s, rel=1e-3)
