"""The gates a phone passes before it is measured: on battery, cool, and charged. Waits with a countdown, to a limit.

A battery gauge sees what flows through the battery. While a charger carries the load it sees nothing of it, so there is
no way around unplugging: `dumpsys battery unplug` only changes what the phone says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from devices.android.state import DISCHARGING, STATUS_WORDS, BatteryState
from devices.base import Clock, DeviceError

log = logging.getLogger(__name__)

CountdownListener = Callable[[str, float], None]
"""Told why the phone is not ready, and how many seconds are left."""


@dataclass(frozen=True)
class Gates:
    """Below this temperature, above this charge; how long to wait for it, and how often to look."""

    max_temperature_c: float = 40.0
    min_charge_percent: float = 50.0
    wait_s: float = 600.0
    look_every_s: float = 5.0


def why_not_ready(battery: BatteryState | None, gates: Gates) -> str | None:
    """What keeps the phone from being measured, with the remedy; None where nothing does."""
    if battery is None:
        return "`dumpsys battery` says nothing; is this an Android phone with a battery?"
    if battery.is_faked:
        return "its battery state is faked (dumpsys battery unplug or set); undo it: adb shell dumpsys battery reset"
    if battery.status != DISCHARGING:
        word = STATUS_WORDS.get(battery.status or 0, f"in state {battery.status}")
        by = f" ({' and '.join(battery.powered_by)})" if battery.powered_by else ""
        return (
            f"the battery is {word}{by}, and its gauge does not see the load; unplug it and use Wi-Fi"
            " (adb tcpip 5555; adb connect HOST:5555), or switch the hub's port off"
        )
    if battery.temperature_c is not None and battery.temperature_c >= gates.max_temperature_c:
        return (
            f"the battery is at {battery.temperature_c:.1f} degC, {gates.max_temperature_c:g} is the limit; let it cool"
        )
    if battery.percent is not None and battery.percent <= gates.min_charge_percent:
        return (
            f"the battery is at {battery.percent:.0f} %, {gates.min_charge_percent:g} % is the limit;"
            " charge it, then unplug it"
        )
    return None


def wait_until_ready(
    subject: str,
    read_battery: Callable[[], BatteryState | None],
    gates: Gates,
    clock: Clock,
    on_wait: CountdownListener | None = None,
) -> None:
    """Returns when the phone may be measured. Raises `DeviceError` when it still may not after `gates.wait_s`."""
    deadline_s = clock.now_s() + gates.wait_s
    while (reason := why_not_ready(read_battery(), gates)) is not None:
        left_s = deadline_s - clock.now_s()
        if left_s <= 0:
            waited = f", and was not after {gates.wait_s:g} s of waiting" if gates.wait_s > 0 else ""
            raise DeviceError(f"{subject} is not ready{waited}: {reason}")
        log.info("%s: %s; waiting, %.0f s left", subject, reason, left_s)
        if on_wait is not None:
            on_wait(reason, left_s)
        clock.sleep_until_s(clock.now_s() + min(gates.look_every_s, left_s))
