"""A page of changes: how many of each verdict, a picture of the changes with their intervals, and a table of all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from markupsafe import Markup, escape

from results.report.charts import page_spec
from results.report.plain_pages import frame, write_plain_pages

MOST_DRAWN: Final = 60
ROW_PX: Final = 18
WIDEST: Final = 4.0
"""Times the largest change: what is drawn of an interval that leaves 0 open."""
LEAST_SPAN: Final = 5.0
"""In % or points."""
CUT: Final = "intervals that end at the edge are wider (the table has them)"
STYLE: Final = "@page { size: landscape; } .figures td.words { min-width: 16em; }"
"""Many columns, and words in the last one."""
TOLD_ONCE: Final = frozenset({"arm", "workload", "device", "runs", "how", "why"})
"""Columns that stand above the table where all rows have the same there: on a phone they hide the figures."""


class Look(NamedTuple):
    """How changes of a verdict are drawn. words: of the shape, in the legend."""

    colour: str
    shape: str
    words: str


WORSE: Final = Look("var(--accent-2)", "triangle-up", "triangle up")
BETTER: Final = Look("var(--arm-2)", "triangle-down", "triangle down")
OTHER: Final = Look("var(--accent)", "square", "square")
OPEN: Final = Look("var(--rule-2)", "circle", "circle")


class Drawn(NamedTuple):
    """A change with its interval, in % or points."""

    row: str
    change: float
    low: float
    high: float
    verdict: str


@dataclass(frozen=True)
class ChangesPage:
    """lead: what stands before the counts. axis: what a change is. verdicts: that are counted. looks: of verdicts that
    are drawn. orders: of each row, what its cells of other units are sorted by. warnings: what a reader must know
    first."""

    title: str
    lead: str | Markup
    axis: str
    verdicts: Sequence[str]
    order: Sequence[str]
    looks: Mapping[str, Look]
    drawn: Sequence[Drawn]
    columns: Sequence[str]
    numbers: Collection[str]
    rows: Sequence[Sequence[str]]
    orders: Sequence[Mapping[str, float | None]]
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()


def write_changes_page(asked: ChangesPage, path: Path) -> None:
    """Raises `OSError`."""
    drawn, description = asked.drawn[:MOST_DRAWN], f"{asked.axis}, with 95 % intervals"
    columns, once = _told_once(asked)
    counts, seen = Counter(asked.verdicts), {one.verdict for one in drawn}
    span = _span(drawn)
    legend = [f"{look.words}: {one}" for one, look in asked.looks.items() if one in seen]
    legend += [CUT] if any(max(-one.low, one.high) > span for one in drawn) else []
    shown = {
        "lead": asked.lead,
        "counts": [(verdict, counts[verdict]) for verdict in asked.order if counts[verdict]],
        "warnings": asked.warnings,
        "notes": [coded(note) for note in asked.notes],
        "legend": "; ".join(legend),
        "left_out": len(asked.drawn) - len(drawn),
        "description": description,
        "once": once,
        "columns": columns,
        "words": asked.columns[-1],
        "numbers": asked.numbers,
        "rows": [
            ([(one, coded(cell)) for one, cell in zip(asked.columns, row, strict=True) if one in columns], orders)
            for row, orders in zip(asked.rows, asked.orders, strict=True)
        ],
    }
    charts = [("changes", _chart(asked, drawn, description))] if drawn else []
    page = frame(asked.title, charts, STYLE)
    write_plain_pages("results.report", {path.name: ("changes.html.j2", page | shown)}, path.parent)


def _told_once(asked: ChangesPage) -> tuple[list[str], list[tuple[str, Markup]]]:
    """Columns of the table, without empty ones; and what all rows have, with its column."""
    columns, once = [], []
    for column, cells in zip(asked.columns, zip(*asked.rows, strict=True), strict=False):
        if column in TOLD_ONCE and len(cells) > 1 and cells[0] and len(set(cells)) == 1:
            once.append((column, coded(cells[0])))
        elif any(cells):
            columns.append(column)
    return columns, once


def coded(text: str) -> Markup:
    """Commands, which stand between backticks as in a terminal's words, as the page shows them."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _span(drawn: Sequence[Drawn]) -> float:
    """How far the picture reaches on either side: all changes, and whole intervals of those that are certain or small.
    Two trials that scatter leave an interval of a million percent, beside which nothing else could be seen."""
    widest = WIDEST * max((abs(one.change) for one in drawn), default=0.0)
    certain = (max(-one.low, one.high) for one in drawn if not one.low <= 0 <= one.high)
    return max(widest, LEAST_SPAN, *certain)


def _chart(asked: ChangesPage, drawn: Sequence[Drawn], description: str) -> dict[str, Any]:
    import altair as alt

    span = _span(drawn)
    values = [
        one._asdict() | {"row": f"{i + 1}. {one.row}", "low": max(one.low, -span), "high": min(one.high, span)}
        for i, one in enumerate(drawn)
    ]
    base = alt.Chart(alt.InlineData(values=values))
    title = f"{asked.axis} (%; of scores: points)"
    y = alt.Y("row:N", title=None, sort=None).axis(ticks=False, domain=False, labelLimit=420)
    x = alt.X("change:Q", title=title)
    domain = list(asked.looks)
    colour = alt.Color("verdict:N", legend=None).scale(
        domain=domain, range=[one.colour for one in asked.looks.values()]
    )
    shape = alt.Shape("verdict:N", legend=None).scale(domain=domain, range=[one.shape for one in asked.looks.values()])
    layers = [
        alt.Chart(alt.InlineData(values=[{"change": 0}])).mark_rule(color="var(--ink)", strokeWidth=1).encode(x=x),
        base.mark_rule(strokeWidth=1.4).encode(x=alt.X("low:Q", title=title), x2="high:Q", y=y, color=colour),
        base.mark_point(size=46, filled=True).encode(x=x, y=y, color=colour, shape=shape),
    ]
    return page_spec(alt.layer(*layers), 40 + ROW_PX * len(values), description)
