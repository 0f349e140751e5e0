"""Joules of a charge counter that jumps, wraps, is set anew, or steps as far as a window goes, in closed form."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from devices.android.battery import MAX_POWER_W, RELATIVE_ACCURACY
from devices.android.device_clock import Marker
from devices.android.gauge_loop import GaugeLog
from devices.android.raw_gauge import energy_of, raw_traces
from devices.base import Channel, DeviceError
from results.records import EnergyReading
from tests.battery_windows import energy


def charge_reading(left_uah: NDArray[np.float64]) -> EnergyReading:
    """From second 50 on, of a counter that is read every second at 4 V."""
    at_s = np.arange(float(len(left_uah)))
    markers = tuple(Marker(t, t, np.nan, t) for t in (0.0, at_s[-1]))
    log = GaugeLog(at_s, at_s, left_uah, np.full(len(at_s), 4000.0), (markers[:1], markers[1:]))
    channel = Channel("battery", "counter", relative_accuracy=RELATIVE_ACCURACY, max_power_w=MAX_POWER_W)
    return energy([energy_of(raw_traces(log, "charge", 1.0), channel)], 50.0, 550.0)


def one_mah_in_5_s() -> NDArray[np.float64]:
    """2.88 W at 4 V."""
    return 3_456_000 - np.floor(np.arange(601) / 5.0) * 1000


def test_a_charge_of_zero_for_a_moment_is_a_phone_that_does_not_know_it() -> None:
    left_uah = one_mah_in_5_s()
    left_uah[300:303] = 0
    assert charge_reading(left_uah).energy_j == pytest.approx(2.88 * 500.0, rel=0.01)
    left_uah[300:] = 0
    assert charge_reading(left_uah).energy_j is None


def test_a_charge_counter_may_count_below_zero() -> None:
    """It began at 0 when it was set, and passes 0 or not."""
    for first_uah in (0.0, 50_500.0):
        reading = charge_reading(one_mah_in_5_s() - 3_456_000 + first_uah)
        assert reading.energy_j == pytest.approx(2.88 * 500.0, rel=0.01)


@pytest.mark.parametrize(
    ("taken_uah", "told"),
    [
        (-1_000, "stepped back"),  # it was charged, and no charger was told
        (-65_536_000, "stepped back"),  # it wrapped
        (3_000_000, "jumped up"),  # it was set anew
        (100_000, "jumped up"),
    ],
)
def test_a_charge_counter_that_is_set_in_a_window_gives_no_joules(taken_uah: float, told: str) -> None:
    left_uah = one_mah_in_5_s()
    left_uah[302:] -= taken_uah
    reading = charge_reading(left_uah)
    assert reading.energy_j is None
    assert told in str(reading.reason)


@pytest.mark.parametrize("taken_uah", [3_000, 5_000, 10_000])
def test_a_charge_counter_that_jumps_by_no_more_than_a_phone_draws_is_told_and_within_its_error(
    taken_uah: float,
) -> None:
    left_uah = one_mah_in_5_s()
    left_uah[302:] -= taken_uah
    reading = charge_reading(left_uah)
    assert reading.uncertainty_j is not None
    assert reading.energy_j == pytest.approx(2.88 * 500.0, abs=3 * reading.uncertainty_j)
    assert "it may be a jump of the counter" in str(reading.remark)


@pytest.mark.parametrize("step_uah", [50_000, 100_000, 400_000])
def test_a_charge_counter_whose_steps_are_as_large_as_the_window_gives_no_joules(step_uah: float) -> None:
    """The 500 s at 2.88 W take 100 mAh."""
    left_uah = 3_456_000 - np.floor((1000 * np.arange(601) / 5.0 + 20_000) / step_uah) * step_uah
    reading = charge_reading(left_uah)
    assert reading.energy_j is None
    assert reading.reason


@pytest.mark.parametrize(("unit_uah", "is_refused"), [(1000.0, True), (1.0, False)])
def test_a_charge_counter_in_mah_gives_no_joules_of_a_thousandth(unit_uah: float, is_refused: bool) -> None:
    """2.88 W: 3456 mAh and 1 mAh less in 5 s, or 3456000 uAh and 1000 uAh less."""
    left = one_mah_in_5_s() / unit_uah
    if is_refused:
        with pytest.raises(DeviceError, match=r"2.88 mW if it is in uAh, as Android asks, and 2.88 W if in mAh"):
            charge_reading(left)
    else:
        assert charge_reading(left).energy_j == pytest.approx(2.88 * 500.0, rel=0.01)
