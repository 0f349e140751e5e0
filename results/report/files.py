"""Files that are there whole or not at all; pipes, devices and open files, which are written straight into."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
DESCRIPTORS = re.compile("(?:/dev|/proc/([0-9]+))/fd/([0-9]{1,9})")
"""Names of what a process has open: of this one, or of the one with that number."""
DEVICE_FOLDER = "/dev"
"""Links in it are followed. Other links are replaced, as files are: a folder of others does not choose where else is
written."""


def replace_text(path: Path, text: str | Iterable[str]) -> None:
    """Writes UTF-8 under a temporary name in the same folder, flushes it to disk and renames it onto `path`.

    text: whole, or in parts that follow each other. Only its owner may read the file (tables and reports hold prompts),
    unless its owner gave it another mode before. A pipe or a device, such as /dev/null, stays what it is, and gets the
    text itself; what is open, such as /dev/stdout, gets it where it stands. Raises `OSError` that names the path.
    """
    made = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        into = _written_into(path)
        if into is None:
            _replace(path, text)
        else:
            with into:
                into.writelines([text] if isinstance(text, str) else text)
    except OSError as error:
        if made:
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        # A disk that is full names no file.
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_new_text(path: Path, text: str) -> None:
    """Whole or not at all, and never over another file. Raises `FileExistsError`, `OSError`."""
    with path.open("x"):  # the name is ours, on a file system without links too
        pass
    try:
        replace_text(path, text)
    except BaseException:
        path.unlink()
        raise


def for_owner(path: str, flags: int) -> int:
    """An opener of files that hold what was asked and answered, or when: only their owner may read them."""
    return os.open(path, flags, 0o600)


def flush(path: Path) -> None:
    """Onto the disk: what a file holds, before its name stands for it; of a folder, which names it holds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def _written_into(path: Path) -> TextIO | None:
    """Opened; None of what is replaced. A folder is opened too, which is an error that says so."""
    # The folder by its one name: /dev/../dev is /dev, and /proc/self a link.
    name = os.path.join(os.path.realpath(path.parent), path.name)
    found = DESCRIPTORS.fullmatch(name)
    is_own = found is not None and found[1] in (None, str(os.getpid()))
    number = int(found[2]) if found is not None and is_own else STREAMS.get(name)
    if number is not None:
        # To open its name would open a file anew, from its start. What was printed before comes before.
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        return os.fdopen(os.dup(number), "w", encoding="utf-8", newline="")
    is_followed = os.path.dirname(name) == DEVICE_FOLDER if path.is_symlink() else path.exists() and not path.is_file()
    return path.open("a", encoding="utf-8", newline="") if is_followed else None


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
