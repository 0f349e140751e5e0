"""The SQLite file of a run: its schema, how it is opened, and what is said where it is damaged.

Only its owner may read it (0600), because it holds prompts and answers; a mode that its owner gave it later stays.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from results.disk_errors import is_full, is_io_error
from results.sealed_rows import BrokenSealError, has_table, seal_all

SCHEMA_VERSION: Final = 7
READ_FROM_VERSION: Final = 3
"""Of an older run that is only looked at: what came later are an index, seals, and tables that need not be there."""
SEALED_FROM_VERSION: Final = 6
DATABASE: Final = "run.sqlite"
NO_ROOM: Final = ("SQLITE_FULL", "SQLITE_IOERR")
"""As names of errors begin on a full disk."""
OWNER_ONLY: Final = 0o600
UNFINISHED: Final = "unfinished"
"""In `meta`, while more trials are to come. Runs from before it was kept say nothing."""
SITTING: Final = "sitting"
"""In `meta`: the highest of the run, where devices of a fleet have some of their own."""

_SCHEMA_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE run (run_id TEXT PRIMARY KEY, record TEXT NOT NULL) STRICT;
CREATE TABLE cell (cell_id TEXT PRIMARY KEY, position INTEGER NOT NULL UNIQUE, record TEXT NOT NULL) STRICT;
CREATE TABLE trial (
    trial_id TEXT PRIMARY KEY,
    cell_id TEXT NOT NULL REFERENCES cell (cell_id),
    repeat INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('ok', 'failed')),
    record TEXT NOT NULL
) STRICT;
CREATE UNIQUE INDEX trial_once ON trial (cell_id, repeat);
"""
_SEALED_FIRST: Final = ("run", "cell", "trial", "heat", "sample")
"""Tables that were there when seals came."""
_MIGRATIONS: Final[dict[int, str]] = {
    # The order in which trials were finished: interleaving and drift cannot be judged without it.
    1: "ALTER TABLE trial ADD COLUMN finished_order INTEGER NOT NULL DEFAULT 0;"
    " UPDATE trial SET finished_order = rowid;",
    # What was asked, in words: a report could only show token ids. Runs from before have none.
    2: "CREATE TABLE sample (workload TEXT NOT NULL, model TEXT NOT NULL, position INTEGER NOT NULL,"
    " record TEXT NOT NULL, PRIMARY KEY (workload, model, position)) STRICT;",
    # Each new trial asks for the last number, and each report for all of them in order.
    3: "CREATE INDEX trial_finished ON trial (finished_order);",
    # Which experts were chosen, layer by layer: apart from the trial's record, which every reader reads whole.
    4: "CREATE TABLE heat (trial_id TEXT PRIMARY KEY REFERENCES trial (trial_id), record TEXT NOT NULL) STRICT;",
    # A flipped bit in a record, or the trace file of another trial, changed figures without a word.
    5: "ALTER TABLE trial ADD COLUMN traces_sha256 TEXT;"
    + "".join(f" ALTER TABLE {table} ADD COLUMN seal TEXT NOT NULL DEFAULT '';" for table in _SEALED_FIRST),
    # Trials that a lost device failed, and that a resume measured again: each stays as what it is, beside the other.
    6: "CREATE TABLE replaced (trial_id TEXT PRIMARY KEY, cell_id TEXT NOT NULL REFERENCES cell (cell_id),"
    " repeat INTEGER NOT NULL, record TEXT NOT NULL, finished_order INTEGER NOT NULL,"
    " seal TEXT NOT NULL DEFAULT '') STRICT;",
}
"""From version k to k + 1. A new run takes the same path as an old one: schema 1, then every step."""


class StoreError(Exception):
    """A run folder that cannot be used: what, the value found, the remedy."""


class UnwrittenError(StoreError):
    """One in which there is no room, or that may not be written: a plan has no part in it."""


