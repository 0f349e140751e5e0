"""Sources that stop, rest, jump or show 0 W, where the energy is a closed form: never a confident wrong joule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from results.energy import energy_between
from results.records import EnergyReading, PowerTrace
from results.renewal import observed_renewal
from tests.fakes.stopped import INTERVAL_S, WINDOW_S, frozen, read, request, steady
from tests.fakes.waveforms import Array, StepPower, counter_trace, trace


def energy(*traces: PowerTrace, component: str = "total") -> EnergyReading:
    return energy_between(traces, [(0.0, WINDOW_S)], "all", "m", component)


def within(reading: EnergyReading, true_j: float, sigmas: float) -> bool:
    """Whether the truth is where the reading says; a reading without energy claims nothing."""
    if reading.energy_j is None:
        return bool(reading.reason)
    assert reading.uncertainty_j is not None
    return abs(reading.energy_j - true_j) <= sigmas * reading.uncertainty_j + 1e-9


# --- counters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [request, steady])
@pytest.mark.parametrize("update_s", [0.001, 0.02, 0.1])
@pytest.mark.parametrize("lasts_s", [0.3, 0.6, 1.0, 2.0, 6.0])
def test_a_counter_that_loses_what_flowed_never_states_a_wrong_joule(
    load: Callable[[np.random.Generator], StepPower], update_s: float, lasts_s: float
) -> None:
    held = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        power = load(rng)
        taken = read(power, update_s, rng)
        start_s = rng.uniform(0.2, WINDOW_S - lasts_s)
        reading = energy(frozen(taken, start_s, start_s + lasts_s))
        held += within(reading, power.energy_j(0, WINDOW_S), 2.0)
        if lasts_s > 0.25 * WINDOW_S:
            assert reading.energy_j is None
            assert "its counter stood still for" in str(reading.reason)
    assert held >= 19


def test_a_frozen_counter_reads_40_joules_no_more_where_200_are_true() -> None:
    """100 W for two seconds; it stops after 0.4 s and never moves again."""
    power = StepPower(np.array([-5.0, 5.0]), np.array([100.0]))
    times_s = np.arange(-0.3, 2.3, INTERVAL_S)
    for update_s in (0.001, 0.1):
        taken = replace(counter_trace(power, times_s, update_s, 0.013), sample_interval_s=INTERVAL_S)
        reading = energy_between([frozen(taken, 0.4, 9.0)], [(0.0, 2.0)], "all", "m")
        assert reading.energy_j is None
        assert "its counter stood still for 1.6" in str(reading.reason)


@pytest.mark.parametrize("lasts_s", [0.3, 0.6, 2.0])
def test_a_counter_that_is_late_and_catches_up_has_lost_nothing(lasts_s: float) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        power = steady(rng)
        reading = energy(frozen(read(power, 0.02, rng), 3.0, 3.0 + lasts_s, keeps_count=True))
        assert reading.energy_j == pytest.approx(power.energy_j(0, WINDOW_S), rel=3e-3)
        assert within(reading, power.energy_j(0, WINDOW_S), 2.5)


def test_a_short_loss_is_filled_in_by_the_power_around_it_and_told() -> None:
    power = StepPower(np.array([-5.0, 40.0]), np.array([100.0]))
    reading = energy(frozen(read(power, 0.02, np.random.default_rng(0)), 4.0, 4.6))
    assert reading.energy_j == pytest.approx(900.0, rel=3e-3)
    assert "its counter stood still for 6" in str(reading.remark)
    assert "J are taken for it" in str(reading.remark)


def test_a_loss_shorter_than_an_update_is_not_seen_and_is_no_more_than_that() -> None:
    """100 W, renewed every 100 ms: 80 ms are lost. No reading tells; the page of such a meter does."""
    for seed in range(10):
        taken = read(StepPower(np.array([-5.0, 40.0]), np.array([100.0])), 0.1, np.random.default_rng(seed))
        reading = energy(frozen(taken, 4.0, 4.08))
        assert reading.remark is None
        assert reading.energy_j == pytest.approx(900.0, abs=100.0 * 0.1 + 3.0)


def test_a_lone_part_that_is_switched_off_looks_as_if_it_had_stopped() -> None:
    """A GPU of 50 W, at 0 W for three seconds. Another part of its meter that counts on tells that it rests."""
    power = StepPower(np.array([-5.0, 3.0, 6.0, 40.0]), np.array([50.0, 0.0, 50.0]))
    gpu = replace(read(power, 0.05, np.random.default_rng(0)), component="gpu", can_rest=True)
    assert energy(gpu).energy_j is None
    assert "its counter stood still for 3" in str(energy(gpu).reason)
    cpu = read(StepPower(np.array([-5.0, 40.0]), np.array([200.0])), 0.05, np.random.default_rng(1))
    assert energy(gpu, replace(cpu, component="cpu")).energy_j == pytest.approx(2100.0, rel=5e-3)


def test_a_counter_that_freezes_outside_of_the_window_does_not_matter() -> None:
    power = StepPower(np.array([-5.0, 40.0]), np.array([100.0]))
    times_s = np.arange(-3.0, WINDOW_S + 0.2, INTERVAL_S)
    taken = replace(counter_trace(power, times_s, 0.1, 0.01), sample_interval_s=INTERVAL_S)
    reading = energy(frozen(taken, -2.5, -1.0))
    assert reading.energy_j == pytest.approx(900.0, abs=5.0)
    assert reading.remark is None


@pytest.mark.parametrize(("beside_w", "taken_j"), [(100.0, 900.0), (0.0, None)])
def test_the_power_beside_a_frozen_counter_says_what_flowed(beside_w: float, taken_j: float | None) -> None:
    """A sensor that shows 0 W beside it says nothing."""
    power = StepPower(np.array([-5.0, 40.0]), np.array([100.0]))
    taken = replace(read(power, 0.1, np.random.default_rng(0)), component="gpu0", relative_accuracy=0.03)
    watts = np.full(len(taken.times_s), beside_w)
    beside = trace("power", taken.times_s, watts, INTERVAL_S, component="gpu0 power", update_period_s=0.1)
    reading = energy(frozen(taken, 1.0, 8.0), replace(beside, additive=False, relative_accuracy=0.03))
    if taken_j is None:
        assert reading.energy_j is None
        return
    assert reading.energy_j == pytest.approx(taken_j, rel=2e-2)
    # Both gains, of what each of the two has told.
    assert reading.uncertainty_j is not None
    assert reading.uncertainty_j >= 0.03 * 900.0
    assert "stood still for 7" in str(reading.remark)


def test_a_part_that_never_moves_is_no_joule_and_no_end_of_the_total() -> None:
    power = StepPower(np.array([-5.0, 40.0]), np.array([10.0]))
    cpu = read(power, 0.02, np.random.default_rng(0))
    npu = replace(cpu, component="npu", values=np.full(len(cpu.values), 7.0))
    reading = energy(cpu, npu)
    assert reading.energy_j == pytest.approx(90.0, abs=0.5)
    assert "npu counts as 0 J: its counter stands still at 7 J all the time" in str(reading.remark)
    # Nothing is claimed of it alone, nor where it is known to have moved.
    assert energy(cpu, npu, component="npu").energy_j is None
    stopped = energy(cpu, replace(npu, has_lived=True))
    assert stopped.energy_j is None
    assert "it has stopped, and the total would lack it" in str(stopped.reason)
    assert energy(cpu, replace(npu, has_lived=True, can_rest=True)).energy_j == pytest.approx(90.0, abs=0.5)


def test_a_part_that_may_rest_widens_the_total_by_what_it_used_before() -> None:
    """4 W for three seconds, then off; nothing tells that it did not freeze."""
    cpu = read(StepPower(np.array([-5.0, 40.0]), np.array([20.0])), 0.02, np.random.default_rng(0))
    npu = read(StepPower(np.array([-5.0, 3.0, 40.0]), np.array([4.0, 0.0])), 0.02, np.random.default_rng(0))
    reading = energy(cpu, replace(npu, component="npu", can_rest=True))
    assert reading.energy_j == pytest.approx(180.0 + 12.0, abs=1.0)
    assert reading.uncertainty_j == pytest.approx(4.0 * 6.0 / 3**0.5, rel=0.1)
    assert "m npu: its counter stood still for 5.95 s; 0 J are taken for it" in str(reading.remark)
    assert energy(cpu, replace(npu, component="npu")).energy_j is None


def test_parts_that_stop_all_at_once_do_not_rest() -> None:
    """The rails of a phone: 52 J, and their source stops in the middle."""
    big = read(StepPower(np.array([-5.0, 40.0]), np.array([4.0])), 0.02, np.random.default_rng(0))
    small = read(StepPower(np.array([-5.0, 40.0]), np.array([1.2])), 0.02, np.random.default_rng(0))
    parts = [replace(frozen(t, 4.5, 99.0), component=c, can_rest=True) for t, c in ((big, "big"), (small, "small"))]
    assert energy(*parts).energy_j is None
    assert "its counter stood still for 4.5" in str(energy(*parts).reason)
    rests = energy(replace(big, component="big", can_rest=True), parts[1])
    assert rests.energy_j == pytest.approx(4.0 * 9.0 + 1.2 * 4.5, abs=0.3)
    assert within(rests, 1.2 * 9.0 + 4.0 * 9.0, 2.0)
    # That of most of the energy may have stopped: nothing bounds what it hid.
    assert energy(parts[0], replace(small, component="small", can_rest=True)).energy_j is None


@pytest.mark.parametrize(("jump_j", "limit_w"), [(34.5e6, None), (400.0, 2e3), (40.0, 150.0)])
def test_a_jump_up_that_cannot_have_flowed_is_no_energy(jump_j: float, limit_w: float | None) -> None:
    taken = read(StepPower(np.array([-5.0, 40.0]), np.array([100.0])), 0.001, np.random.default_rng(0))
    values = taken.values + np.where(taken.times_s > 4.0, jump_j, 0.0)
    reading = energy(replace(taken, values=values, max_power_w=limit_w))
    assert reading.energy_j is None
    assert "counter jumped up from" in str(reading.reason)


def test_a_counter_that_is_dead_beside_a_power_sensor_that_shows_watts_is_read_by_the_sensor() -> None:
    """100 W and 300 W for nine seconds; the second counter never moves."""
    power = StepPower(np.array([-5.0, 40.0]), np.array([100.0]))
    first = replace(read(power, 0.1, np.random.default_rng(0)), component="gpu0")
    dead = replace(first, component="gpu1", values=np.full(len(first.values), 5.0))
    watts = 300.0 + 0.01 * np.random.default_rng(0).standard_normal(len(first.times_s))
    beside = trace("power", first.times_s, watts, INTERVAL_S, component="gpu1 power", update_period_s=0.1)
    for has_lived in (False, True):
        reading = energy(first, replace(dead, has_lived=has_lived), replace(beside, additive=False))
        assert reading.energy_j == pytest.approx(3600.0, rel=3e-3)
        assert "gpu1: its counter stands still at 5 J all the time; its power sensor's joules" in str(reading.remark)
    resting = replace(beside, additive=False, values=np.zeros(len(watts)))
    assert energy(first, dead, resting).energy_j == pytest.approx(900.0, rel=3e-3)


@pytest.mark.parametrize("shows", ["0 W", "one value"])
def test_a_power_sensor_that_stops_with_the_counter_confirms_nothing(shows: str) -> None:
    """350 W for five of nine seconds, at 50 W else; neither shows any of it."""
    power = StepPower(np.array([-5.0, 2.0, 7.0, 40.0]), np.array([50.0, 350.0, 50.0]))
    taken = replace(read(power, 0.1, np.random.default_rng(0)), component="gpu0")
    t = taken.times_s
    watts = power.power_w(t) * (1 + 1e-3 * np.random.default_rng(1).standard_normal(len(t)))
    watts[(t > 1.9) & (t < 7.1)] = 0.0 if shows == "0 W" else 50.02
    beside = trace("power", t, watts, INTERVAL_S, component="gpu0 power", update_period_s=0.1, additive=False)
    assert energy(frozen(taken, 1.9, 7.1), beside).energy_j is None
    right = replace(beside, values=power.power_w(t) * (1 + 1e-3 * np.random.default_rng(1).standard_normal(len(t))))
    assert within(energy(frozen(taken, 1.9, 7.1), right), power.energy_j(0, WINDOW_S), 2.0)


@pytest.mark.parametrize("update_s", [0.001, 0.02, 0.06, 0.1])
@pytest.mark.parametrize(("lost_s", "decode_w"), [((0.3, 0.8), 40.0), ((1.0, 1.4), 10.0)])
def test_a_burst_that_a_stand_hides_is_not_filled_in_by_the_idle_around_it(
    update_s: float, lost_s: tuple[float, float], decode_w: float
) -> None:
    """10 W, and 200 W exactly while the counter stands still: 100 J of 190, or 80 of 110."""
    power = StepPower(np.array([-5.0, *lost_s, 40.0]), np.array([10.0, 200.0, decode_w]))
    for seed in range(10):
        taken = read(power, update_s, np.random.default_rng(seed), stated_s=0.001)
        reading = energy_between([frozen(taken, *lost_s)], [(0.0, 3.0)], "all", "m")
        assert within(reading, power.energy_j(0, 3), 2.0)


def rails(rng: np.random.Generator) -> list[PowerTrace]:
    """Of a phone: idle, six seconds of load, idle; the third does not feel it."""
    t = np.arange(-0.3, WINDOW_S + 0.4, 0.1)
    found = []
    for name, low_w, high_w in (("big", 0.2, 3.0), ("small", 0.1, 1.0), ("rest", 0.3, 0.3)):
        power = StepPower(np.array([-5.0, 2.0, 8.0, 40.0]), np.array([low_w, high_w, low_w]))
        values = power.since_start_j(t + rng.uniform(0, 0.005, len(t)))
        fields = {"update_period_s": 1e-3, "resolution": 1e-6, "component": name, "can_rest": True}
        found.append(trace("counter", t, np.floor(values * 1e6) / 1e6, 0.1, **fields))
    return found


@pytest.mark.parametrize("stopped", [("big",), ("big", "small"), ("big", "small", "rest")])
@pytest.mark.parametrize("stretch_s", [(3.0, 7.0), (1.9, 8.1)])
def test_rails_that_stop_under_load_while_others_count_do_not_rest(
    stopped: tuple[str, ...], stretch_s: tuple[float, float]
) -> None:
    for seed in range(5):
        healthy = rails(np.random.default_rng(seed))
        found = [frozen(t, *stretch_s) if t.component in stopped else t for t in healthy]
        assert energy(*healthy).energy_j == pytest.approx(3 * 0.3 + 6 * 4.0 + 9 * 0.3, rel=0.02)
        assert energy(*found).energy_j is None


@pytest.mark.parametrize("is_rest", [True, False])
@pytest.mark.parametrize("lasts_s", [0.5, 1.0])
def test_two_rails_of_three_that_stop_together_may_rest_or_have_stopped(lasts_s: float, is_rest: bool) -> None:
    """1.2 and 0.4 W; 0.3 W go on. What both may hide is in the uncertainty, as one error."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        t = np.arange(-0.3, WINDOW_S + 0.4, 0.1)
        start_s = rng.uniform(0.5, 7.5)
        found, true_j = [], 0.0
        for name, watts in (("big", 1.2), ("small", 0.4), ("rest", 2.4)):
            off = 0.0 if is_rest and name != "rest" else 1.0
            power = StepPower(np.array([-5.0, start_s, start_s + lasts_s, 40.0]), watts * np.array([1.0, off, 1.0]))
            values = np.floor(power.since_start_j(t + rng.uniform(0, 0.005, len(t))) * 1e6) / 1e6
            fields = {"update_period_s": 1e-3, "resolution": 1e-6, "component": name, "can_rest": True}
            taken = trace("counter", t, values, 0.1, **fields)
            found.append(taken if is_rest or name == "rest" else frozen(taken, start_s, start_s + lasts_s))
            true_j += power.energy_j(0, WINDOW_S)
        reading = energy(*found)
        assert reading.energy_j is not None
        assert within(reading, true_j, 2.0)
        assert "J are taken for it; m small: its counter stood still for" in str(reading.remark)


