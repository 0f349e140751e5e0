"""What a sensor of the same part says of a stretch from 2 to 4 s: by hand, of 100 W read every 50 ms for 8 s."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from results.liveness import Array, Beside

APART_S, WATTS = 0.05, 100.0
TIMES_S = APART_S * np.arange(161, dtype=np.float64)


ALL = np.ones(len(TIMES_S), dtype=np.bool_)


def sensor(watts: Array | None = None, kept: NDArray[np.bool_] = ALL) -> Beside:
    """It knows the power to 3 %, and shows it up to 100 ms late."""
    watts = np.full(len(TIMES_S), WATTS) if watts is None else watts
    energy_j = np.concatenate([[0.0], np.cumsum(watts[:-1] * np.diff(TIMES_S))])
    return Beside(TIMES_S, energy_j, TIMES_S[kept], watts[kept], 0.03, gap_s=0.5, late_s=0.1)


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
