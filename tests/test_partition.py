"""Which experts run on the GPU, against every way there is.

Legend: X experts that have rows, N other units.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.techniques.place.partition import (
    EXACT_UP_TO,
    FEW,
    least_max,
    least_split,
    least_splits,
    least_sum,
    nearly_least_max,
)

SECONDS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8)
"""Of each expert: on the GPU, and elsewhere."""


def ends(gpu: Sequence[float], other: Sequence[float], on_gpu: Sequence[bool]) -> tuple[float, float]:
    """What both units take, one expert after the other."""
    took = [0.0, 0.0]
    for here, there, is_on_gpu in zip(gpu, other, on_gpu, strict=True):
        if is_on_gpu:
            took[0] += here
        else:
            took[1] += there
    return took[0], took[1]


def every_way(gpu: Sequence[float], other: Sequence[float]) -> list[tuple[float, float]]:
    return [ends(gpu, other, way) for way in product([True, False], repeat=len(gpu))]


@given(SECONDS)
def test_least_sum_is_that_of_all_ways(costs: list[tuple[int, int]]) -> None:
    gpu, other = np.array(costs, dtype=float).T
    assert sum(ends(gpu, other, least_sum(gpu, other))) == min(map(sum, every_way(gpu, other)))


@settings(deadline=None)
@given(SECONDS)
def test_least_max_is_that_of_all_ways(costs: list[tuple[int, int]]) -> None:
    gpu, other = np.array(costs, dtype=float).T
    assert max(ends(gpu, other, least_max(gpu, other))) == min(map(max, every_way(gpu, other)))


@settings(deadline=None)
@given(SECONDS)
def test_no_single_change_betters_the_greedy_way(costs: list[tuple[int, int]]) -> None:
    """No expert that goes over, and no two that change places."""
    gpu, other = np.array(costs, dtype=float).T
    found = nearly_least_max(gpu, other)
    took = max(ends(gpu, other, found))
    for i, j in product(range(len(gpu)), repeat=2):
        changed = found.copy()
        changed[i] = not changed[i]
        assert max(ends(gpu, other, changed)) >= took
        if changed[j] == changed[i]:
            changed[j] = not changed[j]
            assert max(ends(gpu, other, changed)) >= took


def gaps(n: int, cases: int) -> np.ndarray:
    """The greedy way over the best one, less one: of experts with unlike loads, a third of which need no fetching."""
    draw = np.random.default_rng(n)
    found = []
    for _ in range(cases):
        load = np.sort(draw.geometric(0.1, n))[::-1].astype(float)
        gpu = 0.05 * load + np.where(draw.random(n) < 1 / 3, 0.5, 6.0)
        other = 1.0 + load
        best = min(map(max, every_way(gpu, other)))
        found.append(max(ends(gpu, other, nearly_least_max(gpu, other))) / best - 1)
    return np.array(found)


def test_the_gap_of_the_greedy_way_is_as_the_page_says() -> None:
    """docs/techniques/fiddler.md: at 10 experts, the last number at which all ways are tried."""
    found = gaps(EXACT_UP_TO, 300)
    assert found.max() == pytest.approx(0.071, abs=5e-4)
    assert found.mean() == pytest.approx(0.0010, abs=5e-5)
    assert (found < 1e-9).mean() == pytest.approx(0.93, abs=5e-3)


def slow_split(gpu: Sequence[float], other: Sequence[float], home: Sequence[int], n: int) -> int:
    times = []
    for h in range(len(gpu) + 1):
        busy = [sum(other[i] for i in range(h, len(gpu)) if home[i] == unit) for unit in range(n)]
        times.append(max(sum(gpu[:h]), *busy))
    return times.index(min(times))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=FEW + 6), st.integers(1, 4),
       st.randoms(use_true_random=False))  # fmt: skip
def test_least_split_is_the_first_of_the_shortest(costs: list[tuple[int, int]], n: int, draw: object) -> None:
    gpu, other = np.array(costs, dtype=float).T
    home = [draw.randrange(n) for _ in costs]  # type: ignore[attr-defined]
    assert least_split(gpu, other, np.array(home), n) == slow_split(gpu, other, home, n)
    both = [np.stack([one, one[::-1]]) for one in (gpu, other, np.array(home))]  # two steps at once
    expected = [slow_split(*one, n) for one in zip(*both, strict=True)]
    assert least_splits(*both, n).tolist() == expected
