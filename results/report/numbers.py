"""The numbers of a chart, for the fold under it: whoever cannot see a picture, or prints it, has them as text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Numbers:
    """rows: the first entry of each is its name. note: what is not in the table."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def with_interval(value: str, low: str | None, high: str | None) -> str:
    return value if low is None or high is None else f"{value} [{low}, {high}]"
