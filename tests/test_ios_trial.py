"""Trials on a fake iPhone through the harness, in real time: joules beside gauge units, and what faults do to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pymobiledevice3", reason="the extra joulebench[ios] is not installed")

from devices.base import Channel, TransientDeviceError
from devices.clock import MonotonicClock
from devices.gates import Gates
from devices.ios import battery as battery_module
from devices.ios import energy_gauge
from devices.ios.device import IosDevice
from harness.recording import record, write_recording
from harness.schema import TrialProtocol
from harness.session import PreparedCell, run_trial
from results.derivation import energies_of
from results.energy import NO_JOULES, energy_between
from results.trace_files import IDLE_AFTER, IDLE_BEFORE, WINDOW, raw_part, read_traces
from tests.fakes.held_clock import HeldClock
from tests.fakes.ios_phone import BATTERY, UDID, FakeIphone, Plist, ServedIphone, gauge_sample
from tests.fakes.ios_tunneld import FakeTunneld
from tests.fakes.machine import FakeDevice, FakeEngine, FakeMachine, FakeWorkload, fake_requests

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("clock")]

CLOCK = MonotonicClock()
PROTOCOL = TrialProtocol(warmup=0, idle_s=1.5)
UPDATE_S = 0.1


class RealTime(FakeMachine):
    """The fake engine's machine on the real clock."""

    def now_s(self) -> float:
        return CLOCK.now_s()

    def work(self, seconds: float, watts: float) -> None:
        CLOCK.sleep_until_s(CLOCK.now_s() + seconds)


def two_watts() -> Plist:
    """500 mA at 4 V, 1 mA more or less with each renewal, every `UPDATE_S`: a value that never differs is none."""
    renewal = int(CLOCK.now_s() / UPDATE_S)
    return BATTERY | {"InstantAmperage": -501 + 2 * (renewal % 2), "Voltage": 4000, "UpdateTime": renewal}


@pytest.fixture
def fake() -> FakeIphone:
    """75 units a second on average: 65 and 85 in turns."""
    return FakeIphone(
        battery=two_watts, gauge=lambda tracing_s: gauge_sample(cpu=40.0 + 20.0 * (int(tracing_s / UPDATE_S) % 2))
    )


@pytest.fixture
def arm(tunneld: FakeTunneld, no_usbmuxd: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[PreparedCell]:
    monkeypatch.setattr(battery_module, "READ_EVERY_S", 0.03)
    monkeypatch.setattr(battery_module, "OBSERVE_S", 0.5)
    monkeypatch.setattr(energy_gauge, "READ_EVERY_S", 0.03)
    machine = RealTime()
    device = IosDevice(
        f"ios:{UDID}",
        0.01,
        CLOCK,
        Gates(wait_s=0.0),
        app="com.example.engine",
        meter_names=("battery", "energy gauge"),
        tunneld=tunneld.address,
    )
    device.open()
    # The engine asks its own device only whether meters run, for its diary.
    engine = FakeEngine(machine, FakeDevice(machine, []), name=f"ios:{UDID}")
    yield PreparedCell("cell", engine, FakeWorkload(), device, CLOCK, fake_requests())
    device.close()


def test_a_trial_has_joules_of_the_battery_and_units_of_the_gauge(arm: PreparedCell) -> None:
    trial, traces = run_trial(arm, PROTOCOL, repeat=0)
    whole = {e.meter: e for e in trial.energy if e.phase == "all" and e.component == "total"}
    battery, gauge = whole["battery"], whole["energy gauge"]
    assert battery.energy_j == pytest.approx(2.0 * battery.duration_s, rel=0.01)
    assert (battery.method, battery.gauge_units) == ("battery gauge", None)
    assert battery.charge_uah is not None
    # The same power idle and busy: nothing is left above it.
    assert battery.net_energy_j == pytest.approx(0.0, abs=0.02 * 2.0 * battery.duration_s)
    assert gauge.gauge_units == pytest.approx(75.0 * gauge.duration_s, rel=0.05)
    assert (gauge.method, gauge.energy_j, gauge.net_energy_j) == ("relative gauge", None, None)
    assert gauge.reason == NO_JOULES
    assert trial.marks == ()
    assert trial.window_start_s is not None
    assert trial.window_end_s is not None
    window = (trial.window_start_s, trial.window_end_s)
    again, _ = energies_of(trial.completions, traces, window)
    assert tuple(again) == trial.energy
    # And from what the phone said: its current and its voltage.
    channel = Channel("battery", "held", relative_accuracy=battery_module.RELATIVE_ACCURACY)
    parts = (IDLE_BEFORE, WINDOW, IDLE_AFTER)
    battery_again = {part: [battery_module.power_of(traces[raw_part(part)], channel)] for part in parts}
    battery_again |= {raw_part(part): list(traces[raw_part(part)]) for part in parts}
    readings, [baseline] = energies_of(trial.completions, battery_again, window)
    assert list(readings) == [e for e in trial.energy if e.meter == "battery"]
    assert baseline in trial.idle


def test_a_cable_pulled_in_a_trial_is_worth_a_retry(arm: PreparedCell, served: ServedIphone, clock: HeldClock) -> None:
    clock.later(4.0, served.pull_cable)
    with pytest.raises(TransientDeviceError):
        run_trial(arm, PROTOCOL, repeat=0)
    served.plug_in()
    trial, _ = run_trial(arm, PROTOCOL, repeat=0)
    assert trial.status == "ok"
    assert all(e.energy_j is not None for e in trial.energy if e.meter == "battery" and e.phase == "all")


def test_a_cable_pulled_in_a_recording_leaves_a_gap_and_keeps_the_rest(
    arm: PreparedCell, served: ServedIphone, tmp_path: Path
) -> None:
    happens = {5.0: served.pull_cable, 3.5: served.plug_in}

    def tick(left_s: float) -> None:
        for at_s in [at_s for at_s in happens if left_s < at_s]:
            happens.pop(at_s)()

    recording = record(arm.device, CLOCK, 8.0, tick)
    assert len(recording.interrupted) == 2  # battery and gauge
    start_s, _ = recording.window
    by_meter = {trace.meter: trace for trace in recording.traces}
    for meter in ("battery", "energy gauge"):
        at_s = by_meter[meter].times_s
        assert (at_s < start_s + 2.9).sum() > 5, meter
        assert (at_s > start_s + 5.5).sum() > 5, meter
        [total] = [r for r in recording.readings() if (r.meter, r.component) == (meter, "total")]
        assert (total.energy_j, total.gauge_units) == (None, None)
        assert "gap of" in str(total.reason), meter
    # The part before it stands.
    before = energy_between(recording.traces, [(start_s, start_s + 2.5)], "all", "battery")
    assert before.energy_j == pytest.approx(2.0 * 2.5, rel=0.05), before.reason
    write_recording(recording, tmp_path / "t.parquet")
    assert read_traces(tmp_path / "t.parquet")


def test_a_charger_in_a_recording_is_marked_and_its_readings_are_a_gap(
    arm: PreparedCell, fake: FakeIphone, clock: HeldClock
) -> None:
    clock.later(1.5, setattr, fake, "battery", lambda: two_watts() | {"ExternalConnected": True})
    clock.later(1.8, setattr, fake, "battery", two_watts)
    recording = record(arm.device, CLOCK, 3.5, lambda left_s: None)
    assert recording.marks == ("charging",)
    assert len(recording.interrupted) == 1
    assert "on a charger" in recording.interrupted[0]
    [battery] = [r for r in recording.readings() if r.meter == "battery"]
    assert battery.energy_j is None
    assert "gap of" in str(battery.reason)
