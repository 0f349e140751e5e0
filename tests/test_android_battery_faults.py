"""What may go wrong with the battery of a phone while it is measured: the gauge, the cable, the server, the order."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from devices.android.battery import BatteryMeter
from devices.android.server import ServerAddress
from devices.android.shell import Phone
from devices.base import DeviceError, TransientDeviceError
from tests.battery_windows import CLOCK, INTERVAL_S, WATTS, energy, opened, window
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.battery import FakeBattery
from tests.fakes.held_clock import HeldClock
from tests.fakes.phone import FakePhone

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("clock", "short_calibration")]


def test_a_stuck_current_has_no_energy(fake: FakePhone, phone: Phone) -> None:
    with FakeBattery(fake, WATTS) as gauge, opened(phone) as meter:
        gauge.change(stuck_at=-500_000)
        time.sleep(0.1)
        _, reading = window(meter, 1.5)
    assert reading.energy_j is None
    assert "unresolved" in str(reading.reason)


def test_a_current_that_sticks_in_the_window_has_no_energy(fake: FakePhone, phone: Phone) -> None:
    with FakeBattery(fake, WATTS) as gauge, opened(phone) as meter:
        _, reading = window(meter, 1.0, lambda: gauge.change(stuck_at=-500_000), 2.0)
    assert reading.energy_j is None
    assert "gap of" in str(reading.reason)


@pytest.mark.parametrize("change", [{"sign": 1}, {"per_ampere": 1e3}], ids=["a charger comes", "mA and not uA"])
def test_a_sign_or_unit_that_changes_in_the_window_has_no_energy(
    change: dict[str, Any], fake: FakePhone, phone: Phone
) -> None:
    """What it shows in mA is a thousandth, which no phone draws."""
    with FakeBattery(fake, WATTS) as gauge, opened(phone) as meter:
        [trace], reading = window(meter, 1.0, lambda: gauge.change(**change), 1.0)
    assert reading.energy_j is None
    why = (
        "below 0 W, as of a battery that takes a charge"
        if "sign" in change
        else "not in 0.05 to 25 W, which a phone draws"
    )
    assert re.search(rf"uncovered \(of \d+ readings \d+ are {why}: left out\)", str(reading.reason))
    assert "left out" in str(trace.note)


def test_a_link_that_stalls_and_goes_on_costs_no_reading(fake: FakePhone, phone: Phone, clock: HeldClock) -> None:
    """A spike of the network, over a step of the load: the phone has stamped what comes late."""
    with FakeBattery(fake, WATTS) as gauge, opened(phone) as meter:
        meter.start()
        start_s = CLOCK.now_s()
        gauge.draw(2 * WATTS, start_s + 1.5)
        clock.later(0.8, setattr, fake, "silent", True)
        clock.later(2.2, setattr, fake, "silent", False)
        CLOCK.sleep_until_s(start_s + 3.0)
        traces = meter.stop()
    reading = energy(traces, start_s, start_s + 3.0)
    # Half of it at 2 W and half at 4 W; an update of the gauge is 0.1 s.
    assert reading.energy_j == pytest.approx(9.0, abs=0.1 * WATTS + 0.1)


def test_a_current_of_zero_is_not_zero_joules(fake: FakePhone, phone: Phone) -> None:
    with FakeBattery(fake, WATTS) as gauge, opened(phone) as meter:
        gauge.change(stuck_at=0)
        time.sleep(0.1)
        _, reading = window(meter, 1.5)
    assert reading.energy_j is None
    what = r"are not in 0\.05 to 25 W, which a phone draws: left out"
    assert re.search(rf"0 readings, at least 2 are needed \(of (\d+) readings \1 {what}\)", str(reading.reason))


def test_a_node_that_vanishes_in_the_window_has_no_energy(fake: FakePhone, phone: Phone) -> None:
    with FakeBattery(fake, WATTS) as gauge, opened(phone) as meter:
        _, reading = window(meter, 0.8, gauge.deny_sysfs, 0.8)
    assert reading.energy_j is None
    assert re.search(r"uncovered \(of \d+ readings \d+ are no number: left out\)", str(reading.reason))


def test_a_pulled_cable_is_a_transient_error_at_the_windows_end(fake: FakePhone, phone: Phone) -> None:
    with FakeBattery(fake, WATTS), opened(phone) as meter:
        meter.start()
        time.sleep(0.3)
        fake.pull_cable()
        time.sleep(0.1)
        with pytest.raises(TransientDeviceError, match="link broke"):
            meter.stop()
        with pytest.raises(TransientDeviceError, match="FAKE0001 is not attached"):
            meter.start()
        fake.plug_in()
        assert window(meter, 1.5)[1].energy_j is not None


def test_a_phone_that_comes_back_in_time_is_waited_for(fake: FakePhone, phone: Phone, clock: HeldClock) -> None:
    with FakeBattery(fake, WATTS), opened(phone, reconnect_s=5.0) as meter:
        fake.pull_cable()
        clock.later(1.0, fake.plug_in)
        assert window(meter, 1.5)[1].energy_j is not None


def test_a_server_that_is_killed_and_restarted_costs_one_window(
    fake: FakePhone, server: FakeAdbServer, phone: Phone
) -> None:
    with FakeBattery(fake, WATTS), opened(phone) as meter:
        meter.start()
        server.stop()
        server.start()
        with pytest.raises(TransientDeviceError):
            meter.stop()
        assert window(meter, 1.5)[1].energy_j is not None


def test_a_phone_on_the_network_is_connected_again_after_a_server_restart(tmp_path: Path) -> None:
    fake = FakePhone(tmp_path / "wifi", serial="192.168.1.7:5555")
    with FakeAdbServer(fake) as server, FakeBattery(fake, WATTS):
        phone = Phone("adb:192.168.1.7:5555", ServerAddress("127.0.0.1", server.port))
        with opened(phone) as meter:
            server.stop()
            server.start()
            assert not fake.attached
            assert window(meter, 1.5)[1].energy_j is not None


def test_a_link_that_falls_silent_is_not_waited_for_for_ever(
    fake: FakePhone, phone: Phone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("devices.android.gauge_loop.SILENCE_S", 0.5)
    with FakeBattery(fake, WATTS), opened(phone) as meter:
        meter.start()
        fake.silent = True
        begun_s = CLOCK.now_s()
        with pytest.raises(TransientDeviceError, match="no answer in time"):
            meter.stop()
        assert CLOCK.now_s() - begun_s < 3.0
        fake.silent = False


@pytest.mark.parametrize("state", ["offline", "unauthorized"])
def test_a_phone_that_drops_to_another_state_is_told(fake: FakePhone, phone: Phone, state: str) -> None:
    with FakeBattery(fake, WATTS), opened(phone) as meter:
        fake.state = state
        with pytest.raises(DeviceError, match=r"offline|unauthorised") as error:
            meter.start()
        assert isinstance(error.value, TransientDeviceError) == (state == "offline")


def test_start_and_stop_keep_their_order(fake: FakePhone, phone: Phone) -> None:
    with FakeBattery(fake, WATTS):
        with pytest.raises(DeviceError, match="not open"):
            BatteryMeter(phone, INTERVAL_S, CLOCK).start()
        with opened(phone) as meter:
            with pytest.raises(DeviceError, match="not running"):
                meter.stop()
            meter.start()
            with pytest.raises(DeviceError, match="already running"):
                meter.start()
