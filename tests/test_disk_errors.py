"""What a user is told to do where a disk could not be written: by what the system and SQLite said."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from results.database import damaged
from results.disk_errors import remedy_of


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EROFS, "make it writable"),
        (errno.EACCES, "make it writable"),
        (errno.EIO, "look at the disk, which failed"),
        (errno.ENOENT, "see that the folder and its disk are there"),
        (errno.EMFILE, "see that it can be written"),
    ],
)
def test_the_remedy_is_that_of_the_error(number: int, words: str) -> None:
    assert remedy_of(OSError(number, os.strerror(number))).startswith(words)


def test_a_disk_that_fails_is_not_to_be_emptied() -> None:
    """A read of a process's own first page is one that fails."""
    with pytest.raises(OSError, match="Input/output error") as failed, open("/proc/self/mem", "rb") as memory:
        memory.read(1)
    assert "room" not in remedy_of(failed.value)


def test_what_sqlite_says_has_its_own_remedy(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE t (x)")
        db.execute("PRAGMA max_page_count = 3")
        with pytest.raises(sqlite3.OperationalError, match="full") as full:
            db.execute("INSERT INTO t VALUES (?)", ("x" * 100_000,))
    assert remedy_of(full.value) == "make room"
    reading = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    with pytest.raises(sqlite3.OperationalError, match="readonly") as closed:
        reading.execute("INSERT INTO t VALUES (1)")
    assert remedy_of(closed.value).startswith("make it writable")
    with pytest.raises(sqlite3.OperationalError, match="unable to open") as absent:
        sqlite3.connect(tmp_path / "not there" / "run.sqlite")
    assert remedy_of(absent.value).startswith("make it writable")


def test_a_database_on_a_disk_that_fails_is_not_called_damaged() -> None:
    """SQLite takes the first page of a process for a file, opens it, and cannot read it."""
    path = Path("/proc/self/mem")
    with pytest.raises(sqlite3.OperationalError) as failed:
        sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True).execute("SELECT * FROM sqlite_master")
    told = damaged(path, failed.value)
    assert (failed.value.sqlite_errorname[:12], "damaged" in told, "the disk failed" in told) == (
        *("SQLITE_IOERR", False, True),
    )
