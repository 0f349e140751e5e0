"""What state a host is in, and what it is. What cannot be read is None, never a guess."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from devices.base import DeviceError
from devices.boundary import library_errors
from devices.cpu_policy import CPUS, cpu_policy
from devices.meters.laptop_battery import POWER_SUPPLY, runs_on_battery
from devices.sysfs import read_word
from results.environments import Conditions, Environment

T = TypeVar("T")

PACKAGES = ("torch", "numpy", "lm_eval", "transformers", "tokenizers", "zeus", "pandas", "pyarrow", "nvidia-ml-py")
"""Those whose version can change a figure."""
SYSCTL_S = 5.0
_CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")


def host_conditions(at_s: float, throttled: bool | None = None) -> Conditions:
    """Snapshot of this machine; at_s: the run's clock. throttled: what the machine's counters and meters know of it."""
    return host_power(at_s).model_copy(
        update={
            "load_average_1m": _told(lambda: os.getloadavg()[0]),
            "cpu_frequency_mhz": _cpu_frequency_mhz(),
            "temperature_c": _cpu_temperature_c(),
            "throttled": throttled,
            "cpu_policy": cpu_policy(),
        }
    )


def host_power(at_s: float, power_supply: Path = POWER_SUPPLY) -> Conditions:
    """What feeds this machine, and how long it has slept: cheap enough to be read within a window."""
    # A kernel without the class power_supply is a machine without a battery, as far as anybody can tell.
    battery = _told(lambda: psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None)
    charging = battery.power_plugged if battery else None
    if charging is None and runs_on_battery(power_supply):
        charging = False  # psutil knows some names of batteries and chargers, and looks at one battery
    return Conditions(
        at_s=at_s,
        battery_percent=float(battery.percent) if battery else None,
        charging=charging,
        suspended_s=_suspended_s(),
    )


def _suspended_s() -> float | None:
    """One clock goes on while the machine sleeps, the other stands: of Linux, of macOS. Elsewhere not told."""
    for goes_on, stands in (("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"), ("CLOCK_MONOTONIC_RAW", "CLOCK_UPTIME_RAW")):
        if hasattr(time, goes_on) and hasattr(time, stands):
            return time.clock_gettime(getattr(time, goes_on)) - time.clock_gettime(getattr(time, stands))
    return None


def cpu_throttle_events(cpus: Path = CPUS) -> int | None:
    """How often heat has slowed the cores or their package down since boot (Intel); None where it is not counted."""
    counts = [
        int(word)
        for path in cpus.glob("cpu[0-9]*/thermal_throttle/*_throttle_count")
        if (word := read_word(path)) is not None and word.isdigit()
    ]
    return sum(counts) if counts else None


def host_environment() -> Environment:
    """The machine and the software that the run depends on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Environment(
        os=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        cpu_model=cpu_model(),
        n_cores=psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        n_threads=psutil.cpu_count() or 1,
        memory_bytes=int(psutil.virtual_memory().total),
        python=platform.python_version(),
        joulebench=importlib.metadata.version("joulebench"),
        packages=versions,
    )


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo"), sysctl: Path = Path("/usr/sbin/sysctl")) -> str:
    """What the processor is. A cloud calls all its processors by one name: family and model tell one from another."""
    facts = _facts_of_the_first_core(cpuinfo)
    named = facts.get("model name") or platform.processor() or platform.machine()
    if not facts:
        return _named_by_macos(sysctl) or named
    for keys in ({"family": "cpu family", "model": "model"}, {"implementer": "CPU implementer", "part": "CPU part"}):
        if all(key in facts for key in keys.values()):  # x86, then ARM
            return f"{named} ({', '.join(f'{name} {facts[key]}' for name, key in keys.items())})"
    return named


def _named_by_macos(sysctl: Path) -> str | None:
    """ "Apple M2 Pro". To Python each of them is an arm."""
    try:
        told = subprocess.run(
            [sysctl, "-n", "machdep.cpu.brand_string"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SYSCTL_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() or None


def _facts_of_the_first_core(cpuinfo: Path) -> dict[str, str]:
    if not cpuinfo.is_file():
        return {}
    first = cpuinfo.read_text(errors="replace").split("\n\n")[0]
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def _cpu_frequency_mhz() -> float | None:
    frequency = _told(psutil.cpu_freq)
    return float(frequency.current) if frequency and frequency.current else None


def _cpu_temperature_c() -> float | None:
    sensors = _told(lambda: psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else None) or {}
    for name in _CPU_SENSORS:
        if sensors.get(name):
            return max(float(s.current) for s in sensors[name])
    return None


def _told(read: Callable[[], T]) -> T | None:
    """None where this kernel does not have what is read, or has it in a form that its reader does not expect."""
    try:
        with library_errors("host", "psutil"):
            return read()
    except DeviceError:
        return None
