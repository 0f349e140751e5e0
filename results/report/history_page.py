"""The page of a history: each figure over time, by device and workload an arm a line, with where its level changed.

A line is of figures that came to be alike (`results.history.unlike`): another method, meter, road or other questions
begin a new one. Every chart has its numbers under it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from results.history.copies import without_copies
from results.history.index import History
from results.history.otherwise import Changed, otherwise_than_before
from results.history.places import LEAST_SEGMENT
from results.history.points import METRICS, CellPoint, Figure, RunPoint
from results.history.series import Point, Series, series_of
from results.history.unlike import unlike_runs
from results.records import Phase
from results.report.charts import page_spec
from results.report.picture import symbol
from results.report.plain_pages import frame, write_plain_pages
from results.units import figure_scale, format_interval, format_mean, format_number, number_of

MOST_CHARTS: Final = 60
MARKS: Final = (
    "circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right",
    "M0,-1L0.3,-0.34L1,-0.3L0.46,0.16L0.62,0.88L0,0.48L-0.62,0.88L-0.46,0.16L-1,-0.3L-0.3,-0.34Z",
)  # fmt: skip
"""The shapes of `results.report.picture`, in their order, as Vega has them."""
MOST_ARMS: Final = len(MARKS)
"""In one chart; more are told in the table alone."""
HEIGHT_PX: Final = 190
WIDEST: Final = 3.0
"""Times the point that is farthest from 0: where bars end, above 0 and below it."""
CUT: Final = "Bars that end at three times the point farthest from 0 are longer; the numbers have them."

Way = tuple[Any, ...]


class Line(NamedTuple):
    """One arm, of figures that came to be alike."""

    arm: str
    series: Series
    way: str


class ChangeTold(NamedTuple):
    arm: str
    since: RunPoint
    size: str
    interval: str
    beside: str


@dataclass(frozen=True)
class Panel:
    """One figure on one device with one workload."""

    id: str
    title: str
    legend: tuple[tuple[Markup, str], ...]
    """Symbol and name of each arm that is drawn."""
    chart: dict[str, Any]
    description: str
    unit: str
    changes: tuple[ChangeTold, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


def write_history_page(history: History, runs: Sequence[RunPoint], devices: Collection[str], path: Path) -> str:
    """devices: only these, or all where it is empty. Says in a line what is on the page. Raises `OSError`."""
    counted, copies = without_copies(runs)
    groups = _groups(history, counted, devices)
    panels = [panel for i, group in enumerate(list(groups.items())[:MOST_CHARTS]) for panel in _panel(i, *group)]
    left_out = len(groups) - MOST_CHARTS
    changed = otherwise_than_before(history.runs)
    shown = {
        "panels": panels,
        "n_runs": len(runs),
        "days": list(dict.fromkeys((runs[0].created_at[:10], runs[-1].created_at[:10]))),
        "skipped": [
            *(f"{one.folder}: {one.why}" for one in history.skipped),
            *(f"{one.folder}: a copy of {one.of}" for one in copies),
        ],
        "remarks": [line for run in runs for line in run.told],
        "runs": [_run_row(run, changed.get(run.folder, ())) for run in runs],
        "left_out": max(left_out, 0),
        "least_segment": LEAST_SEGMENT,
    }
    title = f"History of {history.directory.absolute().name}"
    page = frame(title, [(panel.id, panel.chart) for panel in panels])
    write_plain_pages("results.report", {path.name: ("history.html.j2", page | shown)}, path.parent)
    n_changes = sum(len(panel.changes) for panel in panels)
    counts = {"chart": len(panels), "run": len(runs), "change": n_changes}
    charts, over, changes = (number_of(n, what) for what, n in counts.items())
    told = f"{charts} over {over}, {changes} of level"
    more = f"; {left_out} more figure{'s are' if left_out > 1 else ' is'} left out: choose with --plan or --device"
    return told + (more if left_out > 0 else "")


Group = tuple[str, str, str, tuple[str, Phase | None]]
"""Device, workload, unit, metric."""
Seen = tuple[RunPoint, CellPoint, Figure]


def _groups(history: History, runs: Sequence[RunPoint], devices: Collection[str]) -> dict[Group, list[Seen]]:
    """Times first, then joules, scores and memory, each with all its devices and workloads."""
    by_run = history.cells_by_run()
    found: dict[Group, list[Seen]] = {}
    for run in runs:
        for cell in by_run[run.folder]:
            if devices and cell.device not in devices:
                continue
            for figure in cell.figures:
                found.setdefault((cell.device, cell.workload, figure.unit, figure.key), []).append((run, cell, figure))
    order = list(METRICS)
    # Scores, which have names of their own, stand before memory.
    place = {key: order.index(key) if key in METRICS else len(order) - 1.5 for _, _, _, key in found}
    return dict(sorted(found.items(), key=lambda item: (*item[0][:2], place[item[0][3]])))


def _panel(number: int, group: Group, seen: Sequence[Seen]) -> Iterator[Panel]:
    device, workload, unit, _ = group
    lines = list(_lines(seen))
    largest = max(abs(figure.mean) for _, _, figure in seen)
    scale, shown_unit = figure_scale(largest, unit)
    name = seen[0][2].name
    methods = list(dict.fromkeys(figure.method for _, _, figure in seen))
    said = "" if methods == ["measured"] else f" · {' and '.join(methods)}"
    arms = list(dict.fromkeys(line.arm for line in lines))
    shown = [line for line in lines if line.arm in arms[:MOST_ARMS]]
    changes = tuple(told for line in lines for told in _changes(line, device))
    description = f"{name} over time on {device}, {workload}: {', '.join(arms[:MOST_ARMS])}"
    notes = [f"{len(arms) - MOST_ARMS} more arms are in the numbers alone."] if len(arms) > MOST_ARMS else []
    farthest = _farthest(shown)
    notes += [CUT] if _is_cut(shown, farthest) else []
    yield Panel(
        id=f"history-{number}",
        title=f"{name[0].upper()}{name[1:]} · {workload} · {device}{said}",
        legend=tuple((symbol(i, is_filled=True), arm) for i, arm in enumerate(arms[:MOST_ARMS])),
        chart=_chart(shown, changes, farthest, scale, f"{name} ({shown_unit})" if shown_unit else name, description),
        description=description,
        unit=shown_unit,
        changes=changes,
        columns=("When", "Run", "Arm", shown_unit or "value", "95 %", "Trials", "How"),
        rows=tuple(_row(line, point, scale) for line in lines for point in line.series.points),
        note=" ".join(notes),
    )


def _lines(seen: Sequence[Seen]) -> Iterator[Line]:
    found: dict[Way, list[Seen]] = {}
    for run, cell, figure in seen:
        roads = cell.roads.get(figure.phase or "all", ()) if figure.kind in ("time", "energy") else ()
        way = cell.engine, cell.model, figure.method, figure.meter, cell.asked, roads
        found.setdefault(way, []).append((run, cell, figure))
    several = len({cell.model for _, cell, _ in seen}) > 1
    for way, own in found.items():
        figure = own[0][2]
        arm = f"{way[0]}, {way[1]}" if several else way[0]
        yield Line(arm, series_of(own), f"{figure.method}, {figure.meter}" if figure.meter else figure.method)


def _changes(line: Line, device: str) -> Iterator[ChangeTold]:
    levels = line.series.levels()
    points = line.series.points
    settings = {run.folder: (f"set otherwise: {words}",) for run, words in line.series.settings_changed()}
    for change in levels.changes:
        before, since = points[change.at - 1].run, points[change.at].run
        told = unlike_runs(before, since, device)
        beside = "; ".join([*settings.get(since.folder, ()), *(one.words for one in told)])
        low, high = line.series.shown(change.low), line.series.shown(change.high)
        yield ChangeTold(line.arm, since, line.series.shown(change.size), f"[{low}, {high}]", beside or "nothing known")


def _row(line: Line, point: Point, scale: float) -> tuple[str, ...]:
    figure, interval = point.figure, point.figure.interval
    ends = None if interval is None else (interval[0] / scale, interval[1] / scale)
    return (
        point.run.created_at[:16].replace("T", " "),
        point.run.folder,
        line.arm,
        format_number(figure.mean / scale) if ends is None else format_mean(figure.mean / scale, *ends),
        "n = 1" if ends is None else format_interval(*ends),
        str(figure.n),
        line.way,
    )


def _run_row(run: RunPoint, changed: Sequence[Changed]) -> tuple[str, ...]:
    told = "; ".join(f"{', '.join(one.arms) or 'the run'}: {one.words}" for one in changed)
    return (
        run.created_at[:16].replace("T", " "), run.folder, run.plan, ", ".join(run.devices), str(run.n_cells),
        str(run.n_ok), str(run.n_failed), str(run.n_left_out), told,
    )  # fmt: skip


def _farthest(lines: Sequence[Line]) -> float:
    """From 0, where bars end: two trials that scatter leave an interval beside which no line could be seen."""
    return WIDEST * max((abs(point.figure.mean) for line in lines for point in line.series.points), default=0.0)


def _is_cut(lines: Sequence[Line], farthest: float) -> bool:
    intervals = (point.figure.interval for line in lines for point in line.series.points)
    return any(max(-ends[0], ends[1]) > farthest for ends in intervals if ends is not None)


def _time_format(first: str, last: str) -> str:
    """Of the axis, from the first and last instant in ISO 8601: what tells its ticks apart."""
    if first[:10] != last[:10]:
        return "%Y-%m-%d" if first[:4] != last[:4] else "%b %d"
    return "%H:%M" if first[:13] != last[:13] else "%H:%M:%S"


def _chart(
    lines: Sequence[Line], changes: Sequence[ChangeTold], farthest: float, scale: float, title: str, description: str
) -> dict[str, Any]:
    """An arm has a colour and a mark; its name stands above: beside its line long ones would lie on each other."""
    import altair as alt

    arms = list(dict.fromkeys(line.arm for line in lines))
    rows = []
    for n, line in enumerate(lines):
        for point in line.series.points:
            low, high = point.figure.interval or (point.figure.mean, point.figure.mean)
            low, high = max(low, -farthest), min(high, farthest)
            rows.append(
                {
                    "arm": line.arm, "line": n, "at": point.run.created_at, "value": point.figure.mean / scale,
                    "low": low / scale, "high": high / scale,
                }
            )  # fmt: skip
    colours = [f"var(--arm-{i})" for i in range(len(arms))]
    base = alt.Chart(alt.InlineData(values=rows))
    instants = [point.run.created_at for line in lines for point in line.series.points]
    times = _time_format(min(instants), max(instants))
    x = alt.X("at:T", title=None, scale=alt.Scale(type="utc")).axis(grid=False, labelOverlap=True, format=times)
    # Between ends that are one value, ticks are rounded to whole numbers.
    is_one = len({row[end] for row in rows for end in ("value", "low", "high")}) == 1
    y = alt.Y("value:Q", title=title, scale=alt.Scale(zero=is_one))
    colour = alt.Color("arm:N", legend=None).scale(domain=arms, range=colours)
    shape = alt.Shape("arm:N", legend=None).scale(domain=arms, range=list(MARKS[: len(arms)]))
    drawn = [
        base.mark_line(strokeWidth=1, opacity=0.6).encode(x=x, y=y, color=colour, detail="line:N"),
        base.mark_rule(strokeWidth=1, opacity=0.5).encode(
            x=x, y=alt.Y("low:Q", title=title), y2="high:Q", color=colour
        ),
        base.mark_point(size=26, filled=True).encode(x=x, y=y, color=colour, shape=shape),
    ]
    if changes:
        told = [{"at": change.since.created_at, "size": change.size, "arm": change.arm} for change in changes]
        rules = alt.Chart(alt.InlineData(values=[one for one in told if one["arm"] in arms]))
        drawn.append(rules.mark_rule(strokeDash=[4, 3]).encode(x=x, color=colour))
        drawn.append(rules.mark_text(align="left", dx=3, dy=4).encode(x=x, y=alt.value(4), text="size:N", color=colour))
    return page_spec(alt.layer(*drawn), HEIGHT_PX, description)
