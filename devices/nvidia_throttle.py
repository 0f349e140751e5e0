"""Why an NVIDIA GPU does not run at its highest clock: the bits of NVML's clock event reasons, in words.

Bits from nvml.h (nvmlClocksEventReason*, before driver 535 nvmlClocksThrottleReason*); nvidia-smi writes the same
reasons as elements of its XML.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

REASONS: dict[int, str] = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clocks_setting",
}
"""By bit; the words are nvidia-smi's."""
SLOWED = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})
"""Heat or a fault, as opposed to idleness or a limit that the owner set."""
_SETTINGS = frozenset({"gpu_idle", "applications_clocks_setting", "display_clocks_setting"})


def reasons_of(mask: int) -> frozenset[str]:
    """The reasons in a bit mask; bits that are not in nvml.h are named by their number."""
    unknown = mask & ~sum(REASONS)
    named = {word for bit, word in REASONS.items() if mask & bit}
    return frozenset(named | ({f"reason 0x{unknown:x}"} if unknown else set()))


def is_slowed(reasons: Iterable[str]) -> bool:
    """Whether heat or a fault is among them."""
    return bool(SLOWED & set(reasons))


def summary(masks: Iterable[float]) -> str:
    """What slowed a GPU down in a window, by how many of its readings; nan is a reading that could not be had."""
    known = [reasons_of(int(mask)) for mask in masks if not math.isnan(mask)]
    if not known:
        return "clock event reasons cannot be read"
    counts = {
        word: n
        for word in sorted({word for seen in known for word in seen} - _SETTINGS)
        if (n := sum(word in seen for seen in known))
    }
    if not counts:
        return "not throttled"
    return "throttled: " + ", ".join(f"{word} in {n} of {len(known)} readings" for word, n in counts.items())
