"""GPU-NDP (001): what we find for each of its claims, and its tables and figures drawn again."""

from __future__ import annotations

from harness.reproduce.gpu_ndp.drawn import tables
from harness.reproduce.gpu_ndp.found import findings

__all__ = ["findings", "tables"]
