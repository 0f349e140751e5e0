"""Sign and unit of a phone's current."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from devices.android.calibration import calibrate
from devices.base import DeviceError

N = 60
Array = NDArray[np.float64]


def readings(value: float) -> Array:
    return np.full(N, float(value))


@pytest.mark.parametrize(
    ("current", "voltage", "watts", "words"),
    [
        (-450_000, 4_012_000, 1.8054, "current in uA, negative while discharging"),
        (450_000, 4_012_000, 1.8054, "current in uA, positive while discharging"),
        (-450, 4_012_000, 1.8054, "current in mA, negative while discharging"),
        (450, 4_012, 1.8054, "current in mA, positive while discharging"),
        # 15 mA in uA is below the limit for milliampere; 15 A in mA is 58 W, which no phone draws.
        (-15_000, 3_900_000, 0.0585, "current in uA, negative while discharging"),
        # Two cells in series.
        (-1_200_000, 7_800_000, 9.36, "current in uA, negative while discharging"),
    ],
)
def test_unit_and_sign_are_those_that_give_a_phones_power(
    current: float, voltage: float, watts: float, words: str
) -> None:
    found = calibrate(readings(current), readings(voltage))
    assert found.power_w(readings(current), readings(voltage)) == pytest.approx(watts)
    assert str(found) == words


@given(
    watts=st.floats(0.3, 11.999),  # 12 W are where mA and uA are not told apart, and rounding passes them
    volts=st.floats(3.4, 4.5),
    sign=st.sampled_from([1, -1]),
    per_ampere=st.sampled_from([1e3, 1e6]),
    per_volt=st.sampled_from([1e3, 1e6]),
)
def test_any_phone_that_is_awake_is_understood(
    watts: float, volts: float, sign: int, per_ampere: float, per_volt: float
) -> None:
    current, voltage = readings(sign * watts / volts * per_ampere), readings(volts * per_volt)
    assert calibrate(current, voltage).power_w(current, voltage) == pytest.approx(watts)


@pytest.mark.parametrize(
    ("current", "voltage", "reason"),
    [
        (readings(0), readings(4e6), "reads 0"),
        # 4 to 6 mA in uA: 16 to 24 W if it were in mA.
        (readings(-4_000), readings(4e6), "is 16 W if it is in mA and 0.016 W if in uA, and both may be"),
        (readings(6_000), readings(4e6), "is 24 W if it is in mA and 0.024 W if in uA, and both may be"),
        (readings(3), readings(4e6), "0.012 W if in mA"),
        (readings(9e9), readings(4e6), "3.6e.04 W if it is in uA"),
        (readings(-4e5), readings(50), "is no battery's"),
        (np.where(np.arange(N) % 2, 4e5, -4e5), readings(4e6), "changes its sign.*charger"),
        (readings(np.nan), readings(4e6), "0 of 60 readings are numbers"),
    ],
)
def test_what_cannot_be_a_battery_is_refused(
    current: Array,
    voltage: Array,
    reason: str,
) -> None:
    with pytest.raises(DeviceError, match=reason):
        calibrate(current, voltage)
