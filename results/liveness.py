"""Whether a source lived while it was read: how often it renews its value, and where it stood still or showed 0 W.

Nothing that is switched on uses 0 J. A counter that stands still for more than a few of its own updates, while it moves
elsewhere, or a power sensor that shows 0 W between other readings, has either stopped or belongs to a part that was
switched off. Its readings alone cannot tell, so what may have flowed meanwhile is bounded:

    late      on resuming it counted what flowed meanwhile: nothing is missing, only when it flowed is not known
    known     another sensor of the same part says what flowed (one that shows 0 W says nothing)
    can rest  the part may be switched off while the machine runs: nothing, or up to what it used before and after
    else      between the lowest and the highest power that it showed elsewhere in the trace

What is bounded well enough for a window is filled in, and widens the uncertainty; else the window has no energy. How
often a counter renews its value is seen in its readings, never taken from a data sheet alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from results.living import Living
from results.records import PowerTrace
from results.renewal import COARSE_STEPS, MANY_TIMES, MULTIPLE_WITHIN, STAMP_S, Renewal, longest_shown_s

Array = NDArray[np.float64]

CAUGHT_UP = 0.8
"""Of the highest power around it: a step that holds at least so much of it brings what was late."""
MORE_THAN_LATE = 1.25
"""Of the lower power around it: a step that holds more may be of what flowed since it resumed, and the rest is lost."""
NEAR_UPDATES = 5
"""Over so many updates a counter's power is taken before and after a stand, or for as long as it lasted."""
STUCK_UPDATES = 12
"""A power that shows one value for so many may be stuck."""
FEWEST_ELSEWHERE = 20
"""Updates beside it, that tell how often it changes."""
FEWEST_OTHERS = 3
"""Values beside one that noise alone would change: so many, none of which stands for a twelfth as long."""
STUCK_BY_CHANCE = 1e-6
"""That a living sensor repeats itself so often."""
FINE_STEP = 1e-3
"""Of its value: noise alone changes a finer reading."""
HANGS = 0.9
"""Of the readings while a counter stands show one value: those at both ends may be of before and after."""
STEPS = (1.0, 2.0, 2.5, 5.0)
"""Times a power of ten: what sensors count by."""
QUIET_UPDATES, MOSTLY_QUIET = 2, 0.5
"""A value that stands for so many; a sensor that does so for so much of the time has no noise of its own steps."""
HIDDEN_MARGIN = 1.5
"""By so much a stand may have hidden more than the highest power shown, or less than the lowest."""
NOTHING_SHARE = 1e-3
"""Of what a sensor usually shows under load: a reading below is as good as 0 W."""
DIP_SHARE = 0.005
"""Of what it shows before and after: a part that stays on falls no lower for a moment,"""
DIP_BELOW_FLOOR = 0.2
"""where this is below so much of the lowest of its other readings."""
DIP_READINGS, MOSTLY_DIPS, LONGEST_DIP_READINGS = 2, 0.75, 10
"""A moment: so many readings in a row; where so many of the low runs are that short, up to the last of these."""
LIVING_READINGS, LIVING_VALUES, LIVING_STEPS = 5, 3, 3
"""So many readings in a row next to 0 W, of so many values, all above so many steps, are of a sensor that measures."""
STUCK_AGAINST = 5
"""Values shown elsewhere: a power sensor that shows fewer may rightly show one."""
UNREAD_INTERVALS = 3
"""Of the reading: over a longer distance nobody saw the counter count, and the power around says what is due."""
CONTRADICTED_SIGMAS = 2.0
"""A step that holds so much more than the sensor beside it is doubted as much as the sensor."""
MAX_POWER_W = 20e3
"""Of one component where its meter states no limit: more than any machine that is read here can draw."""


