"""Files that are there whole or not at all; pipes and devices, which are written straight into."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

DEVICE_FOLDERS = ("/dev", "/dev/fd", "/proc/self/fd")
"""Links in these, such as /dev/stdout, lead to what a process has open. Other links are replaced, as files are: a
folder of others does not choose where else is written."""


def replace_text(path: Path, text: str | Iterable[str]) -> None:
    """Writes UTF-8 under a temporary name in the same folder, flushes it to disk and renames it onto `path`.

    text: whole, or in parts that follow each other. Only its owner may read the file (tables and reports hold prompts),
    unless its owner gave it another mode before. A pipe or a device, such as /dev/null, stays what it is, and gets the
    text itself. Raises `OSError` that names the path.
    """
    made = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if _is_written_into(path):
            with path.open("w", encoding="utf-8", newline="") as file:
                file.writelines([text] if isinstance(text, str) else text)
        else:
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


def _is_written_into(path: Path) -> bool:
    """A folder is too, which is an error that says so."""
    if path.is_symlink():
        return os.path.dirname(path.absolute()) in DEVICE_FOLDERS
    return path.exists() and not path.is_file()


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
