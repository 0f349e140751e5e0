"""Recordings: what was recorded comes back with the same joules, without the hardware."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from devices.android import battery as battery_module
from devices.base import MeterUnavailableError
from devices.meters.trace_replay import TraceReplayMeter
from harness.commands import app
from harness.recording import Recording, record, write_recording
from results.derivation import energies_of
from results.energy import energy_between
from results.records import PowerTrace
from results.report.trace_plot import plot_spec
from results.store import Store
from results.trace_files import IDLE_AFTER, IDLE_BEFORE, WINDOW, TraceFileError, read_traces, read_window, write_traces
from tests.command import joulebench, run_python
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.battery import FakeBattery
from tests.fakes.instruments import END_S, INSTRUMENTS, START_S, WAVEFORMS
from tests.fakes.machine import IDLE_W, FakeBench, FakeMachine
from tests.fakes.phone import DISCHARGING, FakePhone
from tests.fakes.waveforms import trace
from tests.plans import FAST, raw_plan, write_plan

PNG = b"\x89PNG\r\n\x1a\n"


def recorded(meter: str, folder: Path, **changes: object) -> tuple[Path, PowerTrace]:
    """The file of ten seconds of a square wave through a simulated meter."""
    rng = np.random.default_rng(3)
    read = replace(INSTRUMENTS[meter](WAVEFORMS["square, 1 to 3 s"](rng), rng), note="as read", **changes)  # type: ignore[arg-type]
    write_traces(folder / "trace.parquet", {WINDOW: [read]}, (START_S, END_S))
    return folder / "trace.parquet", read


# --- recording -------------------------------------------------------------------------------------------------------


def test_a_recording_is_the_window_that_was_asked_for() -> None:
    bench = FakeBench(meters=2)
    left_s: list[float] = []
    recording = record(bench.fake_device, bench.machine, 3.25, left_s.append)
    assert recording.window == (100.0, 103.25)
    assert [r.meter for r in recording.readings()] == ["fake0", "fake1"]
    assert [r.energy_j for r in recording.readings()] == pytest.approx([3.25 * IDLE_W] * 2)
    assert left_s == [3.25, 2.75, 2.25, 1.75, 1.25, 0.75, 0.25]
    assert not any(m.running for m in bench.fake_device.meters)


def test_ctrl_c_ends_a_recording_and_keeps_it() -> None:
    bench = FakeBench()

    def stop_after_two(left_s: float) -> None:
        if 0 < left_s <= 9.0:
            raise KeyboardInterrupt

    recording = record(bench.fake_device, bench.machine, 10.0, stop_after_two)
    assert recording.window == (100.0, 101.0)
    assert recording.readings()[0].energy_j == pytest.approx(1.0 * IDLE_W)


def test_a_file_gives_back_readings_description_and_window(tmp_path: Path) -> None:
    path, read = recorded("counter, renewed every 1 ms", tmp_path)
    (back,) = read_traces(path)
    for name, value in vars(read).items():
        found = getattr(back, name)
        assert np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value
    assert read_window(path) == (START_S, END_S)
    assert read_traces(path, IDLE_BEFORE) == ()


def test_what_is_no_trace_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "trace.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(TraceFileError, match="is damaged"):
        read_traces(tmp_path / "trace.parquet")
    with pytest.raises(TraceFileError, match="is damaged"):
        read_window(tmp_path / "trace.parquet")


# --- playing it back -------------------------------------------------------------------------------------------------


def replayed(path: Path, machine: FakeMachine, seconds: float) -> tuple[list[PowerTrace], tuple[float, float]]:
    meter = TraceReplayMeter(path, machine)
    meter.open()
    meter.start()
    start_s = machine.now_s()
    machine.work(seconds, 0.0)
    traces, window = list(meter.stop()), (start_s, machine.now_s())
    meter.close()
    return traces, window


@pytest.mark.parametrize("meter", [m for m in INSTRUMENTS if not m.startswith("charge")])
def test_a_replayed_window_has_the_joules_and_the_uncertainty_of_the_recorded_one(tmp_path: Path, meter: str) -> None:
    path, read = recorded(meter, tmp_path, relative_accuracy=0.02)
    machine = FakeMachine()
    for n in range(2):  # every window plays it from its start
        traces, window = replayed(path, machine, 5.0)
        again = energy_between(traces, [window], "all", "replay")
        first = energy_between([read], [(START_S, START_S + 5.0)], "all", read.meter)
        assert again.energy_j == pytest.approx(first.energy_j, rel=1e-9), n
        assert again.uncertainty_j == pytest.approx(first.uncertainty_j, rel=1e-4)
        assert again.method == "replayed"
    assert traces[0].note == f"replayed from trace.parquet, recorded as {read.method}: as read"
    # Not the whole recording: an update and a reading behind the window.
    assert traces[0].times_s[-1] < window[1] + 2.0


def test_a_window_longer_than_the_recording_has_no_energy(tmp_path: Path) -> None:
    path, _ = recorded("power, fresh at each reading", tmp_path)
    traces, window = replayed(path, FakeMachine(), 30.0)
    reading = energy_between(traces, [window], "all", "replay")
    assert reading.energy_j is None
    assert "uncovered" in str(reading.reason)


def test_of_several_meters_only_the_first_is_summed(tmp_path: Path) -> None:
    at_s = np.arange(0.0, 4.0, 0.05)
    watts = {("rapl", "package-0"): 30.0, ("rapl", "dram"): 5.0, ("zeus", "cpu0"): 31.0}
    traces = [trace("power", at_s, np.full(len(at_s), w), 0.05, meter=m, component=c) for (m, c), w in watts.items()]
    write_traces(tmp_path / "trace.parquet", {WINDOW: traces}, (0.5, 3.5))
    found, window = replayed(tmp_path / "trace.parquet", FakeMachine(), 2.0)
    assert [t.component for t in found] == ["rapl package-0", "rapl dram", "zeus cpu0"]
    assert energy_between(found, [window], "all", "replay").average_power_w == pytest.approx(35.0)
    assert energy_between(found, [window], "all", "replay", "zeus cpu0").average_power_w == pytest.approx(31.0)


def test_what_cannot_be_replayed_is_no_meter(tmp_path: Path) -> None:
    path, read = recorded("power, fresh at each reading", tmp_path)
    write_traces(path, {WINDOW: [replace(read, method="relative gauge")]}, (START_S, END_S))
    with pytest.raises(MeterUnavailableError, match="relative gauge, which has no joules"):
        TraceReplayMeter(path, FakeMachine()).open()
    for wrong in (-3.0, 1e300):
        values = np.where(np.arange(len(read.values)) == 16, wrong, read.values)
        write_traces(path, {WINDOW: [replace(read, values=values)]}, (START_S, END_S))
        with pytest.raises(MeterUnavailableError, match=r"reading 17 of .* nothing draws that"):
            TraceReplayMeter(path, FakeMachine()).open()
    write_traces(path, {IDLE_BEFORE: [read]})
    with pytest.raises(MeterUnavailableError, match="holds no trace of at least 2 readings"):
        TraceReplayMeter(path, FakeMachine()).open()
    with pytest.raises(MeterUnavailableError, match="is missing"):
        TraceReplayMeter(tmp_path / "absent.parquet", FakeMachine()).open()


# --- the picture -----------------------------------------------------------------------------------------------------


def test_the_picture_has_a_panel_a_component_with_its_joules(tmp_path: Path) -> None:
    at_s = np.arange(0.0, 3.0, 0.05)
    two = [trace("power", at_s, np.full(len(at_s), w), 0.05, component=f"gpu{i}") for i, w in enumerate((70.0, 140.0))]
    spec = plot_spec(two, (0.5, 2.5))
    titles = [panel["title"]["text"] for panel in spec["vconcat"]]
    assert titles[0].startswith("m gpu0: 140 ")
    assert titles[1].startswith("m gpu1: 280 ")
    assert all("integrated power" in t for t in titles)
    drawn = spec["vconcat"][0]["layer"][1]["data"]["values"]
    assert [row["power_w"] for row in drawn] == [70.0] * len(at_s)
    assert drawn[0]["at_s"] == pytest.approx(-0.5)
    assert "var(" not in json.dumps(spec)
    written = write_recording(Recording(tuple(two), (0.5, 2.5)), tmp_path / "trace.parquet")
    assert written.troubles == []
    assert written.files[1].read_bytes().startswith(PNG)


def test_a_picture_that_the_disk_has_no_room_for_leaves_no_half(tmp_path: Path) -> None:
    """The half of a PNG lay beside the recording, and no later one of that name was taken."""
    at_s = np.arange(0.0, 3.0, 0.05)
    one = Recording((trace("power", at_s, np.full(len(at_s), 70.0), 0.05),), (0.5, 2.5))
    (whole,) = write_recording(one, tmp_path / "trace.parquet").files[1:]
    (tmp_path / "full").mkdir()
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole.stat().st_size // 2, most[1]))
    try:
        written = write_recording(one, tmp_path / "full" / "trace.parquet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert list((tmp_path / "full").iterdir()) == [*written.files] == [tmp_path / "full" / "trace.parquet"]
    assert "trace.png cannot be written" in written.troubles[0]


# --- the command line ------------------------------------------------------------------------------------------------


def test_what_was_recorded_is_played_back_in_a_run_and_its_joules_are_derived_again_without_any_meter(
    tmp_path: Path,
) -> None:
    at_s = np.arange(0.0, 30.0, 1e-3)
    watts = 20.0 + 10.0 * np.sin(at_s)
    write_traces(tmp_path / "power.parquet", {WINDOW: [trace("power", at_s, watts, 1e-3)]}, (1.0, 29.0))
    plan = write_plan(
        tmp_path / "plan.toml",
        raw_plan(
            device=[{"name": "host", "meters": ["replay"], "recording": str(tmp_path / "power.parquet")}],
            protocol=FAST | {"idle_s": 0.3, "repeats": 2},
        ),
    )
    done = joulebench("run", str(plan), "--out", str(tmp_path / "run"))
    assert done.code == 0, done.stderr
    (tmp_path / "power.parquet").unlink()
    with Store.view(tmp_path / "run") as store:
        for trial in store.trials():
            assert trial.window_start_s is not None
            assert trial.window_end_s is not None
            window = (trial.window_start_s, trial.window_end_s)
            parts = {part: store.traces(trial.trial_id, part) for part in (IDLE_BEFORE, WINDOW, IDLE_AFTER)}
            readings, baselines = energies_of(trial.completions, parts, window)
            assert tuple(readings) == trial.energy
            assert tuple(baselines) == trial.idle
            whole = next(r for r in readings if r.phase == "all")
            assert whole.method == "replayed"
            # The integral of the recorded power over the window's length, from the recording's start.
            end_s = 1.0 + whole.duration_s
            expected_j = 20.0 * whole.duration_s - 10.0 * (np.cos(end_s) - np.cos(1.0))
            # The window opens some milliseconds after the meter started.
            assert whole.energy_j == pytest.approx(expected_j, rel=0.02)
            # A trial's own file can be played back too: it says where its window begins.
            assert read_window(tmp_path / "run" / "traces" / f"{trial.trial_id}.parquet") == window


def test_the_host_is_recorded_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    done = joulebench("record", str(path), "--meter", "modelled", "--seconds", "0.6", "--json")
    assert done.code == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["files"] == [str(path), str(path.with_suffix(".png"))]
    assert path.with_suffix(".png").read_bytes().startswith(PNG)
    (reading,) = told["readings"]
    assert (reading["meter"], reading["method"]) == ("modelled", "modelled")
    window = read_window(path)
    assert window is not None
    assert window[1] - window[0] == pytest.approx(reading["duration_s"])
    assert 0.6 <= reading["duration_s"] < 2.0
    assert energy_between(read_traces(path), [window], "all", "modelled").energy_j == reading["energy_j"]


def test_a_picture_that_cannot_be_written_ends_as_any_file_does(tmp_path: Path) -> None:
    """With 7. 5 says that the recording itself has a gap, or no joules."""
    script = """
        import harness.recording
        from harness.cli import main

        def full(traces, window, path):
            raise OSError(28, "No space left on device", str(path))

        harness.recording.write_plot = full
        main()
    """
    path = tmp_path / "trace.parquet"
    done = run_python(script, "record", str(path), "--meter", "modelled", "--seconds", "0.3", "--json")
    assert (done.code, "trace.png cannot be written" in done.stderr) == (7, True)
    assert json.loads(done.stdout)["files"] == [str(path)]
    assert read_traces(path)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["trace.csv"], 2, "end its name with .parquet"),
        (["/no/such/folder/trace.parquet"], 2, "no folder /no/such/folder"),
        (["trace.parquet", "--device", "hots"], 2, "unknown device 'hots'; did you mean host?"),
        (["trace.parquet", "--device", "model:m2-ultra"], 2, "is a hardware sheet"),
        (["trace.parquet", "--meter", "rpal"], 2, "unknown meter 'rpal'; did you mean rapl?"),
        (["trace.parquet", "--meter", "replay"], 2, "is not recorded again"),
        (["trace.parquet", "--device", "adb:R58M", "--meter", "rapl"], 2, "a phone has no meter 'rapl'"),
    ],
)
def test_what_cannot_be_recorded_is_refused_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["record", *arguments])
    assert done.exit_code == code
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


# --- a phone, off a terminal -----------------------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePhone]:
    """Attached to an adb server that the command finds."""
    monkeypatch.setattr(battery_module, "CALIBRATION_S", 0.8)
    phone = FakePhone(tmp_path / "phone")
    phone.file("/proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd05\n")
    phone.file("/proc/meminfo", "MemTotal:        7654321 kB\n")
    with FakeAdbServer(phone) as server:
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(server.port))
        yield phone


def recorded_phone(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["record", str(folder / "t.parquet"), "--device", "adb:FAKE0001", *arguments])


CHARGING = DISCHARGING.replace("status: 3", "status: 2")


@pytest.mark.parametrize("command", [["record", "t.parquet"], ["doctor"]])
def test_what_is_waited_for_is_said_off_a_terminal(
    tmp_path: Path, fake: FakePhone, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    fake.answer("dumpsys battery", CHARGING)
    done = CliRunner().invoke(app, [*command, "--device", "adb:FAKE0001", "--wait", "1"])
    assert done.exit_code == 4
    [told] = [line for line in done.stderr.splitlines() if "waiting" in line and "error" not in line]
    assert told.startswith("adb:FAKE0001: the battery is charging")
    assert told.endswith("waiting, at most 1 s (--wait 0: not at all)")
    assert "is not ready, and was not after 1 s of waiting" in done.output


def test_nothing_is_waited_for_where_nobody_wants_to_wait_or_waiting_cannot_help(
    tmp_path: Path, fake: FakePhone
) -> None:
    fake.answer("dumpsys battery", CHARGING)
    done = recorded_phone(tmp_path, "--wait", "0")
    assert done.exit_code == 4
    assert "waiting" not in done.stderr
    fake.answer("dumpsys battery", DISCHARGING.replace("level: 82", "level: 20"))
    done = recorded_phone(tmp_path)
    assert done.exit_code == 4
    assert "the battery is at 20 %" in done.stderr
    assert done.stderr.count("waiting, at most 600 s") == 1  # for the second look, and pytest ends what takes as long


def test_a_recording_without_joules_is_kept_and_does_not_end_well(tmp_path: Path, fake: FakePhone) -> None:
    with FakeBattery(fake, 2.0):
        done = recorded_phone(tmp_path, "--seconds", "0.3", "--json")
    told = json.loads(done.stdout)
    [reading] = told["readings"]
    assert reading["energy_j"] is None
    assert done.exit_code == 5
    assert "no energy: " in done.stderr
    assert reading["reason"] in done.stderr
    assert read_traces(tmp_path / "t.parquet")


def test_what_taints_a_recording_is_said(tmp_path: Path, fake: FakePhone) -> None:
    with FakeBattery(fake, 2.0):
        plugged_in = threading.Timer(3.0, fake.answer, ("dumpsys battery", CHARGING))
        plugged_in.start()
        done = recorded_phone(tmp_path, "--seconds", "5", "--json")
        plugged_in.join()
    assert json.loads(done.stdout)["marks"] == ["charging"]
    assert "marked: charging" in done.stderr