@dataclass(frozen=True)
class Stand:
    """A stretch in which a source stood still, or showed 0 W, and what may have flowed in it."""

    start_s: float
    end_s: float
    shown_j: float
    """What the source itself showed for it, at its end."""
    low_j: float
    high_j: float
    filled_j: float
    """What is taken for it, between the two."""
    variance_j2: float
    basis: Literal["beside", "rest", "around", "unread"]
    """What it is known by: another sensor, that the part may rest, the power elsewhere in the trace.

    unread: nobody read it meanwhile, and what it counted is less than the power around it.
    """
    told: str | None = None
    """What the source did, where it neither stood still nor showed 0 W."""

    def within(self, edges: Array) -> float:
        """How much of it lies in the intervals [n, 2], of its length."""
        inside_s = np.minimum(edges[:, 1], self.end_s) - np.maximum(edges[:, 0], self.start_s)
        return float(np.maximum(inside_s, 0.0).sum()) / (self.end_s - self.start_s)


class Judged(NamedTuple):
    """A trace's values with what stood still filled in by the middle of its bounds, and the stands themselves."""

    values: Array
    stands: tuple[Stand, ...]


def at_rest(trace: PowerTrace) -> bool:
    """Whether it never moved, or never showed anything but 0 W, in all of its readings."""
    if not len(trace.values) or trace.method in ("modelled", "relative gauge"):
        return False
    return bool(np.ptp(trace.values) == 0) if trace.kind == "counter" else not np.any(trace.values)


class Beside(NamedTuple):
    """Another sensor of the same part: its power, and the energy since its first reading."""

    times_s: Array
    energy_j: Array
    read_s: Array
    watts: Array
    """As it showed them, at these times."""
    relative_accuracy: float
    gap_s: float
    """Readings further apart than this say nothing of what is between."""
    late_s: float
    """How late it may show a change of the power."""
    resolution: float
    variance_j2: Callable[[Array], float] | None = None
    """What its readings leave open of intervals [n, 2], besides."""

    def between(self, start_s: float, end_s: float) -> tuple[float, float] | None:
        """(joules, standard uncertainty); None where it does not know, or shows 0 W, which confirms nothing."""
        if start_s < self.times_s[0] or end_s > self.times_s[-1]:
            return None
        first, last = np.searchsorted(self.read_s, [start_s, end_s])
        near = slice(max(int(first) - 1, 0), int(last) + 1)
        if np.diff(self.read_s[near], append=end_s).max() > self.gap_s:
            return None
        # 0 W, or one value while it shows others elsewhere, are of a sensor that has stopped too.
        shown_w = self.watts[near]
        if np.any(shown_w == 0) or self._is_stuck(near):
            return None
        if end_s - start_s >= STUCK_UPDATES * self.late_s and self._hangs(self.watts[first:last]):
            return None
        joules = float(np.diff(np.interp([start_s, end_s], self.times_s, self.energy_j))[0])
        change_w = float(np.ptp(shown_w))
        left_open_j2 = self.variance_j2(np.array([[start_s, end_s]])) if self.variance_j2 is not None else 0.0
        sigma_j = math.hypot(
            self.relative_accuracy * joules, change_w * self.late_s / math.sqrt(6), math.sqrt(left_open_j2)
        )
        return (joules, sigma_j) if joules > 0 else None

    def shares(self, at_s: Array) -> Array:
        """Of what flowed between the first and the last of these times [n], how much did from each to the next."""
        flowed_j = np.diff(np.interp(at_s, self.times_s, self.energy_j))
        return np.asarray(flowed_j / flowed_j.sum())

    def _hangs(self, shown_w: Array) -> bool:
        """Whether a sensor of fine steps moves no more than the counter did: their driver may hang."""
        usual_w = float(np.median(shown_w))
        return float(np.mean(shown_w == usual_w)) >= HANGS and is_fine(usual_w, self.resolution)

    def _is_stuck(self, near: slice) -> bool:
        """Whether it repeats a value in there for much longer than anywhere else."""
        begins = np.concatenate([[0], np.flatnonzero(np.diff(self.watts) != 0) + 1, [len(self.watts)]])
        n_shown = np.diff(np.clip(begins, near.start, near.stop))
        elsewhere = np.diff(begins)[n_shown == 0]
        return len(elsewhere) >= STUCK_AGAINST and bool(n_shown.max() > MANY_TIMES * max(elsewhere.max(), 1) + 1)


