"""Sources that stop, rest, jump or show 0 W, where the energy is a closed form: never a confident wrong joule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from results.energy import energy_between
from results.records import PowerTrace
from tests.fakes.stopped import INTERVAL_S, WINDOW_S, frozen, read, request, steady
from tests.fakes.waveforms import StepPower, counter_trace, trace
from tests.liveness_readings import TIMES_S, energy, sensor, within

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


@pytest.mark.parametrize("falls_s", [5.2, 5.25, 5.3])
def test_a_loss_under_a_load_that_is_high_at_its_ends_alone_is_not_taken_for_late(falls_s: float) -> None:
    """1 W, and 6 W from just before it stops to just after: it was 20 to 23 % too low, ± 0.3 %."""
    power = StepPower(np.array([-5.0, 3.8, falls_s, 6.4, 40.0]), np.array([1.0, 6.0, 1.0, 6.0]))
    for seed in range(10):
        taken = read(power, 0.1, np.random.default_rng(seed))
        assert within(energy(frozen(taken, 3.95, 5.0)), power.energy_j(0, WINDOW_S), 2.0)


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
    # Its 2 W may have gone on for these seven seconds: anything up to 14 J more than what is taken for them.
    assert reading.uncertainty_j == pytest.approx(14.0 / 3**0.5, rel=0.05)
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


@pytest.mark.parametrize(("seen", "is_confirmed"), [(0.6, True), (0.4, False)])
def test_a_sensor_that_shows_half_of_a_step_confirms_that_it_flowed(seen: float, is_confirmed: bool) -> None:
    """A counter of 100 W with one step of 25 J between two readings, and a sensor of the same part that shows a share
    of it in them. A step that is not confirmed may be a jump."""
    i = int(np.searchsorted(TIMES_S, 4.0))
    counted_j = 100.0 * (TIMES_S - TIMES_S[0]) + np.where(np.arange(len(TIMES_S)) > i, 25.0 - 100.0 * INTERVAL_S, 0.0)
    counter = trace("counter", TIMES_S, counted_j, INTERVAL_S, component="gpu", resolution=1e-6)
    watts = 100.0 + 0.01 * np.random.default_rng(0).standard_normal(len(TIMES_S))
    watts[i : i + 2] = seen * 25.0 / INTERVAL_S
    reading = energy(counter, sensor(watts, component="gpu power", additive=False))
    assert reading.energy_j == pytest.approx(100.0 * (WINDOW_S - INTERVAL_S) + 25.0)
    assert ("it may be a jump of the counter" in str(reading.remark)) is not is_confirmed


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
