"""Tables that a plan asks for: arms down, the values of swept keys across, and in each cell how many times faster the
arm is than one that the plan names. So a source's own table is drawn from a run of the plan.

A cell is told as everywhere: with its interval, and without a ratio where two arms were not asked the same, came to be
in unlike ways, or were computed on unlike roads. An arm whose key is not swept has the same figure in every column.
Each device and workload has a table of its own. A key of workloads brings those that differ in it alone into one table,
and leaves out workloads that do not have it. Where experts fit nowhere the cell holds "N.S." or "oom", as in a source.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Literal

import pandas as pd
from pydantic import Field

from results.cells import left_out_reason, no_room, trials_of
from results.ratios import Ratio
from results.records import Cell, Method, Phase, Record
from results.report.against import Against, against, other_roads
from results.report.arm_figures import ArmFigure, ArmFigures
from results.report.arms import arms_of
from results.runs import RunData
from results.swept import parts_of, swept_values

PHASE_WORDS: dict[Phase, str] = {"all": "end to end", "prefill": "prefill", "decode": "decode"}
BETWEEN_VALUES = " / "
NO_CELL = "no such arm ran on this device"


ColumnKey = Annotated[str, Field(min_length=1, max_length=200)]


class TableSpec(Record):
    """A `[[table]]` of a plan."""

    title: str = Field(min_length=1, max_length=200)
    over: str = Field(min_length=1, max_length=200)
    """The arm whose time is divided by that of the others: the one that has 1 everywhere."""
    phase: Literal["all", "prefill", "decode"] = "all"
    """Of each request, the seconds that are compared."""
    rows: tuple[str, ...] | None = Field(None, min_length=1, max_length=200)
    """Arms in their order; all of the plan where it is not given."""
    columns: ColumnKey | Annotated[tuple[ColumnKey, ...], Field(min_length=1, max_length=4)] | None = None
    """The last name of a path to an engine's or a workload's key that the sweep gives values, which are the columns; of
    several such names the combinations of their values. One column where it is not given."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the columns."""
        return (self.columns,) if isinstance(self.columns, str) else self.columns or ()


@dataclass(frozen=True)
class AskedCell:
    """seconds: of a request. ratio: how many times faster than `over`. result: "N.S." or "oom" in the place of both."""

    seconds: float | None
    method: Method
    ratio: Ratio | None
    is_base: bool = False
    reason: str | None = None
    result: str | None = None


@dataclass(frozen=True)
class AskedTable:
    """Of one device, and of one workload or of several that differ in the columns' keys. workload: their name without
    these keys, and of several models that of the model. columns: as text. rows: by arm, a cell for each column."""

    spec: TableSpec
    device: str
    workload: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[AskedCell, ...]], ...]

    @property
    def methods(self) -> tuple[Method, ...]:
        """How its seconds came to be."""
        found = dict.fromkeys(cell.method for _, cells in self.rows for cell in cells if cell.seconds is not None)
        return tuple(found)


def asked_tables(run: RunData, frame: pd.DataFrame, operations: pd.DataFrame) -> list[AskedTable]:
    """frame: the run's tidy table. operations: of `operations_table`."""
    specs = [TableSpec.model_validate(raw) for raw in run.info.plan.get("table", ())]
    if not specs:
        return []
    figures = ArmFigures(run, frame, operations)
    return [table for spec in specs for table in _Drawn(run, figures, spec).tables()]


