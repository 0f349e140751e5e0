"""Joules from raw traces. Collection is elsewhere; everything here can be recomputed from the stored trace.

A trace becomes the cumulative energy C(t) of its component; the energy of a window is C(t1) - C(t0):

    power    linear between readings (trapezoid; the window's edges are interpolated)
    held     each reading stands until the next (battery gauges)
    counter  differences, unwrapped, linear between readings

A counter that renews its value every `update_period_s` shows an old one: on average by half of the time w in which it
was renewed unseen, w = min(update period, distance to the reading before). What flowed since is added, P w / 2, with P
the power up to that reading. A reading that repeats the value before it says nothing new and is left out; the ends of
the trace are reached with the power of the first and the last full step. Without this, a window that starts idle and
ends busy would always read low, by half an update.

The uncertainties are those of `results.uncertainty`, and all carry the meter's gain error times E.

The integral of a relative gauge is an amount in units of its own. It has no joules, and no net: a reason stands there.

A window that the meter cannot resolve has no energy but a reason: a gap in it, no reading at its edges, or less than
`MIN_UPDATES` updates. Missing is never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from results.records import EnergyReading, IdleBaseline, Method, Phase, PowerTrace
from results.uncertainty import counter_variance_j2, power_variance_j2

MIN_UPDATES = 10
GAP_FACTOR = 5.0
"""Readings further apart than this many intervals are a gap."""
WRAP_POWER_FACTOR = 100.0
"""A step back is no wrap if it would mean more power than this many times the highest of the other steps."""
EDGE_TOLERANCE_S = 1e-6
NO_JOULES = "a relative gauge counts in units of its own and gives no joules"
MARK_TOLERANCE_S = 1e-3
"""A reading this close to an edge was taken for it: a mark follows its phase edge by microseconds."""

Interval = tuple[float, float]
Array = NDArray[np.float64]


class UnresolvedError(Exception):
    """The trace does not determine the energy; the message is the reason a user reads."""


@dataclass(frozen=True)
class _Cumulative:
    """Energy since the first reading at the readings' times, and the mean power of each segment between two."""

    times_s: Array
    energy_j: Array
    segment_w: Array
    renewed_within_s: Array
    """Counters: for each reading the time w within which its value was renewed; else 0."""


class _Part(NamedTuple):
    """Energy of one component, the variance of its readings, and its gain error (apart: idle power shares it)."""

    energy_j: float
    variance_j2: float
    gain_j: float


def energy_between(
    traces: Sequence[PowerTrace],
    intervals: Sequence[Interval],
    phase: Phase,
    meter: str,
    component: str = "total",
    idle: IdleBaseline | None = None,
) -> EnergyReading:
    """Energy of disjoint intervals together, from one meter.

    component: one of the meter's, or "total": the sum of its additive components. A figure that cannot be had is None
    with a reason.
    """
    chosen = [
        t for t in traces if t.meter == meter and (t.additive if component == "total" else t.component == component)
    ]
    duration_s = float(sum(t1 - t0 for t0, t1 in intervals))
    method: Method = chosen[0].method if chosen else "missing"
    unknown = EnergyReading(phase=phase, meter=meter, component=component, method=method, duration_s=duration_s)
    try:
        if not chosen:
            raise UnresolvedError(f"meter {meter} has no trace of {component}")
        if not intervals:
            raise UnresolvedError(f"no {phase} phase in this window")
        parts = [_integrate(trace, intervals) for trace in chosen]
    except UnresolvedError as reason:
        return unknown.model_copy(update={"reason": str(reason)})
    total = _Part(
        math.fsum(p.energy_j for p in parts),
        math.fsum(p.variance_j2 for p in parts),
        math.sqrt(math.fsum(p.gain_j**2 for p in parts)),
    )
    uncertainty = math.sqrt(total.variance_j2 + total.gain_j**2)
    if method == "relative gauge":
        return unknown.model_copy(
            update={"gauge_units": total.energy_j, "gauge_units_uncertainty": uncertainty, "reason": NO_JOULES}
        )
    net_j, net_uncertainty_j = _net(total, duration_s, idle)
    return unknown.model_copy(
        update={
            "energy_j": total.energy_j,
            "uncertainty_j": uncertainty,
            "net_energy_j": net_j,
            "net_uncertainty_j": net_uncertainty_j,
            "reason": idle.reason if idle is not None and net_j is None else None,
        }
    )


