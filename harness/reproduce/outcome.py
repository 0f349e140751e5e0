"""What comes out of a reproduction: each row judged, counts by source and class, and whether the aims are met."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from harness.reproduce.findings import FLOAT_NOISE, LIKE_SIZE, Finding, Judged, Verdict, judged, verdict_of
from harness.reproduce.ledger import CLASSES, Class, Ledger
from harness.reproduce.redrawn import SourceTable
from harness.reproduce.sources import SOURCES, Source
from results.units import format_share

ENOUGH_PREDICTED = 0.8
"""Share of the predicted rows that should come out within their tolerance."""


@dataclass(frozen=True)
class Reproduced:
    """A source: its rows and its tables. tables: none where single claims were asked."""

    source: Source
    rows: tuple[Judged, ...]
    tables: tuple[SourceTable, ...]


class Count(NamedTuple):
    """Rows of one source and class. held: as the source's, within the class's tolerance. explained: of those that
    are not, with a reason. open_: without one. untested: rows that test nothing."""

    source: str
    klass: Class
    rows: int
    held: int
    explained: int
    open_: int
    not_computed: int

    @property
    def untested(self) -> int:
        return self.rows - self.held - self.explained - self.open_ - self.not_computed


class Way(NamedTuple):
    """Predicted rows of one source that are predicted in the same way: as their class says. figures: without those that
    state the same figure again. held: within tolerance."""

    source: str
    reason: str
    rows: int
    figures: int
    held: int


class Aim(NamedTuple):
    """words: what is asked. is_met, told: whether it is so, in figures."""

    words: str
    is_met: bool
    told: str


def reproduce(book: Ledger, claims: Sequence[str], with_tables: bool, note: Callable[[str], None]) -> list[Reproduced]:
    """The sources of these claims, one after the other. note: is told which one begins."""
    found = []
    for source in SOURCES:
        own = [id_ for id_ in claims if id_.startswith(f"{source.id}-")]
        if own:
            note(f"{source.id} {source.name}: {len(own)} row{'s' if len(own) != 1 else ''}")
            package = source.load()
            findings = list(package.findings())
            astray = [finding.claim for finding in findings if not finding.claim.startswith(f"{source.id}-")]
            if astray:
                raise ValueError(f"source {source.id} has findings of another: {', '.join(astray)}")
            tables = tuple(package.tables()) if with_tables else ()
            found.append(Reproduced(source, tuple(judged(book, findings, own)), tables))
    return found


def counts(done: Iterable[Reproduced]) -> list[Count]:
    """By source and class, in their order; none of no row."""
    found = []
    for one in done:
        for klass in CLASSES:
            rows = [row for row in one.rows if row.claim.klass == klass]
            if rows:
                found.append(_count(one.source.id, klass, rows))
    return found


def _count(source: str, klass: Class, rows: Sequence[Judged]) -> Count:
    computed = [row for row in rows if row.verdict.outcome != "not computed"]
    missed = [row for row in computed if row.verdict.has_held is False]
    explained = sum(row.is_explained for row in missed)
    held = sum(row.verdict.has_held is True for row in computed)
    return Count(source, klass, len(rows), held, explained, len(missed) - explained, len(rows) - len(computed))


def ways(done: Iterable[Reproduced]) -> list[Way]:
    """Of predicted rows, the commonest way of a source first: many rows that rest on one idea weigh as one."""
    found: dict[tuple[str, str], list[Judged]] = {}
    for one in done:
        for row in one.rows:
            if row.claim.klass == "predicted":
                found.setdefault((one.source.id, row.claim.reason), []).append(row)
    told = [
        Way(source, reason, len(rows), len(_distinct(rows)), sum(row.verdict.has_held is True for row in rows))
        for (source, reason), rows in found.items()
    ]
    return sorted(told, key=lambda way: (way.source, -way.rows))


def as_declared(done: Iterable[Reproduced]) -> list[Reproduced]:
    """All rows by the figure, class and tolerance that they had before what is printed was known."""
    return [replace(one, rows=tuple(map(_as_declared, one.rows))) for one in done]


def _as_declared(row: Judged) -> Judged:
    first = _came_first(row)
    if first is not None:
        finding, verdict = first
        row = replace(row, finding=replace(finding, explanation=finding.replaced), verdict=verdict)
    if row.claim.declared is None:
        return row
    claim = replace(row.claim, klass=row.claim.declared.klass, tolerance=row.claim.declared.tolerance)
    return replace(row, claim=claim, verdict=verdict_of(claim, row.finding, _no_anchor))


def _came_first(row: Judged) -> tuple[Finding, Verdict] | None:
    """What counted before the row was predicted in another way; None where it never was."""
    return next((one for one in row.also if one[0].replaced), None)


def _no_anchor(id_: str) -> tuple[float, float]:
    raise AssertionError(f"{id_}: no declared class is an ordering")  # the ledger refuses it


class ClassChange(NamedTuple):
    """Rows whose class was changed for one reason after their figures were known."""

    claims: tuple[str, ...]
    declared: str
    now: str
    because: str


def class_changes(done: Iterable[Reproduced]) -> list[ClassChange]:
    found: dict[tuple[str, str, str], list[str]] = {}
    for one in done:
        for row in one.rows:
            if row.claim.declared is not None:
                found.setdefault((str(row.claim.declared), row.claim.klass, row.claim.changed), []).append(row.claim.id)
    return [ClassChange(tuple(claims), *told) for told, claims in found.items()]


class PredictionChange(NamedTuple):
    """Rows that are predicted in another way since their figures were known. first, now: rows within tolerance."""

    claims: tuple[str, ...]
    because: str
    first: int
    now: int


def prediction_changes(done: Iterable[Reproduced]) -> list[PredictionChange]:
    """Of predicted rows; one for each reason."""
    found: dict[str, list[tuple[Verdict, Judged]]] = {}
    for one in done:
        for row in one.rows:
            first = _came_first(row)
            if first is not None and row.claim.klass == "predicted":
                found.setdefault(first[0].replaced, []).append((first[1], row))
    return [
        PredictionChange(
            tuple(row.claim.id for _, row in rows),
            because,
            sum(verdict.has_held is True for verdict, _ in rows),
            sum(row.verdict.has_held is True for _, row in rows),
        )
        for because, rows in found.items()
    ]


def aims(done: Sequence[Reproduced]) -> list[Aim]:
    """What the whole should reach; an aim of no row is left out. Rows that are `consistent` count in the last alone."""
    rows = [row for one in done for row in one.rows]
    n_verdicts = sum(row.verdict.outcome != "not computed" for row in rows)
    exact, n_exact = _held(rows, "exact")
    same, n_orderings = _held(rows, "ordering")
    others = sum(row.is_explained for row in rows if row.claim.klass == "ordering")
    sized = sum(row.verdict.outcome == "same order" and abs(row.verdict.error or 0.0) > LIKE_SIZE for row in rows)
    by_size = (
        f" ({sized} of them with a size that is more than {format_share(LIKE_SIZE)} off, which is not tested)"
        if sized
        else ""
    )
    near, n_predicted = _held(rows, "predicted")
    open_rows = [r for r in rows if r.differs and r.verdict.outcome != "not computed" and not r.is_explained]
    inputs = sum(row.claim.klass == "input" for row in open_rows)
    by_input = f", {inputs} of them inputs, which test nothing" if inputs else ""
    rounded = sum(row.verdict.outcome == "as rounded" and row.verdict.has_held is True for row in rows)
    by_rounding = f", {rounded} of them within the rounding of the figures that they follow from" if rounded else ""
    inexact = [r for r in rows if r.claim.klass == "exact" and r.differs and r.verdict.outcome != "not computed"]
    by_name = f"; {_names(inexact)}" if inexact else ""
    enough = math.ceil(ENOUGH_PREDICTED * n_predicted - FLOAT_NOISE)
    needed = f"; {enough} would be enough" if near < enough else ""
    share = f", {_percent(near, n_predicted)}{needed}" if n_predicted else ""
    once, n_once = _held(_distinct(rows), "predicted")
    if n_once < n_predicted:
        share += (
            f"; {once} of {n_once}, {_percent(once, n_once)}, where a figure that the source states in several places"
            " counts once"
        )
    found = [
        (len(rows), Aim("every row has a verdict", n_verdicts == len(rows), f"{n_verdicts} of {len(rows)}")),
        (n_exact, Aim("all exact rows are exact", exact == n_exact, f"{exact} of {n_exact}{by_rounding}{by_name}")),
        (
            n_orderings,
            Aim(
                "all orderings are the source's or explained",
                same + others == n_orderings,
                f"{same} the same{by_size} and {others} explained of {n_orderings}",
            ),
        ),
        (
            n_predicted,
            Aim(
                f"{format_share(ENOUGH_PREDICTED)} of the predicted rows are within their tolerance",
                near >= enough,
                f"{near} of {n_predicted}{share}",
            ),
        ),
        (
            len(rows),
            Aim("what differs is explained", not open_rows, f"{len(open_rows)} without an explanation{by_input}"),
        ),
    ]
    return [aim for n, aim in found if n]


MOST_NAMED = 3


def _names(rows: Sequence[Judged]) -> str:
    """Of rows that differ, the first few."""
    told = [f"{row.claim.id} differs, {'explained' if row.is_explained else 'open'}" for row in rows[:MOST_NAMED]]
    more = len(rows) - MOST_NAMED
    return ", ".join([*told, *([f"and {more} more"] if more > 0 else [])])


def _percent(n: int, of: int) -> str:
    """Rounded down, so that what is not reached is not told as reached."""
    return f"{1000 * n // of / 10:g} %"


def _distinct(rows: Iterable[Judged]) -> list[Judged]:
    """The first row of each figure: a source states some in its abstract, its introduction and its evaluation."""
    found: dict[tuple[str, ...], Judged] = {}
    for row in rows:
        one = row.claim
        found.setdefault((one.source, one.quantity, one.baseline, one.value, one.unit, one.conditions), row)
    return list(found.values())


def _held(rows: Iterable[Judged], klass: Class) -> tuple[int, int]:
    """(rows of the class that hold, all of them)."""
    of_class = [row for row in rows if row.claim.klass == klass]
    return sum(row.verdict.has_held is True for row in of_class), len(of_class)
