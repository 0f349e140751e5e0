"""Folders for the time that something takes, in the folder for temporary files, or where what comes out shall lie. They
go when it is done.

A process that is killed leaves its folder. The next one to make a folder here takes it away: whoever uses a folder
holds a lock on it, which ends with the process. Names without `HELD` are of versions that held none, and stay.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

HELD = ".held"
"""How the names of folders end on which their users hold a lock."""
NEW_S = 60.0
"""So young a folder may not be locked yet."""


class ScratchFolder:
    """One folder, as a context or until `close`; it goes when this process ends in order, too."""

    def __init__(self, kind: str, beside: Path | None = None) -> None:
        """kind: of the name, for people. beside: the file that it becomes; the folder is hidden there. Raises
        `OSError`."""
        within = None if beside is None else beside.parent
        remove_left(within)
        self._made = tempfile.TemporaryDirectory(
            prefix=f"{_prefix(within)}{kind}-", suffix=HELD, dir=within, ignore_cleanup_errors=True
        )
        self.path = Path(self._made.name)
        self._lock: int | None = None
        with suppress(OSError):  # a file system without locks: there nobody takes a folder away
            self._lock = _locked(self.path, fcntl.LOCK_SH)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._made.cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _prefix(within: Path | None) -> str:
    return "joulebench-" if within is None else ".joulebench-"


@functools.cache
def remove_left(within: Path | None = None) -> None:
    """Folders of ours that nobody uses any more, as their processes were killed. Once in a process.

    within: another folder than that for temporary files.
    """
    with suppress(OSError):
        for path in (within or Path(tempfile.gettempdir())).glob(f"{_prefix(within)}*{HELD}"):
            with suppress(OSError):
                found = path.lstat()
                if found.st_uid == os.geteuid() and time.time() - found.st_mtime > NEW_S:
                    lock = _locked(path, fcntl.LOCK_EX)
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(lock)


def _locked(folder: Path, how: int) -> int:
    """The descriptor of a folder, which holds the lock until it is closed. Raises `OSError`: not at once where somebody
    has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
