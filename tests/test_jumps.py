"""Single high steps of a counter, and high moments of a sensor: which stand alone, and how much of them is in doubt."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from results.jumps import LoneStep, lone_steps
from results.spikes import lone_spikes, without_impossible
from tests.fakes.waveforms import trace

READ_S = 0.1


def counter(n_steps: int, high: Mapping[int, float], watts: float = 10.0, **more: float) -> list[LoneStep]:
    """Of a counter under a steady load whose steps have other powers here and there. more: when it was read instead."""
    watts_S = np.full(n_steps, watts)
    watts_S[list(high)] = list(high.values())
    shown_j = np.concatenate([[0.0, 1.0], 1.0 + np.cumsum(watts_S * READ_S)])
    times_s = READ_S * np.arange(n_steps + 2, dtype=np.float64)
    return lone_steps(times_s, shown_j, READ_S, more.get("update_s", READ_S))


def doubted(found: list[LoneStep]) -> list[tuple[float, float, float, float]]:
    return [tuple(pytest.approx(x) for x in step) for step in found]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("beside", "at", "excess_j"),
    [
        ({4: 12.0, 6: 18.0}, 5, 30.0 - 1.2),
        ({4: 18.0, 6: 12.0}, 5, 30.0 - 1.2),
        ({1: 18.0}, 0, 30.0 - 1.8),  # nothing is known before the first
        ({18: 18.0}, 19, 30.0 - 1.8),
    ],
)
def test_what_a_step_holds_above_the_lower_power_beside_it_is_in_doubt(
    beside: dict[int, float], at: int, excess_j: float
) -> None:
    """300 W for 0.1 s."""
    start_s = READ_S * (at + 1)
    assert counter(20, beside | {at: 300.0}) == doubted([LoneStep(start_s, start_s + READ_S, 30.0, excess_j)])


def test_two_steps_in_a_row_are_above_what_is_beside_both() -> None:
    found = counter(20, {4: 12.0, 5: 300.0, 6: 200.0, 7: 18.0})
    assert [amount_j for step in found for amount_j in step[2:]] == pytest.approx([30.0, 28.8, 20.0, 18.8])
    assert counter(20, {5: 300.0, 6: 200.0, 7: 250.0}) == [], "so long a burst is one"


@pytest.mark.parametrize(("n_steps", "most"), [(42, 3), (100, 7)])
def test_more_than_three_high_steps_and_than_seven_in_a_hundred_are_a_load(n_steps: int, most: int) -> None:
    for n in (1, most, most + 1):
        found = counter(n_steps, {5 * k + 2: 100.0 for k in range(n)})
        assert len(found) == (n if n <= most else 0)


def test_a_step_of_up_to_twice_the_highest_other_stands_not_alone() -> None:
    assert counter(20, {3: 15.0, 8: 29.9}) == []
    assert len(counter(20, {3: 15.0, 8: 30.1})) == 1
    assert len(counter(20, {3: 100.0, 8: 300.0})) == 2, "of two heights, both of them above all others"


def test_of_ten_changes_none_is_judged() -> None:
    assert counter(9, {4: 300.0}) == []
    assert len(counter(10, {4: 300.0})) == 1


def test_a_step_that_came_before_its_time_may_hold_nothing_that_flowed() -> None:
    """It renews every 0.3 s: 0.1 s after a renewal nothing is due."""
    [step] = counter(30, {9: 300.0}, update_s=3 * READ_S)
    assert step[2:] == pytest.approx((30.0, 30.0))


def test_a_step_between_two_marks_is_left_alone() -> None:
    times_s = READ_S * np.arange(30, dtype=np.float64)
    times_s[15] = times_s[14] + 0.01
    shown_j = np.cumsum(np.diff(times_s, prepend=-READ_S) * 10.0)
    shown_j[15:] += 40.0
    assert lone_steps(times_s, shown_j, READ_S, 0.0) == []


# --- a sensor of power ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "step_j", "excess_j"),
    [
        # Lines from 10 W to 1 kW and on to 20 W, 0.1 s each: 50.5 + 51 J, of which 0.2 s at the lower are no doubt.
        (10, 101.5, 99.5),
        # From the first reading, and to the last, there is one line and one neighbour.
        (0, 51.0, 49.0),
        (99, 50.5, 49.5),
    ],
)
def test_what_a_moment_holds_above_the_lower_reading_beside_it_is_in_doubt(
    at: int, step_j: float, excess_j: float
) -> None:
    times_s = READ_S * np.arange(100)
    watts = np.where(np.arange(100) < at, 10.0, 20.0)
    watts[at] = 1000.0
    ends_s = times_s[max(at - 1, 0)], times_s[min(at + 1, 99)]
    expected = doubted([LoneStep(*ends_s, step_j, excess_j)])
    assert lone_spikes(trace("power", times_s, watts, READ_S)) == expected


@pytest.mark.parametrize(
    ("n_readings", "moments", "n_told"),
    [
        (400, {50: 3, 150: 3, 250: 3}, 3),
        (400, {50: 3, 150: 3, 250: 3, 350: 3}, 0),  # more than three moments
        (400, {50: 6}, 0),  # a burst that lasts
        (400, {0: 3, 397: 3}, 2),
        (101, {50: 1, 80: 1}, 2),
        (101, {20: 1, 50: 1, 80: 1}, 0),  # six of a hundred distances: more than a twentieth of the time
    ],
)
def test_a_load_that_comes_often_or_lasts_is_no_moment(n_readings: int, moments: dict[int, int], n_told: int) -> None:
    """moments: how many readings each has, by its first."""
    watts = np.full(n_readings, 10.0)
    for first, n in moments.items():
        watts[first : first + n] = 1000.0
    assert len(lone_spikes(trace("power", READ_S * np.arange(n_readings), watts, READ_S))) == n_told


def test_what_a_model_says_flows() -> None:
    modelled = trace("power", READ_S * np.arange(5), [10.0, 10.0, 65535.0, 10.0, 10.0], READ_S, method="modelled")
    assert without_impossible(modelled) == (modelled, ())


def test_what_cannot_flow_is_filled_in_by_a_line_and_bounded_by_all_other_readings() -> None:
    """6 to 30 W elsewhere, 10 and 20 W beside two readings: 0.3 s between 1.8 and 9 J, of which 4.5 J are taken."""
    watts = np.array([6.0, 30.0, 10.0, 65535.0, 65535.0, 20.0, 8.0])
    filled, [stand] = without_impossible(trace("power", READ_S * np.arange(7), watts, READ_S))
    assert filled.values == pytest.approx([6.0, 30.0, 10.0, 40 / 3, 50 / 3, 20.0, 8.0])
    assert (stand.start_s, stand.end_s) == pytest.approx((0.2, 0.5))
    assert (stand.shown_j, stand.low_j, stand.high_j, stand.filled_j) == pytest.approx((0.0, 1.8, 9.0, 4.5))
    assert stand.variance_j2 == pytest.approx((9.0 - 1.8) ** 2 / 12)


@pytest.mark.parametrize(("at", "ends_s"), [(0, (0.0, 0.1)), (4, (0.3, 0.4))])
def test_at_an_end_what_cannot_flow_is_taken_for_its_only_neighbour(at: int, ends_s: tuple[float, float]) -> None:
    watts = np.full(5, 10.0)
    watts[at] = 65535.0
    filled, [stand] = without_impossible(trace("power", READ_S * np.arange(5), watts, READ_S))
    assert filled.values == pytest.approx(np.full(5, 10.0))
    assert (stand.start_s, stand.end_s, stand.filled_j) == pytest.approx((*ends_s, 1.0))
