"""What a phone's raw current means: its unit, and its sign while the battery discharges.

The power-supply class of Linux asks for microampere, negative while discharging. Phones report microampere or
milliampere, and either sign; two nodes of one phone may disagree. So a few seconds are taken while the status is
`discharging`, and the reading decides that gives a power a phone can have. Raw values are kept beside what was decided.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devices.base import DeviceError
from devices.gauges import MAX_POWER_W, MIN_POWER_W
from results.charge import volt_per_unit
from results.units import format_share

Array = NDArray[np.float64]

MILLIAMPERE_BELOW = 20_000
"""A median below is milliampere: 20 mA is less than a phone that is awake draws, 20 A more than any."""
AMBIGUOUS_W = 12.0
"""More in milliampere is more than a phone draws at rest; in microampere it would be one that is all but asleep."""
MIN_SAMPLES = 10
SAME_SIGN = 0.9
"""The share of samples that must agree."""


@dataclass(frozen=True)
class Calibration:
    """power = sign x current x ampere_per_unit x voltage x volt_per_unit."""

    sign: int
    ampere_per_unit: float
    volt_per_unit: float

    def power_w(self, current: Array, voltage: Array) -> Array:
        """Of raw readings. Positive: the battery discharges."""
        return self.sign * current * self.ampere_per_unit * voltage * self.volt_per_unit

    def __str__(self) -> str:
        unit = "mA" if self.ampere_per_unit == 1e-3 else "uA"
        return f"current in {unit}, {'positive' if self.sign > 0 else 'negative'} while discharging"


def calibrate(current: Array, voltage: Array) -> Calibration:
    """From raw readings [n] of a discharging battery. Raises `DeviceError` where they cannot be a battery's."""
    usable = np.isfinite(current) & np.isfinite(voltage)
    if usable.sum() < MIN_SAMPLES:
        raise DeviceError(f"{int(usable.sum())} of {len(current)} readings are numbers; {MIN_SAMPLES} are needed")
    current, voltage = current[usable], voltage[usable]
    volt_per_unit = volt_per_unit_of(float(np.median(voltage)))
    median = float(np.median(np.abs(current)))
    if median == 0:
        raise DeviceError("the current reads 0; this node is not wired to a gauge")
    sign = 1 if np.median(current) > 0 else -1
    agreeing = float((np.sign(current) == sign).mean())
    if agreeing < SAME_SIGN:
        raise DeviceError(
            f"the current changes its sign while discharging ({format_share(agreeing)} of the readings agree); is"
            " a charger on?"
        )
    volts = float(np.median(voltage)) * volt_per_unit
    guess, other = (1e-3, 1e-6) if median < MILLIAMPERE_BELOW else (1e-6, 1e-3)
    if guess == 1e-3 and AMBIGUOUS_W < median * guess * volts <= MAX_POWER_W:
        raise DeviceError(
            f"a current of {median:g} at {volts:.3g} V is {median * volts * 1e-3:.3g} W if it is in mA and"
            f" {median * volts * 1e-6:.3g} W if in uA, and both may be; wake the phone, end what runs, and try again"
        )
    for ampere_per_unit in (guess, other):
        if MIN_POWER_W <= median * ampere_per_unit * volts <= MAX_POWER_W:
            return Calibration(sign, ampere_per_unit, volt_per_unit)
    raise DeviceError(
        f"a current of {median:g} at {volts:.3g} V is {median * volts * 1e-6:.3g} W if it is in uA and"
        f" {median * volts * 1e-3:.3g} W if in mA; a phone draws {MIN_POWER_W:g} to {MAX_POWER_W:g} W"
    )


def volt_per_unit_of(median: float) -> float:
    """By what a battery may show. Raises `DeviceError` where that is no voltage of one."""
    unit = volt_per_unit(median)
    if unit is None:
        raise DeviceError(f"a voltage of {median:g} is no battery's in uV, mV or V")
    return unit