class _Drawn:
    """One table of a plan, on every device and workload."""

    def __init__(self, run: RunData, figures: ArmFigures, spec: TableSpec) -> None:
        self._run, self._figures, self._spec = run, figures, spec
        self._arms, self._trials = arms_of(run.cells), trials_of(run)

    def tables(self) -> Iterator[AskedTable]:
        """Those in which an arm has a figure, or came to have no room."""
        spec, keys = self._spec, self._spec.keys
        names = spec.rows or tuple(dict.fromkeys(_name(cell.engine) for cell in self._run.cells))
        for (device, workload), here in self._groups().items():
            columns = _columns(here, keys) or [(PHASE_WORDS[spec.phase], here)]
            rows = tuple((name, tuple(self._cell(name, own) for _, own in columns)) for name in names)
            if any(cell.seconds is not None or cell.result for _, found in rows for cell in found):
                yield AskedTable(spec, device, workload, tuple(label for label, _ in columns), rows)

    def _groups(self) -> dict[tuple[str, str], list[Cell]]:
        """Cells of one table, by device and workload without what the columns tell."""
        keys = self._spec.keys
        across = {key for cell in self._run.cells for key in _swept(cell.workload) if key in keys}
        has_models = len({cell.model for cell in self._run.cells}) > 1
        found: dict[tuple[str, str], list[Cell]] = {}
        for cell in self._run.cells:
            if across <= _swept(cell.workload).keys():
                of_model = f", {cell.model}" if has_models else ""
                found.setdefault((cell.device, _without(cell.workload, across) + of_model), []).append(cell)
        return found

    def _cell(self, name: str, cells: Sequence[Cell]) -> AskedCell:
        own = [cell for cell in cells if name in (cell.engine, _name(cell.engine))]
        trials = self._trials[own[0].cell_id] if len(own) == 1 else []
        if (result := no_room(trials)) is not None:
            return AskedCell(None, "missing", None, reason=left_out_reason(trials, with_errors=True), result=result)
        figure, base = (self._figure(one, cells) for one in (name, self._spec.over))
        if isinstance(figure, str):
            return AskedCell(None, "missing", None, reason=figure)
        if figure.value is None or isinstance(base, str):
            reason = base if isinstance(base, str) else figure.reason
            return AskedCell(figure.value, figure.method, None, reason=reason)
        if figure.arm == base.arm:
            return AskedCell(figure.value, figure.method, None, is_base=True)
        found: Against = against(base, figure)
        # A road is told as the arm's own beside that of `over`: so one note serves all arms that share it.
        reason = found.reason if found.ratio is not None else other_roads(figure, base) or found.reason
        return AskedCell(figure.value, figure.method, found.ratio, reason=reason)

    def _figure(self, name: str, cells: Sequence[Cell]) -> ArmFigure | str:
        """Or why there is none."""
        own = [cell for cell in cells if name in (cell.engine, _name(cell.engine))]
        if len(own) == 1:
            workload = own[0].workload
            return self._figures.figure(self._arms[own[0].cell_id], own, [workload], "time", self._spec.phase)
        if not own:
            return NO_CELL
        return f"{len(own)} arms are called so here ({', '.join(c.engine for c in own)}); name one"


def _columns(cells: Sequence[Cell], keys: Sequence[str]) -> list[tuple[str, list[Cell]]]:
    """Each combination of the keys' values that a cell has, in the order of the sweep; an engine without a key is in
    all columns. None where no cell has any."""
    swept = [_swept(cell.workload) | _swept(cell.engine) for cell in cells]
    values = [list(dict.fromkeys(own[key] for own in swept if key in own)) for key in keys]
    found = []
    for combination in product(*values) if keys else ():
        chosen = dict(zip(keys, combination, strict=True))
        own_cells = [
            cell
            for cell, own in zip(cells, swept, strict=True)
            if all(own.get(key, value) == value for key, value in chosen.items())
        ]
        if own_cells:
            found.append((BETWEEN_VALUES.join(combination), own_cells))
    return found


def _name(label: str) -> str:
    """Of an arm, without what a sweep set."""
    return parts_of(label).name


def _without(workload: str, keys: Container[str]) -> str:
    """Its label without what a sweep gave these keys: "w[length=64,limit=2]#1" is "w[limit=2]#1" without length."""
    name, swept, number = parts_of(workload)
    kept = ",".join(f"{key}={value}" for key, value in swept_values(swept).items() if key not in keys)
    return f"{name}[{kept}]{number}" if kept else name + number


def _swept(label: str) -> dict[str, str]:
    """What a sweep set of an arm or a workload, by the last name of its path."""
    return swept_values(parts_of(label).values)


ASKED_COLUMNS = (
    "title", "device", "workload", "phase", "arm", "column", "seconds", "method", "over", "speed_up", "ci_low",
    "ci_high", "n", "result", "reason",
)  # fmt: skip


def asked_rows(tables: Sequence[AskedTable]) -> pd.DataFrame:
    """One row a cell, for a file."""
    rows = []
    for table in tables:
        for name, cells in table.rows:
            for column, cell in zip(table.columns, cells, strict=True):
                ratio = Ratio(1.0) if cell.is_base else cell.ratio or Ratio(None)
                told = table.spec.title, table.device, table.workload, table.spec.phase, name, column
                figures = cell.seconds, cell.method, table.spec.over, ratio.value, ratio.low, ratio.high
                rows.append((*told, *figures, ratio.n or None, cell.result, cell.reason or ratio.reason))
    frame = pd.DataFrame(rows, columns=list(ASKED_COLUMNS))
    return frame.astype(dict.fromkeys(("seconds", "speed_up", "ci_low", "ci_high"), "float64") | {"n": "Int64"})
