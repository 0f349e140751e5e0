"""Variances of what readings did not show, against closed forms worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from results.cumulative import cumulative
from results.energy import energy_between
from results.records import PowerTrace
from results.uncertainty import CounterErrors, PartRead, PowerErrors, Scatter, shared_variance_j2, shows_means
from tests.fakes.waveforms import StepPower, trace

DT = 0.05
AT_S = np.arange(0.0, 10.0 + DT / 2, DT, dtype=np.float64)
WINDOW = np.array([[1.0, 9.0]])


def power(watts: np.ndarray, **fields: float) -> PowerTrace:
    return trace("power", AT_S, watts, DT, **fields)


def power_variance_j2(one: PowerTrace, edges: np.ndarray) -> float:
    return PowerErrors(one).variance_j2(edges)


def at(seconds: float) -> int:
    return round(seconds / DT)


def test_a_steady_power_leaves_only_the_step_of_the_reading() -> None:
    steady = np.full(len(AT_S), 7.0)
    assert power_variance_j2(power(steady), WINDOW) == 0.0
    assert power_variance_j2(power(steady, resolution=0.3), WINDOW) == pytest.approx((0.3 * 8.0) ** 2 / 12)


def test_a_step_inside_hides_between_two_readings() -> None:
    watts = np.where(AT_S < 5.0, 2.0, 12.0)
    assert power_variance_j2(power(watts), WINDOW) == pytest.approx((10.0 * DT) ** 2 / 12)


def test_a_step_of_a_renewed_value_hides_between_two_renewals_and_is_late_or_not() -> None:
    """Values of an update of 50 ms, read as often: between two of them, in their stamps, and a third of one late."""
    watts = np.where(AT_S < 5.0, 2.0, 12.0)
    hidden_j2 = 10.0**2 * (DT**2 + 2 * DT**2) / 12
    found = power_variance_j2(power(watts, update_period_s=DT), WINDOW)
    assert found == pytest.approx(hidden_j2 + (10.0 * DT / 3) ** 2)
    # Up and down again: nothing stays, and nothing is late at the ends.
    bump = np.where((AT_S > 3.0) & (AT_S < 5.0), 12.0, 2.0)
    assert power_variance_j2(power(bump, update_period_s=DT), WINDOW) == pytest.approx(2 * hidden_j2)


@pytest.mark.parametrize(("edges_s", "together"), [((2.96, 7.04), 4), ((2.94, 7.06), 2)])
def test_changes_within_a_third_of_an_update_of_an_edge_err_together(
    edges_s: tuple[float, float], together: int
) -> None:
    """Of updates of 150 ms. A rise between 3.0 and 3.05 s and a fall between 6.95 and 7.0 s: both may be of either side
    of their edge, and what delays one delays the other: (h + h)^2, and not h^2 + h^2."""
    bump = np.where((AT_S > 3.01) & (AT_S < 6.99), 12.0, 2.0)
    hidden_j2 = 10.0**2 * (DT**2 + 2 * DT**2) / 12
    found = power_variance_j2(power(bump, update_period_s=3 * DT), np.array([edges_s]))
    assert found == pytest.approx(together * hidden_j2)


def test_means_of_known_stretches_leave_open_what_their_edges_cut() -> None:
    """A stretch of 7 W between 2 W and 12 W, cut at 0.3 of it: a step in it moves up to 10 W x 0.3 x 0.7 of it across
    the edge, whenever it was. Elsewhere nothing is open: steps inside of the window are in their means."""
    watts = np.where(AT_S < 5.0, 2.0, 12.0)
    watts[at(5.0)] = 7.0

    def variance_j2(start_s: float, end_s: float) -> float:
        found = energy_between([trace("held", AT_S, watts, DT)], [(start_s, end_s)], "all", "m")
        assert found.uncertainty_j is not None
        return found.uncertainty_j**2

    assert variance_j2(1.0, 9.0) == pytest.approx(0.0, abs=1e-18)
    assert variance_j2(1.012, 9.031) == pytest.approx(0.0, abs=1e-18)
    assert variance_j2(1.0, 5.0 + 0.3 * DT) == pytest.approx((10.0 * DT * 0.3 * 0.7) ** 2)
    # At both edges the power may have changed alike.
    both = watts + np.where(AT_S < 3.0, 10.0, 0.0)
    both[at(3.0)] = 7.0
    found = energy_between([trace("held", AT_S, both, DT)], [(3.0 + 0.5 * DT, 5.0 + 0.3 * DT)], "all", "m")
    assert found.uncertainty_j == pytest.approx(10.0 * DT * (0.3 * 0.7 + 0.5 * 0.5))


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize(("f", "u"), [(0.1, 0.1), (0.1, 0.6), (0.5, 0.2), (0.9, 0.85)])
def test_a_step_in_the_first_stretch_or_the_last_is_within_what_is_stated(f: float, u: float, is_last: bool) -> None:
    """From 2 W to 12 W at u of a stretch that an edge cuts at f; the other level is seen later, or was before."""
    of_step_w = 2.0 * u + 12.0 * (1 - u)
    watts = np.array([of_step_w, *[12.0] * 50, *[2.0] * 10])
    across_w = 10.0 * (min(f, u) - f * u)
    window = (f * DT, 2.0)
    if is_last:
        watts = np.array([*[12.0] * 10, *[2.0] * 50, of_step_w])
        window = (1.0, (60 + f) * DT)
    flat = trace("held", DT * np.arange(62.0), np.append(watts, watts[-1])[:62], DT)
    found = energy_between([flat], [window], "all", "m")
    assert found.uncertainty_j is not None
    assert across_w * DT <= found.uncertainty_j * (1 + 1e-9)
    assert found.uncertainty_j <= 10.0 * DT * f * (1 - f) * (1 + 1e-9)


def test_the_step_of_means_counts_over_the_whole_window() -> None:
    one = trace("held", AT_S, np.full(len(AT_S), 7.0), DT, resolution=0.3)
    found = energy_between([one], [(1.0, 9.0)], "all", "m")
    assert found.uncertainty_j == pytest.approx(0.3 * 8.0 / np.sqrt(12))


def test_a_value_shown_once_counts_as_met_by_chance() -> None:
    """One of 10 W x 50 ms: as large as itself, and from one such value up to (1 + 1)^2 of it."""
    watts = np.full(len(AT_S), 2.0)
    watts[at(5.0)] = 12.0
    assert power_variance_j2(power(watts), WINDOW) == pytest.approx(4 * (10.0 * DT) ** 2)
    # Four of them: 4 times that, at most (1 + 2)^2 / 4 of it.
    for seconds in (2.0, 3.7, 7.3):
        watts[at(seconds)] = 12.0
    assert power_variance_j2(power(watts), WINDOW) == pytest.approx(4 * (10.0 * DT) ** 2 * 9 / 4)
    # Those outside of the window do not count.
    assert power_variance_j2(power(watts), np.array([[4.5, 6.5]])) == pytest.approx(4 * (10.0 * DT) ** 2)


def test_a_value_that_stands_for_longer_was_seen() -> None:
    watts = np.full(len(AT_S), 2.0)
    watts[at(5.0) : at(5.0) + 2] = 12.0
    assert power_variance_j2(power(watts), WINDOW) == pytest.approx(2 * (10.0 * DT) ** 2 / 12)
    # Where the update takes as long as that, it was shown once.
    once = power_variance_j2(power(watts, update_period_s=0.1), WINDOW)
    assert once == pytest.approx(4 * (10.0 * 2 * DT) ** 2)


def test_the_scatter_of_independent_values_is_that_of_their_mean() -> None:
    """Noise faster than it is read: the energy of N readings scatters by s dt sqrt(N)."""
    rng = np.random.default_rng(0)
    watts = 20.0 + rng.standard_normal(len(AT_S))
    n = 8.0 / DT
    expected = n * DT**2
    assert expected < power_variance_j2(power(watts), WINDOW) < 2 * expected


def test_a_ramp_is_followed_by_a_line() -> None:
    """160 changes of 50 mW, of which each is like its neighbours."""
    assert power_variance_j2(power(2.0 + AT_S), WINDOW) == pytest.approx(0.0, abs=1e-12)


def test_a_gauge_of_means_is_known_by_the_value_between_two_levels() -> None:
    levels = [2.0, 2.0, 2.0, 7.0, 7.0, 7.0]
    assert not shows_means(np.array(levels * 4))
    between = [2.0, 2.0, 2.0, 4.0, 7.0, 7.0, 7.0, 5.5]
    assert shows_means(np.array(between * 4))
    assert not shows_means(np.arange(40.0))


def test_a_load_in_step_with_the_readings_errs_alike_in_each_period() -> None:
    """Up for two readings of five, 32 times: the same error each time, so about 32 times the variance of one."""
    watts = np.where(np.arange(len(AT_S)) % 5 < 2, 50.0, 10.0)
    alone_j2 = 64 * (40.0 * DT) ** 2 / 12
    found = power_variance_j2(power(watts), WINDOW)
    assert 20 * alone_j2 < found < 40 * alone_j2
    rng = np.random.default_rng(0)
    shuffled = np.where(rng.uniform(size=len(AT_S)) < 0.4, 50.0, 10.0)
    assert power_variance_j2(power(shuffled), WINDOW) < 3 * 160 * (40.0 * DT) ** 2 * 0.24


@pytest.mark.parametrize("late", [0.0, 0.05, 0.1])
def test_a_load_in_step_with_the_readings_is_seen_through_noise(late: float) -> None:
    """110 and 150 W in turns, each period five readings long, and readings that scatter by 16 W. Each period is met
    alike, and errs alike: without that 59 % of the windows lie within two uncertainties. Readings that are late, or
    early, by a tenth of their distance are still on their grid, and not at random."""
    inside = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        begins_s = -3.0 + 5 * DT * (rng.uniform() + np.arange(80))
        edges_s = np.sort(np.concatenate([begins_s, begins_s + 5 * DT * rng.uniform(0.2, 0.8)]))
        load = StepPower(edges_s, np.where(np.arange(len(edges_s) - 1) % 2, 110.0, 150.0))
        at_s = np.arange(-0.2 + rng.uniform(0, DT), 8.3, DT)
        at_s += late * DT * rng.standard_normal(len(at_s))
        watts = load.power_w(at_s) + 16.0 * rng.standard_normal(len(at_s))
        found = energy_between([trace("power", at_s, watts, DT)], [(0.0, 8.0)], "all", "m")
        assert found.energy_j is not None
        assert found.uncertainty_j is not None
        inside += abs(found.energy_j - load.energy_j(0.0, 8.0)) <= 2 * found.uncertainty_j
    assert inside >= 0.95 * 120


def test_peaks_that_most_readings_see_twice_are_not_taken_for_spikes_that_are_met_by_chance() -> None:
    """Peaks of 1.2 to 4 readings, 4 to 16 apart: the few that one reading alone saw are as long as they look."""
    errors_j, stated_j = [], []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        is_peak = np.arange(400) % 2 == 1
        lasts = np.where(is_peak, rng.uniform(1.2, 4.0, 400), rng.uniform(4.0, 16.0, 400))
        load = StepPower(np.concatenate([[-3.0], -3.0 + DT * np.cumsum(lasts)]), np.where(is_peak, 150.0, 110.0))
        at_s = np.arange(-0.2 + rng.uniform(0, DT), 8.3, DT)
        found = energy_between([trace("power", at_s, load.power_w(at_s), DT)], [(0.0, 8.0)], "all", "m")
        assert found.energy_j is not None
        assert found.uncertainty_j is not None
        errors_j.append(found.energy_j - load.energy_j(0.0, 8.0))
        stated_j.append(found.uncertainty_j)
    assert np.mean(np.abs(errors_j) <= 2 * np.array(stated_j)) >= 0.95
    # 1.9 with each of them a spike. The rms of 150 errors is known to 6 %.
    assert np.sqrt(np.mean(np.square(stated_j)) / np.mean(np.square(errors_j))) < 1.7


def counter(steps_j: list[float], edge_s: float, aged_j: float = 0.0) -> float:
    times_s = np.arange(len(steps_j) + 1.0)
    edges = np.array([[edge_s, edge_s]])
    none = np.zeros(len(times_s))
    return CounterErrors(times_s, np.asarray(steps_j), none, none + aged_j, 0.0).variance_j2(edges)


def test_a_counters_spike_lies_on_either_side_of_an_edge() -> None:
    """Eleven steps of a second, one of 10 J among 0 J: 10^2 / 11 near the edge, f (1 - f) of it on either side."""
    steps_j = [0.0] * 6 + [10.0] + [0.0] * 6
    f = 0.25
    scatter_j2 = 2 * 100 / 11 * f * (1 - f)
    interpolated_j = 2 * 10.0 * f * (1 - f)
    assert counter(steps_j, 6 + f) == pytest.approx(scatter_j2 + interpolated_j**2, rel=0.11)


def test_a_counters_step_of_power_is_no_scatter() -> None:
    steps_j = [1.0] * 7 + [5.0] * 7
    f = 0.5
    assert counter(steps_j, 7 + f) == pytest.approx((2 * 4.0 * f * (1 - f)) ** 2)


@pytest.mark.parametrize("f", [0.0, 0.5])
def test_ages_of_a_counters_values_do_not_average_away(f: float) -> None:
    """Readings in step with its renewals are of one age: an edge between two of them errs as one of them does."""
    assert counter([5.0] * 8, 4.0 + f, aged_j=0.2) == pytest.approx(2 * 0.2**2)


def test_the_age_of_a_counters_value_is_power_times_its_renewal() -> None:
    """5 W renewed at each reading, some time in the 0.2 s before: half of them either way."""
    at_s = np.arange(0.0, 4.0, 0.2)
    curve = cumulative(trace("counter", at_s, 5.0 * at_s, 0.2, update_period_s=0.2))
    assert curve.aged_j[1:] == pytest.approx(5.0 * 0.2 / np.sqrt(12))


def test_a_counter_that_ticks_just_behind_a_reading_had_more_power_than_it_shows() -> None:
    """20 W, a tick each 20 ms, read each 10 ms: one tick is missed by 1 us, and its step has 30 ms, or 13.3 W."""
    at_s = np.arange(0.0, 0.3, 0.01)
    ticks_s = np.concatenate([np.arange(-0.04, 0.2 - 1e-9, 0.02), np.arange(0.2 + 1e-6, 0.4, 0.02)])
    shown_j = 20.0 * (0.04 + ticks_s[np.searchsorted(ticks_s, at_s + 1e-9, side="right") - 1])
    curve = cumulative(trace("counter", at_s, shown_j, 0.01, update_period_s=0.02))
    k = int(np.flatnonzero(np.isclose(curve.times_s, 0.21))[0])
    # At that reading its value is 10 ms old.
    off_j = 20.0 * 0.01 - (curve.energy_j[k] - (shown_j[21] - shown_j[0]))
    assert curve.aged_j[k] == pytest.approx(0.01 * np.hypot(20.0 / np.sqrt(12), (20.0 - 40.0 / 3) / 2), rel=1e-3)
    assert abs(off_j) < 3 * curve.aged_j[k]


@pytest.mark.parametrize(("hz", "widest"), [(3.3, 0.08), (7.3, 0.04), (8.7, 0.04)])
def test_a_load_that_drifts_through_the_readings_is_not_taken_for_one_in_step(hz: float, widest: float) -> None:
    """Squares of 50 and 250 W read every 50 ms, for 10 s: 26 and 20 % were stated, for errors below 2 %."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        edges_s = -2.0 + rng.uniform(0, 1 / hz) + np.arange(0.0, 14.0, 0.5 / hz)
        load = StepPower(edges_s, np.where(np.arange(len(edges_s) - 1) % 2, 50.0, 250.0))
        at_s = np.arange(-0.1, 10.2, DT) + rng.uniform(0, 1e-3, 206)
        found = energy_between([trace("power", at_s, load.power_w(at_s), DT)], [(0.0, 10.0)], "all", "m")
        assert found.energy_j is not None
        assert found.uncertainty_j is not None
        assert abs(found.energy_j - load.energy_j(0.0, 10.0)) <= 2 * found.uncertainty_j
        assert found.uncertainty_j < widest * 1500.0


