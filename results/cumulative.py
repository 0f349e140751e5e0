"""The cumulative energy C(t) of one component's readings; the energy of a window is C(t1) - C(t0).

    power    linear between what the readings stand for (trapezoid; the window's edges are interpolated)
    held     the same, of a gauge that is renewed; means without an update period stand until the next
    means    power whose readings are means of a time that is known: the same, each in the middle of that time
    counter  differences, unwrapped, linear between readings

A counter that renews its value every u seconds shows an old one: on average by half of the time w in which it was
renewed unseen, w = min(u, distance to the reading before). What flowed since is added, P w / 2, with P the power up to
that reading. A reading that repeats the value before it says nothing new and is left out; the ends of the trace are
reached with the power of the first and the last full step. Without this, a window that starts idle and ends busy would
always read low, by half an update. How long u is, and what is filled in where a source stood still: `results.liveness`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from results.liveness import MAX_POWER_W, Beside, Stand, judged_counter, judged_power
from results.records import PowerTrace
from results.renewal import observed_renewal
from results.spikes import without_impossible
from results.uncertainty import MARK_TOLERANCE_S

WRAP_POWER_FACTOR = 100.0
"""A step back is no wrap if it would mean more power than this many times the highest of the other steps."""
GAP_FACTOR = 5.0
"""Readings further apart than this many intervals are a gap."""
EDGE_S = 1e-6
OLDER = 1 / 4
"""Of an update, before its renewal: what a value stands for, of an instant or of the mean of the update before it."""

Array = NDArray[np.float64]


class UnresolvedError(Exception):
    """The trace does not determine the energy; the message is the reason a user reads."""


@dataclass(frozen=True)
class Cumulative:
    """Energy since the first reading at the readings' times, and the mean power of each segment between two."""

    times_s: Array
    energy_j: Array
    segment_w: Array
    renewed_within_s: Array
    """Counters: for each reading the time w within which its value was renewed; else 0."""
    aged_j: Array
    """Counters: standard uncertainty of each reading's energy, for its value is of an unknown age; else 0."""
    update_period_s: float
    """As the readings show it, where it is a counter's."""
    stands: tuple[Stand, ...] = ()
    watts: Array | None = None
    """Of power: at these times, linear between them, or standing until the next where `is_flat`."""
    is_flat: bool = False


def cumulative(trace: PowerTrace, beside: Beside | None = None) -> Cumulative:
    """Raises UnresolvedError where the readings make no curve: with the note of a model that cannot tell them (NaN)."""
    t, v = trace.times_s, trace.values
    name = f"{trace.meter} {trace.component}"
    if len(t) < 2:
        s = "s" if len(t) != 1 else ""
        raise UnresolvedError(f"{name}: {len(t)} reading{s}, at least 2 are needed{and_left_out(trace)}")
    finite = np.isfinite(t) & np.isfinite(v)
    if trace.method == "modelled" and trace.note and np.isnan(v).all():
        raise UnresolvedError(trace.note)  # it names the sheet and what that lacks; the reader knows no channel
    if not finite.all():
        raise UnresolvedError(f"{name}: {int((~finite).sum())} of {len(t)} readings are not finite numbers")
    dt = np.diff(t)
    if np.any(dt <= 0):
        raise UnresolvedError(f"{name}: time stamps do not increase (by {float(dt.min()):.6g} s at worst)")
    if trace.kind == "counter":
        shown_j = unwrapped(trace, name)
        if trace.method == "modelled":
            # A model that counts nothing further is no counter that renews late: its period is as it says.
            return _counter_curve(t, shown_j, trace.update_period_s, ())
        renewal = observed_renewal(t, shown_j, trace.update_period_s)
        values, stands = judged_counter(trace, shown_j, renewal, beside)
        return _counter_curve(t, values, renewal.period_s, stands)
    trace, impossible = without_impossible(trace)
    values, stands = judged_power(trace)
    at_s, watts = t, values
    # Without an update period: means of the stretch that begins with their stamp.
    is_flat = trace.kind == "held" and trace.update_period_s == 0
    if is_flat:
        step_j = values[:-1] * dt
    else:
        at_s, watts = power_samples(trace, values)
        step_j = (watts[:-1] + watts[1:]) / 2 * np.diff(at_s)
    energy_j = np.concatenate([[0.0], np.cumsum(step_j)])
    segment_w = step_j / np.diff(at_s)
    stands = impossible + stands
    none = np.zeros(len(at_s))
    return Cumulative(at_s, energy_j, segment_w, none, none, trace.update_period_s, stands, watts, is_flat)


