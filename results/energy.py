"""Joules from raw traces. Collection is elsewhere; everything here can be recomputed from the stored trace.

A trace becomes the cumulative energy C(t) of its component (`results.cumulative`); the energy of a window is
C(t1) - C(t0), that of a total the sum of its additive components.

The uncertainties are those of `results.uncertainty`, and all carry the meter's gain error times E. Where a source stood
still, what may have flowed meanwhile joins them (`results.liveness`).

The integral of a relative gauge is an amount in units of its own. It has no joules, and no net: a reason stands there.

A window that the meter cannot resolve has no energy but a reason: a gap in it, no reading at its edges, less than
`MIN_UPDATES` updates, a source that stood still for too long. Missing is never 0. Of a total, a part that never moved
in the whole trace (it is switched off) counts as 0 J with a remark, as long as others move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from results.cumulative import (
    GAP_FACTOR,
    MARK_TOLERANCE_S,
    UnresolvedError,
    cumulative,
    energy_at,
    unbroken,
    unwrapped,
)
from results.jumps import LoneStep, lone_steps
from results.liveness import Beside, at_rest, shows_nothing
from results.records import EnergyReading, IdleBaseline, Method, Phase, PowerTrace
from results.rest import (
    POWER_BESIDE,
    Resting,
    Stood,
    beside_of,
    is_known,
    lowest_w,
    moving_of,
    resting,
    showing,
    stood_still,
)
from results.spikes import lone_spikes
from results.uncertainty import PartRead, counter_variance_j2, power_variance_j2, shared_variance_j2
from results.units import format_duration

MIN_UPDATES = 10
EDGE_TOLERANCE_S = 1e-6
SMALL_SHARE = 0.05
"""Of a total: a part that could have hidden no more may have rested, whatever it is."""
BELOW_IDLE_SIGMAS = 3.0
"""Of the net energy: nothing that computes uses so much less than the same machine at rest."""
NO_JOULES = "a relative gauge counts in units of its own and gives no joules"
MAX_JUMP_SIGMA = 0.2
"""Of a window's energy: one step that may be no joule at all, and holds more, leaves none."""

Interval = tuple[float, float]
Array = NDArray[np.float64]


class _Part(NamedTuple):
    """Energy of one component, the variance of its readings, and its gain error (apart: idle power shares it)."""

    energy_j: float
    variance_j2: float
    gain_j: float
    stood: Stood | None = None
    jumped: str | None = None
    read: PartRead | None = None

    @property
    def remark(self) -> str | None:
        return "; ".join(x for x in (self.stood and self.stood.remark, self.jumped) if x) or None


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
    if intervals:
        traces = [unbroken(t, min(t0 for t0, _ in intervals), max(t1 for _, t1 in intervals)) for t in traces]
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
        moving, remarks = moving_of(chosen, traces) if component == "total" else (chosen, [])
        rests = [resting(trace, traces) for trace in moving]
        parts = [_integrate(rest, intervals, beside_of(rest.trace, traces)) for rest in rests]
        parts = _believed(rests, parts, intervals)
    except UnresolvedError as reason:
        return unknown.model_copy(update={"reason": str(reason)})
    total = _Part(
        math.fsum(p.energy_j for p in parts),
        math.fsum(p.variance_j2 for p in parts)
        + shared_variance_j2([p.read for p in parts if p.read is not None], np.asarray(intervals, dtype=np.float64)),
        math.sqrt(math.fsum(p.gain_j**2 for p in parts)),
    )
    uncertainty = _uncertainty(total, moving)
    remark = "; ".join([*remarks, *(p.remark for p in parts if p.remark)]) or None
    if uncertainty is not None and total.energy_j:
        unknown = unknown.model_copy(update={"relative_gain_error": total.gain_j / abs(total.energy_j)})
    if method == "relative gauge":
        return unknown.model_copy(
            update={"gauge_units": total.energy_j, "gauge_units_uncertainty": uncertainty, "reason": NO_JOULES}
        )
    amounts: dict[str, object] = {"energy_j": total.energy_j, "uncertainty_j": uncertainty, "remark": remark}
    if idle is not None:
        try:
            net_j, net_uncertainty_j = _net(total, duration_s, idle)
            _check_same_parts(idle, chosen, moving)
            _check_above_idle(idle, total.energy_j, duration_s, net_uncertainty_j)
            remark = "; ".join(x for x in (remark, idle.remark) if x) or None
            amounts |= {"net_energy_j": net_j, "remark": remark}
            amounts["net_uncertainty_j"] = None if uncertainty is None else net_uncertainty_j
        except UnresolvedError as reason:
            amounts["reason"] = str(reason)
    return unknown.model_copy(update=amounts)


