"""The first screen: of each device a table of its arms as times a baseline, a picture beside it, and who is best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd
from markupsafe import Markup

from results.cells import usable
from results.operations import share_words
from results.records import Cell
from results.report.arm_figures import NOT_SCORED, QUANTITIES, Quantity
from results.report.arms import Arm, arms_of
from results.report.caveats import Caveat, caveats_of, subject_of
from results.report.notes import Noted
from results.report.page_units import PageUnits
from results.report.picture import DOWN, UP, Axis, Panel, Point, panel, symbol
from results.report.sentences import BEST, interval_words, ratio_text_words, ratio_words, sentences
from results.report.standings import Group, Standing
from results.runs import RunData
from results.share_metrics import is_share_metric
from results.units import format_error, format_known, format_number

HEADINGS: dict[Quantity, str] = {"time": "Time of a request", "energy": "Joules", "accuracy": "Accuracy"}
REUSES = "reuse_prefix"
NOT_STATED = "error not stated"
TELLING_ERROR = 0.01
"""Relative uncertainty that a meter states, from which on its heading says so."""


@dataclass(frozen=True)
class ArmFigure:
    """One cell of the table. ratio: as text; interval and value stand below it. order: what the column sorts by."""

    ratio: str
    interval: str
    value: str
    order: float | None
    is_best: bool = False
    is_certain: bool = False
    is_baseline: bool = False
    note: int | None = None


@dataclass(frozen=True)
class ArmRow:
    arm: Arm
    symbol: Markup
    figures: tuple[ArmFigure, ...]


@dataclass(frozen=True)
class Heading:
    title: str
    below: str


@dataclass
class ArmTable(Noted):
    """notes: numbered from 1. baseline_remark: why it is another than the one that was asked for."""

    id: str
    title: str
    baseline: str
    baseline_remark: str
    headings: list[Heading]
    best: list[str]
    rows: list[ArmRow] = field(default_factory=list)


@dataclass(frozen=True)
class DeviceScreen:
    """subject: model and machine. caveats: what to know before believing. sentences: who is best, by quantity: (whether
    that is certain, the words)."""

    device: str
    subject: str
    caveats: tuple[Caveat, ...]
    workloads: tuple[str, ...]
    table: ArmTable
    sentences: tuple[tuple[bool, str], ...]
    panels: tuple[Panel, ...]
    by_workload: tuple[ArmTable, ...]
    speed_panels: tuple[Panel, ...]


def device_screens(
    run: RunData, frame: pd.DataFrame, groups: Sequence[tuple[Group, Sequence[Group]]], units: PageUnits
) -> list[DeviceScreen]:
    found = []
    for n, (whole, single) in enumerate(groups, start=1):
        workloads = tuple(g.workload or "" for g in single)
        tables = [arm_table(f"d{n}w{i}", group, units) for i, group in enumerate(single, start=1)]
        found.append(
            DeviceScreen(
                device=whole.device,
                subject=subject_of(run, whole.device),
                caveats=(*caveats_of(run, whole.device), *_extrapolated(whole)),
                workloads=workloads,
                table=arm_table(f"d{n}", whole, units),
                sentences=tuple(sentences(whole, single)),
                panels=tuple(p for g in single if (p := _score_panel(run, frame, g, units)) is not None),
                by_workload=tuple(tables) if len(tables) > 1 else (),
                speed_panels=tuple(p for g in single if (p := _time_panel(run, frame, g, units)) is not None),
            )
        )
    return found


def _extrapolated(group: Group) -> list[Caveat]:
    most = max((row["time"].outside_share or 0.0 for row in group.rows), default=0.0)
    return (
        [Caveat(f"up to {share_words(most)} of an arm's modelled seconds are extrapolated", "operations")]
        if most
        else []
    )


# --- the table -------------------------------------------------------------------------------------------------------


def arm_table(table_id: str, group: Group, units: PageUnits) -> ArmTable:
    headings = [_heading(q, group) for q in QUANTITIES]
    best = [BEST[q] for q in QUANTITIES]
    remark = f"{group.asked_baseline.name} has no figure" if group.asked_baseline != group.baseline else ""
    table = ArmTable(table_id, group.workload or "all workloads", group.baseline.name, remark, headings, best)
    for row in group.rows:
        figures = tuple(_figure(table, row[q], group, units) for q in QUANTITIES)
        arm = row["time"].arm
        table.rows.append(ArmRow(arm, symbol(arm.index), figures))
    return table


def _heading(quantity: Quantity, group: Group) -> Heading:
    known = [row[quantity] for row in group.rows if row[quantity].value is not None]
    baseline = group.baseline_of(quantity)
    times = f", times {baseline.name}" if baseline != group.baseline else ""
    if quantity == "accuracy":
        return Heading(HEADINGS[quantity], _covered(group) + times)
    methods = ", ".join(_method(m, known) for m in dict.fromkeys(s.method for s in known)) or "missing"
    title = HEADINGS[quantity]
    if quantity == "energy" and any(s.unit != "J" for s in known):
        title = "Gauge units"
    queue = ", with the queue" if any(s.with_queue for s in known) else ""
    return Heading(title, methods + queue + times)


def _covered(group: Group) -> str:
    """What a column of accuracy is over."""
    if group.workload is not None:
        is_unscored = any(NOT_SCORED in (row["accuracy"].reason or "") for row in group.rows)
        return group.score or ("not scored" if is_unscored else "missing")
    if not group.other_scores or not group.shared_scores:
        return "right answers"
    others = ", ".join(group.other_scores)
    verb = "stand" if len(group.other_scores) > 1 else "stands"
    return f"right answers of {', '.join(group.shared_scores)} only; {others} {verb} by workload"


def _method(method: str, known: Sequence[Standing]) -> str:
    """With what the meter states of itself, where that is more than `TELLING_ERROR`, or a model's."""
    error = max((s.stated_error or 0.0 for s in known if s.method == method), default=0.0)
    if any(s.model_error == math.inf for s in known if s.method == method):
        return f"{method}, {NOT_STATED}"
    is_told = error > 0 if method == "modelled" else error > TELLING_ERROR
    return f"{method} {format_error(error)}" if is_told else method


