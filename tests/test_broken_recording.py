"""A link that breaks in a recording of hours: what came before and after is kept, and the gap between them is seen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from devices.android import battery as battery_module
from devices.android import gauge_loop as gauge_loop_module
from devices.android import perfetto_rails as rails_module
from devices.android import server as server_module
from devices.android.battery import BatteryMeter
from devices.android.perfetto_rails import RailMeter
from devices.android.server import ServerAddress
from devices.android.shell import Phone
from devices.base import Meter, TransientDeviceError
from devices.clock import MonotonicClock
from devices.pieces import joined
from harness.recording import Recording, record, write_recording
from results.energy import energy_between
from results.trace_files import read_traces
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.battery import FakeBattery
from tests.fakes.held_clock import HeldClock
from tests.fakes.machine import FakeDevice, FakeMachine
from tests.fakes.perfetto import FakePerfetto
from tests.fakes.phone import STDOUT, FakePhone
from tests.fakes.waveforms import StepPower, trace
from tests.test_android_limits import dripping, flooding, packet

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("clock")]

POWER_W = 2.0
RAIL_W = 3.0


class Measured(FakeDevice):
    """A device with one meter, on the real clock."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(FakeMachine(), [])
        self.meters = [meter]  # type: ignore[list-item]


@pytest.fixture
def fake(tmp_path: Path) -> FakePhone:
    return FakePhone(tmp_path / "phone")


@pytest.fixture
def adb(fake: FakePhone) -> Iterator[FakeAdbServer]:
    with FakeAdbServer(fake) as server:
        yield server


@pytest.fixture
def phone(adb: FakeAdbServer) -> Phone:
    return Phone("adb:", ServerAddress("127.0.0.1", adb.port))


def recorded(meter: Meter, seconds: float) -> Recording:
    return record(Measured(meter), MonotonicClock(), seconds, lambda left_s: None)


def watts(recording: Recording, stretch: int) -> float | None:
    """Between the first and the last reading of a stretch without gaps of a second: how soon a gauge on a busy machine
    reads for the first time is not asked, but that most of what could be read was."""
    times_s = recording.traces[0].times_s
    own_s = np.split(times_s, np.flatnonzero(np.diff(times_s) > 1.0) + 1)[stretch]
    assert own_s[-1] - own_s[0] > 1.7
    reading = energy_between(recording.traces, [(own_s[0], own_s[-1])], "all", recording.traces[0].meter)
    assert reading.reason is None
    return reading.average_power_w


# --- the battery of a phone ------------------------------------------------------------------------------------------


@pytest.fixture
def battery(fake: FakePhone, phone: Phone, monkeypatch: pytest.MonkeyPatch) -> Iterator[BatteryMeter]:
    monkeypatch.setattr(battery_module, "CALIBRATION_S", 0.8)
    with FakeBattery(fake, POWER_W, update_s=0.1):
        meter = BatteryMeter(phone, 0.02, MonotonicClock())
        meter.open()
        yield meter
        meter.close()


def test_a_cable_that_was_out_leaves_a_gap_and_costs_nothing_else(
    fake: FakePhone, battery: BatteryMeter, tmp_path: Path, clock: HeldClock
) -> None:
    clock.later(3.0, fake.pull_cable)
    clock.later(4.5, fake.plug_in)
    found = recorded(battery, 9.0)
    [reading] = found.readings()
    assert reading.energy_j is None
    assert "gap of" in str(reading.reason)
    assert len(found.interrupted) == 1
    assert "the link broke" in found.interrupted[0]
    assert watts(found, 0) == pytest.approx(POWER_W, rel=0.02)
    assert watts(found, -1) == pytest.approx(POWER_W, rel=0.02)
    [own] = found.traces
    assert (np.diff(own.times_s) > 0).all()
    # Raw readings, too: the decision on sign and unit can be made again from all of them.
    assert [t.component for t in found.raw] == ["battery current", "battery voltage"]
    assert np.diff(found.raw[0].times_s).max() > 1.4
    write_recording(found, tmp_path / "trace.parquet")
    assert len(read_traces(tmp_path / "trace.parquet")[0].times_s) == len(own.times_s)


def test_what_came_before_a_cable_was_pulled_for_good_is_kept(
    fake: FakePhone, battery: BatteryMeter, clock: HeldClock
) -> None:
    clock.later(3.0, fake.pull_cable)
    found = recorded(battery, 4.5)
    [reading] = found.readings()
    assert reading.energy_j is None
    assert "uncovered" in str(reading.reason)
    assert "it did not come back" in found.interrupted[0]
    assert watts(found, 0) == pytest.approx(POWER_W, rel=0.02)


