"""The headline tables: one a workload, arms by device, each figure with its interval or a note why it is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from results import tables
from results.asked import asked_alike, hashes_by_cell, shown
from results.cells import data_sources, left_out_reason, model_name, own_reason, trials_of, usable
from results.records import Phase, RunData, Trial
from results.report.arms import Arm
from results.units import format_interval, format_mean, format_number, si_scale

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of the headline: which rows of the tidy table it shows, and its unit there."""

    group: str
    title: str
    metric: str
    phase: Phase | None
    unit: str


LOAD_COLUMNS = (
    Column("Under load", "queueing", "queueing", None, "s"),
    Column("Under load", "TTFT + queueing", "ttft_from_arrival", "prefill", "s"),
    Column("Under load", "utilisation", "utilisation", None, "%"),
)
"""Where requests arrive by themselves."""
COLUMNS = (
    Column("Latency", "TTFT", "ttft", "prefill", "s"),
    Column("Latency", "TPOT", "tpot", "decode", "s"),
    Column("Latency", "E2E", "e2e", "all", "s"),
    Column("Speed", "decode", "throughput", "decode", "token/s"),
    Column("Energy per token", "prefill", "energy_per_token", "prefill", "J/token"),
    Column("Energy per token", "decode", "energy_per_token", "decode", "J/token"),
    Column("Energy per token", "all", "energy_per_token", "all", "J/token"),
    Column("Experts", "dropped", "drop_rate", None, "%"),
    Column("Experts", "padded", "pad_rate", None, "%"),
)


@dataclass(frozen=True)
class Entry:
    """One figure as text, and what stands below it in small.

    note: number of the note that says why it is missing, or what else to know.
    """

    text: str
    below: tuple[str, ...] = ()
    note: int | None = None


@dataclass(frozen=True)
class ArmRow:
    """failed_reason: set where no trial is usable; then there are no entries."""

    arm: Arm
    entries: tuple[Entry, ...]
    method: tuple[str, ...]
    trials: str
    failed_reason: str | None = None


