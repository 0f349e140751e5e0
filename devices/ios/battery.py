"""The battery of an iPhone as a power meter: current times voltage of the whole phone, as the diagnostics service says.

Coarse: the registry renews its values every few seconds at best, at some times not for a minute. How often it did is
observed in every window, and a window of less than ten updates has no energy. The phone must be off every charger, so
its link goes over Wi-Fi.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from devices.base import Channel, Clock, InterruptedWindowError, MeterUnavailableError, TransientDeviceError
from devices.gauges import (
    MAX_POWER_W,
    MIN_POWER_W,
    left_out_stretches_s,
    observed_update_period_s,
    plausible_power,
    renewed_readings,
    smallest_step,
    stuck_stretches_s,
)
from devices.ios.phone import Phone
from devices.ios.state import told_state
from devices.meters.polled import PolledMeter
from devices.sampler import find_gaps
from results.charge import VOLTAGE
from results.environments import Conditions
from results.records import Method, PowerTrace

Array = NDArray[np.float64]

log = logging.getLogger(__name__)

READ_EVERY_S = 1.0
"""Each reading wakes the phone's radio; the gauge has nothing new more often."""
OBSERVE_S = 3.0
MISSED_UPDATES = 3
"""More of them without a reading are a gap."""
RECONNECT_S = 30.0
"""How long a window's start waits for a phone that went away."""
RELATIVE_ACCURACY = 0.02 / math.sqrt(3)
"""Not stated by Apple. Fuel-gauge ICs state 1 % to 2 % of the reading, sense resistor included: uniform within 2 %, as
one sigma."""


RAW = {
    "battery current": "A into the battery: negative while it discharges",
    VOLTAGE: "V",
    "battery renewed": "s of the phone's clock when the gauge renewed its values",
}
"""Kept beside the watts, with their units: a register's sign was decided when they were read."""


