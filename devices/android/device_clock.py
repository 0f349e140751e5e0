"""The phone's clock on the host's: offset and drift, from markers that the host sends and the phone stamps.

A marker leaves the host at `sent_s`, is stamped `device_s` on the phone, and its echo is back at `received_s`. Delays
are not negative, so the offset (device - host) lies between device_s - received_s and device_s - sent_s. All markers of
a burst bound the same offset: the highest lower and the lowest upper bound hold it. Its middle errs by at most half
their distance, which is set by the two fastest trips, one each way, and not by the mean or the jitter of the link
(Paxson, "On Calibrating Measurements of Packet Transit Times", 1998). Between bursts the offset is taken to run
straight: a constant difference of rates, tens of ppm, is followed; what the rate changes in a minute is below a ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from devices.base import TransientDeviceError

Array = NDArray[np.float64]

UPTIME_RESOLUTION_S = 0.01
"""/proc/uptime is cut to hundredths."""
WALL_RESOLUTION_S = 3e-6
"""EPOCHREALTIME is cut to microseconds; seconds since 1970 are held in steps of 0.24 us."""
STEP_S = 0.03
"""The wall clock against the uptime: more than the latter's resolution can explain."""
_STEP_SAMPLES = 5
"""A step stays. A shell that was held up between reading its two clocks makes one sample look like a step: the median
of so many in a row does not."""


class Marker(NamedTuple):
    """One trip. Host times are the run's; wall_s and uptime_s are of the phone's two clocks (NaN where it has none)."""

    sent_s: float
    wall_s: float
    uptime_s: float
    received_s: float


@dataclass(frozen=True)
class ClockMap:
    """offset = device - host at some device times; between them it runs straight, outside it stays."""

    device_s: Array
    offset_s: Array
    uncertainty_s: float
    """Half the width of the widest bound."""

    def to_host_s(self, device_s: Array) -> Array:
        return device_s - np.interp(device_s, self.device_s, self.offset_s)

    @property
    def drift_ppm(self) -> float:
        """How much faster the phone's clock runs, first burst to last."""
        span_s = float(self.device_s[-1] - self.device_s[0])
        return float(self.offset_s[-1] - self.offset_s[0]) / span_s * 1e6 if span_s > 0 else 0.0


class Stamps(NamedTuple):
    """times_s may be off by half of resolution_s. source: which clock of the phone, and why not the other."""

    times_s: Array
    resolution_s: float
    source: str


def steady_stamps(wall_s: Array, uptime_s: Array) -> Stamps:
    """The stamps to go by: the wall clock (microseconds), unless it is missing or was set meanwhile.

    The uptime never steps. It is cut to 10 ms, so half of that is added.
    """
    uptime = uptime_s + UPTIME_RESOLUTION_S / 2
    if not np.isfinite(wall_s).all():
        return Stamps(uptime, UPTIME_RESOLUTION_S, "uptime (its shell has no EPOCHREALTIME)")
    if np.isfinite(uptime_s).all() and len(wall_s) >= _STEP_SAMPLES:
        ahead_s = (wall_s - uptime_s)[np.argsort(uptime_s, kind="stable")]
        step_s = float(np.ptp(np.median(np.lib.stride_tricks.sliding_window_view(ahead_s, _STEP_SAMPLES), axis=1)))
        if step_s > STEP_S:
            return Stamps(uptime, UPTIME_RESOLUTION_S, f"uptime (its wall clock was set by {step_s:.3g} s meanwhile)")
    return Stamps(wall_s, WALL_RESOLUTION_S, "wall clock")


def fit_clock(bursts: Sequence[Sequence[tuple[float, float, float]]], resolution_s: float = 0.0) -> ClockMap:
    """bursts: of (sent_s, device_s, received_s). Raises `TransientDeviceError` where bounds contradict each other.

    A marker whose stamp is no number says nothing; where none says anything, no time of the phone is known.
    """
    device_s, offset_s, half_s = [], [], []
    for burst in bursts:
        trips = np.asarray(burst, dtype=np.float64).reshape(-1, 3)
        trips = trips[np.isfinite(trips).all(axis=1)]
        if not len(trips):
            continue
        sent, device, received = trips.T
        low_s = float((device - received).max()) - resolution_s / 2
        high_s = float((device - sent).min()) + resolution_s / 2
        if low_s > high_s:
            raise TransientDeviceError(
                f"the phone's clock stepped by at least {low_s - high_s:.3g} s within {len(trips)} markers;"
                " turn automatic time off on the phone, or try again"
            )
        device_s.append(float(device.mean()))
        offset_s.append((low_s + high_s) / 2)
        half_s.append((high_s - low_s) / 2)
    if not half_s:
        raise TransientDeviceError(
            "no marker came back from the phone, so its clock is not known to the host's; try again"
        )
    return ClockMap(np.asarray(device_s), np.asarray(offset_s), max(half_s))


def clock_note(clock: ClockMap, which: str) -> str:
    """How well a trace's times are known. which: the clock of the phone, as `Stamps.source` says."""
    return f"phone's {which}, known to {clock.uncertainty_s * 1e3:.2g} ms, drift {clock.drift_ppm:.3g} ppm"
