"""What energy states of itself: against simulated instruments the truth lies within."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from results.energy import power_curve
from results.records import PowerTrace
from tests.energy_readings import GRID_S, energy, reason, steps
from tests.fakes.waveforms import Array, StepPower, counter_trace, trace

# --- phases of a few milliseconds ------------------------------------------------------------------------------------


def marked_reads(edges_s: Array, interval_s: float, rng: np.random.Generator) -> Array:
    """The sampler's grid, and a mark some tens of microseconds after each phase edge."""
    grid_s = np.arange(-0.05, edges_s[-1] + 0.05, interval_s)
    return np.unique(np.concatenate([grid_s, edges_s + rng.uniform(20e-6, 80e-6, len(edges_s))]))


def test_marked_phases_of_five_milliseconds_resolve_with_a_fresh_counter() -> None:
    rng = np.random.default_rng(0)
    # 20 x (5 ms of 80 W, 15 ms of 30 W), sampled every 50 ms: without marks nothing would resolve.
    edges_s = np.concatenate([[0.0], np.cumsum([0.005, 0.015] * 20)])
    power = StepPower(np.concatenate([[-1.0], edges_s, [edges_s[-1] + 1]]), np.array([5.0] + [80.0, 30.0] * 20 + [5.0]))
    fresh = replace(counter_trace(power, marked_reads(edges_s, 0.05, rng)), sample_interval_s=0.05)
    prefill = [(float(a), float(b)) for a, b in zip(edges_s[0:-1:2], edges_s[1::2], strict=True)]
    reading = energy(fresh, *prefill)
    # Without regard to the marks' lateness it would be 1 % low: 50 us of 50 W at each of 40 edges.
    assert reading.energy_j == pytest.approx(20 * 0.005 * 80, rel=1e-3)
    assert reading.uncertainty_j is not None
    assert reading.uncertainty_j <= 0.03 * 8
    unmarked = replace(counter_trace(power, np.arange(-0.05, 0.5, 0.05)), sample_interval_s=0.05)
    assert "counter readings per interval" in reason(unmarked, *prefill)


@pytest.mark.parametrize("pause_s", [0.7e-3, 1e-3])
def test_pauses_about_as_long_as_a_counters_update_are_in_the_uncertainty_of_the_phases_behind_them(
    pause_s: float,
) -> None:
    """150 requests: 20 ms of 30 W, 60 ms of 60 W, and a pause at 10 W. A value shown at the end of the pause has the
    power of the pause and of the request before, and is half an update old: 2 % are missing, in each phase alike."""
    off, stated = [], []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        lasts_s = np.tile([0.02, 0.06, pause_s], 150) * rng.uniform(0.95, 1.05, 450)  # in step with no renewals
        edges_s = np.concatenate([[0.0], np.cumsum(lasts_s)])
        watts = np.array([10.0, *[30.0, 60.0, 10.0] * 150, 10.0])
        power = StepPower(np.concatenate([[-1.0], edges_s, [edges_s[-1] + 1]]), watts)
        closely_s = -0.05 + np.arange(100) * 1e-4  # as a meter looks before a window
        at_s = np.unique(np.concatenate([closely_s, marked_reads(edges_s, 0.05, rng)]))
        shown = counter_trace(power, at_s, update_s=1e-3, phase_s=rng.uniform(0, 1e-3), step_j=2.0**-14)
        prefill = [(float(a), float(b)) for a, b in zip(edges_s[0:-1:3], edges_s[1::3], strict=True)]
        found = energy(replace(shown, sample_interval_s=0.05), *prefill)
        assert found.energy_j is not None
        assert found.uncertainty_j is not None
        true_j = 30 * float(lasts_s[::3].sum())
        off.append(found.energy_j / true_j - 1)
        stated.append(found.uncertainty_j / true_j)
    assert np.all(np.abs(off) <= 2 * np.array(stated))
    assert np.mean(off) < -0.01, "else the test has no such error"
    assert np.median(stated) < 0.03


# --- uncertainty against simulated instruments -----------------------------------------------------------------------