def test_a_clean_square_of_long_levels_is_no_stuck_sensor() -> None:
    """2.5 Hz read every 20 ms: each of its levels stands for ten readings, and none is left to compare them with."""
    at_s = np.arange(0.0, 10.0, 0.02)
    watts = np.where(np.floor(at_s / 0.2 + 1e-9) % 2, 250.0, 50.0)
    found = energy_between([trace("power", at_s, watts, 0.02)], [(1.0, 9.0)], "all", "m")
    assert found.energy_j == pytest.approx(8 * 150.0, rel=0.02)


def test_a_counter_of_no_known_period_that_stood_still_has_numbers_to_its_end() -> None:
    """Three values in sixty readings; the last of them was no stand yet. What aged there was not a number."""
    times_s = np.linspace(5.0, 5.012, 60)
    counter = PowerTrace(
        meter="m", component="c", kind="counter", method="counter", times_s=times_s,
        values=np.repeat([0.0, 0.5, 1.0], [31, 26, 3]), sample_interval_s=0.1, resolution=0.5,
    )  # fmt: skip
    with np.errstate(all="raise"):
        curve = cumulative(counter)
    assert curve.times_s[-1] == times_s[-1]
    assert np.isfinite(curve.aged_j).all()


def part(watts: np.ndarray, sigma_j: float, apart_s: float = DT) -> PartRead:
    """Of readings of power, which a part's energy follows exactly."""
    energy_j = np.concatenate([[0.0], np.cumsum((watts[1:] + watts[:-1]) / 2 * DT)])
    return PartRead(AT_S, energy_j, apart_s, sigma_j**2)