def idle_baseline(
    meter: str, before: Sequence[PowerTrace], after: Sequence[PowerTrace], component: str = "total"
) -> IdleBaseline:
    """Idle power from the whole of the traces taken before and after a window (either may be empty).

    Its uncertainty leaves out the meter's gain error, which the window has as well: `_net` counts it once.
    """
    watts: list[float | None] = []
    uncertainties: list[float] = []
    reasons: list[str] = []
    for when, traces in (("before", before), ("after", after)):
        own = [replace(t, relative_accuracy=0.0) for t in traces if t.meter == meter and len(t.times_s) >= 2]
        if not own:
            watts.append(None)
            reasons.append(f"no idle trace {when} the window")
            continue
        whole = (max(float(t.times_s[0]) for t in own), min(float(t.times_s[-1]) for t in own))
        reading = energy_between(own, [whole], "all", meter, component)
        watts.append(reading.average_power_w)
        if reading.average_power_w is None:
            reasons.append(f"idle {when} the window: {reading.reason}")
        elif reading.uncertainty_j is not None:
            uncertainties.append(reading.uncertainty_j / reading.duration_s)
    known = any(w is not None for w in watts)
    return IdleBaseline(
        meter=meter,
        component=component,
        before_w=watts[0],
        after_w=watts[1],
        uncertainty_w=math.sqrt(sum(u * u for u in uncertainties)) / len(uncertainties) if uncertainties else None,
        reason=None if known else "; ".join(reasons),
    )


def power_curve(trace: PowerTrace) -> tuple[Array, Array]:
    """(times, watts) of a trace for plotting; a counter's power is the difference quotient at segment ends.

    Readings that a mark put close to another (below a quarter of the sampling interval) are joined: over microseconds
    the quotient is the counter's step and the stamp's jitter, not power.
    """
    if trace.kind != "counter":
        return trace.times_s, trace.values
    curve = _cumulative(trace)
    least_s = trace.sample_interval_s / 4
    kept = [0]
    for i, at_s in enumerate(curve.times_s.tolist()):
        if at_s - curve.times_s[kept[-1]] >= least_s and i:
            kept.append(i)
    times_s, energy_j = curve.times_s[kept], curve.energy_j[kept]
    return times_s[1:], np.diff(energy_j) / np.diff(times_s)


def _net(total: _Part, duration_s: float, idle: IdleBaseline | None) -> tuple[float | None, float | None]:
    """E_net = E - P_idle t, and its uncertainty.

    The idle power's own uncertainty and its drift (uniform between before and after) join; the gain error is common to
    both terms and scales their difference.
    """
    if idle is None or idle.power_w is None:
        return None, None
    net_j = total.energy_j - idle.power_w * duration_s
    terms = [
        (idle.uncertainty_w or 0.0) * duration_s,
        (idle.drift_w or 0.0) * duration_s / math.sqrt(12),
        total.gain_j * net_j / total.energy_j if total.energy_j else 0.0,
    ]
    return net_j, math.sqrt(total.variance_j2 + math.fsum(t * t for t in terms))


def _integrate(trace: PowerTrace, intervals: Sequence[Interval]) -> _Part:
    """One component over the intervals together. Raises UnresolvedError."""
    curve = _cumulative(trace)
    edges = np.asarray(intervals, dtype=np.float64)
    _check_resolved(trace, edges)
    edge_energy_j = _energy_at(trace, curve, edges.reshape(-1)).reshape(-1, 2)
    energy_j = float((edge_energy_j[:, 1] - edge_energy_j[:, 0]).sum())
    if trace.kind == "counter":
        seen = curve.times_s, curve.segment_w, curve.renewed_within_s
        variance_j2 = counter_variance_j2(*seen, trace.resolution, edges)
    else:
        variance_j2 = power_variance_j2(trace, edges)
    return _Part(energy_j, variance_j2, trace.relative_accuracy * abs(energy_j))


# --- cumulative energy -----------------------------------------------------------------------------------------------


