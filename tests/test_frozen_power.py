"""Sensors of power that stand still through a window: what they show at rest tells, and the truth is what was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from results.derivation import RequestEnergies, energies_of
from results.records import Completion, EnergyReading, PowerTrace
from results.trace_files import IDLE_AFTER, IDLE_BEFORE, WINDOW
from tests.fakes.waveforms import Array, trace

WINDOW_S = 10.0
IDLE_W, LOAD_W = 20.137, 100.0
BEFORE_S, TIMES_S, AFTER_S = np.arange(-6.0, -0.8, 0.05), np.arange(-0.5, 10.5, 0.05), np.arange(10.8, 16.0, 0.05)
LOADED: Array = np.where((TIMES_S >= 0) & (TIMES_S < WINDOW_S), LOAD_W, IDLE_W)


def sensor(at_s: Array, watts: Array, step_w: float, component: str = "board") -> PowerTrace:
    taken = trace("power", at_s, np.round(watts / step_w) * step_w, 0.05, resolution=step_w)
    return replace(taken, component=component, relative_accuracy=0.01)


def noise(at_s: Array, noise_w: float) -> Array:
    return noise_w * np.random.default_rng(len(at_s)).standard_normal(len(at_s))


def total(*parts: Sequence[PowerTrace]) -> EnergyReading:
    """parts: by sensor its trace before the window, in it and after it; without a rest the one in it alone."""
    own = {WINDOW: [part[len(part) // 2] for part in parts]}
    if len(parts[0]) == 3:
        own |= {IDLE_BEFORE: [part[0] for part in parts], IDLE_AFTER: [part[2] for part in parts]}
    readings = energies_of((), own, (0.0, WINDOW_S)).readings
    return next(r for r in readings if r.phase == "all" and r.component == "total")


def part(
    loaded_w: Array, step_w: float, noise_w: float = 0.0, rest_w: float = IDLE_W, component: str = "board"
) -> list[PowerTrace]:
    """Noise at rest; in the window what is given."""
    rests = [sensor(at_s, rest_w + noise(at_s, noise_w), step_w, component) for at_s in (BEFORE_S, AFTER_S)]
    return [rests[0], sensor(TIMES_S, loaded_w, step_w, component), rests[1]]


def is_held(reading: EnergyReading, true_j: float) -> bool:
    if reading.energy_j is None or reading.uncertainty_j is None:
        return False
    return abs(reading.energy_j - true_j) <= 2 * reading.uncertainty_j


@pytest.mark.parametrize(("step_w", "noise_w"), [(0.001, 0.3), (0.001, 3.0), (1.0, 4.0)])
def test_a_sensor_that_is_stuck_in_the_window_and_has_noise_at_rest_leaves_no_energy(
    step_w: float, noise_w: float
) -> None:
    """The machine drew 1000 J; 200 J +- 1 % were told, as its load's own readings show no noise to miss."""
    living = LOADED + noise(TIMES_S, noise_w)
    assert is_held(total(part(living, step_w, noise_w)), 1000.0)
    for stuck_w in (IDLE_W, LOAD_W + 20.0):
        reading = total(part(np.full(len(TIMES_S), stuck_w), step_w, noise_w))
        assert (reading.energy_j, reading.net_energy_j) == (None, None)
        assert "stuck at one value for 10.9 s, and it moves in the idle time around the window" in str(reading.reason)


def test_one_that_freezes_as_the_window_begins_is_told_by_the_rest() -> None:
    """Its few readings before say too little by themselves."""
    watts = np.where(TIMES_S < 0.1, IDLE_W + noise(TIMES_S, 0.3), IDLE_W)
    assert total(part(watts, 0.001, 0.3)).energy_j is None


@pytest.mark.parametrize("has_rest", [True, False])
def test_a_sensor_of_fine_steps_that_never_changes_leaves_no_energy(has_rest: bool) -> None:
    whole = part(np.full(len(TIMES_S), IDLE_W), 0.001)
    reading = total(whole if has_rest else whole[1:2])
    assert (reading.energy_j, reading.net_energy_j) == (None, None)
    assert "show 20.137 W to the last digit" in str(reading.reason)
    assert ("at rest too" in str(reading.reason)) is has_rest


