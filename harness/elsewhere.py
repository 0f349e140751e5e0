"""What took long to find is written elsewhere where it was asked for cannot be: it is not lost at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path


def stamp() -> str:
    """Now, for the name of what is written elsewhere."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def places(name: str, *others: Path) -> tuple[Path, ...]:
    """Of a file that cannot be written where it was asked for: in other folders, the current one, and that of temporary
    files. Without those that are not to be found: the current folder may be gone, and no temporary one writable."""
    folders: tuple[Callable[[], Path], ...] = (
        *(other.absolute for other in others),
        Path.cwd,
        lambda: Path(tempfile.gettempdir()),
    )
    found: dict[Path, None] = {}
    for folder in folders:
        with suppress(OSError):
            found[folder() / name] = None
    return tuple(found)


def written_somewhere(out: Path, name: str, write: Callable[[Path], object]) -> tuple[Path | None, str]:
    """(where it is, what went wrong). name: of `places`, where `out` cannot be written. write: raises `OSError`, and
    then leaves nothing."""
    trouble = ""
    for target in (out, *places(name)):
        try:
            write(target)
        except OSError as error:
            trouble = trouble or f"--out {out}: cannot be written ({error.strerror or error})"
        else:
            return target, trouble
    return None, trouble
