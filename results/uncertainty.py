"""How well readings determine an energy: variances of what the meter did not show, without its gain.

Standard uncertainty (one sigma; dP is a change of power, w the time in which it may have happened):

    power, held   dP dt / sqrt(12) a change: anywhere between two renewals dt apart; dP w / sqrt(6) for when these were,
                  w the time between two readings; on a ramp, which a line follows, only the latter;
                  |P1 - P0| u / 3 from the window's start to its end: an instant, or the mean of the update u before it;
                  s d a value that was shown for one reading or update d only: see scatter
    means alone   a gauge that shows a value between two levels at each step shows means: a tenth of that variance, but
                  all of it within the update at an edge; and a quarter of an update, between the two, to its edges
    no update     means of known stretches: their energy is known, but how much of it lies before an edge inside one is
                  not. As of a counter that is read where they begin
    counter       P w / sqrt(12) an edge: the age of its value; the value's step: q / sqrt(12);
                  dP dt f (1 - f): an edge at fraction f of the distance dt between two readings;
                  s dt sqrt(f (1 - f) + w / 2 dt): what varies from step to step is on either side of the edge;
                  dP (w / 2) (w / dt) / sqrt(3) a marked edge of several: the power may have changed in the step before

**Scatter** s: what comes and goes faster than it is read was met by chance. Its variance at a value x between its
neighbours is (x - x_before)(x - x_after) on average: the variance where values are independent, the square of a lone
spike, 0 beside a step of the power, less on a ramp.

Terms are added in quadrature, but those of changes at the edges linearly: the power changes at every phase edge, in the
same direction, and so does the error. Elsewhere changes fall anywhere between readings, each for itself, where readings
come at random times (`devices.sampler`): no load stays in step with them, and one in step with a grid scatters.

On a grid, and that of a gauge's renewals is one, what is alike errs alike:

    in step       readings that come back to the same values some readings later: as many errors of one kind together
    a pattern     that was seen over and over is known (`results.regular`): how far its mean over the phase is off that
                  of the readings, and where its edges hide; what it explains was not met by chance
    few changes   of a gauge, too few for a pattern: twice the variance, a rise and its fall may err alike

A load in step with every single reading of a grid looks steady, and one nearly so looks slow: no reading can tell. So
does one that comes and goes within every mean of a stretch alike: what of it lies before an edge is not told.

**Parts of a total** (rails, packages, a processor and its memory) are felt by one load and often read at one time, so
they err alike: rho s1 s2 joins each way, rho the correlation of what their powers change by, never below 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from results.records import PowerTrace, TraceKind
from results.regular import pattern

Array = NDArray[np.float64]

ONCE_FACTOR = 1.5
"""A value that stood for less than this many readings or updates was shown once."""
LEAST_STEPS = 3
"""Steps with a value between two levels, from which a gauge of means is known."""
MEANS_SHARE = 0.1
"""Of the variance of instants: means meet all that happens, and only their stamps err."""
FEWEST_LAGS = 2
MARK_TOLERANCE_S = 1e-3
"""A reading this close to an edge was taken for it: a mark follows its phase edge by microseconds."""
IN_STEP = 0.5
"""Correlation of the readings with themselves some readings later, from which a load is in step with them."""
UNEVEN = 0.25
"""Of the distance of two readings: half of the distances differ by more where they are drawn at random."""
FEW_CHANGES = 1.5, 3.5
"""Of a gauge: more than one, and below one and a half periods. By the sum of their squares, squared, over that of their
fourth powers."""
REGULAR = 0.7
"""Of the variance of the readings: explained by a pattern that they repeat."""
MOST_LOOKED_AT = 10
"""Intervals in which a pattern is looked for: the longest."""
OFTEN_ONCE = 0.4
"""Of the values that stick out, shown once: by chance half of those of an even load are met again by the next."""
NEAR_STEPS = 5
"""Steps of a counter on either side of an edge that tell how they scatter."""
CELL = 2.0
"""Readings, or updates, of the slowest part: over so long the powers of parts are compared."""
MOST_CELLS = 100_000
"""Of a window: a long one has longer cells."""


class PartRead(NamedTuple):
    """A part's energy since its first reading, how often it is known, and what its readings leave open.

    Only of what is read now and then: what was computed has no time between two readings, and errs in no step.
    """

    times_s: Array
    energy_j: Array
    apart_s: float
    variance_j2: float


def shared_variance_j2(parts: Sequence[PartRead], edges: Array) -> float:
    """What the variance of a total has beyond the sum of its parts', because these change together."""
    if len(parts) < 2:
        return 0.0
    whole_s = float(edges.max() - edges.min())
    cell_s = max(CELL * max(part.apart_s for part in parts), whole_s / MOST_CELLS)
    low_s = max(float(edges.min()) - cell_s, *(float(part.times_s[0]) for part in parts))
    high_s = min(float(edges.max()) + cell_s, *(float(part.times_s[-1]) for part in parts))
    sigma_j = np.sqrt([part.variance_j2 for part in parts])
    at_s = low_s + cell_s * np.arange(int((high_s - low_s) / cell_s) + 1)
    if len(at_s) < 4:
        return float(sigma_j.sum() ** 2 - (sigma_j**2).sum())
    change = np.stack([np.diff(np.interp(at_s, part.times_s, part.energy_j), 2) for part in parts])
    size = np.sqrt((change**2).sum(axis=1))
    alike = np.clip((change @ change.T) / np.maximum(np.outer(size, size), 1e-300), 0.0, 1.0)
    return float(sigma_j @ alike @ sigma_j - (np.diag(alike) * sigma_j**2).sum())