def and_left_out(trace: PowerTrace) -> str:
    """Behind why readings do not suffice: those that were there, and are not among them."""
    return f" ({trace.left_out})" if trace.left_out else ""


def power_samples(trace: PowerTrace, values: Array) -> tuple[Array, Array]:
    """(times, watts) that readings of power stand for, one a renewal.

    A value was renewed at any time since the reading before, at most an update ago: half of that on average. It shows
    that instant, or the mean of the update before it, and nobody says which: a quarter of an update is between the two.
    Where a mean is told of, it stands in the middle of its time.
    A value that stands for longer was renewed unseen, once an update: last one update before the next, and so the step
    to the next lies between these two, wherever the readings were.
    """
    t, update_s = trace.times_s, trace.update_period_s
    older_s = update_s * OLDER if trace.averaged_s is None else trace.averaged_s / 2
    if update_s == 0:
        return (t, values) if older_s == 0 else _with_ends(t, values, t - older_s, values)
    within_s = np.minimum(np.diff(t, prepend=t[0] - update_s), update_s)
    if trace.sample_interval_s > 0:
        within_s = np.minimum(within_s, trace.sample_interval_s)
    renewed_s = t - within_s / 2
    changed = np.flatnonzero(np.concatenate([[True], np.diff(values) != 0]))
    n_readings = np.diff(np.append(changed, len(t)))
    stands_s = np.diff(np.append(renewed_s[changed], t[-1]))
    # The last stretch ends with the trace, not with a renewal.
    n_updates = np.append(np.rint(stands_s[:-1] / update_s), np.floor(stands_s[-1] / update_s) + 1)
    n_renewals = np.clip(n_updates, 1, n_readings).astype(np.intp)
    apart_s = stands_s / n_renewals
    of_readings_s = (renewed_s[-1] - renewed_s[changed[-1]]) / max(n_renewals[-1] - 1, 1)
    apart_s[-1] = update_s if n_renewals[-1] < n_readings[-1] else of_readings_s
    of = np.repeat(np.arange(len(changed)), n_renewals)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(n_renewals) - n_renewals, n_renewals)
    at_s = np.maximum.accumulate(renewed_s[changed][of] + nth * apart_s[of] - older_s)
    return _with_ends(t, values, at_s, values[changed][of])


def _with_ends(t: Array, values: Array, at_s: Array, watts: Array) -> tuple[Array, Array]:
    """The ends of the trace are reached with their own power."""
    at_s = np.concatenate([[min(t[0], at_s[0]) - EDGE_S], at_s, [max(t[-1], at_s[-1]) + EDGE_S]])
    watts = np.concatenate([[values[0]], watts, [values[-1]]])
    increases = np.concatenate([[True], np.diff(at_s) > 0])
    return at_s[increases], watts[increases]


def unwrapped(trace: PowerTrace, name: str) -> Array:
    """Energy since the first reading.

    Raises UnresolvedError where the counter steps back other than by wrapping, or up by more than can have flowed.
    """
    step_j, breaks = _steps(trace)
    if breaks:
        raise UnresolvedError(f"{name}: {breaks[0][1]}")
    return np.concatenate([[0.0], np.cumsum(step_j)])