BUSY_W = 10 + 5 * np.sin(AT_S * 2)


@pytest.mark.parametrize(
    ("watts", "rho"),
    [
        (BUSY_W, 1.0),
        (3 * BUSY_W + 7, 1.0),
        (20 - BUSY_W, 0.0),  # never below 0: what errs against each other may not
        (np.full(len(AT_S), 4.0), 0.0),
    ],
)
def test_parts_that_change_together_err_together(watts: np.ndarray, rho: float) -> None:
    """2 rho s1 s2 beyond the sum of their variances."""
    assert shared_variance_j2([part(BUSY_W, 3.0), part(watts, 4.0)], WINDOW) == pytest.approx(rho * 2 * 3 * 4, abs=1e-6)
    assert shared_variance_j2([part(BUSY_W, 3.0)], WINDOW) == 0.0


def test_of_three_parts_each_pair_errs_together_as_it_changes() -> None:
    """The first two alike; the third changes where the others are steady, and before the window is no matter."""
    early = np.where(AT_S < 4.0, 10 + 5 * np.sin(AT_S * 2), 10 + 5 * np.sin(8.0))
    late = np.where(AT_S > 5.0, 10 + 5 * np.sin(AT_S * 3), 10 + 5 * np.sin(15.0))
    three = [part(early, 2.0), part(early, 3.0), part(late, 4.0)]
    assert shared_variance_j2(three, WINDOW) == pytest.approx(2 * 2.0 * 3.0, abs=1e-6)
    assert shared_variance_j2([three[0], three[2]], np.array([[5.5, 9.0]])) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("is_before", [True, False])