@contextlib.contextmanager
def damage_told(path: Path, sealed: bool = False) -> Iterator[None]:
    """Turns what SQLite, or a record that does not fit, raises into a `StoreError` that names the file.

    sealed: records are known to be what was written, so that a field which is not known here is a newer version's. In
    an older database it is damage: whoever wrote it knew no field that is not known here.
    """
    try:
        yield
    except ValidationError as error:
        unknown = [".".join(map(str, e["loc"])) for e in error.errors() if e["type"] == "extra_forbidden"]
        if unknown and sealed:
            raise StoreError(
                f"{path.parent} was written by a newer joulebench ({unknown[0]} is not known here); update joulebench"
            ) from error
        raise StoreError(damaged(path, error)) from error
    except sqlite3.Error as error:
        raise unusable(path, error) from error
    except (UnicodeDecodeError, BrokenSealError) as error:
        raise StoreError(damaged(path, error)) from error


def unusable(path: Path, error: sqlite3.Error) -> StoreError:
    """Of a database that SQLite cannot open, read or write. On a full disk it may be sound."""
    if is_full(error):
        return UnwrittenError(f"{path} cannot be used, for its disk is full ({error}); make room")
    return StoreError(damaged(path, error))


def damaged(path: Path, error: object) -> str:
    """What is wrong with a database that gave this error, and the remedy."""
    try:
        path.open("rb").close()
    except PermissionError as refused:
        return f"{path} cannot be read ({refused.strerror}); it is for its owner alone, who may share it with chmod"
    except OSError:
        pass  # the first error says more
    if is_io_error(error):
        return (
            f"{path} cannot be read or written ({error}): the disk failed (dmesg says how); copy the folder to another"
            " one, as far as it can be read"
        )
    what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
    return (
        f"{path} cannot be used ({what}); is it damaged, read-only or in use? Put a copy of it back, or save what can"
        f" be read: sqlite3 {path.name} .recover | sqlite3 saved.sqlite"
    )


def keep_unfinished(db: sqlite3.Connection, n_trials: int | None) -> None:
    """How many trials a run may come to, while it has not come to its end; None where it has."""
    db.execute("DELETE FROM meta WHERE key = ?", (UNFINISHED,))
    if n_trials is not None:
        db.execute("INSERT INTO meta VALUES (?, ?)", (UNFINISHED, str(n_trials)))


def keep_sitting(db: sqlite3.Connection, sitting: int) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (SITTING, str(sitting)))


def kept_sitting(db: sqlite3.Connection) -> int:
    """-1 where none was kept."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (SITTING,)).fetchone()
    return -1 if row is None else int(row[0])


def told_unfinished(db: sqlite3.Connection, n_there: int, is_of_fleet: bool) -> tuple[str, ...]:
    """What a reader must know of a run that goes on, or was broken off."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (UNFINISHED,)).fetchone()
    if row is None:
        return ()
    most = int(row[0])  # nobody knows it of rounds that go on until heat or time ends them
    there = f"{n_there} of at most {most} trials are there" if most > n_there else f"{n_there} trials are there so far"
    command = "fleet start" if is_of_fleet else "run"
    return (
        f"the run has not come to its end: {there}. It goes on, or was broken off; `joulebench {command}` with --resume"
        " measures the rest.",
    )


def told_gone(gone: Sequence[int]) -> tuple[str, ...]:
    """What a reader must know of finished trials whose rows are gone. gone: their numbers."""
    if not gone:
        return ()
    which = ", ".join(map(str, gone[:3])) + (", ..." if len(gone) > 3 else "")
    return (
        f"finished trials that are gone from {DATABASE}: {len(gone)} (in order of time number {which}), as after"
        " `.recover` of a damaged one; no figure holds them.",
    )


def holds_run(path: Path) -> bool:
    """Whether a run was started in a database (a kill while it is made leaves one without). Raises `StoreError`."""
    try:
        if not path.is_file():
            return False
    except PermissionError as error:  # of its folder
        raise StoreError(damaged(path, error)) from error
    except OSError as error:  # a name that is too long
        raise StoreError(f"{str(path)[:80]}: no run can be there ({error.strerror}); name its folder") from error
    with damage_told(path), contextlib.closing(opened_for_reading(path)) as db:
        return has_table(db, "run") and db.execute("SELECT 1 FROM run").fetchone() is not None