def _uncertainty(total: _Part, traces: Sequence[PowerTrace]) -> float | None:
    """None where a trace states no gain error: what its readings alone leave open is not the error of the joules."""
    if any(trace.relative_accuracy is None for trace in traces):
        return None
    return math.sqrt(total.variance_j2 + total.gain_j**2)


def power_curve(trace: PowerTrace) -> tuple[Array, Array]:
    """(times, watts) of a trace for plotting; a counter's power is the difference quotient at segment ends.

    Readings that a mark put close to another (below a quarter of the sampling interval) are joined: over microseconds
    the quotient is the counter's step and the stamp's jitter, not power.
    """
    if trace.kind != "counter":
        return trace.times_s, trace.values
    curve = cumulative(trace)
    least_s = trace.sample_interval_s / 4
    kept = [0]
    for i, at_s in enumerate(curve.times_s.tolist()):
        if at_s - curve.times_s[kept[-1]] >= least_s and i:
            kept.append(i)
    times_s, energy_j = curve.times_s[kept], curve.energy_j[kept]
    return times_s[1:], np.diff(energy_j) / np.diff(times_s)


def _check_same_parts(idle: IdleBaseline, chosen: Sequence[PowerTrace], moving: Sequence[PowerTrace]) -> None:
    """Raises UnresolvedError where a part that cannot rest lives in the window alone, or in the idle time alone."""
    if idle.parts is None:
        return
    live = {t.component.removesuffix(POWER_BESIDE) for t in moving}
    for part in (t.component for t in chosen if not t.can_rest):
        if (part in live) != (part in idle.parts):
            where = "in the window, and not in the idle time around it" if part in live else "in the idle time alone"
            raise UnresolvedError(f"no net energy: {idle.meter} {part} moves {where}; it has stopped, or was missing")


def _net(total: _Part, duration_s: float, idle: IdleBaseline) -> tuple[float, float]:
    """E_net = E - P_idle t, and its uncertainty. Raises UnresolvedError without idle power on both sides.

    The idle power's own uncertainty, its drift (uniform between before and after) and how it strays within the window
    join; the gain error is common to both terms and scales their difference.
    """
    if idle.power_w is None or idle.drift_w is None:
        raise UnresolvedError(idle.reason or "idle power is not known on both sides of the window")
    net_j = total.energy_j - idle.power_w * duration_s
    terms = [
        (idle.uncertainty_w or 0.0) * duration_s,
        idle.drift_w * duration_s / math.sqrt(12),
        total.gain_j * net_j / total.energy_j if total.energy_j else 0.0,
    ]
    strayed_j2 = (idle.strays_j2_per_s or 0.0) * duration_s
    return net_j, math.sqrt(total.variance_j2 + strayed_j2 + math.fsum(t * t for t in terms))


def _check_above_idle(idle: IdleBaseline, energy_j: float, duration_s: float, net_uncertainty_j: float) -> None:
    """Raises UnresolvedError where the idle power was not that of this machine at rest: the window has less."""
    idle_w = idle.power_w or 0.0
    if energy_j - idle_w * duration_s < -BELOW_IDLE_SIGMAS * net_uncertainty_j - 1e-9 * energy_j:
        raise UnresolvedError(
            f"no net energy: {idle.meter} showed {idle_w:.4g} W in the idle time around the window and"
            f" {energy_j / duration_s:.4g} W in it; something else drew power in that idle time (measure again)"
        )