def judged_counter(trace: PowerTrace, shown_j: Array, renewal: Renewal, beside: Beside | None = None) -> Judged:
    """shown_j: what it counted since the first reading, wraps undone."""
    t = trace.times_s
    begins = np.concatenate([[0], np.flatnonzero(np.diff(shown_j) > 0) + 1])
    lasts = np.append(begins[1:] - 1, len(t) - 1)
    longest_s = longest_shown_s(t, shown_j, begins, renewal, trace.resolution)
    is_still = t[lasts] - t[begins] > longest_s + STAMP_S
    is_unread = ~is_still & _is_unread(trace, begins, longest_s)
    if len(begins) < 2 or not (is_still | is_unread).any():
        return Judged(shown_j, ())
    least_s = NEAR_UPDATES * max(renewal.period_s, trace.sample_interval_s)
    living = Living(t[begins], shown_j[begins], (is_still | is_unread)[:-1])
    peak_w = living.peak_w(least_s)
    filled_j: Array = np.zeros(len(t))
    stands: list[Stand] = []
    age_s = min(renewal.period_s, trace.sample_interval_s) / 2

    def fill(begin: int, end: int, step_j: float, stand: Stand) -> None:
        """As the sensor beside it shows the power, at times as old as the counter's values are; else at the end."""
        filled_j[end] -= step_j
        if beside is not None and stand.basis == "beside":
            filled_j[begin + 1 : end + 1] += stand.filled_j * beside.shares(t[begin : end + 1] - age_s)
        else:
            filled_j[end] += stand.filled_j
        stands.append(stand)

    for k in np.flatnonzero(is_still | is_unread).tolist():
        goes_on = k + 1 < len(begins)
        end = int(begins[k + 1]) if goes_on else len(t) - 1
        stretch_s = float(t[begins[k]]), float(t[end])
        step_j = float(shown_j[end] - shown_j[begins[k]])
        over_s = max(least_s, stretch_s[1] - stretch_s[0])
        # What was late may come with the renewals after it too, and is no power of theirs.
        behind = living.moving_after(k + 1) if goes_on else k
        near_w = [
            w
            for w in (living.before_w(k, over_s), living.after_w(behind, over_s) if goes_on else None)
            if w is not None
        ]
        # Less than its step: a counter that lives would show no more.
        seen_to_s = t[end] if is_unread[k] else t[lasts[k]]
        is_below_step = min(near_w, default=np.inf) * (seen_to_s - t[begins[k]]) <= 2 * trace.resolution
        late_w = living.late_w(k, peak_w) if goes_on else 0.0
        around_w = max(near_w, default=np.inf)
        is_late = late_w >= CAUGHT_UP * around_w
        if is_below_step or (is_late and late_w <= MORE_THAN_LATE * min(near_w)):
            continue
        if is_unread[k]:
            doubted = None if is_late or not near_w else _unread(stretch_s, step_j, late_w, near_w, beside)
            if doubted is not None:
                fill(int(begins[k]), end, step_j, doubted)
            continue
        if is_late and beside is None:
            # It may have counted all, or a part of something higher.
            burst_w = max(peak_w, step_j / float(t[end] - t[lasts[k]]))
            high_j = max(step_j, burst_w * (stretch_s[1] - stretch_s[0]))
            stand = Stand(*stretch_s, step_j, step_j, high_j, step_j, (high_j - step_j) ** 2 / 3, "around")
        else:
            stand = _bounded(stretch_s, step_j, peak_w, living.range_w(over_s), trace.can_rest, beside)
        # Its renewals lie anywhere between two readings, at both ends.
        seen_s = min(max(t[end] - t[lasts[k]], t[begins[k]] - t[max(begins[k] - 1, 0)]), max(renewal.period_s, STAMP_S))
        stand = replace(stand, variance_j2=stand.variance_j2 + (max(near_w, default=0.0) * float(seen_s)) ** 2 / 6)
        fill(int(begins[k]), end, step_j, stand)
    return Judged(shown_j + np.cumsum(filled_j), tuple(stands))