def telegraph(rng: np.random.Generator) -> StepPower:
    """20 and 100 W in turn, for 0.15 to 0.45 s each."""
    edges_s = -2 + np.cumsum(rng.uniform(0.15, 0.45, 40))
    return StepPower(edges_s, np.where(np.arange(39) % 2, 100.0, 20.0))


def square(rng: np.random.Generator) -> StepPower:
    edges_s = -2 - rng.uniform(0, 0.7) + np.arange(40) * rng.uniform(0.3, 0.4)
    return StepPower(edges_s, np.where(np.arange(39) % 2, 100.0, 20.0))


def burst(rng: np.random.Generator) -> StepPower:
    """Idle until the window opens: the power before it says nothing about it."""
    return steps((-2.0, 5.0), (0.0, 100.0), until_s=10.0)


def steady(rng: np.random.Generator) -> StepPower:
    return steps((-2.0, 100.0), until_s=10.0)


Shape = Callable[[np.random.Generator], StepPower]


def coverage(shape: Shape, take: Callable[[StepPower, float, np.random.Generator], PowerTrace]) -> tuple[float, float]:
    """(share of 200 windows whose true energy lies within 2 sigma, mean sigma over the root mean square error)."""
    rng = np.random.default_rng(7)
    errors_j, sigmas_j = [], []
    for _ in range(200):
        power, end_s = shape(rng), rng.uniform(2.5, 4.0)
        reading = energy(take(power, end_s, rng), (0.0, end_s))
        assert reading.energy_j is not None, reading.reason
        assert reading.uncertainty_j is not None
        errors_j.append(reading.energy_j - power.energy_j(0.0, end_s))
        sigmas_j.append(reading.uncertainty_j)
    errors = np.array(errors_j)
    inside = float((np.abs(errors) <= 2 * np.array(sigmas_j)).mean())
    return inside, float(np.mean(sigmas_j) / np.sqrt((errors**2).mean()))


@pytest.mark.parametrize("shape", [telegraph, square, burst, steady])
@pytest.mark.parametrize(("interval_s", "update_s"), [(0.05, 0.1), (0.02, 0.1), (0.05, 0.02), (0.02, 0.001)])
def test_counters_truth_lies_within_two_sigma_when_ticks_have_any_phase(
    shape: Shape, interval_s: float, update_s: float
) -> None:
    def take(power: StepPower, end_s: float, rng: np.random.Generator) -> PowerTrace:
        around_s = update_s + interval_s  # as the meters do: they wait for a tick before and after
        times_s = np.arange(-around_s, end_s + around_s, interval_s)
        times_s[1:] += rng.uniform(0, 0.2 * interval_s, len(times_s) - 1)
        times_s = np.append(times_s, end_s + 2 * around_s)
        return replace(
            counter_trace(power, times_s, update_s, rng.uniform(0, update_s), step_j=1e-3), sample_interval_s=interval_s
        )

    inside, width = coverage(shape, take)
    assert inside >= 0.95
    assert width <= 4


@pytest.mark.parametrize("idle_w", [5.0, 20.0])
@pytest.mark.parametrize(("interval_s", "update_s"), [(0.01, 0.0202), (0.01, 0.005), (0.05, 0.01), (0.01, 0.001)])
def test_a_counter_in_step_with_its_readings_is_as_certain_as_it_says(
    interval_s: float, update_s: float, idle_w: float
) -> None:
    """Values of one age again and again, between marked edges: nothing averages, and no window is off by 3 sigma."""
    rng = np.random.default_rng(3)
    sigmas_j, errors_j = [], []
    for _ in range(200):
        end_s = rng.uniform(1.0, 1.1)
        power = steps((-2.0, idle_w), (0.0, 20.0), (end_s, idle_w), until_s=4.0)
        # As meters do: closely before the window, then at their interval, and a mark behind each edge.
        closely_s = np.arange(-5 * update_s - rng.uniform(0.001, 0.02), 0.0, 1.1e-3)
        grid_s = closely_s[-1] + np.cumsum(interval_s * rng.uniform(0.998, 1.002, int(2 / interval_s)))
        grid_s = grid_s[(grid_s > 3e-4) & (grid_s < end_s)]
        times_s = np.concatenate([closely_s, [5e-5], grid_s, [end_s + 5e-5]])
        counter = counter_trace(power, times_s, update_s, rng.uniform(0, update_s))
        reading = energy(replace(counter, sample_interval_s=interval_s, update_period_s=1e-3), (0.0, end_s))
        assert reading.energy_j is not None, reading.reason
        assert reading.uncertainty_j is not None
        errors_j.append(reading.energy_j - 20.0 * end_s)
        sigmas_j.append(reading.uncertainty_j)
    assert np.all(np.abs(errors_j) <= 3 * np.array(sigmas_j))
    assert np.mean(sigmas_j) <= 4 * np.sqrt(np.mean(np.square(errors_j)))


