"""What an iPhone says of its battery and of itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.gates import Gates
from devices.ios.device import why_not_ready
from devices.ios.state import BatteryState, parse_battery, parse_facts, signed, told_state
from tests.fakes.ios_phone import BATTERY

READY = BatteryState(current_a=-0.5, voltage_v=4.0, temperature_c=31.2, percent=82.0, is_charging=False)


def test_a_discharging_battery_gives_its_current_times_its_voltage() -> None:
    battery = parse_battery(BATTERY)
    assert battery is not None
    assert battery.current_a == pytest.approx(-0.520)
    assert battery.power_w == pytest.approx(0.520 * 4.012)
    assert battery.temperature_c == pytest.approx(31.2)
    assert (battery.percent, battery.is_charging) == (82.0, False)


@pytest.mark.parametrize("bits", [16, 32, 64])
@given(milliampere=st.integers(-10_000, 10_000))
def test_a_register_read_as_unsigned_keeps_its_sign(bits: int, milliampere: int) -> None:
    assert signed(milliampere % 2**bits) == milliampere


@pytest.mark.parametrize(
    ("changes", "charging"),
    [
        ({"ExternalConnected": True}, True),
        ({"IsCharging": True}, True),
        ({}, False),
        ({"ExternalConnected": None, "IsCharging": None}, None),
        # A full phone on its cable does not charge either.
        ({"ExternalConnected": None}, None),
        ({"ExternalConnected": 1}, True),
    ],
)
def test_a_cable_counts_as_charging_also_when_the_battery_is_full(changes: dict[str, Any], charging: bool) -> None:
    battery = parse_battery(BATTERY | changes)
    assert battery is not None
    assert battery.is_charging is charging


@pytest.mark.parametrize("registry", [None, {}, {"IOClass": "AppleARMPMUCharger"}])
def test_what_is_no_battery_is_none(registry: dict[str, Any] | None) -> None:
    assert parse_battery(registry) is None


def test_a_battery_without_a_current_has_no_power_and_not_zero() -> None:
    battery = parse_battery({"Voltage": 4000})
    assert battery == BatteryState(voltage_v=4.0)
    assert battery.power_w is None


def test_numbers_beyond_any_register_are_no_figures() -> None:
    """As the XML of a property list may hold them."""
    huge = dict.fromkeys(("InstantAmperage", "Temperature", "CurrentCapacity", "UpdateTime"), 10**400)
    battery = parse_battery(BATTERY | huge)
    assert battery is not None
    assert (battery.current_a, battery.power_w, battery.updated_at) == (None, None, None)
    assert why_not_ready(battery, Gates(), reads_battery=True) is not None


@pytest.mark.parametrize(
    ("battery", "reads_battery", "reason"),
    [
        (READY, True, None),
        (BatteryState(is_charging=True, percent=90.0), True, "take it off every cable"),
        (BatteryState(is_charging=True, percent=90.0), False, None),
        (BatteryState(percent=90.0), True, "does not say whether it charges"),
        (BatteryState(is_charging=False, temperature_c=41.0), True, "41.0 degC, 40 is the limit"),
        (BatteryState(is_charging=False, percent=12.0), False, "12 %, 50 % is the limit"),
        (None, True, "no battery"),
    ],
)
def test_a_phone_that_is_not_ready_says_why(
    battery: BatteryState | None, reads_battery: bool, reason: str | None
) -> None:
    said = why_not_ready(battery, Gates(), reads_battery)
    assert said is None if reason is None else reason in str(said)


def test_facts_are_none_where_nothing_tells_them() -> None:
    facts = parse_facts({"UniqueDeviceID": "X", "ProductType": "iPhone17,1", "OSVersion": "18.5"}, {})
    assert (facts.os, facts.architecture, facts.n_cores) == ("iOS 18.5", None, None)


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
KEYS = (*BATTERY, "UpdateTime")


@given(changes=st.dictionaries(st.sampled_from(KEYS), ANYTHING), reads_battery=st.booleans())
def test_no_registry_is_a_traceback_and_none_with_an_odd_figure_opens_the_gate(
    changes: dict[str, Any], reads_battery: bool
) -> None:
    battery = parse_battery(BATTERY | changes)
    assert battery is not None
    told = told_state(1.0, battery)
    for figure in (told.temperature_c, told.battery_percent):
        assert figure is None or math.isfinite(figure)
    if why_not_ready(battery, Gates(), reads_battery) is None:
        assert battery.temperature_c is None or -40.0 <= battery.temperature_c < 40.0
        assert battery.percent is None or 50.0 < battery.percent <= 110.0
        if reads_battery:
            assert battery.is_charging is False
            assert battery.current_a is None or battery.current_a < 0


@given(registry=ANYTHING)
def test_no_answer_of_the_registry_is_a_traceback(registry: object) -> None:
    assert parse_battery(registry) is None  # type: ignore[arg-type]