def test_parts_that_changed_together_outside_of_the_window_err_apart_in_it(is_before: bool) -> None:
    """Alike for two seconds before it, or behind it; in it one changes while the other is steady."""
    window = (5.0, 9.0) if is_before else (1.0, 5.0)
    begin_s, end_s = (1.0, 3.0) if is_before else (7.0, 9.0)
    at_s = AT_S
    alike = np.where((at_s > begin_s) & (at_s < end_s), 20.0 * np.sin(7 * at_s) ** 2, 0.0)
    bump_s = [window[0] + 1.0, window[0] + 2.5]
    own = [np.where((at_s > rise_s) & (at_s < rise_s + 0.5), 10.0, 0.0) for rise_s in bump_s]
    both = [part(alike + watts, sigma_j) for watts, sigma_j in zip(own, (3.0, 4.0), strict=True)]
    assert shared_variance_j2(both, np.array([window])) == pytest.approx(0.0, abs=1e-6)
    whole = np.array([(0.5, 9.5)])
    assert shared_variance_j2(both, whole) > 0.5 * 2 * 3.0 * 4.0, "over all of it they do change together"


def test_a_window_too_short_to_compare_their_powers_has_parts_err_together() -> None:
    """Of updates of 4 s none of 8 s is twice in it."""
    both = [part(BUSY_W, 3.0, apart_s=4.0), part(20 - BUSY_W, 4.0)]
    assert shared_variance_j2(both, WINDOW) == pytest.approx(2 * 3.0 * 4.0)


