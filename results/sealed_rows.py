"""Rows of a run's database, each sealed with a digest of all that stands in it.

SQLite finds a page that is broken, and not a figure or a name that is another one: one flipped bit in a record gives
another record, which would change a table without a word.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

Table = Literal["run", "cell", "trial", "heat", "sample", "replaced"]
COLUMNS: Final[dict[Table, tuple[str, ...]]] = {
    "run": ("run_id", "record"),
    "cell": ("cell_id", "position", "record"),
    "trial": ("trial_id", "cell_id", "repeat", "status", "record", "finished_order", "traces_sha256"),
    "heat": ("trial_id", "record"),
    "sample": ("workload", "model", "position", "record"),
    "replaced": ("trial_id", "cell_id", "repeat", "record", "finished_order"),
}
"""What is sealed of each table, in the order in which it is told. `traces_sha256`: of the trial's trace file, "" where
it has none, NULL in runs from before it was kept."""
DIGITS: Final = 16


class BrokenSealError(Exception):
    """A row that does not hold what was written there."""


def seal_of(values: Sequence[Any]) -> str:
    """Of a row's values, in the order of its columns."""
    return hashlib.sha256("\x1f".join(map(str, values)).encode()).hexdigest()[:DIGITS]


def insert(db: sqlite3.Connection, table: Table, values: Sequence[Any], or_ignore: bool = False) -> None:
    """values: in the order of `COLUMNS`."""
    names = (*COLUMNS[table], "seal")
    how = "INSERT OR IGNORE" if or_ignore else "INSERT"
    places = ", ".join("?" * len(names))
    db.execute(f"{how} INTO {table} ({', '.join(names)}) VALUES ({places})", (*values, seal_of(values)))


def rows(
    db: sqlite3.Connection, table: Table, order: str, sealed: bool, trial_id: str | None = None
) -> Iterator[dict[str, Any]]:
    """By column; a trial's, or all. sealed: False for a database from before rows were. Raises `BrokenSealError`."""
    names = [name for name in COLUMNS[table] if sealed or name != "traces_sha256"]
    where, given = ("", ()) if trial_id is None else (" WHERE trial_id = ?", (trial_id,))
    seal = ", seal" if sealed else ", NULL"
    for *values, kept in db.execute(f"SELECT {', '.join(names)}{seal} FROM {table}{where} ORDER BY {order}", given):
        if sealed and kept != seal_of(values):
            raise BrokenSealError(f"a row of table {table} is not what was written there")
        yield dict(zip(names, values, strict=True))


def seal_all(db: sqlite3.Connection) -> None:
    """Of rows that stand there without."""
    for table, names in COLUMNS.items():
        found = db.execute(f"SELECT rowid, {', '.join(names)} FROM {table}").fetchall()
        seals = [(seal_of(values), rowid) for rowid, *values in found]
        db.executemany(f"UPDATE {table} SET seal = ? WHERE rowid = ?", seals)


def seal_trial(db: sqlite3.Connection, trial_id: str, traces_sha256: str) -> None:
    """Puts the digest of the trace file into a trial's row, and seals it again."""
    db.execute("UPDATE trial SET traces_sha256 = ? WHERE trial_id = ?", (traces_sha256, trial_id))
    found = db.execute(f"SELECT {', '.join(COLUMNS['trial'])} FROM trial WHERE trial_id = ?", (trial_id,))
    db.execute("UPDATE trial SET seal = ? WHERE trial_id = ?", (seal_of(found.fetchone()), trial_id))


def has_table(db: sqlite3.Connection, name: str) -> bool:
    found = db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (name,))
    return found.fetchone() is not None


def gone_trials(db: sqlite3.Connection) -> list[int]:
    """Which of the trials that were finished, counted from 1, have no row any more; the last ones cannot be missed."""
    tables = ("trial", "replaced") if has_table(db, "replaced") else ("trial",)
    there = {order for table in tables for (order,) in db.execute(f"SELECT finished_order FROM {table}")}
    return [order for order in range(1, max(there, default=0)) if order not in there]
