"""What we found for a claim, and the verdict, which follows from the claim's class and tolerance and the two values.

A source's package yields findings; nobody writes a verdict by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from harness.reproduce.ledger import Claim, Ledger
from harness.reproduce.orders import SERIES, parse_order
from harness.reproduce.printed import Bound, Number, Printed, Range, Several, Span, WithError, Words
from harness.reproduce.rounding import meets

Ours = float | Span | tuple[float, ...] | str
"""A figure; the least and most of many (`Span`), compared with a printed range end by end; several figures, each
compared with its printed one, or all with the one printed; a text, compared with a printed text without blanks."""
Method = Literal[
    "plan",
    "shape",
    "sheet",
    "priced",
    "router",
    "trace",
    "search",
    "data",
    "measured",
    "formula",
    "its own figures",
]
METHODS: dict[Method, str] = {
    "plan": "a dispatch plan of ours",
    "shape": "the sizes of a model, from its published configuration",
    "sheet": "figures of a hardware sheet",
    "priced": "plans priced on the units and links of a hardware sheet",
    "router": "a router of ours",
    "trace": "a recorded trace of routing",
    "search": "a search of ours over a model of the device",
    "data": "counted in the data set",
    "measured": "measured on the bundled model, and kept in its profile",
    "formula": "the source's own formula",
    "its own figures": "other figures of the source",
}
assert tuple(METHODS) == get_args(Method)


@dataclass(frozen=True)
class Finding:
    """ours: None where we have no figure; missing says then what it would take.

    claim: its id. method: what gives our figure. note: what a reader must know of it, one sentence. explanation: of a
    figure that is not as the source's, why; or what says so, where that takes long and is asked of pages alone; a row
    that holds has none. theirs: what the source's text amounts to as a number, where the claim is a text such as a
    formula; of no other claim. rounding: of a figure that follows from printed ones, least and most that it may be as
    these are rounded (`rounding.span_of`); one for each of our figures. replaced: of a figure that was computed before
    its row was known and counts no longer, why another one does.

    >>> Finding("004-020", (5.0, 3.0), "plan", note="weight loads without skipping, and with")
    """

    claim: str
    ours: Ours | None
    method: Method | None = None
    note: str = ""
    explanation: str | Callable[[], str] = ""
    missing: str = ""
    theirs: Number | None = None
    rounding: tuple[Span, ...] = ()
    replaced: str = ""

    @property
    def why(self) -> str:
        """The explanation."""
        return self.explanation if isinstance(self.explanation, str) else self.explanation()

    def __post_init__(self) -> None:
        if (self.ours is None) != bool(self.missing):
            raise ValueError(f"{self.claim}: give a figure, or say what is missing")
        if (self.ours is None) != (self.method is None):
            raise ValueError(f"{self.claim}: a figure has a method, and nothing else has")
        if self.rounding and (
            self.ours is None or isinstance(self.ours, str) or len(self.rounding) != n_figures(self.ours)
        ):
            raise ValueError(f"{self.claim}: rounding has one span for each figure of ours")


def n_figures(ours: float | Sequence[Any]) -> int:
    return 1 if isinstance(ours, float | int) else len(ours)


FLOAT_NOISE = 1e-9
LIKE_SIZE = 0.15
"""Of an ordering, whose size is not tested: further off than this is told."""
AS_ROUNDED = "within the rounding of its inputs"

Outcome = Literal[
    "as printed",
    "as rounded",
    "within",
    "missed",
    "same order",
    "other order",
    "contradicted",
    "input",
    "another input",
    "not predictable",
    "not computed",
]


@dataclass(frozen=True)
class Verdict:
    """words: for a reader. has_held: None where the row tests nothing. error: relative, of the figure that is furthest
    off, signed; None where no size is compared."""

    outcome: Outcome
    words: str
    has_held: bool | None = None
    error: float | None = None


@dataclass(frozen=True)
class Judged:
    """A claim with what we found. finding: None where nobody looked for one. also: figures got in other ways, each
    with its own verdict."""

    claim: Claim
    finding: Finding | None
    verdict: Verdict
    also: tuple[tuple[Finding, Verdict], ...] = ()

    @property
    def differs(self) -> bool:
        """It does not hold, or is an input of which ours is another one. Of what is contradicted, the class says so."""
        return self.verdict.has_held is False or self.verdict.outcome == "another input"

    @property
    def is_explained(self) -> bool:
        """Of one that differs: somebody says why."""
        return self.differs and self.finding is not None and bool(self.finding.explanation)


def judged(book: Ledger, findings: Iterable[Finding], claims: Iterable[str]) -> list[Judged]:
    """Each claim with its verdict; the first finding of a claim is the one that counts.

    Raises `ValueError` of findings that are of no claim.
    """
    by_claim: dict[str, list[Finding]] = {}
    for finding in findings:
        by_claim.setdefault(finding.claim, []).append(finding)
    unknown = [id_ for id_ in by_claim if id_ not in book.claims]
    if unknown:
        raise ValueError(f"findings of no claim: {', '.join(unknown)}")

    def ours_of(id_: str) -> float:
        found = by_claim.get(id_)
        ours = found[0].ours if found else None
        return ours if isinstance(ours, float | int) else book.figure(id_)

    def anchored(claim: Claim, finding: Finding | None) -> Verdict:
        return verdict_of(claim, finding, lambda id_: (book.figure(id_), ours_of(id_)))

    done = []
    for id_ in claims:
        claim, (first, *others) = book.claims[id_], by_claim.get(id_, [None])
        also = tuple((other, anchored(claim, other)) for other in others if other is not None)
        done.append(Judged(claim, first, anchored(claim, first), also))
    return done


Anchor = Callable[[str], tuple[float, float]]
"""Of a row's id: the source's figure and ours."""


def verdict_of(claim: Claim, finding: Finding | None, anchor: Anchor) -> Verdict:
    ours = None if finding is None else finding.ours
    if claim.klass == "not predictable":
        missing = finding.missing if finding is not None and finding.missing else claim.reason
        return Verdict("not predictable", f"not predictable: {missing}")
    if ours is None:
        if claim.klass == "input":
            return Verdict("input", "input")
        missing = "" if finding is None else f": {finding.missing}"
        return Verdict("not computed", f"not computed{missing}", has_held=False)
    assert finding is not None
    printed: Printed = claim.printed if finding.theirs is None else finding.theirs
    if finding.theirs is not None and not isinstance(claim.printed, Words):
        raise ValueError(f"{claim.id}: its printed value is a figure, and no other can stand for it")
    if claim.klass == "ordering":
        return _order_verdict(claim, ours, anchor)
    is_printed, error = compared(printed, ours)
    is_as_rounded = not is_printed and _meets_rounding(printed, finding)
    if claim.klass == "input":
        if is_printed:
            return Verdict("input", "input, as printed", error=error)
        return Verdict("another input", "input, and ours differs", error=error)
    if claim.klass == "contradicted":
        if is_printed:
            return Verdict("as printed", "as printed, and not contradicted", has_held=False, error=error)
        if is_as_rounded:
            return Verdict("as rounded", f"{AS_ROUNDED}, and not contradicted", has_held=False, error=error)
        return Verdict("contradicted", "contradicted by its source", error=error)
    assert claim.tolerance is not None  # the ledger refuses such a row
    if is_printed:
        return Verdict("as printed", "as printed", has_held=True, error=error)
    if claim.klass == "exact" and is_as_rounded:
        return Verdict("as rounded", AS_ROUNDED, has_held=True, error=error)
    if error is None:
        return Verdict("missed", "is not what is printed", has_held=False)
    if abs(error) <= claim.tolerance + FLOAT_NOISE:
        return Verdict("within", f"within {percent(abs(error), math.ceil)}", has_held=True, error=error)
    return Verdict("missed", f"missed by {percent(abs(error), round)}", has_held=False, error=error)


def _order_verdict(claim: Claim, ours: Ours, anchor: Anchor) -> Verdict:
    figures = (ours,) if isinstance(ours, float | int) else () if isinstance(ours, str) else tuple(ours)
    order = parse_order(claim.order)
    if isinstance(order, str):
        if not isinstance(claim.printed, Number):
            raise TypeError(f"{claim.id}: only a number stands against another row")
        theirs, own = anchor(order)
        side = claim.printed.value - theirs
        has_held = bool(figures) and all((one - own) * side > 0 for one in figures)
    else:
        assert order is not None  # the ledger refuses an ordering without one
        has_held = order(figures)
    has_size = claim.order not in SERIES and not isinstance(claim.printed, Words | Several)
    error = compared(claim.printed, ours)[1] if has_size else None
    size = f", size off by {percent(abs(error), round)}" if error is not None and abs(error) > LIKE_SIZE else ""
    outcome: Outcome = "same order" if has_held else "other order"
    return Verdict(outcome, outcome + size, has_held, error)


def compared(printed: Printed, ours: Ours) -> tuple[bool, float | None]:
    """(equal when rounded as printed, the largest relative error or None where there is none)."""
    if isinstance(printed, Words) or isinstance(ours, str):
        return "".join(str(printed).split()) == "".join(str(ours).split()), None
    pairs = list(_pairs(printed, ours))
    errors = [_error(one, value) for one, value in pairs]
    known = [error for error in errors if error is not None]
    worst = max(known, key=abs) if len(known) == len(errors) and known else None
    return all(_is_printed(one, value) for one, value in pairs), worst


def _meets_rounding(printed: Printed, finding: Finding) -> bool:
    """Each of our figures may be the printed one, as the figures that it follows from are rounded."""
    if not finding.rounding or isinstance(printed, Words):
        return False
    assert finding.ours is not None
    assert not isinstance(finding.ours, str)
    pairs = zip(_pairs(printed, finding.ours), finding.rounding, strict=True)
    return all(meets(one, span) if isinstance(one, Number) else _is_printed(one, ours) for (one, ours), span in pairs)


def _pairs(printed: Printed, ours: float | Sequence[float]) -> Iterable[tuple[Number | Range | Bound, float]]:
    """What each of our figures is held against."""
    figures = (ours,) if isinstance(ours, float | int) else tuple(ours)
    if not figures:
        raise ValueError("no figure")
    if isinstance(printed, WithError):
        return [(printed.number, one) for one in figures]
    if isinstance(printed, Range) and isinstance(ours, Span):
        return [(printed.low, ours.low), (printed.high, ours.high)]
    if isinstance(printed, Several):
        return list(zip(printed.numbers, figures, strict=True))
    assert not isinstance(printed, Words)
    return [(printed, one) for one in figures]


def _is_printed(printed: Number | Range | Bound, ours: float) -> bool:
    if isinstance(printed, Number):
        return abs(ours - printed.value) <= printed.half_digit
    if isinstance(printed, Range):
        low, high = printed.low, printed.high
        return low.value - low.half_digit <= ours <= high.value + high.half_digit
    limit = printed.limit
    if printed.sign in (">", "<"):
        return ours > limit.value if printed.is_above else ours < limit.value
    return ours >= limit.value - limit.half_digit if printed.is_above else ours <= limit.value + limit.half_digit


def _error(printed: Number | Range | Bound, ours: float) -> float | None:
    """Relative to the number, to the nearer end of a range, or to a bound; 0 on the right side of one."""
    if isinstance(printed, Number):
        against = printed.value
    elif isinstance(printed, Range):
        against = min(max(ours, printed.low.value), printed.high.value)
    else:
        limit = printed.limit.value
        against = max(ours, limit) if printed.is_above else min(ours, limit)
    if against == 0:
        return 0.0 if ours == 0 else None
    return (ours - against) / abs(against)


def ratios(judged_row: Judged) -> tuple[float, ...]:
    """Ours over theirs, figure by figure; of a range that ours is no span of, and of a text, none."""
    finding, printed = judged_row.finding, judged_row.claim.printed
    if finding is None or finding.ours is None or isinstance(finding.ours, str):
        return ()
    printed = printed if finding.theirs is None else finding.theirs
    if isinstance(printed, Words):
        return ()
    pairs = _pairs(printed, finding.ours) if not _unequal(printed, finding.ours) else []
    return tuple(value / one.value for one, value in pairs if isinstance(one, Number) and one.value != 0)


def _unequal(printed: Printed, ours: Ours) -> bool:
    return isinstance(printed, Several) and len(printed.numbers) != n_figures(ours)


def percent(share: float, rounding: Callable[[float], int]) -> str:
    """Whole percent; below 20 % one decimal, so that 15.2 is not told as 15."""
    if share < 0.2:
        return f"{rounding(share * 1000 - FLOAT_NOISE) / 10:g} %"
    return f"{rounding(share * 100 - FLOAT_NOISE)} %"