def stretches_of(trace: PowerTrace) -> tuple[PowerTrace, ...]:
    """The trace, and where it has steps that no energy can have made the readings between these, in their order.

    A driver that is loaded again sets its counter back: what was counted before and since is right.
    """
    are_usable = len(trace.times_s) > 1 and np.isfinite(trace.values).all() and np.all(np.diff(trace.times_s) > 0)
    behind = [i + 1 for i, _ in _steps(trace)[1]] if trace.kind == "counter" and are_usable else []
    bounds = zip([0, *behind], [*behind, len(trace.times_s)], strict=True) if behind else ()
    return trace, *(replace(trace, times_s=trace.times_s[i:j], values=trace.values[i:j]) for i, j in bounds)


def holding(stretches: Sequence[PowerTrace], start_s: float, end_s: float) -> int:
    """Which of `stretches_of` holds a window: 0, all readings, where no other does."""
    return next(
        (
            i
            for i, one in enumerate(stretches[1:], 1)
            if one.times_s[0] <= start_s + EDGE_S and one.times_s[-1] >= end_s - EDGE_S
        ),
        0,
    )


def unbroken(trace: PowerTrace, start_s: float, end_s: float) -> PowerTrace:
    """The readings between two steps that no energy can have made, where these hold a window; else all of them."""
    stretches = stretches_of(trace)
    return stretches[holding(stretches, start_s, end_s)]


def _steps(trace: PowerTrace) -> tuple[Array, list[tuple[int, str]]]:
    """Energy between each two readings, wraps undone; and the steps, in order, that no energy can have made, and why.

    A step may hold what flowed since the value changed last, and an update before that.
    """
    values, dt = trace.values, np.diff(trace.times_s)
    step_j = np.diff(values)
    backwards = step_j < 0
    wrapped_j = np.where(backwards, step_j + (trace.wrap_at_j or 0.0), step_j)
    highest_w = float((step_j / dt)[~backwards].max(initial=0.0))
    lost = backwards & (wrapped_j < 0)
    if highest_w > 0:
        lost |= backwards & (wrapped_j / dt > WRAP_POWER_FACTOR * highest_w)
    limit_w = trace.max_power_w or MAX_POWER_W
    changed = np.flatnonzero((wrapped_j > 0) | lost)
    since_s = np.diff(trace.times_s[changed + 1], prepend=trace.times_s[0]) + trace.update_period_s
    beyond = ~lost[changed] & (wrapped_j[changed] > limit_w * since_s + 2 * trace.resolution)
    set_back = {
        i: f"counter stepped back from {values[i]:.6g} J to {values[i + 1]:.6g} J"
        " and does not wrap there; it was reset or the device was lost"
        for i in np.flatnonzero(lost).tolist()
    }
    jumped = {
        int(changed[k]): f"counter jumped up from {values[changed[k]]:.6g} J by {wrapped_j[changed[k]]:.6g} J in"
        f" {float(since_s[k]):.3g} s; more than {limit_w:.6g} W cannot flow there"
        for k in np.flatnonzero(beyond).tolist()
    }
    return wrapped_j, sorted((set_back | jumped).items())


def _counter_curve(t: Array, shown_j: Array, update_s: float, stands: tuple[Stand, ...]) -> Cumulative:
    """Cumulative energy from the values that a counter showed: see the module's docstring."""
    if update_s == 0 and not stands:
        return Cumulative(t, shown_j, np.diff(shown_j) / np.diff(t), np.zeros(len(t)), np.zeros(len(t)), update_s)
    # Where a source stood still to the end, the last reading says so.
    at_end = np.isin(t, [stand.end_s for stand in stands])
    renewed = np.flatnonzero(np.concatenate([[True], np.diff(shown_j) > 0]) | at_end)
    within_s = np.minimum(update_s, np.diff(t, prepend=-np.inf))[renewed]
    # At the ends the power of this time is not known either: the error is one-sided, its rms 2 w / sqrt(12).
    within_s[0] = 2 * update_s
    at_s, seen_j = t[renewed], shown_j[renewed]
    if len(renewed) >= 3:
        energy_j = _with_age(at_s, seen_j, within_s, update_s)
        aged_j = _aged_j(at_s, seen_j, within_s, update_s)
        if at_s[-1] < t[-1]:
            left_s = t[-1] - at_s[-1]
            last_w = (energy_j[-1] - energy_j[-2]) / (at_s[-1] - at_s[-2])
            at_s, energy_j = np.append(at_s, t[-1]), np.append(energy_j, energy_j[-1] + last_w * left_s)
            # Two readings may share their instant, and what aged for no time is nothing.
            longer = max(1.0, left_s / within_s[-1]) if within_s[-1] > 0 else 1.0
            aged_j = np.append(aged_j, 2 * aged_j[-1] * longer)
            within_s = np.append(within_s, 2 * max(within_s[-1], left_s))
    else:
        # Fewer than two renewals: nothing is known of their pace.
        at_s, energy_j, within_s = t, shown_j, np.full(len(t), update_s)
        aged_j = np.full(len(t), (shown_j[-1] - shown_j[0]) / (t[-1] - t[0]) * update_s / math.sqrt(12))
    return Cumulative(at_s, energy_j, np.diff(energy_j) / np.diff(at_s), within_s, aged_j, update_s, stands)