def _cumulative(trace: PowerTrace) -> _Cumulative:
    t, v = trace.times_s, trace.values
    name = f"{trace.meter} {trace.component}"
    if len(t) < 2:
        raise UnresolvedError(f"{name}: {len(t)} reading{'s' if len(t) != 1 else ''}, at least 2 are needed")
    finite = np.isfinite(t) & np.isfinite(v)
    if not finite.all():
        raise UnresolvedError(f"{name}: {int((~finite).sum())} of {len(t)} readings are not finite numbers")
    dt = np.diff(t)
    if np.any(dt <= 0):
        raise UnresolvedError(f"{name}: time stamps do not increase (by {float(dt.min()):.6g} s at worst)")
    if trace.kind == "counter":
        return _counter_curve(t, _unwrapped(trace, name), trace.update_period_s)
    step_j = v[:-1] * dt if trace.kind == "held" else (v[:-1] + v[1:]) / 2 * dt
    return _Cumulative(t, np.concatenate([[0.0], np.cumsum(step_j)]), step_j / dt, np.zeros(len(t)))


def _unwrapped(trace: PowerTrace, name: str) -> Array:
    """Energy since the first reading. Raises UnresolvedError where the counter steps back other than by wrapping."""
    step_j, dt = np.diff(trace.values), np.diff(trace.times_s)
    backwards = step_j < 0
    if backwards.any():
        wrapped_j = step_j + (trace.wrap_at_j or 0.0)
        highest_w = float((step_j / dt)[~backwards].max(initial=0.0))
        lost = backwards & (wrapped_j < 0)
        if highest_w > 0:
            lost |= backwards & (wrapped_j / dt > WRAP_POWER_FACTOR * highest_w)
        if lost.any():
            i = int(np.argmax(lost))
            raise UnresolvedError(
                f"{name}: counter stepped back from {trace.values[i]:.6g} J to {trace.values[i + 1]:.6g} J"
                " and does not wrap there; it was reset or the device was lost"
            )
        step_j = np.where(backwards, wrapped_j, step_j)
    return np.concatenate([[0.0], np.cumsum(step_j)])


def _counter_curve(t: Array, shown_j: Array, update_s: float) -> _Cumulative:
    """Cumulative energy from the values that a counter showed: see the module's docstring."""
    if update_s == 0:
        return _Cumulative(t, shown_j, np.diff(shown_j) / np.diff(t), np.zeros(len(t)))
    renewed = np.concatenate([[True], np.diff(shown_j) > 0])
    since_renewed_s = t - t[np.maximum.accumulate(np.where(renewed, np.arange(len(t)), 0))]
    # A value that stands for more than two updates is no repeat: nothing flows.
    kept = np.flatnonzero(renewed | (since_renewed_s > 2 * update_s))
    within_s = np.minimum(update_s, np.diff(t, prepend=-np.inf))[kept]
    # At the ends the power of this time is not known either: the error is one-sided, its rms 2 w / sqrt(12).
    within_s[0] = 2 * update_s
    at_s, seen_j = t[kept], shown_j[kept]
    if len(kept) >= 3:
        energy_j = _with_age(at_s, seen_j, within_s, update_s)
        if at_s[-1] < t[-1]:
            left_s = t[-1] - at_s[-1]
            last_w = (energy_j[-1] - energy_j[-2]) / (at_s[-1] - at_s[-2])
            at_s, energy_j = np.append(at_s, t[-1]), np.append(energy_j, energy_j[-1] + last_w * left_s)
            within_s = np.append(within_s, 2 * max(within_s[-1], left_s))
    else:
        # Fewer than two renewals: nothing is known of their pace.
        at_s, energy_j, within_s = t, shown_j, np.full(len(t), update_s)
    return _Cumulative(at_s, energy_j, np.diff(energy_j) / np.diff(at_s), within_s)


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


