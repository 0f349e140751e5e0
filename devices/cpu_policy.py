"""By what rules Linux sets the clocks of this machine's cores: governor, limits, preference, turbo.

Another rule between idle time and a window, or between two windows, makes watts and times of another machine.
"""

from __future__ import annotations

from pathlib import Path

from devices.sysfs import read_word

CPUS = Path("/sys/devices/system/cpu")
PLATFORM_PROFILE = Path("/sys/firmware/acpi/platform_profile")
_LIMITS_KHZ = ("scaling_min_freq", "scaling_max_freq")
_SWITCHES = (("intel_pstate/no_turbo", {"0": "turbo on", "1": "turbo off"}),
             ("cpufreq/boost", {"0": "turbo off", "1": "turbo on"}))  # fmt: skip


def cpu_policy(cpus: Path = CPUS, platform_profile: Path = PLATFORM_PROFILE) -> tuple[str, ...] | None:
    """Each rule that holds, once, in words; None where this kernel shows none, as most virtual machines do."""
    folders = sorted(cpus.glob("cpufreq/policy[0-9]*"), key=lambda folder: int(folder.name.removeprefix("policy")))
    rules = [rule for rule in dict.fromkeys(map(_rule, folders)) if rule]
    for name, words in _SWITCHES:
        if (switched := words.get(read_word(cpus / name) or "")) is not None:
            rules.append(switched)
    if profile := read_word(platform_profile):
        rules.append(f"platform profile {profile}")
    return tuple(rules) or None


def _rule(folder: Path) -> str:
    """Of cores that share a clock: "governor powersave (balance_power), 800 to 3600 MHz"."""
    governor = read_word(folder / "scaling_governor")
    preference = read_word(folder / "energy_performance_preference")
    limits_mhz = [f"{int(khz) / 1000:.0f}" for name in _LIMITS_KHZ if (khz := read_word(folder / name) or "").isdigit()]
    words = [f"governor {governor}" + (f" ({preference})" if preference else "")] if governor else []
    if len(limits_mhz) == len(_LIMITS_KHZ):
        words.append(f"{limits_mhz[0]} to {limits_mhz[1]} MHz")
    return ", ".join(words)
