"""What is temporary goes: in order, by an interrupt, and at a later start where its process was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.kernels import compile as compilation
from engines.kernels.compile import CompileError, Compiler
from results.scratch import NEW_S, ScratchFolder, remove_left
from tests.command import EXECUTABLE, environment, joulebench
from tests.eventually import PATIENCE_S, eventually
from tests.free_ports import free_port
from tests.plans import raw_plan, write_plan

HOLD = "import time; from results.scratch import ScratchFolder; f = ScratchFolder('x'); print(f.path); time.sleep(600)"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files, of this process and of those it starts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    remove_left.cache_clear()
    yield folder
    remove_left.cache_clear()


@pytest.fixture
def holder(temporary: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process and its folder, which is older than `NEW_S`."""
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1, env=_unbuffered()) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        (folder / "file").write_text("left")
        _grow_old(folder)
        yield process, folder
        process.kill()


def _unbuffered() -> dict[str, str]:
    return environment() | {"PYTHONUNBUFFERED": "1"}


def _grow_old(folder: Path) -> None:
    long_ago_s = folder.stat().st_mtime - 2 * NEW_S
    os.utime(folder, (long_ago_s, long_ago_s))


def test_the_folder_of_a_killed_process_goes_at_the_next_start(holder: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = holder
    process.kill()
    process.wait()
    assert (folder / "file").exists()
    with ScratchFolder("y") as own:
        assert own.is_dir()
        assert not folder.exists()
    assert not own.exists()


def test_a_command_that_needs_no_such_folder_takes_it_away_too(
    holder: tuple[subprocess.Popen[str], Path], tmp_path: Path
) -> None:
    """Kernels are compiled once, and what is left of a kill there would stay."""
    process, folder = holder
    process.kill()
    process.wait()
    plan = write_plan(tmp_path / "plan.toml", raw_plan())
    # A forked process has the folder for temporary files of the one that it comes from.
    assert joulebench("plan", "check", str(plan), fresh=True).code == 0
    assert not folder.exists()


def test_the_folder_of_a_living_process_stays(holder: tuple[subprocess.Popen[str], Path]) -> None:
    _, folder = holder
    with ScratchFolder("y"):
        assert (folder / "file").exists()


def test_folders_that_may_not_be_locked_yet_and_those_of_others_stay(temporary: Path, tmp_path: Path) -> None:
    new, unlocked, link = (temporary / name for name in ("joulebench-x-1.held", "joulebench-2", "joulebench-3.held"))
    elsewhere = tmp_path / "elsewhere"
    for folder in (new, unlocked, elsewhere):
        folder.mkdir()
    link.symlink_to(elsewhere)
    for folder in (unlocked, elsewhere):
        _grow_old(folder)
    os.utime(link, (0, 0), follow_symlinks=False)
    with ScratchFolder("y"):
        assert new.is_dir()
        assert unlocked.is_dir()
        assert link.is_symlink()
        assert elsewhere.is_dir()


@pytest.mark.waits
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_worker_of_a_fleet_leaves_nothing(how: signal.Signals, temporary: Path) -> None:
    command = [str(EXECUTABLE), "fleet", "join", f"127.0.0.1:{free_port()}", "--device", "host"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment()) as process:
        assert eventually(lambda: list(temporary.glob("*/dask-scratch-space")))
        process.send_signal(how)
        process.wait(PATIENCE_S)
    assert eventually(lambda: list(temporary.iterdir()) == [])


def test_what_a_compiler_leaves_lies_in_the_folder_that_goes(temporary: Path, tmp_path: Path) -> None:
    """g++ that is killed leaves its assembler files in TMPDIR."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *" -c "*) : >"$TMPDIR/left.$$.s";; esac\nexit 1\n')
    compiler.chmod(0o700)
    with ScratchFolder("kernels") as folder:
        with pytest.raises(CompileError):
            compilation.compile_kernels(Compiler((str(compiler),)), folder / "kernels.so")
        assert list(folder.glob("left.*.s"))
    assert list(temporary.iterdir()) == []
