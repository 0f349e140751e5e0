"""Meters of power sensors in sysfs: the rails of a Jetson, and the GPU and server sensors of hwmon.

A rail that contains all others makes the total alone (a board's input); without such a rail all add up, but for those
that lie inside another one (the package of a GPU's card). What a sensor does not
see is in no rail: a carrier board, a display, the losses of the power supply.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from devices.base import Channel, Clock, DeviceError, MeterUnavailableError
from devices.meters.polled import METHODS, PolledMeter
from devices.rails import Rail, hwmon_rails, jetson_rails
from results.records import Method

I2C_DRIVERS = Path("/sys/bus/i2c/drivers")
HWMON = Path("/sys/class/hwmon")
SHUNT_ACCURACY = math.hypot(0.01, 0.0025) / math.sqrt(3)
"""A Jetson's shunts are 1 % resistors, the INA3221's gain errs by 0.25 % at most: uniform, as one sigma."""


class RailMeter(PolledMeter):
    """All rails that `find_rails` knows, one channel each."""

    relative_accuracy: float

    def __init__(self, interval_s: float, clock: Clock, root: Path) -> None:
        super().__init__(interval_s, clock)
        self.method: Method = "integrated power"
        self._root = root
        self._rails: list[Rail] = []

    @abstractmethod
    def find_rails(self) -> list[Rail]:
        """Raises `MeterUnavailableError` where there is none."""

    def open(self) -> None:
        self._rails = self.find_rails()
        has_whole = any(rail.is_whole for rail in self._rails)
        self.channels = tuple(
            Channel(
                component=rail.name,
                kind=rail.kind,
                update_period_s=rail.update_period_s,
                resolution=rail.step,
                relative_accuracy=_gain(rail.relative_error) or self.relative_accuracy,
                additive=rail.is_whole if has_whole else not rail.is_part,
                can_rest=rail.kind == "counter",
                max_power_w=rail.max_power_w,
                computes=rail.computes,
                averaged_s=rail.averaged_s,
                note="contains the other rails" if rail.is_whole and len(self._rails) > 1 else None,
            )
            for rail in self._rails
        )
        additive = [METHODS[c.kind] for c in self.channels if c.additive]
        self.method = additive[0]
        try:
            self.read()
        except MeterUnavailableError:
            raise
        except DeviceError as error:
            raise MeterUnavailableError(f"{self.name}: {error}") from error

    def method_of(self, channel: Channel) -> Method:
        return METHODS[channel.kind]

    def read(self) -> Sequence[float]:
        return [rail.read() for rail in self._rails]


def _gain(relative_error: float | None) -> float | None:
    """One sigma of an error that is uniform within what is stated."""
    return None if relative_error is None else relative_error / math.sqrt(3)


class JetsonMeter(RailMeter):
    """INA3221 rails of a Jetson."""

    name = "jetson"
    relative_accuracy = SHUNT_ACCURACY

    def __init__(self, interval_s: float, clock: Clock, drivers: Path = I2C_DRIVERS) -> None:
        super().__init__(interval_s, clock, drivers)

    def find_rails(self) -> list[Rail]:
        rails = jetson_rails(self._root)
        if not rails:
            raise MeterUnavailableError(f"jetson: no INA3221 with a rail under {self._root}; is this a Jetson?")
        return rails


class HwmonMeter(RailMeter):
    """Sensors of GPUs (amdgpu, i915, xe) and of a server's input (ACPI power meter)."""

    name = "hwmon"
    relative_accuracy = 0.05 / math.sqrt(3)
    """Where it is not stated; ACPI power meters are to be within 5 % in most firmware, taken for all."""

    def __init__(self, interval_s: float, clock: Clock, hwmon: Path = HWMON) -> None:
        super().__init__(interval_s, clock, hwmon)

    def find_rails(self) -> list[Rail]:
        rails = hwmon_rails(self._root)
        if not rails:
            raise MeterUnavailableError(
                f"hwmon: no power sensor of amdgpu, i915, xe or an ACPI power meter under {self._root}"
            )
        return rails