def _is_unread(trace: PowerTrace, begins: NDArray[np.intp], longest_s: Array) -> NDArray[np.bool_]:
    """Which values [n] end with a step whose readings are further apart than it shows one, and than it is read."""
    apart_s = np.diff(trace.times_s)
    if trace.sample_interval_s == 0:
        return np.zeros(len(begins), dtype=np.bool_)  # read at will, at edges only: it promised no reading between
    interval_s = max(trace.sample_interval_s, float(np.median(apart_s)))
    found = np.zeros(len(begins), dtype=np.bool_)
    if len(begins) > 1:
        widest_s = np.maximum.reduceat(apart_s[: begins[-1]], begins[:-1])
        found[:-1] = widest_s > np.maximum(UNREAD_INTERVALS * interval_s, longest_s[:-1] + STAMP_S)
    return found


def _unread(
    stretch_s: tuple[float, float], step_j: float, mean_w: float, near_w: Sequence[float], beside: Beside | None
) -> Stand | None:
    """A step over which nobody read the counter, that brought less than the power around it: it may have lost some.

    Between the power before and behind it need not have. None where the sensor beside it says that it lost nothing.
    """
    other = None if beside is None else beside.between(*stretch_s)
    if other is not None:
        due_j, sigma_j = other
        if step_j >= due_j - CONTRADICTED_SIGMAS * sigma_j:
            return None
        return Stand(*stretch_s, step_j, due_j - sigma_j, due_j + sigma_j, due_j, sigma_j**2, "beside")
    high_j = max(step_j, max(near_w) * (stretch_s[1] - stretch_s[0]))
    variance_j2 = (high_j - step_j) ** 2 / (12 if mean_w >= CAUGHT_UP * min(near_w) else 3)
    return Stand(*stretch_s, step_j, step_j, high_j, step_j, variance_j2, "unread")


def judged_power(trace: PowerTrace) -> Judged:
    """Readings of exactly 0 W between others are filled in from those around them; what is stuck is bounded."""
    zero = _judged_zeros(trace)
    return Judged(zero.values, zero.stands + tuple(_stuck(trace, i, j) for i, j in stuck_runs(trace)))


def stuck_runs(trace: PowerTrace) -> list[tuple[int, int]]:
    """(first, last) readings of stretches over which a power that changes elsewhere is the same to the last digit.

    How often it turns elsewhere, up and down again, says how likely that is: of three readings that noise alone makes
    differ, the middle is the highest or the lowest in two of three cases; on a ramp or at a step it never is. A sensor
    of coarse steps repeats itself, and rests at its lowest value: it is stuck only above that, where it changes by
    several of its steps elsewhere, and from reading to reading. Where there is too little elsewhere to tell, a fine
    reading is stuck that stands for many times as long as the others.
    """
    t, watts = trace.times_s, trace.values
    period_s = max(trace.update_period_s, trace.sample_interval_s)
    if trace.kind != "power" or trace.method != "integrated power" or period_s <= 0 or len(t) < 2:
        return []
    changed = np.flatnonzero(np.diff(watts) != 0) + 1
    begins, lasts = np.append(0, changed), np.append(changed - 1, len(t) - 1)
    lasting = (t[lasts] - t[begins]) / period_s
    is_long = lasting >= STUCK_UPDATES
    n_elsewhere = float(t[-1] - t[0]) / period_s - float(lasting[is_long].sum())
    change_w = np.diff(watts[begins])
    n_turns = 1.5 * float((change_w[1:] * change_w[:-1] < 0).sum())
    often = max(0.0, n_turns - 2 * math.sqrt(n_turns)) / max(n_elsewhere, n_turns, 1.0)
    # Where every value stands for long, the load does: nothing shows that it should move.
    if not is_long.any() or is_long.all():
        return []
    if n_elsewhere < FEWEST_ELSEWHERE or often <= 0:
        # Noise alone changes a fine reading, however few others there are.
        usual = max(1.0, float(np.median(lasting[~is_long])))
        far = is_long & (lasting >= STUCK_UPDATES * usual) & (np.count_nonzero(~is_long) >= FEWEST_OTHERS)
        runs = zip(begins[far].tolist(), lasts[far].tolist(), strict=True)
        return [(i, j) for i, j in runs if watts[i] != 0 and is_fine(float(watts[i]), trace.resolution)]
    steps_w = np.abs(change_w)
    step_w, usual_w = _step_w(steps_w, trace.resolution), float(np.median(steps_w))
    # Between changes of the load it repeats itself anyway: under a power cap for as long as that holds.
    is_quiet = float(lasting[~is_long & (lasting >= QUIET_UPDATES)].sum()) >= MOSTLY_QUIET * n_elsewhere
    lowest_w = float(watts[~np.repeat(is_long, lasts - begins + 1)].min())
    found = []
    for i, j, n in zip(begins[is_long].tolist(), lasts[is_long].tolist(), lasting[is_long].tolist(), strict=True):
        by_chance = n * math.log1p(-often) if often < 1 else -math.inf
        has_fine_steps = step_w <= FINE_STEP * abs(watts[i])
        may_rest = not has_fine_steps and (is_quiet or watts[i] <= lowest_w + step_w or usual_w < 3 * step_w)
        if watts[i] != 0 and by_chance < math.log(STUCK_BY_CHANCE) and not may_rest:
            found.append((i, j))
    return found


