"""A window of a meter, measured as a session does it, and the energy that comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from devices.base import Meter
from devices.clock import MonotonicClock
from devices.meters.polled import PolledMeter
from results.energy import energy_between
from results.records import EnergyReading, PowerTrace
from tests.fakes.powercap import Powercap
from tests.fakes.sysfs import Sysfs

CLOCK = MonotonicClock()


def measure(meter: Meter, work: Callable[[], object]) -> tuple[list[PowerTrace], float, float]:
    """(traces, start, end) of the work, as a session measures it."""
    meter.start()
    start_s = CLOCK.now_s()
    work()
    end_s = CLOCK.now_s()
    return list(meter.stop()), start_s, end_s


def read_on_grid(
    meter: PolledMeter, files: Sysfs | Powercap, interval_s: float, seconds: float
) -> Sequence[PowerTrace]:
    """Traces of a meter that is read in step with its files, however long the machine holds this process up."""
    times_s = np.arange(0.0, seconds + interval_s / 2, interval_s)
    rows = []
    for passed_s in times_s:
        files.show(float(passed_s))
        rows.append(meter.read())
    return meter.traces(times_s, np.asarray(rows))


def total(traces: Sequence[PowerTrace], start_s: float, end_s: float, component: str = "total") -> EnergyReading:
    return energy_between(traces, [(start_s, end_s)], "all", traces[0].meter, component)


def sleep(seconds: float) -> Callable[[], object]:
    return lambda: time.sleep(seconds)
