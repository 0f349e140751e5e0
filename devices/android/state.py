"""The state of a phone that decides whether, and how well, it can be measured: battery, heat, limits, what it is.

Parsers are pure functions of text; `read_state` fetches all in one round trip. What a phone does not show is None.

    dumpsys battery          status 2 charging, 3 discharging, 4 not charging, 5 full; temperature in 0.1 degC, level in
                             `scale`ths, voltage in mV, charge counter in uAh (android.os.BatteryManager)
    dumpsys thermalservice   status 0 none, 1 light, 2 moderate, 3 severe ... 6 shutdown (android.os.PowerManager)
    dumpsys power            mWakefulness: Awake, Asleep, Dreaming, Dozing (PowerManagerInternal); mLastWakeTime in ms
                             of a clock that stands while the phone sleeps, and how long ago (TimeUtils.formatUptime)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from devices.android.shell import SERIAL_PROPERTY, Phone, split_grep
from devices.android.topology import CAP_FILES, ONLINE, frequency_caps, parse_core_list
from results.charge import C_PER_UAH

CHARGING, DISCHARGING, NOT_CHARGING, FULL = 2, 3, 4, 5
STATUS_WORDS = {CHARGING: "charging", DISCHARGING: "discharging", NOT_CHARGING: "not charging", FULL: "full"}

_SECTION = "@@ "
_COMMANDS = {
    "battery": "dumpsys battery",
    "thermal": "dumpsys thermalservice",
    "brightness": "settings get system screen_brightness",
    "airplane": "settings get global airplane_mode_on",
    "load": "cat /proc/loadavg",
    "frequencies": "cat /sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq",
    "caps": f"grep -sH '' {' '.join(CAP_FILES)}",
    "power": "read -r a x </proc/uptime; dumpsys power | grep -e mWakefulness= -e mLastWakeTime=;"
    ' read -r b x </proc/uptime; echo "uptimes $a $b"',
    "boot": "cat /proc/sys/kernel/random/boot_id",
    "online": f"cat {ONLINE}",
}
_WATCHED = ("battery", "thermal", "brightness", "airplane", "caps", "power", "boot", "online")
"""What may change in a window, and costs little to ask for."""
_PROPERTY = re.compile(r"^\[([^\]]+)\]: \[(.*)\]$", re.MULTILINE)
_WAKEFULNESS = re.compile(r"mWakefulness=(\w+)")
_LAST_WAKE = re.compile(r"\bmLastWakeTime=([0-9]{1,15}) \(([0-9]{1,15}) ms ago\)")
_UPTIMES = re.compile(r"^uptimes ([0-9]{1,12}\.[0-9]{1,9}) ([0-9]{1,12}\.[0-9]{1,9})$", re.MULTILINE)
LONGEST_DUMP_S = 0.08
"""Two readings of the time asleep differ by less than `state_watch.SUSPENDED_S` then, where the phone was awake."""
_BOOT_ID = re.compile(r"[0-9a-f-]{36}")
_OVERRIDDEN = re.compile(r"^IsStatusOverride: true\b", re.MULTILINE)
_CPU_SENSOR = re.compile(r"Temperature\{mValue=(-?[0-9]+(?:\.[0-9]+)?), mType=0,")


@dataclass(frozen=True)
class BatteryState:
    status: int | None
    powered_by: tuple[str, ...]
    """Chargers on line, such as ("USB",)."""
    is_faked: bool
    """Somebody froze the values (`dumpsys battery unplug` or `set`): they say nothing about the battery."""
    percent: float | None = None
    temperature_c: float | None = None
    voltage_v: float | None = None
    charge_counter_c: float | None = None
    """Charge left, in coulomb."""

    @property
    def is_charging(self) -> bool | None:
        """Whether a charger carries the load, or may carry a part of it. None where the phone does not say.

        A phone on a weak port says it discharges, and the gauge sees only what the port leaves to the battery.
        """
        if self.is_faked:
            return None
        if self.powered_by:
            return True
        return None if self.status is None else self.status != DISCHARGING


@dataclass(frozen=True)
class PhoneState:
    """A phone at an instant."""

    battery: BatteryState | None
    thermal_status: int | None = None
    cpu_temperature_c: float | None = None
    """The hottest CPU sensor of the thermal HAL."""
    brightness: int | None = None
    """Of the screen, 0 to 255."""
    screen_on: bool | None = None
    suspended_s: float | None = None
    """How long it has slept since it was started."""
    boot_id: str | None = None
    """Made anew by the kernel at each start."""
    airplane_mode: bool | None = None
    load_average_1m: float | None = None
    cpu_frequency_mhz: float | None = None
    """Mean over the cores that are on line."""
    frequency_caps: tuple[str, ...] | None = None
    """Limits in force below the highest clock of cores, in words; empty: there are none."""
    online: tuple[int, ...] = ()
    """Cores that are not switched off; empty where the phone does not say."""


@dataclass(frozen=True)
class PhoneFacts:
    """What a phone is."""

    model: str
    soc: str | None
    android: str
    """Such as `15 (SDK 35)`."""
    abi: str
    kernel: str | None
    memory_bytes: int | None
    build: str | None
    """Such as `AP4A.250105.002 12701944`: of a monthly update, which keeps Android's number and may keep the kernel."""
    serial: str | None = None
    """Its maker's number of it, whatever name adb has for it."""


