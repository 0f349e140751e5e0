"""A charger with a loose plug: a phone's battery is charged again and again for a part of a second."""

from __future__ import annotations

import numpy as np
import pytest

from devices.android.calibration import Calibration
from devices.android.raw_gauge import METER, METHOD, power_of
from devices.base import Channel
from results.charge import VOLTAGE
from results.energy import energy_between
from results.records import EnergyReading

UPDATE_S, SAMPLE_S, WINDOW_S, LOAD_W, VOLTS = 0.25, 0.05, 30.0, 2.0, 4.0


def charged(every_s: float, for_s: float) -> EnergyReading:
    """A constant load, read 20 times a second from a gauge that shows instants of a battery that gives or takes."""
    at_s = SAMPLE_S * np.arange(round((WINDOW_S + 2) / SAMPLE_S))
    renewed_s = np.floor(at_s / UPDATE_S + 1e-9) * UPDATE_S
    flicker = np.round(renewed_s / UPDATE_S) % 3 - 1
    is_charged = (renewed_s - 1.1) % every_s < for_s
    current = np.where(is_charged, 700_000, -1e6 * LOAD_W / VOLTS) + flicker
    raw = [
        Channel(component, "raw", additive=False, note="its clock").trace(METER, METHOD, at_s, values, SAMPLE_S)
        for component, values in (("battery current", current), (VOLTAGE, np.full(len(at_s), VOLTS * 1e6)))
    ]
    channel = Channel("battery", "held", relative_accuracy=0.01, note="sysfs")
    trace = power_of(raw, Calibration(-1, 1e-6, 1e-6), channel)
    return energy_between([trace], [(0.5, 0.5 + WINDOW_S)], "all", METER)


@pytest.mark.parametrize(("every_s", "for_s"), [(2.0, 0.4), (1.5, 0.25), (2.0, 0.25), (5.0, 0.5)])
def test_a_battery_that_is_charged_for_a_notable_share_of_the_time_gives_no_joules(
    every_s: float, for_s: float
) -> None:
    reading = charged(every_s, for_s)
    assert reading.energy_j is None
    assert "gap of" in str(reading.reason)


@pytest.mark.parametrize("every_s", [100.0, 5.0])
def test_short_charges_that_are_rare_lie_between_readings_that_bound_them(every_s: float) -> None:
    reading = charged(every_s, 0.25)
    assert reading.energy_j == pytest.approx(LOAD_W * WINDOW_S, rel=1e-3)
