"""Places where a stretch could split: against scipy's energy distance, and against fractions over all orders."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from results.history.places import LEAST_SEGMENT, SHUFFLES, Order, Places


class Shuffles:
    """Orders that are counted."""

    def __init__(self, seed: int = 0) -> None:
        self.n, self._rng = 0, np.random.default_rng(seed)

    def permutation(self, x: int) -> Order:
        self.n += 1
        return self._rng.permutation(x)


def places_of(n: int) -> list[tuple[int, int]]:
    return [(t, k) for t in range(LEAST_SEGMENT, n) for k in range(t + LEAST_SEGMENT, n + 1)]


def exact_q(ones: set[int], n: int) -> Fraction:
    """The largest Q of zeros with ones at these places, all weights 1: there |x - x'| is 1 or 0, and
    2 E|x - y| - E|x - x'| - E|y - y'| is twice the square of the difference of two shares of ones."""
    counts = np.cumsum([i in ones for i in range(n)]).tolist()
    found = []
    for t, k in places_of(n):
        first, second = Fraction(counts[t - 1], t), Fraction(counts[k - 1] - counts[t - 1], k - t)
        found.append(Fraction(t * (k - t), k) * 2 * (first - second) ** 2)
    return max(found)


@pytest.mark.parametrize(("seed", "n", "spread"), [(0, 9, 1.0), (1, 23, 30.0), (2, 70, 5.0), (3, 90, 1.0)])
def test_the_largest_q_and_its_place_are_those_of_scipys_energy_distance(seed: int, n: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal(n) + (np.arange(n) >= n // 2), rng.uniform(1.0, spread, n)
    expected = {
        (t, k): w[:t].sum()
        * w[t:k].sum()
        / w[:k].sum()
        * stats.energy_distance(x[:t], x[t:k], u_weights=w[:t], v_weights=w[t:k]) ** 2
        for t, k in places_of(n)
    }
    q, t, k = Places(x, w).best()
    assert (t, k) == max(expected, key=lambda place: expected[place])
    assert q == pytest.approx(expected[t, k], rel=1e-9)


@pytest.mark.parametrize(("low", "high", "weight"), [(0.7, 0.75, 1 / 0.003**2), (np.log(3), np.log(7), 1 / 3)])
def test_of_two_values_every_order_as_far_apart_reaches_q_and_no_other(low: float, high: float, weight: float) -> None:
    """All 1820 orders of 4 ones among 12 zeros; before, rounding left out some of those that are as far apart."""
    n, n_ones = 16, 4
    exact = {ones: exact_q(set(ones), n) for ones in combinations(range(n), n_ones)}
    observed = (0, 1, 2, 4)
    x = np.array([high if i in observed else low for i in range(n)])
    places = Places(x, np.full(n, weight))
    q = places.best()[0]
    zeros = [i for i in range(n) if i not in observed]
    for ones, own in exact.items():
        order, highs, lows = np.empty(n, dtype=np.intp), iter(observed), iter(zeros)
        order[:] = [next(highs) if i in ones else next(lows) for i in range(n)]
        assert places.reaches(order, q) == (own >= exact[observed]), ones


def test_of_places_that_are_as_far_apart_the_first_is_taken() -> None:
    """A level of four points among eight others of another: before it and behind it Q is the same."""
    n = 12
    x = np.array([0.7 if 4 <= i < 8 else 0.75 for i in range(n)])
    q = {place: exact_q_at(x, *place) for place in places_of(n)}
    largest = [place for place, value in q.items() if value == max(q.values())]
    assert Places(x, np.full(n, 1 / 0.003**2)).best()[1:] == largest[0]


def exact_q_at(x: np.ndarray, t: int, k: int) -> Fraction:
    """Of points of two values."""
    is_high = (x == x.max()).tolist()
    first, second = Fraction(sum(is_high[:t]), t), Fraction(sum(is_high[t:k]), k - t)
    return Fraction(t * (k - t), k) * (first - second) ** 2


def test_points_that_are_alike_are_not_apart() -> None:
    assert Places(np.full(30, 0.1 + 0.2), np.full(30, 1 / 3)).best()[0] == 0.0


def test_thirteen_points_are_too_few_for_any_order_to_be_rare() -> None:
    """2 / 1716 of all orders of 13 points put the same six on one side; of 14 points 2 / 3432 the same seven."""
    x, drawn = np.arange(14) + 100.0 * (np.arange(14) >= 7), Shuffles()
    few = Places(x[1:], np.ones(13))
    assert few.best()[1:] == (6, 13)
    assert not few.is_rare(*few.best(), drawn)
    assert drawn.n == 0
    more = Places(x, np.ones(14))
    more.is_rare(*more.best(), drawn)
    assert drawn.n > 0


def test_the_first_order_that_reaches_q_ends_it() -> None:
    """Of noise half of all orders or so are as far apart."""
    x, drawn = np.random.default_rng(1).standard_normal(40), Shuffles()
    places = Places(x, np.ones(40))
    assert not places.is_rare(*places.best(), drawn)
    assert drawn.n < SHUFFLES / 10


@pytest.mark.parametrize("rarely", [0, 1])
def test_an_order_is_rare_where_as_many_as_were_to_be_drawn_do_not_reach_it(rarely: int) -> None:
    """Twenty zeros and then twenty ones: 2 of all 1.4e11 orders are as far apart. One that is drawn, the last of all,
    is one too many."""

    class Last(Shuffles):
        def permutation(self, x: int) -> Order:
            order = super().permutation(x)
            return np.arange(x) if rarely and self.n == SHUFFLES else order

    drawn = Last()
    places = Places(1.0 * (np.arange(40) >= 20), np.ones(40))
    assert places.is_rare(*places.best(), drawn) == (rarely == 0)
    assert drawn.n == SHUFFLES
