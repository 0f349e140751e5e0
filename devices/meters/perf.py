"""RAPL's energy counters as perf events: the same hardware as powercap, for machines that allow only this way to it.

The `power` PMU (/sys/bus/event_source/devices/power) names its events, their scale in joules, and one CPU for each
package (on AMD sometimes one for each die of it: `devices.rapl_packages`). The kernel accumulates 64 bits, so nothing
wraps. Needs perf_event_paranoid <= 0, root, or CAP_PERFMON.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from devices.base import Channel, Clock, DeviceError, GoneError, MeterUnavailableError
from devices.cpu_cycles import EVENT_SOURCES
from devices.meters.polled import PolledMeter
from devices.meters.rapl import ENERGY_UNIT_J, MAX_POWER_W, UNSTATED_GAIN, UPDATE_PERIOD_S, check_moves
from devices.perf_event import Event, open_counter, read_counter, why_refused
from devices.rapl_packages import repeated_cpus
from devices.sysfs import read_word

_DOMAINS = {"pkg": "package", "cores": "core", "ram": "dram", "gpu": "uncore", "psys": "psys"}
"""perf's names of RAPL's domains, and powercap's, which are used here."""
_ADDITIVE = ("pkg", "ram")
"""Cores and graphics lie in the package, the platform around it."""


class PerfMeter(PolledMeter):
    """All energy events of the `power` PMU."""

    name = "perf"
    method = "counter"
    fresh_on_read = True

    def __init__(self, interval_s: float, clock: Clock, sources: Path = EVENT_SOURCES) -> None:
        super().__init__(interval_s, clock)
        self._pmu = sources / "power"
        self._counters: list[tuple[int, float]] = []
        """Descriptor and joules per count, one a channel."""

    def open(self) -> None:
        pmu_type = read_word(self._pmu / "type")
        if pmu_type is None:
            raise MeterUnavailableError(f"perf: no {self._pmu}; this machine has no energy events")
        listed = cpus_of(read_word(self._pmu / "cpumask") or "0")
        packages = [cpu for cpu, again in zip(listed, repeated_cpus(listed), strict=True) if not again]
        channels: list[Channel] = []
        try:
            for path in sorted((self._pmu / "events").glob("energy-*")):
                if path.suffix:
                    continue
                config, j_per_count = self._event(path)
                for package, cpu in enumerate(packages):
                    descriptor = open_counter(Event(int(pmu_type), config), cpu=cpu)
                    self._counters.append((descriptor, j_per_count))
                    channels.append(_channel(path.name.removeprefix("energy-"), package))
            self.channels = tuple(channels)
            if not channels:
                raise MeterUnavailableError(f"perf: {self._pmu} lists no energy event")
            check_moves(self, f"energy events of {self._pmu}")
        except OSError as error:
            self.close()
            raise MeterUnavailableError(f"perf: {why_refused(error)}") from error
        except DeviceError as error:
            self.close()
            raise MeterUnavailableError(str(error)) from error

    def _event(self, path: Path) -> tuple[int, float]:
        """(config, joules per count). Raises `MeterUnavailableError`."""
        text, scale, unit = (read_word(p) for p in (path, Path(f"{path}.scale"), Path(f"{path}.unit")))
        number = re.fullmatch(r"event=(0x[0-9a-f]+)", text or "")
        try:
            j_per_count = float(scale or "")
        except ValueError:
            j_per_count = 0.0
        if number is None or unit != "Joules" or j_per_count <= 0:
            raise MeterUnavailableError(f"perf: {path} is {text!r} in {scale!r} {unit!r}, not a counter of joules")
        return int(number[1], 16), j_per_count

    def read(self) -> Sequence[float]:
        try:
            return [read_counter(descriptor).value * j_per_count for descriptor, j_per_count in self._counters]
        except OSError as error:
            raise GoneError(
                f"perf: an energy event could not be read ({error}); was its CPU taken off line?"
            ) from error

    def close(self) -> None:
        super().close()
        for descriptor, _ in self._counters:
            os.close(descriptor)
        self._counters = []


def _channel(event: str, package: int) -> Channel:
    domain = _DOMAINS.get(event, event)
    component = f"package-{package}" if event == "pkg" else f"{domain} of package-{package}"
    return Channel(
        component="psys" if event == "psys" and package == 0 else component,
        kind="counter",
        update_period_s=UPDATE_PERIOD_S,
        resolution=ENERGY_UNIT_J,
        additive=event in _ADDITIVE,
        can_rest=event == "gpu",
        max_power_w=MAX_POWER_W,
        note=UNSTATED_GAIN,
    )


def cpus_of(mask: str) -> list[int]:
    """The CPUs of a list such as `0,18` or `0-1`: one for each package."""
    cpus: list[int] = []
    for part in mask.split(","):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus
