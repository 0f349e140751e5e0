"""What a sensor of the same part says of a stretch from 2 to 4 s: by hand, of 100 W read every 50 ms for 8 s."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from results.energy import energy_between
from results.liveness import Array, Beside
from tests.fakes.waveforms import StepPower, counter_trace, trace

APART_S, WATTS = 0.05, 100.0
TIMES_S = APART_S * np.arange(161, dtype=np.float64)


ALL = np.ones(len(TIMES_S), dtype=np.bool_)


def sensor(watts: Array | None = None, kept: NDArray[np.bool_] = ALL) -> Beside:
    """It knows the power to 3 %, and shows it up to 100 ms late."""
    watts = np.full(len(TIMES_S), WATTS) if watts is None else watts
    energy_j = np.concatenate([[0.0], np.cumsum(watts[:-1] * np.diff(TIMES_S))])
    return Beside(TIMES_S, energy_j, TIMES_S[kept], watts[kept], 0.03, gap_s=0.5, late_s=0.1, resolution=0.0)


def test_it_says_so_much_and_is_off_by_its_gain() -> None:
    assert sensor().between(2.0, 4.0) == pytest.approx((200.0, 6.0))


def test_where_the_power_changes_it_may_show_that_late() -> None:
    """From 100 to 300 W at 3 s: a delay of up to 100 ms is 20 J, by a triangle."""
    found = sensor(np.where(TIMES_S < 2.999, WATTS, 3 * WATTS)).between(2.0, 4.0)
    assert found == pytest.approx((400.0, math.hypot(12.0, 20.0 / math.sqrt(6))))


@pytest.mark.parametrize(
    ("start_s", "end_s", "known"),
    [(0.0, 8.0, True), (0.0, 4.0, True), (2.0, 8.0, True), (-0.01, 4.0, False), (2.0, 8.01, False)],
)
def test_it_knows_what_is_from_its_first_reading_to_its_last(start_s: float, end_s: float, known: bool) -> None:
    found = sensor().between(start_s, end_s)
    assert (found is not None) is known
    if found is not None:
        assert found[0] == pytest.approx(WATTS * (end_s - start_s))


@pytest.mark.parametrize(("resumes_s", "known"), [(2.99, True), (3.04, False)])
@pytest.mark.parametrize("stops_s", [2.5, 1.75, 3.75])
def test_it_knows_nothing_of_a_gap(stops_s: float, resumes_s: float, known: bool) -> None:
    """Half a second without a reading is none."""
    since_s = TIMES_S - (stops_s - 2.5)
    kept = (since_s < 2.51) | (since_s > resumes_s)
    assert (sensor(kept=kept).between(2.0, 4.0) is not None) is known


@pytest.mark.parametrize(("from_s", "at_s"), [(2.0, 2.0), (2.0, 3.0), (2.0, 4.0), (0.0, 0.0)])
def test_0_watts_confirm_nothing(from_s: float, at_s: float) -> None:
    assert sensor(np.where(np.isclose(TIMES_S, at_s), 0.0, WATTS)).between(from_s, 4.0) is None


@pytest.mark.parametrize(
    ("usual", "repeats", "known"),
    # Three times what is usual, and one.
    [(1, 4, True), (1, 5, False), (2, 7, True), (2, 8, False)],
)
def test_one_value_for_much_longer_than_elsewhere_confirms_nothing(usual: int, repeats: int, known: bool) -> None:
    k = np.arange(161)
    watts = np.where((k // usual) % 2 == 0, np.float64(WATTS), np.float64(101.0))
    watts[50 : 50 + repeats] = 90.0
    assert (sensor(watts).between(2.0, 4.0) is not None) is known


@pytest.mark.parametrize(("values", "known"), [(4, True), (5, False)])
def test_a_sensor_that_hardly_moves_elsewhere_may_show_one_value(values: int, known: bool) -> None:
    watts = np.full(161, WATTS)
    watts[:values] = 90.0 + np.arange(values)
    assert (sensor(watts).between(2.0, 4.0) is not None) is known


def test_what_a_dead_counter_did_not_count_flowed_as_the_sensor_beside_it_shows_and_as_well_as_that_is_known() -> None:
    """Requests of 300 and 150 W, and 50 W before and behind. The counter dies at any time of the window. Before, what
    its sensor showed was spread evenly over the rest, idle time too, and its readings were taken for exact: 11 of 40
    windows of some 12 s held the truth, and joules were 3.8 % too low on average."""
    off, n_within = [], 0
    for seed in range(40):
        draw = np.random.default_rng(seed)
        edges_s = 5.0 + np.concatenate([[0.0], np.cumsum(draw.uniform([0.2, 1.0] * 5, [0.6, 3.0] * 5))])
        load = StepPower(np.concatenate([[0.0], edges_s, [1e3]]), np.array([50.0, *[300.0, 150.0] * 5, 50.0]))
        start_s, end_s = float(edges_s[0]), float(edges_s[-1])
        at_s = np.arange(start_s - 0.6, end_s + 0.7, 0.05) + draw.uniform(0.0, 0.005)
        counted = counter_trace(load, at_s, 0.1, draw.uniform(0.0, 0.1), step_j=1e-3)
        dies = int(draw.integers(20, len(at_s) - 40))
        joules = np.where(np.arange(len(at_s)) < dies, counted.values, counted.values[dies])
        phase_s = draw.uniform(0.0, 0.1)
        shown_s = np.floor((at_s - phase_s) / 0.1) * 0.1 + phase_s
        watts = np.round(load.power_w(shown_s), 3)
        power = trace("power", at_s, watts, 0.05, update_period_s=0.1, component="c power", additive=False)
        found = energy_between([replace(counted, values=joules), power], [(start_s, end_s)], "all", "m")
        assert found.energy_j is not None, found.reason
        assert found.uncertainty_j is not None
        true_j = load.energy_j(start_s, end_s)
        off.append(found.energy_j / true_j - 1)
        n_within += abs(found.energy_j - true_j) <= 2 * found.uncertainty_j
        assert found.uncertainty_j <= 0.03 * true_j
    assert n_within >= 36
    assert abs(np.mean(off)) <= 0.01


def test_shares_of_a_stretch_are_those_of_the_sensors_joules() -> None:
    """Watts that are 100 throughout: the times' own."""
    assert sensor().shares(np.array([2.0, 2.5, 4.0])) == pytest.approx([0.25, 0.75])


def test_what_the_sensors_readings_leave_open_is_part_of_how_well_it_knows() -> None:
    known = sensor()
    open_too = known._replace(variance_j2=lambda edges: 64.0 * float(edges[0, 1] - edges[0, 0]) / 2.0)
    assert known.between(2.0, 4.0) == pytest.approx((200.0, 6.0))
    assert open_too.between(2.0, 4.0) == pytest.approx((200.0, 10.0))
