"""A table or figure of a source, drawn again: what it prints and what we find, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.reproduce.printed import Span

Picture = Literal["bars", "lines", "dots"]


@dataclass(frozen=True)
class Entry:
    """One place of the table. theirs: None where the source prints no number there (a bar, a curve); a text such as
    "N.S." as it stands. claim: the id of the row that states it, whose value is theirs where none is given.
    ours: None where we have none; note says why. The least and most of many are a `Span`."""

    row: str
    column: str
    ours: float | str | Span | None
    theirs: float | str | None = None
    claim: str = ""
    note: str = ""


@dataclass(frozen=True)
class SourceTable:
    """name: as the source calls it, "Table 4" or "Fig. 13". title: what it shows, in our words. unit: of all entries;
    a table of several units is drawn once for each. rows_are: what the first column lists. picture: how it is drawn as
    a chart, theirs and ours as two series; rows of `lines` are numbers in rising order, and `dots` have two
    columns, x and y, each named with its unit. note: how ours came to be.

    >>> SourceTable(
    ...     "Table 4", "time of the operations of an MoE layer", "ms", "operation",
    ...     (Entry("gather", "Core ML CPU", ours=3.67, claim="000-116"),),
    ...     note="one layer over 1024 tokens, priced on the sheet m2-ultra-table4", picture="bars",
    ... )
    """

    name: str
    title: str
    unit: str
    rows_are: str
    entries: tuple[Entry, ...]
    note: str
    picture: Picture | None = None

    def __post_init__(self) -> None:
        places = [(entry.row, entry.column) for entry in self.entries]
        twice = next((place for place in places if places.count(place) > 1), None)
        if not places or twice:
            raise ValueError(f"{self.name}: {'has no entry' if not places else f'{twice} stands there twice'}")
        if self.picture == "dots" and len(self.columns) != 2:
            raise ValueError(f"{self.name}: dots need two columns, x and y, and it has {len(self.columns)}")

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(entry.row for entry in self.entries))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(entry.column for entry in self.entries))

    def at(self, row: str, column: str) -> Entry | None:
        return next((entry for entry in self.entries if (entry.row, entry.column) == (row, column)), None)
