"""RAPL through the powercap files of Linux: energy counters of the CPU package, its cores, and the memory.

Zones are known by their `name`, not their number. `core` and `uncore` lie inside their package; `psys` is the whole
platform and contains the package: they are traced, and left out of totals. The counter renews about every millisecond
and wraps at `max_energy_range_uj`. A counter that stands still (virtual machines, the memory of some client CPUs) would
read 0 J: it is not opened.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from devices.base import Channel, Clock, DeviceError, MeterUnavailableError
from devices.meters.polled import PolledMeter
from devices.sysfs import read_value

POWERCAP = Path("/sys/class/powercap")
UPDATE_PERIOD_S = 1e-3
ENERGY_UNIT_J = 2.0**-14
"""61 uJ: the usual RAPL energy status unit. Only the counter's step in the uncertainty depends on it."""
J_PER_UJ = 1e-6
STANDSTILL_S = 0.05
"""A package or memory that is switched on has counted something in this time."""

log = logging.getLogger(__name__)


class RaplMeter(PolledMeter):
    """Energy counters of all RAPL zones."""

    name = "rapl"
    method = "counter"
    fresh_on_read = True

    def __init__(self, interval_s: float, clock: Clock, powercap: Path = POWERCAP) -> None:
        super().__init__(interval_s, clock)
        self._powercap = powercap
        self._counters: list[Path] = []

    def open(self) -> None:
        zones = sorted(p for p in self._powercap.glob("intel-rapl:*") if (p / "energy_uj").exists())
        if not zones:
            raise MeterUnavailableError(f"RAPL: no intel-rapl zone under {self._powercap}; this machine offers none")
        self.channels = tuple(_channel(zone) for zone in zones)
        self._counters = [zone / "energy_uj" for zone in zones]
        try:
            kept = keep_moving(self, f"counters under {self._powercap}")
        except DeviceError as error:
            raise MeterUnavailableError(str(error)) from error
        self.channels = tuple(self.channels[i] for i in kept)
        self._counters = [self._counters[i] for i in kept]

    def read(self) -> Sequence[float]:
        try:
            return [int(read_value(path)) * J_PER_UJ for path in self._counters]
        except PermissionError as error:
            raise MeterUnavailableError(
                f"RAPL: {error.filename} is readable by root only;"
                " run as root, or once: sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj"
                " /sys/class/powercap/intel-rapl:*/*/energy_uj"
            ) from error
        except (OSError, ValueError) as error:
            raise DeviceError(
                f"RAPL: a counter vanished or is unreadable ({error}); was the zone unplugged?"
            ) from error


def _channel(zone: Path) -> Channel:
    try:
        domain = (zone / "name").read_text().strip()
        wrap_at_j = int((zone / "max_energy_range_uj").read_text()) * J_PER_UJ
    except (OSError, ValueError) as error:
        raise MeterUnavailableError(f"RAPL: zone {zone} cannot be read ({error})") from error
    package = "" if domain.startswith(("package", "psys")) else f" of {zone.name.rsplit(':', 1)[0]}"
    return Channel(
        component=f"{domain}{package}",
        kind="counter",
        update_period_s=UPDATE_PERIOD_S,
        resolution=ENERGY_UNIT_J,
        wrap_at_j=wrap_at_j,
        additive=domain.startswith("package") or domain == "dram",
    )


def keep_moving(meter: PolledMeter, what: str) -> list[int]:
    """Which channels count. Raises `DeviceError` where none of those does that make the total.

    Parts such as an idle graphics unit may rest: only what enters the total must move.
    """
    before = meter.read()
    time.sleep(STANDSTILL_S)
    after = meter.read()
    moves = [a != b or not c.additive for a, b, c in zip(before, after, meter.channels, strict=True)]
    still = [c.component for c, m in zip(meter.channels, moves, strict=True) if not m]
    if not any(c.additive and m for c, m in zip(meter.channels, moves, strict=True)):
        raise DeviceError(
            f"{meter.name}: the {what} stand still ({', '.join(still) or 'no package'});"
            " this machine does not count (virtual machines often do not)"
        )
    if still:
        log.warning("%s: %s stands still and is left out", meter.name, ", ".join(still))
    return [i for i, m in enumerate(moves) if m]
