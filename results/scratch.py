"""Folders for the time that something takes, in the folder for temporary files. They go when it is done.

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

    def __init__(self, kind: str) -> None:
        """kind: of the name, for people. Raises `OSError`."""
        remove_left()
        self._made = tempfile.TemporaryDirectory(prefix=f"joulebench-{kind}-", suffix=HELD, ignore_cleanup_errors=True)
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


@functools.cache
def remove_left() -> None:
    """Folders of ours that nobody uses any more, as their processes were killed. Once in a process."""
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"joulebench-*{HELD}"):
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