def is_fine(watts: float, stated_w: float) -> bool:
    """Whether noise alone changes this reading of a sensor: the largest step that it is a multiple of is small. What a
    driver states may be only its unit."""
    top = math.floor(math.log10(abs(watts)))
    steps_w = [stated_w, *(step * 10.0**k for k in range(top - 5, top + 1) for step in STEPS)]
    coarsest_w = max(w for w in steps_w if w == stated_w or abs(watts / w - round(watts / w)) < 1e-6)
    return coarsest_w <= FINE_STEP * abs(watts)


def _step_w(steps_w: Array, stated_w: float) -> float:
    """Of a sensor: the smallest that was seen, where all are multiples of it or none is stated."""
    least_w = float(steps_w.min())
    multiples = steps_w / least_w
    is_coarse = len(steps_w) >= COARSE_STEPS and np.all(np.abs(multiples - np.round(multiples)) <= MULTIPLE_WITHIN)
    return least_w if is_coarse or stated_w <= 0 else min(stated_w, least_w)


def _stuck(trace: PowerTrace, i: int, j: int) -> Stand:
    """What it shows is taken, and may be off by as much as the readings elsewhere differ from it."""
    length_s = float(trace.times_s[j] - trace.times_s[i])
    shown_w = float(trace.values[i])
    shown_j, low_j, high_j = (w * length_s for w in (shown_w, float(trace.values.min()), float(trace.values.max())))
    off_j = max(high_j - shown_j, shown_j - low_j)
    start_s, end_s = float(trace.times_s[i]), float(trace.times_s[j])
    return Stand(start_s, end_s, shown_j, low_j, high_j, shown_j, off_j**2 / 3, "around")


def shows_nothing(trace: PowerTrace) -> NDArray[np.bool_]:
    """Which readings of a power are 0 W, or next to it as those of a sensor that failed for a moment.

    True idleness lasts, and is not below a thousandth of the load unless the readings change as a living sensor's do.
    """
    watts = trace.values
    found = np.asarray(watts == 0)
    high_w = watts[watts > DIP_SHARE * watts.max(initial=0.0)]
    if trace.kind != "power" or not len(high_w):
        return found
    usual_w = float(np.median(high_w))
    is_low = watts <= DIP_SHARE * usual_w
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_low.astype(np.int8), [0]]))).reshape(-1, 2)
    n_readings = np.diff(edges, axis=1)[:, 0] / max(1.0, trace.update_period_s / (trace.sample_interval_s or math.inf))
    are_dips = len(edges) > 0 and float(np.mean(n_readings <= DIP_READINGS)) >= MOSTLY_DIPS
    n_short = LONGEST_DIP_READINGS if are_dips else DIP_READINGS
    is_floor = np.ones(len(watts), dtype=np.bool_)
    for i, j in edges[n_readings <= n_short].tolist():
        is_floor[i:j] = False
    floor_w = float(watts[is_floor].min(initial=math.inf))
    for i, j in edges.tolist():
        highest_w = float(watts[i:j].max())
        around_w = min(watts[i - 1] if i else math.inf, watts[j] if j < len(watts) else math.inf)
        is_dip = not is_floor[i] and highest_w <= min(DIP_SHARE * around_w, DIP_BELOW_FLOOR * floor_w)
        found[i:j] |= is_dip or (highest_w <= NOTHING_SHARE * usual_w and not _measures(watts[i:j], trace.resolution))
    return found


