"""How often a counter renews its value, and how long it may show one: as its readings tell, never a data sheet alone.

Some counters renew irregularly, others tick when a fixed energy has flowed (1 mAh, 1 mJ). Both show one value for long,
and lose nothing: what a slow tick brings is what flowed since the last.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

STILL_UPDATES = 1.5
"""A counter that shows one value for longer stands still: its ticks come at most half an update late."""
STAMP_S = 1e-3
"""Stamps of readings err by less."""
LONG_RUN = 20
"""Renewals over which the update period is taken, where they come quickest."""
FEW = 3
"""So many tell it as well, where the readings are closer to each other."""
REPEATS, CLOSELY = 1.05, 3.0
"""Readings of a value, on average: some repeat the one before; they tell its renewals to a third."""
AS_QUICK = 1.25
"""Times the quickest: changes that come so quickly tell more where a reading repeated the one before."""
AS_STATED = 0.1
"""A period that is seen to be so close to the stated one is that one: readings place each renewal to their distance."""
AT_LEAST_SHOWN = 0.5
"""Of the time without a reading before a value, or behind it: shown for less, it tells no renewal."""
MANY_TIMES = 3
"""As long as is usual: until then a counter that comes irregularly, or by fixed amounts of energy, is not suspected."""
MOSTLY = 0.9
"""Of late renewals: the usual ones."""
ONE_TICK = 1.5
"""Quanta: a step below is of one."""
MULTIPLE_WITHIN = 0.1
"""Of a quantum: steps are its multiples where they are so close (a charge counter's joules follow its voltage)."""
COARSE_STEPS = 8
"""So many that are multiples of the smallest are no chance."""
NEAR_STEPS = 10
"""On either side of a late renewal, that tell the power around it."""
LATER_BY_CHANCE = 0.05
"""That the latest of all is later than it may be."""
BESIDE_STEPS, LITTLE = 4, 0.65
"""Of the lower power over so many steps before and behind: a late step that brought less has lost something."""
SCATTERS, COUNTED_AT_LEAST = 2.0, 0.6
"""As many standard deviations less than is due, but not less than this share of it, may be chance."""
COUNTED_ALL = 0.8
"""Of the energy around them: renewals that come late again and again and bring so much have lost nothing."""


class Renewal(NamedTuple):
    """How often a counter renews its value, and how long it shows one at most as long as it lives."""

    period_s: float
    longest_s: float


def observed_renewal(times_s: Array, shown_j: Array, stated_s: float) -> Renewal:
    """From the distances at which the value changed.

    Where it repeats itself between two changes, their distance is that of two renewals; where every reading differs, it
    renews at least as often as it was read, and the stated period stands up to that distance. So a few readings close
    to each other (meters take them before a window) show what a grid of 50 ms does not. A value that was shown for
    longer than the stated period is believed, not the statement. Two readings of one value right after each other, as
    marks place them, say nothing where no others are near.
    """
    changed = np.flatnonzero(np.diff(shown_j) > 0) + 1
    if len(changed) < 3:
        return Renewal(stated_s, stated_s)
    shown_s = times_s[changed[1:] - 1] - times_s[changed[:-1]]
    times_s, changed = _telling(times_s, changed, shown_s, stated_s)
    period_s, n_readings = _mean_distance_s(times_s, changed, LONG_RUN)
    closely_s, n_closely = _mean_distance_s(times_s, changed, FEW)
    if closely_s < (period_s if n_closely >= CLOSELY > n_readings else period_s / 2):
        # It was read more closely for a while.
        period_s, n_readings = closely_s, n_closely
    repeats = n_readings > REPEATS
    repeated_s = np.diff(times_s[changed])[np.diff(changed) > 1]
    if len(repeated_s) and np.median(repeated_s) < period_s:
        period_s, repeats = float(np.median(repeated_s)), True
    usual_s = float(np.median(repeated_s)) if len(repeated_s) >= FEW else period_s
    if abs(period_s - stated_s) <= AS_STATED * stated_s:
        period_s = stated_s
    elif not repeats:
        # It showed one value for so long, where that was seen: a period that is stated shorter is not its own.
        shown_s = shown_s[shown_s > 0]
        least_s = float(np.median(shown_s)) if len(shown_s) >= FEW else 0.0
        period_s = min(max(stated_s, least_s), period_s)
    # Renewals that come irregularly are no standstill, as long as they come.
    return Renewal(period_s, STILL_UPDATES * min(max(usual_s, period_s), 3 * period_s))


def _telling(
    times_s: Array, changed: NDArray[np.intp], shown_s: Array, stated_s: float
) -> tuple[Array, NDArray[np.intp]]:
    """The readings that tell how long a value is shown, and where it changed among them: all but repeats, within a
    stated period, of one whose renewals may be anywhere in the long times before and behind."""
    since_s = times_s[changed] - times_s[changed - 1]
    unsure = (shown_s <= stated_s) & (shown_s < AT_LEAST_SHOWN * np.maximum(since_s[:-1], since_s[1:]))
    n_repeats = np.where(unsure, np.diff(changed) - 1, 0)
    if not n_repeats.any():
        return times_s, changed
    dropped = [np.arange(first + 1, first + 1 + n) for first, n in zip(changed, n_repeats, strict=False) if n]
    return np.delete(times_s, np.concatenate(dropped)), changed - np.concatenate([[0], np.cumsum(n_repeats)])


def _mean_distance_s(times_s: Array, changed: NDArray[np.intp], run: int) -> tuple[float, float]:
    """Of `run` changes, where they came quickest; and how many readings there are of each value among these.

    The first of them may have been there since the reading before it: as many renewals fit into no less than the time
    since then. Readings that marks place close to each other are no quick renewals, if one before them is far.
    """
    run = min(run, len(changed) - 1)
    first, last = changed[:-run], changed[run:]
    since_s, to_s = (times_s[k] - times_s[k - 1] for k in (first, last))
    spans_s = times_s[last] - times_s[first]
    at_most_s = spans_s + since_s
    n_readings = (last - first) / run
    repeats = n_readings > REPEATS
    i = int(np.argmin(at_most_s))
    j = int(np.argmin(np.where(repeats, at_most_s, np.inf)))
    # Where a reading repeated the one before, the distance is that of renewals, and not of readings.
    if repeats[j] and at_most_s[j] <= AS_QUICK * at_most_s[i]:
        i = j
    return float(spans_s[i] + max(since_s[i] - to_s[i], 0.0) / 2) / run, float(n_readings[i])


def longest_shown_s(times_s: Array, shown_j: Array, begins: NDArray[np.intp], renewal: Renewal, step_j: float) -> Array:
    """For each value [n], first shown at readings `begins`: how long it may be shown by a counter that lives.

    step_j: as stated. A tick of one quantum stands as long as that energy takes: several times the next longest of its
    kind is a fault. So for late renewals that brought what the power around them says, all together.
    """
    longest_s = np.full(len(begins), renewal.longest_s)
    if len(begins) < FEW + 1:
        return longest_s
    shown_s = times_s[begins[1:] - 1] - times_s[begins[:-1]]
    steps_j = np.diff(shown_j[begins])
    of_one = steps_j <= ONE_TICK * _quantum_j(steps_j, step_j)
    if of_one.sum() >= FEW:
        usual_s = MANY_TIMES * float(np.sort(shown_s[of_one])[-2])
        # The next power may be in the step that ends the last of them, and the last value is still shown.
        after_one = np.concatenate([[False], of_one])
        longest_s[np.append(of_one, False) | after_one] = max(renewal.longest_s, usual_s)
    late = ~of_one & (shown_s > renewal.longest_s + STAMP_S)
    if late.sum() >= FEW and _counted_all(np.diff(times_s[begins]), steps_j, late):
        usual_s = MANY_TIMES * float(np.quantile(shown_s[late], MOSTLY, method="lower"))
        # Beyond what is late, distances that come by chance fall off at least as those of a Poisson process do.
        beyond_s = float((shown_s[late] - renewal.longest_s).mean())
        by_chance_s = renewal.longest_s + beyond_s * math.log(late.sum() / LATER_BY_CHANCE)
        brought = np.append(~_brought_little(np.diff(times_s[begins]), steps_j, late), True)
        longest_s = np.where(brought, np.maximum(longest_s, min(usual_s, by_chance_s)), longest_s)
    return longest_s


def _quantum_j(steps_j: Array, stated_j: float) -> float:
    """The smallest step, where all are multiples of it and most are few of it; else as stated."""
    least_j = float(steps_j.min())
    multiples = steps_j / least_j
    off = np.abs(multiples - np.round(multiples))
    is_coarse = len(steps_j) >= COARSE_STEPS and bool(np.all(off <= MULTIPLE_WITHIN)) and np.median(multiples) < FEW
    return max(least_j, stated_j) if is_coarse else stated_j


def _brought_little(lasted_s: Array, steps_j: Array, late: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which late steps brought much less than both the power before and behind them: these have lost something."""
    whole_j, whole_s = (np.concatenate([[0.0], np.cumsum(x)]) for x in (steps_j, lasted_s))
    k = np.arange(len(steps_j))
    before, behind = np.maximum(k - BESIDE_STEPS, 0), np.minimum(k + 1 + BESIDE_STEPS, len(k))
    with np.errstate(invalid="ignore"):
        before_w = (whole_j[k] - whole_j[before]) / (whole_s[k] - whole_s[before])
        behind_w = (whole_j[behind] - whole_j[k + 1]) / (whole_s[behind] - whole_s[k + 1])
    return np.asarray(late & (steps_j < LITTLE * np.fmin(before_w, behind_w) * lasted_s))


def _counted_all(lasted_s: Array, steps_j: Array, late: NDArray[np.bool_]) -> bool:
    """Whether steps that came late brought the power of the others near them, as a whole."""
    n = len(steps_j)
    sums = [np.concatenate([[0.0], np.cumsum(np.where(late, 0.0, x))]) for x in (steps_j, lasted_s)]
    k = np.flatnonzero(late)
    low, high = np.maximum(k - NEAR_STEPS, 0), np.minimum(k + NEAR_STEPS + 1, n)
    near_j, near_s = (x[high] - x[low] for x in sums)
    known = near_s > 0
    due_j = near_j[known] / near_s[known] * lasted_s[k][known]
    whole_j = float(due_j.sum())
    off_j = steps_j[k][known] - due_j
    # Of a load that alternates, each brings more or less than is due.
    chance_j = min(SCATTERS * math.sqrt(float((off_j**2).sum())), (1 - COUNTED_AT_LEAST) * whole_j)
    return whole_j > 0 and -float(off_j.sum()) <= max((1 - COUNTED_ALL) * whole_j, chance_j)
