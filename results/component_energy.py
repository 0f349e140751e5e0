"""Energy of one component of a meter over intervals, the variance of its readings, and why it has none.

What of it is the same for all intervals is worked out once: a trace may hold the hours of a window with a thousand
requests, and each request then costs what lies in its own span.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from results.cumulative import (
    GAP_FACTOR,
    OLDER,
    Cumulative,
    UnresolvedError,
    and_left_out,
    cumulative,
    energy_at,
    unwrapped,
)
from results.intervals import Interval
from results.jumps import LoneStep, lone_steps
from results.liveness import Beside, at_rest, shows_nothing
from results.load_edges import LoadEdges, means_at_edges_j
from results.rest import Resting, Stood, lowest_w, showing, stood_still
from results.spikes import lone_spikes, runs_of
from results.time_means import TimeMeanErrors
from results.uncertainty import MARK_TOLERANCE_S, CounterErrors, MeanErrors, PartRead, PowerErrors
from results.units import format_duration

MIN_UPDATES = 10
MAX_SLIVERS = 0.02
"""Of a window's time: intervals below one update that together last less do not decide how long its intervals are."""
EDGE_TOLERANCE_S = 1e-6
MAX_JUMP_SIGMA = 0.2
"""Of a window's energy: one step that may be no joule at all, and holds more, leaves none."""

Array = NDArray[np.float64]


class PartEnergy(NamedTuple):
    """Energy of one component, the variance of its readings, and its gain error (apart: idle power shares it)."""

    energy_j: float
    variance_j2: float
    gain_j: float
    stood: Stood | None = None
    jumped: str | None = None
    jumped_sigma_j: float = 0.0
    read: PartRead | None = None

    @property
    def remark(self) -> str | None:
        return "; ".join(x for x in (self.stood and self.stood.remark, self.jumped) if x) or None


class _Lasting(Protocol):
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


_L = TypeVar("_L", bound=_Lasting)


