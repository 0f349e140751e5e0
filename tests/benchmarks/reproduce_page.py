"""Writes docs/reproduce.md: which of the sources' numbers come out.

python -m tests.benchmarks.reproduce_page
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.reproduce.findings import METHODS, Judged
from harness.reproduce.ledger import CLASSES, MEANINGS, Ledger, ledger
from harness.reproduce.outcome import (
    Reproduced,
    aims,
    as_declared,
    class_changes,
    counts,
    prediction_changes,
    reproduce,
    ways,
)
from harness.reproduce.sources import SOURCES
from harness.reproduce.told import count_rows, found_text, ratio_text, verdict_text, why

PAGE = Path(__file__).parents[2] / "docs" / "reproduce.md"
WIDTH = 120


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def page(book: Ledger, done: Sequence[Reproduced]) -> str:
    counted = count_rows(counts(done))
    return TEXT.format(
        n_rows=sum(len(one.rows) for one in done),
        sources="\n".join(f"- {source.id}: {source.name}" for source in SOURCES),
        aims=_aims(done),
        aims_as_declared=_aims(as_declared(done)),
        changes=table(
            ("rows", "declared", "now", "because", "which"),
            [(len(one.claims), one.declared, one.now, one.because, _rows(one.claims)) for one in class_changes(done)],
        ),
        predictions=table(
            ("rows", "within before", "within now", "because", "which"),
            [(len(one.claims), one.first, one.now, one.because, _rows(one.claims)) for one in prediction_changes(done)],
        ),
        counts=table(list(counted[0]), [list(row.values()) for row in counted]),
        ways=table(("source", "how", "rows", "figures", "rows within"), [tuple(way) for way in ways(done)]),
        classes=table(("class", "what it means"), [(klass, MEANINGS[klass]) for klass in CLASSES]),
        methods=table(("by", "what gives our figure"), list(METHODS.items())),
        differing=_differing(done),
        fits=table(("constants", "rows"), [(fit.constants, _rows(fit.claims)) for fit in book.fits]),
        corrected=table(("row", "why"), [(claim.id, claim.corrected) for claim in book if claim.corrected]),
    )


def _aims(done: Sequence[Reproduced]) -> str:
    return "\n".join(f"- {aim.words}: {'yes' if aim.is_met else '**no**'}, {aim.told}" for aim in aims(done))


def _rows(claims: Sequence[str]) -> str:
    return ", ".join(claims)


def _differing(done: Sequence[Reproduced]) -> str:
    rows = [row for one in done for row in one.rows if row.differs and row.verdict.outcome != "not computed"]
    header = ("row", "what", "theirs", "ours", "ratio", "class", "verdict", "why")
    return table(header, [_line(row) for row in rows]) if rows else "Nothing."


def _line(row: Judged) -> tuple[str, ...]:
    claim = row.claim
    what = ", ".join(filter(None, [claim.quantity, claim.baseline and f"to {claim.baseline}", claim.conditions]))
    theirs = f"{claim.value} {claim.unit}".rstrip()
    return claim.id, what, theirs, found_text(row.finding), ratio_text(row), claim.klass, verdict_text(row), why(row)


TEXT = """\
# Which of the sources' numbers come out?

The five sources print {n_rows} figures. `joulebench reproduce` computes every figure that can be computed. For every
other figure it says why it cannot:

```
joulebench reproduce                  # all: terminal, reproduced/reproduced.csv, a page per source and one that sums up
joulebench reproduce 001              # one source, in reproduced-001
joulebench reproduce 000-204..213     # single rows, in the terminal
```

{sources}

Nothing here was measured on the sources' machines. Times and joules are modelled: our plans are priced on sheets of
these machines ([0026](decisions/0026-one-rule-of-time.md)).

## The outcome

{aims}

{counts}

*As theirs* means within the tolerance of the row's class. *Not tested* are inputs, figures that cannot be predicted,
and rows that their own source contradicts.

Rows that are predicted in the same way are right or wrong together. So many rows of one way count as much as one row.
*Figures* counts a figure once that the source states in several places. The ways are:

{ways}

## Classes that were changed after the figure was known

{changes}

## Predictions that were changed after the figure was known

{predictions}

Nothing in them is fitted. What came first is still computed: it stands beside these rows on the pages of the sources.

With the classes and predictions that came first:

{aims_as_declared}

One more rule was made after the figures were known: an exact row may differ by the rounding of the figures that it is
computed from. Its rows are counted above.

## How a row is judged

The class and the tolerance of a row are declared in `harness/reproduce/classes.csv` before its figure is computed. The
classes that were changed later are listed above. The verdict is computed from the class, the tolerance and the two
values; nobody writes a verdict by hand.

{classes}

- **Exact** rows must be equal after rounding as the source rounds. If they are computed from figures that are rounded
  too, ours is a range (in brackets), and the row holds if the printed figure may lie in this range.
- **Predicted and consistent** rows must be within 15 %. Two ranges are compared end by end. A range and a figure are
  compared at the nearer end.
- **Units**: GB is 1e9 bytes and GiB is 2^30 bytes. A row is compared in the unit that is printed. Where a source prints
  GB and means GiB, ours is in GiB and the row says so.

A row that misses stays in the table, with the reason.

{methods}

## What differs, and why

{differing}

## Constants that are fitted

Constants are fitted only on these rows (`harness/reproduce/calibration.toml`). None of these rows counts as found. A
test refuses a sheet with a fitted figure that does not name such a row.

{fits}

## Rows that differ from what was read first

{corrected}

Written by `python -m tests.benchmarks.reproduce_page`.
"""


def main() -> None:
    book = ledger()
    done = reproduce(book, list(book.claims), False, lambda line: print(line, file=sys.stderr))
    PAGE.write_text(page(book, done), encoding="utf-8")


if __name__ == "__main__":
    main()
