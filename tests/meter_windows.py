"""A window of a meter, measured as a session does it, and the energy that comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from devices.base import Meter
from devices.clock import MonotonicClock
from results.energy import energy_between
from results.records import EnergyReading, PowerTrace

CLOCK = MonotonicClock()


def measure(meter: Meter, work: Callable[[], object]) -> tuple[list[PowerTrace], float, float]:
    """(traces, start, end) of the work, as a session measures it."""
    meter.start()
    start_s = CLOCK.now_s()
    work()
    end_s = CLOCK.now_s()
    return list(meter.stop()), start_s, end_s


def total(traces: list[PowerTrace], start_s: float, end_s: float, component: str = "total") -> EnergyReading:
    return energy_between(traces, [(start_s, end_s)], "all", traces[0].meter, component)


def sleep(seconds: float) -> Callable[[], object]:
    return lambda: time.sleep(seconds)