def opened_for_writing(path: Path, migrates: bool = True) -> sqlite3.Connection:
    """The database, made where it is not there, with the newest schema. Raises `StoreError`, `sqlite3.Error`.

    migrates: False leaves a schema that can be read as it is, for whoever may yet find that the run is not to be gone
    on with. An older joulebench can then still read it.
    """
    if not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, OWNER_ONLY))  # SQLite gives its side files the same mode
    with contextlib.ExitStack() as undo:
        db = sqlite3.connect(path, isolation_level=None)
        undo.callback(db.close)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        check_whole(db, path)
        if migrates or schema_version(db, path) < READ_FROM_VERSION:
            migrate(db, path)
        undo.pop_all()
    return db


def check_whole(db: sqlite3.Connection, path: Path) -> None:
    """Raises `StoreError` where pages or indexes are broken: SQLite may leave out rows of such a page in silence."""
    found = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if found != "ok":
        raise StoreError(damaged(path, found))


def opened_for_reading(path: Path) -> sqlite3.Connection:
    """Raises `sqlite3.Error`."""
    try:
        return _opened(path, "mode=ro")
    except sqlite3.OperationalError:
        beside = [path.with_name(f"{path.name}-{what}") for what in ("wal", "journal")]
        if os.access(path.parent, os.W_OK):
            try:
                # The journal of a process that was killed while it made the database has to be rolled back first.
                _opened(path, "mode=rw").close()
                return _opened(path, "mode=ro")
            except sqlite3.OperationalError as error:
                if not error.sqlite_errorname.startswith(NO_ROOM):
                    raise
        if any(one.is_file() and one.stat().st_size for one in beside):
            raise
        # SQLite cannot make its side files in a folder that is only read, or on a full disk: nobody writes there.
        return _opened(path, "mode=ro&immutable=1")


def _opened(path: Path, how: str) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)
    try:
        db.execute("SELECT 1 FROM sqlite_master").fetchone()
    except BaseException:
        db.close()
        raise
    return db


def schema_version(db: sqlite3.Connection, path: Path) -> int:
    """Raises `StoreError` where it is newer than what this version reads."""
    row = db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    said = "" if row is None else str(row[0])
    version = int(said) if said.isdecimal() and len(said) < 10 else 0
    if version < 1:
        raise StoreError(
            damaged(path, f"its schema is {said[:20]!r}, no number from 1" if said else "it does not say its schema")
        )
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path.parent} was written by a newer joulebench (schema {version}, this one reads {SCHEMA_VERSION});"
            " update joulebench"
        )
    return version


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except GeneratorExit:
        # Ctrl-C fell between entering and the body: nobody is left to leave it. Closing the connection rolls back.
        raise
    except BaseException:
        # A full disk makes SQLite roll back by itself.
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def migrate(db: sqlite3.Connection, path: Path) -> None:
    """To the newest schema, all steps or none. Raises `StoreError`, `sqlite3.Error`."""
    with transaction(db):
        _take_steps(db, path)


def _take_steps(db: sqlite3.Connection, path: Path) -> None:
    if db.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
        _execute_all(db, _SCHEMA_1)
        db.execute("INSERT INTO meta VALUES ('schema_version', '1')")
    if not has_table(db, "meta"):
        raise StoreError(f"{path} is a database of another program; name another folder with --out")
    version = schema_version(db, path)
    try:
        for step in range(version, SCHEMA_VERSION):
            _execute_all(db, _MIGRATIONS[step])
    except sqlite3.OperationalError as error:
        if not str(error).startswith("duplicate column name") and not str(error).endswith("already exists"):
            raise
        raise StoreError(
            f"{path} says that its schema is {version}, and holds what came with a later one ({error}): its number was"
            " changed, not its rows; put a copy of it back"
        ) from error
    if version < SEALED_FROM_VERSION:
        seal_all(db)
    if version < SCHEMA_VERSION:
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(SCHEMA_VERSION),))


def _execute_all(db: sqlite3.Connection, script: str) -> None:
    """Like executescript, but inside the open transaction (executescript commits first)."""
    for statement in script.split(";"):
        if statement.strip():
            db.execute(statement)
