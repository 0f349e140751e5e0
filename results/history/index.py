"""A folder of runs as a history, and its index: an SQLite file beside the runs, which is never the truth.

    DIR/**/run.sqlite       the runs, at most `DEPTH` folders down; no run lies within another, no link is followed,
                            and hidden folders are those of a bundle that is made, or was killed
    DIR/.history.sqlite     what each of them says, beside the size and time of the files that it was read from

Each look goes through the folders, reads the runs that are new or changed, and forgets those that are gone. An index
that is damaged, of another version, or not there is made again. Where none can be written (a disk that is only read),
it is made in memory. A run that cannot be read is told, skipped, and tried again next time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from pydantic import ValidationError

from results.database import DATABASE, OWNER_ONLY, StoreError, transaction
from results.history.points import CellPoint, RunPoint, cell_points, run_point
from results.store import Store

INDEX: Final = ".history.sqlite"
VERSION: Final = "17"
DEPTH: Final = 4
BUSY_S: Final = 30.0
SIDE_FILES: Final = ("", "-wal")

_SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
    "CREATE TABLE run (folder TEXT PRIMARY KEY, seen TEXT NOT NULL, created_at TEXT NOT NULL, record TEXT NOT NULL)"
    " STRICT",
    "CREATE TABLE cell (folder TEXT NOT NULL, position INTEGER NOT NULL, key TEXT NOT NULL, record TEXT NOT NULL,"
    " PRIMARY KEY (folder, position)) STRICT",
    "CREATE INDEX cell_key ON cell (key)",
)

log = logging.getLogger(__name__)


class HistoryError(Exception):
    """A folder that is no history, or a name that it does not know: what, the value, the remedy."""


@dataclass(frozen=True)
class Skipped:
    """A run that cannot be read. why: one line."""

    folder: str
    why: str


class RunRead(NamedTuple):
    """cells: of each its key and its record, as the index keeps them."""

    point: RunPoint
    cells: tuple[tuple[str, str], ...]


Reader: TypeAlias = "Callable[[Path, Sequence[str]], Generator[RunRead | str]]"


class History:
    """runs: the oldest first. skipped: runs that cannot be read."""

    def __init__(self, directory: Path, db: sqlite3.Connection, skipped: Sequence[Skipped]) -> None:
        self.directory = directory
        self._db = db
        self.skipped = tuple(skipped)
        records = db.execute("SELECT record FROM run ORDER BY created_at, folder")
        self.runs = tuple(RunPoint.model_validate_json(record) for (record,) in records)

    def cells(self, folder: str) -> tuple[CellPoint, ...]:
        """Of one run."""
        found = self._db.execute("SELECT record FROM cell WHERE folder = ? ORDER BY position", (folder,))
        return tuple(CellPoint.model_validate_json(record) for (record,) in found)

    def cells_by_run(self, like: Sequence[str] | None = None) -> dict[str, list[CellPoint]]:
        """By folder: all cells, or those that one of these runs has too (`CellPoint.key`)."""
        found: dict[str, list[CellPoint]] = {run.folder: [] for run in self.runs}
        if like is None:
            rows = self._db.execute("SELECT folder, record FROM cell ORDER BY folder, position")
        else:
            rows = self._db.execute(
                "SELECT folder, record FROM cell WHERE key IN (SELECT key FROM cell WHERE folder IN"
                " (SELECT value FROM json_each(?))) ORDER BY folder, position",
                (json.dumps(like),),
            )
        for folder, record in rows:
            found[folder].append(CellPoint.model_validate_json(record))
        return found

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_history(
    directory: Path, on_read: Callable[[int, int], None] = lambda done, of: None, read_all: Reader | None = None
) -> History:
    """Brings the index up to date. on_read: told how many runs were read, of how many. read_all: `read_run`
    of each folder, in their order; other processes may do it. Raises `HistoryError`."""
    if not directory.is_dir():
        what = "is no folder" if directory.exists() else "is not there"
        raise HistoryError(f"{directory} {what}; give the folder that holds the folders of runs")
    if (directory / DATABASE).is_file():
        raise HistoryError(
            f"{directory} is one run, and no folder of runs; give the folder above it, {directory.absolute().parent}"
        )
    path = directory / INDEX
    if not path.exists() and next(run_folders(directory), None) is None:
        return _brought_up(directory, _in_memory(), on_read, read_all)
    try:
        return _brought_up(directory, _opened(path), on_read, read_all)
    except (sqlite3.Error, ValidationError, UnicodeDecodeError, OSError) as error:
        log.info("%s: made again (%s)", path, error)
    with contextlib.suppress(OSError):
        for side in ("", "-wal", "-shm", "-journal"):
            path.with_name(path.name + side).unlink(missing_ok=True)
    try:
        return _brought_up(directory, _opened(path), on_read, read_all)
    except (sqlite3.Error, OSError) as error:
        log.info("%s: cannot be written (%s), so the index is made in memory", path, error)
    return _brought_up(directory, _in_memory(), on_read, read_all)


def _in_memory() -> sqlite3.Connection:
    return _with_schema(sqlite3.connect(":memory:", isolation_level=None))


def _opened(path: Path) -> sqlite3.Connection:
    """Raises `sqlite3.Error`, `OSError`; `sqlite3.DatabaseError` for an index of another version too."""
    if not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, OWNER_ONLY))
    with contextlib.ExitStack() as undo:
        db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S)
        undo.callback(db.close)
        _with_schema(db)
        undo.pop_all()
    return db


def _with_schema(db: sqlite3.Connection) -> sqlite3.Connection:
    with transaction(db):
        if db.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
            for statement in _SCHEMA:
                db.execute(statement)
            db.execute("INSERT INTO meta VALUES ('version', ?)", (VERSION,))
    row = db.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
    if row != (VERSION,):
        raise sqlite3.DatabaseError(f"an index of version {row}")
    return db


def _brought_up(
    directory: Path, db: sqlite3.Connection, on_read: Callable[[int, int], None], read_all: Reader | None
) -> History:
    with contextlib.ExitStack() as undo:
        undo.callback(db.close)
        there = dict(run_folders(directory))
        known = dict(db.execute("SELECT folder, seen FROM run").fetchall())
        gone = [folder for folder in known if folder not in there]
        changed = [folder for folder, seen in there.items() if known.get(folder) != seen]
        skipped = []
        for folder in gone:
            with transaction(db):
                _forget(db, folder)
        found = (read_all or read_in_turn)(directory, changed)
        undo.callback(found.close)
        for done, folder in enumerate(changed):
            on_read(done, len(changed))
            told = next(found)
            with transaction(db):
                _forget(db, folder)
                if isinstance(told, str):
                    skipped.append(Skipped(folder, told))
                else:
                    _put(db, folder, there[folder], told)
        history = History(directory, db, skipped)
        undo.pop_all()
    return history


def read_in_turn(directory: Path, folders: Sequence[str]) -> Generator[RunRead | str]:
    for folder in folders:
        yield read_run(directory, folder)


def read_run(directory: Path, folder: str) -> RunRead | str:
    """What the index keeps of a run, or why it cannot be read."""
    try:
        with Store.view(directory / folder) as store:
            run = store.data()
    except StoreError as error:
        return str(error)
    cells = cell_points(run)
    return RunRead(run_point(run, folder, cells), tuple((_text(cell.key), cell.model_dump_json()) for cell in cells))


def _put(db: sqlite3.Connection, folder: str, seen: str, told: RunRead) -> None:
    row = (folder, seen, told.point.created_at, told.point.model_dump_json())
    db.execute("INSERT INTO run VALUES (?, ?, ?, ?)", row)
    db.executemany("INSERT INTO cell VALUES (?, ?, ?, ?)", [(folder, i, *cell) for i, cell in enumerate(told.cells)])


def _forget(db: sqlite3.Connection, folder: str) -> None:
    db.execute("DELETE FROM run WHERE folder = ?", (folder,))
    db.execute("DELETE FROM cell WHERE folder = ?", (folder,))


def _text(key: Sequence[str]) -> str:
    return json.dumps(key)


def run_folders(directory: Path) -> Iterator[tuple[str, str]]:
    """(folder below the directory, size and time of its files) of each run."""
    yield from _below(str(directory), "", DEPTH)


def _below(root: str, inside: str, depth: int) -> Iterator[tuple[str, str]]:
    try:
        with os.scandir(os.path.join(root, inside)) as entries:
            names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith("."))
    except OSError:
        return
    for name in names:
        folder = os.path.join(inside, name)
        seen = _seen(os.path.join(root, folder, DATABASE))
        if seen is not None:
            yield folder, seen
        elif depth > 1:
            yield from _below(root, folder, depth - 1)


def _seen(path: str) -> str | None:
    """None where there is no database."""
    found = []
    for side in SIDE_FILES:
        try:
            told = os.stat(path + side)
        except OSError:
            if not side:
                return None
            continue
        if not side and not stat.S_ISREG(told.st_mode):
            return None
        if not side or told.st_size:
            found.append(f"{told.st_size}.{told.st_mtime_ns}")
    return " ".join(found)
