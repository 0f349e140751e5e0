"""Sources that lose energy where no reading stands still, or stick beside others: never a confident wrong joule."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from results.energy import energy_between
from results.records import EnergyReading, PowerTrace
from results.renewal import observed_renewal
from tests.fakes.stopped import INTERVAL_S, WINDOW_S, frozen, read, request, steady, unread
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


def resting(seconds: float) -> tuple[EnergyReading, float]:
    """3 W in every second 2.5 s, beside 0.6 W; and the CPU time that the energy of it all took."""
    t = np.arange(-0.3, seconds + 0.3, 0.1)
    t = t + np.random.default_rng(0).uniform(0, 0.01, len(t))
    edges_s = np.arange(-5.0, seconds + 5.0, 2.5)
    watts = {"npu": np.where(np.arange(len(edges_s) - 1) % 2 == 0, 3.0, 0.0), "rest": np.full(len(edges_s) - 1, 0.6)}
    rails = [
        counter_trace(StepPower(edges_s, w), t, 0.001, step_j=1e-6, component=name, can_rest=True)
        for name, w in watts.items()
    ]
    begun_s = time.process_time()
    reading = energy_between(rails, [(0.0, seconds)], "all", "m")
    return reading, time.process_time() - begun_s


def test_what_a_rail_costs_that_rests_again_and_again_grows_with_its_rests() -> None:
    """360 rests of half an hour took 21 s when each looked at all renewals, and take a fraction of one."""
    end_s = 1800.0
    short_s = min(resting(end_s / 8)[1] for _ in range(3))
    reading, long_s = resting(end_s)
    assert within(reading, 1.5 * end_s + 0.6 * end_s)
    assert reading.energy_j == pytest.approx(2.1 * end_s, rel=1e-3)
    assert long_s < 30 * short_s, "8 times as much, and not 64"


# --- counters that nobody read for a while ----------------------------------------------------------------------------


@pytest.mark.parametrize("update_s", [0.001, 0.1])
@pytest.mark.parametrize(("lasts_s", "is_known"), [(0.3, True), (1.5, False)])
def test_a_counter_that_loses_what_flows_while_nobody_reads_it_is_doubted(
    update_s: float, lasts_s: float, is_known: bool
) -> None:
    """100 W, steady: 30 or 150 of 900 J."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        start_s = rng.uniform(0.5, 7.0)
        power = steady(rng)
        taken = read(power, update_s, rng)
        reading = energy(unread(frozen(taken, start_s, start_s + lasts_s), start_s, start_s + lasts_s))
        assert within(reading, power.energy_j(0, WINDOW_S))
        assert (reading.energy_j is not None) == is_known
        told = str(reading.remark or reading.reason)
        assert "m c: it was not read for" in told or "m c: its counter stood still for" in told


@pytest.mark.parametrize("load", [request, steady])
@pytest.mark.parametrize("update_s", [0.001, 0.1])
@pytest.mark.parametrize("lasts_s", [0.3, 1.0, 2.0])
def test_a_counter_that_counts_on_while_nobody_reads_it_is_a_measurement(
    load: Callable[[np.random.Generator], StepPower], update_s: float, lasts_s: float
) -> None:
    known = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        power = load(rng)
        start_s = rng.uniform(0.5, WINDOW_S - lasts_s - 0.5)
        reading = energy(unread(read(power, update_s, rng), start_s, start_s + lasts_s))
        assert within(reading, power.energy_j(0, WINDOW_S))
        known += reading.energy_j is not None
        assert load is request or reading.remark is None
    assert known >= 19


def watched(beside_w: float, extra_j: float) -> list[PowerTrace]:
    """A counter of 100 W that stops for 0.6 s and then counts extra_j at once; a sensor beside it shows beside_w."""
    rng = np.random.default_rng(0)
    power = StepPower(np.array([-5.0, 40.0]), np.array([100.0]))
    taken = frozen(replace(read(power, 0.1, rng), component="gpu0", relative_accuracy=0.03), 4.0, 4.6)
    taken = replace(taken, values=taken.values + np.where(taken.times_s > 4.65, extra_j, 0.0))
    shown_w = np.round(beside_w * (1 + 0.01 * rng.standard_normal(len(taken.times_s))), 3)
    beside = trace("power", taken.times_s, shown_w, INTERVAL_S, component="gpu0 power", relative_accuracy=0.03)
    return [taken, replace(beside, additive=False)]


@pytest.mark.parametrize("extra_j", [150.0, 300.0])
def test_a_sensor_that_contradicts_what_a_counter_caught_up_with_is_no_small_uncertainty(extra_j: float) -> None:
    """60 J are due where the counter brings 150 and more."""
    reading = energy(*watched(100.0, extra_j))
    assert within(reading, 900.0)
    assert "m gpu0: its counter stood still for" in str(reading.remark or reading.reason)


def test_the_sensor_beside_says_whether_an_unread_counter_lost_anything() -> None:
    counted, beside = watched(100.0, 0.0)
    reading = energy(unread(counted, 4.0, 4.62), beside)
    assert reading.energy_j is not None
    assert within(reading, 900.0)
    assert abs(reading.energy_j - 900.0) < 15.0
    sound = StepPower(np.array([-5.0, 4.0, 4.6, 40.0]), np.array([100.0, 20.0, 100.0]))
    dipped = replace(read(sound, 0.1, np.random.default_rng(0)), component="gpu0")
    reading = energy(unread(dipped, 4.0, 4.62), replace(beside, values=sound.power_w(beside.times_s)))
    assert reading.energy_j == pytest.approx(852.0, rel=2e-3)
    assert reading.remark is None


