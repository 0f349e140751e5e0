"""What of the phones that are attached could be measured now: for `joulebench devices`."""

from __future__ import annotations

from devices.android.battery import BatteryMeter, find_sources
from devices.android.gates import why_not_ready
from devices.android.perfetto_rails import RailMeter, find_rails
from devices.android.server import DEVICE_PREFIX, ServerAddress, list_phones
from devices.android.shell import Phone
from devices.android.state import parse_battery, read_facts
from devices.attached_meter import AttachedMeter
from devices.base import DeviceError
from devices.boundary import library_errors
from devices.clock import MonotonicClock
from devices.gates import Gates

INTERVAL_S = 0.05


def attached_phones(address: ServerAddress | None = None) -> list[AttachedMeter]:
    """Two rows a phone: how its battery and its rails would be read, or why they cannot be.

    One row where a phone is not ready for adb, or no server answers. Some round trips a phone and a trace of a second;
    nothing is raised.
    """
    try:
        phones = list_phones(address)
    except DeviceError as error:
        return [_row(DEVICE_PREFIX, False, str(error))]
    rows = []
    for phone in phones:
        if phone.remedy is None:
            rows += _survey(phone.name, address)
        else:
            rows.append(_row(phone.name, False, f"{phone.state}: {phone.remedy}"))
    return rows


def _survey(name: str, address: ServerAddress | None) -> list[AttachedMeter]:
    phone = Phone(name, address)
    try:
        with library_errors(name, "its survey"):
            phone.reach()
            facts = read_facts(phone)
            sources = find_sources(phone, INTERVAL_S)
            battery = parse_battery(phone.read("dumpsys battery") or "")
    except DeviceError as error:
        return [_row(name, False, str(error))]
    what = f"{facts.model}, Android {facts.android}"
    reason = why_not_ready(battery, Gates())
    if not sources:
        row = _row(name, False, f"{what}; its shell may read no current of the battery")
    elif reason is not None:
        row = _row(name, False, f"{what}; {reason}")
    else:
        row = _row(name, True, f"{what}; {sources[0].name}")
    return [row, _survey_rails(phone, name, why_not_ready(battery, Gates(), reads_battery=False))]


def _survey_rails(phone: Phone, name: str, reason: str | None) -> AttachedMeter:
    """reason: what keeps the phone from being measured at all."""
    try:
        with library_errors(name, "its survey"):
            rails = find_rails(phone, MonotonicClock())
    except DeviceError as error:
        return AttachedMeter(name, RailMeter.name, RailMeter.method, False, str(error))
    remark = reason or f"{len(rails)} rails through Perfetto: {', '.join(rail.name for rail in rails)}"
    return AttachedMeter(name, RailMeter.name, RailMeter.method, reason is None, remark)


def _row(device: str, ready: bool, remark: str) -> AttachedMeter:
    return AttachedMeter(device, BatteryMeter.name, BatteryMeter.method, ready, remark)
