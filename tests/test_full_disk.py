"""Commands that write a file or a folder where there is no room, or where nothing can be written at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engines.model.tensor_files import write_tensors
from results.report.files import write_new_text
from tests.command import joulebench
from tests.conftest import FinishedRun
from tests.plans import MODEL
from tests.small_disk import small_disk

FULL = "No space left on device"
PAGE = os.sysconf("SC_PAGE_SIZE")


def whole_pages(n_bytes: int) -> int:
    """What so many bytes of a file take of a small disk."""
    return -(-n_bytes // PAGE) * PAGE


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Names have room in it, and bytes have none."""
    with small_disk(tmp_path / "disk", 1 << 16) as folder:
        filler = folder / "filler"
        filler.write_bytes(bytes(1 << 16))
        yield folder
        filler.unlink()


@pytest.mark.parametrize("command", [("init",), ("sheets", "m2-ultra", "--out")])
def test_what_found_no_room_leaves_its_name_free(full_disk: Path, command: tuple[str, ...]) -> None:
    path = full_disk / "mine.toml"
    told = joulebench(*command, str(path))
    assert (told.code, told.problems) == (
        7,
        [f"error: {path}: cannot be written ({FULL}); name a file in another folder"],
    )
    (full_disk / "filler").write_bytes(b"")
    assert joulebench(*command, str(path)).code == 0
    assert sorted(p.name for p in full_disk.iterdir()) == ["filler", "mine.toml"]


def test_what_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        write_new_text(path, "other")
    assert path.read_text() == "mine"


@pytest.fixture
def read_only_run(tmp_path: Path, finished_run: FinishedRun) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 1 << 26) as disk:
        shutil.copytree(finished_run.directory, disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        yield disk / "run"


def test_the_report_of_a_run_on_a_read_only_disk_goes_elsewhere(tmp_path: Path, read_only_run: Path) -> None:
    told = joulebench("report", str(read_only_run))
    assert (told.code, len(told.problems)) == (7, 1), told.stderr
    assert (
        f"`joulebench report {shlex.quote(str(read_only_run))}` writes the tables, and with --out into another one"
        in told.stderr
    )
    assert joulebench("report", str(read_only_run), "--out", str(tmp_path / "elsewhere")).code == 0
    assert (tmp_path / "elsewhere/report.html").is_file()


def test_a_run_on_a_full_disk_is_read_as_ever(tmp_path: Path, finished_run: FinishedRun) -> None:
    """It was said to be damaged: SQLite finds no room for the files that it makes beside a database."""
    with small_disk(tmp_path / "disk", 1 << 26) as disk:
        shutil.copytree(finished_run.directory, disk / "run", ignore=shutil.ignore_patterns("*-wal", "*-shm"))
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free))
        told = joulebench("report", str(disk / "run"), "--out", str(tmp_path / "elsewhere"))
        assert told.code == 0, told.stderr
        told = joulebench("report", str(disk / "run"))
        assert (told.code, FULL in told.stderr) == (7, True)
    tables = {path.name: path.read_bytes() for path in finished_run.directory.glob("*.csv")}
    assert {path.name: path.read_bytes() for path in (tmp_path / "elsewhere").glob("*.csv")} == tables


def test_a_run_that_finds_its_disk_read_only_or_full_ends_as_one_of_the_disk(
    tmp_path: Path, read_only_run: Path, finished_run: FinishedRun
) -> None:
    """With the code of a bad plan: `schedule run-due` gave up a run whose disk was read-only for one night."""
    plan = str(finished_run.plan)
    told = joulebench("run", plan, "--resume", "--out", str(read_only_run))
    assert (told.code, f"{read_only_run} cannot be written (Read-only file system)" in told.stderr) == (7, True)
    assert joulebench("run", plan, "--out", str(read_only_run.parent / "new")).code == 7
    with small_disk(tmp_path / "small", 1 << 20) as disk:
        told = joulebench("run", plan, "--out", str(disk / "run"))
        assert (told.code, "are needed; make room" in told.stderr) == (7, True)


