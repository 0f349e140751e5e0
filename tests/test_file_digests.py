"""Digests of large files are kept beside what says that a file is the same, and never believed beyond that."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from harness.file_digests import KEPT_IN, file_digests

ABC_SHA256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
"""Of "abc", from FIPS 180-2."""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def old(path: Path, content: bytes) -> Path:
    """A file that was written and changed long enough ago for its digest to be kept."""
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))
    return path


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock is ten seconds ahead, so that files that were just made are settled."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 10)


def silent(note: str) -> None:
    raise AssertionError(note)


@pytest.mark.usefixtures("later")
def test_a_file_is_read_once_and_again_after_any_change(tmp_path: Path, state: Path) -> None:
    path = old(tmp_path / "weights", b"abc")
    assert file_digests([path], state, silent) == {path: ABC_SHA256}
    # A false digest in its place shows that it is looked up.
    kept = (state / KEPT_IN).read_text("utf-8")
    (state / KEPT_IN).write_text(kept.replace(ABC_SHA256, "0" * 64), encoding="utf-8")
    assert file_digests([path], state, silent) == {path: "0" * 64}
    # The same size and the same time of change, as a tool may set it: the inode's own time tells.
    old(path, b"abd")
    assert file_digests([path], state, silent)[path] not in {ABC_SHA256, "0" * 64}


def test_a_file_that_was_just_written_is_not_looked_up(tmp_path: Path, state: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    assert file_digests([path], state, silent) == {path: ABC_SHA256}
    assert not (state / KEPT_IN).exists()


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("broken", ["", "[1]", '{"a": 1}', '{"a": "0"}', "\x00"])
def test_broken_notes_of_digests_are_read_over(tmp_path: Path, state: Path, broken: str) -> None:
    state.mkdir()
    (state / KEPT_IN).write_text(broken, encoding="utf-8")
    path = old(tmp_path / "weights", b"abc")
    assert file_digests([path], state, silent) == {path: ABC_SHA256}
    assert ABC_SHA256 in (state / KEPT_IN).read_text("utf-8")


@pytest.mark.usefixtures("later")
def test_where_digests_cannot_be_kept_files_are_read_each_time(tmp_path: Path) -> None:
    path = old(tmp_path / "weights", b"abc")
    for _ in range(2):
        assert file_digests([path], path / "no folder", silent) == {path: ABC_SHA256}


def test_reading_gigabytes_is_told(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.file_digests.TOLD_FROM_BYTES", 1000)
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"abc")
    large.write_bytes(bytes(2000))
    heard: list[str] = []
    file_digests([small], state, heard.append)
    assert heard == []
    file_digests([small, large], state, heard.append)
    assert len(heard) == 1
    assert "in 2 files for their SHA-256; this is done once a file" in heard[0]