@pytest.mark.parametrize(("step_w", "watts"), [(1.0, 20.0), (0.04, 19.96), (0.001, 20.0), (0.001, 137.5)])
def test_a_load_that_costs_less_than_a_step_is_a_measurement_and_both_readings_of_it_are_told(
    step_w: float, watts: float
) -> None:
    """A driver that states milliwatts may show a sensor of half watts. Without a rest beside it nothing is said."""
    whole = part(np.full(len(TIMES_S), watts), step_w, rest_w=watts)
    reading = total(whole)
    assert is_held(reading, watts * WINDOW_S)
    assert "used less than a step of the sensor, or the sensor stood still" in str(reading.remark)
    alone = total(whole[1:2])
    assert is_held(alone, watts * WINDOW_S)
    assert alone.remark is None


@pytest.mark.parametrize(("step_w", "noise_w"), [(0.001, 0.3), (1.0, 0.3), (1.0, 4.0)])
def test_a_load_that_equals_the_rest_is_a_measurement(step_w: float, noise_w: float) -> None:
    reading = total(part(IDLE_W + noise(TIMES_S, noise_w), step_w, noise_w))
    assert is_held(reading, IDLE_W * WINDOW_S)
    assert reading.remark is None


def test_loads_without_noise_are_measurements() -> None:
    """A sensor that rests at one value, and shows another under load, has moved."""
    for step_w in (0.001, 1.0):
        reading = total(part(LOADED, step_w))
        assert is_held(reading, LOAD_W * WINDOW_S)
        assert reading.remark is None


def test_a_part_that_never_changes_beside_one_that_does_is_believed_where_it_is_small_or_coarse() -> None:
    """800 J beside it. Of 20.137 W that never change nobody knows 200 J; of 2.0137 W it is told."""
    living = part(np.full(len(TIMES_S), 80.0) + noise(TIMES_S, 1.0), 0.001, 1.0, 80.0)

    def beside(watts: float) -> EnergyReading:
        return total(living, part(np.full(len(TIMES_S), watts), 1e-4, rest_w=watts, component="memory"))

    assert beside(20.137).energy_j is None
    small, coarse = beside(2.0137), beside(20.0)
    assert is_held(small, 820.137)
    assert "2.0137 W to the last digit" in str(small.remark)
    assert is_held(coarse, 1000.0)
    assert coarse.remark is None


def test_requests_have_no_joules_either_where_the_window_has_none() -> None:
    before, read, after = part(np.full(len(TIMES_S), IDLE_W), 0.001, 0.3)
    done = [
        Completion(
            request_id=f"r{i}", sample_id=f"s{i}", n_prompt_tokens=4, start_s=at_s, prefill_end_s=at_s + 1.0,
            token_times_s=(at_s + 1.0, at_s + 3.0), end_s=at_s + 3.0,
        )
        for i, at_s in enumerate((1.0, 5.0))
    ]  # fmt: skip
    assert RequestEnergies([read], "m", done, ([before], [after])).of(done[:1]).energy_j is None


@pytest.mark.parametrize("noise_w", [0.0, 0.3])
def test_a_driver_that_hangs_stops_counter_and_sensor_alike(noise_w: float) -> None:
    """The joules of a counter that never moved are its power sensor's, unless that stood still too."""
    power = part(np.full(len(TIMES_S), IDLE_W), 0.001, noise_w, component="gpu0 power")
    power = [replace(t, additive=False) for t in power]
    counter = [replace(t, component="gpu0", kind="counter", additive=True, values=0 * t.values + 5.0) for t in power]
    reading = total(counter, power)
    assert (reading.energy_j, reading.net_energy_j) == (None, None)
    assert "gpu0 power" in str(reading.reason)


def test_a_sensor_that_shows_one_value_while_its_counter_stands_confirms_nothing() -> None:
    """Both stop 0.2 s before the window. The sensor's 200 J were taken for the counter's."""
    update_s = 0.1
    shown_s = np.floor(TIMES_S / update_s + 1e-9) * update_s
    joules = 20.0 * (np.minimum(shown_s, -0.2) + 0.5)
    living_w = 20.0 + np.repeat(noise(TIMES_S[::2], 0.3), 2)[: len(TIMES_S)]
    watts = np.where(shown_s < -0.2, living_w, IDLE_W)
    for shown_w, has_energy in ((watts, False), (living_w, True)):
        power = replace(sensor(TIMES_S, shown_w, 0.001, "gpu0 power"), additive=False, update_period_s=update_s)
        counter = replace(sensor(TIMES_S, joules, 0.001, "gpu0"), kind="counter", update_period_s=update_s)
        assert (total([counter], [power]).energy_j is not None) is has_energy
