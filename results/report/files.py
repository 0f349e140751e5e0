"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path


def replace_text(path: Path, text: str | Iterable[str]) -> None:
    """Writes UTF-8 under a temporary name in the same folder, flushes it to disk and renames it onto `path`.

    text: whole, or in parts that follow each other. Only its owner may read the file (tables and reports hold prompts),
    unless its owner gave it another mode before. Raises `OSError` that names the path.
    """
    made = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _replace(path, text)
    except OSError as error:
        if made:
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        # A disk that is full names no file.
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_folder(folder: Path) -> None:
    """That a file can be made there, before what it will hold is computed. Leaves nothing behind: a folder that it made
    is removed again. Raises `OSError`."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        handle, temporary = tempfile.mkstemp(prefix=".check.", dir=folder)
        os.close(handle)
        os.unlink(temporary)
    finally:
        for one in made:
            with contextlib.suppress(OSError):
                one.rmdir()


def _replace(path: Path, text: str | Iterable[str]) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
