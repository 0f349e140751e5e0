"""What of the phones that are attached could be measured now: for `joulebench devices`."""

from __future__ import annotations

from devices.android.battery import BatteryMeter, find_sources
from devices.android.gates import why_not_ready
from devices.android.server import DEVICE_PREFIX, ServerAddress, list_phones
from devices.android.shell import Phone
from devices.android.state import parse_battery, read_facts
from devices.attached import AttachedMeter
from devices.base import DeviceError
from devices.gates import Gates

INTERVAL_S = 0.05


def attached(address: ServerAddress | None = None) -> list[AttachedMeter]:
    """One row a phone: how its battery would be read, or why it cannot be; a row that says so where no server answers.

    Some round trips a phone; nothing is measured, and nothing raised.
    """
    try:
        phones = list_phones(address)
    except DeviceError as error:
        return [_row(DEVICE_PREFIX, False, str(error))]
    return [
        _survey(phone.name, address)
        if phone.remedy is None
        else _row(phone.name, False, f"{phone.state}: {phone.remedy}")
        for phone in phones
    ]


def _survey(name: str, address: ServerAddress | None) -> AttachedMeter:
    phone = Phone(name, address)
    try:
        phone.reach()
        facts = read_facts(phone)
        sources = find_sources(phone, INTERVAL_S)
        reason = why_not_ready(parse_battery(phone.read("dumpsys battery") or ""), Gates())
    except DeviceError as error:
        return _row(name, False, str(error))
    what = f"{facts.model}, Android {facts.android}"
    if not sources:
        return _row(name, False, f"{what}; its shell may read no current of the battery")
    if reason is not None:
        return _row(name, False, f"{what}; {reason}")
    return _row(name, True, f"{what}; {sources[0].name}")


def _row(device: str, ready: bool, remark: str) -> AttachedMeter:
    return AttachedMeter(device, BatteryMeter.name, BatteryMeter.method, ready, remark)
