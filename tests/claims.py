"""What a source claims and can be recomputed without its machines: the claim as printed, and ours.

A claim holds where ours, rounded as the source rounds, is what it prints. One that the source itself contradicts
carries the other value and the reason: both are asserted. `python -m tests.claims` writes docs/techniques/claims.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "techniques" / "claims.md"
Way = Literal["plan", "shape", "sheet", "router", "its own figures"]
"""What gives our value: a dispatch plan, a model's sizes, a hardware sheet, the router, the source's other figures."""


class Claim(NamedTuple):
    """printed, instead: figures as text, whose last digit says how they are rounded."""

    id: str
    where: str
    what: str
    printed: tuple[str, ...]
    ours: Callable[[], Sequence[float]]
    by: Way = "its own figures"
    is_range: bool = False
    """Ours, however many, lie between the two figures printed."""
    near: float | None = None
    """Relative: for a model that was fitted on such figures, or figures that are themselves rounded."""
    instead: tuple[str, ...] = ()
    """Of a claim that the source contradicts: what ours are, none of which is as printed."""
    why: str = ""
    """Of a contradiction; of others, what to say in place of "as printed"."""

    @property
    def case(self) -> str:
        return f"{self.id} {self.by}" + (", contradicted" if self.instead else "")


def rounding(figure: str) -> float:
    """Half of its last digit; a little more, as ties go either way."""
    return 0.5001 * 10.0 ** -len(figure.partition(".")[2])


def agrees(found: float, printed: str, near: float | None = None) -> bool:
    return found == pytest.approx(float(printed), rel=near or 0.0, abs=rounding(printed))


def holds(claim: Claim, found: float, printed: str) -> bool:
    if claim.is_range:
        low, high = claim.printed
        return float(low) - rounding(low) <= found <= float(high) + rounding(high)
    return agrees(found, printed, claim.near)


def check(claim: Claim) -> None:
    found = claim.ours()
    assert found
    if claim.instead:
        assert len(found) == len(claim.instead)
        assert all(map(agrees, found, claim.instead)), found
        assert not any(holds(claim, value, printed) for value in found for printed in claim.printed)
    else:
        assert claim.is_range or len(found) == len(claim.printed)
        printed = claim.printed[:1] * len(found) if claim.is_range else claim.printed
        assert all(holds(claim, *pair) for pair in zip(found, printed, strict=True)), found


def row(claim: Claim) -> str:
    decimals = max(len(figure.partition(".")[2]) for figure in (*claim.printed, *claim.instead))
    ours = ", ".join(f"{value:.{max(decimals, 2)}f}".rstrip("0").rstrip(".") for value in claim.ours())
    printed = (" to " if claim.is_range else ", ").join(claim.printed)
    if claim.instead:
        verdict = f"contradicted: {claim.why}"
    elif claim.why:
        verdict = claim.why
    elif claim.near:
        verdict = f"within {claim.near:.0%}"
    else:
        verdict = "in the range" if claim.is_range else "as printed"
    return f"| {claim.id} | {claim.where} | {claim.what} | {printed} | {ours} | {claim.by} | {verdict} |"


def page(sources: dict[str, Sequence[Claim]]) -> str:
    lines = [
        "# What do the sources claim, and what do we compute?",
        "",
        "Claims that need no machine: worked examples, sizes, ratios of printed figures. *By*: what gives our value, a",
        "dispatch plan, the sizes of a model, a hardware sheet, the router, or other figures of the source itself. *As",
        "printed*: equal when rounded as the source rounds.",
        "",
        "Made by `python -m tests.claims`; the tests check every row.",
    ]
    for source, claims in sources.items():
        lines += [
            "",
            f"## {source}",
            "",
            "| claim | where | what | printed | ours | by | |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += map(row, claims)
    return "\n".join(lines) + "\n"


def sources() -> dict[str, Sequence[Claim]]:
    from tests import test_claims_speculating

    return {
        "003 Speculating experts": test_claims_speculating.CLAIMS,
    }


if __name__ == "__main__":
    PAGE.write_text(page(sources()), encoding="utf-8")