class PowerErrors:
    """What readings of power leave open of any window: what is the same for all windows is worked out once."""

    def __init__(self, trace: PowerTrace) -> None:
        """trace: what its readings stand for (`results.cumulative.power_samples`), one a renewal."""
        t, v, update_s = trace.times_s, trace.values, trace.update_period_s
        self._trace = trace
        self._is_at_random = _is_read_at_random(trace)
        seen_s = min(update_s, trace.sample_interval_s or update_s)
        placed_j2 = (sudden_steps_w(trace) * np.diff(t)) ** 2 + 2 * (np.diff(v) * seen_s) ** 2
        self._change_j = np.sqrt(placed_j2 / 12)
        self._sum_j = np.concatenate([[0.0], np.cumsum(self._change_j)])
        self._sum_j2 = np.concatenate([[0.0], np.cumsum(self._change_j**2)])
        self._shown = _shown_values(trace)

    def variance_j2(self, edges: Array) -> float:
        """Of the changes that the intervals [n, 2] may have felt, and of the reading's step over the whole.

        What lies within a third of an update of an edge, or within the update of a mean, may be of either side.
        """
        trace, sum_j, sum_j2 = self._trace, self._sum_j, self._sum_j2
        t, v, update_s = trace.times_s, trace.values, trace.update_period_s
        whole = np.clip(np.searchsorted(t, [edges.min(), edges.max()]), 0, len(t) - 1)
        is_of_means = update_s > 0 and shows_means(v[max(whole[0] - 1, 0) : whole[1] + 1])
        # A mean is of the update before it, and stands a quarter of one early.
        either_side_s = update_s * (3 / 4 if is_of_means else 1 / 3)
        first = np.clip(np.searchsorted(t, edges - either_side_s, side="right") - 1, 0, len(t) - 1)
        last = np.clip(np.searchsorted(t, edges + either_side_s, side="left"), 0, len(t) - 1)
        at_edges_j, at_edges_j2 = (sum_j[last] - sum_j[first]).sum(), (sum_j2[last] - sum_j2[first]).sum()
        inside_j2 = max(0.0, float((sum_j2[last[:, 1]] - sum_j2[first[:, 0]]).sum() - at_edges_j2))
        scatter_j2 = self._scatter_j2(first[:, 0], last[:, 1])
        # How late changes show between two readings, beyond what is known: a third of an update, either way.
        late_s = update_s / (4 if is_of_means else 3)
        late_j = float((v[last[:, 1]] - v[first[:, 0]]).sum()) * late_s
        total_s = float((edges[:, 1] - edges[:, 0]).sum())
        longest = np.argsort(first[:, 0] - last[:, 1])[:MOST_LOOKED_AT]
        inside = list(zip(first[longest, 0].tolist(), last[longest, 1].tolist(), strict=True))
        if is_of_means:
            # Means meet every phase of a pattern.
            alike = MEANS_SHARE * max(_returning(v[i : j + 1]) for i, j in inside)
            changes, scatter = alike, alike
        elif self._is_at_random:
            changes, scatter = 1.0, 1.0
        else:
            found = [_in_step(trace.kind, t[i : j + 1], v[i : j + 1], self._change_j[i:j]) for i, j in inside]
            changes, scatter = (max(factors) for factors in zip(*found, strict=True))
        varies_j2 = changes * inside_j2 + scatter * scatter_j2
        return varies_j2 + late_j**2 + float(at_edges_j) ** 2 + (trace.resolution * total_s) ** 2 / 12

    def _scatter_j2(self, first: NDArray[np.intp], last: NDArray[np.intp]) -> float:
        """The scatter of values that were shown once, between readings first and last, beyond what their changes count.

        From n such values it is known as their number is: up to (1 + sqrt(n))^2 / n of what was seen (Gehrels 1986,
        eq. 7).
        """
        low, high = int(first.min()), int(last.max())
        t, v, known = self._trace.times_s, self._trace.values, self._shown
        # Of readings from `low` to `high` those that an interval holds: behind its first and up to its last.
        n = high - low + 2
        is_inside = np.cumsum(np.bincount(first + 1 - low, minlength=n) - np.bincount(last + 1 - low, minlength=n)) > 0
        near = slice(*np.searchsorted(known.begins[1:-1], [low, high], side="right"))
        shown = known.begins[1:-1][near]
        inside = is_inside[shown - low] & known.once[near]
        if not inside.any():
            return 0.0
        before, after = known.begins[:-2][near][inside], known.begins[2:][near][inside]
        shown, by_chance = shown[inside], known.by_chance[near][inside]
        shown_s = t[after] - t[shown]
        if self._is_at_random:
            # Close readings differ and distant ones are alike where a load is nearly as fast: no distance is typical.
            shown_s = np.full(len(shown), np.sqrt(np.mean(np.diff(t[low : high + 1]) ** 2)))
        found_j2 = by_chance * (v[shown] - v[before]) * (v[shown] - v[after]) * shown_s**2
        counted_j2 = self._change_j[shown - 1] ** 2 + self._change_j[after - 1] ** 2
        stands_out = found_j2 > 0
        n_once = int(stands_out.sum())
        if n_once == 0:
            return 0.0
        at_most_j2 = float(found_j2.sum()) * float((1 + np.sqrt(n_once)) ** 2) / n_once
        return max(0.0, at_most_j2 - float(counted_j2[stands_out].sum()))


