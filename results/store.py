"""The run folder: an SQLite index in WAL mode, and one Parquet file of raw power traces a trial.

    RUN/run.sqlite             meta, run, cell, trial, heat, sample
    RUN/traces/TRIAL.parquet   raw readings of every meter in the trial's window and its idle baselines

A trial is committed whole or not at all: in one transaction its rows are inserted, its trace file is written under a
temporary name, flushed to disk and renamed, and they are committed. A crash before the commit leaves a file without a
row, which the next `open` removes. After each commit the WAL is written into the main file, so that a copy of
`run.sqlite` alone, or a lost WAL, costs no finished trial.
At most one finished trial exists for a (cell, repeat): the database holds it by a unique index.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from results.database import (
    DATABASE,
    OWNER_ONLY,
    READ_FROM_VERSION,
    StoreError,
    damage_told,
    damaged,
    has_table,
    holds_run,
    opened_for_reading,
    opened_for_writing,
    schema_version,
    transaction,
)
from results.records import Cell, ExpertHeat, PowerTrace, Sample
from results.runs import RunData, RunInfo
from results.trace_files import WINDOW, read_traces, write_traces
from results.trials import Trial, without_fields_set

__all__ = ["DATABASE", "FREE_BYTES_NEEDED", "Store", "StoreError", "check_free_space", "check_holds_run"]

_OWN_NAMES: Final = {DATABASE, *(f"{DATABASE}-{s}" for s in ("journal", "wal", "shm")), "run.lock", "traces"}
"""The journal exists only for the moment before the database is in WAL mode; a kill may leave it."""
FREE_BYTES_NEEDED: Final = 64 * 1024 * 1024
"""A run does not start, and a trial is not written, with less room than this on the disk."""

log = logging.getLogger(__name__)


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
        lost = _trace_files(directory)
        if lost and not cls.holds_run(directory):
            raise StoreError(_without_rows(directory, lost))
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
                with transaction(store._connection) as db:
                    db.execute("INSERT INTO run VALUES (?, ?)", (info.run_id, info.model_dump_json()))
                    db.executemany(
                        "INSERT INTO cell VALUES (?, ?, ?)",
                        [(cell.cell_id, i, cell.model_dump_json()) for i, cell in enumerate(cells)],
                    )
                store._checkpoint()
                undo.pop_all()
        except (OSError, sqlite3.Error) as error:
            # Not on a StoreError: then the folder is another process's, or holds another run.
            _remove_new(directory, found, made)
            raise StoreError(f"cannot create the run folder {directory}: {error}") from error
        return store

    @staticmethod
    def holds_run(directory: Path) -> bool:
        """Whether a run was started there (a process killed while creating the folder leaves one that was not).

        Raises `StoreError` where the database is damaged.
        """
        return holds_run(directory / DATABASE)

    def _started(self) -> bool:
        return self._connection.execute("SELECT 1 FROM run").fetchone() is not None

    @classmethod
    def open(cls, directory: Path) -> Store:
        """An existing run folder, for going on with it. Removes what a killed process left half-written."""
        check_holds_run(directory)
        with contextlib.ExitStack() as undo:
            try:
                store = cls._connect(directory)
                undo.callback(store.close)
                store._remove_orphans()
            except (OSError, sqlite3.Error) as error:
                raise StoreError(damaged(directory / DATABASE, error)) from error
            undo.pop_all()
        return store

    @classmethod
    def view(cls, directory: Path) -> Store:
        """For reading, also while another process runs; brings an old schema up to date first."""
        check_holds_run(directory)
        path = directory / DATABASE
        with damage_told(path), contextlib.ExitStack() as undo:
            connection = opened_for_reading(path)
            undo.callback(connection.close)
            if schema_version(connection, path) >= READ_FROM_VERSION:
                undo.pop_all()
                return cls(directory, connection, None)
        cls.open(directory).close()
        return cls.view(directory)

    @classmethod
    def _connect(cls, directory: Path) -> Store:
        (directory / "traces").mkdir(mode=0o700, exist_ok=True)
        lock = FileLock(directory / "run.lock", timeout=0, mode=OWNER_ONLY)
        try:
            lock.acquire()
        except Timeout as error:
            raise StoreError(
                f"{directory} is in use by another joulebench process; wait for it or name another --out"
            ) from error
        with contextlib.ExitStack() as undo:
            undo.callback(lock.release)
            connection = opened_for_writing(directory / DATABASE)
            undo.pop_all()
        return cls(directory, connection, lock)

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
                with transaction(self._connection) as db:
                    db.execute(
                        "INSERT INTO trial (trial_id, cell_id, repeat, status, record, finished_order)"
                        " VALUES (?, ?, ?, ?, ?, (SELECT coalesce(max(finished_order), 0) + 1 FROM trial))",
                        (trial.trial_id, trial.cell_id, trial.repeat, trial.status, trial.model_dump_json()),
                    )
                    if trial.heat is not None:
                        db.execute("INSERT INTO heat VALUES (?, ?)", (trial.trial_id, trial.heat.model_dump_json()))
                    if any(traces.values()):
                        # Only from here on: before, a file of this name would be that of a finished trial.
                        undo.callback(path.unlink, missing_ok=True)
                        write_traces(path, traces, _window(trial), trial.marks)
                undo.pop_all()
            self._checkpoint()
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
            with transaction(self._connection) as db:
                db.executemany(
                    "INSERT OR IGNORE INTO sample VALUES (?, ?, ?, ?)",
                    [(workload, model, i, sample.model_dump_json()) for i, sample in enumerate(samples)],
                )
            self._checkpoint()
        except sqlite3.Error as error:
            raise StoreError(
                f"the samples of {workload} could not be written to {self.directory} ({error}); make room and go on"
                " with --resume"
            ) from error

    def _checkpoint(self) -> None:
        """Writes the WAL into the main file, as far as readers let it; the rest follows with the next trial."""
        try:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error as error:
            log.warning("%s: the last trial stands in the -wal file alone (%s)", self.directory / DATABASE, error)

    def _remove_orphans(self) -> None:
        known = {row[0] for row in self._connection.execute("SELECT trial_id FROM trial")}
        orphans = [p for p in _trace_files(self.directory) if p.stem not in known]
        if len(orphans) > 1:
            # A kill leaves one: that of the trial that was being written.
            raise StoreError(_without_rows(self.directory, orphans))
        for path in (*orphans, *(self.directory / "traces").glob("*.tmp")):
            path.unlink(missing_ok=True)
        # Tables and reports appear under hidden names before they are renamed.
        for path in (*self.directory.glob(".*.csv.*"), *self.directory.glob(".*.html.*")):
            path.unlink(missing_ok=True)

    # --- reading ---

    def finished(self) -> set[tuple[str, int]]:
        """(cell_id, repeat) of every trial that is there."""
        with damage_told(self.directory / DATABASE):
            return {(c, r) for c, r in self._connection.execute("SELECT cell_id, repeat FROM trial")}

    def info(self) -> RunInfo:
        with damage_told(self.directory / DATABASE):
            row = self._connection.execute("SELECT record FROM run").fetchone()
            if row is None:
                raise StoreError(f"{self.directory}: the run was never started; remove the folder and run again")
            return RunInfo.model_validate_json(row[0])

    def trials(self) -> tuple[Trial, ...]:
        """In the order in which they were finished."""
        with damage_told(self.directory / DATABASE), _no_collection():
            rows = self._connection.execute("SELECT record FROM trial ORDER BY finished_order")
            return tuple(without_fields_set(Trial.model_validate_json(r)) for (r,) in rows)

    def samples(self) -> dict[tuple[str, str], tuple[Sample, ...]]:
        """By workload and model. Empty for runs from before they were kept."""
        found: dict[tuple[str, str], list[Sample]] = {}
        with damage_told(self.directory / DATABASE):
            query = "SELECT workload, model, record FROM sample ORDER BY workload, model, position"
            for workload, model, record in self._connection.execute(query):
                found.setdefault((workload, model), []).append(Sample.model_validate_json(record))
        return {key: tuple(own) for key, own in found.items()}

    def data(self) -> RunData:
        with damage_told(self.directory / DATABASE):
            rows = self._connection.execute("SELECT record FROM cell ORDER BY position")
            cells = tuple(Cell.model_validate_json(r) for (r,) in rows)
        trials = self.trials()
        strays = {t.cell_id for t in trials} - {c.cell_id for c in cells}
        if strays:
            raise StoreError(damaged(self.directory / DATABASE, f"trials of a cell that is not there: {min(strays)}"))
        # Looked at once: tables and page ask for each trial several times.
        traced = {path.stem for path in _trace_files(self.directory)}
        return RunData(
            info=self.info(),
            cells=cells,
            trials=trials,
            load_traces=lambda trial_id: self.traces(trial_id) if trial_id in traced else (),
            load_heat=self.heat,
            samples=self.samples(),
        )

    def traces(self, trial_id: str, part: str = WINDOW) -> tuple[PowerTrace, ...]:
        """Raw traces of one part of a trial; empty where none were stored. Raises `TraceFileError`."""
        path = self._trace_path(trial_id)
        return read_traces(path, part) if path.is_file() else ()

    def heat(self, trial_id: str) -> ExpertHeat | None:
        """What a trial's routers chose; None where it was not kept. Raises `StoreError`."""
        with damage_told(self.directory / DATABASE):
            if not has_table(self._connection, "heat"):
                return None
            row = self._connection.execute("SELECT record FROM heat WHERE trial_id = ?", (trial_id,)).fetchone()
            return None if row is None else ExpertHeat.model_validate_json(row[0])

    def _trace_path(self, trial_id: str) -> Path:
        return self.directory / "traces" / f"{trial_id}.parquet"


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Records hold no cycles, and looking for them among a million takes longer than reading these.

    They stay for long: no later collection looks through them either.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def check_free_space(directory: Path) -> None:
    """Raises `StoreError` when the disk under a (perhaps not yet existing) folder has too little room."""
    existing = next(p for p in (directory.absolute(), *directory.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < FREE_BYTES_NEEDED:
        raise StoreError(
            f"only {free / 1e6:.0f} MB are free on the disk of {directory}, {FREE_BYTES_NEEDED / 1e6:.0f} MB are"
            " needed; make room or name a folder on another disk with --out"
        )


def check_holds_run(directory: Path) -> None:
    """Raises `StoreError` where there is nothing to look at or to go on with."""
    if Store.holds_run(directory):
        return
    if lost := _trace_files(directory):
        raise StoreError(_without_rows(directory, lost))
    absent = "" if (directory / DATABASE).is_file() else f" ({DATABASE} is absent)"
    raise StoreError(f"{directory} holds no run{absent}; give the folder that `joulebench run` wrote")


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


def _trace_files(directory: Path) -> list[Path]:
    return sorted((directory / "traces").glob("*.parquet"))


def _without_rows(directory: Path, lost: Sequence[Path]) -> str:
    many = f"{len(lost)} trace files" if len(lost) > 1 else "a trace file"
    return (
        f"{directory / 'traces'} holds {many} of trials that {DATABASE} does not hold ({lost[0].name}); was it emptied,"
        f" or its {DATABASE}-wal lost? Put back the {DATABASE} and {DATABASE}-wal of then, or name another --out"
    )


def _window(trial: Trial) -> tuple[float, float] | None:
    if trial.window_start_s is None or trial.window_end_s is None:
        return None
    return trial.window_start_s, trial.window_end_s