def _measures(watts: Array, step_w: float) -> bool:
    n_values = len(np.unique(watts))
    return len(watts) >= LIVING_READINGS and n_values >= LIVING_VALUES and float(watts.min()) >= LIVING_STEPS * step_w


def _judged_zeros(trace: PowerTrace) -> Judged:
    t, watts = trace.times_s, trace.values
    is_zero = shows_nothing(trace)
    if trace.method in ("modelled", "relative gauge") or trace.can_rest or not is_zero.any() or is_zero.all():
        return Judged(watts, ())
    shown_w = watts[~is_zero]
    if float(shown_w.max()) <= 2 * trace.resolution:
        return Judged(watts, ())
    filled_w = np.where(is_zero, np.interp(t, t[~is_zero], shown_w), watts)
    filled_j = np.concatenate([[0.0], np.cumsum((filled_w[:-1] + filled_w[1:]) / 2 * np.diff(t))])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_zero.astype(np.int8), [0]])))
    stands = []
    for first, behind in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        i, j = max(first - 1, 0), min(behind, len(t) - 1)
        length_s = float(t[j] - t[i])
        low_j, high_j = float(shown_w.min()) * length_s, float(shown_w.max()) * length_s
        between_j = float(filled_j[j] - filled_j[i])
        variance_j2 = (high_j - low_j) ** 2 / 12
        stands.append(Stand(float(t[i]), float(t[j]), 0.0, low_j, high_j, between_j, variance_j2, "around"))
    return Judged(filled_w, tuple(stands))


def _bounded(
    stretch_s: Sequence[float],
    step_j: float,
    peak_w: float,
    range_w: tuple[float, float] | None,
    can_rest: bool,
    beside: Beside | None,
) -> Stand:
    start_s, end_s = stretch_s
    length_s = end_s - start_s
    other = None if beside is None else beside.between(start_s, end_s)
    if other is not None:
        other_j, sigma_j = other
        if step_j > other_j + CONTRADICTED_SIGMAS * sigma_j:
            # One of the two is wrong, and nothing says which.
            variance_j2 = (step_j - other_j) ** 2 / 12 + sigma_j**2
            return Stand(start_s, end_s, step_j, other_j, step_j, (step_j + other_j) / 2, variance_j2, "around")
        filled_j = max(step_j, other_j)
        return Stand(start_s, end_s, step_j, filled_j - sigma_j, filled_j + sigma_j, filled_j, sigma_j**2, "beside")
    if can_rest:
        # Rest is the likelier, and the error is one-sided.
        high_j = max(step_j, peak_w * length_s)
        return Stand(start_s, end_s, step_j, step_j, high_j, step_j, (high_j - step_j) ** 2 / 3, "rest")
    if range_w is None:
        return Stand(start_s, end_s, step_j, step_j, math.inf, step_j, math.inf, "around")
    low_j, high_j = (max(step_j, w * length_s) for w in range_w)
    filled_j = (low_j + high_j) / 2
    # What was hidden may be more, or less, than what was ever shown.
    low_j, high_j = max(step_j, low_j / HIDDEN_MARGIN), max(high_j, peak_w * length_s) * HIDDEN_MARGIN
    return Stand(start_s, end_s, step_j, low_j, high_j, filled_j, (high_j - low_j) ** 2 / 12, "around")
