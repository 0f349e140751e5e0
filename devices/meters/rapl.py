"""RAPL through the powercap files of Linux: energy counters of the CPU package, its cores, and the memory.

Zones are known by their `name`, not their number. `core` and `uncore` lie inside their package; `psys` is the whole
platform and contains the package: they are traced, and left out of totals. The counter renews about every millisecond
and wraps at `max_energy_range_uj`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from devices.base import Channel, Clock, DeviceError, MeterUnavailableError
from devices.meters.polled import PolledMeter

POWERCAP = Path("/sys/class/powercap")
UPDATE_PERIOD_S = 1e-3
ENERGY_UNIT_J = 2.0**-14
"""61 uJ: the usual RAPL energy status unit. Only the counter's step in the uncertainty depends on it."""
J_PER_UJ = 1e-6


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
        channels = []
        for zone in zones:
            channels.append(_channel(zone))
            self._counters.append(zone / "energy_uj")
        self.channels = tuple(channels)
        self.read()

    def read(self) -> Sequence[float]:
        try:
            return [int(path.read_text()) * J_PER_UJ for path in self._counters]
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
