"""What a recorded power CSV says of its values, in comment lines before its header:

    # averaged_s = 1                each value is the mean of so many seconds before its `time_s`
    # averaged_s = rows             each value is the mean of the time since the row before
    # averaged_s = 0                each value is the power at its moment
    # update_period_s = 0.1         how often the values renew, where rows repeat them; 0: each row has a new one
    # gpu_w averaged_s = 1          of this column alone

Each word that a column does not say itself is what a line without a column says. But of `rows` and a period, which
cannot both be, `rows` of its own holds alone, and with a period of its own it says what its values are. Other comments
are skipped where they are no `word = value`. Without them a value is the power at its moment, and every row has a new
one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from devices.base import MeterUnavailableError
from devices.gauges import observed_update_period_s

Array = NDArray[np.float64]

COMMENT = "#"
AVERAGED, PERIOD = "averaged_s", "update_period_s"
ROWS = "rows"
QUICKER = 0.5
"""Of the period that is told: values that change so much quicker renew so too."""


class PowerWords(NamedTuple):
    """Of a column. averaged_s: None where nothing is told, and where the means are `of_rows`."""

    averaged_s: float | None = None
    of_rows: bool = False
    update_period_s: float = 0.0

    def __str__(self) -> str:
        told = []
        if self.of_rows:
            told.append("each value is the mean since the row before")
        if self.averaged_s is not None:
            told.append(f"each value is the mean of the {self.averaged_s:.6g} s before it")
        if self.update_period_s:
            told.append(f"values renew every {self.update_period_s:.6g} s")
        return ", ".join(told)


class FileWords(NamedTuple):
    """n_lines: before the header. told: by column ("" for all) and word, its line and value."""

    path: Path
    n_lines: int
    told: Mapping[str, Mapping[str, tuple[int, str]]]

    def of_columns(self, columns: Sequence[str]) -> tuple[PowerWords, ...]:
        """Raises `MeterUnavailableError` for a column that is not there, and for words that contradict each other."""
        for column, own in self.told.items():
            if column and column not in columns:
                line = min(line for line, _ in own.values())
                raise _refused(self.path, line, f"no column of watts is called {column[:40]!r} ({', '.join(columns)})")
        of_all = self.told.get("", {})
        for column, own in self.told.items():
            if AVERAGED not in own and _contradict({**of_all, **own}) and not _contradict(of_all):
                raise _refused(
                    self.path,
                    own[PERIOD][0],
                    f"rows of {column} repeat values, and {AVERAGED} = {ROWS} of all columns is of rows that do not;"
                    f" say what {column} has: {column} {AVERAGED} = SECONDS, 0 for the power at its moment",
                )
            if _contradict(own):
                name = f"{column} " if column else ""
                raise _refused(
                    self.path,
                    max(line for line, _ in own.values()),
                    f"{name}{AVERAGED} = {ROWS} says that each row has a value of its own, and {name}{PERIOD} that rows"
                    " repeat one; delete one of them",
                )
        return tuple(self._of(column) for column in columns)

    def _of(self, column: str) -> PowerWords:
        own = self.told.get(column, {})
        merged = {**self.told.get("", {}), **own}
        values = {word: value for word, (_, value) in (own if _contradict(merged) else merged).items()}
        of_rows = values.get(AVERAGED) == ROWS
        averaged_s = None if of_rows else float(values.get(AVERAGED, 0.0)) or None
        return PowerWords(averaged_s, of_rows, float(values.get(PERIOD, 0.0)))


def _contradict(told: Mapping[str, tuple[int, str]]) -> bool:
    """Rows that each have a value of their own, and rows that repeat one."""
    return AVERAGED in told and told[AVERAGED][1] == ROWS and PERIOD in told and float(told[PERIOD][1]) > 0


def read_words(path: Path) -> FileWords:
    """Raises `MeterUnavailableError` with the line that says what cannot be, OSError where there is no file."""
    told: dict[str, dict[str, tuple[int, str]]] = {}
    n_lines = 0
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for line in file:
            if not line.startswith(COMMENT):
                break
            n_lines += 1
            words, equals, value = (part.strip() for part in line.lstrip(COMMENT).partition("="))
            *column_parts, word = words.split() or [""]
            if word not in (AVERAGED, PERIOD) or not equals:
                if AVERAGED in line or PERIOD in line or (equals and len(words.split()) == 1):
                    remedy = f"write {AVERAGED} = SECONDS, or {PERIOD} = SECONDS"
                    raise _refused(path, n_lines, f"{line.strip()[:60]!r} tells nothing that is known; {remedy}")
                continue
            own = told.setdefault(" ".join(column_parts), {})
            if word in own:
                raise _refused(path, n_lines, f"{words} is told twice; delete one")
            own[word] = n_lines, value
            if not (word == AVERAGED and value == ROWS):
                _seconds(path, n_lines, words, value)
    return FileWords(path, n_lines, told)


def refuse_contradicted(
    path: Path, told: Sequence[PowerWords], columns: Sequence[str], times_s: Array, watts: Array
) -> None:
    """told: of each column. watts: [rows, columns]. Raises `MeterUnavailableError` where the rows cannot be what the
    words say."""
    length_s = float(times_s[-1] - times_s[0])
    for words, column, column_w in zip(told, columns, watts.T, strict=True):
        for word, told_s in ((AVERAGED, words.averaged_s or 0.0), (PERIOD, words.update_period_s)):
            if told_s > length_s:
                raise MeterUnavailableError(
                    f"replay: {path}: {column} {word} = {told_s:.6g}, and the whole recording lasts {length_s:.6g} s;"
                    " is it in seconds?"
                )
        seen_s = observed_update_period_s(times_s, column_w)
        if seen_s < QUICKER * words.update_period_s:
            raise MeterUnavailableError(
                f"replay: {path}: {column} {PERIOD} = {words.update_period_s:.6g}, and it changes every {seen_s:.3g} s;"
                f" a mean of longer than it renews is told by {AVERAGED}"
            )


def _seconds(path: Path, line: int, words: str, value: str) -> None:
    """words: the column, if one is named, and the word. Raises `MeterUnavailableError` where these are none."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        other = f", or {ROWS}" if words.endswith(AVERAGED) else ""
        raise _refused(path, line, f"{words} is {value[:40]!r}; write seconds, 0 or more{other}")


def _refused(path: Path, line: int, why: str) -> MeterUnavailableError:
    return MeterUnavailableError(f"replay: {path}: line {line}: {why}")
