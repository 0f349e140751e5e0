"""Gauges that show a value until they have a new one: how often they renew it, which readings say something new.

Batteries of phones, and the energy gauge of iOS, are read more often than they update. How often that is no maker
states, so it is observed, and it rules the uncertainty of what is derived from them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MIN_POWER_W, MAX_POWER_W = 0.05, 25.0
"""What a phone draws from its battery: from asleep to the most that its connector bears."""
STUCK_UPDATES = 12
"""A gauge with noise in its last digit does not repeat itself so often; one that does has stopped."""
BY_CHANCE = 0.01
"""A value that stands longer than the gauge would repeat itself in one window of a hundred may be of a gauge that stood
still while the power changed."""
REPEATS_OFTEN = 0.1
"""The share of updates from which a gauge is coarse: it may repeat a constant load's value for long."""
FEWEST_REPEATS = 4
"""Among few updates fewer are chance, and make none coarse whose values usually differ by more than `SAME_STEPS`."""
RESTS = 0.5
"""The share of updates that repeat one from which the load of so much power has no noise."""
FEWEST_RESTS, AS_LONG = 3, 1.25
"""So many others that rest at the same value tell for how long a phone does: no more than so many times the longest."""
LEAP_SHARE, BY_CHANCE_AT_LEAP = 0.1, 0.1
"""The same of a value that ends with a leap of the load by so much: of the leaps of one window in ten."""
LATE_SIGMAS, APART_SIGMAS, FEWEST_LATE, MOST_LATE = 4.0, 2.0, 4, 0.01
"""Work keeps the gauge waiting where repeats gather before the rises of the load by so many deviations, and more than
before its falls by so many, at so many rises at least. They may hide so much of the energy before there is none."""
GAP_UPDATES = 5.0
"""For longer the values on both sides do not bound what flowed: a gap, as where nothing was read (`results.energy`)."""
MOST_LEFT_OUT, UNSEEN_UPDATES = 0.08, 0.9
"""Of the time: more that nobody saw leaves no energy, as where a sensor stands still (`results.rest`). Readings that
are left out for so many updates held a value that no other shows."""
SAME_SHARE = 0.01
SAME_STEPS = 2
"""Values that differ by less than this share, or by so many of the gauge's steps, are one constant load's."""


def plausible_power(watts: Array) -> tuple[NDArray[np.bool_], str | None]:
    """Which readings can be a phone's, and what to say of the others; None where there are none."""
    finite = np.isfinite(watts)
    plausible = finite & (watts >= MIN_POWER_W) & (watts <= MAX_POWER_W)
    below = finite & (watts < 0)
    kinds = {
        "no number": ~finite,
        "below 0 W, as of a battery that takes a charge": below,
        f"not in {MIN_POWER_W:g} to {MAX_POWER_W:g} W, which a phone draws": finite & ~below & ~plausible,
    }
    counts = {what: int(which.sum()) for what, which in kinds.items()}
    told = ", ".join(f"{n} {'is' if n == 1 else 'are'} {what}" for what, n in counts.items() if n)
    return plausible, f"of {len(watts)} readings {told}: left out" if told else None


def observed_update_period_s(times_s: Array, shown: Array) -> float:
    """How often the gauge gave a new value: the median distance of changes; all the time there was, below three.

    A gauge that is stuck, or that a constant load leaves alone, has not been seen to update: it resolves nothing.
    """
    if len(times_s) < 2:
        return 0.0
    changed_s = times_s[1:][np.diff(shown) != 0]
    if len(changed_s) >= 3:
        return float(np.median(np.diff(changed_s)))
    return float(times_s[-1] - times_s[0]) / (len(changed_s) + 1)


def stuck_stretches_s(times_s: Array, shown: Array, update_period_s: float) -> tuple[tuple[float, float], ...]:
    """Stretches that show the same to the last digit for more than `STUCK_UPDATES` updates, and longer than other rests
    at that value; where a gauge may have stood still meanwhile, for more than `GAP_UPDATES`, or together for a notable
    share of all the time.
    """
    runs = _runs(times_s, shown, update_period_s)
    unsure_s = sum(run.end_s - run.start_s - update_period_s for run in runs if run.is_unsure)
    is_much = len(times_s) > 1 and unsure_s > MOST_LEFT_OUT * float(times_s[-1] - times_s[0])
    most = 0.0 if is_much else GAP_UPDATES
    return tuple(
        (run.start_s, run.end_s)
        for run in runs
        if run.is_late or run.end_s - run.start_s > (most if run.is_unsure else run.most_updates) * update_period_s
    )


