"""Operations in the order in which they are asked, that name those they wait for by their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from devices.models.operation import Operation

MOST_KEPT = 1 << 16
made = lru_cache(MOST_KEPT)(Operation)
"""The same operation is the same object: a timeline finds it without looking into it."""


@lru_cache(MOST_KEPT)
def _waiting(operation: Operation, after: tuple[int, ...]) -> Operation:
    return replace(operation, after=after)


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
        backs = [number - one for one in after if one is not None] if after else ()
        if backs:
            operation = _waiting(operation, tuple(sorted(set(backs)) if len(backs) > 1 else backs))
        self.operations.append(operation)
        return number

    def extend(self, operations: Sequence[Operation]) -> int:
        """Work that waits for nothing it names; the number of what stands there last."""
        self.operations.extend(operations)
        return self.next_number - 1
