"""All figures of a run: a table a subject and device, rows by workload, one unit a column over all of a device.

Each figure stands with its interval, or a note why it is missing or what else to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, get_args

import pandas as pd

from results.cells import counters_of, data_sources, left_out_reason, model_name, own_reason, trials_of, usable
from results.counters import COUNTERS, Table
from results.meter_units import see_unlike, unit_of
from results.records import Cell, Phase
from results.report.arms import Arm
from results.report.notes import Noted
from results.report.page_units import DeviceUnits, PageUnits
from results.runs import RunData
from results.same_requests import asked_alike, hashes_by_cell, shown
from results.trials import Trial
from results.units import (
    format_bytes,
    format_count,
    format_error,
    format_interval,
    format_known,
    format_mean,
    format_number,
)

Row = dict[str, Any]
Statistic = Literal["mean", "p50", "p90", "p99"]


@dataclass(frozen=True)
class Column:
    """Which rows of the tidy table a column shows, and its unit there. group: what stands over several columns."""

    group: str
    title: str
    metric: str
    phase: Phase | None
    unit: str
    statistic: Statistic = "mean"


def _percentiles(group: str, metric: str, phase: Phase | None) -> tuple[Column, ...]:
    statistics: tuple[Statistic, ...] = ("p50", "p90", "p99")
    return tuple(Column(group, statistic, metric, phase, "s", statistic) for statistic in statistics)


@dataclass(frozen=True)
class Subject:
    """about: how its figures came to be, where the method at the row's end does not say it."""

    title: str
    about: str
    columns: tuple[Column, ...]


def _counted(table: Table, group: str) -> tuple[Column, ...]:
    return tuple(Column(group, c.heading, c.metric, None, c.unit) for c in COUNTERS if c.table == table)


