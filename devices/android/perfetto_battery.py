"""The battery's current through Perfetto: for phones whose shell may not read it itself (most of Android 11 to 14).

Perfetto reads the battery's HAL in a service of the phone's own, with the rights that the shell lacks. Older versions
of it have no voltage, and refuse a config that asks for it. The voltage moves slowly: it comes from `dumpsys battery`,
through the loop that ties the clocks.
"""

from __future__ import annotations

import numpy as np

from devices.android.battery_shell import read_voltage
from devices.android.gauge_loop import GaugeLog
from devices.android.perfetto import MARKER_PERIOD_S, Config, PerfettoTrace, phone_stamps
from devices.android.shell import Phone
from devices.base import Clock

PERFETTO_SOURCE = "perfetto android.power"
VOLTAGE_EVERY_S = 2.0
_VOLTAGE_ROWS = round(VOLTAGE_EVERY_S / MARKER_PERIOD_S)
_READ_VOLTAGE = f"c=; {read_voltage(_VOLTAGE_ROWS)}"


def offers_battery(phone: Phone) -> bool:
    """Whether perfetto runs and has the data source. Raises `DeviceError`."""
    return "android.power" in (phone.read("perfetto --query 2>/dev/null") or "")


class PerfettoGauge:
    """One use: `start`, `stop`. A `GaugeLoop` whose samples come out of a trace."""

    def __init__(self, phone: Phone, period_s: float, clock: Clock) -> None:
        self._trace = PerfettoTrace(phone, Config(battery=True, poll_s=period_s), clock, _READ_VOLTAGE)

    def start(self) -> None:
        """Returns when readings have begun. Raises `DeviceError`."""
        self._trace.start()

    def stop(self) -> GaugeLog:
        """The battery's samples: current as its HAL gives it, voltage in mV. None where the HAL does not answer.

        Raises `TransientDeviceError`.
        """
        power, beside = self._trace.stop()
        wall_s, uptime_s = phone_stamps(power.battery_boot_s, power)
        read = np.isfinite(beside.voltage)
        millivolt = (
            np.interp(power.battery_boot_s, beside.uptime_s[read], beside.voltage[read])
            if read.any()
            else np.full(len(power.battery_boot_s), np.nan)
        )
        return GaugeLog(wall_s, uptime_s, power.current_ua, millivolt, beside.bursts, beside.chargers)

    def received(self) -> None:
        """Of a trace whose link broke nothing came."""

    @property
    def lost(self) -> BaseException | None:
        """Why the link is gone, and with it the trace; None while it is there."""
        return self._trace.lost

    def cancel(self) -> None:
        """Ends it; nobody asks for its samples."""
        self._trace.cancel()