@pytest.mark.parametrize(
    ("update_s", "prefill_s", "decode_s"), [(0.02, 0.03, 0.4), (0.02, 0.05, 0.2), (0.01, 0.03, 0.4)]
)
def test_marks_close_to_each_other_are_no_quick_renewals(update_s: float, prefill_s: float, decode_s: float) -> None:
    """200 and 80 W; a reading at each edge and each 50 ms, so that all differ by chance several times in a row."""
    held, n_windows = 0, 40
    for seed in range(n_windows):
        rng = np.random.default_rng(seed)
        lasts_s = np.array([prefill_s, decode_s] * 50) * (1 + 0.1 * rng.standard_normal(100))
        edges_s = 0.3 + np.concatenate([[0.0], np.cumsum(lasts_s)])
        power = StepPower(np.concatenate([[-5.0], edges_s, [60.0]]), np.array([20.0, *[200.0, 80.0] * 50, 20.0]))
        grid_s = np.arange(-0.35, edges_s[-1] + 0.4, INTERVAL_S)
        grid_s = grid_s + rng.uniform(0, 0.2 * INTERVAL_S, len(grid_s))
        close_s = np.arange(-0.35 - 5 * update_s, -0.35, update_s / 8)
        t = np.unique(np.concatenate([close_s, grid_s, edges_s + 5e-5]))
        taken = counter_trace(power, t, update_s, rng.uniform(0, update_s), step_j=6e-5)
        taken = replace(taken, sample_interval_s=INTERVAL_S, update_period_s=0.001)
        observed_s = observed_renewal(t, taken.values - taken.values[0], 0.001).period_s
        assert 0.95 * update_s <= observed_s <= 1.1 * update_s
        decode = [(float(a), float(b)) for a, b in edges_s[1:].reshape(-1, 2)]
        reading = energy_between([taken], decode, "decode", "m")
        held += within(reading, sum(power.energy_j(a, b) for a, b in decode), 3.0)
    assert held >= 0.95 * n_windows


# --- power sensors that repeat a value --------------------------------------------------------------------------------


@pytest.mark.parametrize("step_w", [1e-3, 1e-4])
def test_a_sensor_of_fine_steps_that_sticks_at_idle_into_the_load_is_not_at_rest(step_w: float) -> None:
    """By chance the smallest change that is seen is far above the step that is stated."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        t = np.cumsum(np.concatenate([[-0.5], rng.uniform(0.5, 1.5, 210) * INTERVAL_S]))
        watts = request(rng).power_w(t) * (1 + 0.01 * rng.standard_normal(len(t)))
        taken = trace("power", t, np.round(watts / step_w) * step_w, INTERVAL_S, resolution=step_w)
        assert energy(stuck(taken, -0.3, 2.7)).reason is not None


def test_a_power_cap_that_holds_for_seconds_on_a_sensor_of_coarse_steps_is_a_measurement() -> None:
    """300 W for 4 s, with noise of 0.05 %, on steps of 1 W; a load that changes every 0.4 s else."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        steps_s = rng.exponential(0.35, 100) + 0.05
        before_s = np.arange(-2.0, 3.0, 0.4)
        edges_s = np.concatenate([before_s, [3.0, 7.0], 7.0 + np.cumsum(steps_s)])
        levels_w = rng.uniform(60.0, 290.0, len(edges_s) - 1)
        levels_w[len(before_s)] = 300.0
        power = StepPower(edges_s, levels_w)
        t = np.cumsum(np.concatenate([[-0.5], rng.uniform(0.5, 1.5, 220) * INTERVAL_S]))
        shown_w = np.round(power.power_w(t) * (1 + 0.0005 * rng.standard_normal(len(t))))
        reading = energy(trace("power", t, shown_w, INTERVAL_S, resolution=1.0))
        assert reading.energy_j is not None
        assert within(reading, power.energy_j(0, WINDOW_S), 3.0)


# --- jumps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update_s", [0.001, 0.1])
@pytest.mark.parametrize("jump_at_s", [(1.3, 2.3, 4.3, 7.3), (1.3, 1.8, 2.3, 4.3, 6.3, 7.3), (4.3, 4.3)])
def test_many_jumps_and_two_in_a_row_are_in_the_uncertainty(update_s: float, jump_at_s: tuple[float, ...]) -> None:
    """Each holds 3.5 times what the highest power brings between two readings or renewals."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        power = request(rng)
        taken = read(power, update_s, rng)
        values = taken.values.copy()
        step_s = max(INTERVAL_S, update_s)
        for i, at_s in enumerate(jump_at_s):
            is_pair = i > 0 and at_s == jump_at_s[i - 1]
            values[taken.times_s > at_s + is_pair * step_s] += 3.5 * float(power.watts.max()) * step_s
        reading = energy(replace(taken, values=values))
        assert within(reading, power.energy_j(0, WINDOW_S))
        assert "above the power beside" in str(reading.remark or reading.reason)