def parse_battery(text: str) -> BatteryState | None:
    """`dumpsys battery`; None where it is no such dump."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.strip().partition(":")
        # Makers add lines of their own below; the first of a name is Android's.
        if colon and value.strip():
            fields.setdefault(key.lower(), value.strip())
    if "status" not in fields and "level" not in fields:
        return None
    level, scale = _number(fields.get("level")), _number(fields.get("scale"))
    tenths_c, millivolt = _number(fields.get("temperature")), _number(fields.get("voltage"))
    status, microampere_hours = _number(fields.get("status")), _number(fields.get("charge counter"))
    return BatteryState(
        status=None if status is None else int(status),
        powered_by=tuple(s for s in ("AC", "USB", "Wireless", "Dock") if fields.get(f"{s.lower()} powered") == "true"),
        is_faked="UPDATES STOPPED" in text,
        percent=100 * level / scale if level is not None and scale else None,
        temperature_c=None if tenths_c is None else tenths_c / 10,
        voltage_v=None if millivolt is None else millivolt / 1e3,
        # Phones without a counter say 0 or the lowest integer.
        charge_counter_c=microampere_hours * C_PER_UAH if microampere_hours and microampere_hours > 0 else None,
    )


def parse_thermal(text: str) -> tuple[int | None, float | None]:
    """`dumpsys thermalservice`: (status, the hottest CPU sensor now in degC). Cached temperatures are old: not read.

    A status that somebody set (`cmd thermalservice override-status`) says nothing of the heat.
    """
    status = None if _OVERRIDDEN.search(text) else re.search(r"^Thermal Status: ([0-9]{1,3})\b", text, re.MULTILINE)
    _, now, current = text.partition("Current temperatures from HAL:")
    sensors = [float(c) for c in _CPU_SENSOR.findall(current.partition("Current cooling devices")[0])] if now else []
    return (int(status[1]) if status else None), (max(sensors) if sensors else None)


def parse_suspended_s(power: str) -> float | None:
    """Its uptime, which goes on while it sleeps, less the clock of `mLastWakeTime`. None where the dump took too long
    for that to say anything."""
    wake, uptimes = _LAST_WAKE.search(power), _UPTIMES.search(power)
    if wake is None or uptimes is None:
        return None
    before_s, after_s = float(uptimes[1]), float(uptimes[2])
    if after_s - before_s > LONGEST_DUMP_S:
        return None
    return (before_s + after_s) / 2 - (int(wake[1]) + int(wake[2])) / 1e3


def parse_properties(text: str) -> dict[str, str]:
    """`getprop`: one `[name]: [value]` a line."""
    return dict(_PROPERTY.findall(text))


def parse_memory_bytes(meminfo: str) -> int | None:
    """MemTotal of /proc/meminfo, which is in KiB whatever it says."""
    total = re.search(r"^MemTotal:\s+([0-9]{1,15}) kB", meminfo, re.MULTILINE)
    return int(total[1]) * 1024 if total else None


def parse_facts(properties: dict[str, str], meminfo: str, kernel: str | None) -> PhoneFacts:
    """Makers put the SoC's name into different properties; the most specific one that is there counts."""
    soc_names = ("ro.soc.model", "ro.hardware.chipname", "ro.chipname", "ro.mediatek.platform", "ro.board.platform")
    maker, model = (properties.get(f"ro.product.{key}", "") for key in ("manufacturer", "model"))
    android, sdk = (properties.get(f"ro.build.version.{key}", "unknown") for key in ("release", "sdk"))
    build = " ".join(filter(None, map(properties.get, ("ro.build.id", "ro.build.version.incremental"))))
    return PhoneFacts(
        model=f"{maker} {model}".strip() or "unknown",
        soc=next((properties[n] for n in soc_names if properties.get(n)), None),
        android=f"{android} (SDK {sdk})",
        build=build or None,
        abi=properties.get("ro.product.cpu.abi", "unknown"),
        kernel=kernel.strip() if kernel else None,
        memory_bytes=parse_memory_bytes(meminfo),
        serial=properties.get(SERIAL_PROPERTY) or None,
    )