def _figure(table: ArmTable, standing: Standing, group: Group, units: PageUnits) -> ArmFigure:
    if standing.value is None:
        note = table.note(standing.reason or "no reason was recorded")
        return ArmFigure(standing.result or "missing", "", "", None, note=note)
    plain = ArmFigure("none", "", _value(standing, group, units), None, standing.is_best, standing.is_certain)
    if standing.is_baseline:
        return replace(plain, ratio="1×", order=1.0, is_baseline=True, note=table.note(standing.remark))
    ratio = standing.ratio
    if ratio is None or ratio.value is None:
        told = "; ".join(filter(None, [standing.reason, standing.remark])) or "no reason was recorded"
        return replace(plain, note=table.note(told))
    if ratio.low is None or ratio.high is None:
        note = table.note("; ".join(filter(None, [ratio.reason, standing.remark])))
        return replace(plain, ratio=ratio_words(ratio), interval="no interval", order=ratio.value, note=note)
    return replace(
        plain,
        ratio=ratio_text_words(ratio.value, ratio.low, ratio.high),
        interval=interval_words(ratio.low, ratio.high),
        order=ratio.value,
        note=table.note(standing.remark),
    )


def _value(standing: Standing, group: Group, units: PageUnits) -> str:
    """Where the arms' figures came to be in several ways, with its own."""
    value = standing.value or 0.0
    if standing.quantity == "accuracy":
        if group.workload is None or _is_share(group):
            return f"{100 * value:.3g} % of {standing.n}"
        return f"{format_number(value)}, n = {standing.n}"
    scale, unit = units.on(group.device).of_standing(standing.quantity, standing.unit)
    same = [row[standing.quantity] for row in group.rows if row[standing.quantity].value is not None]
    way = f", {standing.method}" if len({s.method for s in same}) > 1 else ""
    meter = f", {standing.meter}" if standing.meter and len({s.meter for s in same}) > 1 else ""
    return f"{format_known(value / scale, standing.stated_error)} {unit}{way}{meter}"


def _is_share(group: Group) -> bool:
    return group.score is not None and group.rising and is_share_metric(group.score)


# --- the pictures ----------------------------------------------------------------------------------------------------


def _score_panel(run: RunData, frame: pd.DataFrame, group: Group, units: PageUnits) -> Panel | None:
    """Score against joules, or seconds where nothing is scored. None where fewer than two arms have both in one way."""
    if group.score is None:
        return _time_panel(run, frame, group, units, "Not scored: time instead.")
    scores = _means(run, frame, group, group.score, None)
    energy, title, scale = _joules(run, frame, group, units)
    is_share = _is_share(group)
    up = Axis(f"{group.score}, %" if is_share else group.score, 1.0, is_share)
    return _panel(group, energy, scores, Axis(title, scale), up, UP if group.rising else DOWN)


