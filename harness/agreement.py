"""Whether two readings of the same energy agree: two meters of one unit, or a counter and the power samples beside it.

Both sides have gains and edges of their own: they disagree where they differ by more than two standard uncertainties of
their difference, which honest meters do in one window of twenty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from devices.base import Meter, Unit
from devices.meters.cross_check import COVERAGE, comparisons
from devices.meters.same_counter import shared_counter
from results.derivation import energy_of_spans
from results.intervals import Interval
from results.records import EnergyReading, PowerTrace
from results.self_tests import Agreement

UNITS: tuple[Unit, ...] = ("cpu", "gpu", "npu")


def agreements(meters: Sequence[Meter], traces: Sequence[PowerTrace], window: Interval) -> Iterator[Agreement]:
    """Pairs of meters that count the same unit by measuring. A battery sees the whole device: it has no equal."""
    exact = [m for m in meters if m.method in ("counter", "integrated power")]
    for first, second in itertools.combinations(exact, 2):
        for unit in UNITS:
            sides = [_unit_energy(m, unit, traces, window) for m in (first, second)]
            if all(s is not None and s.energy_j and s.uncertainty_j is not None for s in sides):
                a, b = ((s.energy_j or 0.0, s.uncertainty_j or 0.0) for s in sides if s is not None)
                mean_j = (a[0] + b[0]) / 2
                yield Agreement(
                    meters=(first.name, second.name),
                    unit=unit,
                    energy_j=(a[0], b[0]),
                    difference=(b[0] - a[0]) / mean_j,
                    allowed=COVERAGE * math.hypot(a[1], b[1]) / mean_j,
                )


def disagreements(meters: Sequence[Meter], traces: Sequence[PowerTrace], window: Interval) -> list[str]:
    """What a trial's reader must know: readings of the same energy that cannot both be right.

    Of two meters only where both read the same counter: others see more of a unit, or less, and may differ.
    """
    found = [str(comparison) for comparison in comparisons(traces) if comparison.disagrees]
    for pair in agreements(meters, traces, window):
        if shared_counter(*pair.meters) is not None and not pair.agrees:
            (first, second), (first_j, second_j) = pair.meters, pair.energy_j
            found.append(
                f"{pair.unit}: {first} {first_j:.4g} J, {second} {second_j:.4g} J in {window[1] - window[0]:.3g} s"
                f" ({100 * pair.difference:+.2g} %, {100 * pair.allowed:.2g} % allowed), and both read"
                f" {shared_counter(first, second)}: they DISAGREE; trust neither before a third meter decides"
            )
    return found


def _unit_energy(meter: Meter, unit: Unit, traces: Sequence[PowerTrace], window: Interval) -> EnergyReading | None:
    """What a meter counted of one unit; None where it does not see it."""
    components = [c.component for c in meter.channels if c.computes == unit and c.additive]
    own = [t for t in traces if t.meter == meter.name and t.component in components]
    return energy_of_spans(own, [window], meter.name) if own else None