@pytest.mark.parametrize("shape", [telegraph, square, burst])
@pytest.mark.parametrize("update_s", [0.1, 0.001])
def test_counter_whose_trace_ends_with_the_window_is_less_certain_but_still_right(
    shape: Shape, update_s: float
) -> None:
    def take(power: StepPower, end_s: float, rng: np.random.Generator) -> PowerTrace:
        times_s = np.append(np.arange(-1e-4, end_s, 0.02), end_s + 1e-4)
        return counter_trace(power, times_s, update_s, rng.uniform(0, update_s), step_j=1e-3)

    assert coverage(shape, take)[0] >= 0.95


@pytest.mark.parametrize("shape", [telegraph, square, burst])
@pytest.mark.parametrize(
    ("kind", "interval_s", "update_s"), [("power", 0.05, 0.0), ("power", 0.02, 0.1), ("held", 0.05, 0.1)]
)
def test_sampled_powers_truth_lies_within_two_sigma(
    shape: Shape, kind: str, interval_s: float, update_s: float
) -> None:
    def take(power: StepPower, end_s: float, rng: np.random.Generator) -> PowerTrace:
        times_s = np.arange(-interval_s * rng.uniform(), end_s + 2 * interval_s, interval_s)
        phase_s = rng.uniform(0, update_s)
        shown_s = np.floor((times_s - phase_s) / update_s) * update_s + phase_s if update_s else times_s
        return trace(kind, times_s, power.power_w(shown_s), interval_s, update_period_s=update_s)

    inside, width = coverage(shape, take)
    # Every period of a square wave meets the grid alike, so its errors add up where its period is near a multiple.
    assert inside >= (0.9 if shape is square else 0.95)
    assert width <= 4


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_error_of_many_phases_does_not_average_away(seed: int) -> None:
    """Power changes in the same direction at every phase edge, and smears the same way: 12 phases, one error."""
    rng = np.random.default_rng(seed)
    edges_s = np.concatenate([[0.0], np.cumsum(rng.uniform(1.2, 1.6, 24))])
    power = StepPower(
        np.concatenate([[-2.0], edges_s, [edges_s[-1] + 2]]), np.array([5.0] + [100.0, 30.0] * 12 + [5.0])
    )
    times_s = np.arange(-0.15, edges_s[-1] + 0.15, 0.05)
    phases = [(float(a), float(b)) for a, b in zip(edges_s[0:-1:2], edges_s[1::2], strict=True)]
    reading = energy(counter_trace(power, times_s, 0.1, rng.uniform(0, 0.1)), *phases)
    assert reading.energy_j is not None
    assert reading.uncertainty_j is not None
    assert abs(reading.energy_j - sum(power.energy_j(a, b) for a, b in phases)) <= 2 * reading.uncertainty_j


def test_resolution_and_gain_join_the_uncertainty() -> None:
    counted = counter_trace(steps((0, 10.0)), GRID_S, step_j=0.5, relative_accuracy=0.01)
    reading = energy(counted, (1.0, 9.0))
    # Two edges of a step of 0.5 J, and 1 % of about 80 J; what the staircase itself adds is not negative.
    assert reading.uncertainty_j is not None
    assert math.sqrt(2 * 0.5**2 / 12 + 0.8**2) * 0.99 <= reading.uncertainty_j <= 1.5


