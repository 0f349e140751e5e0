"""Charts as Vega-Lite specifications.

Colours are CSS variables of the page (`var(--accent)`), so that charts follow light, dark and print without being drawn
again. Nothing is said by colour alone: arms carry their letter, phases their name, points on the Pareto front are
filled, traces have a name and a dash pattern. Widths follow the container.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from results.energy import Array, UnresolvedError, power_curve
from results.records import PowerTrace

MAX_POINTS = 1200
"""Points drawn of a trace; more cannot be told apart at the width of a page."""

LABEL_DISTANCE = 0.08
"""Points nearer than this part of both axes share one label: two letters would overprint."""

PLOT_PX = 240
"""Width of the narrowest plot: what has room there has room on wider pages."""
LETTER_PX, LABEL_GAP_PX = 7, 5
"""Width of a bold character of a label, and how far a label stands from its point."""

CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--ink-2)",
        "titleColor": "var(--ink-2)",
        "titleFontWeight": "normal",
        "domainColor": "var(--rule-2)",
        "tickColor": "var(--rule-2)",
        "gridColor": "var(--rule)",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "labelLimit": 130,
    },
    "text": {"font": "system-ui, sans-serif", "fontSize": 11},
}
"""Shared by all charts of a page."""

_FIT = {"type": "fit-x", "contains": "padding"}


@dataclass(frozen=True)
class TradePoint:
    """An arm between two figures, in the chart's units; interval ends None where there is no interval."""

    letter: str
    name: str
    x: float
    x_low: float | None
    x_high: float | None
    y: float
    y_low: float | None
    y_high: float | None
    on_front: bool


