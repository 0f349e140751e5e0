"""What a phone's gauge of its battery said, as it said it, and the power that follows once sign and unit are decided.

Two traces of kind `raw` on the host's clock, of all samples, unreadable ones (NaN) included:

    battery current   in uA or mA, of either sign; or
    battery charge    uAh left, of a charge counter
    battery voltage   in uV, mV or V

They are stored beside the watts, so that the decision can be made again without the phone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from devices.android.calibration import Calibration, volt_per_unit_of
from devices.android.device_clock import clock_note
from devices.android.gauge_loop import GaugeLog, on_host_clock
from devices.base import Channel, DeviceError
from devices.gauges import (
    MAX_POWER_W,
    left_out_stretches_s,
    observed_update_period_s,
    plausible_power,
    renewed_readings,
    smallest_step,
    stuck_stretches_s,
)
from results.charge import C_PER_UAH, VOLTAGE
from results.records import Method, PowerTrace

Array = NDArray[np.float64]
GaugeKind = Literal["current", "charge"]

METER = "battery"
METHOD: Method = "battery gauge"
MAH_OVER_UAH = 1e3
LEAST_CHANGES = 3
"""Of the counter, from which its power is known."""


def raw_traces(readings: GaugeLog, kind: GaugeKind, period_s: float) -> tuple[PowerTrace, PowerTrace]:
    """(current or charge, voltage). Raises `TransientDeviceError` where the phone's clock cannot be followed."""
    times_s, clock, which = on_host_clock(readings)
    note = clock_note(clock, which)
    shown = {f"battery {kind}": readings.current, VOLTAGE: readings.voltage}
    first, second = (
        Channel(component, "raw", resolution=smallest_step(values), additive=False, note=note).trace(
            METER, METHOD, times_s, values, period_s
        )
        for component, values in shown.items()
    )
    return first, second


def power_of(raw: Sequence[PowerTrace], calibration: Calibration, channel: Channel) -> PowerTrace:
    """Watts that stand until the next reading. What no phone draws is left out, and counted."""
    current, voltage = raw
    times_s, shown = current.times_s, current.values
    watts = calibration.power_w(shown, voltage.values)
    plausible, left_out = plausible_power(watts)
    # Two samples may fall into one step of the uptime.
    usable = plausible & (np.diff(times_s, prepend=-np.inf) > 0)
    period_s = observed_update_period_s(times_s[usable], shown[usable])
    kept = np.flatnonzero(usable)[renewed_readings(times_s[usable], shown[usable], period_s)]
    watts_per_unit = calibration.ampere_per_unit * _typical(voltage.values) * calibration.volt_per_unit
    return replace(
        channel,
        update_period_s=period_s,
        resolution=smallest_step(shown[usable]) * watts_per_unit,
        note=f"{channel.note}; {current.note}",
    ).trace(
        METER,
        METHOD,
        times_s[kept],
        watts[kept],
        current.sample_interval_s,
        stuck_stretches_s(times_s[usable], shown[usable], period_s) + left_out_stretches_s(times_s, usable, period_s),
        left_out,
    )


def energy_of(raw: Sequence[PowerTrace], channel: Channel) -> PowerTrace:
    """Joules since the first reading, from the charge that is left (uAh) and the voltage at each step.

    A reading that is no number, or 0, which a phone says that does not know its charge, is left out: the next one
    counts what was taken meanwhile. Below 0 a counter that began anywhere may be. Raises `DeviceError` where the
    voltage is no battery's, or the charge is not in uAh.
    """
    charge, voltage = raw
    usable = np.isfinite(charge.values) & (charge.values != 0) & np.isfinite(voltage.values)
    times_s, left_uah, volts = charge.times_s[usable], charge.values[usable], voltage.values[usable]
    if len(volts):
        volts = volts * volt_per_unit_of(float(np.median(volts)))
    taken_c = -np.diff(left_uah) * C_PER_UAH
    joules = np.concatenate([[0.0], np.cumsum(taken_c * (volts[:-1] + volts[1:]) / 2)])[: len(times_s)]
    _refuse_other_unit(times_s, joules)
    steps = np.abs(taken_c[taken_c != 0])
    period_s = observed_update_period_s(times_s, left_uah)
    return replace(
        channel,
        update_period_s=period_s,
        resolution=float(steps.min() * np.median(volts)) if len(steps) else 0.0,
        note=f"{channel.note}; {charge.note}",
    ).trace(
        METER,
        METHOD,
        times_s,
        joules,
        charge.sample_interval_s,
        left_out_stretches_s(charge.times_s, usable, period_s),
        None if usable.all() else f"{int((~usable).sum())} of {len(usable)} readings tell no charge: left out",
    )


def _refuse_other_unit(times_s: Array, joules: Array) -> None:
    """Some phones count in mAh where Android asks for uAh. Raises `DeviceError` where that alone explains the power."""
    changed = np.flatnonzero(np.diff(joules) != 0) + 1
    if len(changed) < LEAST_CHANGES:
        return
    first, last = changed[0], changed[-1]
    watts = float(joules[last] - joules[first]) / float(times_s[last] - times_s[first])
    if 0 < watts * MAH_OVER_UAH <= MAX_POWER_W:
        raise DeviceError(
            f"battery: the charge counter tells {watts * 1e3:.3g} mW if it is in uAh, as Android asks, and"
            f" {watts * MAH_OVER_UAH:.3g} W if in mAh; no phone that works draws as little as the first, so this"
            " phone's unit is another one, and no joules are made of it"
        )


def _typical(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else 0.0
