"""An iPhone as a device of the harness: joules of its battery, what keeps it from being measured, apps on it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from threading import Timer

import pytest

pytest.importorskip("pymobiledevice3", reason="the extra joulebench[ios] is not installed")

from devices import gated_phone
from devices.base import DeviceError, MeterUnavailableError, SeesState, TransientDeviceError
from devices.clock import MonotonicClock
from devices.gates import Gates
from devices.ios import battery as battery_module
from devices.ios import energy_gauge
from devices.ios.device import IosDevice, MeterName
from devices.state_watch import changes, state_marks, watched
from results.energy import energy_between
from results.records import EnergyReading, PowerTrace
from tests.eventually import eventually
from tests.fakes.ios_phone import BATTERY, ENGINE_PID, UDID, FakeIphone, Plist, ServedIphone
from tests.fakes.ios_tunneld import FakeTunneld

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("clock")]

APP = "com.example.engine"
CLOCK = MonotonicClock()
AT_ONCE = Gates(wait_s=0.0)
UPDATE_S = 0.1
WALL_S = 1_763_730_000
"""Of the phone's clock when the fake battery began."""


@pytest.fixture(autouse=True)
def quick(no_usbmuxd: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(battery_module, "READ_EVERY_S", 0.03)
    monkeypatch.setattr(battery_module, "OBSERVE_S", 0.5)
    monkeypatch.setattr(energy_gauge, "READ_EVERY_S", 0.05)


@pytest.fixture
def fake() -> FakeIphone:
    return FakeIphone(battery=discharging)


def discharging() -> Plist:
    """2 W: 400 and 600 mA at 4 V, in turns, renewed every `UPDATE_S`."""
    n = int(CLOCK.now_s() / UPDATE_S)
    return BATTERY | {"InstantAmperage": 2**64 - (400 + 200 * (n % 2)), "Voltage": 4000, "UpdateTime": WALL_S + n}


def device_at(
    tunneld: FakeTunneld, app: str | None = None, meters: tuple[MeterName, ...] = ("battery",), gates: Gates = AT_ONCE
) -> IosDevice:
    return IosDevice(f"ios:{UDID}", 0.01, CLOCK, gates, app=app, meter_names=meters, tunneld=tunneld.address)


@pytest.fixture
def device(tunneld: FakeTunneld) -> Iterator[IosDevice]:
    opened = device_at(tunneld)
    opened.open()
    yield opened
    opened.close()


def measured(device: IosDevice, seconds: float) -> tuple[EnergyReading, PowerTrace]:
    """The energy of a window of the device's only meter, and its trace."""
    [meter] = device.meters
    meter.start()
    start_s = CLOCK.now_s()
    CLOCK.sleep_until_s(start_s + seconds)
    end_s = CLOCK.now_s()
    [trace] = meter.stop()
    return energy_between([trace], [(start_s, end_s)], "all", meter.name), trace


# --- battery ---------------------------------------------------------------------------------------------------------


def test_joules_are_current_times_voltage_over_time(device: IosDevice) -> None:
    reading, trace = measured(device, 2.0)
    assert reading.method == "battery gauge"
    assert reading.energy_j is not None
    assert reading.uncertainty_j is not None
    assert reading.energy_j == pytest.approx(2.0 * reading.duration_s, rel=0.05)
    assert abs(reading.energy_j - 2.0 * reading.duration_s) < 3 * reading.uncertainty_j
    assert trace.update_period_s == pytest.approx(UPDATE_S, abs=0.04)
    assert "whole phone, through tunneld" in str(trace.note)


def test_a_new_time_of_renewal_is_no_evidence_of_a_new_value(fake: FakeIphone, tunneld: FakeTunneld) -> None:
    """A gauge that froze for 100 s told new times: 259 J of 735 J."""
    fake.battery = lambda: BATTERY | {"UpdateTime": WALL_S + int(CLOCK.now_s() / UPDATE_S)}
    device = device_at(tunneld)
    device.open()
    reading, _ = measured(device, 1.5)
    assert reading.energy_j is None
    assert "unresolved" in str(reading.reason)
    device.close()


def test_a_gauge_that_is_stuck_has_no_energy_but_a_reason(fake: FakeIphone, tunneld: FakeTunneld) -> None:
    fake.battery = lambda: BATTERY
    device = device_at(tunneld)
    device.open()
    reading, _ = measured(device, 0.5)
    assert reading.energy_j is None
    assert "unresolved" in str(reading.reason)
    device.close()


def test_a_charger_in_the_window_is_worth_a_retry_and_no_joules(fake: FakeIphone, device: IosDevice) -> None:
    """On line for a moment, so that the state before and after does not show it."""
    [meter] = device.meters
    meter.start()
    fake.battery = lambda: discharging() | {"ExternalConnected": True}
    time.sleep(0.3)
    fake.battery = discharging
    time.sleep(0.2)
    with pytest.raises(TransientDeviceError, match="on a charger in the window"):
        meter.stop()


def test_a_cable_pulled_in_the_window_is_worth_a_retry(served: ServedIphone, device: IosDevice) -> None:
    [meter] = device.meters
    meter.start()
    Timer(0.2, served.pull_cable).start()
    time.sleep(0.4)
    with pytest.raises(TransientDeviceError, match=r"the link broke|no answer in"):
        meter.stop()
    served.plug_in()
    meter.start()
    time.sleep(0.3)
    assert len(meter.stop()) == 1


def test_a_phone_whose_tunnel_went_is_waited_for_before_a_trial(served: ServedIphone, device: IosDevice) -> None:
    served.pull_cable()
    with pytest.raises(TransientDeviceError):
        device.conditions()
    back = Timer(1.5, served.plug_in)
    back.start()
    device.wait_until_ready()
    back.join()
    assert device.conditions().charging is False


def test_a_phone_that_answers_nonsense_for_a_moment_is_asked_again(fake: FakeIphone, device: IosDevice) -> None:
    """Its link was there at once, and all retries of all trials were over within it."""
    fake.faults.add("diagnostics bad plist")
    back = Timer(1.5, fake.faults.clear)
    back.start()
    device.wait_until_ready()
    back.join()
    assert device.conditions().charging is False


def test_a_phone_that_answers_nonsense_for_long_is_given_up(
    fake: FakeIphone, device: IosDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated_phone, "PATIENCE_S", 1.5)
    fake.faults.add("diagnostics bad plist")
    with pytest.raises(TransientDeviceError, match="cannot be understood"):
        device.wait_until_ready()


def test_a_phone_that_tells_no_current_has_no_meter(fake: FakeIphone, tunneld: FakeTunneld) -> None:
    fake.battery = lambda: {key: value for key, value in BATTERY.items() if key != "InstantAmperage"}
    device = device_at(tunneld)
    with pytest.raises(MeterUnavailableError, match="tells no current of its battery"):
        device.open()
    device.close()


# --- gates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ExternalConnected": True}, "a charger carries the load"),
        ({"IsCharging": True}, "a charger carries the load"),
        ({"Temperature": 4310}, r"43\.1 degC, 40 is the limit"),
        ({"CurrentCapacity": 20}, "20 %, 50 % is the limit"),
    ],
)
def test_a_phone_that_is_not_ready_is_refused(
    fake: FakeIphone, tunneld: FakeTunneld, changes: Plist, reason: str
) -> None:
    fake.battery = lambda: discharging() | changes
    device = device_at(tunneld)
    with pytest.raises(DeviceError, match=rf"ios:{UDID} is not ready: .*{reason}"):
        device.open()
    device.close()


