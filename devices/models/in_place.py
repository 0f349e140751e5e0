"""Sheets that stand in the place of those of this package, in one process: what conclusions are tested with.

`load_sheet` notes which sheets it is asked for, and gives the one that stands here in the place of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from devices.models.sheet import Sheet

asked: set[str] = set()
changed: dict[str, Sheet] = {}
