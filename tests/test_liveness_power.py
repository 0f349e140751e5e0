"""Power sensors that fail, show 0 W or are stuck, and how often a source renews."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from results.energy import energy_between
from results.records import PowerTrace
from results.renewal import observed_renewal
from tests.fakes.stopped import INTERVAL_S, WINDOW_S, read, request, steady
from tests.fakes.waveforms import Array, StepPower, counter_trace, trace
from tests.liveness_readings import TIMES_S, energy, sensor, within

# --- update periods --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update_s", [0.001, 0.005, 0.02, 0.06, 0.1, 0.25, 0.6])
def test_the_update_period_is_seen_whatever_is_stated(update_s: float) -> None:
    for stated_s in (0.001, 0.1):
        for seed in range(10):
            rng = np.random.default_rng(seed)
            taken = read(request(rng), update_s, rng)
            found_s = observed_renewal(taken.times_s, taken.values, stated_s).period_s
            assert found_s == pytest.approx(update_s, rel=0.25, abs=1.5e-3)


def test_the_truth_lies_within_the_uncertainty_of_a_counter_that_is_slower_than_stated() -> None:
    for update_s in (0.02, 0.06):
        inside = 0
        for seed in range(100):
            rng = np.random.default_rng(seed)
            power = request(rng)
            inside += within(energy(read(power, update_s, rng, stated_s=0.001)), power.energy_j(0, WINDOW_S), 2.0)
        assert inside >= 95


@pytest.mark.parametrize("update_s", [0.0495, 0.0515, 0.053, 0.055])
def test_a_counter_that_is_renewed_about_as_often_as_it_is_read_stands_still_nowhere(update_s: float) -> None:
    """40 W for 8 s; 1 ms is stated, and every reading differs but one in some."""
    power = StepPower(np.array([-5.0, 40.0]), np.array([40.0]))
    for seed in range(10):
        rng = np.random.default_rng(seed)
        reading = energy(read(power, update_s, rng, stated_s=0.001))
        assert reading.remark is None
        # An update's energy at one edge; what was taken for a stand was twenty times as much.
        assert reading.energy_j == pytest.approx(40.0 * WINDOW_S, abs=40.0 * update_s + 0.3)
        assert within(reading, 40.0 * WINDOW_S, 3.0)


def test_three_seconds_between_renewals_do_not_resolve_nine() -> None:
    rng = np.random.default_rng(0)
    reading = energy(read(steady(rng), 3.0, rng, stated_s=0.001))
    assert reading.energy_j is None
    assert "10 are needed" in str(reading.reason)


def test_readings_that_all_differ_bound_the_period_by_their_distance() -> None:
    times_s: Array = np.arange(0.0, 5.0, 0.05)
    assert observed_renewal(times_s, times_s * 10.0, 0.001).period_s == 0.001
    assert observed_renewal(times_s, times_s * 10.0, 0.1).period_s == pytest.approx(0.05)


@pytest.mark.parametrize("update_s", [0.001, 0.01])
def test_two_readings_of_one_value_right_after_each_other_are_no_slow_renewal(update_s: float) -> None:
    """Marks at both ends of a pause between requests, in one update of a counter that is read each 50 ms."""
    n_held, n_windows = 0, 40
    for seed in range(n_windows):
        rng = np.random.default_rng(seed)
        lasts_s = np.stack(
            [rng.uniform(0.1, 0.2, 15), rng.uniform(0.4, 0.8, 15), rng.uniform(0.0005, 0.01, 15)], axis=1
        )
        edges_s = np.concatenate([[0.0], np.cumsum(lasts_s)])[:-1]
        power = StepPower(np.concatenate([[-5.0], edges_s, [60.0]]), np.array([20.0, *[150.0, 80.0, 30.0] * 15])[:46])
        grid_s = np.arange(-0.5, edges_s[-1] + 0.5, INTERVAL_S)
        grid_s = grid_s + rng.uniform(0, 0.1 * INTERVAL_S, len(grid_s))
        times_s = np.unique(np.concatenate([grid_s, edges_s + 1e-4]))
        taken = counter_trace(power, times_s, update_s, rng.uniform(0, update_s), step_j=6e-5)
        assert observed_renewal(times_s, taken.values - taken.values[0], update_s).period_s == update_s
        window = float(edges_s[0]), float(edges_s[-1])
        reading = energy_between([replace(taken, sample_interval_s=INTERVAL_S)], [window], "all", "m")
        n_held += within(reading, power.energy_j(*window), 3.0)
    assert n_held >= 0.95 * n_windows


# --- power -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["power", "held"])
def test_a_sensor_that_shows_0_watts_is_missing_not_zero(kind: str) -> None:
    dead = replace(sensor(np.zeros(len(TIMES_S))), kind=kind)
    reading = energy(dead)
    assert (reading.energy_j, reading.uncertainty_j) == (None, None)
    assert "it shows 0 W for 9.95 s; nothing that is switched on uses 0 J" in str(reading.reason)


def test_a_sensor_that_fails_to_0_watts_within_the_window_leaves_no_energy() -> None:
    reading = energy(sensor(np.where((TIMES_S > 3.0) & (TIMES_S < 8.0), 0.0, 30.0)))
    assert reading.energy_j is None
    assert "it showed 0 W for 5" in str(reading.reason)


def test_one_reading_of_0_watts_among_others_is_filled_in_and_told() -> None:
    watts = np.where(TIMES_S < 4.0, 30.0, 32.0)
    watts[100] = 0.0
    reading = energy(sensor(watts))
    whole = energy(sensor(np.where(watts == 0, 32.0, watts)))
    assert reading.energy_j == pytest.approx(whole.energy_j, abs=0.1)
    assert reading.uncertainty_j is not None
    assert whole.uncertainty_j is not None
    # 30 to 32 W for a tenth of a second.
    assert reading.uncertainty_j == pytest.approx(np.hypot(whole.uncertainty_j, 2.0 * 0.1 / 12**0.5), rel=0.3)
    assert "it showed 0 W for 100 ms" in str(reading.remark)


@pytest.mark.parametrize("shown_w", [1e-3, 0.15])
def test_readings_next_to_0_watts_are_filled_in_as_those_of_0_are(shown_w: float) -> None:
    """100 W, and one reading in twenty of a milliwatt, or of a seventh of a watt: 50 J too few, before."""
    rng = np.random.default_rng(0)
    watts = 100.0 + rng.standard_normal(len(TIMES_S))
    watts[10::20] = shown_w
    taken = replace(sensor(watts), resolution=1e-3)
    assert energy(taken).energy_j == pytest.approx(900.0, rel=3e-3)
    assert f"it showed {shown_w:g} W for" in str(energy(taken).remark)
    watts[rng.choice(len(watts), len(watts) // 3, replace=False)] = shown_w
    assert energy(replace(taken, values=watts)).energy_j is None


def test_a_failure_that_lasts_is_no_idleness_below_a_thousandth_of_the_load() -> None:
    load_w = 100.0 + np.random.default_rng(1).standard_normal(len(TIMES_S))
    watts = np.where((TIMES_S > 3.0) & (TIMES_S < 6.0), 2e-3, load_w)
    reading = energy(replace(sensor(watts), resolution=1e-3))
    assert reading.energy_j is None
    assert "it showed 0.002 W for 3" in str(reading.reason)
    # Of a rail that measures that little: its readings change, by several of its steps.
    low_w = 1e-3 * np.random.default_rng(0).integers(15, 30, len(TIMES_S))
    lives = replace(sensor(np.where(watts > 1, watts, low_w)), resolution=1e-3)
    assert energy(lives).energy_j == pytest.approx(600.0, rel=0.02)
    assert energy(lives).remark is None


@pytest.mark.parametrize(("low_w", "high_w"), [(8.0, 300.0), (0.06, 5.0)])
@pytest.mark.parametrize("n_low", [1, 2, 20])
def test_a_part_that_idles_deeply_is_a_measurement(low_w: float, high_w: float, n_low: int) -> None:
    """A GPU of 8 and 300 W, a phone of 60 mW and 5 W, that idle again and again, for one reading or for a second."""
    rng = np.random.default_rng(0)
    is_low = np.arange(len(TIMES_S)) % (2 * n_low + 3) < n_low
    watts = np.round(np.where(is_low, low_w, high_w) * (1 + 0.02 * rng.standard_normal(len(TIMES_S))), 3)
    reading = energy(replace(sensor(watts), resolution=1e-3))
    inside = (TIMES_S >= 0) & (TIMES_S < WINDOW_S)
    assert reading.energy_j == pytest.approx(watts[inside].sum() * INTERVAL_S, rel=0.03)
    assert reading.remark is None


def test_a_rail_at_0_watts_beside_others_that_are_not_is_switched_off() -> None:
    board = sensor(np.full(len(TIMES_S), 5.0), component="VDD_CPU")
    off = sensor(np.zeros(len(TIMES_S)), component="VDD_CV")
    reading = energy(board, off)
    assert reading.energy_j == pytest.approx(45.0)
    assert "VDD_CV counts as 0 J: it shows 0 W all the time" in str(reading.remark)
    assert energy(board, replace(off, has_lived=True)).energy_j is None


def test_0_watts_below_the_step_of_a_sensor_are_a_reading() -> None:
    """A rail of 20 mA behind a shunt that tells 8 mA: 0 W and 40 mW in turn are what it can say."""
    watts = 0.04 * (np.arange(len(TIMES_S)) % 2)
    reading = energy(replace(sensor(watts), resolution=0.04))
    assert reading.energy_j == pytest.approx(0.02 * WINDOW_S, rel=0.02)


# --- power that is stuck ---------------------------------------------------------------------------------------------


def noisy_power(step_w: float, noise_w: float, n_shown: int = 1) -> tuple[PowerTrace, float]:
    """Idle, 100 W from 2 to 8 s, idle; every 50 ms, in steps, each value n_shown times. And the joules of 0 to 10 s."""
    at_s = np.arange(-0.5, 10.5, 0.05)
    true_w = np.where((at_s >= 2.0) & (at_s < 8.0), 100.0, 20.0)
    exact_w = true_w + noise_w * np.random.default_rng(0).standard_normal(len(at_s))
    shown_w = np.round(exact_w / step_w)[np.arange(len(at_s)) // n_shown * n_shown] * step_w
    update_s = 0.05 * n_shown if n_shown > 1 else 0.0
    return trace("power", at_s, shown_w, 0.05, resolution=step_w, update_period_s=update_s), 680.0


def stuck(taken: PowerTrace, start_s: float, end_s: float) -> PowerTrace:
    inside = (taken.times_s >= start_s) & (taken.times_s < end_s)
    return replace(taken, values=np.where(inside, taken.values[int(np.argmax(inside))], taken.values))


@pytest.mark.parametrize(("start_s", "end_s"), [(1.0, 7.0), (3.0, 9.5), (5.0, 12.0), (-1.0, 4.0)])
@pytest.mark.parametrize(("step_w", "n_shown"), [(0.001, 1), (1.0, 1), (0.001, 2)])
def test_power_that_is_stuck_for_half_a_window_leaves_no_energy(
    step_w: float, n_shown: int, start_s: float, end_s: float
) -> None:
    """It would read up to 400 of 680 J too low, or 160 J too high."""
    taken, _ = noisy_power(step_w, 4.0, n_shown)
    reading = energy_between([stuck(taken, start_s, end_s)], [(0.0, 10.0)], "all", "m")
    assert (reading.energy_j, reading.uncertainty_j) == (None, None)
    assert "its reading was stuck at one value for" in str(reading.reason)


@pytest.mark.parametrize(
    ("others_w", "is_stuck"), [((50.998761, 50.012345, 149.345678), True), ((50.012345, 149.345678), False)]
)
def test_a_fine_reading_that_stands_for_the_rest_is_stuck_where_others_are_beside_it(
    others_w: tuple[float, ...], is_stuck: bool
) -> None:
    """Means of 1 s of a server, each read ten times. 4805 J were 6007 J, with a +- of 194 J. One or two others may be a
    load that begins."""
    watts = np.repeat([*others_w, *[250.113747] * 23], 10)
    at_s = 0.1 * np.arange(len(watts))
    taken = trace("power", at_s, watts, 0.1, resolution=1e-6, update_period_s=1.0, averaged_s=1.0)
    reading = energy_between([taken], [(1.0, 20.0)], "all", "m")
    assert (reading.energy_j is None) == is_stuck
    assert ("its reading was stuck at one value for" in str(reading.reason)) == is_stuck


def test_power_that_is_stuck_for_a_moment_widens_the_uncertainty_and_is_told() -> None:
    taken, true_j = noisy_power(0.001, noise_w=2.0)
    reading = energy_between([stuck(taken, 7.7, 8.4)], [(0.0, 10.0)], "all", "m")
    assert reading.energy_j is not None
    assert reading.uncertainty_j is not None
    assert 15 < abs(reading.energy_j - true_j) <= 2 * reading.uncertainty_j
    assert "its reading was stuck at one value for" in str(reading.remark)


@pytest.mark.parametrize(("step_w", "noise_w"), [(1.0, 0.0), (1.0, 0.2), (0.001, 0.0), (0.001, 2.0), (5.0, 2.0)])
def test_power_of_coarse_steps_or_without_noise_stays_a_measurement(step_w: float, noise_w: float) -> None:
    """A step of 1 W at a constant 100 W repeats itself for seconds."""
    taken, true_j = noisy_power(step_w, noise_w)
    reading = energy_between([taken], [(0.0, 10.0)], "all", "m")
    assert reading.energy_j == pytest.approx(true_j, rel=0.02)
    assert reading.remark is None


def test_power_of_coarse_steps_may_rest_at_its_lowest_value() -> None:
    """Under load every reading differs by some watts; idle, the sensor shows 20 W all the time."""
    taken, true_j = noisy_power(1.0, noise_w=4.0)
    idle = (taken.times_s < 2.0) | (taken.times_s >= 8.0)
    resting = replace(taken, values=np.where(idle, 20.0, taken.values))
    reading = energy_between([resting], [(0.0, 10.0)], "all", "m")
    assert reading.energy_j == pytest.approx(true_j, rel=0.02)
    assert reading.remark is None
