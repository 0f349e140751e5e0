"""How long a counter that lives may show one value: expected from what each of its steps lasted and brought."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from results.renewal import Renewal, longest_shown_s
from tests.fakes.waveforms import Array

UNREAD_S = 0.01
"""Each value is read when it is new, and so long before the next."""
KNOWN = Renewal(period_s=0.1, longest_s=0.15)
USUAL_S, USUAL_W = (0.1, 0.13), 10.0
"""Of the renewals between late ones, in turns: their steps are no multiples of one quantum."""
LATE_S = 0.4


def longest(lasted_s: Sequence[float] | Array, steps_j: Sequence[float] | Array, quantum_j: float = 0.0) -> Array:
    """[n]: for each value of a counter whose n - 1 steps lasted so long and brought so much."""
    renewed_s = np.concatenate([[0.0], np.cumsum(lasted_s)])
    times_s = np.sort(np.concatenate([renewed_s, renewed_s[1:] - UNREAD_S]))
    shown_j = np.repeat(np.concatenate([[0.0], np.cumsum(steps_j)]), 2)[:-1]
    return longest_shown_s(times_s, shown_j, np.arange(len(renewed_s)) * 2, KNOWN, quantum_j)


def among(late_s: Sequence[float], shares: Sequence[float], n_between: int = 6) -> tuple[Array, Array]:
    """(how long each step lasted, what it brought at 10 W): of late ones this share of it, those between them all."""
    between_s = np.resize(USUAL_S, n_between)
    lasted_s = np.concatenate([between_s, *(np.append(one_s, between_s) for one_s in late_s)])
    share = np.ones(len(lasted_s))
    share[n_between :: n_between + 1] = shares
    return lasted_s, USUAL_W * lasted_s * share


@pytest.mark.parametrize(
    ("late_s", "allowed_s"),
    [
        # Shown for 0.39 s. Three times that is less than chance allows, 0.15 + 0.24 ln(10 / 0.05) = 1.42 s.
        ([0.4] * 10, 1.17),
        # One that was shown for 2.99 s is not usual: nine of ten are.
        ([0.4] * 9 + [3.0], 1.17),
        ([0.4] * 7 + [0.6] * 2 + [3.0], 1.77),
        # Shown for 0.19 s: three times that is more than 0.15 + 0.04 ln(10 / 0.05) s.
        ([0.2] * 10, 0.15 + 0.04 * math.log(200)),
        # Two are no rule.
        ([0.4] * 2, 0.15),
    ],
)
def test_late_renewals_that_brought_all_may_come_as_late_again(late_s: list[float], allowed_s: float) -> None:
    assert longest(*among(late_s, [1.0] * len(late_s))) == pytest.approx(allowed_s)


@pytest.mark.parametrize(
    ("shares", "brought_all"),
    [
        ([0.81] * 10, True),  # a fifth less than is due, as a whole
        ([0.79] * 10, False),
        ([0.7] * 3, True),  # 0.9 of 3 are missing; two standard deviations of what is off are 2 x 0.3 sqrt(3) = 1.04
        ([0.75] * 5, False),  # 1.25 of 5 are missing; 2 x 0.25 sqrt(5) = 1.12
        ([0.1, 0.9, 0.9], True),  # 1.1 of 3: below two deviations, 2 x 0.91, and two fifths of all, 1.2
        ([0.1, 0.8, 0.8], False),  # 1.3 of 3: below two deviations, 2 x 0.94, but above two fifths
    ],
)
def test_late_renewals_that_brought_less_as_a_whole_have_lost_something(shares: list[float], brought_all: bool) -> None:
    lasted_s, steps_j = among([LATE_S] * len(shares), shares)
    assert bool(longest(lasted_s, steps_j)[-1] > KNOWN.longest_s) is brought_all


def test_what_is_due_is_the_power_near_by_and_not_that_of_another_load() -> None:
    """At 10 W three come late and bring all; before and later it is 100 W."""
    lasted_s, steps_j = among([LATE_S] * 3, [1.0] * 3, n_between=10)
    other_s = np.resize(USUAL_S, 60)
    found = longest([*other_s, *lasted_s, *other_s], [*(100 * other_s), *steps_j, *(100 * other_s)])
    assert found == pytest.approx(0.15 + 0.24 * math.log(3 / 0.05))


def test_where_every_renewal_is_late_nothing_says_what_is_due() -> None:
    lasted_s = np.resize([0.4, 0.5], 20)
    assert longest(lasted_s, USUAL_W * lasted_s) == pytest.approx(KNOWN.longest_s)


@pytest.mark.parametrize(
    ("before_w", "behind_w", "share", "lost"),
    [
        ([10] * 4, [10] * 4, 0.66, False),
        ([10] * 4, [10] * 4, 0.64, True),
        # The load falls, or rises: it is judged by the lower power.
        ([100] * 4, [10] * 4, 0.7, False),
        ([10] * 4, [100] * 4, 0.7, False),
        # The fourth from it counts, and the fifth does not.
        ([2, 10, 10, 10], [10] * 4, 0.6, False),
        ([10] * 4, [10, 10, 10, 2], 0.6, False),
        ([2, 2, 2, 2, 10, 10, 10, 10], [10] * 4, 0.6, True),
        ([10] * 4, [10, 10, 10, 10, 2, 2, 2, 2], 0.6, True),
    ],
)
def test_a_late_step_that_brought_less_than_before_and_behind_is_no_usual_one(
    before_w: list[float], behind_w: list[float], share: float, lost: bool
) -> None:
    """The fifth of nine; all others brought what is due."""
    lasted_s, steps_j = among([LATE_S] * 9, [1.0] * 9, n_between=16)
    judged = 4 * 17 + 16
    for k, watts in zip(range(judged - len(before_w), judged), before_w, strict=True):
        steps_j[k] = watts * lasted_s[k]
    for k, watts in zip(range(judged + 1, judged + 1 + len(behind_w)), behind_w, strict=True):
        steps_j[k] = watts * lasted_s[k]
    steps_j[judged] = USUAL_W * LATE_S * share
    found = longest(lasted_s, steps_j)
    assert bool(found[judged] == KNOWN.longest_s) is lost
    assert np.delete(found, judged) == pytest.approx(1.17)


def test_a_tick_of_one_quantum_may_take_three_times_the_second_longest_and_so_may_the_value_behind_it() -> None:
    """Ticks of about one took 1, 2, 2.5, 3 and 9 s: nine is three times three. All others keep their 0.15 s."""
    lasted_s = np.array([0.1, 2.0, 3.0, 0.1, 0.1, 9.0, 2.5, 1.0, 0.1]) + UNREAD_S
    found = longest(lasted_s, [3, 1.4, 1, 2, 3, 1, 1, 1, 3], quantum_j=1.0)
    assert found == pytest.approx([0.15, 9.0, 9.0, 9.0, 0.15, 9.0, 9.0, 9.0, 9.0, 0.15])


@pytest.mark.parametrize(("n_ticks", "allowed_s"), [(2, 0.15), (3, 6.0)])
def test_three_ticks_tell_how_long_one_takes(n_ticks: int, allowed_s: float) -> None:
    lasted_s = np.resize([2.0, 0.1], 2 * n_ticks) + UNREAD_S
    assert longest(lasted_s, np.resize([1.0, 3.0], 2 * n_ticks), quantum_j=1.0)[0] == pytest.approx(allowed_s)


@pytest.mark.parametrize(
    ("steps_j", "is_quantum"),
    [
        ([2, 2, 4, 2, 2, 4, 2, 2], True),
        ([2, 2, 4, 2, 2, 4, 2], False),  # seven may be chance
        ([2, 2, 4, 2, 3, 4, 2, 2], False),  # one and a half is no multiple
        ([2, 6, 6, 6, 8, 6, 6, 2, 2], False),  # most are three of it: a renewal, and no tick
    ],
)
def test_a_quantum_that_is_not_stated_is_seen_where_steps_are_few_of_it(steps_j: list[float], is_quantum: bool) -> None:
    """The first two of the smallest took 1 s."""
    lasted_s = np.where(np.asarray(steps_j) == 2, 1.0, 0.1) + UNREAD_S
    assert longest(lasted_s, steps_j)[0] == pytest.approx(3.0 if is_quantum else KNOWN.longest_s)
