"""Tables that a plan asks for: arms down, the values of one swept key across, and in each cell how many times faster
the arm is than one that the plan names. So a source's own table is drawn from a run of the plan.

A cell is told as everywhere: with its interval, and without a ratio where two arms were not asked the same, came to be
in unlike ways, or were computed on unlike roads. An arm whose key is not swept has the same figure in every column.
Each device and workload has a table of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd
from pydantic import Field

from results.ratios import Ratio
from results.records import Cell, Method, Phase, Record
from results.report.against import Against, against
from results.report.arm_figures import ArmFigure, ArmFigures
from results.report.arms import SWEPT, arms_of
from results.runs import RunData

PHASE_WORDS: dict[Phase, str] = {"all": "end to end", "prefill": "prefill", "decode": "decode"}
NO_CELL = "no such arm ran on this device"


class TableSpec(Record):
    """A `[[table]]` of a plan."""

    title: str = Field(min_length=1, max_length=200)
    over: str = Field(min_length=1, max_length=200)
    """The arm whose time is divided by that of the others: the one that has 1 everywhere."""
    phase: Literal["all", "prefill", "decode"] = "all"
    """Of each request, the seconds that are compared."""
    rows: tuple[str, ...] | None = Field(None, min_length=1, max_length=200)
    """Arms in their order; all of the plan where it is not given."""
    columns: str | None = Field(None, min_length=1, max_length=200)
    """The last name of a path that the sweep gives values, which are the columns; one column where it is not given."""


@dataclass(frozen=True)
class AskedCell:
    """seconds: of a request. ratio: how many times faster than `over`."""

    seconds: float | None
    method: Method
    ratio: Ratio | None
    is_base: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class AskedTable:
    """Of one device and workload. columns: as text. rows: by arm, a cell for each column."""

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
        self._arms = arms_of(run.cells)

    def tables(self) -> Iterator[AskedTable]:
        """Those in which an arm has a figure."""
        spec, cells = self._spec, self._run.cells
        names = spec.rows or tuple(dict.fromkeys(map(_name, cells)))
        for device, workload in dict.fromkeys((cell.device, cell.workload) for cell in cells):
            here = [cell for cell in cells if (cell.device, cell.workload) == (device, workload)]
            columns = [(value, _of(here, spec.columns, value)) for value in _values(here, spec.columns)]
            columns = columns or [(PHASE_WORDS[spec.phase], here)]
            rows = tuple((name, tuple(self._cell(name, own, workload) for _, own in columns)) for name in names)
            if any(cell.seconds is not None for _, found in rows for cell in found):
                yield AskedTable(spec, device, workload, tuple(label for label, _ in columns), rows)

    def _cell(self, name: str, cells: Sequence[Cell], workload: str) -> AskedCell:
        figure, base = (self._figure(one, cells, workload) for one in (name, self._spec.over))
        if isinstance(figure, str):
            return AskedCell(None, "missing", None, reason=figure)
        if figure.value is None or isinstance(base, str):
            reason = base if isinstance(base, str) else figure.reason
            return AskedCell(figure.value, figure.method, None, reason=reason)
        if figure.arm == base.arm:
            return AskedCell(figure.value, figure.method, None, is_base=True)
        found: Against = against(base, figure)
        return AskedCell(figure.value, figure.method, found.ratio, reason=found.reason)

    def _figure(self, name: str, cells: Sequence[Cell], workload: str) -> ArmFigure | str:
        """Or why there is none."""
        own = [cell for cell in cells if name in (cell.engine, _name(cell))]
        if len(own) == 1:
            return self._figures.figure(self._arms[own[0].cell_id], own, [workload], "time", self._spec.phase)
        if not own:
            return NO_CELL
        return f"{len(own)} arms are called so here ({', '.join(c.engine for c in own)}); name one"


def _name(cell: Cell) -> str:
    """Without what a sweep set."""
    return cell.engine.partition(SWEPT)[0]


def _values(cells: Sequence[Cell], key: str | None) -> list[str]:
    """Of the sweep, in its order."""
    found = [] if key is None else [_swept(cell).get(key) for cell in cells]
    return [value for value in dict.fromkeys(found) if value is not None]


def _of(cells: Sequence[Cell], key: str | None, value: str) -> list[Cell]:
    """Whose key the sweep gave this value, or none."""
    return [cell for cell in cells if key is None or _swept(cell).get(key, value) == value]


def _swept(cell: Cell) -> dict[str, str]:
    """What a sweep set, by the last name of its path."""
    pairs = cell.engine.partition(SWEPT)[2].removesuffix("]").split(",")
    return {key: value for key, equals, value in (pair.partition("=") for pair in pairs) if equals}


ASKED_COLUMNS = (
    "title", "device", "workload", "phase", "arm", "column", "seconds", "method", "over", "speed_up", "ci_low",
    "ci_high", "n", "reason",
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
                rows.append((*told, *figures, ratio.n or None, cell.reason or ratio.reason))
    frame = pd.DataFrame(rows, columns=list(ASKED_COLUMNS))
    return frame.astype(dict.fromkeys(("seconds", "speed_up", "ci_low", "ci_high"), "float64") | {"n": "Int64"})