def _believed(rests: Sequence[Resting], parts: Sequence[_Part], intervals: Sequence[Interval]) -> list[_Part]:
    """The parts, where what stood still is known well enough for their sum. Raises UnresolvedError where it is not.

    Beside parts that live, one that could have hidden next to nothing of the total is taken to have rested.
    """
    total_j = math.fsum(p.energy_j for p in parts)
    return [_believed_part(*found, total_j, intervals) for found in zip(rests, parts, strict=True)]


def _believed_part(rest: Resting, part: _Part, total_j: float, intervals: Sequence[Interval]) -> _Part:
    if part.stood is None or is_known(part.stood, part.energy_j, part.energy_j):
        return part
    is_one_of_several = part.energy_j < total_j
    if is_one_of_several:
        rested = _rested(rest, intervals)
        if rested.stood is not None and rested.stood.hidden_j <= SMALL_SHARE * total_j:
            return rested
    if part.stood.share_s > 0 or part.stood.sigma_j > 0 or not is_known(part.stood, part.energy_j, total_j):
        raise UnresolvedError(part.stood.reason)
    return part


def _rested(rest: Resting, intervals: Sequence[Interval]) -> _Part:
    """The part as if it was off where it showed nothing; what it may have used then is its highest power.

    One that sticks at a value above is not off: it may be off by as much as its other readings differ from that.
    """
    trace = rest.trace
    part = _integrate(rest._replace(trace=replace(trace, can_rest=True)), intervals)
    is_zero = shows_nothing(trace)
    if trace.kind == "counter" or not is_zero.any():
        return part
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_zero.astype(np.int8), [0]])))
    last = len(trace.times_s) - 1
    off_s = np.asarray([(trace.times_s[max(i - 1, 0)], trace.times_s[min(j, last)]) for i, j in edges.reshape(-1, 2)])
    lengths_s = (off_s[:, 1].clip(max=t1) - off_s[:, 0].clip(min=t0) for t0, t1 in intervals)
    inside_s = sum(float(np.clip(length_s, 0, None).sum()) for length_s in lengths_s)
    hidden_j = float(trace.values.max()) * inside_s
    what = f"{trace.meter} {trace.component}: it showed {lowest_w(trace)} for {format_duration(inside_s)}"
    sigma_j = hidden_j / math.sqrt(3)
    remark = f"{what}; 0 J are taken for it"
    if part.stood is not None:
        remark, hidden_j = f"{remark}; {part.stood.remark}", hidden_j + part.stood.hidden_j
    stood = Stood(remark, what, 0.0, 0.0, 0.0, sigma_j, hidden_j)
    return part._replace(variance_j2=part.variance_j2 + sigma_j**2, stood=stood)


def _integrate(part: Resting, intervals: Sequence[Interval], beside: Beside | None = None) -> _Part:
    """One component over the intervals together. Raises UnresolvedError."""
    trace, n_alike = part
    curve = cumulative(trace, beside)
    edges = np.asarray(intervals, dtype=np.float64)
    _check_resolved(trace, curve.update_period_s, edges)
    edge_energy_j = energy_at(curve, edges.reshape(-1)).reshape(-1, 2)
    energy_j = float((edge_energy_j[:, 1] - edge_energy_j[:, 0]).sum())
    if curve.watts is None:
        seen = curve.times_s, curve.segment_w, curve.renewed_within_s, curve.aged_j
        variance_j2 = counter_variance_j2(*seen, trace.resolution, edges)
    else:
        variance_j2 = power_variance_j2(replace(trace, times_s=curve.times_s, values=curve.watts), edges)
    still_j2, stood = stood_still(trace, curve, edges, n_alike)
    # What is computed does not jump; what stands until the next reading was thought about by its gauge.
    is_read = trace.kind in ("counter", "power") and trace.method not in ("modelled", "relative gauge")
    jumped_j2, jumped = _jumped(trace, edges, energy_j, beside) if is_read else (0.0, None)
    apart_s = max(curve.update_period_s, trace.sample_interval_s)
    return _Part(
        energy_j,
        variance_j2 + still_j2 + jumped_j2,
        (trace.relative_accuracy or 0.0) * abs(energy_j),
        stood,
        jumped,
        PartRead(curve.times_s, curve.energy_j, apart_s, variance_j2) if apart_s > 0 else None,
    )


