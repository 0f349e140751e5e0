"""Pages of a reproduction: one per source, with its tables and figures drawn again, and one that sums up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.reproduce.charts import flips_chart, ratio_chart, table_chart, theirs_of
from harness.reproduce.findings import METHODS
from harness.reproduce.ledger import CLASSES, MEANINGS, Ledger
from harness.reproduce.outcome import Reproduced, aims, as_declared, class_changes, counts, prediction_changes, ways
from harness.reproduce.printed import Span
from harness.reproduce.redrawn import Entry, SourceTable
from harness.reproduce.sensitivity import Varied, constant_rows
from harness.reproduce.sources import SOURCES, Source
from harness.reproduce.told import also_text, found_text, ours_text, ratio_text, verdict_text, why
from results.report.plain_pages import frame, write_plain_pages

SUMMARY = "index.html"
RATIOS = "chart-ratios"
TITLE = "Which of the sources' numbers come out?"
FLIPS = "chart-flips"
STYLE = """
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .35em; background: var(--accent); }
.swatch.ours { background: var(--accent-2); }
td .theirs { color: var(--accent); }
td .ours { color: var(--accent-2); font-weight: 600; }
td.held, td.missed { min-width: 7rem; max-width: 14rem; }
td.missed { font-weight: 600; }
.figures td.many { white-space: normal; max-width: 12rem; }
.figures caption { white-space: nowrap; }
td.why { min-width: 14rem; max-width: 34rem; }
table.counts { width: auto; }
"""


class Shown(NamedTuple):
    """A place of a table drawn again. theirs: empty where ours stands alone: a dash before it would be read as minus.
    note: the number of its footnote, from 1; 0 where it has none."""

    theirs: str
    ours: str
    ratio: str
    note: int


class Drawn(NamedTuple):
    """A table drawn again, row by row in the order of its columns. id: of its chart, empty where it has none."""

    table: SourceTable
    id: str
    rows: list[tuple[str, list[Shown | None]]]
    notes: list[str]


def page_name(source: Source) -> str:
    return f"{source.id}-{source.package.replace('_', '-')}.html"


def write_pages(book: Ledger, done: Sequence[Reproduced], folder: Path, changed: Sequence[Varied] = ()) -> list[Path]:
    """Each appears whole or not at all, and the one with links to the others last. Raises `OSError`."""
    pages = {page_name(one.source): ("source.html.j2", source_context(book, one, changed)) for one in done}
    pages[SUMMARY] = ("summary.html.j2", summary_context(book, done))
    return write_plain_pages("harness.reproduce", pages, folder)


def summary_context(book: Ledger, done: Sequence[Reproduced]) -> dict[str, Any]:
    ratios = ratio_chart([row for one in done for row in one.rows])
    return {
        **_common(TITLE, [] if ratios is None else [(RATIOS, ratios)]),
        "ratios": RATIOS if ratios is not None else "",
        "aims": aims(done),
        "aims_as_declared": aims(as_declared(done)),
        "class_changes": class_changes(done),
        "prediction_changes": prediction_changes(done),
        "counts": [(_name(count.source), count) for count in counts(done)],
        "ways": [(_name(way.source), way) for way in ways(done)],
        "classes": [(klass, MEANINGS[klass]) for klass in CLASSES],
        "methods": list(METHODS.items()),
        "sources": [(one.source, page_name(one.source), len(one.rows), len(one.tables)) for one in done],
        "differing": [row for one in done for row in one.rows if row.differs],
        "fits": book.fits,
        "corrected": [row.claim for one in done for row in one.rows if row.claim.corrected],
    }


def source_context(book: Ledger, one: Reproduced, changed: Sequence[Varied] = ()) -> dict[str, Any]:
    drawn = [_drawn(book, table, number) for number, table in enumerate(one.tables, start=1)]
    charts = [(table.id, table_chart(book, table.table)) for table in drawn if table.id]
    own = next((tested for tested in changed if tested.source == one.source.id), None)
    flipping = [] if own is None else constant_rows(own)
    if own is not None and flipping:
        charts.append((FLIPS, flips_chart(own)))
    return {
        **_common(f"{one.source.id} {one.source.name}: {TITLE[0].lower()}{TITLE[1:]}", charts),
        "source": one.source,
        "tested": own,
        "flipping": flipping,
        "flips": FLIPS,
        "summary": SUMMARY,
        "counts": [(one.source.name, count) for count in counts([one])],
        "drawn": drawn,
        "rows": one.rows,
    }


def _common(title: str, charts: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    return {
        **frame(title, charts, STYLE),
        "helpers": {
            "methods": METHODS,
            "found_text": found_text,
            "ratio_text": ratio_text,
            "verdict_text": verdict_text,
            "also_text": also_text,
            "why": why,
        },
    }


def _name(source: str) -> str:
    return next(f"{one.id} {one.name}" for one in SOURCES if one.id == source)


def _drawn(book: Ledger, table: SourceTable, number: int) -> Drawn:
    notes: list[str] = []

    def shown(entry: Entry | None) -> Shown | None:
        if entry is None:
            return None
        if entry.note and entry.note not in notes:
            notes.append(entry.note)
        theirs, ours = theirs_of(book, entry), entry.ours
        both = isinstance(theirs, float | int) and isinstance(ours, float | int) and theirs != 0
        ratio = f"{ours / theirs:.2f}" if both else ""  # type: ignore[operator]
        number = notes.index(entry.note) + 1 if entry.note else 0
        is_alone = theirs in (None, "-") and not entry.claim
        return Shown("" if is_alone else _theirs_text(book, entry), _text(ours), ratio, number)

    rows = [(row, [shown(table.at(row, column)) for column in table.columns]) for row in table.rows]
    return Drawn(table, f"chart-{number}" if table.picture else "", rows, notes)


def _theirs_text(book: Ledger, entry: Entry) -> str:
    """As it is printed, where a claim states it."""
    if entry.theirs is None and entry.claim:
        return str(book.claims[entry.claim].printed)
    return _text(entry.theirs)


def _text(value: float | str | Span | None) -> str:
    return "–" if value is None else ours_text(value)
