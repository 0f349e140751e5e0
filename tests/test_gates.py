"""Gates before a trial: what is waited for, how long, and what is said meanwhile."""

from __future__ import annotations

import math

import pytest

from devices.base import DeviceError
from devices.gates import Gates, too_hot_or_empty, wait_until_ready
from tests.fakes.machine import FakeMachine


def test_a_ready_phone_does_not_wait() -> None:
    machine = FakeMachine()
    wait_until_ready("adb:X", lambda: None, Gates(), machine)
    assert machine.time_s == 100.0


def test_a_hot_phone_is_waited_for_with_a_countdown() -> None:
    """It cools by 1 degC in 5 s from 43 degC; below 40 after 20 s."""
    machine = FakeMachine()
    gates = Gates(wait_s=60.0)
    told: list[float] = []
    wait_until_ready(
        "adb:X",
        lambda: too_hot_or_empty(43.0 - (machine.time_s - 100.0) / 5.0, 82.0, gates),
        gates,
        machine,
        lambda reason, left_s: told.append(left_s),
    )
    assert machine.time_s == 120.0
    assert told == [60.0, 55.0, 50.0, 45.0]


def test_waiting_ends_at_its_limit() -> None:
    machine = FakeMachine()
    gates = Gates(wait_s=12.0)
    with pytest.raises(DeviceError, match=r"adb:X is not ready, and was not after 12 s of waiting: .*55.0 degC"):
        wait_until_ready("adb:X", lambda: too_hot_or_empty(55.0, None, gates), gates, machine)
    assert machine.time_s == 112.0


def test_the_limits_themselves_are_too_hot_and_too_empty() -> None:
    gates = Gates(max_temperature_c=40.0, min_charge_percent=50.0)
    assert "40.0 degC, 40 is the limit; let it cool" in str(too_hot_or_empty(40.0, 51.0, gates))
    assert "50 %, 50 % is the limit; charge it" in str(too_hot_or_empty(39.9, 50.0, gates))
    assert too_hot_or_empty(39.9, 50.1, gates) is None
    assert too_hot_or_empty(None, None, gates) is None


def test_what_no_waiting_takes_away_is_told_at_the_second_look() -> None:
    machine = FakeMachine()
    gates = Gates()
    looks: list[float] = []
    with pytest.raises(DeviceError, match=r"adb:X is not ready: the battery is at 20 %.*charge it, then unplug it$"):
        wait_until_ready(
            "adb:X",
            lambda: too_hot_or_empty(25.0, 20.0, gates),
            gates,
            machine,
            lambda reason, left_s: looks.append(machine.time_s),
        )
    assert looks == [100.0]
    assert machine.time_s == 100.0 + gates.look_every_s


def test_one_odd_answer_ends_no_wait() -> None:
    machine = FakeMachine()
    answers = iter([30.0, math.nan, 30.0])
    next(answers)
    wait_until_ready("adb:X", lambda: too_hot_or_empty(next(answers), 82.0, Gates()), Gates(), machine)
    assert machine.time_s == 100.0 + Gates().look_every_s


def test_a_phone_that_is_charged_meanwhile_is_waited_for() -> None:
    """Its rails do not mind the cable: 1 % in 5 s from 48 %."""
    machine = FakeMachine()
    gates = Gates(wait_s=60.0)
    wait_until_ready(
        "adb:X",
        lambda: too_hot_or_empty(25.0, 48.0 + (machine.time_s - 100.0) / 5.0, gates, is_charging=True),
        gates,
        machine,
    )
    assert machine.time_s == 115.0


@pytest.mark.parametrize(
    ("temperature_c", "percent"),
    [(math.nan, 82.0), (-math.inf, 82.0), (math.inf, 82.0), (-273.0, 82.0), (25.0, math.nan), (25.0, 8200.0)],
)
def test_a_figure_that_no_battery_has_opens_no_gate(temperature_c: float, percent: float) -> None:
    assert "which no battery has" in str(too_hot_or_empty(temperature_c, percent, Gates()))
