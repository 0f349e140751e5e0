"""Two runs never measure this machine at once: the second is refused, or waits, and a killed one leaves no lock."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from devices.device_lock import BusyError, DeviceBusyError, lock_file
from harness.host_lock import host_lock
from tests.command import TIMEOUT_S, joulebench, start
from tests.plans import raw_plan, write_plan


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@contextmanager
def held_elsewhere(state: Path) -> Iterator[int]:
    """As another process has it: by a descriptor of its own."""
    descriptor = lock_file(state / "locks" / "host.lock")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_second_run_on_the_host_is_refused_before_it_writes(tmp_path: Path, state: Path) -> None:
    plan = write_plan(tmp_path / "plan.toml", raw_plan())
    with held_elsewhere(state):
        done = joulebench("run", str(plan), "--out", str(tmp_path / "run"))
    assert done.code == 4
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: host is used by process {os.getpid()} since ")
    assert line.endswith("wait for it, or end it, or start with --wait")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "written"),
    [
        (("doctor", "--seconds", "1"), "state/doctor"),
        (("record", "trace.parquet", "--seconds", "1"), "trace.parquet"),
        (("model", "fit", "--quick", "--out", "here.toml"), "here.toml"),
    ],
)
def test_what_else_measures_this_machine_waits_for_nobody_and_writes_nothing(
    tmp_path: Path, state: Path, command: tuple[str, ...], written: str
) -> None:
    with held_elsewhere(state):
        done = joulebench(*command, cwd=tmp_path)
    assert done.code == 4
    assert f"error: host is used by process {os.getpid()} since " in done.stderr
    assert not list(tmp_path.glob(f"{written}*"))


def test_with_wait_it_begins_when_the_other_has_ended(tmp_path: Path, state: Path) -> None:
    plan, said = write_plan(tmp_path / "plan.toml", raw_plan()), tmp_path / "said"
    with said.open("w") as output:
        with held_elsewhere(state):
            process = start("run", str(plan), "--out", str(tmp_path / "run"), "--wait", output=output)
            until_s = time.monotonic() + TIMEOUT_S
            while "waiting" not in said.read_text() and process.poll() is None and time.monotonic() < until_s:
                time.sleep(0.05)
            assert f"host is used by process {os.getpid()} since" in said.read_text()
            assert not (tmp_path / "run").exists()
        assert process.wait(TIMEOUT_S) == 0, said.read_text()
    assert (tmp_path / "run" / "report.html").exists()


def test_the_lock_is_this_machines_alone_and_is_given_back(state: Path) -> None:
    with held_elsewhere(state):
        with host_lock(["model:m2-ultra", "adb:X"]):
            pass
        with pytest.raises(DeviceBusyError), host_lock(["model:m2-ultra", "host"]):
            pass
    with host_lock(["host"]), pytest.raises(BusyError):
        lock_file(state / "locks" / "host.lock")
    with held_elsewhere(state):
        pass


def test_where_no_lock_can_be_made_the_run_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "file"))
    with host_lock(["host"]):
        pass
