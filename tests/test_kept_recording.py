"""A recording of hours is not lost: not to a target that cannot be written, nor to the signal that ends it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.commands import app
from results.trace_files import read_traces
from tests.command import Finished, run_python

SECONDS = "60"


def recorded(folder: Path, meanwhile: str, seconds: str = SECONDS, arguments: Sequence[str] = ()) -> Finished:
    """The command, into t.parquet. meanwhile: what happens once it records, as `send(signal, after_s)` or any code."""
    return run_python(
        f"""
        import os, pathlib, signal, sys, threading
        from harness.interrupts import end_at_once
        end_at_once()
        from harness import recording
        from harness.commands import app
        record = recording.record
        def send(number, after_s):
            timer = threading.Timer(after_s, os.kill, (os.getpid(), number))
            timer.daemon = True
            timer.start()
        def begun(device, clock, seconds, on_tick):
            ticks = []
            def tick(left_s):
                if not ticks:
                    {meanwhile}
                ticks.append(left_s)
                on_tick(left_s)
            return record(device, clock, seconds, tick)
        recording.record = begun
        app(["record", "t.parquet", "--meter", "modelled", "--seconds", {seconds!r}, *{list(arguments)!r}])
        """,
        cwd=folder,
    )


def joules(done: Finished) -> float:
    """As told; the first is the total."""
    value: float = json.loads(done.stdout)["readings"][0]["energy_j"]
    return value


# --- where it is written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t.parquet", "t.png", "t.tmp"])
def test_a_folder_in_the_place_of_a_file_is_told_before_anything_is_recorded(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    done = CliRunner().invoke(app, ["record", str(tmp_path / "t.parquet"), "--meter", "modelled"])
    assert done.exit_code == 2
    assert f"{tmp_path / name} is a folder" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["t.parquet", "t.png"])
def test_an_earlier_recording_and_a_picture_are_left_as_they_are(tmp_path: Path, name: str) -> None:
    """Hours of another recording were replaced, by one of a second too."""
    (tmp_path / name).write_text("hours")
    done = CliRunner().invoke(app, ["record", str(tmp_path / "t.parquet"), "--meter", "modelled"])
    assert done.exit_code == 2
    assert f"{tmp_path / name}: exists already and is left as it is; name another file" in " ".join(done.stderr.split())
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(name, "hours")]


@pytest.mark.parametrize(
    ("target", "code", "why"),
    [
        ("/proc/t.parquet", 7, "No such file or directory"),
        ("t" * 300 + ".parquet", 2, "File name too long"),
    ],
)
def test_what_cannot_be_written_is_told_before_anything_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, code: int, why: str
) -> None:
    """A folder that takes no file ended with 2, where docs/doctor.md says 7."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["record", target, "--meter", "modelled"])
    assert done.exit_code == code
    assert f"error: {target}: cannot be written ({why}); name a file in another folder" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_is_lost_meanwhile_costs_neither_the_readings_nor_the_joules(tmp_path: Path) -> None:
    done = recorded(tmp_path, "pathlib.Path('t.parquet').mkdir()", "1", ["--json"])
    assert done.code == 7
    assert "error: t.parquet cannot be written (" in done.stderr
    [kept] = tmp_path.glob("recording-*.parquet")
    assert f"error: the recording is in {kept}" in done.stderr
    assert json.loads(done.stdout)["files"] == [str(kept), str(kept.with_suffix(".png"))]
    assert joules(done) > 0
    assert len(read_traces(kept)[0].times_s) >= 2


def test_a_picture_that_cannot_be_written_is_told_as_such(tmp_path: Path) -> None:
    done = recorded(tmp_path, "pathlib.Path('t.png').mkdir()", "1", ["--json"])
    assert done.code == 7
    assert "error: the picture t.png cannot be written (" in done.stderr
    assert "t.parquet cannot" not in done.stderr
    assert json.loads(done.stdout)["files"] == ["t.parquet"]
    assert joules(done) > 0
    assert len(read_traces(tmp_path / "t.parquet")[0].times_s) >= 2


# --- signals ---------------------------------------------------------------------------------------------------------


def test_ctrl_c_that_comes_twice_within_moments_is_one(tmp_path: Path) -> None:
    done = recorded(tmp_path, "send(signal.SIGINT, 0.7); send(signal.SIGINT, 0.75)", arguments=["--json"])
    assert done.code == 0, done.stderr
    assert done.stderr == "ending, and keeping what was recorded; a second Ctrl-C discards it\n"
    assert joules(done) > 0
    assert read_traces(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("number", "code", "words"), [("SIGTERM", 143, "terminated (SIGTERM)"), ("SIGHUP", 129, "hung up (SIGHUP)")]
)
def test_what_ends_a_recording_from_outside_is_told_and_keeps_it(
    tmp_path: Path, number: str, code: int, words: str
) -> None:
    done = recorded(tmp_path, f"send(signal.{number}, 0.7)")
    assert done.code == code
    assert done.stderr.splitlines()[-1] == f"error: {words}; 60 s were asked for (what was received is kept)"
    assert read_traces(tmp_path / "t.parquet")


def test_a_signal_that_comes_while_a_recording_ends_costs_nothing(tmp_path: Path) -> None:
    """Meters take seconds to stop; Ctrl-C in them used to say that the recording had not begun."""
    late = "from devices.meters.modelled import ModelledMeter; stop = ModelledMeter.stop; "
    late += "ModelledMeter.stop = lambda meter: (os.kill(os.getpid(), signal.SIGINT), stop(meter))[1]"
    done = recorded(tmp_path, late, "0.5", ["--json"])
    assert done.code == 0, done.stderr
    assert done.stderr.startswith("ending, and keeping")
    assert joules(done) > 0
    assert read_traces(tmp_path / "t.parquet")


def test_a_second_signal_after_a_while_ends_at_once(tmp_path: Path) -> None:
    done = run_python(
        """
        import os, signal, time
        from harness import interrupts
        interrupts.end_at_once()
        interrupts.hold("held")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(interrupts.SAME_S + 0.1)
        os.kill(os.getpid(), signal.SIGINT)
        print("not reached")
        """,
        cwd=tmp_path,
    )
    assert done == (130, "", "held\nerror: interrupted\n")


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_names_that_a_user_gives_reach_no_terminal_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["record", "a\x1b]0;x\a\nb.parquet", "--meter", "modelled", "--seconds", "0.2"])
    assert done.exit_code == 0, done.output
    assert "a\\x1b]0;x\\x07 b.parquet" in done.stdout
    refused = CliRunner().invoke(app, ["record", "b.parquet", "--device", "host\x1b[31m[bold]"])
    assert refused.exit_code == 2
    for output in (done.output, refused.output):
        assert "\x1b" not in output
        assert "\a" not in output
