"""Joules from raw traces. Collection is elsewhere; everything here can be recomputed from the stored trace.

A trace becomes the cumulative energy C(t) of its component (`results.cumulative`); the energy of a window is
C(t1) - C(t0), that of a total the sum of its additive components.

The uncertainties are those of `results.uncertainty`, and all carry the meter's gain error times E. Where a source stood
still, what may have flowed meanwhile joins them (`results.liveness`).

The integral of a relative gauge is an amount in units of its own. It has no joules, and no net: a reason stands there.

A window that the meter cannot resolve has no energy but a reason: a gap in it, no reading at its edges, less than
`MIN_UPDATES` updates, a source that stood still for too long (`results.component_energy`). Missing is never 0. Of a
total, a part that never moved in the whole trace (it is switched off) counts as 0 J with a remark, as long as others
move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from results.component_energy import ComponentEnergy, PartEnergy
from results.cumulative import UnresolvedError, cumulative, holding, stretches_of
from results.intervals import Interval
from results.records import EnergyReading, IdleBaseline, Method, Phase, PowerTrace
from results.rest import POWER_BESIDE, beside_of, is_known, moving_of, resting
from results.uncertainty import shared_variance_j2

SMALL_SHARE = 0.05
"""Of a total: a part that could have hidden no more may have rested, whatever it is."""
BELOW_IDLE_SIGMAS = 3.0
"""Of the net energy: nothing that computes uses so much less than the same machine at rest."""
NO_JOULES = "a relative gauge counts in units of its own and gives no joules"

Array = NDArray[np.float64]


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
    return MeterEnergy(traces, meter, component).between(intervals, phase, idle)


class _Moving(NamedTuple):
    """Components that are summed, and what is to be said of the others."""

    chosen: list[PowerTrace]
    moving: list[PowerTrace]
    remarks: list[str]
    parts: list[ComponentEnergy]
    reason: str | None = None
    """Why there are none."""


class MeterEnergy:
    """What `energy_between` gives, of any number of windows: what is the same for all of them is worked out once."""

    def __init__(
        self, traces: Sequence[PowerTrace], meter: str, component: str = "total", of_load: bool = False
    ) -> None:
        """of_load: a load begins, changes or ends at the edges of the windows (`results.load_edges`)."""
        self._of_load = of_load
        self._traces = [t for t in traces if t.meter == meter]
        self._meter, self._component = meter, component
        self._moving: dict[tuple[int, ...], _Moving] = {}

    def between(
        self,
        intervals: Sequence[Interval],
        phase: Phase,
        idle: IdleBaseline | None = None,
        moved: Sequence[Sequence[Interval]] = (),
        stretches: Sequence[Interval] = (),
    ) -> EnergyReading:
        """Energy of disjoint intervals together; None with a reason where it cannot be had.

        moved: where edges are not known well, the same intervals as early, and as late, as they may be. stretches: of
        the load within the intervals, where these are more than one.
        """
        method: Method = next((t.method for t in self._traces if self._is_chosen(t)), "missing")
        duration_s = float(sum(t1 - t0 for t0, t1 in intervals))
        unknown = EnergyReading(
            phase=phase, meter=self._meter, component=self._component, method=method, duration_s=duration_s
        )
        try:
            if method == "missing":
                raise UnresolvedError(f"meter {self._meter} has no trace of {self._component}")
            if not intervals:
                raise UnresolvedError(f"no {phase} phase in this window")
            found = self._moving_in(intervals)
            if found.reason is not None:
                raise UnresolvedError(found.reason)
            parts = [part.over(intervals, stretches) for part in found.parts]
            parts, together_j2 = _believed(found.parts, parts, intervals)
        except UnresolvedError as reason:
            return unknown.model_copy(update={"reason": str(reason)})
        total = PartEnergy(
            math.fsum(p.energy_j for p in parts),
            math.fsum(p.variance_j2 for p in parts)
            + shared_variance_j2([p.read for p in parts if p.read is not None], np.asarray(intervals, dtype=np.float64))
            + together_j2
            + _edges_j2(found.parts, intervals, moved),
            math.sqrt(math.fsum(p.gain_j**2 for p in parts)),
        )
        uncertainty = _uncertainty(total, found.moving)
        remark = "; ".join([*found.remarks, *(p.remark for p in parts if p.remark)]) or None
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
                _check_same_parts(idle, found.chosen, found.moving)
                _check_above_idle(idle, total.energy_j, duration_s, net_uncertainty_j)
                remark = "; ".join(x for x in (remark, idle.remark) if x) or None
                amounts |= {"net_energy_j": net_j, "remark": remark}
                amounts["net_uncertainty_j"] = None if uncertainty is None else net_uncertainty_j
            except UnresolvedError as reason:
                amounts["reason"] = str(reason)
        return unknown.model_copy(update=amounts)

    @cached_property
    def _stretches(self) -> list[tuple[PowerTrace, ...]]:
        return [stretches_of(t) for t in self._traces]

    def _is_chosen(self, trace: PowerTrace) -> bool:
        return trace.additive if self._component == "total" else trace.component == self._component

    def _moving_in(self, intervals: Sequence[Interval]) -> _Moving:
        """Of the unbroken stretches of the traces that hold these."""
        start_s, end_s = min(t0 for t0, _ in intervals), max(t1 for _, t1 in intervals)
        which = tuple(holding(own, start_s, end_s) for own in self._stretches)
        if which not in self._moving:
            traces = [own[i] for own, i in zip(self._stretches, which, strict=True)]
            self._moving[which] = self._moving_of(traces)
        return self._moving[which]

    def _moving_of(self, traces: Sequence[PowerTrace]) -> _Moving:
        chosen = [t for t in traces if self._is_chosen(t)]
        try:
            moving, remarks = moving_of(chosen, traces) if self._component == "total" else (chosen, [])
        except UnresolvedError as reason:
            return _Moving(chosen, [], [], [], str(reason))
        rests = [resting(trace, traces) for trace in moving]
        parts = [ComponentEnergy(rest, beside_of(rest.trace, traces), self._of_load) for rest in rests]
        return _Moving(chosen, moving, remarks, parts)


def _edges_j2(
    parts: Sequence[ComponentEnergy], intervals: Sequence[Interval], moved: Sequence[Sequence[Interval]]
) -> float:
    """What edges that may be anywhere between the two that were `moved` add to the variance: Simpson's rule over a
    uniform shift, exact where the power on either side is even. All edges come early, or late, together: what delays
    one does so for the others too."""
    if not moved:
        return 0.0
    at_j = math.fsum(part.energy_j(intervals) for part in parts)
    return math.fsum((math.fsum(part.energy_j(one) for part in parts) - at_j) ** 2 for one in moved) / 6


def _uncertainty(total: PartEnergy, traces: Sequence[PowerTrace]) -> float | None:
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


def _net(total: PartEnergy, duration_s: float, idle: IdleBaseline) -> tuple[float, float]:
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


def _believed(
    components: Sequence[ComponentEnergy], parts: Sequence[PartEnergy], intervals: Sequence[Interval]
) -> tuple[list[PartEnergy], float]:
    """The parts, where what stood still is known well enough for their sum, and what it adds to the sum of their
    variances. Raises UnresolvedError where it is not.

    Beside parts that live, those that could have hidden next to nothing of the total, all together, are taken to have
    rested. What stopped one part, or made it jump, may have done so to the others: they err by the sum of their errors.
    """
    total_j = math.fsum(p.energy_j for p in parts)
    believed = [_believed_part(*found, total_j, intervals) for found in zip(components, parts, strict=True)]
    sigmas_j, hidden_j = [], []
    for own, part in zip(believed, parts, strict=True):
        if own.stood is None or part.stood is None:
            continue
        sigmas_j.append(own.stood.sigma_j if own is part else own.stood.rest_sigma_j)
        if own is not part:
            hidden_j.append(own.stood.hidden_j)
            if math.fsum(hidden_j) > SMALL_SHARE * total_j:
                raise UnresolvedError(part.stood.reason)
    return believed, _together_j2(sigmas_j) + _together_j2([p.jumped_sigma_j for p in believed])


def _together_j2(sigmas_j: Sequence[float]) -> float:
    """What errors that have one cause add to the sum of their variances."""
    return math.fsum(sigmas_j) ** 2 - math.fsum(sigma_j**2 for sigma_j in sigmas_j)


def _believed_part(
    component: ComponentEnergy, part: PartEnergy, total_j: float, intervals: Sequence[Interval]
) -> PartEnergy:
    if part.stood is None or is_known(part.stood, part.energy_j, part.energy_j):
        return part
    is_one_of_several = part.energy_j < total_j
    if is_one_of_several:
        rested = component.as_if_off(intervals)
        if rested.stood is not None and rested.stood.hidden_j <= SMALL_SHARE * total_j:
            return rested
    if part.stood.share_s > 0 or part.stood.sigma_j > 0 or not is_known(part.stood, part.energy_j, total_j):
        raise UnresolvedError(part.stood.reason)
    return part
