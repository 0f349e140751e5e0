"""Whether two readings of one component agree: an energy counter, and the power samples taken beside it.

The comparison is made over the part of the trace that both resolve. Both gains count, although one sensor may feed
both: then a disagreement means even more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from results.component_energy import MIN_UPDATES
from results.cumulative import GAP_FACTOR
from results.derivation import energy_of_spans
from results.intervals import Interval
from results.records import EnergyReading, PowerTrace
from results.rest import POWER_BESIDE

COVERAGE = 2.0
"""Standard uncertainties of the difference that two honest meters exceed in 5 % of the windows."""


class Comparison(NamedTuple):
    """Energy of one component by its counter and by its power samples, over the same time."""

    component: str
    counter: EnergyReading
    power: EnergyReading
    unread_s: float = 0.0
    """So long one of them was not read: what it counted meanwhile is not compared."""

    @property
    def uncertainty_j(self) -> float | None:
        """Of the difference, one sigma; None where one of them is not resolved."""
        parts = (self.counter.uncertainty_j, self.power.uncertainty_j)
        return None if None in parts else math.hypot(*(p for p in parts if p is not None))

    @property
    def disagrees(self) -> bool:
        if self.counter.energy_j is None or self.power.energy_j is None or self.uncertainty_j is None:
            return False
        return abs(self.power.energy_j - self.counter.energy_j) > COVERAGE * self.uncertainty_j

    def __str__(self) -> str:
        if self.counter.energy_j is None or self.power.energy_j is None or self.uncertainty_j is None:
            return f"counter and power samples not compared: {self.counter.reason or self.power.reason}"
        figures = (
            f"counter {self.counter.energy_j:.4g} J, power samples {self.power.energy_j:.4g} J"
            f" in {self.counter.duration_s:.3g} s ({COVERAGE * self.uncertainty_j:.2g} J apart is allowed)"
        )
        if self.unread_s > 0:
            figures += f", without {self.unread_s:.3g} s in which one of them was not read"
        if self.disagrees:
            return f"{self.component}: {figures}: they DISAGREE; trust neither before a third meter decides"
        return f"{figures}: they agree"


def compare(counter: PowerTrace, power: PowerTrace) -> Comparison:
    """Over the time in which both have readings, an update away from the ends, where a counter's value has no past, and
    a mean is of a time before them too.

    What lies in a gap of either is left out, with as much around it; stretches of less than ten updates too.
    """
    is_read = np.isfinite(power.values)
    power = replace(power, times_s=power.times_s[is_read], values=power.values[is_read])
    averaged_s = power.averaged_s or 0.0
    margin_s = max(counter.update_period_s, power.update_period_s + averaged_s)
    least_s = MIN_UPDATES * max(counter.update_period_s, power.update_period_s, power.sample_interval_s, averaged_s)
    stretches = [(a, b) for a, b in _without_gaps(counter, power, margin_s) if b - a >= least_s]
    common_s = _common(counter, power)
    unread_s = sum(max(min(b, common_s[1]) - max(a, common_s[0]), 0.0) for a, b in _gaps_s(counter, power))
    stretches = stretches or [common_s]
    counted, integrated = (energy_of_spans([t], stretches, t.meter, t.component) for t in (counter, power))
    return Comparison(counter.component, counted, integrated, unread_s)


def _common(*traces: PowerTrace) -> Interval:
    """From the last of their first readings to the first of their last ones."""
    return (
        max((float(t.times_s[0]) for t in traces if len(t.times_s)), default=0.0),
        min((float(t.times_s[-1]) for t in traces if len(t.times_s)), default=0.0),
    )


def _without_gaps(counter: PowerTrace, power: PowerTrace, margin_s: float) -> list[Interval]:
    """The stretches that both have read without a gap, a margin away from its ends."""
    start_s, end_s = _common(counter, power)
    edges_s = [start_s]
    for gap_start_s, gap_end_s in _gaps_s(counter, power):
        edges_s += [max(gap_start_s, start_s), max(gap_end_s, start_s)]
    edges_s.append(end_s)
    return [(a + margin_s, b - margin_s) for a, b in zip(edges_s[::2], edges_s[1::2], strict=True)]


def _gaps_s(*traces: PowerTrace) -> list[Interval]:
    """In which any of them has no reading: in order, none within another."""
    found: list[Interval] = []
    for start_s, end_s in sorted(gap for t in traces for gap in (*t.gaps_s, *_unread_s(t))):
        if found and start_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end_s))
        else:
            found.append((start_s, end_s))
    return found


def _unread_s(trace: PowerTrace) -> list[Interval]:
    bound_s = GAP_FACTOR * max(trace.sample_interval_s, trace.update_period_s) or math.inf
    wide = np.flatnonzero(np.diff(trace.times_s) > bound_s)
    return [(float(trace.times_s[i]), float(trace.times_s[i + 1])) for i in wide]


def comparisons(traces: Sequence[PowerTrace]) -> list[Comparison]:
    """One for each counter that has power samples beside it; from raw traces alone, so it can be done again later."""
    by_name = {(t.meter, t.component): t for t in traces}
    return [
        compare(t, by_name[t.meter, t.component + POWER_BESIDE])
        for t in traces
        if (t.meter, t.component + POWER_BESIDE) in by_name
    ]