@pytest.mark.parametrize("where", ["server", "phone"])
@pytest.mark.parametrize("content", [b"O", packet(STDOUT, b"")])
def test_a_link_that_drips_or_floods_behind_a_break_costs_what_comes_after(
    fake: FakePhone,
    adb: FakeAdbServer,
    battery: BatteryMeter,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    content: bytes,
    clock: HeldClock,
) -> None:
    monkeypatch.setattr(server_module, "ANSWER_TIMEOUT_S", 0.4)
    monkeypatch.setattr(gauge_loop_module, "SILENCE_S", 0.4)

    def break_off() -> None:
        speaker = adb if where == "server" else fake
        speaker.speaks = dripping(b"", content) if content == b"O" else flooding(content)
        fake.drop_link()

    clock.later(3.0, break_off)
    found = recorded(battery, 4.5)  # and comes back, though nobody stops speaking
    assert found.readings()[0].energy_j is None
    assert "it did not come back" in found.interrupted[0]
    assert watts(found, 0) == pytest.approx(POWER_W, rel=0.02)


def test_a_recording_in_which_nothing_was_read_is_an_error(
    fake: FakePhone, battery: BatteryMeter, clock: HeldClock
) -> None:
    battery._keep = lambda loop: loop.cancel()  # type: ignore[method-assign]
    clock.later(0.6, fake.pull_cable)
    with pytest.raises(TransientDeviceError, match=r"nothing was received: battery: .*the link broke"):
        recorded(battery, 1.5)


def test_a_window_after_a_failed_one_has_no_readings_of_it(fake: FakePhone, battery: BatteryMeter) -> None:
    battery.start()
    begun_s = MonotonicClock().now_s()
    fake.pull_cable()
    with pytest.raises(TransientDeviceError):
        battery.stop()
    fake.plug_in()
    time.sleep(0.5)
    battery.start()
    second_s = MonotonicClock().now_s()
    time.sleep(0.5)
    [own] = battery.stop()
    assert own.times_s[0] > second_s - 0.5 > begun_s - 0.5
    assert np.diff(own.times_s).max() < 0.4


# --- its rails -------------------------------------------------------------------------------------------------------


@pytest.fixture
def rails(fake: FakePhone, phone: Phone, monkeypatch: pytest.MonkeyPatch) -> Iterator[RailMeter]:
    monkeypatch.setattr(rails_module, "PIECE_S", 1.5)
    now_s = time.monotonic()
    steady = StepPower(np.array([now_s - 10.0, now_s + 1000.0]), np.array([RAIL_W]))
    FakePerfetto(fake).rail("VSYS_PWR_CPU", "CPU", steady)
    meter = RailMeter(phone, 0.1, MonotonicClock())
    meter.open()
    yield meter
    meter.close()


def test_a_long_trace_of_rails_is_asked_for_in_pieces_without_a_gap(rails: RailMeter) -> None:
    found = recorded(rails, 6.0)
    assert found.missing_totals() == []
    assert found.readings()[0].average_power_w == pytest.approx(RAIL_W, rel=0.01)
    assert np.diff(found.traces[0].times_s).max() < 0.35


def test_rails_go_on_counting_while_the_link_is_gone(fake: FakePhone, rails: RailMeter, clock: HeldClock) -> None:
    clock.later(3.5, fake.pull_cable)
    clock.later(4.2, fake.plug_in)
    found = recorded(rails, 8.0)
    assert found.missing_totals() == []
    assert found.readings()[0].average_power_w == pytest.approx(RAIL_W, rel=0.01)
    assert np.diff(found.traces[0].times_s).max() > 0.7
    assert "the trace of the last" in found.interrupted[0]


# --- joining ---------------------------------------------------------------------------------------------------------


def test_what_two_pieces_hold_both_is_taken_once() -> None:
    first = trace("power", np.arange(0.0, 2.0, 0.5), np.array([1.0, 2.0, 3.0, 4.0]), 0.5)
    second = trace("power", np.arange(1.01, 3.0, 0.5), np.array([9.0, 9.0, 5.0, 6.0]), 0.5)
    both = joined([first, second])
    assert both.times_s.tolist() == [0.0, 0.5, 1.0, 1.5, 2.01, 2.51]
    assert both.values.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    empty = trace("power", np.array([]), np.array([]), 0.5)
    assert joined([empty, first, empty]).times_s.tolist() == first.times_s.tolist()
