"""Trials on a fake phone through the harness, in real time: joules, marks, and what a fault makes of a trial."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from devices.android import battery as battery_module
from devices.android.battery import RELATIVE_ACCURACY
from devices.android.calibration import Calibration, calibrate
from devices.android.device import AndroidDevice
from devices.android.raw_gauge import power_of
from devices.android.server import ServerAddress
from devices.base import Channel, TransientDeviceError
from devices.clock import MonotonicClock
from devices.gates import Gates
from devices.meters.trace_replay import TraceReplayMeter
from engines.base import PhaseListener
from harness.matrix import CellPlan
from harness.opening import open_run
from harness.plan import build_plan
from harness.progress import PlainProgress
from harness.recording import record, write_recording
from harness.runner import Runner
from harness.schema import TrialProtocol
from harness.session import PreparedCell, run_trial
from results.derivation import energies_of
from results.records import Completion, Request
from results.store import Store
from results.trace_files import IDLE_AFTER, IDLE_BEFORE, WINDOW, raw_part, read_states, read_traces, write_traces
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.battery import FakeBattery
from tests.fakes.held_clock import HeldClock
from tests.fakes.machine import FakeBench, FakeDevice, FakeEngine, FakeMachine, FakeWorkload, fake_requests
from tests.fakes.phone import DISCHARGING, THERMAL, FakePhone
from tests.plans import FAST, raw_plan

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("clock")]

POWER_W = 2.0
PROTOCOL = TrialProtocol(warmup=0, idle_s=1.5, sample_interval_s=0.05)


class RealTime(FakeMachine):
    """The fake engine's machine on the real clock."""

    def now_s(self) -> float:
        return MonotonicClock().now_s()

    def work(self, seconds: float, watts: float) -> None:
        MonotonicClock().sleep_until_s(self.now_s() + seconds)


@pytest.fixture
def fake(tmp_path: Path) -> FakePhone:
    phone = FakePhone(tmp_path / "phone")
    phone.file("/proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd05\n")
    phone.file("/proc/meminfo", "MemTotal:       8000000 kB\n")
    return phone


@pytest.fixture
def battery(fake: FakePhone) -> Iterator[FakeBattery]:
    with FakeBattery(fake, POWER_W) as battery:
        yield battery


@pytest.fixture
def arm(fake: FakePhone, battery: FakeBattery, monkeypatch: pytest.MonkeyPatch) -> Iterator[PreparedCell]:
    monkeypatch.setattr(battery_module, "CALIBRATION_S", 0.8)
    machine = RealTime()
    with FakeAdbServer(fake) as server:
        clock = MonotonicClock()
        address = ServerAddress("127.0.0.1", server.port)
        device = AndroidDevice("adb:FAKE0001", 0.05, clock, Gates(wait_s=0.0), address=address)
        device.open()
        # The engine asks its own device only whether meters run, for its diary.
        engine = FakeEngine(machine, FakeDevice(machine, []), name="adb:FAKE0001")
        yield PreparedCell("cell", engine, FakeWorkload(), device, clock, fake_requests())
        device.close()


def test_a_trial_on_a_phone_has_its_joules_and_keeps_them_in_its_traces(arm: PreparedCell) -> None:
    trial, traces = run_trial(arm, PROTOCOL, repeat=0)
    by_phase = {e.phase: e for e in trial.energy}
    whole = by_phase["all"]
    assert whole.energy_j is not None
    assert whole.energy_j == pytest.approx(POWER_W * whole.duration_s, rel=0.01)
    assert whole.method == "battery gauge"
    assert whole.charge_uah == pytest.approx(POWER_W / 4.0 * whole.duration_s / 3.6e-3, rel=0.01)
    # The same power idle and busy: nothing is left above it.
    assert whole.net_energy_j == pytest.approx(0.0, abs=0.02 * whole.energy_j)
    # Prefills of 0.5 s and decodes of 0.25 and 0.5 s are less than ten updates of 100 ms.
    for phase in ("prefill", "decode"):
        assert by_phase[phase].energy_j is None
        assert "unresolved" in str(by_phase[phase].reason)
    assert trial.window_start_s is not None
    assert trial.window_end_s is not None
    again, _ = energies_of(trial.completions, traces, (trial.window_start_s, trial.window_end_s))
    assert tuple(again) == trial.energy
    assert trial.marks == ()


