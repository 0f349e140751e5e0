"""The power that a window stays below for most of its time, from the raw traces of one meter.

The total's power is the sum of its additive components, each as `results.energy.power_curve` gives it: linear between
readings, held, or a counter's difference quotient. What a stretch between two instants counts is how long it lasts, so
that dense readings at phase edges have no more say. It speaks of what the meter shows: a peak shorter than its update
period is averaged away, so a window needs `MIN_UPDATES` updates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from results.cumulative import UnresolvedError, unbroken
from results.energy import MIN_UPDATES, NO_JOULES, Array, Interval, power_curve
from results.records import PowerTrace
from results.rest import moving_parts

P90 = 0.9


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
        curves = [power_curve(trace) for trace in chosen]
    except UnresolvedError as reason:
        return None, f"P90 power: {reason}"
    start_s, end_s = window
    edges = np.unique(np.concatenate([times_s for times_s, _ in curves]))
    edges = np.concatenate([[start_s], edges[(edges > start_s) & (edges < end_s)], [end_s]])
    middles, lasting_s = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    total_w = np.sum([_power_at(trace, curve, middles) for trace, curve in zip(chosen, curves, strict=True)], axis=0)
    order = np.argsort(total_w, kind="stable")
    reached = np.cumsum(lasting_s[order]) / lasting_s.sum()
    return float(total_w[order][int(np.searchsorted(reached, P90 - 1e-9))]), None


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
    if trace.update_period_s > 0:
        n_renewed = min(n_renewed, int((end_s - start_s) / trace.update_period_s))
    if n_renewed < MIN_UPDATES:
        raise UnresolvedError(f"{name}: {n_renewed} new values in the window, {MIN_UPDATES} are needed")


def _power_at(trace: PowerTrace, curve: tuple[Array, Array], at_s: Array) -> Array:
    times_s, watts = curve
    if trace.kind == "power":
        return np.asarray(np.interp(at_s, times_s, watts))
    # A counter's quotient is of the time before its reading, a held value of the time after.
    is_counter = trace.kind == "counter"
    found = np.searchsorted(times_s, at_s) if is_counter else np.searchsorted(times_s, at_s, side="right") - 1
    return np.asarray(watts[np.clip(found, 0, len(watts) - 1)])