def parse_state(sections: dict[str, str]) -> PhoneState:
    """sections: output of each of `_COMMANDS`, by its name."""
    thermal_status, cpu_c = parse_thermal(sections.get("thermal", ""))
    load = _number(sections.get("load", "").partition(" ")[0])
    frequencies_khz = [f for f in map(_number, sections.get("frequencies", "").split()) if f is not None]
    brightness, airplane = (_number(sections.get(key, "").strip()) for key in ("brightness", "airplane"))
    wakefulness = _WAKEFULNESS.search(sections.get("power", ""))
    boot_id = sections.get("boot", "").strip()
    return PhoneState(
        battery=parse_battery(sections.get("battery", "")),
        thermal_status=thermal_status,
        cpu_temperature_c=cpu_c,
        brightness=None if brightness is None else int(brightness),
        airplane_mode=None if airplane is None else airplane == 1,
        load_average_1m=load,
        cpu_frequency_mhz=sum(frequencies_khz) / len(frequencies_khz) / 1e3 if frequencies_khz else None,
        frequency_caps=frequency_caps(split_grep(sections.get("caps", ""))),
        screen_on=wakefulness[1] in ("Awake", "Dreaming") if wakefulness else None,
        suspended_s=parse_suspended_s(sections.get("power", "")),
        boot_id=boot_id if _BOOT_ID.fullmatch(boot_id) else None,
        online=parse_core_list(sections.get("online", "")),
    )


def read_state(phone: Phone) -> PhoneState:
    """The phone now, in one round trip. Raises `DeviceError`."""
    return _read_state(phone, _COMMANDS)


def read_watched_state(phone: Phone) -> PhoneState:
    """What of its state may change in a window; the rest is None. Raises `DeviceError`."""
    return _read_state(phone, _WATCHED)


def _read_state(phone: Phone, names: Iterable[str]) -> PhoneState:
    script = "; ".join(f"echo '{_SECTION}{name}'; {{ {_COMMANDS[name]}; }} 2>/dev/null" for name in names)
    return parse_state(split_sections(phone.run(script).stdout))


def read_facts(phone: Phone) -> PhoneFacts:
    """What the phone is. Raises `DeviceError`."""
    return parse_facts(
        parse_properties(phone.read("getprop") or ""),
        phone.read("cat /proc/meminfo") or "",
        phone.read("uname -sr"),
    )


def split_sections(text: str) -> dict[str, str]:
    """Output of several commands behind lines of their names."""
    sections: dict[str, str] = {}
    for part in re.split(rf"^{_SECTION}", text, flags=re.MULTILINE)[1:]:
        name, _, content = part.partition("\n")
        sections[name.strip()] = content
    return sections


def _number(text: str | None) -> float | None:
    """None also for `null`, which `settings` prints for what was never set."""
    return float(text) if text and re.fullmatch(r"-?[0-9]{1,18}(\.[0-9]+)?", text) else None
