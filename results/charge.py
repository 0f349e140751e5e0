"""The charge that a battery gave: what its gauge showed as power, over the voltage that was read beside it.

    held, power   I = P / U at each reading
    counter       the charge between two readings: E / U, of the mean of the two voltages

It is integrated as joules are (`results.energy`), over the same readings: its relative error is theirs. A phone's
battery is empty when its charge is; its joules follow from the voltage, which falls with it and under a load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from results.energy import MeterEnergy
from results.intervals import Interval
from results.records import PowerTrace

VOLTAGE: Final = "battery voltage"
"""Component of the raw trace beside the power."""
C_PER_UAH = 3.6e-3
VOLT_UNITS: Final = (1e-6, 1e-3, 1.0)
MIN_VOLTAGE_V, MAX_VOLTAGE_V = 2.5, 20.0
"""One cell nearly empty, to four in series."""

Array = NDArray[np.float64]


class BatteryCharge:
    """Of one meter, over any intervals."""

    def __init__(self, traces: Sequence[PowerTrace], raw: Sequence[PowerTrace], meter: str) -> None:
        """traces: of power or joules; raw: what was read beside them."""
        own = [t for t in traces if t.meter == meter and t.additive and t.method == "battery gauge"]
        volts = next((t for t in raw if t.meter == meter and t.component == VOLTAGE), None)
        read = None if volts is None else _volts(volts)
        self._currents = (
            None if read is None or not own else MeterEnergy([_current(t, *read) for t in own], meter, of_load=True)
        )

    def over_uah(self, intervals: Sequence[Interval]) -> float | None:
        """None where no voltage was read, or the readings do not tell (then they do not tell joules either)."""
        if self._currents is None:
            return None
        coulombs = self._currents.between(intervals, "all").energy_j
        return None if coulombs is None else coulombs / C_PER_UAH


def volt_per_unit(median: float) -> float | None:
    """Of a phone's readings of voltage, by what a battery may show; None where that is no voltage of one."""
    return next((unit for unit in VOLT_UNITS if MIN_VOLTAGE_V <= median * unit <= MAX_VOLTAGE_V), None)


def _volts(trace: PowerTrace) -> tuple[Array, Array] | None:
    """(times, volts) of the readings that are numbers; None where these are no voltage of a battery."""
    is_read = np.isfinite(trace.values)
    times_s, shown = trace.times_s[is_read], trace.values[is_read]
    if not len(shown):
        return None
    unit = volt_per_unit(float(np.median(shown)))
    return None if unit is None else (times_s, shown * unit)


def _current(trace: PowerTrace, read_s: Array, volts: Array) -> PowerTrace:
    """The trace in A, or in C of a counter."""
    beside_v = np.interp(trace.times_s, read_s, volts)
    if trace.kind == "counter":
        steps_c = np.diff(trace.values) / ((beside_v[1:] + beside_v[:-1]) / 2)
        values = np.concatenate([[0.0], np.cumsum(steps_c)])[: len(trace.values)]
    else:
        values = trace.values / beside_v
    return replace(trace, values=values, resolution=trace.resolution / float(np.median(volts)), max_power_w=None)
