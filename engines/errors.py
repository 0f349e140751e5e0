"""How engines fail."""

from __future__ import annotations

from results.messages import readable


class EngineError(Exception):
    """A request or a model that the engine cannot take: what, the value found, the remedy."""

    def __str__(self) -> str:
        return readable(super().__str__())
