"""What a comparison says, as a table for files and as a page with a picture of its changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pandas as pd
from markupsafe import Markup

from results.history.compared import Compared
from results.history.comparison import Comparison
from results.history.points import Figure
from results.report.changes_page import BETTER, OPEN, OTHER, WORSE, ChangesPage, Drawn, write_changes_page
from results.report.csv import csv_text
from results.report.files import replace_text
from results.units import format_figure, format_number, format_p, format_share, signed

ORDER: Final = ("worse", "better", "different", "not certain", "not tested", "refused")
FRAME_COLUMNS: Final[Mapping[str, Callable[[Compared], object]]] = {
    "verdict": lambda row: row.verdict,
    "arm": lambda row: row.arm,
    "workload": lambda row: row.workload,
    "device": lambda row: row.device,
    "metric": lambda row: row.first.metric,
    "phase": lambda row: row.first.phase,
    "unit": lambda row: row.first.unit,
    "method_a": lambda row: row.first.method,
    "method_b": lambda row: None if row.second is None else row.second.method,
    "meter_a": lambda row: row.first.meter,
    "meter_b": lambda row: None if row.second is None else row.second.meter,
    "n_a": lambda row: row.first.n,
    "n_b": lambda row: None if row.second is None else row.second.n,
    "mean_a": lambda row: row.first.mean,
    "mean_b": lambda row: None if row.second is None else row.second.mean,
    "change": lambda row: row.change,
    "low": lambda row: row.low,
    "high": lambda row: row.high,
    "change_is": lambda row: "difference" if row.is_score else "share",
    "p": lambda row: row.p,
    "p_adjusted": lambda row: row.adjusted,
    "test": lambda row: row.test,
    "hedges_g": lambda row: row.effect,
    "requests_longer": lambda row: row.longer,
    "unlike": lambda row: "; ".join(row.said) or None,
    "reason": lambda row: row.reason or None,
}


def comparison_frame(found: Comparison) -> pd.DataFrame:
    # Without a row too, as where every trial of A failed.
    frame_ = pd.DataFrame({name: [of(row) for row in found.rows] for name, of in FRAME_COLUMNS.items()})
    numbers = ("mean_a", "mean_b", "change", "low", "high", "p", "p_adjusted", "hedges_g", "requests_longer")
    return frame_.astype(dict.fromkeys(numbers, "float64") | {"n_a": "Int64", "n_b": "Int64"})


def write_comparison_csv(found: Comparison, path: Path) -> None:
    """Raises `OSError`."""
    replace_text(path, csv_text(comparison_frame(found)))


def write_comparison_page(found: Comparison, path: Path) -> None:
    """Raises `OSError`."""
    rows = ordered(found)
    page = ChangesPage(
        title=f"{found.first.name} and {found.second.name}",
        lead=Markup("From A, <strong>{}</strong>, to B, <strong>{}</strong>").format(
            found.first.name, found.second.name
        ),
        axis="change from A to B",
        verdicts=[row.verdict for row in rows],
        order=ORDER,
        looks={"worse": WORSE, "better": BETTER, "different": OTHER, "not certain": OPEN},
        drawn=list(_drawn(rows)),
        columns=COLUMNS,
        numbers=NUMBERS,
        rows=[table_row(row) for row in rows],
        orders=[{"A": row.first.mean, "B": None if row.second is None else row.second.mean} for row in rows],
        notes=found.notes,
        warnings=[
            f"Compared although they are unlike, as asked: {one}"
            for one in dict.fromkeys(one for row in rows for one in row.said)
        ],
    )
    write_changes_page(page, path)


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
    longer = "" if row.longer is None else f"{format_share(row.longer)} of requests took longer"
    how = [_method(row), row.test or "", longer, *row.said, row.reason]
    return (
        row.verdict, row.arm, row.workload, row.device, row.first.name,
        _value(row.first), _value(row.second),
        "" if row.change is None or row.verdict == "refused" else shown(row, row.change), ends,
        "" if row.adjusted is None else format_p(row.adjusted).removeprefix("p ").removeprefix("= "),
        "" if row.effect is None else format_number(row.effect), "; ".join(filter(None, how)),
    )  # fmt: skip


def _value(figure: Figure | None) -> str:
    return "" if figure is None else format_figure(figure.mean, figure.unit)


def _method(row: Compared) -> str:
    ways = [
        f"{f.method}, {f.meter}" if f.meter and f.meter != f.method else f.method
        for f in (row.first, row.second)
        if f is not None
    ]
    return " beside ".join(dict.fromkeys(ways))


def shown(row: Compared, change: float) -> str:
    if row.is_score and not row.first.is_share:
        return signed(format_number(change))
    number = 100 * change
    return f"{number:+.{1 if abs(number) >= 1 else 2}f} {'points' if row.is_score else '%'}"


def _drawn(rows: Sequence[Compared]) -> Iterator[Drawn]:
    several = len({(row.workload, row.device) for row in rows}) > 1
    for row in rows:
        # A difference of a score that is no share has no axis with the others.
        has_axis = row.first.is_share or not row.is_score
        if has_axis and row.change is not None and row.low is not None and row.high is not None:
            where = f" · {row.workload} · {row.device}" if several else ""
            ends = 100 * row.change, 100 * row.low, 100 * row.high
            yield Drawn(f"{row.arm} · {row.first.name}{where}", *ends, row.verdict)