def test_a_phone_that_is_unplugged_meanwhile_was_waited_for(fake: FakeIphone, tunneld: FakeTunneld) -> None:
    fake.battery = lambda: discharging() | {"ExternalConnected": True}
    Timer(0.3, setattr, (fake, "battery", discharging)).start()
    device = device_at(tunneld, gates=Gates(wait_s=10.0, look_every_s=0.05))
    device.open()
    assert device.conditions().charging is False
    device.close()


# --- its state in a window -------------------------------------------------------------------------------------------


def test_each_reading_of_the_battery_tells_the_state_and_changes_alone_are_kept(
    fake: FakeIphone, device: IosDevice
) -> None:
    [meter] = device.meters
    assert isinstance(meter, SeesState)
    assert device.watch_every_s is None  # nothing else has to ask
    with watched(device) as seen:
        meter.start()
        time.sleep(0.3)
        fake.battery = lambda: discharging() | {"ExternalConnected": True, "CurrentCapacity": 81}
        time.sleep(0.3)
        fake.battery = lambda: discharging() | {"CurrentCapacity": 81}
        time.sleep(0.3)
        with pytest.raises(TransientDeviceError, match="on a charger"):
            meter.stop()
    told = [(c.charging, c.battery_percent) for c in changes(seen)]
    assert told == [(False, 82.0), (True, 81.0), (False, 81.0), (False, 81.0)]
    assert state_marks(seen, reads_battery=True) == ("charging",)