@dataclass(frozen=True)
class EnergyBar:
    """Energy of one phase of an arm, in the chart's unit. label: the value as text, or why there is none."""

    arm: str
    phase: str
    energy: float | None
    low: float | None
    high: float | None
    label: str


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which points no other point beats: none is as good in both and better in one. Less is better."""
    order = sorted(range(len(points)), key=lambda i: points[i])
    on_front = [False] * len(points)
    best_y = float("inf")
    previous: tuple[float, float] | None = None
    for i in order:
        on_front[i] = points[i][1] < best_y or points[i] == previous
        if on_front[i]:
            best_y, previous = points[i][1], points[i]
    return on_front


def point_labels(points: Sequence[TradePoint]) -> list[str]:
    """Letters to print at each point; points too close to tell apart share the label of the first of them."""
    drawn_x = [v for p in points for v in (p.x, p.x_low, p.x_high) if v is not None]
    drawn_y = [v for p in points for v in (p.y, p.y_low, p.y_high) if v is not None]
    reach_x, reach_y = (LABEL_DISTANCE * (max(values) - min(values)) for values in (drawn_x, drawn_y))
    owners: list[int] = []
    for i, p in enumerate(points):
        near = (
            o
            for o in owners
            if owners[o] == o and abs(points[o].x - p.x) <= reach_x and abs(points[o].y - p.y) <= reach_y
        )
        owners.append(next(near, i))
    letters = [p.letter for p in points]
    return [
        ", ".join(letter for letter, o in zip(letters, owners, strict=True) if o == i and owners[i] == i)
        for i in range(len(points))
    ]


def label_sides(points: Sequence[TradePoint], labels: Sequence[str], x_range: Sequence[float]) -> list[bool]:
    """Whether each label stands left of its point: where it fits there and meets no other, else on the right."""
    px = PLOT_PX / (x_range[1] - x_range[0])
    is_left = [False] * len(points)
    last_px = 0.0
    for i in sorted((i for i, label in enumerate(labels) if label), key=lambda i: points[i].x):
        at_px, width_px = (points[i].x - x_range[0]) * px, LETTER_PX * len(labels[i]) + LABEL_GAP_PX
        is_left[i] = at_px - width_px >= last_px
        last_px = at_px if is_left[i] else at_px + width_px
    return is_left


def drawn_range(values: Sequence[float]) -> list[float]:
    """Axis from a little below the values to a little above; equal values get an axis that can still be labelled."""
    low, high = min(values), max(values)
    margin = 0.1 * (high - low) or 0.1 * abs(high) or 1.0
    return [low - margin, high + margin]


def latency_energy_chart(
    points: Sequence[TradePoint], latency_unit: str, energy_unit: str, description: str
) -> dict[str, Any]:
    """Arms between latency (across) and energy (up)."""
    across = (f"E2E latency per request ({latency_unit})", f"E2E ({latency_unit})")
    return trade_chart(points, across, (f"energy per token ({energy_unit})", energy_unit), description)


def trade_chart(
    points: Sequence[TradePoint], across: tuple[str, str], up: tuple[str, str], description: str
) -> dict[str, Any]:
    """Scatter of arms with 95 % intervals and the Pareto front through the means. across, up: axis and short title."""
    import altair as alt

    rows = [asdict(p) | _ends("x_", p.x, p.x_low, p.x_high) | _ends("y_", p.y, p.y_low, p.y_high) for p in points]
    ranges = [drawn_range([v for row in rows for v in (row[f"{axis}_low"], row[f"{axis}_high"])]) for axis in "xy"]
    labels = point_labels(points)
    for row, label, is_left in zip(rows, labels, label_sides(points, labels, ranges[0]), strict=True):
        row |= {"label": label, "label_left": is_left}
    # What is drawn last lies on top: a point on the front must not vanish under its neighbours.
    base = alt.Chart(alt.InlineData(values=sorted(rows, key=lambda row: bool(row["on_front"]))))
    x_scale, y_scale = (alt.Scale(domain=ends, nice=False) for ends in ranges)
    x = alt.X("x:Q", title=across[0], scale=x_scale).axis(tickCount=5)
    y = alt.Y("y:Q", title=up[0], scale=y_scale).axis(tickCount=5)
    tooltip = [
        alt.Tooltip("name:N", title="arm"),
        alt.Tooltip("x:Q", title=across[1], format=".4~g"),
        alt.Tooltip("y:Q", title=up[1], format=".4~g"),
    ]
    marks = base.mark_point(size=70, strokeWidth=1.6, opacity=1, stroke="var(--accent)").encode(
        x=x,
        y=y,
        fill=alt.condition("datum.on_front", alt.value("var(--accent)"), alt.value("var(--paper)")),
        tooltip=tooltip,
    )
    front = (
        base.transform_filter("datum.on_front")
        .mark_line(color="var(--accent)", strokeWidth=1, strokeDash=[4, 3])
        .encode(x=x, y=y, order="x:Q")
    )
    rule = {"color": "var(--ink-2)", "strokeWidth": 1}
    along_x = base.mark_rule(**rule).encode(x="x_low:Q", x2="x_high:Q", y=y)
    along_y = base.mark_rule(**rule).encode(y="y_low:Q", y2="y_high:Q", x=x)
    align = alt.expr("datum.label_left ? 'right' : 'left'")
    dx = alt.expr(f"datum.label_left ? {-LABEL_GAP_PX} : {LABEL_GAP_PX}")
    letters = base.mark_text(align=align, dx=dx, dy=-11, fontWeight="bold", color="var(--ink)").encode(
        x=x, y=y, text="label:N"
    )
    return _spec(alt.layer(front, along_x, along_y, marks, letters), 220, description)


def energy_chart(bars: Sequence[EnergyBar], unit: str, description: str) -> dict[str, Any]:
    """Bars of energy per token, an arm's phases side by side, with intervals and the value in words."""
    import altair as alt

    phases = list(dict.fromkeys(b.phase for b in bars))
    rows = [
        asdict(b)
        | {"energy": b.energy or 0.0, "text_at": max(b.energy or 0.0, b.high or 0.0)}
        | _ends("", b.energy or 0.0, b.low, b.high)
        for b in bars
    ]
    base = alt.Chart(alt.InlineData(values=rows))
    y = alt.Y("arm:N", title=None, sort=None).axis(ticks=False, domain=False, labelPadding=8)
    offset = alt.YOffset("phase:N", sort=phases)
    top = max((row["text_at"] for row in rows), default=0.0) or 1.0
    # Room to the right of the longest bar for its label.
    x = alt.X("energy:Q", title=f"energy per token ({unit})", scale=alt.Scale(domain=[0, top * 1.9])).axis(tickCount=4)
    fill = alt.Fill("phase:N", legend=None).scale(domain=phases, range=["var(--accent)", "var(--accent-2)"])
    drawn = base.mark_bar(height={"band": 0.8}).encode(x=x, y=y, yOffset=offset, fill=fill)
    interval = base.mark_rule(color="var(--ink)", strokeWidth=1.2).encode(
        x="low:Q", x2="high:Q", y=y, yOffset=alt.YOffset("phase:N", sort=phases, bandPosition=0.5)
    )
    words = base.mark_text(align="left", dx=6, color="var(--ink)").encode(
        x="text_at:Q", y=y, yOffset=offset, text="label:N"
    )
    n_arms = len(dict.fromkeys(b.arm for b in bars))
    return _spec(alt.layer(drawn, interval, words), 26 + 40 * n_arms, description)


