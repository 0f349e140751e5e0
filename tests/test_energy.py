"""Joules against closed forms, the reasons of missing ones, and uncertainties against simulated instruments."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.energy import NO_JOULES, energy_between
from results.idle import idle_baseline
from results.peak_power import p90_power
from results.records import PowerTrace
from tests.energy_readings import GRID_S, energy, reason, steps
from tests.fakes.waveforms import counter_trace, trace

# --- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["power", "held"])
def test_constant_power_is_watts_times_seconds(kind: str) -> None:
    reading = energy(trace(kind, GRID_S, np.full(len(GRID_S), 7.0), 0.01), (1.2345, 5.6789))
    assert reading.energy_j == pytest.approx(7.0 * (5.6789 - 1.2345), rel=1e-12)
    assert reading.average_power_w == pytest.approx(7.0)
    assert reading.uncertainty_j == 0


def test_linear_power_is_exact_at_edges_between_readings() -> None:
    # P = 3 + 4 t: E = 3 (b - a) + 2 (b^2 - a^2), wherever a and b lie between the readings.
    a, b = 0.1234567, 8.7654321
    reading = energy(trace("power", GRID_S, 3 + 4 * GRID_S, 0.01), (a, b))
    assert reading.energy_j == pytest.approx(3 * (b - a) + 2 * (b * b - a * a), rel=1e-12)


def test_held_readings_stand_until_the_next() -> None:
    gauge = trace("held", [0.0, 4.0, 8.0, 11.0], [1.0, 5.0, 2.0, 9.0], 0.85)
    # 1 W for 2 s, 5 W for 4 s, 2 W for 2.5 s; a trapezoid would give another sum.
    assert energy(gauge, (2.0, 10.5)).energy_j == pytest.approx(1 * 2 + 5 * 4 + 2 * 2.5)


def test_a_relative_gauge_is_integrated_into_units_of_its_own_and_never_into_joules() -> None:
    # 1 unit/s for 2 s, 5 for 4 s, 2 for 2.5 s.
    gauge = trace("held", [0.0, 4.0, 8.0, 11.0], [1.0, 5.0, 2.0, 9.0], 0.85, method="relative gauge")
    idle = idle_baseline("m", [gauge], [gauge], component="c")
    reading = energy(gauge, (2.0, 10.5), idle=idle)
    assert reading.gauge_units == pytest.approx(1 * 2 + 5 * 4 + 2 * 2.5)
    assert (reading.energy_j, reading.uncertainty_j, reading.average_power_w) == (None, None, None)
    assert (reading.net_energy_j, idle.power_w, reading.reason) == (None, None, NO_JOULES)


def test_an_unresolved_relative_gauge_has_no_units_either() -> None:
    gauge = trace("held", [0.0, 4.0, 8.0, 11.0], [1.0, 5.0, 2.0, 9.0], 0.85, method="relative gauge")
    reading = energy(gauge, (2.0, 4.0))
    assert (reading.gauge_units, reading.energy_j) == (None, None)
    assert "unresolved" in str(reading.reason)


def test_fresh_counter_is_exact_where_it_was_read() -> None:
    power = steps((0, 10.0), (3, 50.0), (7, 20.0))
    reading = energy(counter_trace(power, GRID_S), (1.0, 3.0), (5.0, 8.0))
    assert reading.energy_j == pytest.approx(2 * 10 + 2 * 50 + 20)
    assert reading.duration_s == pytest.approx(5.0)
    assert reading.uncertainty_j == pytest.approx(0, abs=1e-9)


def test_counter_wraps_without_losing_a_joule() -> None:
    power = steps((0, 30.0))
    whole = counter_trace(power, GRID_S)
    wrapped = replace(whole, values=np.mod(whole.values, 40.0), wrap_at_j=40.0)
    assert (np.diff(wrapped.values) < 0).sum() == 7
    assert energy(wrapped, (0.5, 9.5)).energy_j == pytest.approx(270.0)


@given(wrap_j=st.floats(5, 1e5), start_j=st.floats(0, 1e5), seed=st.integers(0, 2**32 - 1), step=st.floats(0.01, 4.9))
def test_wrapping_anywhere_changes_nothing(wrap_j: float, start_j: float, seed: int, step: float) -> None:
    times_s = np.arange(0.0, 3.0, 0.1)
    true_j = start_j + np.cumsum(np.random.default_rng(seed).uniform(0.5 * step, step, len(times_s)))
    wrapping = trace("counter", times_s, np.mod(true_j, wrap_j), 0.1, wrap_at_j=wrap_j)
    got = energy(wrapping, (times_s[2], times_s[-2])).energy_j
    assert got == pytest.approx(true_j[-2] - true_j[2], rel=1e-6, abs=1e-6)


def test_reset_of_a_wrapping_counter_is_not_taken_for_a_wrap() -> None:
    values_j = np.concatenate([np.arange(500.0, 505.0), np.arange(0.0, 5.0)])
    reset = trace("counter", np.arange(10) * 0.1, values_j, 0.1, wrap_at_j=262143.0)
    assert "stepped back from 504 J to 0 J" in reason(reset, (0.1, 0.8))


def test_counter_that_steps_back_and_cannot_wrap_makes_energy_unknown() -> None:
    broken = trace("counter", np.arange(10) * 0.1, [5, 6, 7, 8, 2, 3, 4, 5, 6, 7], 0.1)
    assert "stepped back from 8 J to 2 J and does not wrap" in reason(broken, (0.0, 0.9))


@pytest.mark.parametrize("broken_by", ["reset", "jump"])
def test_windows_before_and_behind_a_driver_that_is_loaded_again_have_their_own_energy(broken_by: str) -> None:
    """100 W for 20 s; the counter begins from 0 after 8 s, or jumps by 50 MJ."""
    times_s = np.arange(0.0, 20.0, 0.1)
    values_j = 5e4 + 100 * times_s
    values_j[80:] += 5e7 if broken_by == "jump" else -values_j[80]
    whole = trace("counter", times_s, values_j, 0.1)
    for window in ((1.0, 7.5), (8.5, 19.0)):
        assert energy(whole, window).energy_j == pytest.approx(100 * (window[1] - window[0]), rel=1e-6)
        assert p90_power([whole], window, "m")[0] == pytest.approx(100.0, rel=1e-6)
    for window in ((1.0, 9.0), (7.95, 19.0), (1.0, 7.95)):
        assert ("stepped back" if broken_by == "reset" else "jumped up") in reason(whole, window)
        assert p90_power([whole], window, "m")[0] is None
    # Intervals on either side of it have none together.
    assert ("stepped back" if broken_by == "reset" else "jumped up") in reason(whole, (1.0, 7.5), (8.5, 19.0))


@pytest.mark.parametrize("n", [0, 1])
def test_a_counter_that_was_hardly_read_has_no_energy_and_a_reason(n: int) -> None:
    assert f"{n} reading" in reason(trace("counter", np.zeros(n), np.ones(n), 0.1), (0.0, 1.0))


def test_square_wave_of_a_slow_counter_is_read_between_its_ticks() -> None:
    # Ticks at whole tenths, both edges on a tick: exact up to the time in which the tick was seen (10 ms of 100 W).
    power = steps((0, 5.0), (2, 100.0), (6, 5.0))
    reading = energy(counter_trace(power, GRID_S + 1e-5, update_s=0.1, phase_s=0.0), (2.0, 6.0))
    assert reading.energy_j == pytest.approx(400.0, abs=1.0)


# --- properties ------------------------------------------------------------------------------------------------------


watts_lists = st.lists(st.floats(1, 500), min_size=100, max_size=100)
"""From 1 W: nothing that is switched on uses 0 W, and what stands still between other readings is a fault."""
kinds = st.sampled_from(["power", "held", "counter"])


def from_watts(kind: str, watts: list[float]) -> PowerTrace:
    values = np.cumsum(watts) if kind == "counter" else np.asarray(watts)
    return trace(kind, np.arange(len(watts)) * 0.1, values, 0.1)


@given(kind=kinds, watts=watts_lists, cut=st.floats(3.0, 6.0))
def test_energy_adds_up_over_adjacent_intervals(kind: str, watts: list[float], cut: float) -> None:
    one = from_watts(kind, watts)
    parts = [energy(one, (1.23, cut)).energy_j, energy(one, (cut, 8.1)).energy_j]
    whole, together = energy(one, (1.23, 8.1)).energy_j, energy(one, (1.23, cut), (cut, 8.1)).energy_j
    assert parts[0] is not None
    assert parts[1] is not None
    assert parts[0] + parts[1] == pytest.approx(whole, rel=1e-9, abs=1e-9)
    assert together == pytest.approx(whole, rel=1e-9, abs=1e-9)


@given(kind=kinds, watts=watts_lists, shift_s=st.floats(-1e6, 1e6), update_s=st.sampled_from([0.0, 0.25]))
def test_energy_does_not_depend_on_when_the_clock_started(
    kind: str, watts: list[float], shift_s: float, update_s: float
) -> None:
    one = replace(from_watts(kind, watts), update_period_s=update_s)
    moved = replace(one, times_s=one.times_s + shift_s)
    here, there = energy(one, (1.0, 8.0)), energy(moved, (1.0 + shift_s, 8.0 + shift_s))
    assert (here.energy_j is None) == (there.energy_j is None)
    if here.energy_j is not None:
        # Time stamps near 1e6 s are 1e-10 s apart; powers reach 5000 W.
        assert there.energy_j == pytest.approx(here.energy_j, rel=1e-6, abs=1e-4)
        assert there.uncertainty_j == pytest.approx(here.uncertainty_j, rel=1e-3, abs=1e-3)


@given(watts=watts_lists, offset_j=st.floats(0, 1e6))
def test_a_counters_offset_does_not_matter(watts: list[float], offset_j: float) -> None:
    one = from_watts("counter", watts)
    assert energy(replace(one, values=one.values + offset_j), (1.0, 8.0)).energy_j == pytest.approx(
        energy(one, (1.0, 8.0)).energy_j, rel=1e-6, abs=1e-6
    )


@given(watts=st.lists(st.floats(0, 500), min_size=100, max_size=100), update_s=st.sampled_from([0.001, 0.1, 0.15, 0.3]))
def test_energy_of_a_counter_is_never_negative(watts: list[float], update_s: float) -> None:
    reading = energy(replace(from_watts("counter", watts), update_period_s=update_s), (2.0, 8.0))
    assert reading.energy_j is None or reading.energy_j >= -1e-9


# --- reasons ---------------------------------------------------------------------------------------------------------


def with_hole(kind: str, start_s: float, end_s: float, **fields: Any) -> PowerTrace:
    times_s = GRID_S[(start_s >= GRID_S) | (end_s <= GRID_S)]
    if kind == "counter":
        return counter_trace(steps((0, 10.0)), times_s, **fields)
    return trace(kind, times_s, np.full(len(times_s), 10.0), 0.01, **fields)


@pytest.mark.parametrize("kind", ["power", "held"])
def test_gap_makes_energy_of_watts_unknown_and_says_where(kind: str) -> None:
    assert "gap of 0.5 s in the readings 3 s into the window" in reason(with_hole(kind, 4.0, 4.5), (1.0, 9.0))


def test_gap_outside_the_window_does_not_matter() -> None:
    assert energy(with_hole("power", 4.0, 4.5), (5.0, 9.0)).energy_j == pytest.approx(40.0)


def test_counter_goes_on_counting_in_a_gap_inside_the_window() -> None:
    assert energy(with_hole("counter", 4.0, 4.5), (1.0, 9.0)).energy_j == pytest.approx(80.0)


@pytest.mark.parametrize(("gap_s", "is_known"), [(39.0, True), (41.0, False)])
def test_a_gap_in_which_a_counter_may_have_wrapped_unseen_makes_energy_unknown(gap_s: float, is_known: bool) -> None:
    """20 W, and once more 4000 J within the gap where at most 120 W can flow, 100 of them unseen."""
    times_s = np.concatenate([np.arange(0, 10, 0.1), np.arange(10 + gap_s, 20 + gap_s, 0.1)])
    true_j = 20.0 * times_s + np.where(times_s > 10 + gap_s / 2, 0.0 if is_known else 4000.0, 0.0)
    wrapping = trace("counter", times_s, np.mod(true_j, 4000.0), 0.1, wrap_at_j=4000.0, max_power_w=120.0)
    window = (5.0, 15.0 + gap_s)
    if is_known:
        assert energy(wrapping, window).energy_j == pytest.approx(20.0 * (10 + gap_s))
    else:
        assert "a counter that wraps at 4000 J may do so unseen there" in reason(wrapping, window)
    assert energy(wrapping, (2.0, 8.0)).energy_j == pytest.approx(120.0)


def test_gap_over_a_counters_edge_makes_energy_unknown() -> None:
    assert "gap of 0.5 s" in reason(with_hole("counter", 4.0, 4.5), (1.0, 4.2))
    assert "gap of 0.5 s" in reason(with_hole("counter", 4.0, 4.5), (1.0, 4.2), (6.0, 7.0))


def test_a_mark_taken_for_an_edge_resolves_it_although_a_gap_ends_there() -> None:
    # The edge was at 4.49996 s, its mark came 40 us later and ends a gap.
    assert energy(with_hole("counter", 4.0, 4.5), (1.0, 4.49996)).energy_j == pytest.approx(34.9996)


def test_gap_that_the_sampler_recorded_counts_also_where_the_readings_do_not_show_it() -> None:
    recorded = replace(trace("power", GRID_S, np.ones(len(GRID_S)), 0.01), gaps_s=((3.0, 3.03),))
    assert "gap of 0.03 s" in reason(recorded, (1.0, 9.0))


def test_window_beyond_the_readings_is_not_extrapolated() -> None:
    one = trace("power", GRID_S, np.ones(len(GRID_S)), 0.01)
    assert "leave 0.5 s of the window uncovered" in reason(one, (2.0, 10.5))
    assert "leave 0.25 s of the window uncovered" in reason(one, (-0.25, 5.0))


def test_window_of_less_than_ten_updates_is_unresolved() -> None:
    slow = counter_trace(steps((0, 10.0)), GRID_S, update_s=0.1)
    assert "unresolved, the window is 990 ms, 9.9 updates of 100 ms; 10 are needed" in reason(slow, (4.0, 4.99))
    assert energy(slow, (4.0, 5.001)).energy_j == pytest.approx(10.01, abs=0.2)
    sampled = trace("power", GRID_S, np.ones(len(GRID_S)), 0.01)
    assert "9 updates of 10 ms" in reason(sampled, (4.0, 4.09))


def test_short_phases_are_judged_by_their_mean_length() -> None:
    slow = counter_trace(steps((0, 10.0)), GRID_S, update_s=0.1)
    short = [(k + 0.1, k + 0.6) for k in range(1, 8)]
    assert "7 intervals are on average 500 ms, 5 updates" in reason(slow, *short)


def test_the_moments_around_a_program_do_not_shorten_its_phases() -> None:
    # The program loads from 1.003 to 2 and from 3.2 to 4, and reads and decodes for 1.2 s each: 12 updates.
    slow = counter_trace(steps((0, 10.0)), GRID_S, update_s=0.1)
    phases = ((2.0, 3.2), (4.0, 5.2))
    around = ((1.0, 1.003), *phases, (5.2, 5.203))
    assert energy(slow, *around).energy_j == pytest.approx(10.0 * 2.406, abs=0.5)
    assert "2 intervals are on average 900 ms" in reason(slow, (1.0, 1.003), (2.0, 2.9), (4.0, 4.9))
    # Each is more than 2 % of the time.
    assert "4 intervals" in reason(slow, (1.0, 1.06), *phases, (5.2, 5.26))


def test_counter_not_read_at_the_edges_of_short_phases_is_unresolved() -> None:
    coarse = counter_trace(steps((0, 10.0)), np.arange(0, 10.01, 0.5))
    told = reason(coarse, (1.4, 1.6), (4.4, 4.6))
    assert "1 counter readings per interval" in told
    assert "(a shorter sample_interval_s)" in told
    # A recording has the readings that it has, whatever a plan says.
    played = replace(coarse, method="replayed")
    assert "(recorded with a shorter --interval)" in reason(played, (1.4, 1.6), (4.4, 4.6))


def test_nan_reading_makes_energy_unknown() -> None:
    values = np.ones(len(GRID_S))
    values[500] = np.nan
    assert "1 of 1001 readings are not finite" in reason(trace("power", GRID_S, values, 0.01), (1.0, 9.0))


def test_time_that_does_not_increase_makes_energy_unknown() -> None:
    assert "do not increase" in reason(trace("power", [0.0, 1.0, 1.0, 2.0], [1, 1, 1, 1], 0.1), (0.0, 2.0))


def test_single_reading_is_no_energy() -> None:
    assert "1 reading, at least 2 are needed" in reason(trace("power", [0.0], [5.0], 0.1), (0.0, 0.0))


def test_counter_that_stands_still_is_a_dead_one_not_zero_joules() -> None:
    dead = trace("counter", GRID_S, np.full(len(GRID_S), 5.0), 0.01, update_period_s=0.1)
    assert "its counter stands still at 5 J for 10 s" in reason(dead, (1.0, 9.0))


def test_window_that_ends_before_it_starts_is_refused() -> None:
    assert "ends before it starts" in reason(trace("power", GRID_S, np.ones(len(GRID_S)), 0.01), (5.0, 4.0))


def test_missing_meter_phase_or_component_is_said() -> None:
    one = trace("power", GRID_S, np.ones(len(GRID_S)), 0.01)
    assert energy_between([one], [(0, 1)], "all", "nvml").reason == "meter nvml has no trace of total"
    assert energy_between([one], [], "decode", "m").reason == "no decode phase in this window"
    missing = energy_between([one], [(0, 1)], "all", "m", component="dram")
    assert (missing.reason, missing.method) == ("meter m has no trace of dram", "missing")


# --- components ------------------------------------------------------------------------------------------------------


def test_total_is_the_sum_of_additive_components_only() -> None:
    ones = np.ones(len(GRID_S))
    package = trace("power", GRID_S, 10 * ones, 0.01, component="package", relative_accuracy=0.03)
    dram = trace("power", GRID_S, 4 * ones, 0.01, component="dram", relative_accuracy=0.1)
    core = trace("power", GRID_S, 7 * ones, 0.01, component="core", additive=False)
    other = trace("power", GRID_S, 99 * ones, 0.01, meter="another")
    traces = [package, core, dram, other]
    total = energy(traces, (1.0, 3.0))
    assert total.energy_j == pytest.approx(28.0)
    assert total.uncertainty_j == pytest.approx(math.hypot(0.03 * 20, 0.1 * 8))
    assert energy(traces, (1.0, 3.0), component="core").energy_j == pytest.approx(14.0)


def test_one_component_without_energy_leaves_the_total_without() -> None:
    short = trace("power", GRID_S[:500], np.ones(500), 0.01, component="dram")
    assert "m dram: the readings" in reason([trace("power", GRID_S, np.ones(1001), 0.01), short], (1.0, 9.0))
