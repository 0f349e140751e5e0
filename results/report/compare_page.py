"""What a comparison says, as a table for files and as a page with a picture of its changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd

from results.history.comparison import Compared, Comparison
from results.history.points import Figure
from results.report.charts import page_spec
from results.report.csv import csv_text
from results.report.files import replace_text
from results.report.plain_pages import frame, write_plain_pages
from results.units import format_number, format_p, format_quantity

ORDER: Final = ("worse", "better", "different", "not certain", "not tested", "refused")
MOST_DRAWN: Final = 60
ROW_PX: Final = 18


def comparison_frame(found: Comparison) -> pd.DataFrame:
    rows = []
    for row in found.rows:
        one, other = row.first, row.second
        rows.append(
            {
                "verdict": row.verdict, "arm": row.arm, "workload": row.workload, "device": row.device,
                "metric": one.metric, "phase": one.phase, "unit": one.unit,
                "method_a": one.method, "method_b": None if other is None else other.method,
                "meter_a": one.meter, "meter_b": None if other is None else other.meter,
                "n_a": one.n, "n_b": None if other is None else other.n,
                "mean_a": one.mean, "mean_b": None if other is None else other.mean,
                "change": row.change, "low": row.low, "high": row.high,
                "change_is": "difference" if row.is_score else "share",
                "p": row.p, "p_adjusted": row.adjusted, "test": row.test, "hedges_g": row.effect,
                "requests_longer": row.longer, "unlike": "; ".join(row.said) or None, "reason": row.reason or None,
            }
        )  # fmt: skip
    frame_ = pd.DataFrame(rows)
    numbers = ("mean_a", "mean_b", "change", "low", "high", "p", "p_adjusted", "hedges_g", "requests_longer")
    return frame_.astype(dict.fromkeys(numbers, "float64") | {"n_a": "Int64", "n_b": "Int64"})


def write_comparison_csv(found: Comparison, path: Path) -> None:
    """Raises `OSError`."""
    replace_text(path, csv_text(comparison_frame(found)))


def write_comparison_page(found: Comparison, path: Path) -> None:
    """Raises `OSError`."""
    rows = ordered(found)
    drawn = [row for row in rows if row.low is not None and row.high is not None][:MOST_DRAWN]
    charts = [("changes", _chart(drawn))] if drawn else []
    counts = Counter[str](row.verdict for row in rows)
    shown = {
        "first": found.first.name,
        "second": found.second.name,
        "said": list(dict.fromkeys(one for row in rows for one in row.said)),
        "notes": found.notes,
        "counts": [(verdict, counts[verdict]) for verdict in ORDER if counts[verdict]],
        "rows": [table_row(row) for row in rows],
        "columns": COLUMNS,
        "numbers": NUMBERS,
        "has_chart": bool(drawn),
        "left_out": sum(row.low is not None for row in rows) - len(drawn),
    }
    page = frame(f"{found.first.name} and {found.second.name}", charts)
    write_plain_pages("results.report", {path.name: ("compare.html.j2", page | shown)}, path.parent)


def ordered(found: Comparison) -> list[Compared]:
    return sorted(found.rows, key=lambda row: ORDER.index(row.verdict))


COLUMNS: Final = (
    "verdict",
    "arm",
    "workload",
    "device",
    "figure",
    "A",
    "B",
    "change",
    "95 %",
    "p, adjusted",
    "g",
    "how",
)
NUMBERS: Final = frozenset({"A", "B", "change", "95 %", "p, adjusted", "g"})


def table_row(row: Compared) -> tuple[str, ...]:
    """In the order of `COLUMNS`."""
    ends = "" if row.low is None or row.high is None else f"[{shown(row, row.low)}, {shown(row, row.high)}]"
    longer = "" if row.longer is None else f"{row.longer:.0%} of requests took longer"
    how = [_method(row), row.test or "", longer, *row.said, row.reason]
    return (
        row.verdict, row.arm, row.workload, row.device, row.first.name,
        _value(row.first), "" if row.second is None else _value(row.second),
        "" if row.change is None or row.verdict == "refused" else shown(row, row.change), ends,
        "" if row.adjusted is None else format_p(row.adjusted).removeprefix("p ").removeprefix("= "),
        "" if row.effect is None else format_number(row.effect), "; ".join(filter(None, how)),
    )  # fmt: skip


def _value(figure: Figure) -> str:
    return format_quantity(100 * figure.mean, "%") if figure.unit == "1" else format_quantity(figure.mean, figure.unit)


def _method(row: Compared) -> str:
    ways = [f"{f.method}, {f.meter}" if f.meter else f.method for f in (row.first, row.second) if f is not None]
    return " beside ".join(dict.fromkeys(ways))


def shown(row: Compared, change: float) -> str:
    number = 100 * change
    return f"{number:+.{1 if abs(number) >= 1 else 2}f} {'points' if row.is_score else '%'}"


def _chart(rows: Sequence[Compared]) -> dict[str, Any]:
    import altair as alt

    several = len({(row.workload, row.device) for row in rows}) > 1
    values = []
    for i, row in enumerate(rows):
        where = f" · {row.workload} · {row.device}" if several else ""
        assert row.change is not None
        assert row.low is not None
        assert row.high is not None
        values.append(
            {
                "row": f"{i + 1}. {row.arm} · {row.first.name}{where}", "change": 100 * row.change,
                "low": 100 * row.low, "high": 100 * row.high, "verdict": row.verdict,
            }
        )  # fmt: skip
    base = alt.Chart(alt.InlineData(values=values))
    y = alt.Y("row:N", title=None, sort=None).axis(ticks=False, domain=False, labelLimit=420)
    x = alt.X("change:Q", title="change from A to B (%; of scores: points)")
    certain = ["worse", "better", "different"]
    colour = alt.Color("verdict:N", legend=None).scale(
        domain=[*certain, "not certain"], range=["var(--accent-2)", "var(--arm-2)", "var(--accent)", "var(--rule-2)"]
    )
    shape = alt.Shape("verdict:N", legend=None).scale(
        domain=[*certain, "not certain"], range=["triangle-up", "triangle-down", "square", "circle"]
    )
    layers = [
        alt.Chart(alt.InlineData(values=[{"change": 0}])).mark_rule(color="var(--ink)", strokeWidth=1).encode(x=x),
        base.mark_rule(strokeWidth=1.4).encode(
            x=alt.X("low:Q", title="change from A to B (%; of scores: points)"), x2="high:Q", y=y, color=colour
        ),
        base.mark_point(size=46, filled=True).encode(x=x, y=y, color=colour, shape=shape),
    ]
    return page_spec(alt.layer(*layers), 40 + ROW_PX * len(rows), "changes from A to B with their 95 % intervals")
