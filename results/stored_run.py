"""What a run folder holds, read: `results.store` writes it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from results.collection import no_collection
from results.database import (
    DATABASE,
    StoreError,
    damage_told,
    damaged,
    kept_sitting,
    opened_for_reading,
    told_gone,
    told_unfinished,
)
from results.expert_heat import ExpertHeat
from results.lost_trials import finished_places
from results.packed import Shared, packed
from results.records import Cell, PowerTrace, Sample
from results.run_folders import trace_files
from results.runs import RunData, RunInfo
from results.sealed_rows import Table, gone_trials, has_table, rows
from results.sittings import told_replaced
from results.trace_files import WINDOW, read_parts, read_traces
from results.trials import Trial, without_fields_set
from results.wall_clock import told_set_back

NO_TRACE_FILE: Final = ""

PACKED_FROM = 10_000
"""Trials of a run from which a report holds them packed."""


class StoredRun:
    """The records and traces of one run folder, whose database is open."""

    def __init__(self, directory: Path, connection: sqlite3.Connection, sealed: bool = True) -> None:
        self.directory = directory
        self._connection = connection
        self._is_closed = False
        self._sealed = sealed

    def close(self) -> None:
        self._is_closed = True
        self._connection.close()

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

    def cells(self) -> tuple[Cell, ...]:
        with self._read("cell", "position") as found:
            return tuple(Cell.model_validate_json(row["record"]) for row in found)

    def data(self, packed_from: int | None = None) -> RunData:
        """packed_from: with so many trials or more they are held packed, for those who only read them."""
        cells = self.cells()
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
        path = self.directory / DATABASE
        with damage_told(path), contextlib.closing(opened_for_reading(path)) as connection:
            return StoredRun(self.directory, connection, self._sealed).heat(trial_id)

    def _trace_path(self, trial_id: str) -> Path:
        return self.directory / "traces" / f"{trial_id}.parquet"