class ComponentEnergy:
    """One component, with what is beside it, over any intervals."""

    def __init__(self, rest: Resting, beside: Beside | None = None, of_load: bool = False) -> None:
        """of_load: its load begins, changes or ends at the edges of the intervals (`results.load_edges`)."""
        self.trace, self._n_alike = rest
        self._of_load = of_load
        self._beside = beside
        self._name = f"{self.trace.meter} {self.trace.component}"

    def over(self, intervals: Sequence[Interval], stretches: Sequence[Interval] = ()) -> PartEnergy:
        """Of the intervals together. stretches: of the load within, where they are more. Raises UnresolvedError."""
        trace, curve = self.trace, self._curve
        edges = np.asarray(intervals, dtype=np.float64)
        self._check_resolved(curve.update_period_s, edges)
        edge_energy_j = energy_at(curve, edges.reshape(-1)).reshape(-1, 2)
        energy_j = float((edge_energy_j[:, 1] - edge_energy_j[:, 0]).sum())
        if self._load_edges is not None:
            energy_j += self._load_edges.stepped_j(edges)
        elif self._knows_load and self._averaged_s > 0:
            energy_j += means_at_edges_j(curve, self._averaged_s, edges)
        variance_j2 = self._errors.variance_j2(edges)
        if self._load_edges is not None and trace.update_period_s > 0:
            variance_j2 += self._load_edges.late_j2(np.asarray(stretches or intervals, dtype=np.float64))
        still_j2, stood = stood_still(trace, _near(curve.stands, self._stands_s, edges), edges, self._n_alike)
        jumped_sigma_j, jumped = self._jumped(edges, energy_j)
        apart_s = max(curve.update_period_s, trace.sample_interval_s, self._averaged_s)
        return PartEnergy(
            energy_j,
            variance_j2 + still_j2 + jumped_sigma_j**2,
            (trace.relative_accuracy or 0.0) * abs(energy_j),
            stood,
            jumped,
            jumped_sigma_j,
            PartRead(curve.times_s, curve.energy_j, apart_s, variance_j2) if apart_s > 0 else None,
        )

    def energy_j(self, intervals: Sequence[Interval]) -> float:
        """Of the intervals together, as far as readings go. Raises UnresolvedError where they make no curve."""
        curve = self._curve
        edges = np.asarray(intervals, dtype=np.float64).reshape(-1).clip(curve.times_s[0], curve.times_s[-1])
        return float(np.diff(energy_at(curve, edges).reshape(-1, 2)).sum())

    def as_if_off(self, intervals: Sequence[Interval]) -> PartEnergy:
        """The part as if it was off where it showed nothing; what it may have used then is its highest power.

        One that sticks at a value above is not off: it may be off by as much as its other readings differ from that.
        """
        trace = self.trace
        part = self._that_may_rest.over(intervals)
        if not len(self._off_s):
            return part
        lengths_s = (self._off_s[:, 1].clip(max=t1) - self._off_s[:, 0].clip(min=t0) for t0, t1 in intervals)
        inside_s = sum(float(np.clip(length_s, 0, None).sum()) for length_s in lengths_s)
        hidden_j = float(trace.values.max()) * inside_s
        what = f"{self._name}: it showed {lowest_w(trace)} for {format_duration(inside_s)}"
        sigma_j = hidden_j / math.sqrt(3)
        remark = f"{what}; 0 J are taken for it"
        if part.stood is not None:
            remark, hidden_j = f"{remark}; {part.stood.remark}", hidden_j + part.stood.hidden_j
        stood = Stood(remark, what, 0.0, 0.0, 0.0, sigma_j, hidden_j)
        return part._replace(variance_j2=part.variance_j2 + sigma_j**2, stood=stood)

    # --- the same for all intervals ----------------------------------------------------------------------------------

    @property
    def _curve(self) -> Cumulative:
        """Raises UnresolvedError."""
        if isinstance(self._curve_or_reason, str):
            raise UnresolvedError(self._curve_or_reason)
        return self._curve_or_reason

    @cached_property
    def _curve_or_reason(self) -> Cumulative | str:
        try:
            return cumulative(self.trace, self._beside)
        except UnresolvedError as reason:
            return str(reason)

    @cached_property
    def _errors(self) -> CounterErrors | MeanErrors | PowerErrors | TimeMeanErrors:
        curve = self._curve
        if curve.watts is None:
            seen = curve.times_s, curve.segment_w, curve.renewed_within_s, curve.aged_j
            return CounterErrors(*seen, self.trace.resolution)
        if curve.is_flat:
            return MeanErrors(curve.times_s, curve.watts[:-1], self.trace.resolution)
        stands_for = replace(self.trace, times_s=curve.times_s, values=curve.watts)
        return TimeMeanErrors(stands_for, self._averaged_s) if self._averaged_s > 0 else PowerErrors(stands_for)

    @cached_property
    def _load_edges(self) -> LoadEdges | None:
        """None where nothing is known of the load, and of means of a known time, which have a rule of their own."""
        trace, curve = self.trace, self._curve
        if not self._knows_load or curve.watts is None or self._averaged_s > 0:
            return None
        stands_for = replace(trace, times_s=curve.times_s, values=curve.watts)
        return LoadEdges(stands_for, OLDER * trace.update_period_s)

    @property
    def _knows_load(self) -> bool:
        return self._of_load and self.trace.method not in ("modelled", "replayed") and not self._curve.is_flat

    @property
    def _averaged_s(self) -> float:
        return self.trace.averaged_s or 0.0

    @cached_property
    def _stands_s(self) -> Array:
        return _bounds_s(self._curve.stands)

    @cached_property
    def _lone(self) -> tuple[list[LoneStep], Array]:
        """What stands alone, and its bounds. What is computed does not jump; what stands until the next reading was
        thought about by its gauge."""
        trace = self.trace
        if trace.kind not in ("counter", "power") or trace.method in ("modelled", "relative gauge"):
            return [], _bounds_s([])
        if trace.kind == "counter":
            shown_j = unwrapped(trace, self._name)
            lone = lone_steps(trace.times_s, shown_j, trace.sample_interval_s, trace.update_period_s)
        else:
            lone = lone_spikes(trace)
        return lone, _bounds_s(lone)

    @cached_property
    def _that_may_rest(self) -> ComponentEnergy:
        return ComponentEnergy(Resting(replace(self.trace, can_rest=True)), of_load=self._of_load)

    @cached_property
    def _off_s(self) -> Array:
        """Stretches [n, 2] in which a sensor of power showed nothing."""
        trace = self.trace
        off = [] if trace.kind == "counter" else runs_of(shows_nothing(trace))
        last = len(trace.times_s) - 1
        off_s = [(trace.times_s[max(i - 1, 0)], trace.times_s[min(j, last)]) for i, j in off]
        return np.asarray(off_s, dtype=np.float64).reshape(-1, 2)

    @cached_property
    def _is_at_rest(self) -> bool:
        return at_rest(self.trace)

    @cached_property
    def _gaps_s(self) -> Array:
        """[n, 2]: readings too far apart, then those that the sampler recorded."""
        trace = self.trace
        t, bound_s = trace.times_s, GAP_FACTOR * max(trace.sample_interval_s, trace.update_period_s)
        wide = np.flatnonzero(np.diff(t) > bound_s) if bound_s > 0 else np.array([], dtype=np.intp)
        recorded_s = np.asarray(trace.gaps_s, dtype=np.float64).reshape(-1, 2)
        return np.concatenate([np.stack([t[wide], t[wide + 1]], axis=1), recorded_s])

    # --- one window --------------------------------------------------------------------------------------------------

    def _jumped(self, edges: Array, energy_j: float) -> tuple[float, str | None]:
        """(standard uncertainty, remark) of what stands alone. Raises UnresolvedError where it decides the energy."""
        is_counter = self.trace.kind == "counter"
        one, source = ("step", "a jump of the counter") if is_counter else ("spike", "an error of the sensor")
        steps = [
            step
            for step in _near(*self._lone, edges)
            if np.any((edges[:, 0] < step.end_s) & (edges[:, 1] > step.start_s)) and not _confirms(self._beside, step)
        ]
        if not steps:
            return 0.0, None
        excess_j = math.fsum(lone.excess_j for lone in steps)
        lasted_s = math.fsum(lone.end_s - lone.start_s for lone in steps)
        what = (
            f"{self._name}: {f'one {one}' if len(steps) == 1 else f'{len(steps)} {one}s'} of"
            f" {math.fsum(lone.step_j for lone in steps):.4g} J in {format_duration(lasted_s)},"
            f" {excess_j:.4g} J above the power beside"
        )
        # What made the counter jump once may have done so again: they err together.
        sigma_j = excess_j / math.sqrt(3)
        if sigma_j > MAX_JUMP_SIGMA * energy_j:
            raise UnresolvedError(f"{what}: {source}, or a burst, which its readings cannot tell")
        return sigma_j, f"{what}; it may be {source}"

    def _check_resolved(self, update_s: float, edges: Array) -> None:
        """Raises UnresolvedError where the trace does not determine the energy."""
        trace, name, t = self.trace, self._name, self.trace.times_s
        lengths_s = edges[:, 1] - edges[:, 0]
        if np.any(lengths_s < 0):
            raise UnresolvedError(f"{name}: a window ends before it starts")
        start_s, end_s = float(edges.min()), float(edges.max())
        # The last mean stands in the middle of its time.
        last_s = float(t[-1]) - self._averaged_s / 2
        if start_s < t[0] - EDGE_TOLERANCE_S or end_s > last_s + EDGE_TOLERANCE_S:
            raise UnresolvedError(
                f"{name}: the readings ({last_s - t[0]:.3g} s) leave {max(t[0] - start_s, end_s - last_s):.3g} s"
                f" of the window uncovered{and_left_out(trace)}"
            )
        self._check_gaps(edges)
        # A counter read at its own edges needs no sampling interval; watts must be sampled within the interval.
        period_s = update_s if trace.kind == "counter" else max(update_s, trace.sample_interval_s, self._averaged_s)
        edges = _without_slivers(edges, period_s)
        mean_s = float((edges[:, 1] - edges[:, 0]).mean())
        if period_s > 0 and mean_s < MIN_UPDATES * period_s:
            what = "the window is" if len(edges) == 1 else f"{len(edges)} intervals are on average"
            raise UnresolvedError(
                f"{name}: unresolved, {what} {format_duration(mean_s)}, {mean_s / period_s:.2g} updates of"
                f" {format_duration(period_s)}; {MIN_UPDATES} are needed"
                " (longer prompts, more requests or a faster meter)"
            )
        if self._is_at_rest:
            raise UnresolvedError(
                f"{name}: {showing(trace)} for {t[-1] - t[0]:.3g} s; nothing that is switched on uses 0 J"
            )
        if trace.kind == "counter":
            inside = t.searchsorted(edges[:, 1] + MARK_TOLERANCE_S) - t.searchsorted(edges[:, 0] - MARK_TOLERANCE_S)
            if float(inside.mean()) < 2:
                closer = "a shorter sample_interval_s"
                if trace.method == "replayed":  # it has the readings that it has
                    closer = "recorded with a shorter --interval"
                raise UnresolvedError(
                    f"{name}: unresolved, {float(inside.mean()):.2g} counter readings per interval of"
                    f" {format_duration(mean_s)}; 2 are needed ({closer})"
                )

    def _check_gaps(self, edges: Array) -> None:
        """Watts are unknown in a gap; a counter should go on counting, so only an edge inside a gap is lost.

        Whether it did is judged by what it counted meanwhile (`results.liveness`).
        """
        if not len(self._gaps_s):
            return
        near = (self._gaps_s[:, 0] < edges.max()) & (self._gaps_s[:, 1] > edges.min())
        for gap_start, gap_end in self._gaps_s[near].tolist():
            within = (edges[:, :1] < gap_end - EDGE_TOLERANCE_S) & (edges[:, 1:] > gap_start + EDGE_TOLERANCE_S)
            lost, why = within, ""
            if self.trace.kind == "counter":
                lost = (edges > gap_start + MARK_TOLERANCE_S) & (edges < gap_end - MARK_TOLERANCE_S)
                if within.any() and self._may_have_wrapped_unseen(gap_start, gap_end):
                    lost, why = within, f"; a counter that wraps at {self.trace.wrap_at_j:.6g} J may do so unseen there"
            if lost.any():
                raise UnresolvedError(
                    f"{self._name}: gap of {gap_end - gap_start:.3g} s in the readings"
                    f" {gap_start - float(edges.min()):.3g} s into the window{why}{and_left_out(self.trace)}"
                )

    def _may_have_wrapped_unseen(self, start_s: float, end_s: float) -> bool:
        """Whether so much more could have flowed as the counter does not show. Of one of which nobody says how much
        can flow, nothing is known."""
        wrap_at_j, most_w = self.trace.wrap_at_j, self.trace.max_power_w
        if wrap_at_j is None or most_w is None:
            return False
        before_j, behind_j = energy_at(self._curve, np.asarray([start_s, end_s])).tolist()
        return bool(behind_j - before_j + wrap_at_j <= most_w * (end_s - start_s))


def _without_slivers(edges: Array, period_s: float) -> Array:
    """Where loading is set aside, a window has some milliseconds before its program begins, and after it has ended."""
    lengths_s = edges[:, 1] - edges[:, 0]
    order = np.argsort(lengths_s)
    is_sliver = np.cumsum(lengths_s[order]) < MAX_SLIVERS * lengths_s.sum()
    is_sliver &= lengths_s[order] < period_s
    kept: Array = edges[np.sort(order[~is_sliver])]
    return kept


def _bounds_s(found: Sequence[_Lasting]) -> Array:
    return np.asarray([(one.start_s, one.end_s) for one in found], dtype=np.float64).reshape(-1, 2)


def _near(found: Sequence[_L], bounds_s: Array, edges: Array) -> Sequence[_L]:
    """Those that reach between the first and the last edge."""
    if not found:
        return []
    is_near = (bounds_s[:, 0] < edges.max()) & (bounds_s[:, 1] > edges.min())
    return [found[i] for i in np.flatnonzero(is_near).tolist()]


def _confirms(beside: Beside | None, lone: LoneStep) -> bool:
    other = None if beside is None else beside.between(lone.start_s, lone.end_s)
    return other is not None and 2 * other[0] >= lone.step_j
