"""Rows and figures as people read them: the terminal, the CSV and the pages say the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.reproduce.findings import METHODS, Finding, Judged, Ours, ratios
from harness.reproduce.outcome import Count, Reproduced
from harness.reproduce.printed import Number, Span

SEPARATOR = "; "


def figure_text(value: float) -> str:
    """Four digits."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.3e}"


def ours_text(ours: Ours | None) -> str:
    if ours is None or isinstance(ours, str):
        return ours or ""
    if isinstance(ours, Span):
        return f"{figure_text(ours.low)} to {figure_text(ours.high)}"
    if isinstance(ours, tuple):
        return SEPARATOR.join(map(figure_text, ours))
    return figure_text(ours)


def found_text(finding: Finding | None) -> str:
    """Ours; in brackets what it may be as the figures that it follows from are rounded."""
    if finding is None:
        return ""
    own = ours_text(finding.ours)
    return f"{own} ({rounding_text(finding)})" if finding.rounding else own


def rounding_text(finding: Finding | None) -> str:
    return "" if finding is None else SEPARATOR.join(map(ours_text, finding.rounding))


def ratio_text(row: Judged) -> str:
    return SEPARATOR.join(f"{ratio:.3f}" for ratio in ratios(row))


def why(row: Judged) -> str:
    """Of its verdict: the explanation and the note; where there is neither, why it has its class."""
    finding, claim = row.finding, row.claim
    told = [] if finding is None else [one.rstrip(".") for one in (finding.why, finding.note) if one]
    if told or claim.klass == "not predictable" or row.verdict.has_held:
        return SEPARATOR.join(told)
    return claim.reason


def also_text(row: Judged) -> str:
    """Figures got in other ways, with their verdicts."""
    return SEPARATOR.join(
        f"{found_text(finding)} by {METHODS[finding.method]}, {verdict.words}"
        for finding, verdict in row.also
        if finding.method is not None
    )


def verdict_text(row: Judged) -> str:
    if not row.differs or row.verdict.outcome == "not computed":
        return row.verdict.words
    return f"{row.verdict.words}, {'explained' if row.is_explained else 'not explained'}"


def csv_rows(done: Iterable[Reproduced]) -> list[dict[str, Any]]:
    """A line a claim. A single number stands as a number, everything else as text."""
    return [_csv_row(row) for one in done for row in one.rows]


def _csv_row(row: Judged) -> dict[str, Any]:
    claim, finding = row.claim, row.finding
    ours = None if finding is None else finding.ours
    found = ratios(row)
    return {
        "claim": claim.id,
        "source": claim.source,
        "location": claim.location,
        "quantity": claim.quantity,
        "baseline": claim.baseline,
        "conditions": claim.conditions,
        "unit": claim.unit,
        "theirs": claim.printed.value
        if isinstance(claim.printed, Number) and not claim.printed.is_about
        else claim.value,
        "ours": ours if isinstance(ours, float | int) else _full(ours),
        "inputs_rounding": rounding_text(finding),
        "ratio": found[0] if len(found) == 1 else SEPARATOR.join(map(repr, found)),
        "class": claim.klass,
        "tolerance": claim.tolerance,
        "verdict": verdict_text(row),
        "method": "" if finding is None else finding.method,
        "why": why(row),
        "also": also_text(row),
        "corrected": claim.corrected,
        "declared": str(claim.declared or ""),
        "changed": claim.changed,
    }


def _full(ours: tuple[float, ...] | str | None) -> str:
    return ours or "" if not isinstance(ours, tuple) else SEPARATOR.join(repr(float(one)) for one in ours)


def count_rows(counted: Iterable[Count]) -> list[dict[str, Any]]:
    return [
        {
            "source": count.source,
            "class": count.klass,
            "rows": count.rows,
            "as theirs": count.held,
            "differs, explained": count.explained,
            "differs, open": count.open_,
            "not tested": count.untested,
            "not computed": count.not_computed,
        }
        for count in counted
    ]


def short_rows(done: Iterable[Reproduced]) -> list[dict[str, Any]]:
    """For a terminal that was asked for single claims."""
    return [
        {
            "claim": row.claim.id,
            "what": ", ".join(filter(None, [row.claim.quantity, row.claim.baseline and f"to {row.claim.baseline}"])),
            "theirs": f"{row.claim.value} {row.claim.unit}".rstrip(),
            "ours": found_text(row.finding),
            "ratio": ratio_text(row),
            "class": row.claim.klass,
            "verdict": verdict_text(row),
            "why": why(row),
        }
        for one in done
        for row in one.rows
    ]
