"""The chart of a table drawn again: theirs and ours as two series."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness.reproduce.findings import Judged, ratios
from harness.reproduce.ledger import Class, Ledger
from harness.reproduce.printed import Number, Range, Span
from harness.reproduce.redrawn import Entry, SourceTable
from harness.reproduce.sensitivity import Varied
from harness.reproduce.told import ours_text
from results.report.charts import page_spec

SERIES = ("theirs", "ours")
CHANGES = ("a fifth more", "a fifth less")
FILLS = ("var(--accent)", "var(--accent-2)")
LANE_PX = 34
RATIO_CLASSES: tuple[Class, ...] = ("predicted", "consistent")
NAMES_SHARE = 0.3
ROOM = 0.25
"""Of the bars' length: what is free behind them."""
LEAST_GAP = 0.06
"""Between names of lines, of the chart's height."""
LINE_COLOURS = tuple(f"var(--arm-{n})" for n in range(2, 8))
"""Of the page's style, without the two that tell theirs from ours."""
BAR_PX, LINES_PX, DOTS_PX, HEAD_PX = 17, 260, 320, 26


def theirs_of(book: Ledger, entry: Entry) -> float | str | None:
    """What is given, or the value of the claim that states it."""
    if entry.theirs is not None or not entry.claim:
        return entry.theirs
    printed = book.claims[entry.claim].printed
    return printed.value if isinstance(printed, Number) else str(printed)


def table_chart(book: Ledger, table: SourceTable) -> dict[str, Any]:
    """Bars, lines or dots of the entries that are numbers on either side; bars of ranges too."""
    points = _points(book, table)
    described = f"{table.name}: {table.title}, theirs and ours"
    if table.picture == "dots":
        return _dots(table, points, described)
    if table.picture == "bars":
        return _bars(table, points, _ranges(book, table), described)
    return _lines(table, points, described)


def ratio_chart(rows: Sequence[Judged]) -> dict[str, Any] | None:
    """Ours over theirs of every row whose size is tested against a model, a dot a figure; None where there is none.

    The band is the widest tolerance of these rows. Filled: predicted; hollow: consistent, which is no prediction.
    """
    import altair as alt

    tested = [row for row in rows if row.claim.klass in RATIO_CLASSES]
    found = [(row.claim, ratio) for row in tested for ratio in ratios(row) if ratio > 0]
    if not found:
        return None
    widest = max(row.claim.tolerance or 0.0 for row in tested)
    most = max(max(ratio, 1 / ratio) for _, ratio in found) * 1.1
    scale = alt.Scale(type="log", domain=[1 / most, most], nice=False)
    x = alt.X("ratio:Q", title="ours over theirs", scale=scale).axis(format="~g", tickCount=7)
    y = alt.Y("lane:N", title=None, sort=None).axis(ticks=False, domain=False, labelPadding=8)
    lanes = [
        {"lane": f"{claim.source} {claim.klass}", "class": claim.klass, "claim": claim.id, "ratio": ratio}
        for claim, ratio in sorted(found, key=lambda one: (one[0].source, RATIO_CLASSES.index(one[0].klass)))
    ]
    base = alt.Chart(alt.InlineData(values=lanes))
    band = (
        alt.Chart(alt.InlineData(values=[{"from": 1 - widest, "to": 1 + widest}]))
        .mark_rect(color="var(--shade)")
        .encode(x=alt.X("from:Q", title="ours over theirs", scale=scale), x2="to:Q")
    )
    fill = alt.Fill("class:N", legend=None).scale(domain=list(RATIO_CLASSES), range=["var(--accent-2)", "transparent"])
    dots = base.mark_point(stroke="var(--accent-2)", size=30, opacity=0.7).encode(
        x=x, y=y, fill=fill, tooltip=["claim:N", alt.Tooltip("ratio:Q", format=".3f")]
    )
    height = HEAD_PX + LANE_PX * len({point["lane"] for point in lanes})
    return page_spec(alt.layer(band, dots), height, "ours over theirs of predicted and consistent rows, by source")


def _points(book: Ledger, table: SourceTable) -> list[dict[str, Any]]:
    found = []
    for entry in table.entries:
        for series, value in zip(SERIES, (theirs_of(book, entry), entry.ours), strict=True):
            if isinstance(value, float | int):
                found.append({"row": entry.row, "column": entry.column, "series": series, "value": float(value)})
    return found


