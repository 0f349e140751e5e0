"""Whether two readings of one component agree: an energy counter, and the power samples taken beside it.

The comparison is made over the part of the trace that both resolve. Both gains count, although one sensor may feed
both: then a disagreement means even more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from results.energy import POWER_BESIDE, energy_between
from results.records import EnergyReading, PowerTrace

COVERAGE = 2.0
"""Standard uncertainties of the difference that two honest meters exceed in 5 % of the windows."""


class Comparison(NamedTuple):
    """Energy of one component by its counter and by its power samples, over the same time."""

    component: str
    counter: EnergyReading
    power: EnergyReading

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
            f" in {self.counter.duration_s:.3g} s (+- {COVERAGE * self.uncertainty_j:.2g} J)"
        )
        if self.disagrees:
            return f"{self.component}: {figures}: they DISAGREE; trust neither before a third meter decides"
        return f"{figures}: they agree"


def compare(counter: PowerTrace, power: PowerTrace) -> Comparison:
    """Over the time in which both have readings, an update away from the ends, where a counter's value has no past."""
    margin_s = max(counter.update_period_s, power.update_period_s)
    traces = (counter, power)
    whole = (
        max((float(t.times_s[0]) for t in traces if len(t.times_s)), default=0.0) + margin_s,
        min((float(t.times_s[-1]) for t in traces if len(t.times_s)), default=0.0) - margin_s,
    )
    both = [energy_between([t], [whole], "all", t.meter, t.component) for t in traces]
    return Comparison(counter.component, *both)


def comparisons(traces: Sequence[PowerTrace]) -> list[Comparison]:
    """One for each counter that has power samples beside it; from raw traces alone, so it can be done again later."""
    by_name = {(t.meter, t.component): t for t in traces}
    return [
        compare(t, by_name[t.meter, t.component + POWER_BESIDE])
        for t in traces
        if (t.meter, t.component + POWER_BESIDE) in by_name
    ]