def _jumped(trace: PowerTrace, edges: Array, energy_j: float, beside: Beside | None) -> tuple[float, str | None]:
    """(variance, remark) of what stands alone. Raises UnresolvedError where it decides the energy."""
    name = f"{trace.meter} {trace.component}"
    if trace.kind == "counter":
        one, source = "step", "a jump of the counter"
        lone = lone_steps(trace.times_s, unwrapped(trace, name), trace.sample_interval_s, trace.update_period_s)
    else:
        one, source, lone = "spike", "an error of the sensor", lone_spikes(trace)
    steps = [
        step
        for step in lone
        if np.any((edges[:, 0] < step.end_s) & (edges[:, 1] > step.start_s)) and not _confirms(beside, step)
    ]
    if not steps:
        return 0.0, None
    excess_j = math.fsum(lone.excess_j for lone in steps)
    lasted_s = math.fsum(lone.end_s - lone.start_s for lone in steps)
    what = (
        f"{name}: {f'one {one}' if len(steps) == 1 else f'{len(steps)} {one}s'} of"
        f" {math.fsum(lone.step_j for lone in steps):.4g} J in {format_duration(lasted_s)},"
        f" {excess_j:.4g} J above the power beside"
    )
    # What made the counter jump once may have done so again: they err together.
    sigma_j = excess_j / math.sqrt(3)
    if sigma_j > MAX_JUMP_SIGMA * energy_j:
        raise UnresolvedError(f"{what}: {source}, or a burst, which its readings cannot tell")
    return sigma_j**2, f"{what}; it may be {source}"


def _confirms(beside: Beside | None, lone: LoneStep) -> bool:
    other = None if beside is None else beside.between(lone.start_s, lone.end_s)
    return other is not None and 2 * other[0] >= lone.step_j


# --- whether the trace determines the energy -------------------------------------------------------------------------


def _check_resolved(trace: PowerTrace, update_s: float, edges: Array) -> None:
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
    period_s = update_s if trace.kind == "counter" else max(update_s, trace.sample_interval_s)
    mean_s = float(lengths_s.mean())
    if period_s > 0 and mean_s < MIN_UPDATES * period_s:
        what = "the window is" if len(edges) == 1 else f"{len(edges)} intervals are on average"
        raise UnresolvedError(
            f"{name}: unresolved, {what} {format_duration(mean_s)}, {mean_s / period_s:.2g} updates of"
            f" {format_duration(period_s)}; {MIN_UPDATES} are needed (longer prompts, more requests or a faster meter)"
        )
    if at_rest(trace):
        raise UnresolvedError(
            f"{name}: {showing(trace)} for {t[-1] - t[0]:.3g} s; nothing that is switched on uses 0 J"
        )
    if trace.kind == "counter":
        inside = np.searchsorted(t, edges[:, 1] + MARK_TOLERANCE_S) - np.searchsorted(t, edges[:, 0] - MARK_TOLERANCE_S)
        if float(inside.mean()) < 2:
            raise UnresolvedError(
                f"{name}: unresolved, {float(inside.mean()):.2g} counter readings per interval of"
                f" {format_duration(mean_s)}; 2 are needed (a shorter sample_interval_s)"
            )


def _check_gaps(trace: PowerTrace, t: Array, edges: Array, name: str) -> None:
    """Watts are unknown in a gap; a counter should go on counting, so only an edge inside a gap is lost.

    Whether it did is judged by what it counted meanwhile (`results.liveness`).
    """
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