def _energy_at(trace: PowerTrace, curve: _Cumulative, at_s: Array) -> Array:
    """C(t) at any time within the trace."""
    t = curve.times_s
    i = np.clip(np.searchsorted(t, at_s, side="right") - 1, 0, len(t) - 2)
    dt = at_s - t[i]
    if trace.kind == "power":
        slope = (trace.values[i + 1] - trace.values[i]) / (t[i + 1] - t[i])
        return curve.energy_j[i] + trace.values[i] * dt + slope * dt * dt / 2
    before_j = curve.energy_j[i] + curve.segment_w[i] * dt
    if trace.kind == "held":
        return before_j
    # A mark follows its edge, where the power changed: what flowed between the two had the power after it.
    lag_s = t[i + 1] - at_s
    is_marked = (lag_s < MARK_TOLERANCE_S) & (i + 1 < len(t) - 1)
    after_w = curve.segment_w[np.minimum(i + 1, len(t) - 2)]
    return np.where(is_marked, np.maximum(curve.energy_j[i + 1] - after_w * lag_s, curve.energy_j[i]), before_j)


# --- whether the trace determines the energy -------------------------------------------------------------------------


def _check_resolved(trace: PowerTrace, edges: Array) -> None:
    t = trace.times_s
    name = f"{trace.meter} {trace.component}"
    lengths_s = edges[:, 1] - edges[:, 0]
    if np.any(lengths_s < 0):
        raise UnresolvedError(f"{name}: a window ends before it starts")
    start_s, end_s = float(edges.min()), float(edges.max())
    if start_s < t[0] - EDGE_TOLERANCE_S or end_s > t[-1] + EDGE_TOLERANCE_S:
        raise UnresolvedError(
            f"{name}: the readings ({t[-1] - t[0]:.3g} s) leave {max(t[0] - start_s, end_s - t[-1]):.3g} s"
            " of the window uncovered"
        )
    _check_gaps(trace, t, edges, name)
    # A counter read at its own edges needs no sampling interval; watts must be sampled within the interval.
    period_s = trace.update_period_s if trace.kind == "counter" else max(trace.update_period_s, trace.sample_interval_s)
    mean_s = float(lengths_s.mean())
    if period_s > 0 and mean_s < MIN_UPDATES * period_s:
        what = "the window is" if len(edges) == 1 else f"{len(edges)} intervals are on average"
        raise UnresolvedError(
            f"{name}: unresolved, {what} {_spoken(mean_s)}, {mean_s / period_s:.2g} updates of"
            f" {_spoken(period_s)}; {MIN_UPDATES} are needed (longer prompts, more requests or a faster meter)"
        )
    if trace.kind == "counter":
        if period_s > 0 and np.ptp(trace.values) == 0:
            raise UnresolvedError(
                f"{name}: the counter stood still at {trace.values[0]:.6g} J for {t[-1] - t[0]:.3g} s; nothing that is"
                " switched on uses 0 J"
            )
        inside = np.searchsorted(t, edges[:, 1] + MARK_TOLERANCE_S) - np.searchsorted(t, edges[:, 0] - MARK_TOLERANCE_S)
        if float(inside.mean()) < 2:
            raise UnresolvedError(
                f"{name}: unresolved, {float(inside.mean()):.2g} counter readings per interval of"
                f" {_spoken(mean_s)}; 2 are needed (a shorter sample_interval_s)"
            )


def _spoken(duration_s: float) -> str:
    return f"{duration_s:.3g} s" if duration_s >= 1 else f"{duration_s * 1e3:.3g} ms"


def _check_gaps(trace: PowerTrace, t: Array, edges: Array, name: str) -> None:
    """Watts are unknown in a gap; a counter goes on counting, so only an edge inside a gap is lost."""
    bound_s = GAP_FACTOR * max(trace.sample_interval_s, trace.update_period_s)
    wide = np.flatnonzero(np.diff(t) > bound_s) if bound_s > 0 else np.array([], dtype=np.intp)
    for gap_start, gap_end in [*((float(t[i]), float(t[i + 1])) for i in wide), *trace.gaps_s]:
        if trace.kind == "counter":
            lost = (edges > gap_start + MARK_TOLERANCE_S) & (edges < gap_end - MARK_TOLERANCE_S)
        else:
            lost = (edges[:, :1] < gap_end - EDGE_TOLERANCE_S) & (edges[:, 1:] > gap_start + EDGE_TOLERANCE_S)
        if lost.any():
            raise UnresolvedError(
                f"{name}: gap of {gap_end - gap_start:.3g} s in the readings"
                f" {gap_start - float(edges.min()):.3g} s into the window"
            )
