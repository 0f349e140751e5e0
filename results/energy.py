"""Joules from raw traces. Collection is elsewhere; everything here can be recomputed from the stored trace.

A trace becomes the cumulative energy C(t) of its component; the energy of a window is C(t1) - C(t0):

    power    linear between readings (trapezoid; the window's edges are interpolated)
    held     each reading stands until the next (battery gauges)
    counter  differences, unwrapped, linear between readings

Standard uncertainty (one sigma, terms added in quadrature; times are uniform within their bound, hence sqrt(12)):

    power, held   a change dP may have happened anywhere in w = max(reading distance, update period): dP w / sqrt(12)
    counter       an edge sees a value up to one update period old: P update / sqrt(12); the value's step: q / sqrt(12);
                  an edge at fraction f between two readings, neighbour powers apart by dP: dP dt f (1 - f) / sqrt(3)
    all           the meter's gain error times E

A window that the meter cannot resolve has no energy but a reason: a gap in it, no reading at its edges, or less than
`MIN_UPDATES` updates. Missing is never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from results.records import EnergyReading, IdleBaseline, Method, Phase, PowerTrace

MIN_UPDATES = 10
GAP_FACTOR = 5.0
"""Readings further apart than this many intervals are a gap."""
EDGE_TOLERANCE_S = 1e-6
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
    try:
        if not chosen:
            raise UnresolvedError(f"meter {meter} has no trace of {component}")
        if not intervals:
            raise UnresolvedError(f"no {phase} phase in this window")
        parts = [_integrate(trace, intervals) for trace in chosen]
    except UnresolvedError as reason:
        return EnergyReading(
            phase=phase, meter=meter, component=component, method=method, duration_s=duration_s, reason=str(reason)
        )
    energy_j = math.fsum(e for e, _ in parts)
    uncertainty_j = math.sqrt(math.fsum(u * u for _, u in parts))
    net_j, net_uncertainty_j = _net(energy_j, uncertainty_j, duration_s, idle)
    return EnergyReading(
        phase=phase,
        meter=meter,
        component=component,
        method=method,
        duration_s=duration_s,
        energy_j=energy_j,
        uncertainty_j=uncertainty_j,
        net_energy_j=net_j,
        net_uncertainty_j=net_uncertainty_j,
        reason=idle.reason if idle is not None and net_j is None else None,
    )


def idle_baseline(
    meter: str, before: Sequence[PowerTrace], after: Sequence[PowerTrace], component: str = "total"
) -> IdleBaseline:
    """Idle power from the whole of the traces taken before and after a window (either may be empty)."""
    watts: list[float | None] = []
    uncertainties: list[float] = []
    reasons: list[str] = []
    for when, traces in (("before", before), ("after", after)):
        own = [t for t in traces if t.meter == meter and len(t.times_s) >= 2]
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
    """(times, watts) of a trace for plotting; a counter's power is the difference quotient at segment ends."""
    if trace.kind != "counter":
        return trace.times_s, trace.values
    curve = _cumulative(trace)
    return curve.times_s[1:], curve.segment_w


def _net(
    energy_j: float, uncertainty_j: float, duration_s: float, idle: IdleBaseline | None
) -> tuple[float | None, float | None]:
    """E_net = E - P_idle t; the idle's own uncertainty and half its drift (uniform) join the uncertainty."""
    if idle is None or idle.power_w is None:
        return None, None
    terms = [
        uncertainty_j,
        (idle.uncertainty_w or 0.0) * duration_s,
        (idle.drift_w or 0.0) * duration_s / math.sqrt(12),
    ]
    return energy_j - idle.power_w * duration_s, math.sqrt(math.fsum(t * t for t in terms))


def _integrate(trace: PowerTrace, intervals: Sequence[Interval]) -> tuple[float, float]:
    """(energy, standard uncertainty) of the intervals together. Raises UnresolvedError."""
    curve = _cumulative(trace)
    edges = np.asarray(intervals, dtype=np.float64)
    _check_resolved(trace, curve, edges)
    edge_energy_j = _energy_at(trace, curve, edges.reshape(-1)).reshape(-1, 2)
    energy_j = float((edge_energy_j[:, 1] - edge_energy_j[:, 0]).sum())
    variance = _counter_variance(trace, curve, edges) if trace.kind == "counter" else _power_variance(trace, edges)
    return energy_j, math.sqrt(variance + (trace.relative_accuracy * energy_j) ** 2)


def _cumulative(trace: PowerTrace) -> _Cumulative:
    t, v = trace.times_s, trace.values
    name = f"{trace.meter} {trace.component}"
    if len(t) < 2:
        raise UnresolvedError(f"{name}: {len(t)} reading{'s' if len(t) != 1 else ''}, at least 2 are needed")
    if not (np.all(np.isfinite(t)) and np.all(np.isfinite(v))):
        raise UnresolvedError(f"{name}: {int((~np.isfinite(v)).sum())} readings are not finite numbers")
    dt = np.diff(t)
    if np.any(dt <= 0):
        raise UnresolvedError(f"{name}: time stamps do not increase (by {float(dt.min()):.6g} s at worst)")
    if trace.kind == "counter":
        step_j = _unwrapped_steps(trace, name)
    elif trace.kind == "held":
        step_j = v[:-1] * dt
    else:
        step_j = (v[:-1] + v[1:]) / 2 * dt
    return _Cumulative(t, np.concatenate([[0.0], np.cumsum(step_j)]), step_j / dt)