def test_what_needs_room_to_go_on_with_a_run_is_told_that_the_disk_is_full(
    tmp_path: Path, finished_run: FinishedRun
) -> None:
    """It was told that the disk had failed: SQLite calls room for its shared memory an error of the disk. So it does
    where a run that was killed left a journal, which the report needs."""
    with small_disk(tmp_path / "disk", 1 << 26) as disk:
        shutil.copytree(finished_run.directory, disk / "run", ignore=shutil.ignore_patterns("*-wal", "*-shm"))
        own = shutil.copy(disk / "run/run.sqlite", tmp_path)
        with contextlib.closing(sqlite3.connect(own)) as killed:
            with killed:
                killed.execute("INSERT INTO meta VALUES ('last of all', '')")
            for name in ("run.sqlite", "run.sqlite-wal"):
                shutil.copy(tmp_path / name, disk / "run")
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free))
        resumed = joulebench("run", str(finished_run.plan), "--resume", "--out", str(disk / "run"))
        reported = joulebench("report", str(disk / "run"), "--out", str(tmp_path / "elsewhere"))
        (disk / "filler").unlink()
        assert joulebench("report", str(disk / "run"), "--out", str(tmp_path / "elsewhere")).code == 0
    for told in (resumed, reported):
        assert (told.code, "failed" in told.stderr, "make room" in told.stderr) == (7, False, True), told.stderr


def test_a_bundle_without_room_says_so_and_leaves_nothing(full_disk: Path, finished_run: FinishedRun) -> None:
    out = full_disk / "run.zip"
    told = joulebench("bundle", str(finished_run.directory), "--out", str(out))
    why = "cannot be written (database or disk is full); name another file"
    assert (told.code, told.problems) == (7, [f"error: --out {out}: {why}"])
    assert [p.name for p in full_disk.iterdir()] == ["filler"]


def test_an_export_without_room_leaves_the_earlier_one_as_it_was(tmp_path: Path, finished_run: FinishedRun) -> None:
    """New tables lay beside the card of the earlier one."""
    command = ("export", str(finished_run.directory), "--out")
    assert joulebench(*command, str(tmp_path / "elsewhere")).code == 0
    paged = [whole_pages(p.stat().st_size) for p in (tmp_path / "elsewhere").iterdir()]
    with small_disk(tmp_path / "disk", 2 * sum(n_bytes + PAGE for n_bytes in paged)) as disk:
        out = disk / "set"
        assert joulebench(*command, str(out)).code == 0
        earlier = {p.name: (p.stat().st_ino, p.read_bytes()) for p in out.iterdir()}
        (disk / "filler").write_bytes(bytes(whole_pages(shutil.disk_usage(disk).free - 3 * sum(paged) // 4)))
        told = joulebench(*command, str(out))
        assert (told.code, len(told.problems)) == (7, 1), told.stderr
        assert told.problems[0].startswith(f"error: --out {out}")
        assert FULL in told.problems[0]
        assert {p.name: (p.stat().st_ino, p.read_bytes()) for p in out.iterdir()} == earlier
        (disk / "filler").unlink()
        (out / "README.md").unlink()
        assert joulebench(*command, str(out), "--no-traces").code == 0
        assert {p.name for p in out.iterdir()} == earlier.keys() - {"traces.parquet"}


@pytest.mark.skipif(sys.platform != "linux", reason="nobody can make a file in Linux's /proc")
@pytest.mark.parametrize(
    ("command", "told_of"),
    [
        (("calibrate", MODEL, "--data", "ruler_niah_single_2", "--prompts", "2", "--out", "/proc/p"), "/proc/p"),
        (("model", "fit", "--quick", "--out", "/proc/mine.toml"), "/proc"),
    ],
)
def test_a_folder_that_takes_nothing_is_told_first(command: tuple[str, ...], told_of: str) -> None:
    told = joulebench(*command)
    assert told.code == 7
    assert len(lines := told.stderr.splitlines()) == 1, "a line of progress means that something was computed"
    assert lines[0].startswith(f"error: --out {told_of}: cannot be written (")


def test_weights_without_room_are_an_error_of_the_disk(full_disk: Path) -> None:
    """`model fit` told of a fault of its own, with exit code 1."""
    path = full_disk / "model.safetensors"
    with pytest.raises(OSError, match=FULL) as caught:
        write_tensors(path, {"w": torch.zeros(1 << 14)}, {})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert [p.name for p in full_disk.iterdir()] == ["filler"]