def _ranges(book: Ledger, table: SourceTable) -> list[dict[str, Any]]:
    """Where the source prints a range, or ours is one: from, value: its ends."""
    found = []
    for entry in table.entries:
        place = {"row": entry.row, "column": entry.column}
        printed = book.claims[entry.claim].printed if entry.claim and entry.theirs is None else None
        if isinstance(printed, Range):
            ends = {"from": printed.low.value, "value": printed.high.value, "said": str(printed)}
            found.append({**place, "series": SERIES[0], **ends})
        if isinstance(entry.ours, Span):
            ends = {"from": entry.ours.low, "value": entry.ours.high, "said": ours_text(entry.ours)}
            found.append({**place, "series": SERIES[1], **ends})
    return found


def _bars(
    table: SourceTable, points: list[dict[str, Any]], ranges: list[dict[str, Any]], described: str
) -> dict[str, Any]:
    """A range is a paler bar between its ends."""
    import altair as alt

    one_column = len(table.columns) == 1

    def named(drawn: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [one | {"place": one["row"] if one_column else f"{one['row']}, {one['column']}"} for one in drawn]

    base = alt.Chart(alt.InlineData(values=named(points)))
    between = alt.Chart(alt.InlineData(values=named(ranges)))
    axis = alt.Axis(ticks=False, domain=False, labelPadding=8, labelLimit=340)
    places = [name if one_column else f"{name}, {column}" for name in table.rows for column in table.columns]
    there = {one["place"] for one in named([*points, *ranges])}
    y = alt.Y("place:N", title=None, sort=[place for place in places if place in there], axis=axis)
    offset = alt.YOffset("series:N", sort=list(SERIES))
    # Room for the words at the end of the longest bar, on a phone too.
    values = [0.0, *(one["value"] for one in [*points, *ranges])]
    low, high = min(values), max(values)
    span = alt.Scale(domain=[low, high + ROOM * (high - low)]) if low < high else alt.Undefined
    x = alt.X("value:Q", title=table.unit, scale=span).axis(tickCount=5)
    fill = alt.Fill("series:N", legend=None).scale(domain=list(SERIES), range=list(FILLS))
    drawn = base.mark_bar(height={"band": 0.85}).encode(x=x, y=y, yOffset=offset, fill=fill)
    # Beside the end of a bar; of one below 0 on its other side, where nothing else stands.
    words = [
        base.mark_text(align="left", dx=4, color="var(--ink)", fontSize=10)
        .encode(x=end, y=y, yOffset=offset, text=alt.Text("value:Q", format=".4~g"))
        .transform_filter(side)
        for end, side in ((x, "datum.value >= 0"), (alt.XDatum(0), "datum.value < 0"))
    ]
    layers = [drawn, *words]
    if ranges:
        ends = between.mark_bar(height={"band": 0.85}, fillOpacity=0.5).encode(
            x=alt.X("from:Q", title=table.unit), x2="value:Q", y=y, yOffset=offset, fill=fill
        )
        said = between.mark_text(align="left", dx=4, color="var(--ink)", fontSize=10).encode(
            x=alt.X("value:Q", title=table.unit), y=y, yOffset=offset, text="said:N"
        )
        layers += [ends, said]
    n_series = len({one["series"] for one in [*points, *ranges]})
    return page_spec(alt.layer(*layers), HEAD_PX + BAR_PX * n_series * len(there), described)


def _dots(table: SourceTable, points: list[dict[str, Any]], described: str) -> dict[str, Any]:
    """A dot a row and series that has both columns, with the row's name beside it; theirs hollow, ours filled."""
    import altair as alt

    across, up = table.columns
    both: dict[tuple[str, str], dict[str, float]] = {}
    """By row and series, then by column."""
    for point in points:
        both.setdefault((point["row"], point["series"]), {})[point["column"]] = point["value"]
    values = [
        {"row": row, "series": series, "x": found[across], "y": found[up]}
        for (row, series), found in both.items()
        if len(found) == 2
    ]
    most = max((found[across] for found in both.values() if across in found), default=1.0)
    x = alt.X("x:Q", title=across, scale=alt.Scale(nice=False, domain=[0, (1 + NAMES_SHARE) * most])).axis(tickCount=6)
    y = alt.Y("y:Q", title=up, scale=alt.Scale(zero=True)).axis(tickCount=5)
    base = alt.Chart(alt.InlineData(values=values))
    fill = alt.Fill("series:N", legend=None).scale(domain=list(SERIES), range=["transparent", FILLS[1]])
    stroke = alt.Stroke("series:N", legend=None).scale(domain=list(SERIES), range=list(FILLS))
    dots = base.mark_point(size=36).encode(x=x, y=y, fill=fill, stroke=stroke, tooltip=["row:N", "x:Q", "y:Q"])
    words = base.mark_text(align="left", dx=7, color="var(--ink)", fontSize=10).encode(x=x, y=y, text="row:N")
    return page_spec(alt.layer(dots, words), DOTS_PX, described)


def _lines(table: SourceTable, points: list[dict[str, Any]], described: str) -> dict[str, Any]:
    """Theirs dashed, ours whole; a colour for each column, whose name stands at the end of its line."""
    import altair as alt

    numbered = [point | {"at": float(point["row"])} for point in points]
    places = [point["at"] for point in numbered] or [0.0]
    first, last_at = min(places), max(places)
    # Room to the right of the lines for their names.
    scale = alt.Scale(nice=False, padding=12, domain=[first, last_at + NAMES_SHARE * (last_at - first)])
    least_step = 1 if all(place.is_integer() for place in places) else 0
    x = alt.X("at:Q", title=table.rows_are, scale=scale).axis(tickCount=6, tickMinStep=least_step)
    y = alt.Y("value:Q", title=table.unit, scale=alt.Scale(zero=True)).axis(tickCount=5)
    colours = [LINE_COLOURS[n % len(LINE_COLOURS)] for n in range(len(table.columns))]
    stroke = alt.Stroke("column:N", legend=None).scale(domain=table.columns, range=colours)
    dash = alt.StrokeDash("series:N", legend=None).scale(domain=list(SERIES), range=[[5, 3], [1, 0]])
    base = alt.Chart(alt.InlineData(values=numbered))
    drawn = base.mark_line(strokeWidth=1.5).encode(x=x, y=y, stroke=stroke, strokeDash=dash, detail="series:N")
    dots = base.mark_point(size=22).encode(x=x, y=y, stroke=stroke)
    ends = alt.Chart(alt.InlineData(values=_names(numbered)))
    words = ends.mark_text(align="left", dx=8, fontSize=10).encode(
        x=x, y=y, text="name:N", color=alt.Color("column:N", legend=None).scale(domain=table.columns, range=colours)
    )
    return page_spec(alt.layer(drawn, dots, words), LINES_PX, described)


def _names(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Behind the last point of each line; names that would lie on each other are moved up."""
    last = {(point["column"], point["series"]): point for point in points}
    gap = LEAST_GAP * max((point["value"] for point in points), default=0.0)
    found: list[dict[str, Any]] = []
    for (column, series), point in sorted(last.items(), key=lambda item: item[1]["value"]):
        at = max(point["value"], found[-1]["value"] + gap) if found else point["value"]
        found.append(point | {"value": at, "name": f"{column}, {series}"})
    return found


def flips_chart(tested: Varied) -> dict[str, Any]:
    """How many verdicts flip with each constant, a fifth less and a fifth more."""
    import altair as alt

    counted = Counter((flip.change.sheet, flip.change.constant, flip.change.factor) for flip in tested.flips)
    places = Counter[tuple[str, str]]()
    for (sheet, constant, _), n in counted.items():
        places[sheet, constant] += n
    order = [f"{sheet}: {constant}" for (sheet, constant), _ in places.most_common()]
    values = [
        {"constant": f"{sheet}: {constant}", "change": CHANGES[factor < 1], "n": n}
        for (sheet, constant, factor), n in counted.items()
    ]
    base = alt.Chart(alt.InlineData(values=values))
    y = alt.Y("constant:N", title=None, sort=order, axis=alt.Axis(ticks=False, domain=False, labelLimit=460))
    offset = alt.YOffset("change:N", sort=list(CHANGES))
    x = alt.X("n:Q", title="verdicts that flip").axis(tickMinStep=1)
    fill = alt.Fill("change:N", legend=None).scale(domain=list(CHANGES), range=list(FILLS))
    drawn = base.mark_bar(height={"band": 0.85}).encode(x=x, y=y, yOffset=offset, fill=fill)
    words = base.mark_text(align="left", dx=4, color="var(--ink)", fontSize=10).encode(
        x=x, y=y, yOffset=offset, text="change:N"
    )
    return page_spec(alt.layer(drawn, words), HEAD_PX + BAR_PX * len(order), "Verdicts that flip, by constant")