COUNTED = frozenset(c.metric for c in COUNTERS)
"""Figures of what ran, which is the same in every trial: they have no spread."""
SUBJECTS = (
    Subject(
        "Speed",
        "Prefill: prompt tokens that were computed, a second of prefill. Decode: tokens after the first, a second of "
        "decoding. Times are means over the requests of a trial.",
        (
            Column("Tokens a second", "prefill", "throughput", "prefill", "token/s"),
            Column("Tokens a second", "decode", "throughput", "decode", "token/s"),
            Column("Latency", "TTFT", "ttft", "prefill", "s"),
            Column("Latency", "TPOT", "tpot", "decode", "s"),
            Column("Latency", "E2E", "e2e", "all", "s"),
        ),
    ),
    Subject(
        "Achieved rates",
        "Derived: the products with the weights that a token needs, over the time of the phase; 2 FLOP a weight. "
        "Without padding, without attention over the tokens before, and of prefill without the head. Bytes: of the "
        "same weights as they are stored.",
        (
            Column("Operations a second", "prefill", "compute_rate", "prefill", "GFLOP/s"),
            Column("Operations a second", "decode", "compute_rate", "decode", "GFLOP/s"),
            Column("Weights read", "decode", "weight_read_rate", "decode", "GB/s"),
        ),
    ),
    Subject(
        "Experts",
        "Counted in the window: of all routed pairs of token and expert, the dropped; of all rows computed, those "
        "without a token; calls of experts, experts whose weights a call loaded, bytes of weights that were moved.",
        _counted("Experts", "Experts"),
    ),
    Subject(
        "Padding", "Rows of padding that were computed and that no transfer brought in.", _counted("Padding", "Rows")
    ),
    Subject("Exchanges", "Bytes of activations that units sent each other.", _counted("Exchanges", "Units")),
    Subject(
        "Cache of experts",
        "Of the experts called, those whose weights lay where they were computed.",
        _counted("Cache of experts", "Cache"),
    ),
    Subject(
        "Prefetched experts",
        "Experts whose weights were fetched for a later layer; of these, the ones that nothing called before they left "
        "their slot or the request ended.",
        _counted("Prefetched experts", "Prefetch"),
    ),
    Subject(
        "Predicted experts",
        "Of the routed pairs, those whose experts a layer before had guessed at; and of these, the ones whose expert "
        "was among the guessed (recall@k): what the router chose, whatever was executed.",
        _counted("Predicted experts", "Predictions"),
    ),
    Subject(
        "Copied experts",
        "Of the bytes that were to move, those that this engine really copied; 0 where moves are planned and counted, "
        "and nothing is copied. Rate: while copies were made. Of decode steps: the share of their time in which one "
        "thread computed or waited for experts, and in which the other copied, meanwhile or not; and of what can be "
        "hidden of copying behind computing (the shorter of the two, step by step) what was. Times are measured.",
        _counted("Copied experts", "Copies"),
    ),
    Subject(
        "Latency: percentiles",
        "Over all requests of the trials (ITL: over all gaps between tokens). A percentile q needs 1 / (1 - q) of "
        "them: 10 for p90, 100 for p99.",
        (
            *_percentiles("TTFT", "ttft", "prefill"),
            *_percentiles("ITL", "itl", "decode"),
            *_percentiles("E2E", "e2e", "all"),
        ),
    ),
    Subject(
        "Under load",
        "Of workloads whose requests arrive by themselves.",
        (
            Column("Queueing", "mean", "queueing", None, "s"),
            Column("Queueing", "p90", "queueing", None, "s", "p90"),
            Column("TTFT + queueing", "mean", "ttft_from_arrival", "prefill", "s"),
            Column("TTFT + queueing", "p90", "ttft_from_arrival", "prefill", "s", "p90"),
            Column("E2E + queueing", "mean", "e2e_from_arrival", "all", "s"),
            Column("E2E + queueing", "p90", "e2e_from_arrival", "all", "s", "p90"),
            Column("Engine", "utilisation", "utilisation", None, "%"),
        ),
    ),
    Subject(
        "Energy and power",
        "Gross, of the window. A response is one request that was answered; net is above the idle baseline. P90 power "
        "is derived from the raw traces: power stays below it 90 % of the window.",
        (
            Column("Energy per token", "prefill", "energy_per_token", "prefill", "J/token"),
            Column("Energy per token", "decode", "energy_per_token", "decode", "J/token"),
            Column("Energy per token", "all", "energy_per_token", "all", "J/token"),
            Column("Energy per token", "net", "net_energy_per_token", "all", "J/token"),
            Column("Energy per response", "all", "energy_per_response", "all", "J/response"),
            Column("Power", "mean", "average_power", "all", "W"),
            Column("Power", "P90", "power_p90", "all", "W"),
        ),
    ),
    Subject(
        "Model and memory",
        "Parameters and bytes of weights are derived: counted in the matrices that the engine holds, in the form in "
        "which it holds them. Peak memory is measured: the most that the whole process had resident in the window, "
        "with every model of the run that is open.",
        (
            Column("Parameters", "all", "parameters", None, "parameters"),
            Column("Weights", "held", "weight_bytes", None, "B"),
            Column("Memory", "peak", "peak_memory", None, "B"),
        ),
    ),
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
class FigureTable(Noted):
    """groups: (title, number of columns). headings: (title, unit) of each column. parts: rows by workload and device.

    notes: texts, numbered from 1.
    """

    title: str
    about: str
    groups: list[tuple[str, int]]
    headings: list[tuple[str, str]]
    parts: list[tuple[str, list[ArmRow]]] = field(default_factory=list)


def figure_tables(run: RunData, frame: pd.DataFrame, arms: dict[str, Arm], units: PageUnits) -> list[FigureTable]:
    """Subjects that no cell has a row of are left out."""
    rows: dict[str, list[Row]] = {cell.cell_id: [] for cell in run.cells}
    for record in frame.to_dict("records"):
        rows[record["cell"]].append({str(k): v for k, v in record.items()})
    trials = trials_of(run)
    tables = []
    devices = list(dict.fromkeys(c.device for c in run.cells))
    for subject, device in product(SUBJECTS, devices):
        here, own_units = [c for c in run.cells if c.device == device], units.on(device)
        seen = {r["metric"] for c in here for r in rows[c.cell_id]}
        if not any(column.metric in seen for column in subject.columns):
            continue
        table = _empty(subject, own_units, f" on {device}" if len(devices) > 1 else "")
        for workload in dict.fromkeys(c.workload for c in here):
            cells = [c for c in here if c.workload == workload]
            if subject.title != "Under load" or any(r["metric"] == "queueing" for c in cells for r in rows[c.cell_id]):
                own = [
                    _arm_row(table, arms[c.cell_id], subject, own_units, rows[c.cell_id], trials[c.cell_id])
                    for c in cells
                ]
                table.parts.append((f"{workload} on {device}", own))
        tables.append(table)
    return tables


@dataclass(frozen=True)
class Asked:
    """What was asked of the arms. requests: the hash of it, or by arm where they were asked otherwise."""

    workload: str
    source: str | None
    models: tuple[str, ...]
    requests: str


def asked_of(run: RunData, arms: dict[str, Arm]) -> list[Asked]:
    hashes, alike = hashes_by_cell(run), asked_alike(run)
    found = []
    for workload, source in data_sources(run).items():
        cells: list[Cell] = [c for c in run.cells if c.workload == workload]
        same = next((hashes[c.cell_id] for c in cells if hashes[c.cell_id]), ())
        requests = shown(same)
        if not alike[workload]:
            each = dict.fromkeys(f"{arms[c.cell_id].name}: {shown(hashes[c.cell_id])}" for c in cells)
            requests = f"the arms were not asked the same requests ({'; '.join(each)})"
        found.append(Asked(workload, source, tuple(dict.fromkeys(model_name(c) for c in cells)), requests))
    return found


def _empty(subject: Subject, units: DeviceUnits, where: str) -> FigureTable:
    groups: list[tuple[str, int]] = []
    for column in subject.columns:
        if groups and groups[-1][0] == column.group:
            groups[-1] = (column.group, groups[-1][1] + 1)
        else:
            groups.append((column.group, 1))
    headings = [(c.title, _shown_unit(c, units)) for c in subject.columns]
    return FigureTable(subject.title + where, subject.about, groups, headings)


def _shown_unit(column: Column, units: DeviceUnits) -> str:
    unit = units.of(column.metric, column.phase, column.unit)[1]
    return {"B": "", "parameters": ""}.get(unit, unit)


def _arm_row(
    table: FigureTable, arm: Arm, subject: Subject, units: DeviceUnits, rows: Sequence[Row], trials: Sequence[Trial]
) -> ArmRow:
    good = usable(trials)
    counts = {
        "failed": sum(t.has_failed for t in trials),
        "without figures": sum(t.no_room is not None for t in trials),
        "left out": sum(t.status == "ok" and bool(t.marks) for t in trials),
    }
    counted = ", ".join([f"{len(good)} ok", *(f"{n} {what}" for what, n in counts.items() if n)])
    if not good:
        return ArmRow(arm, (), (), counted, left_out_reason(trials, with_errors=True) or "no trial was run")
    left_out = left_out_reason(trials, with_errors=False) or ""
    rows = [r | {"reason": own_reason(r["reason"], left_out)} for r in rows]
    entries = tuple(_entry(table, column, units, rows, len(good)) for column in subject.columns)
    return ArmRow(arm, entries, _methods(rows, subject, trials), counted)


def _entry(table: FigureTable, column: Column, units: DeviceUnits, rows: Sequence[Row], n_trials: int) -> Entry:
    """n_trials: that are ok. A figure that some of them lack says so."""
    same = [r for r in rows if r["metric"] == column.metric and (r["phase"] or None) == column.phase]
    if not same:
        return Entry("missing", note=table.note(f"{column.group}, {column.title}: nothing was recorded"))
    row, *others = same
    value = row[column.statistic]
    if pd.isna(value):
        why = row["reason"] if pd.isna(row["mean"]) else f"too few values for {column.statistic}"
        return Entry("missing", note=table.note(why or "no reason was recorded"))
    if column.unit == "B":
        return Entry(format_bytes(round(value)))
    if column.unit == "parameters":
        return Entry(format_count(value))
    scale, _ = units.of(column.metric, column.phase, column.unit)
    unit = f" {row['unit']}" if row["unit"] != column.unit else ""
    said = [row["reason"]] if row["n"] < n_trials and row["reason"] else []
    said += _also_read(row, [r for r in others if r["n"]])
    note = table.note("; ".join(said)) if said else None
    if column.unit == "%" or column.statistic != "mean":
        return Entry(format_number(value / scale) + unit, note=note)
    is_whole = column.metric in COUNTED and column.unit != "B/s" and float(value).is_integer()
    if is_whole and (pd.isna(row["ci_low"]) or row["ci_low"] == row["ci_high"]):
        below = () if pd.isna(row["ci_low"]) else ("no spread",)
        return Entry(f"{value:.0f}{unit}", below, note)
    if pd.isna(row["ci_low"]):
        alone = () if column.metric in COUNTED else ("n = 1",)
        return Entry(format_known(value / scale, _stated_error(row, rows)) + unit, alone, note)
    low, high = row["ci_low"] / scale, row["ci_high"] / scale
    told = "no spread" if low == high else format_interval(low, high)
    return Entry(format_mean(value / scale, low, high) + unit, (told,), note)


def _also_read(row: Row, others: Sequence[Row]) -> list[str]:
    """What other meters or methods say of the same quantity: of another unit of the machine, or of the same one."""
    meter = row["meter"]
    unlike = [r for r in others if see_unlike(meter, r["meter"])]
    alike = [r for r in others if r not in unlike]
    said = []
    if unlike:
        said.append(
            f"{meter} sees the {unit_of(meter)} alone; of the {unit_of(unlike[0]['meter'])}, {_by_meter(unlike)};"
            " neither is the whole machine, and they are not added"
        )
    return said + ([f"also read by another meter or method: {_by_meter(alike)}"] if alike else [])


def _by_meter(rows: Sequence[Row]) -> str:
    return "; ".join(f"{r['meter'] or r['method']}: {format_number(r['mean'])} {r['unit']}" for r in rows)


def _stated_error(row: Row, rows: Sequence[Row]) -> float | None:
    """What a meter states of the joules of its readings; None of other figures."""
    if "J" not in row["unit"] and row["unit"] != "W":
        return None
    same = (r for r in rows if r["metric"] == "energy_uncertainty" and (r["phase"] or None) == "all")
    percent = next((r["mean"] for r in same if (r["meter"], r["method"]) == (row["meter"], row["method"])), None)
    return None if percent is None or pd.isna(percent) else percent / 100


def _methods(rows: Sequence[Row], subject: Subject, trials: Sequence[Trial]) -> tuple[str, ...]:
    """How the figures of a row came to be: "time measured", "energy modelled, cpu-sheet ± 20 %"."""
    first: dict[tuple[str, str | None], Row] = {}
    for row in rows:
        first.setdefault((row["metric"], row["phase"]), row)
    if subject.title == "Energy and power":
        energy = first["energy_per_token", "all"]
        uncertainty = first["energy_uncertainty", "all"]["mean"]
        meter = f", {energy['meter']}" if energy["meter"] else ""
        is_unstated = energy["method"] == "modelled" and pd.isna(uncertainty)
        stated: str = "" if pd.isna(uncertainty) else f" {format_error(uncertainty / 100)}"
        spread: str = ", error not stated" if is_unstated else stated
        return (f"{energy['method']}{meter}{spread}",)
    if subject.title == "Achieved rates":
        return tuple(
            dict.fromkeys(row["method"] for row in rows if row["metric"] in ("compute_rate", "weight_read_rate"))
        )
    own = {column.metric for column in subject.columns}
    if subject.title in get_args(Table) and all(pd.isna(row["mean"]) for row in rows if row["metric"] in own):
        return ("missing",)
    if subject.title == "Copied experts":
        return ("bytes counted", "times measured")
    if subject.title in get_args(Table):
        layers = counters_of(trials)
        return ("counted",) if layers is None else ("counted", layers)
    if subject.title == "Model and memory":
        found = [
            (c.group.lower(), first[c.metric, c.phase]["method"])
            for c in subject.columns
            if (c.metric, c.phase) in first
        ]
        by_method = {m: ", ".join(what for what, method in found if method == m) for _, m in found}
        return tuple(f"{what} {method}" for method, what in by_method.items())
    return (f"time {first['e2e', 'all']['method']}",)
