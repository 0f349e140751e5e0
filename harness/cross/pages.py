"""The page of a cross table: a picture and a table for each machine, and what its conclusions hang on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from devices.models.sheet import Sheet
from harness.conclusions import Effect, conclusion_words, flip_words, leads_chart
from harness.cross.sensitivity import METRICS
from harness.cross.table import Question, Row, are_bounds, is_less
from harness.fitted_sheets import older_fit, other_weights
from results.report.charts import page_spec
from results.report.plain_pages import frame, write_plain_pages
from results.units import format_bytes

PAGE = "cross.html"
TITLE = "Which technique on which machine?"
STYLE = (
    "td.why { min-width: 16rem; } td.binds { min-width: 8rem; } td.front { font-weight: 600; }"
    " .scroll th[scope=row] { min-width: 8.8rem; }"
    " table.figures { width: auto; } table.figures thead th.number { white-space: normal; }"
)
"""Headings of numbers wrap: all columns of a machine stand on a page as wide as a small screen."""
BAR_PX, HEAD_PX = 22, 40


class Machine(NamedTuple):
    sheet: Sheet
    is_bound: bool
    """Rooflines alone: times are the least that there could be."""
    rows: list[Row]
    absent: list[Row]
    """Not priced, or without room."""
    chart: str
    """Id, or empty."""
    conclusions: list[Conclusion]
    doubt: str | None = None
    """Why its times may be far off."""

    @property
    def answer(self) -> str:
        """Which arms are first in time, and which are on the front. Arms that cost the same stand together."""
        found = [
            (what, own)
            for what, own in (
                ("First token soonest", [(row.ttft_s, row.arm.name) for row in self.rows if row.ttft_s is not None]),
                ("least time per token", [(row.tpot_s, row.arm.name) for row in self.rows if row.tpot_s is not None]),
            )
            if own
        ]
        words = []
        for what, own in found:
            least_s = min(seconds for seconds, _ in own)
            first = [name for seconds, name in own if not is_less(least_s, seconds)]
            words.append(f"{what}: {' and '.join(first)} ({_seconds(least_s)})")
        front = dict.fromkeys(
            " = ".join(row.arm.name for row in self.rows if row is one or row.arm.name in one.equals)
            for one in self.rows
            if one.on_front
        )
        return "; ".join([*words, f"on the front: {', '.join(front)}"])


class Conclusion(NamedTuple):
    """What is said of one metric. chart: id, or empty where one arm stands alone."""

    words: str
    flips: str
    chart: str


def write_page(
    question: Question, sheets: Sequence[Sheet], rows: Sequence[Row], found: Sequence[Effect] | None, folder: Path
) -> Path:
    """found: None where the constants were not changed. Raises `OSError`."""
    (path,) = write_plain_pages(
        "harness.cross", {PAGE: ("cross.html.j2", context(question, sheets, rows, found))}, folder
    )
    return path


def context(
    question: Question, sheets: Sequence[Sheet], rows: Sequence[Row], found: Sequence[Effect] | None
) -> dict[str, Any]:
    charts: list[tuple[str, dict[str, Any]]] = []
    machines = [
        _machine(sheet, [row for row in rows if row.machine == sheet.name], found, charts)._replace(
            doubt=older_fit(sheet, question.shape) or other_weights(sheet, question.shape)
        )
        for sheet in sheets
    ]
    return {
        **frame(TITLE, charts, STYLE),
        "asked": question.words,
        "machines": machines,
        "tested": found is not None,
        "shown": {"seconds": _seconds, "joules": _joules, "share": _share, "bytes": _bytes},
    }


def _machine(
    sheet: Sheet, rows: list[Row], found: Sequence[Effect] | None, charts: list[tuple[str, dict[str, Any]]]
) -> Machine:
    priced = [row for row in rows if row.costs is not None]
    chart = ""
    if priced:
        chart = f"cross-{len(charts)}"
        charts.append((chart, _times_chart(sheet, priced)))
    conclusions = []
    for metric in METRICS.values():
        own = [one for one in found or () if (one.where, one.metric) == (sheet.name, metric)]
        if own:
            conclusions.append(_conclusion(own, charts))
    absent = [row for row in rows if row.costs is None]
    return Machine(sheet, are_bounds(sheet), priced, absent, chart, conclusions)


def _conclusion(own: Sequence[Effect], charts: list[tuple[str, dict[str, Any]]]) -> Conclusion:
    chart = ""
    if own[0].lead_before is not None:
        chart = f"cross-{len(charts)}"
        charts.append((chart, leads_chart(own)))
    return Conclusion(conclusion_words(own), flip_words(own), chart)


def _times_chart(sheet: Sheet, rows: Sequence[Row]) -> dict[str, Any]:
    """A bar for each arm: time per token, over the least; those on the front filled."""
    import altair as alt

    values = [
        {
            "arm": row.arm.name,
            "phase": phase,
            "value": value,
            "front": row.on_front,
            "words": f"{_seconds(value)}{'  on the front' if row.on_front else ''}",
        }
        for row in rows
        for phase, value in (("time to the first token", row.ttft_s), ("time per token", row.tpot_s))
        if value is not None
    ]
    base = alt.Chart(alt.InlineData(values=values))
    y = alt.Y("arm:N", title=None, sort=None, axis=alt.Axis(ticks=False, domain=False, labelPadding=8, labelLimit=260))
    x = alt.X("value:Q", title="seconds, on a scale of powers of ten", scale=alt.Scale(type="log", nice=True))
    offset = alt.YOffset("phase:N", sort=["time to the first token", "time per token"])
    fill = alt.Fill("phase:N", legend=None).scale(
        domain=["time to the first token", "time per token"], range=["var(--accent)", "var(--accent-2)"]
    )
    opacity = alt.condition("datum.front", alt.value(1.0), alt.value(0.35))
    dots = base.mark_circle(size=70).encode(x=x, y=y, yOffset=offset, fill=fill, opacity=opacity)
    words = base.mark_text(align="left", dx=8, fontSize=10, color="var(--ink)").encode(
        x=x, y=y, yOffset=offset, text="words:N"
    )
    described = f"{sheet.name}: time to the first token and time per token of each arm"
    return page_spec(alt.layer(dots, words), HEAD_PX + 2 * BAR_PX * len(rows), described)


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _joules(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    if not value:
        return "0" if value == 0 else "–"
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 9.5 else f"{percent:.2g} %"


def _bytes(value: float | None) -> str:
    return "–" if value is None else format_bytes(round(value))