def test_joules_follow_again_from_the_stored_raw_readings_without_the_phone(arm: PreparedCell, tmp_path: Path) -> None:
    """Sign and unit are decided anew from what was stored, and the trial's joules come out to the last digit."""
    trial, traces = run_trial(arm, PROTOCOL, repeat=0)
    assert trial.window_start_s is not None
    assert trial.window_end_s is not None
    window = (trial.window_start_s, trial.window_end_s)
    path = tmp_path / "trial.parquet"
    write_traces(path, traces, window)
    raw = {part: read_traces(path, raw_part(part)) for part in (IDLE_BEFORE, WINDOW, IDLE_AFTER)}
    assert {t.kind for own in raw.values() for t in own} == {"raw"}
    current, voltage = (np.concatenate([own[i].values for own in raw.values()]) for i in (0, 1))
    # The fake phone: negative while discharging, in uA and uV.
    assert calibrate(current, voltage) == Calibration(-1, 1e-6, 1e-6)
    channel = Channel("battery", "held", relative_accuracy=RELATIVE_ACCURACY)
    again = {part: [power_of(own, calibrate(current, voltage), channel)] for part, own in raw.items()}
    again |= {raw_part(part): list(own) for part, own in raw.items()}
    readings, baselines = energies_of(trial.completions, again, window)
    assert tuple(readings) == trial.energy
    assert tuple(baselines) == trial.idle
    assert readings[-1].energy_j is not None
    # What is stored as power has no raw readings among it: nothing sums them.
    assert [t.kind for t in read_traces(path, WINDOW)] == ["held"]


def test_a_trial_in_which_the_phone_was_plugged_in_is_marked(
    arm: PreparedCell, fake: FakePhone, clock: HeldClock
) -> None:
    charging = DISCHARGING.replace("status: 3", "status: 2")
    clock.later(2.5, fake.answer, "dumpsys battery", charging)
    trial, _ = run_trial(arm, PROTOCOL, repeat=0)
    assert trial.marks == ("charging",)