def _with_age(at_s: Array, seen_j: Array, within_s: Array, update_s: float) -> Array:
    """Energy at the times of the renewals: what the counter showed, and what flowed since."""
    before_w = np.diff(seen_j) / np.diff(at_s)
    first_s = at_s[1] - at_s[0]
    early = first_s < 2 * update_s
    if early:
        # The first step holds up to a whole update, whenever the first reading was: no power follows from it.
        before_w[0] = before_w[1]
    energy_j = seen_j.copy()
    energy_j[1:] += before_w * within_s[1:] / 2
    # Never beyond what the next renewal shows.
    energy_j[1:-1] = np.minimum(energy_j[1:-1], seen_j[2:])
    missing_j = energy_j[1] - seen_j[0] - before_w[0] * first_s if early else before_w[0] * update_s / 2
    energy_j[0] += min(max(missing_j, 0.0), before_w[0] * update_s)
    return energy_j


def _aged_j(at_s: Array, seen_j: Array, within_s: Array, update_s: float) -> Array:
    """Standard uncertainty of what `_with_age` adds: of the age, and of the power that is taken for it.

    A step between two renewals may have lasted as much less than its readings are apart as the later of them is old: so
    much more power flowed. A counter that ticks right after a reading and right before the next one but one shows the
    energy of two readings in three.
    """
    apart_s, step_j = np.diff(at_s), np.diff(seen_j)
    before_w = step_j / apart_s
    most_w = step_j / np.maximum(apart_s - within_s[1:], np.minimum(apart_s, update_s))
    before_w, most_w = (np.concatenate([w[:1], w]) for w in (before_w, most_w))
    return np.asarray(within_s * np.sqrt(most_w**2 / 12 + (most_w - before_w) ** 2 / 4))


def energy_at(curve: Cumulative, at_s: Array) -> Array:
    """C(t) at any time within the trace."""
    t = curve.times_s
    i: NDArray[np.intp] = np.minimum(np.maximum(t.searchsorted(at_s, side="right") - 1, 0), len(t) - 2)
    dt = at_s - t[i]
    if curve.watts is not None and not curve.is_flat:
        slope = (curve.watts[i + 1] - curve.watts[i]) / (t[i + 1] - t[i])
        return curve.energy_j[i] + curve.watts[i] * dt + slope * dt * dt / 2
    before_j = curve.energy_j[i] + curve.segment_w[i] * dt
    if curve.is_flat:
        return before_j
    # A mark follows its edge, where the power changed: what flowed between the two had the power after it. At a reading
    # of its own an edge needs no mark: a modelled counter has one at each, and its next may be microseconds away.
    lag_s = t[i + 1] - at_s
    is_marked = (dt > 0) & (lag_s < MARK_TOLERANCE_S) & (i + 1 < len(t) - 1)
    after_w = curve.segment_w[np.minimum(i + 1, len(t) - 2)]
    return np.where(is_marked, np.maximum(curve.energy_j[i + 1] - after_w * lag_s, curve.energy_j[i]), before_j)
