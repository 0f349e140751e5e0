"""Whether two readings of the same energy agree: two meters of one unit, or a counter and the power samples beside it.

Both sides have gains and edges of their own: they disagree where they differ by more than two standard uncertainties of
their difference, which honest meters do in one window of twenty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from devices.base import Meter, Unit
from devices.meters.cross_check import COVERAGE, comparisons
from devices.meters.same_counter import shared_counter
from results.derivation import energy_of_spans
from results.intervals import Interval
from results.records import EnergyReading, PowerTrace
from results.self_tests import Agreement

UNITS: tuple[Unit, ...] = ("cpu", "gpu", "npu")
EXACT: Final = ("counter", "integrated power")


def agreements(meters: Sequence[Meter], traces: Sequence[PowerTrace], window: Interval) -> Iterator[Agreement]:
    """Pairs of meters that count the same unit by measuring. A battery sees the whole device: it has no equal."""
    exact = [m for m in meters if m.method in EXACT]
    for first, second in itertools.combinations(exact, 2):
        for unit in UNITS:
            alike = _same_parts(first, second, unit)
            sides = [
                _energy_of(m, parts, traces, window) for m, parts in zip((first, second), alike.components, strict=True)
            ]
            if all(s is not None and s.energy_j and s.uncertainty_j is not None for s in sides):
                a, b = ((s.energy_j or 0.0, s.uncertainty_j or 0.0) for s in sides if s is not None)
                mean_j = (a[0] + b[0]) / 2
                yield Agreement(
                    meters=(first.name, second.name),
                    unit=unit if not alike.left_out else f"{unit} ({', '.join(alike.components[0])} of {first.name})",
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


def not_compared(meters: Sequence[Meter]) -> Iterator[str]:
    """What one of two meters of one counter reads, and the other does not, or is not known to: it checks nothing."""
    for first, second in itertools.combinations([m for m in meters if m.method in EXACT], 2):
        for unit in UNITS:
            alike = _same_parts(first, second, unit)
            if shared_counter(first.name, second.name) is None or not alike.left_out:
                continue
            both = ", ".join(alike.components[0])
            yield (
                f"{first.name} and {second.name} are compared by {f'{both} of {first.name}' if both else 'nothing'} of"
                f" the {unit}: {', '.join(alike.left_out)} {'is' if len(alike.left_out) == 1 else 'are'} not known to"
                " be read by the other too"
            )


class _SameParts(NamedTuple):
    """Of two meters and one unit: the components of each that are of the same hardware, and all others."""

    components: tuple[list[str], list[str]]
    left_out: list[str]


def _same_parts(first: Meter, second: Meter, unit: Unit) -> _SameParts:
    """By what names a board everywhere; only where neither knows that all that they see of a unit is taken to be one.

    Each numbers GPUs for itself: CUDA_VISIBLE_DEVICES hides some of them from one of the meters alone.
    """
    sides = [[c for c in m.channels if c.computes == unit and c.additive] for m in (first, second)]
    if not all(sides):
        return _SameParts(([], []), [])
    known = [{c.hardware_id for c in side if c.hardware_id is not None} for side in sides]
    if not any(known):
        return _SameParts(([c.component for c in sides[0]], [c.component for c in sides[1]]), [])
    both = known[0] & known[1]
    ours, theirs = ([c.component for c in side if c.hardware_id in both] for side in sides)
    left_out = [
        f"{c.component} of {m.name}"
        for m, side in zip((first, second), sides, strict=True)
        for c in side
        if c.hardware_id not in both
    ]
    return _SameParts((ours, theirs), left_out)


def _energy_of(
    meter: Meter, components: Sequence[str], traces: Sequence[PowerTrace], window: Interval
) -> EnergyReading | None:
    """What a meter counted of them; None of none."""
    own = [t for t in traces if t.meter == meter.name and t.component in components]
    return energy_of_spans(own, [window], meter.name) if own else None
