"""RAPL through the powercap files of Linux: energy counters of the CPU package, its cores, and the memory.

Zones are known by their `name`, not their number. `core` and `uncore` lie inside their package; `psys` is the whole
platform and contains the package: they are traced, and left out of totals. One that a package of AMD shows again for
each of its dies is read once (`devices.rapl_packages`). The counter renews about every millisecond
and wraps at `max_energy_range_uj`; how often it does renew is observed before each window. Where no package moves
(virtual machines) it would read 0 J: it is not opened.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from devices.base import Channel, Clock, DeviceError, GoneError, MeterUnavailableError
from devices.meters.polled import PolledMeter
from devices.rapl_packages import repeated_zones
from devices.sysfs import read_value, read_word

POWERCAP = Path("/sys/class/powercap")
UPDATE_PERIOD_S = 1e-3
ENERGY_UNIT_J = 2.0**-14
"""61 uJ: the usual RAPL energy status unit. Only the counter's step in the uncertainty depends on it."""
UNSTATED_GAIN = "its maker states no gain error, and the uncertainty holds none"
J_PER_UJ = W_PER_UW = 1e-6
STANDSTILL_S = 4.0
"""A package that is switched on has counted something in this time, even where its counter is renewed each 3 s."""
LOOK_EVERY_S = 5e-3
MAX_POWER_W = 2e3
"""Of one package, memory or platform that states no limit: three times what the largest may draw."""
OVER_LIMIT = 3.0
"""Times its highest limit: turbo and peaks pass it for no longer."""


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
        repeated = repeated_zones(read_word(zone / "name") or "" for zone in zones)
        zones = [zone for zone, is_repeated in zip(zones, repeated, strict=True) if not is_repeated]
        self.channels = tuple(_channel(zone) for zone in zones)
        self._counters = [zone / "energy_uj" for zone in zones]
        try:
            check_moves(self, f"counters under {self._powercap}")
        except DeviceError as error:
            raise MeterUnavailableError(str(error)) from error

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
            raise GoneError(f"RAPL: a counter vanished or is unreadable ({error}); was the zone unplugged?") from error


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
        can_rest=domain == "uncore",
        max_power_w=max_power_w_of(zone),
        note=UNSTATED_GAIN,
    )


def max_power_w_of(zone: Path) -> float:
    """More cannot flow there: by the highest limit that the zone states, of any span of time."""
    stated = [
        read_word(path) for name in ("max_power_uw", "power_limit_uw") for path in zone.glob(f"constraint_*_{name}")
    ]
    limit_w = max((int(word) * W_PER_UW for word in stated if word and word.isdigit()), default=0.0)
    return min(OVER_LIMIT * limit_w, MAX_POWER_W) if limit_w > 0 else MAX_POWER_W


def check_moves(meter: PolledMeter, what: str) -> None:
    """Raises `DeviceError` where none of the counters moves that make the total.

    Parts may rest, such as an idle graphics unit, or a memory that this CPU does not count: they stay, and what stands
    still all the time is told with each total (`results.energy`).
    """
    before = after = meter.read()
    end_s = time.monotonic() + STANDSTILL_S
    while time.monotonic() < end_s:
        time.sleep(LOOK_EVERY_S)
        after = meter.read()
        if any(a != b and c.additive for a, b, c in zip(before, after, meter.channels, strict=True)):
            break
    else:
        still = ", ".join(c.component for c in meter.channels if c.additive)
        raise DeviceError(
            f"{meter.name}: the {what} stand still ({still or 'no package'}) for {STANDSTILL_S:g} s;"
            " this machine does not count (virtual machines often do not)"
        )