def test_a_small_part_that_shows_0_watts_for_a_while_does_not_decide_over_the_total() -> None:
    """2 W for two seconds, 0 W else, beside 40 W: an accelerator of a board that counts no energy."""
    t = TIMES_S
    board = sensor(40.0 + 0.01 * np.random.default_rng(0).standard_normal(len(t)), component="VDD_CPU")
    cv = sensor(np.where((t > 3.0) & (t < 5.0), 2.0, 0.0), component="VDD_CV")
    reading = energy(board, cv)
    assert reading.energy_j == pytest.approx(364.0, rel=3e-3)
    assert within(reading, 364.0, 2.0)
    assert "VDD_CV: it showed 0 W for 7" in str(reading.remark)
    # A large one has failed.
    gpu = sensor(np.where((t > 3.0) & (t < 5.0), 60.0, 0.0), component="VDD_GPU")
    assert energy(board, gpu).energy_j is None


def test_a_part_that_rests_again_and_again_is_known_better_than_one_that_stops_once() -> None:
    """30 W every second second, beside 20 W."""
    edges_s = np.arange(-5.0, 40.0)
    npu = StepPower(edges_s, np.where(np.arange(len(edges_s) - 1) % 2 == 0, 30.0, 0.0))
    board = read(StepPower(np.array([-5.0, 40.0]), np.array([20.0])), 0.001, np.random.default_rng(0))
    part = replace(read(npu, 0.001, np.random.default_rng(0)), component="npu", can_rest=True)
    reading = energy(board, part)
    true_j = 180.0 + npu.energy_j(0, WINDOW_S)
    assert within(reading, true_j, 2.0)
    assert reading.uncertainty_j is not None
    assert reading.uncertainty_j < 0.05 * true_j