def _unwrapped_steps(trace: PowerTrace, name: str) -> Array:
    step_j = np.diff(trace.values)
    backwards = step_j < 0
    if not backwards.any():
        return step_j
    if trace.wrap_at_j is None:
        i = int(np.argmax(backwards))
        raise UnresolvedError(
            f"{name}: counter stepped back from {trace.values[i]:.6g} J to {trace.values[i + 1]:.6g} J"
            " and does not wrap there; it was reset or the device was lost"
        )
    return np.where(backwards, step_j + trace.wrap_at_j, step_j)


def _energy_at(trace: PowerTrace, curve: _Cumulative, at_s: Array) -> Array:
    """C(t) at any time within the trace."""
    t = curve.times_s
    i = np.clip(np.searchsorted(t, at_s, side="right") - 1, 0, len(t) - 2)
    dt = np.clip(at_s - t[i], 0.0, t[i + 1] - t[i])
    if trace.kind == "power":
        slope = (trace.values[i + 1] - trace.values[i]) / (t[i + 1] - t[i])
        return curve.energy_j[i] + trace.values[i] * dt + slope * dt * dt / 2
    return curve.energy_j[i] + curve.segment_w[i] * dt


def _check_resolved(trace: PowerTrace, curve: _Cumulative, edges: Array) -> None:
    t = curve.times_s
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
            f"{name}: unresolved, {what} {mean_s * 1e3:.3g} ms, {mean_s / period_s:.2g} updates of"
            f" {period_s * 1e3:.3g} ms; {MIN_UPDATES} are needed (longer prompts, more requests or a faster meter)"
        )
    if trace.kind == "counter":
        inside = np.searchsorted(t, edges[:, 1] + MARK_TOLERANCE_S) - np.searchsorted(t, edges[:, 0] - MARK_TOLERANCE_S)
        if float(inside.mean()) < 2:
            raise UnresolvedError(
                f"{name}: unresolved, {float(inside.mean()):.2g} counter readings per interval of"
                f" {mean_s * 1e3:.3g} ms; 2 are needed (a shorter sample_interval_s)"
            )


def _check_gaps(trace: PowerTrace, t: Array, edges: Array, name: str) -> None:
    """Watts are unknown in a gap; a counter goes on counting, so only an edge inside a gap is lost."""
    bound_s = GAP_FACTOR * max(trace.sample_interval_s, trace.update_period_s)
    wide = np.flatnonzero(np.diff(t) > bound_s) if bound_s > 0 else np.array([], dtype=np.intp)
    for gap_start, gap_end in [*((float(t[i]), float(t[i + 1])) for i in wide), *trace.gaps_s]:
        if trace.kind == "counter":
            lost = (edges > gap_start + EDGE_TOLERANCE_S) & (edges < gap_end - EDGE_TOLERANCE_S)
        else:
            lost = (edges[:, :1] < gap_end - EDGE_TOLERANCE_S) & (edges[:, 1:] > gap_start + EDGE_TOLERANCE_S)
        if lost.any():
            raise UnresolvedError(
                f"{name}: gap of {gap_end - gap_start:.3g} s in the readings"
                f" {gap_start - float(edges.min()):.3g} s into the window"
            )


def _power_variance(trace: PowerTrace, edges: Array) -> float:
    """Sum over the changes in reach of the intervals of (dP w)^2 / 12, and the step of the reading over the whole."""
    t, v = trace.times_s, trace.values
    width_s = np.maximum(np.diff(t), trace.update_period_s)
    contribution = (np.diff(v) * width_s) ** 2 / 12
    before = np.concatenate([[0.0], np.cumsum(contribution)])
    first = np.clip(np.searchsorted(t, edges[:, 0] - trace.update_period_s, side="right") - 1, 0, len(t) - 1)
    last = np.clip(np.searchsorted(t, edges[:, 1], side="left"), 0, len(t) - 1)
    total_s = float((edges[:, 1] - edges[:, 0]).sum())
    return float((before[last] - before[first]).sum()) + (trace.resolution * total_s) ** 2 / 12


def _counter_variance(trace: PowerTrace, curve: _Cumulative, edges: Array) -> float:
    t, watts = curve.times_s, curve.segment_w
    at_s = edges.reshape(-1)
    i = np.clip(np.searchsorted(t, at_s, side="right") - 1, 0, len(watts) - 1)
    stale = (watts[i] * trace.update_period_s) ** 2 / 12
    step = trace.resolution**2 / 12
    dt = t[i + 1] - t[i]
    f = np.clip((at_s - t[i]) / dt, 0.0, 1.0)
    change_w = watts[np.minimum(i + 1, len(watts) - 1)] - watts[np.maximum(i - 1, 0)]
    between = (change_w * dt * f * (1 - f)) ** 2 / 3
    return float((stale + step + between).sum())