class BatteryMeter(PolledMeter):
    """Power from the battery of a phone that discharges."""

    name = "battery"
    method: Method = "battery gauge"

    def __init__(self, phone: Phone, interval_s: float, clock: Clock) -> None:
        super().__init__(max(interval_s, READ_EVERY_S), clock)
        self._phone = phone
        self._raw: tuple[PowerTrace, ...] = ()
        self._states: list[Conditions] = []

    def open(self) -> None:
        """Some seconds, in which the gauge may show an update. Raises `DeviceError`."""
        battery = self._phone.battery()
        if battery is None or battery.power_w is None:
            raise MeterUnavailableError(
                f"battery: {self._phone.udid} tells no current of its battery (InstantAmperage, Voltage);"
                " is it an iPhone or an iPad?"
            )
        times_s, shown = [], []
        end_s = self._clock.now_s() + OBSERVE_S
        while self._clock.now_s() < end_s:
            times_s.append(self._clock.now_s())
            shown.append(self.read())
            self._wait(self._interval_s)
        readings = np.asarray(shown)
        self._refuse_implausible(readings)
        period_s = observed_update_period_s(np.asarray(times_s), readings[:, 0] * readings[:, 1])
        self.channels = (
            Channel(
                "battery",
                "held",
                update_period_s=period_s,
                relative_accuracy=RELATIVE_ACCURACY,
                note=f"whole phone, through {self._phone.way}",
            ),
        )

    def _refuse_implausible(self, readings: Array) -> None:
        """Where none of the first readings can be a phone's, none later will. Raises `MeterUnavailableError`."""
        if plausible_power(-readings[:, 0] * readings[:, 1])[0].any():
            return
        current_a, voltage_v = readings[-1, :2].tolist()
        raise MeterUnavailableError(
            f"battery: {self._phone.udid} tells {current_a * 1e3:.4g} mA at {voltage_v:.4g} V, and no phone draws less"
            f" than {MIN_POWER_W:g} or more than {MAX_POWER_W:g} W: one of them is not in the unit that Apple uses"
            " (mA, mV); this release of iOS is not known here"
        )

    def read(self) -> Sequence[float]:
        """Current in A, voltage in V, when the gauge was renewed, and whether a charger is on (1 or 0)."""
        at_s, battery = self._clock.now_s(), self._phone.battery()
        if battery is None:
            raise TransientDeviceError(f"battery: {self._phone.udid} does not show its battery any more")
        state = told_state(at_s, battery)
        # For hours: what is as it was is not kept.
        if not self._states or state.model_copy(update={"at_s": self._states[-1].at_s}) != self._states[-1]:
            self._states.append(state)
        return [_or_nan(v) for v in (battery.current_a, battery.voltage_v, battery.updated_at, battery.is_charging)]

    def start(self) -> None:
        """Begins a window. A phone that went away is waited for, up to a limit. Raises `TransientDeviceError`."""
        self._states = []
        try:
            super().start()
        except TransientDeviceError as error:
            log.info("%s; looking for it", error)
            self._phone.reach(RECONNECT_S)
            super().start()

    def traces(self, times_s: Array, values: Array) -> Sequence[PowerTrace]:
        """Raises `InterruptedWindowError` where a charger was on, or may have been: those readings are a gap."""
        [channel] = self.channels
        self._raw = tuple(
            Channel(component, "raw", additive=False, note=unit).trace(
                self.name, self.method, times_s, column, self._interval_s
            )
            for (component, unit), column in zip(RAW.items(), values.T, strict=False)
        )
        charging = values[:, 3]
        discharged = charging == 0
        traces = [power_of(self._raw, channel, discharged)]
        if np.any(charging == 1):
            raise InterruptedWindowError(
                f"battery: {self._phone.udid} was on a charger in the window, and its gauge did not see the load;"
                " take it off every cable and charging pad",
                traces,
            )
        if not discharged.all():
            raise InterruptedWindowError(
                f"battery: {self._phone.udid} did not say whether it charges in {int((~discharged).sum())} of"
                f" {len(charging)} readings of the window, and a charger would hide the load; look at its cable, and"
                " restart it where this goes on",
                traces,
            )
        return traces

    def states(self) -> Sequence[Conditions]:
        """Each reading tells it: charger, level, temperature."""
        return self._states

    def raw_traces(self) -> Sequence[PowerTrace]:
        """The last window's readings as the phone gave them."""
        return self._raw


def power_of(raw: Sequence[PowerTrace], channel: Channel, discharged: NDArray[np.bool_] | None = None) -> PowerTrace:
    """Watts that stand until the next reading. What no phone draws is left out, and counted. raw: of `RAW`.

    discharged: where nothing else carried the load; without it, everywhere. The rest is a gap, however short.
    """
    current = raw[0]
    values = np.stack([trace.values for trace in raw], axis=1)
    watts = -values[:, 0] * values[:, 1]
    plausible, left_out = plausible_power(watts)
    if discharged is not None:
        plausible &= discharged
    # A new time of renewal is no evidence of a new value.
    at_s, shown = current.times_s[plausible], watts[plausible]
    period_s = observed_update_period_s(at_s, shown)
    unread = find_gaps(current.times_s, current.sample_interval_s)
    # A slow answer is none: the value would have stood.
    gaps_s = tuple(gap for gap in unread if gap[1] - gap[0] > MISSED_UPDATES * period_s)
    if discharged is not None:
        gaps_s += left_out_stretches_s(current.times_s, discharged, 0.0)
    kept = renewed_readings(at_s, shown, period_s)
    return replace(channel, update_period_s=period_s, resolution=smallest_step(watts[plausible])).trace(
        current.meter,
        current.method,
        at_s[kept],
        watts[plausible][kept],
        current.sample_interval_s,
        gaps_s + stuck_stretches_s(at_s, shown, period_s) + left_out_stretches_s(current.times_s, plausible, period_s),
        left_out,
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)