def _time_panel(run: RunData, frame: pd.DataFrame, group: Group, units: PageUnits, caption: str = "") -> Panel | None:
    with_queue = any(row["time"].with_queue for row in group.rows)
    metric = "e2e_from_arrival" if with_queue else "e2e"
    times = _means(run, frame, group, metric, "all")
    energy, title, scale = _joules(run, frame, group, units)
    time_scale, unit = units.on(group.device).of(metric, "all", "s")
    up = Axis(f"E2E{' + queueing' if with_queue else ''}, {unit} a request", time_scale)
    return _panel(group, energy, times, Axis(title, scale), up, DOWN, caption)


def _panel(
    group: Group,
    across: Mapping[Arm, tuple[float, float, float]],
    up: Mapping[Arm, tuple[float, float, float]],
    x: Axis,
    y: Axis,
    better: str,
    caption: str = "",
) -> Panel | None:
    points = [Point(arm, *across[arm], *up[arm]) for arm in group.arms if arm in across and arm in up]
    if len(points) < 2:
        return None
    absent = [row for row in group.rows if row["time"].arm not in across or row["time"].arm not in up]
    ways = {arm: [row[q].method for q in ("time", "energy")] for row in group.rows for arm in [row["time"].arm]}
    drawn = [ways[p.arm] for p in points]
    otherwise = [
        row["time"].arm.name
        for row in absent
        if row["energy"].value is not None and row["time"].value is not None and ways[row["time"].arm] not in drawn
    ]
    missing = [row["time"].arm.name for row in absent if row["time"].arm.name not in otherwise]
    left_out = " ".join(
        f"Not drawn, {why}: {', '.join(names)}."
        for why, names in (("a figure is missing", missing), ("measured or modelled in another way", otherwise))
        if names
    )
    return panel(group.workload or "", better, " ".join(filter(None, [caption, left_out])), points, x, y)


def _joules(
    run: RunData, frame: pd.DataFrame, group: Group, units: PageUnits
) -> tuple[Mapping[Arm, tuple[float, float, float]], str, float]:
    """Per token that was computed. Where arms compute other tokens for the same answers, as with a kept prefix, per
    token that was asked: kept tokens are in all arms' count then."""
    cells = [c for c in run.cells if (c.device, c.workload) == (group.device, group.workload)]
    scale, unit = units.on(group.device).of("energy_per_token", "all", "J/token")
    if len({bool(c.engine_parameters.get(REUSES)) for c in cells}) == 1:
        return _means(run, frame, group, "energy_per_token", "all"), unit, scale
    arms = arms_of(run.cells)
    per_token = {arms[c.cell_id]: share for c in cells if (share := _responses_per_token(run, c)) is not None}
    per_response = _means(run, frame, group, "energy_per_response", "all")
    found = {
        arm: (mean * per_token[arm], low * per_token[arm], high * per_token[arm])
        for arm, (mean, low, high) in per_response.items()
        if arm in per_token
    }
    return found, f"{unit} asked", scale


def _responses_per_token(run: RunData, cell: Cell) -> float | None:
    """Requests over the tokens that they stand on and generate, kept ones counted."""
    trial = next((t for t in usable(t for t in run.trials if t.cell_id == cell.cell_id) if t.completions), None)
    if trial is None:
        return None
    return len(trial.completions) / sum(c.n_prompt_tokens + c.n_generated for c in trial.completions)


def _means(
    run: RunData, frame: pd.DataFrame, group: Group, metric: str, phase: str | None
) -> dict[Arm, tuple[float, float, float]]:
    """(mean, low, high) by arm, of the first way in which the figure came to be; thrice the mean without interval.

    None of an arm of which the table has no such figure, as where a counter gave joules of some trials and a model
    those of others: the mean of the counter's would be of these trials alone.
    """
    arms = arms_of(run.cells)
    quantity: Quantity = "time" if metric.startswith("e2e") else "energy" if metric.startswith("energy") else "accuracy"
    told = {row[quantity].arm for row in group.rows if row[quantity].value is not None}
    own = (c for c in run.cells if (c.device, c.workload) == (group.device, group.workload))
    here = [c.cell_id for c in own if arms[c.cell_id] in told]
    rows = frame[frame["cell"].isin(here) & (frame["metric"] == metric) & frame["mean"].notna()]
    rows = rows[rows["phase"].isna()] if phase is None else rows[rows["phase"] == phase]
    found: dict[Arm, tuple[float, float, float]] = {}
    way: tuple[str, str | None] | None = None
    for row in rows.to_dict("records"):
        way = way or (row["method"], row["meter"])
        if (row["method"], row["meter"]) == way:
            low, high = (row["mean"] if pd.isna(row[end]) else row[end] for end in ("ci_low", "ci_high"))
            found.setdefault(arms[row["cell"]], (row["mean"], low, high))
    return found
