"""A picture of raw traces for a file: power over time, one panel a component, the window's edges marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results.cumulative import UnresolvedError
from results.derivation import energy_of_spans
from results.records import PowerTrace
from results.report.charts import CONFIG, shown_part
from results.units import format_quantity

MAX_PANELS = 12
"""Components beyond these are in the trace file only."""
WIDTH_PX, PANEL_PX, SCALE = 760, 130, 2
PAPER_COLOURS = {
    "--paper": "#fdfdfb",
    "--ink": "#1a1a19",
    "--ink-2": "#55554f",
    "--rule": "#e5e4de",
    "--rule-2": "#8f8e85",
    "--accent": "#0b5c9e",
    "--accent-2": "#b34700",
}
"""What the report's page calls these by day: a picture has no style sheet."""


def write_plot(traces: Sequence[PowerTrace], window: tuple[float, float], path: Path) -> None:
    """A PNG, in a file that is not there yet. Raises `OSError` where it cannot be written, and leaves no half of it."""
    import vl_convert

    picture = vl_convert.vegalite_to_png(plot_spec(traces, window), scale=SCALE)
    with path.open("xb") as file:
        try:
            file.write(picture)
            file.flush()
        except OSError:
            path.unlink()
            raise


def plot_spec(traces: Sequence[PowerTrace], window: tuple[float, float]) -> dict[str, Any]:
    """Vega-Lite specification with plain colours. Time counts from the window's start."""
    panels = [_panel(trace, window) for trace in traces[:MAX_PANELS]]
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "config": CONFIG | {"background": "var(--paper)", "title": {"anchor": "start", "fontWeight": "normal"}},
        "spacing": 14,
        "resolve": {"scale": {"x": "shared"}},
        "vconcat": panels,
    }
    coloured: dict[str, Any] = _with_colours(spec)
    return coloured


def _panel(trace: PowerTrace, window: tuple[float, float]) -> dict[str, Any]:
    start_s, end_s = window
    title = f"{trace.meter} {trace.component}: {_said(trace, window)}"
    try:
        times_s, watts = shown_part(trace, float(trace.times_s[0]), float(trace.times_s[-1]))
    except UnresolvedError as reason:
        return {"title": f"{trace.meter} {trace.component}: {reason}", "mark": "point", "data": {"values": []}}
    rows = [
        {"at_s": float(t) - start_s, "power_w": float(w)} for t, w in zip(times_s.tolist(), watts.tolist(), strict=True)
    ]
    axis = {"grid": False, "tickCount": 12}
    at = {"field": "at_s", "type": "quantitative", "title": "s", "scale": {"nice": False}, "axis": axis}
    interpolate = {"power": "linear", "held": "step-after", "counter": "step-before"}[trace.kind]
    return {
        "title": {"text": title, "color": "var(--ink)", "fontSize": 11},
        "width": WIDTH_PX,
        "height": PANEL_PX,
        "layer": [
            {
                "data": {"values": [{"at_s": 0.0}, {"at_s": end_s - start_s}]},
                "mark": {"type": "rule", "color": "var(--accent-2)", "strokeDash": [4, 3]},
                "encoding": {"x": at},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "line", "color": "var(--accent)", "strokeWidth": 1.2, "interpolate": interpolate},
                "encoding": {
                    "x": at,
                    "y": {"field": "power_w", "type": "quantitative", "title": "W", "scale": {"zero": True}},
                },
            },
        ],
    }


def _said(trace: PowerTrace, window: tuple[float, float]) -> str:
    """Joules and method of one component over the window, or why there are none."""
    reading = energy_of_spans([trace], [window], trace.meter, trace.component)
    if reading.energy_j is None:
        return f"no energy ({reading.reason})"
    watts = format_quantity(reading.average_power_w or 0.0, "W")
    return f"{format_quantity(reading.energy_j, 'J', reading.uncertainty_j)}, {watts} on average, {trace.method}"


def _with_colours(part: Any) -> Any:
    """The specification with the page's names of colours replaced by the colours."""
    if isinstance(part, dict):
        return {key: _with_colours(value) for key, value in part.items()}
    if isinstance(part, list):
        return [_with_colours(value) for value in part]
    if isinstance(part, str) and part.startswith("var("):
        return PAPER_COLOURS[part.removeprefix("var(").removesuffix(")")]
    return part
