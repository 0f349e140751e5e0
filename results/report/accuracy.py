"""Accuracy beside energy, as the report shows it: a table for each workload and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from results.accuracy_energy import IS_REFERENCE
from results.metrics import FROM_ARRIVAL
from results.records import Cell
from results.report.arms import Arm
from results.report.figure_tables import Entry
from results.report.notes import Noted
from results.report.page_units import PageUnits
from results.runs import RunData
from results.units import format_error, format_interval, format_known, format_mean, format_number, format_p, signed

Row = dict[str, Any]
MAX_SCORES = 4
"""Scores of one workload that a table shows; further ones are in accuracy_energy.csv."""
HIGHER, LOWER = "more is better", "less is better"


@dataclass(frozen=True)
class ScoreEntries:
    value: Entry
    change: Entry


@dataclass(frozen=True)
class ArmRow:
    arm: Arm
    scores: tuple[ScoreEntries, ...]
    dropped: Entry
    padded: Entry
    energy: Entry
    energy_change: Entry
    ttft: Entry


@dataclass
class AccuracyTable(Noted):
    """headings: (score, which way is better). energy_unit, ttft_title and ttft_unit: of their columns. notes: numbered
    from 1."""

    workload: str
    device: str
    reference: str
    headings: list[tuple[str, str]]
    energy_unit: str
    ttft_title: str
    ttft_unit: str
    rows: list[ArmRow] = field(default_factory=list)
    warning: str | None = None

    @property
    def is_narrow(self) -> bool:
        """Whether changes stand below their values: with columns of their own the costs would be out of sight."""
        return len(self.headings) > 2


def accuracy_tables(
    run: RunData, compared: pd.DataFrame, arms: dict[str, Arm], units: PageUnits
) -> list[AccuracyTable]:
    """Of the workloads that are scored, by device. compared: `results.accuracy_energy` of the run."""
    rising = {s.metric: s.higher_is_better for t in run.trials for s in t.scores}
    return [_table(run, cells, rows, rising, arms, units) for cells, rows in _groups(run, compared) if _scores(rows)]


def _groups(run: RunData, compared: pd.DataFrame) -> list[tuple[list[Cell], list[Row]]]:
    """Cells of one workload on one device, with their rows."""
    by_cell: dict[str, list[Row]] = {cell.cell_id: [] for cell in run.cells}
    for record in compared.to_dict("records"):
        by_cell[record["cell"]].append({str(k): v for k, v in record.items()})
    keys = dict.fromkeys((c.workload, c.device) for c in run.cells)
    grouped = [[c for c in run.cells if (c.workload, c.device) == key] for key in keys]
    return [(cells, [r for c in cells for r in by_cell[c.cell_id]]) for cells in grouped]


def _scores(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(r["quantity"] for r in rows if r["n_of"] == "samples"))


# --- the table -------------------------------------------------------------------------------------------------------


def _table(
    run: RunData,
    cells: Sequence[Cell],
    rows: Sequence[Row],
    rising: dict[str, bool],
    arms: dict[str, Arm],
    units: PageUnits,
) -> AccuracyTable:
    scores = _scores(rows)[:MAX_SCORES]
    headings = [(score, HIGHER if rising.get(score, True) else LOWER) for score in scores]
    energy_scale, energy_unit = units.on(cells[0].device).of("energy_per_token", "all", "J/token")
    with_queue = any(row["quantity"] == FROM_ARRIVAL["ttft"] for row in rows)
    ttft_title, ttft = ("TTFT + queueing", FROM_ARRIVAL["ttft"]) if with_queue else ("TTFT", "ttft")
    ttft_scale, ttft_unit = units.on(cells[0].device).of(ttft, "prefill", "s")
    table = AccuracyTable(
        cells[0].workload, cells[0].device, _reference(run, cells, arms), headings, energy_unit, ttft_title, ttft_unit
    )
    if {c.model_note for c in cells} == {"random weights"}:
        table.warning = "The weights are random: scores, and their changes, say nothing about the method."
    for cell in cells:
        own: dict[str, Row] = {}
        for row in rows:
            if row["cell"] == cell.cell_id:
                own.setdefault(row["quantity"], row)
        energy = own.get("energy_per_token")
        table.rows.append(
            ArmRow(
                arms[cell.cell_id],
                tuple(ScoreEntries(_score(table, own.get(s)), _change(table, own.get(s), 1.0)) for s in scores),
                _plain(table, own.get("drop_rate")),
                _plain(table, own.get("pad_rate")),
                _cost(table, energy, energy_scale),
                _change(table, energy, energy_scale),
                _cost(table, own.get(ttft) or own.get("ttft"), ttft_scale),
            )
        )
    return table


def _reference(run: RunData, cells: Sequence[Cell], arms: dict[str, Arm]) -> str:
    by_id = {c.cell_id: c for c in run.cells}
    names = []
    for reference_id in dict.fromkeys(c.reference_id for c in cells):
        reference = by_id.get(reference_id or "")
        if reference is not None:
            elsewhere = f" on {reference.device}" if reference.device != cells[0].device else ""
            names.append(f"{arms[reference.cell_id].name} ({arms[reference.cell_id].technique}{elsewhere})")
    return ", ".join(names)


def _score(table: AccuracyTable, row: Row | None) -> Entry:
    if row is None or pd.isna(row["value"]):
        return _missing(table, row)
    stderr = "" if pd.isna(row["standard_error"]) else f"s.e. {format_number(row['standard_error'])}, "
    counted = f"{stderr}n = {row['n']}"
    if pd.isna(row["ci_low"]):
        return Entry(format_number(row["value"]), (counted,))
    low, high = row["ci_low"], row["ci_high"]
    interval = "no spread" if low == high else format_interval(low, high)
    return Entry(format_mean(row["value"], low, high), (interval, counted))


def _change(table: AccuracyTable, row: Row | None, scale: float) -> Entry:
    """Mean difference, its interval and test; "reference" where the row is the arm that others are compared with."""
    if row is None or pd.isna(row["value"]):
        return _missing(table, row)
    if row["change_reason"] == IS_REFERENCE:
        return Entry("reference")
    if pd.isna(row["change"]):
        return Entry("none", note=table.note(row["change_reason"]))
    change = row["change"] / scale
    if pd.isna(row["change_low"]):
        return Entry(signed(format_number(change)), note=table.note(row["change_reason"]))
    low, high = row["change_low"] / scale, row["change_high"] / scale
    interval = "no spread" if low == high else format_interval(low, high)
    below = (interval, ", ".join(filter(None, [format_p(row["p"]) if pd.notna(row["p"]) else "", _counted(row)])))
    # What these samples changed is exact, only what others would is not.
    text = format_number(change) if row["n_of"] == "samples" else format_mean(change, low, high)
    return Entry(signed(text), below, note=table.note(row["change_reason"]) if row["change_reason"] else None)


def _counted(row: Row) -> str:
    if row["n_of"] != "samples":
        return f"{row['n_pairs']} pairs"
    if pd.isna(row["n_answers"]):
        return f"{row['n_changed']} of {row['n_pairs']} changed"
    return f"{row['n_answers_changed']} of {row['n_answers']} answers to {row['n_pairs']} samples changed"


def _cost(table: AccuracyTable, row: Row | None, scale: float) -> Entry:
    if row is None or pd.isna(row["value"]):
        return _missing(table, row)
    value, below, error = row["value"] / scale, [f"{row['method']}"], None
    if not pd.isna(row["meter_uncertainty_percent"]):
        error = row["meter_uncertainty_percent"] / 100
        below = [f"{row['method']} {format_error(error)}"]
    if pd.isna(row["ci_low"]):
        return Entry(format_known(value, error), (*below, f"n = {row['n']}"))
    low, high = row["ci_low"] / scale, row["ci_high"] / scale
    interval = "no spread" if low == high else format_interval(low, high)
    return Entry(format_mean(value, low, high), (interval, *below))


def _plain(table: AccuracyTable, row: Row | None) -> Entry:
    return _missing(table, row) if row is None or pd.isna(row["value"]) else Entry(format_number(row["value"]))


def _missing(table: AccuracyTable, row: Row | None) -> Entry:
    return Entry("missing", note=table.note((row and row["reason"]) or "nothing was recorded"))
