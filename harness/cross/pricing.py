"""Rows of the cross table, priced in one process or in several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from devices.models.sheet import Sheet
from engines.parallel.running import usable_cores
from harness.cross.table import Asked, Pricing, Question, Row, row_of
from harness.processes import processes

MOST_PROCESSES: Final = 4
"""That nobody asked for. Each takes half a GB."""

FEW_ROWS: Final = 12
"""Take less time here than it takes to start processes."""

_question: list[Question] = []
"""Of a process: sent once, so that its rows share the routing that was drawn."""


def wanted_processes(jobs: int | None, n_rows: int, again_and_again: bool) -> int:
    """jobs: as asked for. again_and_again: whether rows are priced at many sheets."""
    if jobs is not None:
        return min(jobs, max(n_rows, 1))
    return 1 if n_rows * (4 if again_and_again else 1) <= FEW_ROWS else min(usable_cores(), MOST_PROCESSES)


@contextmanager
def pricing(question: Question, n_processes: int) -> Iterator[Pricing]:
    """Ends its processes. Raises `BrokenProcessPool` where one ended by itself."""
    if n_processes == 1:
        yield lambda asked: (row_of(question, arm, sheet) for arm, sheet in asked)
        return
    with processes(n_processes, begin=_begin, told=(question,)) as pool:

        def priced(asked: Sequence[Asked]) -> Iterator[Row]:
            waiting = [pool.submit(_row, arm.technique, arm.name, sheet) for arm, sheet in asked]
            return (replace(done.result(), arm=arm) for (arm, _), done in zip(asked, waiting, strict=True))

        yield priced


def _begin(question: Question) -> None:
    _question.append(question)


def _row(technique: str, name: str, sheet: Sheet) -> Row:
    """Parameters of a technique are a class made at run time, which no other process can read: the arm is found again
    by its name, and the row goes without them."""
    (question,) = _question
    arm = next(one for one in question.arms_on(sheet, (technique,)) if one.name == name)
    return replace(row_of(question, arm, sheet), arm=replace(arm, parameters=None))
