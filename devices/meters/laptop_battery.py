"""The battery gauge of a laptop (Linux): power_now, or current_now x voltage_now, while it discharges.

It sees the whole machine: screen, disk, radio and all. On line power it sees nothing of the load, so the meter refuses;
a charger that is plugged in during a window, however shortly, leaves a gap in the readings, and the window has no
energy. The ACPI driver asks the battery at most once a second (`cache_time`), and many batteries renew their value more
slowly: the update period is the one that was observed in the window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from devices.base import Channel, Clock, DeviceError, MeterUnavailableError
from devices.gauges import left_out_stretches_s, observed_update_period_s, renewed_readings, stuck_stretches_s
from devices.meters.polled import Array, PolledMeter
from devices.sampler import find_gaps
from devices.sysfs import read_number, read_word
from results.records import PowerTrace

POWER_SUPPLY = Path("/sys/class/power_supply")
UPDATE_PERIOD_S = 1.0
"""The least that Linux' ACPI driver allows."""
RELATIVE_ACCURACY = 0.02 / math.sqrt(3)
"""Makers do not state it; fuel-gauge chips are within 1 % to 2 %."""
MAX_POWER_W = 500.0
"""More than any laptop draws from its battery (its largest chargers give 330 W): an error of its driver."""
MIN_POWER_W = 0.2
"""Less than any laptop draws that is awake: a driver that has changed its unit, or is wrong about it."""
W_PER_UW = 1e-6
Gaps = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Battery:
    """One battery's folder."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def status(self) -> str:
        return read_word(self.folder / "status") or "Unknown"

    def power_w(self) -> float:
        """What it gives now, whatever sign its driver uses. Raises `DeviceError`."""
        power = self.folder / "power_now"
        if power.exists():
            return abs(read_number(power)) * W_PER_UW
        microampere, microvolt = (read_number(self.folder / f"{what}_now") for what in ("current", "voltage"))
        return abs(microampere * microvolt) * W_PER_UW**2


class LaptopBatteryMeter(PolledMeter):
    """All batteries of the machine, one channel each."""

    name = "battery"
    method = "battery gauge"

    def __init__(self, interval_s: float, clock: Clock, power_supply: Path = POWER_SUPPLY) -> None:
        super().__init__(interval_s, clock)
        self._power_supply = power_supply
        self._batteries: list[Battery] = []

    def open(self) -> None:
        self._batteries = batteries_of(self._power_supply)
        if not self._batteries:
            raise MeterUnavailableError(f"battery: none under {self._power_supply}; this machine has no battery")
        why = why_not_discharging(self._power_supply, self._batteries)
        if why is not None:
            raise MeterUnavailableError(f"battery: {why}; its gauge does not see the load: unplug the charger")
        self.channels = tuple(
            Channel(
                b.name,
                "held",
                UPDATE_PERIOD_S,
                relative_accuracy=RELATIVE_ACCURACY,
                max_power_w=MAX_POWER_W,
                # Of several one rests while another gives.
                can_rest=len(self._batteries) > 1,
            )
            for b in self._batteries
        )
        try:
            watts = sum(b.power_w() for b in self._batteries)
        except MeterUnavailableError:
            raise
        except DeviceError as error:
            raise MeterUnavailableError(f"battery: {error}") from error
        if watts == 0:
            raise MeterUnavailableError(
                "battery: it discharges, and its gauge shows 0 W; this driver does not tell the power"
            )
        if watts < MIN_POWER_W:
            raise MeterUnavailableError(
                f"battery: its gauge shows {watts:.3g} W, and no laptop that is awake draws less than {MIN_POWER_W:g}"
                " W; this driver's unit is not the one that Linux uses (uW, uA, uV)"
            )

    def read(self) -> Sequence[float]:
        """Watts of each battery; nan while a charger carries the load."""
        if why_not_discharging(self._power_supply, self._batteries) is not None:
            return [math.nan] * len(self._batteries)
        return [battery.power_w() for battery in self._batteries]

    def traces(self, times_s: Array, values: Array) -> Sequence[PowerTrace]:
        """Held values with the update period that was observed; readings on line power are left out, as a gap.

        So are those in which several batteries all show nothing, and those of less than any laptop draws.
        """
        usable = np.asarray(np.isfinite(values).all(axis=1))
        told = (
            [] if usable.all() else [f"a charger carried the load in {int((~usable).sum())} of {len(usable)} readings"]
        )
        # Of several one may rest; a machine that runs draws from one of them.
        is_silent = usable & (values == 0).all(axis=1) & (len(self.channels) > 1)
        if is_silent.any():
            told.append(f"all batteries showed 0 W in {int(is_silent.sum())} of {len(usable)} readings")
            usable &= ~is_silent
        sum_w = values.sum(axis=1)
        is_too_low = usable & (sum_w > 0) & (sum_w < MIN_POWER_W)
        if is_too_low.any():
            told.append(f"less than {MIN_POWER_W:g} W in {int(is_too_low.sum())} of {len(usable)} readings: left out")
            usable &= ~is_too_low
        # The value before does not stand for it: the gauge may show what it was under load only seconds later.
        left_out_s = left_out_stretches_s(times_s, usable, 0.0)
        left_out = "; ".join(told) or None
        return [
            self._trace(channel, times_s[usable], values[usable, i], left_out_s, left_out)
            for i, channel in enumerate(self.channels)
        ]

    def _trace(
        self, channel: Channel, times_s: Array, watts: Array, left_out_s: Gaps, left_out: str | None
    ) -> PowerTrace:
        period_s = max(observed_update_period_s(times_s, watts), UPDATE_PERIOD_S)
        steps = np.abs(np.diff(watts))
        seen = replace(
            channel,
            update_period_s=period_s,
            resolution=float(steps[steps > 0].min()) if (steps > 0).any() else 0.0,
        )
        kept = renewed_readings(times_s, watts, period_s)
        # The readings that say nothing new are left out below: gaps are those of all readings.
        gaps_s = find_gaps(times_s, self._interval_s) + stuck_stretches_s(times_s, watts, period_s) + left_out_s
        return seen.trace(self.name, self.method, times_s[kept], watts[kept], self._interval_s, gaps_s, left_out)


def batteries_of(power_supply: Path) -> list[Battery]:
    """The machine's own: a mouse's or a phone's has the scope Device."""
    return [
        Battery(folder)
        for folder in sorted(power_supply.glob("*"))
        if read_word(folder / "type") == "Battery" and read_word(folder / "scope") != "Device"
    ]


def runs_on_battery(power_supply: Path) -> bool:
    """False also where nobody tells, or there is none."""
    batteries = batteries_of(power_supply)
    return bool(batteries) and why_not_discharging(power_supply, batteries) is None


def why_not_discharging(power_supply: Path, batteries: Sequence[Battery]) -> str | None:
    """What keeps the gauge from seeing the load; None where the machine runs on its battery."""
    for supply in sorted(power_supply.glob("*")):
        # Mains, USB, USB_PD, Wireless, UPS, ...; online is 2 where the voltage is programmable (USB-PD PPS).
        is_charger = read_word(supply / "type") not in (None, "", "Battery")
        if is_charger and read_word(supply / "online") not in (None, "", "0"):
            return f"{supply.name} is on line"
    states = {battery.name: battery.status for battery in batteries}
    if "Discharging" not in states.values() or "Charging" in states.values():
        return ", ".join(f"{name} is {status.lower()}" for name, status in states.items())
    return None