@pytest.mark.parametrize("update_s", [0.001, 0.1])
@pytest.mark.parametrize("n_jumps", [1, 2])
def test_jumps_of_a_few_times_the_highest_power_are_in_the_uncertainty(update_s: float, n_jumps: int) -> None:
    """Four times what 120 W bring between two readings or renewals: up to 6 % of the window, each."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        power = request(rng)
        taken = read(power, update_s, rng)
        values = taken.values.copy()
        for at_s in (2.0, 6.0)[:n_jumps] + rng.uniform(-1, 1, n_jumps):
            values[taken.times_s > at_s] += 4.0 * 120.0 * max(INTERVAL_S, update_s)
        reading = energy(replace(taken, values=values))
        assert within(reading, power.energy_j(0, WINDOW_S), 2.0)
        assert "above the power beside" in str(reading.remark or reading.reason)


@pytest.mark.parametrize("lasts_s", [0.02, 0.04, 0.13, 0.3])
@pytest.mark.parametrize("update_s", [0.001, 0.1])
def test_a_short_burst_stays_a_measurement(lasts_s: float, update_s: float) -> None:
    """300 W in 40 W."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        start_s = rng.uniform(0.5, 8.0)
        power = StepPower(np.array([-5.0, start_s, start_s + lasts_s, 40.0]), np.array([40.0, 300.0, 40.0]))
        reading = energy(read(power, update_s, rng))
        assert reading.energy_j is not None
        assert within(reading, power.energy_j(0, WINDOW_S), 2.0)


