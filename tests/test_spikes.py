"""Readings that no machine can have drawn, and moments far above all others: never a confident wrong joule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from devices.meters.rails import HwmonMeter, JetsonMeter
from results.energy import energy_between
from results.records import EnergyReading, PowerTrace
from tests.fakes.stopped import INTERVAL_S, WINDOW_S, request
from tests.fakes.sysfs import Sysfs
from tests.fakes.waveforms import StepPower, trace
from tests.meter_windows import CLOCK, read_on_grid, total


def sensor(power: StepPower, rng: np.random.Generator, **fields: float) -> PowerTrace:
    """Read at random, with 1 % of noise."""
    times_s = np.cumsum(np.concatenate([[-0.5], rng.uniform(0.5, 1.5, 240) * INTERVAL_S]))
    watts = power.power_w(times_s) * (1 + 0.01 * rng.standard_normal(len(times_s)))
    return trace("power", times_s, np.round(watts, 3), INTERVAL_S, resolution=1e-3, **fields)


def faulty(taken: PowerTrace, shown_w: float, n_readings: int, rng: np.random.Generator) -> PowerTrace:
    watts = taken.values.copy()
    first = int(np.searchsorted(taken.times_s, rng.uniform(1, 8)))
    watts[first : first + n_readings] = shown_w * (1 + 0.01 * rng.standard_normal(n_readings))
    return replace(taken, values=watts)


def energy(taken: PowerTrace) -> EnergyReading:
    return energy_between([taken], [(0.0, WINDOW_S)], "all", "m")


@pytest.mark.parametrize(("limit_w", "shown_w"), [(700.0, 1e3), (700.0, 1e5), (None, 65535.0)])
@pytest.mark.parametrize("n_readings", [1, 3, 5, 10, 40])
def test_readings_above_what_can_flow_are_filled_in_for_a_moment_and_leave_no_energy_for_longer(
    limit_w: float | None, shown_w: float, n_readings: int
) -> None:
    held = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        power = request(rng)
        reading = energy(faulty(replace(sensor(power, rng), max_power_w=limit_w), shown_w, n_readings, rng))
        said = f"no more than {limit_w or 20e3:.4g} W can flow there"
        if n_readings == 40:
            assert reading.energy_j is None
            assert said in str(reading.reason)
            held += 1
            continue
        assert reading.energy_j is not None
        assert reading.uncertainty_j is not None
        assert said in str(reading.remark)
        assert reading.uncertainty_j < 0.05 * reading.energy_j
        held += abs(reading.energy_j - power.energy_j(0, WINDOW_S)) <= 2 * reading.uncertainty_j
    assert held >= 19


def test_a_sensor_that_shows_nothing_else_has_no_energy() -> None:
    times_s = np.arange(-0.5, 9.5, INTERVAL_S)
    reading = energy(trace("power", times_s, np.full(len(times_s), 65535.0), INTERVAL_S))
    assert reading.energy_j is None
    assert "it showed 6.554e+04 W" in str(reading.reason)


@pytest.mark.parametrize("n_readings", [1, 2])
def test_a_moment_far_above_all_others_may_be_a_burst_or_an_error_and_is_told(n_readings: int) -> None:
    """100 W for 9 s. At 1 kW, an error is 0 J and a burst 45 J a reading: both are within two uncertainties."""
    power = StepPower(np.array([-5.0, 15.0]), np.array([100.0]))
    rng = np.random.default_rng(1)
    reading = energy(faulty(sensor(power, rng), 1000.0, n_readings, rng))
    assert reading.energy_j is not None
    assert reading.uncertainty_j is not None
    assert "it may be an error of the sensor" in str(reading.remark)
    assert abs(reading.energy_j - 900.0) <= 2 * reading.uncertainty_j
    assert abs(reading.energy_j - 900.0 - 45.0 * n_readings) <= 2 * reading.uncertainty_j


def test_a_moment_that_would_decide_the_energy_leaves_none() -> None:
    power = StepPower(np.array([-5.0, 15.0]), np.array([100.0]))
    rng = np.random.default_rng(1)
    reading = energy(faulty(sensor(power, rng), 15e3, 2, rng))
    assert reading.energy_j is None
    assert "an error of the sensor, or a burst" in str(reading.reason)


def test_a_burst_that_lasts_stays_a_measurement() -> None:
    # 8 W, and 300 W for 0.5 s: 68 J + 150 J.
    power = StepPower(np.array([-5.0, 4.0, 4.5, 15.0]), np.array([8.0, 300.0, 8.0]))
    for seed in range(10):
        reading = energy(sensor(power, np.random.default_rng(seed)))
        assert reading.energy_j is not None
        assert reading.uncertainty_j is not None
        assert reading.remark is None
        assert abs(reading.energy_j - 218.0) <= 2 * reading.uncertainty_j


def test_a_load_that_comes_and_goes_is_no_spike() -> None:
    """20 W, and 100 W for 0.3 s three times: 0.9 x 80 + 3 x 20 = 132 J in three seconds, by a sensor of 100 ms."""
    power = StepPower(np.array([-5.0, 0.5, 0.8, 1.5, 1.8, 2.3, 2.6, 9.0]), np.array([20.0, 100.0] * 3 + [20.0]))
    times_s = np.arange(-0.3, 3.3, 0.02)
    taken = trace("power", times_s, power.power_w(np.floor(times_s / 0.1) * 0.1), 0.02, update_period_s=0.1)
    reading = energy_between([taken], [(0.0, 3.0)], "all", "m")
    assert reading.remark is None
    assert reading.energy_j == pytest.approx(132.0, rel=0.1)


@pytest.mark.parametrize(("shown_uw", "cap_uw"), [(2**32 - 1, 0), (10**12, 300_000_000), (950_000_000, 300_000_000)])
def test_an_amd_gpu_that_shows_more_than_three_times_its_cap_leaves_no_energy(
    tmp_path: Path, shown_uw: int, cap_uw: int
) -> None:
    sysfs = Sysfs(tmp_path / "sys")
    shown = {"power1_average": lambda passed_s: shown_uw if 0.5 < passed_s < 1.0 else int(120e6 + 1e6 * passed_s)}
    sysfs.add("hwmon2", {"name": "amdgpu", "power1_cap_max": cap_uw, **shown})
    meter = HwmonMeter(0.02, CLOCK, sysfs.root)
    meter.open()
    reading = total(read_on_grid(meter, sysfs, 0.02, 1.6), 0.05, 1.55)
    assert reading.energy_j is None
    assert f"no more than {900 if cap_uw else 4000} W can flow there" in str(reading.reason)


def test_rails_of_a_jetson_have_a_limit(tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path / "sys")
    sysfs.add("ina3221/1-0040/hwmon/hwmon3", {"in1_label": "VDD_IN", "in1_input": 5000, "curr1_input": 2000})
    meter = JetsonMeter(0.02, CLOCK, sysfs.root)
    meter.open()
    assert [c.max_power_w for c in meter.channels] == [1000.0]
