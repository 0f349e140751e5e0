"""Operations in the order in which they are asked, that name those they wait for by their numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from devices.models.operation import Operation


class Steps:
    def __init__(self, n_before: int = 0) -> None:
        """n_before: operations that the timeline ran before: the first one here has that number."""
        self.operations: list[Operation] = []
        self._n_before = n_before

    def add(self, operation: Operation, after: Iterable[int | None] = ()) -> int | None:
        """Its number. after: numbers of those that it waits for besides. Work of size zero is left out: None."""
        if operation.flops == 0 and operation.moved_bytes == 0:
            return None
        number = self._n_before + len(self.operations)
        backs = tuple(sorted({number - one for one in after if one is not None}))
        self.operations.append(replace(operation, after=backs) if backs else operation)
        return number