def test_an_app_is_watched_beside_its_gauge(fake: FakeIphone, tunneld: FakeTunneld) -> None:
    device = device_at(tunneld, app=APP, meters=("energy gauge",))
    device.open()
    device.watch_every_s = 0.1
    with watched(device) as seen:
        time.sleep(0.3)
        fake.battery = lambda: discharging() | {"ExternalConnected": True}
        time.sleep(0.5)
        fake.battery = discharging
        time.sleep(0.3)
    device.close()
    # No joules of the battery are read, but a phone on a charger may hold other clocks.
    assert state_marks(seen, reads_battery=False) == ("power source changed",)


def test_figures_that_are_none_are_not_told_as_conditions(fake: FakeIphone, device: IosDevice) -> None:
    fake.battery = lambda: discharging() | {"Temperature": math.nan, "MaxCapacity": math.inf}
    conditions = device.conditions()
    assert (conditions.temperature_c, conditions.battery_percent) == (None, 0.0)


# --- the energy gauge, apps, and what the phone is -------------------------------------------------------------------


def test_the_energy_gauge_does_not_mind_a_cable_and_starts_its_app(fake: FakeIphone, tunneld: FakeTunneld) -> None:
    fake.battery = lambda: discharging() | {"ExternalConnected": True}
    fake.running.clear()
    device = device_at(tunneld, app=APP, meters=("energy gauge",))
    device.open()
    assert ("launch", APP, (), {}, True) in fake.log
    [meter] = device.meters
    assert meter.method == "relative gauge"
    meter.start()
    time.sleep(0.3)
    assert {t.component for t in meter.stop()} >= {"cpu", "gpu"}
    device.close()


def test_the_energy_gauge_without_an_app_is_refused_at_once(tunneld: FakeTunneld) -> None:
    with pytest.raises(DeviceError, match="follows one app; name it by its bundle identifier"):
        device_at(tunneld, meters=("energy gauge",))


def test_an_app_that_does_not_start_is_an_error(device: IosDevice) -> None:
    with pytest.raises(DeviceError, match=r"com\.example\.missing did not start; is it installed"):
        device.phone.launch("com.example.missing")


def test_the_environment_is_the_phones_and_unknown_is_none(device: IosDevice) -> None:
    environment = device.environment()
    assert (environment.os, environment.cpu_model, environment.machine) == (
        "iPhone OS 18.5 (22F76)",
        "iPhone17,1",
        "arm64e",
    )
    assert (environment.n_cores, environment.memory_bytes) == (6, None)
    assert environment.unit == "aefec05fcd7a"  # printf 00008140-0001100100000001 | sha256sum


def test_conditions_are_the_batterys(device: IosDevice) -> None:
    conditions = device.conditions()
    assert conditions.temperature_c == pytest.approx(31.2)
    assert (conditions.battery_percent, conditions.charging, conditions.throttled) == (82.0, False, None)


def test_a_device_that_is_not_open_says_so(tunneld: FakeTunneld) -> None:
    with pytest.raises(DeviceError, match="not open"):
        device_at(tunneld).environment()


def test_closing_ends_what_was_begun(fake: FakeIphone, tunneld: FakeTunneld) -> None:
    device = device_at(tunneld, app=APP, meters=("energy gauge",))
    device.open()
    device.meters[0].start()
    device.close()
    assert eventually(lambda: fake.log[-1] == ("untrace", ENGINE_PID))
    assert device.meters == []
