"""What took long to find is written elsewhere where it was asked for cannot be: it is not lost at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path


def stamp() -> str:
    """Now, for the name of what is written elsewhere."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def written_somewhere(out: Path, name: str, write: Callable[[Path], object]) -> tuple[Path | None, str]:
    """(where it is, what went wrong). name: in the current folder, or that of temporary files, where `out` cannot be
    written. write: raises `OSError`, and then leaves nothing."""
    trouble = ""
    # Each is found when its turn comes: the current folder may be gone, and no temporary one may be writable.
    places: tuple[Callable[[], Path], ...] = (
        lambda: out,
        lambda: Path.cwd() / name,
        lambda: Path(tempfile.gettempdir()) / name,
    )
    for place in places:
        try:
            target = place()
            write(target)
        except OSError as error:
            trouble = trouble or f"--out {out}: cannot be written ({error.strerror or error})"
        else:
            return target, trouble
    return None, trouble
