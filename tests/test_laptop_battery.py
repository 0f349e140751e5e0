"""The gauge of a laptop in a tree like /sys/class/power_supply, whose files move."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from devices.base import MeterUnavailableError
from devices.conditions import host_power
from devices.meters.laptop_battery import LaptopBatteryMeter
from devices.state_watch import state_marks
from tests.fakes.stepped_clock import stepped
from tests.fakes.sysfs import Sysfs
from tests.meter_windows import CLOCK, measure, read_on_grid, sleep, total

BATTERY: dict[str, object] = {"type": "Battery", "status": "Discharging", "power_now": 12_500_000}


@pytest.fixture
def supplies(tmp_path: Path) -> Sysfs:
    sysfs = Sysfs(tmp_path / "power_supply")
    sysfs.add("AC", {"type": "Mains", "online": 0})
    return sysfs


def opened(supplies: Sysfs) -> LaptopBatteryMeter:
    meter = LaptopBatteryMeter(0.04, CLOCK, supplies.root)
    meter.open()
    return meter


def stepping(watts: float, update_s: float) -> Callable[[float], int]:
    """A gauge that shows a new value, 1 mW more or less, every update."""
    return lambda passed_s: int(watts * 1e6) + 1000 * (int(passed_s / update_s) % 2)


@pytest.mark.parametrize(
    "files",
    [
        {"power_now": 12_500_000},
        {"power_now": -12_500_000},  # some drivers give what flows into the battery
        {"current_now": 1_000_000, "voltage_now": 12_500_000},
        {"current_now": -1_000_000, "voltage_now": 12_500_000},
    ],
)
def test_power_or_current_times_voltage_whatever_the_sign(supplies: Sysfs, files: dict[str, object]) -> None:
    supplies.add("BAT0", {"type": "Battery", "status": "Discharging", **files})
    assert opened(supplies).read() == pytest.approx([12.5])


def test_batteries_of_a_machine_add_up_and_those_of_a_mouse_do_not(supplies: Sysfs) -> None:
    supplies.add("BAT0", BATTERY)
    supplies.add("BAT1", {"type": "Battery", "status": "Not charging", "power_now": 0})
    supplies.add("hidpp_battery_0", {"type": "Battery", "scope": "Device", "status": "Discharging"})
    meter = opened(supplies)
    assert [c.component for c in meter.channels] == ["BAT0", "BAT1"]
    assert meter.read() == pytest.approx([12.5, 0.0])


def test_window_of_ten_updates_gives_its_energy_with_the_update_period_that_was_seen(supplies: Sysfs) -> None:
    supplies.add("BAT0", BATTERY | {"power_now": stepping(12.5, 1.5)})
    traces = read_on_grid(opened(supplies), supplies, 0.04, 24.0)
    reading = total(traces, 2.0, 22.0)
    assert reading.method == "battery gauge"
    assert reading.average_power_w == pytest.approx(12.5, rel=0.001)
    assert traces[0].update_period_s == pytest.approx(1.5, abs=0.05)
    assert traces[0].kind == "held"


def test_window_of_a_slow_gauge_is_unresolved_with_the_reason(supplies: Sysfs, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped(monkeypatch.setattr)  # a machine that stood still for 0.2 s would leave a gap
    supplies.add("BAT0", BATTERY)
    traces, start_s, end_s = measure(opened(supplies), sleep(0.3))
    reading = total(traces, start_s, end_s)
    assert reading.energy_j is None
    assert "10 are needed" in (reading.reason or "")


def test_charger_plugged_in_during_a_window_leaves_no_energy_and_a_note(supplies: Sysfs) -> None:
    supplies.add("BAT0", BATTERY | {"power_now": stepping(12.5, 1.0)})
    meter = opened(supplies)
    supplies.add("AC", {"online": lambda passed_s: int(8.01 < passed_s < 8.6)})
    traces = read_on_grid(meter, supplies, 0.04, 24.0)
    reading = total(traces, 2.0, 22.0)
    assert reading.energy_j is None
    assert "gap of 0." in (reading.reason or "")
    # Of 601 readings, those at 8.04, 8.08, ..., 8.56 s.
    assert traces[0].note == "a charger carried the load in 14 of 601 readings"


def test_a_charger_that_was_there_for_one_reading_leaves_no_energy(supplies: Sysfs) -> None:
    # A loose plug: half a minute at 25 readings a second, a renewal each second, on line for 40 ms every 2 s.
    supplies.add("BAT0", BATTERY)
    meter = opened(supplies)
    times_s = np.arange(0.0, 30.0, 0.04)
    watts = 12.5 + 0.001 * (np.floor(times_s) % 7)
    [whole] = meter.traces(times_s, watts[:, np.newaxis])
    assert total([whole], 2.0, 28.0).energy_j == pytest.approx(12.5 * 26, rel=1e-3)
    watts[25::50] = np.nan
    [broken] = meter.traces(times_s, watts[:, np.newaxis])
    reading = total([broken], 2.0, 28.0)
    assert reading.energy_j is None
    assert "gap of 0.08 s in the readings" in (reading.reason or "")


def test_a_driver_that_changes_its_unit_gives_no_joules(supplies: Sysfs) -> None:
    # From microwatt to nanowatt in mid-window: 12.5 kW would be 222 kJ in 34 s, where 425 J flowed.
    supplies.add("BAT0", BATTERY)
    meter = opened(supplies)
    times_s = np.arange(0.0, 40.0, 0.04)
    watts = 12.5 + 0.001 * (np.floor(times_s) % 7)
    [trace] = meter.traces(times_s, np.where(times_s < 20, watts, 1e3 * watts)[:, np.newaxis])
    reading = total([trace], 3.0, 37.0)
    assert reading.energy_j is None
    assert "no more than 500 W can flow there" in (reading.reason or "")


@pytest.mark.parametrize("changed_at_s", [20.0, 0.0])
def test_a_driver_that_shows_a_thousandth_gives_no_joules(supplies: Sysfs, changed_at_s: float) -> None:
    # From microwatt to milliwatt: 203 J, or 0.4 J, where 425 J flowed.
    supplies.add("BAT0", BATTERY)
    meter = opened(supplies)
    times_s = np.arange(0.0, 40.0, 0.04)
    watts = 12.5 + 0.001 * (np.floor(times_s) % 7)
    traces = list(meter.traces(times_s, np.where(times_s < changed_at_s, watts, watts / 1e3)[:, np.newaxis]))
    reading = total(traces, 3.0, 37.0)
    assert (reading.energy_j, bool(reading.reason)) == (None, True)
    assert "less than 0.2 W in" in (traces[0].note or "")


def test_a_driver_in_another_unit_is_refused_at_once(supplies: Sysfs) -> None:
    supplies.add("BAT0", BATTERY | {"power_now": 12_500})
    with pytest.raises(
        MeterUnavailableError, match=r"shows 0\.0125 W, and no laptop that is awake draws less than 0\.2 W"
    ):
        opened(supplies)


def test_two_batteries_that_fall_silent_together_give_no_joules(supplies: Sysfs) -> None:
    # 12.5 W for 34 s are 425 J; 4 s of 0 W would leave 50 J out.
    supplies.add("BAT0", BATTERY)
    supplies.add("BAT1", {"type": "Battery", "status": "Not charging", "power_now": 0})
    meter = opened(supplies)
    times_s = np.arange(0.0, 40.0, 0.04)
    watts = np.stack([12.5 + 0.001 * (np.floor(times_s) % 7), np.zeros(len(times_s))], axis=1)
    assert total(list(meter.traces(times_s, watts)), 3.0, 37.0).energy_j == pytest.approx(425, rel=1e-3)
    watts[500:600] = 0.0
    traces = list(meter.traces(times_s, watts))
    reading = total(traces, 3.0, 37.0)
    assert reading.energy_j is None
    assert "gap of 4.04 s in the readings" in (reading.reason or "")
    assert traces[0].note == "all batteries showed 0 W in 100 of 1000 readings"


@pytest.mark.parametrize(
    ("supply", "files", "message"),
    [
        ("AC", {"online": 1}, "AC is on line; its gauge does not see the load: unplug the charger"),
        ("ucsi-1", {"type": "USB_PD", "online": 1}, "ucsi-1 is on line"),
        ("ucsi-1", {"type": "USB", "online": 2}, "ucsi-1 is on line"),
        ("pad", {"type": "Wireless", "online": 1}, "pad is on line"),
        ("ups", {"type": "UPS", "online": 1}, "ups is on line"),
        ("BAT0", {"status": "Charging"}, "BAT0 is charging"),
        ("BAT0", {"status": "Full"}, "BAT0 is full"),
        ("BAT1", {**BATTERY, "status": "Charging"}, "BAT0 is discharging, BAT1 is charging"),
        ("BAT0", {"power_now": 0}, "its gauge shows 0 W"),
        ("BAT0", {"power_now": "none"}, "power_now vanished or is unreadable"),
    ],
)
def test_machine_that_cannot_be_measured_now_says_why(
    supplies: Sysfs, supply: str, files: dict[str, object], message: str
) -> None:
    supplies.add("BAT0", BATTERY)
    supplies.add(supply, files)
    with pytest.raises(MeterUnavailableError, match=message):
        opened(supplies)


def test_machine_without_a_battery_has_no_meter(supplies: Sysfs) -> None:
    with pytest.raises(MeterUnavailableError, match="this machine has no battery"):
        opened(supplies)


def test_battery_without_power_or_current_has_no_meter(supplies: Sysfs) -> None:
    supplies.add("BAT0", {"type": "Battery", "status": "Discharging", "voltage_now": 12_000_000})
    with pytest.raises(MeterUnavailableError, match="current_now vanished or is unreadable"):
        opened(supplies)


@pytest.mark.parametrize(("online", "marks"), [(0, ()), (1, ("power source unknown",))])
def test_a_laptop_whose_battery_psutil_does_not_know_is_on_it_where_its_files_say_so(
    supplies: Sysfs, online: int, marks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """psutil looks for BAT* and for two names of chargers: each trial of such a laptop was marked."""
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    supplies.add("AC", {"online": online})
    supplies.add("CMB1", BATTERY)
    seen = [host_power(at_s, supplies.root) for at_s in (0.0, 1.0)]
    assert state_marks(seen, reads_battery=True) == marks