def test_a_mark_close_to_a_reading_makes_no_spike_of_power() -> None:
    """10 W, read every 20 ms; one mark 2 us after a reading is stamped 1 us late, which alone would read 20 W."""
    times_s = np.array([0.0, 0.02, 0.020002, 0.04, 0.06])
    values_j = np.array([0.0, 0.2, 0.20004, 0.4, 0.6])
    trace = PowerTrace("rapl", "package-0", "counter", "counter", times_s, values_j, sample_interval_s=0.02)
    at_s, watts = power_curve(trace)
    assert at_s.tolist() == [0.02, 0.04, 0.06]
    np.testing.assert_allclose(watts, 10.0)


def test_the_gain_error_of_a_total_is_told_apart_from_what_its_readings_leave_open() -> None:
    """Two parts of 100 J with 2 % each, independent: sqrt(2) * 2 of 200 J."""
    part = trace("power", GRID_S, np.full(len(GRID_S), 10.0), 0.01, relative_accuracy=0.02)
    found = energy([part, replace(part, component="b")], (0.0, 10.0))
    assert found.relative_gain_error == pytest.approx(0.02 / math.sqrt(2))


# --- parts of a total ------------------------------------------------------------------------------------------------


def read_together(power: StepPower, share: float, times_s: Array, component: str) -> PowerTrace:
    return trace("power", times_s, share * power.power_w(times_s), 0.05, component=component)


def random_reads(rng: np.random.Generator) -> Array:
    return np.cumsum(rng.uniform(0.025, 0.075, 180)) - 1.0


def test_parts_that_were_computed_take_no_memory_by_the_length_of_their_window() -> None:
    """Nothing is read now and then of them: compared by the microsecond, they took hundreds of MB."""
    at_s = np.linspace(0.0, 5.0, 11)
    parts = [
        trace("counter", at_s, watts * at_s, 0.0, component=name, method="modelled")
        for name, watts in (("cpu", 3.0), ("gpu", 4.0), ("dram", 5.0))
    ]
    tracemalloc.start()
    try:
        reading = energy(parts, (0.0, 5.0))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reading.energy_j == pytest.approx(60.0)
    assert peak_bytes < 1e6


def test_a_load_that_parts_share_is_as_uncertain_in_four_parts_as_in_one() -> None:
    """A quarter of each value at the same times: the sum of the readings is the same, and so is all that they hide."""
    rng = np.random.default_rng(4)
    times_s, power = random_reads(rng), telegraph(rng)
    one = energy(read_together(power, 1.0, times_s, "all"), (0.0, 6.0))
    four = energy([read_together(power, 0.25, times_s, f"part{k}") for k in range(4)], (0.0, 6.0))
    assert (four.energy_j, four.uncertainty_j) == (pytest.approx(one.energy_j), pytest.approx(one.uncertainty_j))


def test_total_of_parts_under_one_load_is_within_two_sigma() -> None:
    """Parts of 1, 1/2, 1/3 and 1/4 of one load: errors in quadrature would be 1.7 times too small."""
    inside = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        times_s, power = random_reads(rng), telegraph(rng)
        found = energy([read_together(power, 1 / k, times_s, f"part{k}") for k in (1, 2, 3, 4)], (0.0, 6.0))
        assert found.energy_j is not None
        assert found.uncertainty_j is not None
        true_j = power.energy_j(0.0, 6.0) * sum(1 / k for k in (1, 2, 3, 4))
        inside.append(abs(found.energy_j - true_j) <= 2 * found.uncertainty_j)
    assert np.mean(inside) >= 0.92  # 95 % less what 100 windows leave to chance


def test_parts_under_loads_of_their_own_are_no_wider_than_chance_allows() -> None:
    """Four loads that know nothing of each other err in quadrature, and what changes correlate by chance."""
    ratios = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        times_s = random_reads(rng)
        parts = [read_together(telegraph(rng), 1.0, times_s, f"part{k}") for k in range(4)]
        alone_j2 = sum((energy(part, (0.0, 6.0), component=part.component).uncertainty_j or 0.0) ** 2 for part in parts)
        ratios.append((energy(parts, (0.0, 6.0)).uncertainty_j or 0.0) / math.sqrt(alone_j2))
    # 60 cells of 0.1 s: correlations of 1 / sqrt(60) on average at most, of three others each.
    assert 1.0 <= np.mean(ratios) <= math.sqrt(1 + 3 / math.sqrt(60))
