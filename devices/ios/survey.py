"""What of the iPhones in reach could be measured now: for `joulebench devices`."""

from __future__ import annotations

from collections.abc import Iterator

from devices.attached_meter import AttachedMeter
from devices.base import DeviceError
from devices.boundary import library_errors
from devices.gates import Gates
from devices.ios.battery import BatteryMeter
from devices.ios.device import why_not_ready
from devices.ios.energy_gauge import EnergyGaugeMeter
from devices.ios.errors import ios_errors, require_library
from devices.ios.event_loop import EventLoopThread
from devices.ios.link import DEVICE_PREFIX, find_phones
from devices.ios.phone import ANSWER_TIMEOUT_S, Phone
from devices.ios.tunneld import TUNNELD, TunneldAddress


def attached_phones(tunneld: TunneldAddress = TUNNELD) -> list[AttachedMeter]:
    """Two rows a phone: how its battery and its energy gauge would be read, or why not; one where none is in reach.

    Opens a tunnel to each phone in turn, some seconds without tunneld; nothing is measured, and nothing raised.
    """
    try:
        require_library()
        loop = EventLoopThread("ios-survey")
        try:
            with ios_errors("ios: looking for phones"):
                reachable = loop.run(find_phones(tunneld), ANSWER_TIMEOUT_S, "ios: looking for phones")
        finally:
            loop.close()
    except DeviceError as error:
        return [_battery(DEVICE_PREFIX, False, str(error))]
    if not reachable.udids:
        return [_battery(DEVICE_PREFIX, False, "; ".join(reachable.remarks))]
    return [row for udid in reachable.udids for row in _survey(DEVICE_PREFIX + udid, tunneld)]


def ready_for_apps(name: str, tunneld: TunneldAddress | None = None) -> str:
    """What the phone that a plan names is, through a tunnel to it. Raises `DeviceError` where no app could be started
    on it."""
    require_library()
    phone = Phone(name, tunneld or TUNNELD)
    try:
        with library_errors(name, "its survey"):
            facts = phone.facts()
            lacks = phone.why_no_instruments()
    finally:
        phone.close()
    if lacks:
        raise DeviceError(f"no app can be started on it: {lacks}")
    return f"{facts.udid}, {facts.model}, {facts.os}"


def _survey(name: str, tunneld: TunneldAddress) -> Iterator[AttachedMeter]:
    """The battery needs neither Developer Mode nor instruments: what is amiss with them stands in their row alone."""
    phone = Phone(name, tunneld)
    try:
        try:
            with library_errors(name, "its survey"):
                facts = phone.facts()
                what = f"{facts.model}, {facts.os}, {phone.way}"
                reason = why_not_ready(phone.battery(), Gates(), reads_battery=True)
        except DeviceError as error:
            yield _battery(name, False, str(error))
            return
        yield _battery(name, reason is None, f"{what}; {reason}" if reason else what)
        try:
            lacks = phone.why_no_instruments()
        except DeviceError as error:
            lacks = str(error)
        remark = lacks or f"{what}; relative units of one app, no joules"
        yield AttachedMeter(name, EnergyGaugeMeter.name, EnergyGaugeMeter.method, lacks is None, remark)
    finally:
        phone.close()


def _battery(device: str, ready: bool, remark: str) -> AttachedMeter:
    return AttachedMeter(device, BatteryMeter.name, BatteryMeter.method, ready, remark)
