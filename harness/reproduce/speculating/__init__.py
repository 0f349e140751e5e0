"""Speculating experts (003): what we find for each of its claims, and its tables and figures drawn again."""

from __future__ import annotations

from harness.reproduce.speculating.drawn import tables
from harness.reproduce.speculating.found import findings

__all__ = ["findings", "tables"]
