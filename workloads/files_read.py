"""Which files the items of workloads were read from: what they held belongs to a run."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path

_noted: ContextVar[set[Path] | None] = ContextVar("files that items were read from", default=None)


def note_into(files: set[Path]) -> None:
    """From now on, files that items are read from are added to this set."""
    _noted.set(files)


def note(path: Path) -> None:
    files = _noted.get()
    if files is not None:
        files.add(path)
