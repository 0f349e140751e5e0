"""A phone's CPU: which cores there are, what they are, and which share a clock.

Two sources are joined. /proc/cpuinfo names the cores (old 32-bit and 3.x kernels name only the one that was asked);
/sys/devices/system/cpu groups them: cores of one cpufreq policy share their clock and are a cluster here. Where sysfs
shows no policy (cores that are off line have none), the package's siblings serve, then runs of cores of the same part
number and variant: two clusters of equal cores cannot be told apart by the last.

    capacity   the scheduler's relative speed of a core at its highest frequency, 1024 for the fastest
    cap        scaling_max_freq below cpuinfo_max_freq: a limit by the governor, the user, or the heat
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from devices.android.cpu_parts import core_name
from devices.android.shell import Phone

CPU_FOLDER = "/sys/devices/system/cpu"
ONLINE = f"{CPU_FOLDER}/online"
CPUINFO = "/proc/cpuinfo"
_FILES = (
    CPUINFO,
    ONLINE,
    f"{CPU_FOLDER}/present",
    f"{CPU_FOLDER}/cpu[0-9]*/cpu_capacity",
    f"{CPU_FOLDER}/cpu[0-9]*/cpufreq/cpuinfo_max_freq",
    f"{CPU_FOLDER}/cpu[0-9]*/cpufreq/scaling_max_freq",
    f"{CPU_FOLDER}/cpu[0-9]*/cpufreq/scaling_governor",
    f"{CPU_FOLDER}/cpu[0-9]*/cpufreq/related_cpus",
    f"{CPU_FOLDER}/cpu[0-9]*/topology/core_siblings_list",
)
CAP_FILES = (
    ONLINE,
    f"{CPU_FOLDER}/cpu[0-9]*/cpufreq/cpuinfo_max_freq",
    f"{CPU_FOLDER}/cpu[0-9]*/cpufreq/scaling_max_freq",
    f"{CPU_FOLDER}/cpu[0-9]*/cpufreq/related_cpus",
)
"""What tells the limits of the clocks."""
_DECIMAL = re.compile(r"[0-9]{1,9}")
_HEX = re.compile(r"0x[0-9a-fA-F]{1,16}")
MAX_CORES = 4096
"""What a core's number lies below: a list `0-4000000000` is none of a phone."""


@dataclass(frozen=True)
class CoreId:
    """What /proc/cpuinfo says of one core. None where it names none."""

    core: int
    implementer: int | None = None
    part: int | None = None
    variant: int | None = None

    @property
    def kind(self) -> tuple[int | None, ...]:
        """Equal for equal cores. The variant tells the six and the two Oryon cores of an SM8750 apart."""
        return self.implementer, self.part, self.variant

    @property
    def name(self) -> str | None:
        return None if self.implementer is None or self.part is None else core_name(self.implementer, self.part)


@dataclass(frozen=True)
class Cluster:
    """Cores that share a clock, the slowest cluster first in a `Topology`."""

    cores: tuple[int, ...]
    name: str | None
    max_frequency_mhz: float | None = None
    cap_mhz: float | None = None
    """The limit in force, where it is below the maximum."""
    capacity: int | None = None
    governor: str | None = None

    @property
    def mask(self) -> int:
        """For `taskset`."""
        return sum(1 << core for core in self.cores)


@dataclass(frozen=True)
class Topology:
    clusters: tuple[Cluster, ...]
    offline: tuple[int, ...] = ()
    """Present, and switched off now."""
    hardware: str | None = None
    """The `Hardware` line of /proc/cpuinfo."""

    @property
    def n_cores(self) -> int:
        return sum(len(c.cores) for c in self.clusters)

    @property
    def caps(self) -> tuple[str, ...]:
        """Frequency limits in force, in words."""
        return tuple(
            f"cpu {_span(c.cores)} limited to {c.cap_mhz:.0f} of {c.max_frequency_mhz:.0f} MHz"
            for c in self.clusters
            if c.cap_mhz is not None
        )

    def __str__(self) -> str:
        return " + ".join(
            f"{len(c.cores)}x {c.name or 'unknown'}"
            + (f" {c.max_frequency_mhz:.0f} MHz" if c.max_frequency_mhz is not None else "")
            for c in self.clusters
        )


def parse_cpuinfo(text: str) -> tuple[list[CoreId], str | None]:
    """(cores in order, the Hardware line).

    Many 3.x kernels name only the core that happens to read the file: then no core of several gets that name, for
    an Exynos 7420 would be eight Cortex-A53 on Monday and eight Cortex-A57 on Tuesday.
    """
    cores: list[dict[str, int]] = []
    stated_once: dict[str, int] = {}
    hardware = None
    per_core = len(re.findall(r"^CPU part", text, re.MULTILINE)) > 1
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "processor" and _DECIMAL.fullmatch(value):
            cores.append({"core": int(value)})
        elif key in ("CPU implementer", "CPU part", "CPU variant") and _HEX.fullmatch(value):
            target = cores[-1] if per_core and cores else stated_once
            target[key.removeprefix("CPU ")] = int(value, 16)
        elif key == "Hardware":
            # One kernel leaves out the line break behind it.
            hardware = value.partition("Processor\t")[0]
    return [CoreId(**((stated_once if len(cores) == 1 else {}) | core)) for core in cores], hardware


