"""The run folder: an SQLite index in WAL mode, and one Parquet file of raw power traces a trial.

    RUN/run.sqlite             meta, run, cell, trial, replaced, heat, sample; each row sealed with a digest
    RUN/traces/TRIAL.parquet   raw readings of every meter in the trial's window and its idle baselines

A trial is committed whole or not at all: in one transaction its rows are inserted, its trace file is written under a
temporary name, flushed to disk and renamed, and they are committed. A crash before the commit leaves a file without a
row, which the next `open` removes. After each commit the WAL is written into the main file, so that a copy of
`run.sqlite` alone, or a lost WAL, costs no finished trial.
At most one finished trial stands for a (cell, repeat): the database holds it by a unique index. One that failed
because its device was lost gives its place to the one that is measured for it, in one transaction, and is kept.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from results.database import (
    DATABASE,
    OWNER_ONLY,
    READ_FROM_VERSION,
    SEALED_FROM_VERSION,
    StoreError,
    UnwrittenError,
    check_whole,
    damage_told,
    damaged,
    holds_run,
    keep_sitting,
    keep_unfinished,
    migrate,
    opened_for_reading,
    opened_for_writing,
    schema_version,
    transaction,
    unusable,
)
from results.disk_errors import remedy_of
from results.lost_trials import give_place, last_order
from results.records import Cell, PowerTrace, Sample
from results.run_folders import (
    OWN_NAMES,
    check_free_space,
    check_holds_run,
    check_is_folder,
    remove_new,
    trace_files,
    without_rows,
)
from results.runs import RunInfo
from results.sealed_rows import BrokenSealError, gone_trials, insert, seal_trial
from results.stored_run import NO_TRACE_FILE, StoredRun
from results.trace_files import write_traces
from results.trials import Trial

__all__ = ["DATABASE", "Store", "StoreError"]

log = logging.getLogger(__name__)


class Store(StoredRun):
    """One run folder, held by one process at a time."""

    def __init__(
        self, directory: Path, connection: sqlite3.Connection, lock: FileLock | None, sealed: bool = True
    ) -> None:
        super().__init__(directory, connection, sealed)
        self._lock = lock

    # --- opening ---

    @classmethod
    def create(cls, directory: Path, info: RunInfo, cells: Iterable[Cell]) -> Store:
        """A new run folder. Nothing of it is left behind when it fails."""
        check_is_folder(directory)
        found = {p.name for p in directory.iterdir()} if directory.is_dir() else set()
        strangers = sorted(found - OWN_NAMES)
        if strangers:
            raise StoreError(
                f"{directory} holds other files ({', '.join(strangers[:3])}); name an empty or new folder with --out"
            )
        lost = trace_files(directory)
        if lost and not cls.holds_run(directory):
            raise StoreError(without_rows(directory, lost))
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
                    insert(db, "run", (info.run_id, info.model_dump_json()))
                    for i, cell in enumerate(cells):
                        insert(db, "cell", (cell.cell_id, i, cell.model_dump_json()))
                store._checkpoint()
                undo.pop_all()
        except (OSError, sqlite3.Error) as error:
            # Not on a StoreError: then the folder is another process's, or holds another run.
            remove_new(directory, found, made)
            raise UnwrittenError(
                f"cannot create the run folder {directory}: {error}; name a folder that can be written with --out"
            ) from error
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
    def open(cls, directory: Path, migrates: bool = True) -> Store:
        """An existing run folder, for going on with it. Removes what a killed process left half-written.

        migrates: False where `migrate` follows, before anything is written.
        """
        check_holds_run(directory)
        with contextlib.ExitStack() as undo:
            with _going_on(directory):
                store = cls._connect(directory, migrates)
                undo.callback(store.close)
                store._remove_orphans()
            undo.pop_all()
        return store

    def migrate(self) -> None:
        """To the newest schema. Raises `StoreError`."""
        with _going_on(self.directory):
            migrate(self._connection, self.directory / DATABASE)
        self._sealed = True

    @classmethod
    def view(cls, directory: Path) -> Store:
        """For reading, also while another process runs; brings an old schema up to date first."""
        check_holds_run(directory)
        path = directory / DATABASE
        with damage_told(path), contextlib.ExitStack() as undo:
            connection = opened_for_reading(path)
            undo.callback(connection.close)
            version = schema_version(connection, path)
            if version >= READ_FROM_VERSION:
                check_whole(connection, path)
                undo.pop_all()
                return cls(directory, connection, None, sealed=version >= SEALED_FROM_VERSION)
        cls.open(directory).close()
        return cls.view(directory)

    @classmethod
    def _connect(cls, directory: Path, migrates: bool = True) -> Store:
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
            path = directory / DATABASE
            connection = opened_for_writing(path, migrates)
            undo.callback(connection.close)
            sealed = schema_version(connection, path) >= SEALED_FROM_VERSION
            undo.pop_all()
        return cls(directory, connection, lock, sealed)

    def close(self) -> None:
        super().close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- writing ---

    def add_trial(self, trial: Trial, traces: Mapping[str, Sequence[PowerTrace]]) -> None:
        """Commits one trial with its traces (by part: `WINDOW`, `IDLE_BEFORE`, `IDLE_AFTER`). Raises `StoreError`."""
        self.add_trials([(trial, traces)])

    def add_trials(self, trials: Sequence[tuple[Trial, Mapping[str, Sequence[PowerTrace]]]]) -> None:
        """Commits trials that finished together: all of them or none. Raises `StoreError`."""
        check_free_space(self.directory, is_begun=True)
        try:
            with contextlib.ExitStack() as undo:
                with transaction(self._connection) as db:
                    order = last_order(db)
                    for i, (trial, traces) in enumerate(trials, start=1):
                        self._insert(db, trial, traces, order + i, undo)
                undo.pop_all()
            self._checkpoint()
        except sqlite3.IntegrityError as error:
            raise StoreError(
                f"{_told(trials, with_cells=True)} does not fit what {self.directory} holds ({error}); a finished trial"
                " is never replaced"
            ) from error
        except BrokenSealError as error:
            raise StoreError(damaged(self.directory / DATABASE, error)) from error
        except (OSError, sqlite3.Error) as error:
            kept = f"finished trials are kept: {remedy_of(error)} and go on with --resume"
            if not (self.directory / DATABASE).exists():
                kept = "the run's folder was removed or renamed meanwhile, and its finished trials with it"
            raise UnwrittenError(
                f"{_told(trials)} could not be written to {self.directory} ({error}); {kept}"
            ) from error

    def _insert(
        self,
        db: sqlite3.Connection,
        trial: Trial,
        traces: Mapping[str, Sequence[PowerTrace]],
        order: int,
        undo: contextlib.ExitStack,
    ) -> None:
        path = self._trace_path(trial.trial_id)
        named = (trial.trial_id, trial.cell_id, trial.repeat, trial.status)
        give_place(db, trial.cell_id, trial.repeat)
        insert(db, "trial", (*named, trial.model_dump_json(), order, NO_TRACE_FILE))
        if trial.heat is not None:
            insert(db, "heat", (trial.trial_id, trial.heat.model_dump_json()))
        if any(traces.values()):
            # Only from here on: before, a file of this name would be that of a finished trial.
            undo.callback(path.unlink, missing_ok=True)
            sha256 = write_traces(path, traces, _window(trial), trial.marks)
            seal_trial(db, trial.trial_id, sha256)

    def add_samples(self, workload: str, model: str, samples: Sequence[Sample]) -> None:
        """Commits what a workload asks of a model, once: what is there already stays. Raises `StoreError`."""
        check_free_space(self.directory, is_begun=True)
        try:
            with transaction(self._connection) as db:
                for i, sample in enumerate(samples):
                    insert(db, "sample", (workload, model, i, sample.model_dump_json()), or_ignore=True)
            self._checkpoint()
        except sqlite3.Error as error:
            raise UnwrittenError(
                f"the samples of {workload} could not be written to {self.directory} ({error});"
                f" {remedy_of(error)} and go on with --resume"
            ) from error

    def note_unfinished(self, n_trials: int | None) -> None:
        """Readers are told that more is to come, until None says that all is there. n_trials: at most, with those that
        are there. Raises `StoreError`."""
        self._note(lambda db: keep_unfinished(db, n_trials))

    def note_sitting(self, sitting: int) -> None:
        """That it begins, for some of the devices. Raises `StoreError`."""
        self._note(lambda db: keep_sitting(db, sitting))

    def _note(self, keep: Callable[[sqlite3.Connection], None]) -> None:
        try:
            with transaction(self._connection) as db:
                keep(db)
            self._checkpoint()
        except sqlite3.Error as error:
            raise UnwrittenError(
                f"{self.directory / DATABASE} cannot be written ({error}); {remedy_of(error)} and go on with --resume"
            ) from error

    def _checkpoint(self) -> None:
        """Writes the WAL into the main file, as far as readers let it; the rest follows with the next trial."""
        try:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error as error:
            log.warning("%s: the last trial stands in the -wal file alone (%s)", self.directory / DATABASE, error)

    def _remove_orphans(self) -> None:
        known = {row[0] for row in self._connection.execute("SELECT trial_id FROM trial")}
        orphans = [p for p in trace_files(self.directory) if p.stem not in known]
        if gone_trials(self._connection):
            # All that may be left of a trial that was finished. Each kill adds one that stays too.
            orphans = []
        if len(orphans) > 1:
            # A kill leaves one: that of the trial that was being written.
            raise StoreError(without_rows(self.directory, orphans))
        for path in (*orphans, *(self.directory / "traces").glob("*.tmp")):
            path.unlink(missing_ok=True)
        # Tables and reports appear under hidden names before they are renamed.
        for path in (*self.directory.glob(".*.csv.*"), *self.directory.glob(".*.html.*")):
            path.unlink(missing_ok=True)


def _told(trials: Sequence[tuple[Trial, object]], with_cells: bool = False) -> str:
    """In words, of one or many."""
    trial, _ = trials[0]
    cell = f" (trial {trial.repeat + 1} of cell {trial.cell_id})" if with_cells else ""
    return f"trial {trial.trial_id}{cell}" + (f" and {len(trials) - 1} more" if len(trials) > 1 else "")


def _window(trial: Trial) -> tuple[float, float] | None:
    if trial.window_start_s is None or trial.window_end_s is None:
        return None
    return trial.window_start_s, trial.window_end_s


@contextlib.contextmanager
def _going_on(directory: Path) -> Iterator[None]:
    """Turns what a run folder that is gone on with raises into a `StoreError`."""
    try:
        yield
    except OSError as error:
        raise UnwrittenError(
            f"{directory} cannot be written ({error.strerror or error}); {remedy_of(error)}, or go on with a copy of it"
        ) from error
    except sqlite3.Error as error:
        raise unusable(directory / DATABASE, error) from error