class _Shown(NamedTuple):
    """The values that a trace showed one after the other."""

    begins: NDArray[np.intp]
    """The first reading of each [n]."""
    once: NDArray[np.bool_]
    """Of all but the first and the last [n - 2]: whether it was shown for one reading, or update, only."""
    by_chance: Array
    """Of the same: how much of what sticks out in its direction was met by chance."""


def _shown_values(trace: PowerTrace) -> _Shown:
    t, v = trace.times_s, trace.values
    begins = np.flatnonzero(np.concatenate([[True], np.diff(v) != 0]))
    if len(begins) < 3:
        return _Shown(np.zeros(2, dtype=np.intp), np.zeros(0, dtype=np.bool_), np.zeros(0))
    before, shown, after = begins[:-2], begins[1:-1], begins[2:]
    once = after - shown == 1
    if trace.update_period_s > 0:
        once = t[after] - t[shown] < ONCE_FACTOR * max(trace.update_period_s, trace.sample_interval_s)
    sticks_out_w2 = np.maximum((v[shown] - v[before]) * (v[shown] - v[after]), 0.0)
    # Where most peaks, or dips, are seen for longer, one that is shown once was not met by chance.
    by_chance = np.ones(len(shown))
    for is_one in (v[shown] > v[before], v[shown] < v[before]):
        share = float(sticks_out_w2[is_one & once].sum()) / max(float(sticks_out_w2[is_one].sum()), 1e-300)
        by_chance[is_one] = min(share / OFTEN_ONCE, 1.0)
    return _Shown(begins, once, by_chance)