@pytest.mark.parametrize("jump_j", [50.0, 100.0, 400.0])
def test_a_jump_below_what_a_part_can_draw_is_never_stated_as_joules_without_doubt(jump_j: float) -> None:
    """20 W for nine seconds; one step holds 1 kW and more for 50 ms. A burst of more than one step is believed."""
    rng = np.random.default_rng(0)
    taken = read(StepPower(np.array([-5.0, 40.0]), np.array([20.0])), 0.001, rng)
    reading = energy(replace(taken, values=taken.values + np.where(taken.times_s > 4.02, jump_j, 0.0)))
    assert within(reading, 180.0, 2.0)
    assert "one step of" in str(reading.remark or reading.reason)
    burst = StepPower(np.array([-5.0, 4.0, 4.13, 40.0]), np.array([20.0, 350.0, 20.0]))
    believed = energy(read(burst, 0.001, rng))
    assert believed.energy_j == pytest.approx(burst.energy_j(0, WINDOW_S), rel=3e-3)
    assert believed.remark is None


# --- counters that tick slowly ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_j", [14.0, 3.5])
@pytest.mark.parametrize(("idle_w", "busy_w"), [(0.5, 6.0), (1.0, 4.0)])
@pytest.mark.parametrize("is_stated", [False, True])
def test_a_counter_of_coarse_steps_stands_still_as_long_as_a_step_takes(
    step_j: float, idle_w: float, busy_w: float, is_stated: bool
) -> None:
    """A phone's charge, 1 mAh a step: idle for 90 s, then load."""
    power = StepPower(np.array([-50.0, 90.0, 270.0, 400.0]), np.array([idle_w, busy_w, idle_w]))
    for seed in range(5):
        rng = np.random.default_rng(seed)
        t = np.arange(-1.0, 302.0) + rng.uniform(0, 0.1, 303)
        values = np.floor((power.since_start_j(t) + rng.uniform(0, step_j)) / step_j) * step_j
        taken = trace("counter", t, values, 1.0, resolution=step_j if is_stated else 0.0)
        reading = energy_between([taken], [(0.0, 300.0)], "all", "m")
        # Behind the last step it may be busy or idle: 28 s of these at most.
        assert reading.energy_j == pytest.approx(power.energy_j(0, 300), abs=busy_w * step_j / idle_w / 2)
        assert within(reading, power.energy_j(0, 300), 2.5)
        assert reading.remark is None
        assert energy_between([frozen(taken, 120.0, 240.0)], [(0.0, 300.0)], "all", "m").energy_j is None