@pytest.mark.parametrize("gains", [(0.01, 0.02), (0.01, None)])
def test_gains_of_parts_join_in_quadrature_and_one_that_is_not_stated_leaves_no_uncertainty(
    gains: tuple[float, float | None],
) -> None:
    """80 J and 160 J of 1 and 2 %."""
    parts = [
        trace("power", AT_S, np.full(len(AT_S), watts), DT, component=name, relative_accuracy=gain)
        for name, watts, gain in zip("ab", (10.0, 20.0), gains, strict=True)
    ]
    reading = energy_between(parts, [(1.0, 9.0)], "all", "m")
    assert reading.energy_j == pytest.approx(240.0)
    if None in gains:
        assert (reading.uncertainty_j, reading.relative_gain_error) == (None, None)
    else:
        assert reading.uncertainty_j == pytest.approx(np.hypot(0.8, 3.2))
        assert reading.relative_gain_error == pytest.approx(np.hypot(0.8, 3.2) / 240.0)


def test_scatter_of_a_counter_is_that_of_five_steps_on_either_side_of_the_edge() -> None:
    """10 and 14 W in turns for 20 steps, (14 - 10)^2 each; then 10 W. Of the eleven around the 20th six scatter."""
    watts = np.where(np.arange(40) < 20, np.resize([10.0, 14.0], 40), 10.0)
    assert Scatter(watts).near_w2(np.array([0, 8, 19, 39])) == pytest.approx([16.0, 16.0, 16 * 6 / 11, 0.0])


def test_what_a_counter_leaves_open_at_two_edges_is_its_age_its_step_its_change_and_its_scatter() -> None:
    """98 and 102 W in turns, read every 100 ms; edges at a tenth and at half of a step."""
    m, dt_s, age_j, within_s, step_j = 41, 0.1, 0.3, 0.02, 0.12
    at_s, watts = np.arange(m, dtype=np.float64) * dt_s, np.resize([98.0, 102.0], m - 1)
    errors = CounterErrors(at_s, watts, np.full(m, within_s), np.full(m, age_j), step_j)
    age_and_step_j2 = 2 * (age_j**2 + step_j**2 / 12)
    # The change of 4 W errs alike at both edges; the scatter of 4 W for itself, at half a step a quarter at most.
    change_j2 = (4 * dt_s * (0.1 * 0.9 + 0.5 * 0.5)) ** 2
    scatter_j2 = (4 * dt_s) ** 2 * (0.1 * 0.9 + within_s / (2 * dt_s) + 0.25)
    found = errors.variance_j2(np.array([[1.01, 2.05]]))
    assert found == pytest.approx(age_and_step_j2 + change_j2 + scatter_j2)