def sudden_steps_w(trace: PowerTrace) -> Array:
    """By how much each change [n - 1] is steeper than its neighbours: on a ramp, which a line follows, none is."""
    change_w: Array = np.diff(trace.values)
    if len(change_w) < 3:
        return np.asarray(np.abs(change_w))
    # Renewals are as far apart as each other, however well their times are known.
    apart_s = np.diff(trace.times_s) if _is_read_at_random(trace) else np.ones(len(change_w))
    slope = change_w / apart_s
    before, after = np.roll(slope, 1), np.roll(slope, -1)
    before[0], after[-1] = 0.0, 0.0
    on_a_ramp = (np.sign(before) == np.sign(slope)) & (np.sign(after) == np.sign(slope))
    ramp_w = np.where(on_a_ramp, np.minimum(np.abs(before), np.abs(after)) * apart_s, 0.0)
    return np.asarray(np.maximum(np.abs(change_w) - ramp_w, 0.0))


def _is_read_at_random(trace: PowerTrace) -> bool:
    """Whether readings come at distances so uneven that no load stays in step with them, and show what is then.

    Each distance moves the load's phase anew: where distances differ by 0.29 of their mean, as `devices.sampler` draws
    them, the place of an edge between two readings is forgotten to 4 % after two of them.
    """
    if 2 * trace.update_period_s > trace.sample_interval_s or len(trace.times_s) < 3:
        return False
    low_s, middle_s, high_s = np.quantile(np.diff(trace.times_s), (0.25, 0.5, 0.75))
    return bool(high_s - low_s > UNEVEN * middle_s)


def shows_means(watts: Array) -> bool:
    """Whether the gauge shows means of its updates: between two levels it shows one value that is neither.

    Of instants there is none, but by chance. Then what a step hides between two updates is not lost.
    """
    if len(watts) < 5:
        return False
    alike = 0.02 * float(np.ptp(watts))
    change_w = np.diff(watts)
    flat = np.abs(change_w) <= alike
    jumps = flat[:-2] & ~flat[1:-1] & flat[2:]
    both = change_w[1:-2] * change_w[2:-1] > 0
    between = flat[:-3] & ~flat[1:-2] & ~flat[2:-1] & flat[3:] & both
    n_between, n_jumps = int(between.sum()), int(jumps.sum())
    return n_between >= LEAST_STEPS and n_between > 3 * n_jumps


