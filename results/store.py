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
from typing import Any, Final

from filelock import FileLock, Timeout

from results.collection import no_collection
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
    kept_sitting,
    migrate,
    opened_for_reading,
    opened_for_writing,
    schema_version,
    told_gone,
    told_unfinished,
    transaction,
)
from results.expert_heat import ExpertHeat
from results.lost_trials import finished_places, give_place, last_order
from results.packed import Shared, packed
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
from results.runs import RunData, RunInfo
from results.sealed_rows import BrokenSealError, Table, gone_trials, has_table, insert, rows, seal_trial
from results.sittings import told_replaced
from results.trace_files import WINDOW, read_parts, read_traces, write_traces
from results.trials import Trial, without_fields_set
from results.wall_clock import told_set_back

__all__ = ["DATABASE", "Store", "StoreError"]

NO_TRACE_FILE: Final = ""

PACKED_FROM = 10_000
"""Trials of a run from which a report holds them packed."""

log = logging.getLogger(__name__)


class Store:
    """One run folder, held by one process at a time."""

    def __init__(
        self, directory: Path, connection: sqlite3.Connection, lock: FileLock | None, sealed: bool = True
    ) -> None:
        self.directory = directory
        self._connection = connection
        self._is_closed = False
        self._lock = lock
        self._sealed = sealed

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
        self._is_closed = True
        self._connection.close()
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
            kept = "finished trials are kept: make room and go on with --resume"
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
                f"the samples of {workload} could not be written to {self.directory} ({error}); make room and go on"
                " with --resume"
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
                f"{self.directory / DATABASE} cannot be written ({error}); make room and go on with --resume"
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

    # --- reading ---

    def finished(self) -> set[tuple[str, int]]:
        """(cell_id, repeat) of every trial that is there and need not be measured again."""
        with damage_told(self.directory / DATABASE):
            return finished_places(self._connection)

    def next_sitting(self) -> int:
        """Of the trials that a process measures which goes on from here: 0 where none are there."""
        with self._read("trial", "finished_order DESC LIMIT 1") as found:
            last = next(found, None)
            if last is None:
                return 0
            return 1 + max(Trial.model_validate_json(last["record"]).sitting, kept_sitting(self._connection))

    def info(self) -> RunInfo:
        with self._read("run", "run_id") as found:
            row = next(found, None)
            if row is None:
                raise StoreError(f"{self.directory}: the run was never started; remove the folder and run again")
            return RunInfo.model_validate_json(row["record"])

    def trials(self, is_packed: bool = False) -> tuple[Trial, ...]:
        """In the order in which they were finished. is_packed: in less memory, and slower to look at."""
        with self._read("trial", "finished_order") as found, no_collection():
            read = (without_fields_set(Trial.model_validate_json(row["record"])) for row in found)
            if not is_packed:
                return tuple(read)
            shared: Shared = {}
            return tuple(packed(trial, shared) for trial in read)

    def replaced(self) -> tuple[Trial, ...]:
        """Trials that a lost device failed and that others took the place of, in the order in which they ended."""
        if not has_table(self._connection, "replaced"):
            return ()
        with self._read("replaced", "finished_order") as found:
            return tuple(Trial.model_validate_json(row["record"]) for row in found)

    @property
    def n_trials(self) -> int:
        with damage_told(self.directory / DATABASE):
            (n,) = self._connection.execute("SELECT count(*) FROM trial").fetchone()
            return int(n)

    def samples(self) -> dict[tuple[str, str], tuple[Sample, ...]]:
        """By workload and model. Empty for runs from before they were kept."""
        samples: dict[tuple[str, str], list[Sample]] = {}
        with self._read("sample", "workload, model, position") as found:
            for row in found:
                own = samples.setdefault((row["workload"], row["model"]), [])
                own.append(Sample.model_validate_json(row["record"]))
        return {key: tuple(own) for key, own in samples.items()}

    def data(self, packed_from: int | None = None) -> RunData:
        """packed_from: with so many trials or more they are held packed, for those who only read them."""
        with self._read("cell", "position") as found:
            cells = tuple(Cell.model_validate_json(row["record"]) for row in found)
        trials = self.trials(packed_from is not None and self.n_trials >= packed_from)
        strays = {t.cell_id for t in trials} - {c.cell_id for c in cells}
        if strays:
            raise StoreError(damaged(self.directory / DATABASE, f"trials of a cell that is not there: {min(strays)}"))
        replaced = self.replaced()
        info = self.info()
        # Looked at once: tables and page ask for each trial several times.
        kept = self.trace_digests()
        with damage_told(self.directory / DATABASE):
            unfinished = told_unfinished(self._connection, sum(not t.is_lost for t in trials), info.is_of_fleet)
            gone = told_gone(gone_trials(self._connection))
        return RunData(
            info=info,
            cells=cells,
            trials=trials,
            load_traces=lambda trial_id: self._read_traces(trial_id, WINDOW, kept),
            load_parts=lambda i: read_parts(self._trace_path(i), kept[i]) if i in kept else {},
            load_heat=self._heat_for_a_run,
            samples=self.samples(),
            replaced=replaced,
            remarks=(*unfinished, *gone, *told_set_back(cells, trials), *told_replaced(cells, replaced)),
            is_unfinished=bool(unfinished),
        )

    def traces(self, trial_id: str, part: str = WINDOW) -> tuple[PowerTrace, ...]:
        """Raw traces of one part of a trial; empty where none were stored. Raises `TraceFileError`."""
        return self._read_traces(trial_id, part, self.trace_digests())

    def _read_traces(self, trial_id: str, part: str, kept: Mapping[str, str | None]) -> tuple[PowerTrace, ...]:
        return read_traces(self._trace_path(trial_id), part, kept[trial_id]) if trial_id in kept else ()

    def trace_digests(self) -> dict[str, str | None]:
        """Of the trace file of each trial that has one; None where it is there and its digest was not kept."""
        there: dict[str, str | None] = dict.fromkeys(path.stem for path in trace_files(self.directory))
        if not self._sealed:
            return there
        with damage_told(self.directory / DATABASE):
            query = "SELECT trial_id, traces_sha256 FROM trial WHERE traces_sha256 IS NOT NULL"
            kept = dict(self._connection.execute(query).fetchall())
        return {i: d for i, d in (there | kept).items() if d != NO_TRACE_FILE}

    @contextlib.contextmanager
    def _read(self, table: Table, order: str, trial_id: str | None = None) -> Iterator[Iterator[dict[str, Any]]]:
        """The rows of a table, or a trial's. Raises `StoreError` where one is not what was written, or no record."""
        with damage_told(self.directory / DATABASE, self._sealed):
            yield rows(self._connection, table, order, self._sealed, trial_id)

    def heat(self, trial_id: str) -> ExpertHeat | None:
        """What a trial's routers chose; None where it was not kept. Raises `StoreError`."""
        if not has_table(self._connection, "heat"):
            return None
        with self._read("heat", "trial_id", trial_id) as found:
            row = next(found, None)
            return None if row is None else ExpertHeat.model_validate_json(row["record"])

    def _heat_for_a_run(self, trial_id: str) -> ExpertHeat | None:
        """As traces are, it can be read of a run whose store is closed."""
        if not self._is_closed:
            return self.heat(trial_id)
        with Store.view(self.directory) as store:
            return store.heat(trial_id)

    def _trace_path(self, trial_id: str) -> Path:
        return self.directory / "traces" / f"{trial_id}.parquet"


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
            f"{directory} cannot be written ({error.strerror or error}); make it writable (chmod), make room,"
            " or go on with a copy of it"
        ) from error
    except sqlite3.Error as error:
        raise StoreError(damaged(directory / DATABASE, error)) from error
