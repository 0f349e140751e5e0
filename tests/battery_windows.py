"""Windows of a fake phone's battery, measured by its meter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from devices.android.battery import BatteryMeter
from devices.android.shell import Phone
from devices.clock import MonotonicClock
from results.energy import energy_between
from results.records import EnergyReading, PowerTrace

CLOCK = MonotonicClock()
INTERVAL_S = 0.05
WATTS = 2.0


@contextmanager
def opened(phone: Phone, reconnect_s: float = 0.0) -> Iterator[BatteryMeter]:
    meter = BatteryMeter(phone, INTERVAL_S, CLOCK, reconnect_s)
    try:
        meter.open()
        yield meter
    finally:
        meter.close()


def energy(traces: Sequence[PowerTrace], start_s: float, end_s: float) -> EnergyReading:
    return energy_between(traces, [(start_s, end_s)], "all", "battery")


def nothing() -> None:
    """Goes wrong."""


def window(
    meter: BatteryMeter, seconds: float, fault: Callable[[], object] = nothing, seconds_behind: float = 0.0
) -> tuple[Sequence[PowerTrace], EnergyReading]:
    """fault: what happens after `seconds`."""
    meter.start()
    start_s = CLOCK.now_s()
    CLOCK.sleep_until_s(start_s + seconds)
    fault()
    CLOCK.sleep_until_s(start_s + seconds + seconds_behind)
    end_s = CLOCK.now_s()
    traces = meter.stop()
    return traces, energy(traces, start_s, end_s)
