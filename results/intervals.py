"""Stretches of time: joined where they overlap, and cut by others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Ascending and disjoint, covering the same time. Those that only touch stay apart."""
    found: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if found and start_s < found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end_s))
        else:
            found.append((start_s, end_s))
    return found


def outside(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What of the intervals lies in none of the others. Both are ascending and disjoint, as `joined` gives them."""
    found: list[Interval] = []
    first = 0
    for start_s, end_s in intervals:
        while first < len(others) and others[first][1] <= start_s:
            first += 1
        left_s = start_s
        for i in range(first, len(others)):
            other_start_s, other_end_s = others[i]
            if other_start_s >= end_s:
                break
            if other_start_s > left_s:
                found.append((left_s, other_start_s))
            left_s = max(left_s, other_end_s)
        if left_s < end_s:
            found.append((left_s, end_s))
    return found


def covered_s(intervals: Iterable[Interval]) -> float:
    """Seconds that lie in at least one interval."""
    return sum(end_s - start_s for start_s, end_s in joined(intervals))