def test_a_charger_that_came_and_went_within_the_window_marks_it(
    arm: PreparedCell, fake: FakePhone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status stays `discharging`, as on a weak port; neither before nor after is anything to be seen."""
    monkeypatch.setattr(arm.device, "watch_every_s", 0.2)
    answer, states = arm.engine.run, iter([DISCHARGING.replace("USB powered: false", "USB powered: true"), DISCHARGING])

    def charged_in_the_first(request: Request, on_phase: PhaseListener) -> Completion:
        fake.answer("dumpsys battery", next(states))
        return answer(request, on_phase)

    monkeypatch.setattr(arm.engine, "run", charged_in_the_first)
    trial, _ = run_trial(arm, PROTOCOL, repeat=0)
    assert [c.charging for c in trial.conditions] == [False, True, False, False]
    assert trial.marks == ("charging",)


@pytest.mark.parametrize("has_node", [True, False])
def test_a_charger_of_a_second_between_two_looks_marks_the_recording(
    arm: PreparedCell, fake: FakePhone, battery: FakeBattery, has_node: bool
) -> None:
    """The state is looked at every 5 s; what reads the gauge sees its charger, or that its current falls, and looks."""
    online = "/sys/class/power_supply/usb/online"
    powered = DISCHARGING.replace("USB powered: false", "USB powered: true")
    if has_node:
        fake.file("/sys/class/power_supply/usb/type", "USB_PD\n")
        fake.file(online, "0\n")
        arm.device.close()
        arm.device.open()

    def tick(left_s: float) -> None:
        is_on = 1.0 < left_s <= 2.0
        if has_node:
            fake.file(online, "2\n" if is_on else "0\n")
        else:
            fake.answer("dumpsys battery", powered if is_on else DISCHARGING)
            battery.change(per_ampere=1e5 if is_on else 1e6)

    recording = record(arm.device, arm.clock, 2.5, tick)
    assert recording.marks == ("charging",)
    seen = [c.charging for c in recording.conditions]
    assert (seen[0], seen[-1], True in seen) == (False, False, True)


RESTARTED = "00000000-5c6e-4b0d-9a52-1d9f6c0c7a11\n"
DOZING = "  mWakefulness=Dozing\n"


@pytest.mark.parametrize(
    ("what", "is_now", "mark"),
    [
        ("/proc/sys/kernel/random/boot_id", RESTARTED, "restarted"),
        ("dumpsys power", DOZING, "screen changed"),
        ("settings get system screen_brightness", "200\n", "screen changed"),
        ("dumpsys thermalservice", THERMAL.replace("Thermal Status: 0", "Thermal Status: 2"), "throttled"),
        ("dumpsys battery", DISCHARGING.replace("level: 82", "level: 83"), "battery level rose"),
        ("dumpsys battery", DISCHARGING.replace("level: 82", "level: 70"), "battery level jumped"),
        ("dumpsys battery", DISCHARGING.replace("state:", "state: (UPDATES STOPPED)"), "power source unknown"),
    ],
)
def test_a_state_that_is_another_after_a_recording_marks_it(
    arm: PreparedCell, fake: FakePhone, tmp_path: Path, what: str, is_now: str, mark: str
) -> None:
    fake.answer("settings get system screen_brightness", "102\n")
    put = fake.file if what.startswith("/") else fake.answer
    recording = record(arm.device, arm.clock, 1.2, lambda left_s: put(what, is_now))
    assert recording.marks == (mark,)
    write_recording(recording, tmp_path / "trace.parquet")
    replay = TraceReplayMeter(tmp_path / "trace.parquet", arm.clock)
    replay.open()
    assert replay.marks() == (f"{mark} when recorded",)
    assert read_states(tmp_path / "trace.parquet")[0]["battery_percent"] == 82


def test_a_cable_pulled_in_the_window_is_worth_a_retry(arm: PreparedCell, fake: FakePhone, clock: HeldClock) -> None:
    clock.later(2.5, fake.pull_cable)
    with pytest.raises(TransientDeviceError):
        run_trial(arm, PROTOCOL, repeat=0)
    fake.plug_in()
    trial, _ = run_trial(arm, PROTOCOL, repeat=0)
    assert trial.status == "ok"
    assert all(e.energy_j is not None for e in trial.energy if e.phase == "all")


class PhoneBench(FakeBench):
    """Every arm is the fake phone's."""

    def __init__(self, phone_arm: PreparedCell) -> None:
        super().__init__()
        self._arm = phone_arm

    def arm_of(self, cell_id: str) -> PreparedCell:
        return replace(self._arm, cell_id=cell_id)

    def device(self, plan: CellPlan) -> FakeDevice:
        return self._arm.device  # type: ignore[return-value]


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_cable_pulled_in_a_run_is_retried_and_costs_no_finished_trial(
    arm: PreparedCell,
    fake: FakePhone,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    comes_back: bool,
    clock: HeldClock,
) -> None:
    """Pulled in the second trial's window: plugged in again 0.3 s later, or never."""
    monkeypatch.setattr(arm.device.meters[0], "_reconnect_s", 0.0)
    monkeypatch.setattr(arm.device, "reconnect_s", 0.0)
    answer, asked = arm.engine.run, []

    def pull_at_the_third(request: Request, on_phase: PhaseListener) -> Completion:
        asked.append(request)
        if len(asked) == 3:
            fake.pull_cable()
            if comes_back:
                clock.later(0.3, fake.plug_in)
        return answer(request, on_phase)

    monkeypatch.setattr(arm.engine, "run", pull_at_the_third)
    plan = build_plan(raw_plan(protocol=FAST | {"repeats": 2, "retries": 1}))
    with open_run(plan, tmp_path / "run", False, PhoneBench(arm)) as store:
        outcome = Runner(plan, store, PhoneBench(arm), PlainProgress(Console(quiet=True))).run()
    with Store.view(tmp_path / "run") as store:
        first, second = store.trials()
    assert (first.status, first.attempts) == ("ok", 1)
    [whole] = [e for e in first.energy if e.phase == "all"]
    assert whole.energy_j == pytest.approx(POWER_W * whole.duration_s, rel=0.01)
    if comes_back:
        assert (outcome.n_ok, outcome.n_failed) == (2, 0)
        assert (second.status, second.attempts) == ("ok", 2)
        return
    assert (outcome.n_ok, outcome.n_failed) == (1, 1)
    assert (second.status, second.attempts) == ("failed", 2)
    assert second.failure is not None
    assert second.failure.kind == "transient"
    assert "is not attached" in second.failure.error
    assert outcome.n_lost == 1

    fake.plug_in()
    with open_run(plan, tmp_path / "run", True, PhoneBench(arm)) as store:
        outcome = Runner(plan, store, PhoneBench(arm), PlainProgress(Console(quiet=True))).run()
        assert (outcome.n_ok, outcome.n_failed) == (2, 0)
        kept, again = store.trials()
        assert store.replaced() == (second,)
    assert kept == first
    assert (again.repeat, again.status) == (1, "ok")
    [whole] = [e for e in again.energy if e.phase == "all"]
    assert whole.energy_j == pytest.approx(POWER_W * whole.duration_s, rel=0.01)