def _in_step(kind: TraceKind, times_s: Array, watts: Array, change_j: Array) -> tuple[float, float]:
    """How much more readings that come back to the same values err than if each change fell anywhere for itself.

    (of their changes, of their scatter). As readings that are alike, one for one, err alike. Of a pattern that was seen
    over and over it is known better what they err, and what it explains was not met by chance. A gauge's few changes
    show no pattern, but a load that rises and falls alike makes both err alike.
    """
    alike = _returning(watts)
    alone_j2 = float((change_j**2).sum())
    found = pattern(watts) if alone_j2 > 0 else None
    if found is None or found.share < REGULAR:
        n_changes = alone_j2**2 / max(float((change_j**4).sum()), 1e-300)
        if kind == "held" and FEW_CHANGES[0] < n_changes < FEW_CHANGES[1]:
            alike = max(alike, 2.0)
        return alike, alike
    length_s = float(times_s[-1] - times_s[0])
    # A gauge's may be that of a load about as fast as its renewals, which has more edges than are seen.
    at_most_j2 = (2.0 if kind == "held" else 1.0) * float(change_j.sum()) ** 2
    pattern_j2 = min(length_s**2 * found.off_w2, at_most_j2)
    drifting = max(1.0, pattern_j2 / alone_j2 + 1.0 - found.share)
    if kind != "held" and alike > 1.0:
        drifting = min(alike, drifting)
    return drifting, 1.0 - found.share


