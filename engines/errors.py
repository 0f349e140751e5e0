"""How engines fail."""

from __future__ import annotations

from typing import Literal

from results.messages import readable


class EngineError(Exception):
    """A request or a model that the engine cannot take: what, the value found, the remedy."""

    def __str__(self) -> str:
        return readable(super().__str__())


class NoRoomError(EngineError):
    """Experts that fit nowhere on a machine, by the memories that its sheet states: no fault of a run, but a result.

    result: what sources call it in their tables.
    """

    def __init__(self, result: Literal["N.S.", "oom"], why: str) -> None:
        super().__init__(f"{result}: {why}")
        self.result: Literal["N.S.", "oom"] = result
