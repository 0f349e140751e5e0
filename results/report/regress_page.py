"""What verdicts over a history say: rows for the terminal, a table for files, a page with a picture of the changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd

from results.history.judged import Judged, Judgement
from results.history.unlike import unlike_runs
from results.report.changes_page import BETTER, OPEN, OTHER, WORSE, ChangesPage, Drawn, write_changes_page
from results.report.csv import csv_text
from results.report.files import replace_text
from results.units import format_figure, format_number, number_of

VERDICTS: Final = ("REGRESSION", "UNRELIABLE", "IMPROVED", "PASS")
COLUMNS: Final = (
    "verdict", "arm", "workload", "device", "figure", "runs", "baseline", "now", "change", "95 %", "noise",
)  # fmt: skip
NUMBERS: Final = frozenset({"runs", "baseline", "now", "change", "95 %", "noise"})


def ordered(judgement: Judgement) -> list[Judged]:
    """The anchor last."""
    return sorted(judgement.judged, key=lambda one: (one.is_anchor, VERDICTS.index(one.verdict)))


def lead(judgement: Judgement) -> str:
    return f"Against {', '.join(run.folder for run in judgement.baseline)}, over {number_of(judgement.n_runs, 'run')}"


def table_row(one: Judged) -> list[str]:
    """In the order of `COLUMNS`."""
    figure, shown = one.figure, one.series.shown
    verdict = f"anchor: {one.verdict}" if one.is_anchor else one.verdict
    how = "" if figure.method == "measured" else f", {figure.method}"
    ends = "" if one.low is None or one.high is None else f"[{shown(one.low)}, {shown(one.high)}]"
    return [
        verdict, one.arm, one.workload, one.device, f"{figure.name}{how}", str(len(one.series.points)),
        _value(one, one.base), _value(one, one.last), "" if one.change is None else shown(one.change), ends,
        "" if one.noise is None else shown(one.noise).lstrip("+"),
    ]  # fmt: skip


def _value(one: Judged, value: float | None) -> str:
    if value is None:
        return ""
    if one.series.is_anchored:
        return f"{format_number(value)}× the anchor"
    return format_figure(value, one.figure.unit)


def why(one: Judged) -> str:
    parts = [one.reason]
    if one.since is not None and one.change is not None:
        parts.append(f"since {one.since.folder} ({one.since.created_at[:10]})")
        runs = [point.run for point in one.series.points]
        at = next(i for i, run in enumerate(runs) if run.folder == one.since.folder)
        changed = unlike_runs(runs[at - 1], one.since, one.device) if at else ()
        parts += [f"with it changed: {unlike.words}" for unlike in changed]
    parts += [f"set otherwise since {changed}" for changed in one.settings_changed]
    parts += [f"left out: {reason}" for reason in one.left_out[:2]]
    return "; ".join(parts)


def records(judgement: Judgement) -> list[dict[str, Any]]:
    """Of each figure, as numbers and names."""
    return [
        {
            "verdict": one.verdict,
            "is_anchor": one.is_anchor,
            "device": one.device,
            "arm": one.arm,
            "model": one.model,
            "workload": one.workload,
            "metric": one.figure.metric,
            "phase": one.figure.phase,
            "unit": one.figure.unit,
            "method": one.figure.method,
            "meter": one.figure.meter,
            "runs": len(one.series.points),
            "is_relative": one.series.is_log,
            "baseline": one.base,
            "now": one.last,
            "change": one.change,
            "low": one.low,
            "high": one.high,
            "p": one.p,
            "noise": one.noise,
            "floor": one.floor,
            "since": one.since.folder if one.since is not None else None,
            "reason": one.reason,
            "left_out": list(one.left_out),
            "settings_changed": list(one.settings_changed),
            "remarks": list(one.remarks),
        }
        for one in judgement.judged
    ]


def write_judgement_csv(judgement: Judgement, path: Path) -> None:
    """Changes, noise and floor as shares, of scores as differences. Raises `OSError`."""
    rows = []
    for told, one in zip(records(judgement), judgement.judged, strict=True):
        row = told | {"change_is": "share" if told.pop("is_relative") else "difference"}
        row |= {name: None if told[name] is None else one.series.size(told[name]) for name in _SIZES}
        rows.append(row | {name: "; ".join(told[name]) or None for name in _LISTS})
    frame = pd.DataFrame(rows)
    replace_text(path, csv_text(frame.astype(dict.fromkeys(("baseline", "now", "p", *_SIZES), "float64"))))


_LISTS: Final = ("left_out", "settings_changed", "remarks")
_SIZES: Final = ("change", "low", "high", "noise", "floor")


def write_judgement_page(judgement: Judgement, path: Path) -> None:
    """Raises `OSError`."""
    rows = ordered(judgement)
    page = ChangesPage(
        title=f"Since {', '.join(run.folder for run in judgement.baseline)}",
        lead=lead(judgement),
        axis="change since the baseline",
        verdicts=[one.verdict for one in judgement.counted],
        order=VERDICTS,
        looks={"REGRESSION": WORSE, "IMPROVED": BETTER, "UNRELIABLE": OTHER, "PASS": OPEN},
        drawn=list(_drawn(rows)),
        columns=(*COLUMNS, "why"),
        numbers=NUMBERS,
        rows=[[*table_row(one), why(one)] for one in rows],
        orders=[{"baseline": one.base, "now": one.last} for one in rows],
        notes=judgement.notes,
    )
    write_changes_page(page, path)


def _drawn(rows: Sequence[Judged]) -> Iterator[Drawn]:
    several = len({(one.workload, one.device) for one in rows}) > 1
    for one in rows:
        # A difference of a score that is no share has no axis with the others.
        has_axis = one.series.is_log or one.series.is_share
        if has_axis and one.change is not None and one.low is not None and one.high is not None:
            where = f" · {one.workload} · {one.device}" if several else ""
            change, low, high = (100 * one.series.size(x) for x in (one.change, one.low, one.high))
            anchor = " (anchor)" if one.is_anchor else ""
            yield Drawn(f"{one.arm}{anchor} · {one.figure.name}{where}", change, low, high, one.verdict)
