"""Times of a phone on the run's clock, around a program: a burst of markers before it, and one after it.

The gauge's loop has markers of its own, which are known only once it ends. A program's edges are wanted at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from devices.android.device_clock import UPTIME_RESOLUTION_S, ClockMap, Marker, fit_clock, steady_stamps
from devices.android.shell import STDOUT, Phone
from devices.base import TransientDeviceError

MARKERS = 12
USUAL = 0.9
"""The first marker of a burst also waits for its shell."""
ECHO_TIMEOUT_S = 5.0
_SCRIPT = """export LC_ALL=C
while read -r m; do
read -r u x </proc/uptime
echo "$EPOCHREALTIME,$u,$m"
done"""


class PhoneTimes(NamedTuple):
    """Of the phone's two clocks to the run's. wall: None where that clock was set meanwhile, or cannot be read."""

    uptime: ClockMap
    wall: ClockMap | None
    remark: str
    trip_s: float = 0.0
    """There and back: nine of ten markers were as fast."""

    def of_uptime_s(self, uptime_s: float) -> float:
        """On the run's clock, in seconds. /proc/uptime is cut to hundredths: the middle is taken."""
        return float(self.uptime.to_host_s(np.asarray([uptime_s + UPTIME_RESOLUTION_S / 2]))[0])

    @property
    def uptime_uncertainty_s(self) -> float:
        """Standard, of a time that /proc/uptime cut to hundredths."""
        return math.hypot(self.uptime.uncertainty_s, UPTIME_RESOLUTION_S / 2) / math.sqrt(3)

    @property
    def wall_uncertainty_s(self) -> float:
        """Standard; 0 where no wall clock is known."""
        return 0.0 if self.wall is None else self.wall.uncertainty_s / math.sqrt(3)

    def of_wall_s(self, wall_s: float) -> float | None:
        return None if self.wall is None else float(self.wall.to_host_s(np.asarray([wall_s]))[0])


def burst(phone: Phone, now_s: Callable[[], float]) -> tuple[Marker, ...]:
    """Markers there and back. Raises `TransientDeviceError`."""
    stream = phone.stream(_SCRIPT)
    found = []
    try:
        for k in range(MARKERS):
            sent_s = now_s()
            stream.send(f"{k}\n")
            wall, uptime, number, *_ = [*stream.await_line(STDOUT, ECHO_TIMEOUT_S).split(","), "", ""]
            if number != str(k):
                raise TransientDeviceError(f"the phone answered marker {k} with {number[:40]!r}; try again")
            found.append(Marker(sent_s, _number(wall), _number(uptime), now_s()))
    finally:
        stream.close()
    return tuple(found)


def phone_times(bursts: Sequence[Sequence[Marker]]) -> PhoneTimes:
    """Raises `TransientDeviceError` where no time of the phone is known."""
    markers = [m for one in bursts for m in one]
    by_uptime = [[(m.sent_s, m.uptime_s + UPTIME_RESOLUTION_S / 2, m.received_s) for m in one] for one in bursts]
    uptime = fit_clock(by_uptime, UPTIME_RESOLUTION_S)
    stamps = steady_stamps(np.asarray([m.wall_s for m in markers]), np.asarray([m.uptime_s for m in markers]))
    wall = None
    if stamps.source == "wall clock":
        wall = fit_clock([[(m.sent_s, m.wall_s, m.received_s) for m in one] for one in bursts])
    known = (wall or uptime).uncertainty_s
    trip_s = float(np.quantile([m.received_s - m.sent_s for m in markers], USUAL))
    return PhoneTimes(uptime, wall, f"the phone's {stamps.source}, known to {_ceiling(known * 1e3):g} ms", trip_s)


def _ceiling(value: float) -> float:
    """One digit, rounded up: so that trials that know it as well say so in the same words."""
    step = 10.0 ** math.floor(math.log10(max(value, 1e-3)))
    return round(math.ceil(value / step) * step, 6)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