def build_topology(files: Mapping[str, str]) -> Topology:
    """files: path to content, as a phone shows them. Raises ValueError where they show no core at all."""
    ids, hardware = parse_cpuinfo(files.get(CPUINFO, ""))
    by_core = {i.core: i for i in ids}
    online = parse_core_list(files.get(ONLINE, "")) or tuple(by_core)
    present = parse_core_list(files.get(f"{CPU_FOLDER}/present", "")) or online
    if not online:
        raise ValueError("neither /proc/cpuinfo nor /sys/devices/system/cpu/online shows a core")
    groups = _grouped(online, by_core, files)
    clusters = sorted((_cluster(g, by_core, files) for g in groups), key=_speed)
    return Topology(tuple(clusters), tuple(sorted(set(present) - set(online))), hardware)


def read_topology(phone: Phone) -> Topology:
    """The CPU of a phone now. Raises `DeviceError`, ValueError."""
    return build_topology(phone.read_files(_FILES))


def frequency_caps(files: Mapping[str, str]) -> tuple[str, ...] | None:
    """Limits in force, in words, from the content of `CAP_FILES`; None where a phone hides its clocks or limits."""
    shown = {path.rpartition("/")[2] for path in files}
    if not {"online", "cpuinfo_max_freq", "scaling_max_freq"} <= shown:
        return None
    try:
        return build_topology(files).caps
    except ValueError:
        return None


def parse_core_list(text: str) -> tuple[int, ...]:
    """`0-3,6 7` to cores; empty text to none. The kernel writes both commas and blanks."""
    cores: list[int] = []
    for item in re.split(r"[,\s]+", text.strip()):
        first, _, last = item.partition("-")
        if _DECIMAL.fullmatch(first) and _DECIMAL.fullmatch(last or first) and int(last or first) < MAX_CORES:
            cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def _grouped(online: Iterable[int], ids: Mapping[int, CoreId], files: Mapping[str, str]) -> list[tuple[int, ...]]:
    """Cores that share a clock. Off-line cores of a policy are left out."""
    here = sorted(online)
    for source in ("cpufreq/related_cpus", "topology/core_siblings_list"):
        members = {core: parse_core_list(files.get(f"{CPU_FOLDER}/cpu{core}/{source}", "")) for core in here}
        known = {tuple(c for c in group if c in here) for group in members.values() if group}
        # Some phones show a policy of some cores only: all cores, each in one group, or the next source.
        if sorted(core for group in known for core in group) == here:
            return sorted(known)
    return [tuple(run) for _, run in groupby(here, key=lambda core: ids.get(core, CoreId(core)).kind)]


def _cluster(cores: tuple[int, ...], ids: Mapping[int, CoreId], files: Mapping[str, str]) -> Cluster:
    def first(name: str) -> str | None:
        """Of the first core that shows it: a phone may hide a file of the others."""
        return next((files[p].strip() for c in cores if (p := f"{CPU_FOLDER}/cpu{c}/{name}") in files), None)

    maximum_mhz, limit_mhz = _mhz(first("cpufreq/cpuinfo_max_freq")), _mhz(first("cpufreq/scaling_max_freq"))
    capped = maximum_mhz is not None and limit_mhz is not None and limit_mhz < maximum_mhz
    capacity = first("cpu_capacity")
    names = {ids[c].name for c in cores if c in ids}
    return Cluster(
        cores=cores,
        name=names.pop() if len(names) == 1 else None,
        max_frequency_mhz=maximum_mhz,
        cap_mhz=limit_mhz if capped else None,
        capacity=int(capacity) if capacity and _DECIMAL.fullmatch(capacity) else None,
        governor=first("cpufreq/scaling_governor"),
    )


def _mhz(khz: str | None) -> float | None:
    return int(khz) / 1e3 if khz and _DECIMAL.fullmatch(khz) and int(khz) > 0 else None


def _speed(cluster: Cluster) -> tuple[float, float, int]:
    return (cluster.capacity or 0, cluster.max_frequency_mhz or 0.0, cluster.cores[0])


def _span(cores: tuple[int, ...]) -> str:
    is_run = cores == tuple(range(cores[0], cores[0] + len(cores)))
    return f"{cores[0]}-{cores[-1]}" if is_run and len(cores) > 1 else ",".join(map(str, cores))
