"""Tables that a plan asks for, as the page shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from results.asked_tables import BETWEEN_VALUES, PHASE_WORDS, AskedCell, AskedTable
from results.report.against import MODELLED_ONCE
from results.report.first_screen import NOT_STATED
from results.report.notes import Noted
from results.report.sentences import ratio_words
from results.units import format_quantity


@dataclass(frozen=True)
class Entry:
    """text: how many times faster. below: what stands under it."""

    text: str
    below: tuple[str, ...] = ()
    note: int | None = None


@dataclass
class AskedFigure(Noted):
    """subject: what is compared, of what, and how it came to be."""

    id: str
    title: str
    subject: str
    columns: tuple[str, ...]
    rows: list[tuple[str, list[Entry]]] = field(default_factory=list)


def asked_figures(tables: Sequence[AskedTable]) -> list[AskedFigure]:
    found = []
    for n, table in enumerate(tables, start=1):
        spec = table.spec
        came = " and ".join(f"{m}, {NOT_STATED}" if m == "modelled" else m for m in table.methods)
        subject = (
            f"{table.device} · {table.workload} · {PHASE_WORDS[spec.phase]}, {came}; times faster than {spec.over}"
        )
        if spec.keys:
            subject += f"; across: {BETWEEN_VALUES.join(spec.keys)}"
        figure = AskedFigure(id=f"asked-{n}", title=spec.title, subject=subject, columns=table.columns)
        figure.rows = [(name, [_entry(cell, figure) for cell in cells]) for name, cells in table.rows]
        found.append(figure)
    return found


def _entry(cell: AskedCell, figure: AskedFigure) -> Entry:
    if cell.result is not None:
        return Entry(cell.result, (), figure.note(cell.reason))
    if cell.seconds is None:
        return Entry("missing", (), figure.note(cell.reason))
    seconds = format_quantity(cell.seconds, "s")
    if cell.is_base:
        return Entry("1×", (seconds,))
    if cell.ratio is None or cell.ratio.value is None:
        return Entry("none", (seconds,), figure.note(cell.reason))
    told = cell.ratio.reason if cell.ratio.low is None else None
    return Entry(ratio_words(cell.ratio), (seconds,), figure.note(None if told == MODELLED_ONCE else told))
