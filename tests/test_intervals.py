"""Stretches of time, against the same arithmetic on a grid of points."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from results.intervals import covered_s, joined, outside

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)).map(lambda p: (float(p[0]), float(p[0] + p[1]))))


def unit_cells(intervals: list[tuple[float, float]]) -> set[int]:
    """The unit stretches [i, i + 1) that intervals with whole ends cover."""
    return {i for start_s, end_s in intervals for i in range(int(start_s), int(end_s))}


@given(INTERVALS)
def test_joined_intervals_cover_the_same_time_and_never_overlap(intervals: list[tuple[float, float]]) -> None:
    found = joined(intervals)
    assert unit_cells(found) == unit_cells(intervals)
    assert all(a[1] <= b[0] for a, b in pairwise(found))
    assert covered_s(intervals) == len(unit_cells(intervals))


@given(INTERVALS, INTERVALS)
def test_outside_is_the_difference_of_sets(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> None:
    found = outside(joined(one), joined(other))
    assert unit_cells(found) == unit_cells(one) - unit_cells(other)
    assert sum(b - a for a, b in found) == len(unit_cells(found))
    # One without length would count as a phase: of their mean length it follows whether a meter resolves them.
    assert all(a < b for a, b in found)


def test_intervals_that_touch_stay_apart() -> None:
    # One after the other is two phases: joining them would change how many edges a meter's uncertainty counts.
    assert joined([(1.0, 2.0), (0.0, 1.0)]) == [(0.0, 1.0), (1.0, 2.0)]
