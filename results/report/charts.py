"""Charts as Vega-Lite specifications.

Colours are CSS variables of the page (`var(--accent)`), so that charts follow light, dark and print without being drawn
again. Nothing is said by colour alone: arms and phases carry their name, traces a name and a dash pattern. Widths
follow the container.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from results.cumulative import UnresolvedError, unbroken
from results.energy import Array, power_curve
from results.records import PowerTrace

MAX_POINTS = 1200
"""Points drawn of a trace; more cannot be told apart at the width of a page."""

POWER_PX = 210
"""Height of a chart of power."""
NAME_PX = 14
"""Of a line of words in it."""

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
class EnergyBar:
    """Energy of one phase of an arm, in the chart's unit. label: the value as text, or why there is none."""

    arm: str
    phase: str
    energy: float | None
    low: float | None
    high: float | None
    label: str


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
    return page_spec(alt.layer(drawn, interval, words), 26 + 40 * n_arms, description)


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
    ends: list[dict[str, Any]] = []
    top_w = 0.0
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
        ends += [rows[-1] | {"name": name}] if len(traces) > 1 and rows else []
        top_w = max([top_w, *(row["power_w"] for row in rows)])
    ticks = [{"at_s": float(t) - from_s} for t in token_times_s if from_s <= t <= to_s]
    layers.append(
        alt.Chart(alt.InlineData(values=ticks))
        .mark_rule(color="var(--accent-2)", strokeWidth=1)
        .encode(x=x, y=alt.value(196), y2=alt.value(206))
    )
    if ends:
        names = alt.Chart(alt.InlineData(values=_apart(ends, NAME_PX / POWER_PX * top_w)))
        # Behind the words paper: lines of a busy window leave nothing to read.
        for look in ({"color": "var(--paper)", "stroke": "var(--paper)", "strokeWidth": 4}, {"color": "var(--ink)"}):
            layers.append(names.mark_text(align="right", dy=-7, **look).encode(x=x, y=y, text="name:N"))
    return page_spec(alt.layer(*layers), POWER_PX, description)


def _apart(ends: Sequence[dict[str, Any]], gap_w: float) -> list[dict[str, Any]]:
    """Names of lines, no nearer to each other than the gap: those that would lie on another are moved up."""
    found: list[dict[str, Any]] = []
    for end in sorted(ends, key=lambda end: float(end["power_w"])):
        least = found[-1]["power_w"] + gap_w if found else end["power_w"]
        found.append(end | {"power_w": max(end["power_w"], least)})
    return found


def shown_part(trace: PowerTrace, from_s: float, to_s: float) -> tuple[Array, Array]:
    """(times, watts) between two instants, thinned to at most about `MAX_POINTS` without losing a peak."""
    times_s, watts = power_curve(unbroken(trace, from_s, to_s))
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


def page_spec(chart: Any, height_px: int, description: str) -> dict[str, Any]:
    spec: dict[str, Any] = chart.properties(width="container", height=height_px, description=description).to_dict()
    # The page's configuration (`CONFIG`) is given once; altair's defaults would override it in every chart.
    spec.pop("config", None)
    return spec | {"autosize": _FIT}
