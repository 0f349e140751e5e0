"""How engines fail."""

from __future__ import annotations


class EngineError(Exception):
    """A request or a model that the engine cannot take: what, the value found, the remedy."""
