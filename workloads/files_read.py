"""Which files the items of workloads were read from, and when: what they held belongs to a run."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from pathlib import Path

from results.file_state import FileState, file_state

FilesRead = dict[Path, FileState]
"""Each with its state before it was read first."""

_noted: ContextVar[FilesRead | None] = ContextVar("files that items were read from", default=None)


def note_into(files: FilesRead) -> None:
    """From now on, files that items are read from are added to these."""
    _noted.set(files)


def note(path: Path) -> None:
    """To be called before it is read; a file that is not there is none that was read."""
    files = _noted.get()
    if files is not None and path not in files:
        with contextlib.suppress(OSError):
            files[path] = file_state(path)
