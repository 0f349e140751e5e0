"""What keeps an Android phone from being measured now: it charges, or says what is not so, or is too hot or too empty.

A battery gauge sees what flows through the battery. While a charger carries the load it sees nothing of it, so there is
no way around unplugging: `dumpsys battery unplug` only changes what the phone says.
"""

from __future__ import annotations

from devices.android.state import DISCHARGING, STATUS_WORDS, BatteryState
from devices.gates import Gates, Lasting, too_hot_or_empty


def why_not_ready(battery: BatteryState | None, gates: Gates, reads_battery: bool = True) -> str | None:
    """What keeps the phone from being measured, with the remedy; None where nothing does.

    reads_battery: whether joules come from the battery. Power rails do not mind a cable.
    """
    if battery is None:
        return Lasting("`dumpsys battery` says nothing; is this an Android phone with a battery?")
    if battery.is_faked:
        return "its battery state is faked (dumpsys battery unplug or set); undo it: adb shell dumpsys battery reset"
    if reads_battery and battery.status != DISCHARGING:
        word = STATUS_WORDS.get(battery.status or 0, f"in state {battery.status}")
        by = f" ({' and '.join(battery.powered_by)})" if battery.powered_by else ""
        return (
            f"the battery is {word}{by}, and its gauge does not see the load; unplug it and use Wi-Fi"
            " (adb tcpip 5555; adb connect HOST:5555), or switch the hub's port off"
        )
    return too_hot_or_empty(battery.temperature_c, battery.percent, gates, battery.is_charging)