def power_chart(
    traces: Sequence[PowerTrace],
    prefills_s: Sequence[tuple[float, float]],
    token_times_s: Sequence[float],
    from_s: float,
    to_s: float,
    description: str,
) -> dict[str, Any]:
    """Power of each component between two instants, prefill phases shaded, one tick a token; time from `from_s`.

    Raises UnresolvedError where a counter's power cannot be derived.
    """
    import altair as alt

    title = "time since the window's start (s)"
    x = alt.X("at_s:Q", title=title, scale=alt.Scale(nice=False)).axis(grid=False, tickCount=6)
    y = alt.Y("power_w:Q", title="power (W)", scale=alt.Scale(zero=True)).axis(tickCount=5)
    shades = [{"from_s": a - from_s, "to_s": b - from_s} for a, b in prefills_s]
    layers = [
        alt.Chart(alt.InlineData(values=shades))
        .mark_rect(color="var(--shade)")
        .encode(x=alt.X("from_s:Q", title=title), x2="to_s:Q")
    ]
    dashes = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
    for n, trace in enumerate(traces):
        times_s, watts = shown_part(trace, from_s, to_s)
        rows = [{"at_s": float(t), "power_w": float(w)} for t, w in zip(times_s - from_s, watts, strict=True)]
        name = f"{trace.meter} {trace.component}"
        interpolate = {"power": "linear", "held": "step-after", "counter": "step-before"}[trace.kind]
        layers.append(
            alt.Chart(alt.InlineData(values=rows))
            .mark_line(
                color="var(--accent)", strokeWidth=1.2, strokeDash=dashes[n % len(dashes)], interpolate=interpolate
            )
            .encode(x=x, y=y)
        )
        if len(traces) > 1 and rows:
            last = rows[-1] | {"name": name}
            layers.append(
                alt.Chart(alt.InlineData(values=[last]))
                .mark_text(align="right", dy=-7, color="var(--ink)")
                .encode(x=x, y=y, text="name:N")
            )
    ticks = [{"at_s": float(t) - from_s} for t in token_times_s if from_s <= t <= to_s]
    layers.append(
        alt.Chart(alt.InlineData(values=ticks))
        .mark_rule(color="var(--accent-2)", strokeWidth=1)
        .encode(x=x, y=alt.value(196), y2=alt.value(206))
    )
    return _spec(alt.layer(*layers), 210, description)


def shown_part(trace: PowerTrace, from_s: float, to_s: float) -> tuple[Array, Array]:
    """(times, watts) between two instants, thinned to at most about `MAX_POINTS` without losing a peak."""
    times_s, watts = power_curve(trace)
    inside = (times_s >= from_s) & (times_s <= to_s)
    if not inside.any():
        raise UnresolvedError(f"{trace.meter} {trace.component}: no reading in the shown part of the window")
    return thinned(times_s[inside], watts[inside])


def thinned(times_s: Array, watts: Array) -> tuple[Array, Array]:
    """First, lowest, highest and last reading of each of `MAX_POINTS` / 4 equal bins."""
    n = len(times_s)
    if n <= MAX_POINTS:
        return times_s, watts
    edges = np.linspace(0, n, MAX_POINTS // 4 + 1).astype(np.intp)
    kept = [
        {a, a + int(np.argmin(watts[a:b])), a + int(np.argmax(watts[a:b])), b - 1}
        for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    indices = np.array(sorted(set().union(*kept)), dtype=np.intp)
    return times_s[indices], watts[indices]


def _ends(prefix: str, mean: float, low: float | None, high: float | None) -> dict[str, float]:
    """Ends for drawing. No interval is a line of no length: a column of nulls has no extent and makes Vega warn."""
    return {f"{prefix}low": mean if low is None else low, f"{prefix}high": mean if high is None else high}


def _spec(chart: Any, height_px: int, description: str) -> dict[str, Any]:
    spec: dict[str, Any] = chart.properties(width="container", height=height_px, description=description).to_dict()
    # The page's configuration (`CONFIG`) is given once; altair's defaults would override it in every chart.
    spec.pop("config", None)
    return spec | {"autosize": _FIT}
