"""What an iPhone says of its battery and of itself. What it does not say is None.

The battery is the I/O registry's power source (IOPMPowerSource), as the diagnostics service gives it:

    InstantAmperage     mA, negative while discharging; some releases give it unsigned, of 16, 32 or 64 bits
    Voltage             mV
    Temperature         0.01 degC
    CurrentCapacity     in `MaxCapacity`ths: per cent on a phone
    ExternalConnected   a cable or a charging pad carries the load, or a part of it; IsCharging: also fills the battery.
                        Without the first nothing is known: a full phone on its cable does not charge
    UpdateTime          when the gauge renewed its values, in whole seconds of the phone's wall clock
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from results.environments import Conditions

_REGISTER_BITS = (64, 32, 16)
A_PER_MA = 1e-3
V_PER_MV = 1e-3
C_PER_CENTIDEGREE = 1e-2
MAX_CORES = 1024


@dataclass(frozen=True)
class BatteryState:
    current_a: float | None = None
    """Into the battery: negative while it discharges."""
    voltage_v: float | None = None
    temperature_c: float | None = None
    percent: float | None = None
    is_charging: bool | None = None
    """Whether something outside carries the load, or may carry a part of it. None: it does not say."""
    updated_at: int | None = None
    """`UpdateTime`: says only whether two readings are the same one."""

    @property
    def power_w(self) -> float | None:
        """What the battery gives, for the whole phone. Negative: it is being filled."""
        return None if self.current_a is None or self.voltage_v is None else -self.current_a * self.voltage_v


@dataclass(frozen=True)
class PhoneFacts:
    """What a phone is."""

    udid: str
    model: str
    """Apple's name of the product, such as iPhone17,1."""
    os: str
    architecture: str | None = None
    n_cores: int | None = None
    """Told by the instruments service alone: None without Developer Mode and a developer image."""


def parse_battery(registry: Mapping[str, Any] | None) -> BatteryState | None:
    """The properties of IOPMPowerSource; None where they are no battery's."""
    if not isinstance(registry, Mapping) or "Voltage" not in registry:
        return None
    millivolt, centidegrees = _number(registry, "Voltage"), _number(registry, "Temperature")
    level, full = _number(registry, "CurrentCapacity"), _number(registry, "MaxCapacity")
    updated_at = _number(registry, "UpdateTime")
    return BatteryState(
        current_a=_current_a(registry.get("InstantAmperage")),
        voltage_v=None if millivolt is None else millivolt * V_PER_MV,
        temperature_c=None if centidegrees is None else centidegrees * C_PER_CENTIDEGREE,
        percent=100 * level / full if level is not None and full else None,
        is_charging=_is_charging(registry),
        updated_at=int(updated_at) if updated_at is not None and math.isfinite(updated_at) else None,
    )


def _is_charging(registry: Mapping[str, Any]) -> bool | None:
    connected, fills = (registry.get(key) for key in ("ExternalConnected", "IsCharging"))
    if connected in (True, 1) or fills in (True, 1):
        return True
    return False if connected in (False, 0) else None


def _current_a(milliampere: object) -> float | None:
    """An integer of 64 bits does not fit into a float: its sign is found first."""
    if not isinstance(milliampere, int) or isinstance(milliampere, bool) or abs(milliampere) >= 1 << _REGISTER_BITS[0]:
        return None
    return signed(milliampere) * A_PER_MA


def signed(register: int) -> int:
    """A two's complement register that was read as unsigned; no battery gives 32 A, so 16 bits are known by size."""
    for bits in _REGISTER_BITS:
        if 1 << (bits - 1) <= register < 1 << bits:
            return register - (1 << bits)
    return register


def told_state(at_s: float, battery: BatteryState | None) -> Conditions:
    """In the harness' words. A figure that is no number is not told."""
    told = battery or BatteryState()
    return Conditions(
        at_s=at_s,
        temperature_c=_finite(told.temperature_c),
        battery_percent=_finite(told.percent),
        charging=told.is_charging,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def parse_facts(properties: Mapping[str, Any], values: Mapping[str, Any]) -> PhoneFacts:
    """properties: of the discovery handshake; values: lockdown's (may be empty)."""
    version = properties.get("OSVersion") or values.get("ProductVersion") or "unknown"
    build = properties.get("BuildVersion") or values.get("BuildVersion")
    architecture = values.get("CPUArchitecture")
    return PhoneFacts(
        udid=str(properties.get("UniqueDeviceID", "unknown")),
        model=str(properties.get("ProductType", "unknown")),
        os=f"{values.get('ProductName') or 'iOS'} {version}" + (f" ({build})" if build else ""),
        architecture=architecture if isinstance(architecture, str) else None,
    )


def parse_core_count(hardware: Mapping[str, Any]) -> int | None:
    """hardware: the instruments'."""
    n_cores = _number(hardware, "numberOfCpus")
    return int(n_cores) if n_cores is not None and 1 <= n_cores <= MAX_CORES else None


def _number(fields: Mapping[str, Any], key: str) -> float | None:
    """NaN is kept: it is no figure, and a gate has to say so. An integer beyond any float is none either."""
    value = fields.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.nan
