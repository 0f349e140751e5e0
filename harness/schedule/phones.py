"""A phone before and after a scheduled run: charged to a floor, cool, and off its charger again.

Nothing waits here: a phone that charges or cools leaves its run due, and the next pass looks again.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from devices.base import DeviceError
from devices.device_lock import DeviceLock
from devices.gates import Gates, Lasting, too_hot_or_empty
from harness.schedule.due import NotNowError
from harness.schedule.entries import Charging
from results.printable import with_colon

PROGRAM_S = 60.0
"""The longest that a program of the owner may take."""
SEEN_CHARGING_S = 20.0
"""A phone says so some seconds after its port was switched on."""
LOOK_EVERY_S = 1.0
DEVICE_PLACE = "{device}"
"""In the arguments of a command that switches a port."""


class PhoneBattery(NamedTuple):
    percent: float | None
    temperature_c: float | None
    is_charging: bool | None


class ReachedPhone(NamedTuple):
    lock: DeviceLock
    battery: Callable[[], PhoneBattery]
    """Raises `DeviceError`."""


def reach(name: str, state: Path) -> ReachedPhone:
    """Raises `DeviceError`."""
    if name.startswith("ios:"):
        from devices.ios import device as ios
        from devices.ios.phone import Phone as Iphone

        iphone = Iphone(name)
        iphone.reach()
        return ReachedPhone(ios.lock_of(iphone, state), lambda: _told(iphone.battery()))
    from devices.android import device as android
    from devices.android.shell import Phone
    from devices.android.state import parse_battery

    phone = Phone(name)
    phone.reach()
    return ReachedPhone(
        android.lock_of(phone, state), lambda: _told(parse_battery(phone.read("dumpsys battery") or ""))
    )


def _told(battery: object) -> PhoneBattery:
    """A battery's state of either kind of phone."""
    return PhoneBattery(*(getattr(battery, key, None) for key in PhoneBattery._fields))


def make_ready(name: str, phone: ReachedPhone, gates: Gates, charging: Charging | None) -> None:
    """Charged, cool, and off the charger where that can be switched. Raises `NotNowError`, `DeviceError`."""
    # A phone at its floor has what was asked.
    floor = gates.min_charge_percent if charging is None else math.nextafter(charging.to_percent, 0.0)
    asked = Gates(gates.max_temperature_c, floor)
    battery = phone.battery()
    cool = battery._replace(percent=None)
    if (reason := too_hot_or_empty(cool.temperature_c, None, asked)) is not None:
        raise NotNowError(f"{with_colon(name)} {reason}", isinstance(reason, Lasting))
    reason = too_hot_or_empty(None, battery.percent, asked, battery.is_charging)
    if reason is not None and charging is not None and charging.on is not None:
        switch(name, charging.on)
        if not _is_seen_charging(phone):
            raise NotNowError(
                f"{with_colon(name)} {reason}; its port was switched on, and it does not charge", is_fault=True
            )
        raise NotNowError(f"{with_colon(name)} at {battery.percent:.0f} %, charges to {charging.to_percent:g} % first")
    if reason is not None:
        raise NotNowError(f"{with_colon(name)} {reason}", isinstance(reason, Lasting))
    if charging is not None and charging.off is not None:
        switch(name, charging.off)


def switch(name: str, command: Sequence[str]) -> None:
    """Raises `DeviceError` where the owner's program fails."""
    argv = [name if argument == DEVICE_PLACE else argument for argument in command]
    fault = run_program(argv)
    if fault is not None:
        raise DeviceError(f"{with_colon(name)} {fault}")


def run_program(argv: Sequence[str], text: str = "", environment: dict[str, str] | None = None) -> str | None:
    """Runs a program of the owner, without a shell: what went wrong, if anything did."""
    try:
        done = subprocess.run(
            list(argv), input=text, text=True, capture_output=True, timeout=PROGRAM_S, env=environment, check=False
        )
    except (OSError, ValueError) as error:
        return f"{argv[0]} cannot be run ({error})"
    except subprocess.TimeoutExpired:
        return f"{argv[0]} did not end in {PROGRAM_S:g} s"
    if done.returncode == 0:
        return None
    said = " ".join((done.stderr or done.stdout).split())[-200:]
    return f"{argv[0]} ended with code {done.returncode}" + (f" ({said})" if said else "")


def _is_seen_charging(phone: ReachedPhone) -> bool:
    deadline_s = time.monotonic() + SEEN_CHARGING_S
    while not phone.battery().is_charging:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(LOOK_EVERY_S)
    return True