def _returning(watts: Array) -> float:
    """How many errors of one kind come together, where the load alternates in step with the readings.

    Each period of a load that returns after a whole number of readings is met alike, and so is its error: 1 plus twice
    the correlation at the first such lag, and at its multiples.
    """
    n = len(watts)
    if n < 3 * FEWEST_LAGS or float(np.ptp(watts)) == 0:
        return 1.0
    x = watts - watts.mean()
    spectrum = np.fft.rfft(x, 2 * n)
    shared = np.fft.irfft(spectrum * np.conj(spectrum), 2 * n)[: n // 2]
    correlation = shared / shared[0] * n / (n - np.arange(len(shared)))
    # It must turn first: a slow change is like itself at any short lag.
    turned = np.flatnonzero(correlation < 0)
    if not len(turned):
        return 1.0
    lag = int(turned[0]) + int(np.argmax(correlation[turned[0] :]))
    if lag < FEWEST_LAGS or correlation[lag] < IN_STEP:
        return 1.0
    first = int(turned[0]) + int(np.argmax(correlation[turned[0] :] >= IN_STEP * correlation[lag]))
    at_multiples = correlation[first :: max(first, 1)]
    n_alike = 1 + np.arange(1, len(at_multiples) + 1)
    found: float = 1 + 2 * float((np.maximum(at_multiples, 0.0) * (1 - (n_alike - 1) * first / n)).sum())
    return max(1.0, found)


class Scatter:
    """Variance of means that follow each other, from what sticks out between two neighbours."""

    def __init__(self, watts: Array) -> None:
        self._n = len(watts)
        self._sum_w2 = np.concatenate([[0.0], np.cumsum((watts[1:-1] - watts[:-2]) * (watts[1:-1] - watts[2:]))])

    def near_w2(self, i: NDArray[np.intp]) -> Array:
        """Around the i-th of them."""
        n = self._n
        if n < 3:
            return np.zeros(len(i))
        low, high = np.maximum(i - 1 - NEAR_STEPS, 0), np.minimum(i + NEAR_STEPS, n - 2)
        return np.asarray(np.maximum((self._sum_w2[high] - self._sum_w2[low]) / (high - low), 0.0))


def _marked_j(times_s: Array, watts: Array, within_s: Array) -> Array:
    """By how much the energy at each reading [m] errs, if an edge was marked by it, for the power since its renewal.

    That of the step before is taken for it. Where requests follow each other within a renewal or two, this step has the
    rest of one, the pause and nothing of the next: then the power changed in it by as much as it differs from the step
    before, in the same direction at each such edge. A step shorter than a renewal shows what flowed in a whole one, or
    nothing: of its power nothing is known.
    """
    share = np.minimum(within_s[1:] / np.diff(times_s), 1.0)
    unlike_w = np.where(share < 1.0, np.abs(np.diff(watts, prepend=watts[:1])), watts)
    return np.concatenate([[0.0], within_s[1:] / 2 * share * unlike_w])


class CounterErrors:
    """What the readings of a counter leave open of any window: what is the same for all windows is worked out once."""

    def __init__(self, times_s: Array, watts: Array, renewed_within_s: Array, aged_j: Array, step_j: float) -> None:
        """Of its readings [m]; watts: of the steps between them [m - 1]."""
        self._times_s, self._watts, self._within_s, self._aged_j = times_s, watts, renewed_within_s, aged_j
        self._step_j = step_j
        self._scatter = Scatter(watts)
        self._marked_j = _marked_j(times_s, watts, renewed_within_s)

    def variance_j2(self, edges: Array) -> float:
        """Of the edges [n, 2] of the intervals, between the readings.

        The ages of two readings may be alike, where readings and renewals are in step: their errors do not average
        away.
        """
        times_s, watts, aged_j = self._times_s, self._watts, self._aged_j
        at_s = edges.reshape(-1)
        i = np.minimum(np.maximum(times_s.searchsorted(at_s, side="right") - 1, 0), len(watts) - 1)
        dt = times_s[i + 1] - times_s[i]
        f = np.minimum(np.maximum((at_s - times_s[i]) / dt, 0.0), 1.0)
        age_j2 = ((1 - f) * aged_j[i] + f * aged_j[i + 1]) ** 2
        interpolated_j = self._change_near_w(i, f) * dt * f * (1 - f)
        either_side = np.minimum(f * (1 - f) + self._within_s[i] / (2 * dt), 0.25)
        scatter_j2 = self._scatter.near_w2(i) * dt**2 * either_side
        alike_j2 = interpolated_j.sum() ** 2
        if len(edges) > 1:
            # Of one interval it is in the age.
            behind = np.minimum(times_s.searchsorted(at_s), len(times_s) - 1)
            is_marked = (times_s[behind] >= at_s) & (times_s[behind] - at_s < MARK_TOLERANCE_S)
            alike_j2 += self._marked_j[behind][is_marked].sum() ** 2 / 3
        return float((age_j2 + scatter_j2 + self._step_j**2 / 12).sum() + alike_j2)

    def _change_near_w(self, i: NDArray[np.intp], f: Array) -> Array:
        """By how much the power may have changed within the i-th step, which an edge cuts at f."""
        watts = self._watts
        before_w, own_w, after_w = watts[np.maximum(i - 1, 0)], watts[i], watts[np.minimum(i + 1, len(watts) - 1)]
        highest_w = np.maximum(np.maximum(before_w, own_w), after_w)
        return np.asarray(highest_w - np.minimum(np.minimum(before_w, own_w), after_w))


class MeanErrors(CounterErrors):
    """What means of known stretches leave open of any window: the stretches that its edges cut, and the mean's step.

    Of the first stretch nobody saw the level before, of the last none behind. A step of D at u of the first moves its
    mean by u D off the level behind, and D (min(f, u) - f u) across an edge at f: no more than that mean is off, times
    1 - f. Nor is D more than all that was seen of the power. So too of the last, the other way round.
    """

    def __init__(self, times_s: Array, watts: Array, step_w: float) -> None:
        """times_s: where the stretches begin, and where the last ends [m]; watts: their means [m - 1]."""
        exact = np.zeros(len(times_s))
        super().__init__(times_s, watts, exact, exact, 0.0)
        self._mean_step_w, self._seen_w = step_w, float(np.ptp(watts))

    def variance_j2(self, edges: Array) -> float:
        total_s = float((edges[:, 1] - edges[:, 0]).sum())
        return super().variance_j2(edges) + (self._mean_step_w * total_s) ** 2 / 12

    def _change_near_w(self, i: NDArray[np.intp], f: Array) -> Array:
        change_w = super()._change_near_w(i, f)
        is_first, is_last = i == 0, i == len(self._watts) - 1
        before = np.where(is_first, f, np.where(is_last, 1 - f, 1.0))
        return np.where(is_first | is_last, np.minimum(change_w / np.maximum(before, 1e-9), self._seen_w), change_w)