class _Run(NamedTuple):
    """Readings [first, end) that show one value, and the time until another was seen."""

    first: int
    end: int
    start_s: float
    end_s: float
    is_unsure: bool
    is_late: bool
    """One of many that hid the begin of what came behind them."""
    most_updates: float
    """As long as it is sure: for more the gauge has stopped."""


def _runs(times_s: Array, shown: Array, update_period_s: float) -> list[_Run]:
    """A gauge that rarely repeats itself, and does so for many updates, may have stood still.

    A coarse one is believed where the values before and after are the same but for a step or two: a constant load; it
    is doubted sooner where its value ends with a leap.
    """
    if len(times_s) < 2 or update_period_s <= 0:
        return []
    begins = np.concatenate([[0], np.flatnonzero(np.diff(shown) != 0) + 1])
    ends = np.append(begins[1:], len(times_s))
    start_s, end_s = times_s[begins], times_s[np.minimum(ends, len(times_s) - 1)]
    n_updates = (end_s - start_s) / update_period_s
    n_likely, repeats, n_repeats = _likely_updates(n_updates)
    unsure = n_updates > n_likely - 0.5
    jumps = np.abs(np.diff(shown[begins]))
    # Of all values: two that follow each other may never differ by one step.
    is_of_few_steps = len(jumps) > 0 and float(np.median(jumps)) <= SAME_STEPS * smallest_step(np.unique(shown))
    if repeats > REPEATS_OFTEN and (n_repeats >= FEWEST_REPEATS or is_of_few_steps):
        same_as = np.maximum(SAME_STEPS * smallest_step(shown), SAME_SHARE * np.abs(shown[begins]))
        beside = np.concatenate([[0.0], jumps, [0.0]])
        unsure &= np.maximum(beside[:-1], beside[1:]) > same_as
    # Few runs end with a step of the load, so fewer of these stand for long by chance.
    shown_w = np.abs(shown[begins])
    leaps = np.concatenate([np.abs(np.diff(shown_w)) > LEAP_SHARE * np.maximum(shown_w[1:], shown_w[:-1]), [False]])
    if leaps.any() and repeats < 1:
        at_leap = 1 + float(np.log(BY_CHANCE_AT_LEAP / leaps.sum()) / np.log(repeats))
        # Of longer runs the values on both sides bound nothing, and the leap alone is no reason to give up a window.
        unsure |= leaps & (n_updates > at_leap - 0.5) & (n_updates <= GAP_UPDATES + 0.5)
    rests, usual_updates = _rests(shown, begins, n_updates, unsure | (n_updates > STUCK_UPDATES))
    unsure &= ~rests
    late = _late(shown_w, leaps, np.maximum(1.0, np.round(n_updates))) if leaps.any() else leaps
    columns = (begins, ends, start_s, end_s, unsure | late, late, np.maximum(STUCK_UPDATES, AS_LONG * usual_updates))
    return [_Run(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _rests(
    shown: Array, begins: NDArray[np.intp], n_updates: Array, asked: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], Array]:
    """Which of the values [runs] that are asked for stand for no longer than others like them do by chance; and for how
    long the longest of those did, where they are enough to tell, else 0.

    A phone at rest may show one value for as long as it rests, and none twice under a load that has noise.
    """
    found, longest = np.zeros(len(begins), dtype=np.bool_), np.zeros(len(begins))
    values, least = shown[begins], SAME_STEPS * smallest_step(shown)
    for i in np.flatnonzero(asked).tolist():
        is_near = np.abs(values - values[i]) <= max(least, SAME_SHARE * abs(values[i]))
        is_near[i] = False
        usual = np.maximum(1.0, np.round(n_updates[is_near]))
        repeats = float(((usual - 1).sum() + 1) / (usual.sum() + 2))
        n_likely = 1 + float(np.log(BY_CHANCE / max(1.0, n_updates.sum())) / np.log(repeats))
        found[i] = repeats > RESTS and n_updates[i] <= n_likely - 0.5
        if found[i] and len(usual) >= FEWEST_RESTS:
            longest[i] = usual.max()
    return found, longest


def _late(shown_w: Array, leaps: NDArray[np.bool_], n_updates: Array) -> NDArray[np.bool_]:
    """Which values [runs] stood on as the load rose: work may keep a phone's gauge waiting just when it begins, and all
    these errors have one sign. None where repeats gather before a fall as well, or nowhere.

    Between two leaps are K steps from update to update, r of which repeat a value. By chance the last of them that do
    so without a break are r / (K - r + 1), and their variance is that of the negative hypergeometric distribution.
    """
    ends = np.flatnonzero(leaps)
    firsts = np.concatenate([[0], ends[:-1] + 1])[: len(ends)]
    beyond: dict[bool, list[float]] = {True: [], False: []}
    variances: dict[bool, list[float]] = {True: [], False: []}
    for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
        changes = end - first
        repeats = float(n_updates[first : end + 1].sum()) - changes - 1
        if changes and repeats:
            is_rise = bool(shown_w[end + 1] > shown_w[end])
            beyond[is_rise].append(float(n_updates[end]) - 1 - repeats / (changes + 1))
            variance = repeats * (repeats + changes + 1) * changes / ((changes + 1) ** 2 * (changes + 2))
            variances[is_rise].append(variance)
    if len(beyond[True]) < FEWEST_LATE:
        return np.zeros(len(leaps), dtype=np.bool_)
    of_rise, of_fall = (sum(own) / max(1, len(own)) for own in (beyond[True], beyond[False]))
    rise2, fall2 = (sum(own) / max(1, len(own)) ** 2 for own in (variances[True], variances[False]))
    late = leaps & (n_updates > 1)
    hidden = float((np.abs(np.diff(shown_w, append=shown_w[-1:])) * (n_updates - 1))[late].sum()) / 2
    is_late = of_rise > LATE_SIGMAS * rise2**0.5 and of_rise - of_fall > APART_SIGMAS * (rise2 + fall2) ** 0.5
    return late & (is_late and hidden > MOST_LATE * float(shown_w @ n_updates))


def _likely_updates(n_updates: Array) -> tuple[float, float, int]:
    """(for how many updates a value stands by chance at most, the share of updates that repeat one, their number).

    n_updates [runs]: for how many each value stood. The longest tells nothing of what is usual. With a share p of
    repeats, k equal values in a row are found n p^(k - 1) times in n updates.
    """
    usual = np.maximum(1.0, np.round(np.delete(n_updates, np.argmax(n_updates))))
    n_repeats = int((usual - 1).sum())
    repeats = float((n_repeats + 1) / (usual.sum() + 2))
    return 1 + float(np.log(BY_CHANCE / max(1.0, n_updates.sum())) / np.log(repeats)), repeats, n_repeats


def left_out_stretches_s(
    times_s: Array, kept: NDArray[np.bool_], update_period_s: float
) -> tuple[tuple[float, float], ...]:
    """Stretches of left-out readings that are longer than an update: the value before does not stand for so long.

    Short ones lie between values that bound what flowed; but where they are a notable share of all the time, nobody
    knows what did (a charger with a loose plug), and all of them are stretches.
    """
    at_s = times_s[kept]
    between = np.diff(np.flatnonzero(kept)) > 1
    runs_s = list(zip(at_s[:-1][between].tolist(), at_s[1:][between].tolist(), strict=True))
    # Of fewer readings than an update has, its value was read before or behind them.
    apart_s = float(np.median(np.diff(times_s))) if len(times_s) > 1 else 0.0
    unseen = [run for run in runs_s if run[1] - run[0] - apart_s > UNSEEN_UPDATES * update_period_s]
    unseen_s = sum(end_s - start_s - apart_s for start_s, end_s in unseen)
    is_much = len(at_s) > 1 and unseen_s > MOST_LEFT_OUT * float(at_s[-1] - at_s[0])
    return tuple(run for run in runs_s if run[1] - run[0] > 2 * update_period_s or (is_much and run in unseen))


def smallest_step(values: Array) -> float:
    """The smallest change from one reading to the next; 0 where nothing changed."""
    steps = np.abs(np.diff(values))
    return float(steps[steps > 0].min()) if (steps > 0).any() else 0.0


def renewed_readings(times_s: Array, shown: Array, update_period_s: float) -> NDArray[np.intp]:
    """Which readings to keep: new values, one an update where the value stands, and the ends.

    A repeated value says nothing new, and its short distance to the next one would feign a knowledge of when the power
    changed: the arithmetic takes the distance of readings for the time in which it may have. Where the gauge may have
    stood still, no repeated value is kept: what flowed is between the values on both sides.
    """
    kept = [0] if len(times_s) else []
    for run in _runs(times_s, shown, update_period_s):
        for i in range(max(run.first, 1), run.end):
            is_due = times_s[i] - times_s[kept[-1]] >= update_period_s and not run.is_unsure
            if i == run.first or is_due or i == len(times_s) - 1:
                kept.append(i)
    return np.asarray(kept, dtype=np.intp)