def test_a_counter_that_renews_in_runs_loses_nothing() -> None:
    """Twenty renewals of 10 ms, then 300 ms without one."""
    held = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        power = request(rng)
        renewed_s = -6 + np.cumsum(np.where(np.arange(4000) % 20 == 0, 0.3, 0.01))
        t = np.arange(-0.1, WINDOW_S + 0.4, INTERVAL_S)
        shown_s = renewed_s[np.searchsorted(renewed_s, t, side="right") - 1]
        taken = trace("counter", t, power.since_start_j(shown_s), INTERVAL_S, update_period_s=0.001)
        reading = energy(taken)
        assert reading.energy_j is not None
        held += within(reading, power.energy_j(0, WINDOW_S), 2.0)
    assert held >= 19


def irregular(power: StepPower, rng: np.random.Generator) -> PowerTrace:
    """Renewed at random, every 60 ms on average."""
    renewed_s = -6 + np.cumsum(rng.exponential(0.06, 400))
    t = np.unique(np.concatenate([np.arange(-0.35, -0.05, 0.002), np.arange(-0.05, WINDOW_S + 0.4, INTERVAL_S)]))
    shown_s = renewed_s[np.searchsorted(renewed_s, t, side="right") - 1]
    return trace("counter", t, power.since_start_j(shown_s), INTERVAL_S, update_period_s=0.001)


@pytest.mark.parametrize("load", [request, steady])
def test_a_counter_that_renews_at_random_is_believed_where_it_loses_nothing_and_only_there(
    load: Callable[[np.random.Generator], StepPower],
) -> None:
    """A sixth of the windows that lost 0.6 s was believed, before."""
    held = n_known = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        power = load(rng)
        taken = irregular(power, rng)
        reading = energy(taken)
        n_known += reading.energy_j is not None
        held += within(reading, power.energy_j(0, WINDOW_S), 2.0)
        start_s = rng.uniform(0.2, WINDOW_S - 0.8)
        assert within(energy(frozen(taken, start_s, start_s + 0.6)), power.energy_j(0, WINDOW_S), 2.0)
    assert n_known >= 37
    assert held >= 38


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


# --- power -----------------------------------------------------------------------------------------------------------

TIMES_S = np.arange(-0.5, WINDOW_S + 0.5, INTERVAL_S)


def sensor(watts: Array, **fields: object) -> PowerTrace:
    return trace("power", TIMES_S, watts, INTERVAL_S, resolution=1e-6, **fields)


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
