"""Operations in the order in which they are asked, that name those they wait for by their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from devices.models.operation import Operation

MOST_KEPT = 1 << 16


@lru_cache(MOST_KEPT)
def same(operation: Operation) -> Operation:
    """The first of those that are equal: a timeline finds it without looking into it."""
    return operation


@lru_cache(MOST_KEPT)
def made(*values: Any, **named: Any) -> Operation:
    return same(Operation(*values, **named))


_known_waiting: dict[tuple[int, tuple[int, ...]], tuple[Operation, Operation]] = {}
"""By the identity of an operation, which is kept, and what it waits for: the same that waits."""


def _waiting(operation: Operation, after: tuple[int, ...]) -> Operation:
    known = _known_waiting.get((id(operation), after))
    if known is None:
        if len(_known_waiting) >= MOST_KEPT:
            _known_waiting.clear()
        known = _known_waiting[id(operation), after] = operation, same(replace(operation, after=after))
    return known[1]


class Steps:
    def __init__(self, n_before: int = 0) -> None:
        """n_before: operations that the timeline ran before: the first one here has that number."""
        self.operations: list[Operation] = []
        self._n_before = n_before

    @property
    def next_number(self) -> int:
        """Of what is added next."""
        return self._n_before + len(self.operations)

    def add(self, operation: Operation, after: Sequence[int | None] = ()) -> int | None:
        """Its number. after: numbers of those that it waits for besides. Work of size zero is left out: None."""
        if operation.flops == 0 and operation.moved_bytes == 0:
            return None
        number = self.next_number
        self.operations.append(_behind(operation, number, after) if after else operation)
        return number

    def extend(self, operations: Iterable[Operation], after: Mapping[int, Sequence[int | None]] | None = None) -> None:
        """Work of any size. after: of those at some places, numbers of those that they wait for besides."""
        first = len(self.operations)
        self.operations.extend(operations)
        for place, numbers in (after or {}).items():
            at = first + place
            self.operations[at] = _behind(self.operations[at], self._n_before + at, numbers)


def _behind(operation: Operation, number: int, after: Sequence[int | None]) -> Operation:
    """The operation of that number, which waits for others."""
    if len(after) == 1:
        return operation if after[0] is None else _waiting(operation, (number - after[0],))
    backs = {number - one for one in after if one is not None}
    return _waiting(operation, tuple(sorted(backs))) if backs else operation
