"""The run folder: an SQLite index in WAL mode, and one Parquet file of raw power traces a trial.

    RUN/run.sqlite             meta, run, cell, trial, sample
    RUN/traces/TRIAL.parquet   raw readings of every meter in the trial's window and its idle baselines

A trial is committed whole or not at all: in one transaction its row is inserted, its trace file is written under a
temporary name, flushed to disk and renamed, and the row is committed. A crash before the commit leaves a file without a
row, which the next `open` removes.
At most one finished trial exists for a (cell, repeat): the database holds it by a unique index.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from results.records import Cell, PowerTrace, RunData, RunInfo, Sample, Trial
from results.trace_files import WINDOW, TraceFileError, read_traces, write_traces

SCHEMA_VERSION: Final = 3
DATABASE: Final = "run.sqlite"
_OWN_NAMES: Final = {DATABASE, *(f"{DATABASE}-{s}" for s in ("journal", "wal", "shm")), "run.lock", "traces"}
"""The journal exists only for the moment before the database is in WAL mode; a kill may leave it."""
FREE_BYTES_NEEDED: Final = 64 * 1024 * 1024
"""A run does not start, and a trial is not written, with less room than this on the disk."""

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
_MIGRATIONS: Final[dict[int, str]] = {
    # The order in which trials were finished: interleaving and drift cannot be judged without it.
    1: "ALTER TABLE trial ADD COLUMN finished_order INTEGER NOT NULL DEFAULT 0;"
    " UPDATE trial SET finished_order = rowid;",
    # What was asked, in words: a report could only show token ids. Runs from before have none.
    2: "CREATE TABLE sample (workload TEXT NOT NULL, model TEXT NOT NULL, position INTEGER NOT NULL,"
    " record TEXT NOT NULL, PRIMARY KEY (workload, model, position)) STRICT;",
}
"""From version k to k + 1. A new run takes the same path as an old one: schema 1, then every step."""


class StoreError(Exception):
    """A run folder that cannot be used: what, the value found, the remedy."""


class Store:
    """One run folder, held by one process at a time."""

    def __init__(self, directory: Path, connection: sqlite3.Connection, lock: FileLock | None) -> None:
        self.directory = directory
        self._connection = connection
        self._lock = lock

    # --- opening ---

    @classmethod
    def create(cls, directory: Path, info: RunInfo, cells: Sequence[Cell]) -> Store:
        """A new run folder. Nothing of it is left behind when it fails."""
        found = {p.name for p in directory.iterdir()} if directory.is_dir() else set()
        strangers = sorted(found - _OWN_NAMES)
        if strangers:
            raise StoreError(
                f"{directory} holds other files ({', '.join(strangers[:3])}); name an empty or new folder with --out"
            )
        check_free_space(directory)
        made = not directory.exists()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as undo:
                store = cls._connect(directory)
                undo.callback(store.close)
                if store._started():
                    raise StoreError(
                        f"{directory} already holds a run; go on with --resume or name another folder with --out"
                    )
                with store._transaction() as db:
                    db.execute("INSERT INTO run VALUES (?, ?)", (info.run_id, info.model_dump_json()))
                    db.executemany(
                        "INSERT INTO cell VALUES (?, ?, ?)",
                        [(cell.cell_id, i, cell.model_dump_json()) for i, cell in enumerate(cells)],
                    )
                undo.pop_all()
        except (OSError, sqlite3.Error) as error:
            # Not on a StoreError: then the folder is another process's, or holds another run.
            _remove_new(directory, found, made)
            raise StoreError(f"cannot create the run folder {directory}: {error}") from error
        return store

    @staticmethod
    def holds_run(directory: Path) -> bool:
        """Whether a run was started there (a process killed while creating the folder leaves one that was not)."""
        if not (directory / DATABASE).is_file():
            return False
        with contextlib.closing(sqlite3.connect(directory / DATABASE)) as db:
            try:
                return db.execute("SELECT 1 FROM run").fetchone() is not None
            except sqlite3.DatabaseError:
                return False

    def _started(self) -> bool:
        return self._connection.execute("SELECT 1 FROM run").fetchone() is not None

    @classmethod
    def open(cls, directory: Path) -> Store:
        """An existing run folder, for going on with it. Removes what a killed process left half-written."""
        if not (directory / DATABASE).is_file():
            raise StoreError(
                f"{directory} holds no run ({DATABASE} is absent); give the folder that `joulebench run` wrote"
            )
        try:
            store = cls._connect(directory)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"{directory / DATABASE} cannot be used ({error}); is it damaged, or read-only?"
            ) from error
        store._remove_orphans()
        return store

    @classmethod
    def view(cls, directory: Path) -> Store:
        """For reading, also while another process runs; brings an older schema up to date first."""
        if not cls.holds_run(directory):
            raise StoreError(f"{directory} holds no run; give the folder that `joulebench run` wrote")
        connection = sqlite3.connect(f"{(directory / DATABASE).absolute().as_uri()}?mode=ro", uri=True)
        if _schema_version(connection) != SCHEMA_VERSION:
            connection.close()
            cls.open(directory).close()
            return cls.view(directory)
        return cls(directory, connection, None)

    @classmethod
    def _connect(cls, directory: Path) -> Store:
        (directory / "traces").mkdir(exist_ok=True)
        lock = FileLock(directory / "run.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            raise StoreError(
                f"{directory} is in use by another joulebench process; wait for it or name another --out"
            ) from error
        with contextlib.ExitStack() as undo:
            undo.callback(lock.release)
            connection = sqlite3.connect(directory / DATABASE, isolation_level=None)
            undo.callback(connection.close)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            store = cls(directory, connection, lock)
            store._migrate()
            undo.pop_all()
        return store

    def _migrate(self) -> None:
        with self._transaction() as db:
            fresh = db.execute("SELECT name FROM sqlite_master WHERE name = 'meta'").fetchone() is None
            if fresh:
                _execute_all(db, _SCHEMA_1)
                db.execute("INSERT INTO meta VALUES ('schema_version', '1')")
            version = _schema_version(db)
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"{self.directory} was written by a newer joulebench (schema {version}, this one reads"
                    f" {SCHEMA_VERSION}); update joulebench"
                )
            for step in range(version, SCHEMA_VERSION):
                _execute_all(db, _MIGRATIONS[step])
            db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(SCHEMA_VERSION),))

    def close(self) -> None:
        self._connection.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- writing ---

    def add_trial(self, trial: Trial, traces: dict[str, Sequence[PowerTrace]]) -> None:
        """Commits one trial with its traces (by part: `WINDOW`, `IDLE_BEFORE`, `IDLE_AFTER`). Raises `StoreError`."""
        check_free_space(self.directory)
        path = self._trace_path(trial.trial_id)
        try:
            with contextlib.ExitStack() as undo:
                with self._transaction() as db:
                    db.execute(
                        "INSERT INTO trial (trial_id, cell_id, repeat, status, record, finished_order)"
                        " VALUES (?, ?, ?, ?, ?, (SELECT coalesce(max(finished_order), 0) + 1 FROM trial))",
                        (trial.trial_id, trial.cell_id, trial.repeat, trial.status, trial.model_dump_json()),
                    )
                    if any(traces.values()):
                        # Only from here on: before, a file of this name would be that of a finished trial.
                        undo.callback(path.unlink, missing_ok=True)
                        write_traces(path, traces, _window(trial), trial.marks)
                undo.pop_all()
        except sqlite3.IntegrityError as error:
            raise StoreError(
                f"trial {trial.trial_id} (cell {trial.cell_id}, repeat {trial.repeat}) does not fit what"
                f" {self.directory} holds ({error}); a finished trial is never replaced"
            ) from error
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"trial {trial.trial_id} could not be written to {self.directory} ({error});"
                " finished trials are kept: make room and go on with --resume"
            ) from error

    def add_samples(self, workload: str, model: str, samples: Sequence[Sample]) -> None:
        """Commits what a workload asks of a model, once: what is there already stays. Raises `StoreError`."""
        check_free_space(self.directory)
        try:
            with self._transaction() as db:
                db.executemany(
                    "INSERT OR IGNORE INTO sample VALUES (?, ?, ?, ?)",
                    [(workload, model, i, sample.model_dump_json()) for i, sample in enumerate(samples)],
                )
        except sqlite3.Error as error:
            raise StoreError(
                f"the samples of {workload} could not be written to {self.directory} ({error}); make room and go on"
                " with --resume"
            ) from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except GeneratorExit:
            # Ctrl-C fell between entering and the body: nobody is left to leave it. Closing the connection rolls back.
            raise
        except BaseException:
            # A full disk makes SQLite roll back by itself.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _remove_orphans(self) -> None:
        known = {row[0] for row in self._connection.execute("SELECT trial_id FROM trial")}
        for path in (self.directory / "traces").iterdir():
            if path.suffix == ".tmp" or (path.suffix == ".parquet" and path.stem not in known):
                path.unlink(missing_ok=True)
        # Tables and reports appear under hidden names before they are renamed.
        for path in (*self.directory.glob(".*.csv.*"), *self.directory.glob(".*.html.*")):
            path.unlink(missing_ok=True)

    # --- reading ---

    def finished(self) -> set[tuple[str, int]]:
        """(cell_id, repeat) of every trial that is there."""
        return {(c, r) for c, r in self._connection.execute("SELECT cell_id, repeat FROM trial")}

    def info(self) -> RunInfo:
        row = self._connection.execute("SELECT record FROM run").fetchone()
        if row is None:
            raise StoreError(f"{self.directory}: the run was never started; remove the folder and run again")
        return RunInfo.model_validate_json(row[0])

    def trials(self) -> tuple[Trial, ...]:
        """In the order in which they were finished."""
        rows = self._connection.execute("SELECT record FROM trial ORDER BY finished_order")
        return tuple(Trial.model_validate_json(r) for (r,) in rows)

    def samples(self) -> dict[tuple[str, str], tuple[Sample, ...]]:
        """By workload and model. Empty for runs from before they were kept."""
        found: dict[tuple[str, str], list[Sample]] = {}
        rows = self._connection.execute("SELECT workload, model, record FROM sample ORDER BY workload, model, position")
        for workload, model, record in rows:
            found.setdefault((workload, model), []).append(Sample.model_validate_json(record))
        return {key: tuple(own) for key, own in found.items()}

    def data(self) -> RunData:
        cells = self._connection.execute("SELECT record FROM cell ORDER BY position")
        return RunData(
            info=self.info(),
            cells=tuple(Cell.model_validate_json(r) for (r,) in cells),
            trials=self.trials(),
            load_traces=lambda trial_id: self.traces(trial_id),
            samples=self.samples(),
        )

    def traces(self, trial_id: str, part: str = WINDOW) -> tuple[PowerTrace, ...]:
        """Raw traces of one part of a trial; empty where none were stored."""
        path = self._trace_path(trial_id)
        return _stored_traces(path, part) if path.is_file() else ()

    def _trace_path(self, trial_id: str) -> Path:
        return self.directory / "traces" / f"{trial_id}.parquet"


def check_free_space(directory: Path) -> None:
    """Raises `StoreError` when the disk under a (perhaps not yet existing) folder has too little room."""
    existing = next(p for p in (directory.absolute(), *directory.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < FREE_BYTES_NEEDED:
        raise StoreError(
            f"only {free / 1e6:.0f} MB are free on the disk of {directory}, {FREE_BYTES_NEEDED / 1e6:.0f} MB are"
            " needed; make room or name a folder on another disk with --out"
        )


def _remove_new(directory: Path, found: set[str], made: bool) -> None:
    """Undoes a folder that could not be created: all of it, or what was not there before."""
    if made:
        shutil.rmtree(directory, ignore_errors=True)
        return
    for name in _OWN_NAMES - found:
        if name == "traces":
            shutil.rmtree(directory / name, ignore_errors=True)
        else:
            (directory / name).unlink(missing_ok=True)


def _execute_all(db: sqlite3.Connection, script: str) -> None:
    """Like executescript, but inside the open transaction (executescript commits first)."""
    for statement in script.split(";"):
        if statement.strip():
            db.execute(statement)


def _schema_version(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()[0])


def _window(trial: Trial) -> tuple[float, float] | None:
    if trial.window_start_s is None or trial.window_end_s is None:
        return None
    return trial.window_start_s, trial.window_end_s


def _stored_traces(path: Path, part: str) -> tuple[PowerTrace, ...]:
    try:
        return read_traces(path, part)
    except TraceFileError as error:
        raise StoreError(f"{error}; its trial's figures stand, its trace is lost") from error