@dataclass
class HeadlineTable:
    """groups: (title, number of columns). headings: (title, unit) of each column. devices: rows by device.

    notes: texts, numbered from 1. requests: whether all arms were asked the same, and its hash.
    """

    workload: str
    source: str | None
    models: list[str]
    groups: list[tuple[str, int]]
    headings: list[tuple[str, str]]
    requests: str
    devices: list[tuple[str, list[ArmRow]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> int:
        if text not in self.notes:
            self.notes.append(text)
        return self.notes.index(text) + 1


def headline_tables(run: RunData, frame: pd.DataFrame, arms: dict[str, Arm]) -> list[HeadlineTable]:
    rows: dict[str, list[Row]] = {cell.cell_id: [] for cell in run.cells}
    for record in frame.to_dict("records"):
        rows[record["cell"]].append({str(k): v for k, v in record.items()})
    trials, sources = trials_of(run), data_sources(run)
    hashes, alike = hashes_by_cell(run), asked_alike(run)
    found = []
    for workload, source in sources.items():
        cells = [c for c in run.cells if c.workload == workload]
        scored = _score_name([r for c in cells for r in rows[c.cell_id]])
        seen = {r["metric"] for c in cells for r in rows[c.cell_id]}
        loaded = [column for column in LOAD_COLUMNS if column.metric in seen]
        score = [Column("Score", scored, scored, None, "1")] if scored else []
        columns = [*COLUMNS[:3], *loaded, *COLUMNS[3:7], *score, *COLUMNS[7:]]
        scales = [_scale(column, [r for c in cells for r in rows[c.cell_id]]) for column in columns]
        headings = [(column.title, unit) for column, (_, unit) in zip(columns, scales, strict=True)]
        models = list(dict.fromkeys(model_name(c) for c in cells))
        groups = list(Counter(column.group for column in columns).items())
        same = next((hashes[c.cell_id] for c in cells if hashes[c.cell_id]), ())
        requests = shown(same) if alike[workload] else "the arms were not asked the same requests"
        table = HeadlineTable(workload, source, models, groups, headings, requests)
        for device in dict.fromkeys(c.device for c in cells):
            own = [c for c in cells if c.device == device]
            table.devices.append(
                (
                    device,
                    [
                        _arm_row(
                            table,
                            arms[c.cell_id],
                            columns,
                            scales,
                            rows[c.cell_id],
                            trials[c.cell_id],
                            None if alike[workload] else shown(hashes[c.cell_id]),
                        )
                        for c in own
                    ],
                )
            )
        found.append(table)
    return found


def _arm_row(
    table: HeadlineTable,
    arm: Arm,
    columns: Sequence[Column],
    scales: Sequence[tuple[float, str]],
    rows: Sequence[Row],
    trials: Sequence[Trial],
    asked: str | None,
) -> ArmRow:
    """asked: what marks an arm whose requests were not those of the others."""
    good = usable(trials)
    counts = {
        "failed": sum(t.status == "failed" for t in trials),
        "left out": sum(t.status == "ok" and bool(t.marks) for t in trials),
    }
    counted = ", ".join([f"{len(good)} ok", *(f"{n} {what}" for what, n in counts.items() if n)])
    counted = f"{counted}; {asked}" if asked else counted
    if not good:
        return ArmRow(arm, (), (), counted, left_out_reason(trials, with_errors=True) or "no trial was run")
    rows = [r | {"reason": own_reason(r["reason"], trials)} for r in rows]
    entries = tuple(_entry(table, column, scale, rows) for column, (scale, _) in zip(columns, scales, strict=True))
    return ArmRow(arm, entries, _methods(rows), counted)


def _entry(table: HeadlineTable, column: Column, scale: float, rows: Sequence[Row]) -> Entry:
    same = [r for r in rows if r["metric"] == column.metric and (r["phase"] or None) == column.phase]
    if not same:
        return Entry("missing", note=table.note(f"{column.title}: nothing was recorded"))
    row, *others = same
    if pd.isna(row["mean"]):
        return Entry("missing", note=table.note(row["reason"] or "no reason was recorded"))
    mean = row["mean"] / scale
    unit = f" {row['unit']}" if row["unit"] != column.unit else ""
    also = [f"{r['meter'] or r['method']}: {format_number(r['mean'])} {r['unit']}" for r in others if r["n"]]
    note = table.note(f"also read by another meter or method: {'; '.join(also)}") if also else None
    if column.unit == "%":
        return Entry(format_number(mean), note=note)
    is_score = column.unit == "1"
    counted = f"n = {row['n']} items" if is_score else "n = 1"
    if pd.isna(row["ci_low"]):
        return Entry(format_number(mean) + unit, (counted,), note)
    low, high = row["ci_low"] / scale, row["ci_high"] / scale
    below = ("no spread" if low == high else format_interval(low, high), *([counted] if is_score else []))
    return Entry(format_mean(mean, low, high) + unit, below, note)


def _methods(rows: Sequence[Row]) -> tuple[str, ...]:
    """How time and energy came to be: "time measured", "energy modelled, cpu-sheet ± 20 %"."""
    first: dict[tuple[str, str | None], Row] = {}
    for row in rows:
        first.setdefault((row["metric"], row["phase"]), row)
    e2e, energy = first["e2e", "all"], first["energy_per_token", "all"]
    uncertainty = first["energy_uncertainty", "all"]["mean"]
    meter = f", {energy['meter']}" if energy["meter"] else ""
    spread = f" ± {uncertainty:.2g} %" if uncertainty == uncertainty else ""
    return f"time {e2e['method']}", f"energy {energy['method']}{meter}{spread}"


def _score_name(rows: Sequence[Row]) -> str | None:
    own = tables.accuracy_rows(pd.DataFrame(rows)) if rows else pd.DataFrame()
    return str(own["metric"].iloc[0]) if len(own) else None


def _scale(column: Column, rows: Sequence[Row]) -> tuple[float, str]:
    """One unit for the whole column, so that its numbers can be compared by eye."""
    means = [
        abs(r["mean"])
        for r in rows
        if r["metric"] == column.metric
        and (r["phase"] or None) == column.phase
        and r["unit"] == column.unit
        and not pd.isna(r["mean"])
    ]
    return si_scale(max(means, default=1.0), column.unit)
