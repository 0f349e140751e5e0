"""The power that a window stays below for most of its time, from the raw traces of one meter.

The total's power is the sum of its additive components: of a sensor the nearest reading, held, or a counter's
difference quotient. A line between two readings would show powers that never flowed, and fewer of the highest. What a
stretch between two instants counts is how long it lasts, so that dense readings at phase edges have no more say. It
speaks of what the meter shows: a peak shorter than its update period (of a counter, some of them) is averaged away, so
a window needs `MIN_UPDATES` updates.

A window without energy has none. Where a source stood still, was late or showed what cannot be, the power sensor beside
says what flowed; without one, the least and the most that it could have been must come to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from results.component_energy import MIN_UPDATES
from results.cumulative import GAP_FACTOR, UnresolvedError, cumulative, unbroken
from results.energy import NO_JOULES, Array, energy_between
from results.intervals import Interval
from results.records import PowerTrace
from results.rest import beside_of, moving_parts

P90 = 0.9
MEAN_OVER = 8
"""Times the doubt of when a counter was renewed, and of its steps: its power is a mean over so long, or over so much
energy, known to 5 % (sqrt(2 / 12) / 8)."""
SAME_SHARE = 0.05
"""What it may be, over what it is: a stretch of which nobody knows may move it by no more."""


class _Curve(NamedTuple):
    """Watts at these times; between two those of the first or of the second."""

    times_s: Array
    watts: Array
    side: str
    unknown_s: tuple[Interval, ...] = ()


def p90_power(traces: Sequence[PowerTrace], window: Interval, meter: str) -> tuple[float | None, str | None]:
    """(watts, None), or (None, why the meter cannot tell)."""
    traces = [unbroken(t, *window) for t in traces]
    chosen = [t for t in traces if t.meter == meter and t.additive]
    if not chosen:
        return None, f"P90 power: meter {meter} has no trace"
    if any(t.method == "relative gauge" for t in chosen):
        return None, f"P90 power: {NO_JOULES}"
    try:
        chosen, _ = moving_parts(traces, meter)
        for trace in chosen:
            _check_resolved(trace, window)
        energy = energy_between(traces, [window], "all", meter)
        if energy.energy_j is None:
            raise UnresolvedError(str(energy.reason))
        return _quantile_w([_curve(trace, traces, window) for trace in chosen], window), None
    except UnresolvedError as reason:
        return None, f"P90 power: {reason}"


def _quantile_w(curves: Sequence[_Curve], window: Interval) -> float:
    """Raises UnresolvedError where it depends on stretches that are not known."""
    start_s, end_s = window
    bounds_s = [at_s for curve in curves for stretch in curve.unknown_s for at_s in stretch]
    edges = np.unique(np.concatenate([*(curve.times_s for curve in curves), bounds_s]))
    edges = np.concatenate([[start_s], edges[(edges > start_s) & (edges < end_s)], [end_s]])
    middles, lasting_s = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    total_w = np.sum([_power_at(curve, middles) for curve in curves], axis=0)
    unknown = np.zeros(len(middles), dtype=np.bool_)
    for curve in curves:
        for first_s, last_s in curve.unknown_s:
            unknown |= (middles > first_s) & (middles < last_s)
    found_w, low_w, high_w = (
        _weighted(np.where(unknown, told_w, total_w), lasting_s) for told_w in (total_w, -np.inf, np.inf)
    )
    if high_w - low_w > SAME_SHARE * found_w:
        what = f"it is between {low_w:.4g} W and {'more than can be told' if np.isinf(high_w) else f'{high_w:.4g} W'}"
        raise UnresolvedError(f"a source stood still or was late for {lasting_s[unknown].sum():.3g} s: {what}")
    return found_w


def _weighted(watts: Array, lasting_s: Array) -> float:
    order = np.argsort(watts, kind="stable")
    reached = np.cumsum(lasting_s[order]) / lasting_s.sum()
    return float(watts[order][int(np.searchsorted(reached, P90 - 1e-9))])


def _curve(trace: PowerTrace, traces: Sequence[PowerTrace], window: Interval) -> _Curve:
    """Raises UnresolvedError."""
    curve = cumulative(trace)
    unknown_s = {(stand.start_s, stand.end_s) for stand in curve.stands if stand.basis != "rest"}
    if curve.watts is not None:
        times_s = curve.times_s if curve.is_flat else _nearest_from_s(curve.times_s)
        return _Curve(times_s, curve.watts, "first", tuple(unknown_s))
    t, segment_j = curve.times_s, np.diff(curve.energy_j)
    if trace.method != "modelled":
        # Late renewals bring the joules, and do not say when they flowed; nor does one step of the counter.
        long = np.diff(t) > GAP_FACTOR * max(curve.update_period_s, trace.sample_interval_s)
        long &= segment_j > 2 * trace.resolution
        rests = {(stand.start_s, stand.end_s) for stand in curve.stands if stand.basis == "rest"}
        unknown_s |= {(float(t[i]), float(t[i + 1])) for i in np.flatnonzero(long)} - rests
    unknown_s = {(first_s, last_s) for first_s, last_s in unknown_s if first_s < window[1] and last_s > window[0]}
    beside = beside_of(trace, traces) if unknown_s else None
    if beside is not None and all(beside.between(*stretch_s) is not None for stretch_s in unknown_s):
        return _Curve(_nearest_from_s(beside.read_s), beside.watts, "first")
    # Marks lie microseconds from other readings, and renewals come between them: over so little the quotient is jitter.
    unsure_s = min(curve.update_period_s, trace.sample_interval_s) if trace.update_period_s > 0 else 0.0
    least_s = max(trace.sample_interval_s / 4, MEAN_OVER * unsure_s)
    # A value is also short of what flowed by up to one step, or by what flows in an update.
    mean_w = float((curve.energy_j[-1] - curve.energy_j[0]) / (t[-1] - t[0]))
    least_j = MEAN_OVER * min(trace.resolution, mean_w * trace.update_period_s)
    kept, energies_j = [0], curve.energy_j.tolist()
    for i, at_s in enumerate(t.tolist()):
        if at_s - t[kept[-1]] >= least_s and energies_j[i] - energies_j[kept[-1]] >= least_j and i:
            kept.append(i)
    if len(kept) == 1:
        name = f"{trace.meter} {trace.component}"
        raise UnresolvedError(f"{name}: its readings span {t[-1] - t[0]:.2g} s, too little for one power")
    watts = np.diff(curve.energy_j[kept]) / np.diff(t[kept])
    return _Curve(t[kept][1:], watts, "second", tuple(unknown_s))


def _nearest_from_s(times_s: Array) -> Array:
    """From when on each reading is the nearest."""
    return np.concatenate([times_s[:1], (times_s[1:] + times_s[:-1]) / 2])


def _check_resolved(trace: PowerTrace, window: Interval) -> None:
    """Raises UnresolvedError."""
    start_s, end_s = window
    name = f"{trace.meter} {trace.component}"
    if len(trace.times_s) < 2:
        raise UnresolvedError(f"{name}: fewer than two readings")
    if any(gap_start < end_s and gap_end > start_s for gap_start, gap_end in trace.gaps_s):
        raise UnresolvedError(f"{name}: a gap in the readings")
    if trace.method == "modelled" and trace.update_period_s == trace.sample_interval_s == 0:
        return
    n_read = int(((trace.times_s >= start_s) & (trace.times_s <= end_s)).sum())
    changed = int(np.count_nonzero(np.diff(trace.values[(trace.times_s >= start_s) & (trace.times_s <= end_s)])))
    n_renewed = changed if trace.kind == "counter" else n_read
    period_s = max(trace.update_period_s, trace.averaged_s or 0.0)
    if period_s > 0:
        n_renewed = min(n_renewed, int((end_s - start_s) / period_s))
    if n_renewed < MIN_UPDATES:
        raise UnresolvedError(f"{name}: {n_renewed} new values in the window, {MIN_UPDATES} are needed")


def _power_at(curve: _Curve, at_s: Array) -> Array:
    # A counter's quotient is of the time before its reading, a held value of the time after.
    is_after = curve.side == "second"
    found = np.searchsorted(curve.times_s, at_s, side="left" if is_after else "right") - (0 if is_after else 1)
    return np.asarray(curve.watts[np.clip(found, 0, len(curve.watts) - 1)])
