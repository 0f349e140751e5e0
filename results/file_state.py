"""What tells whether a file's contents are others: its state, without reading it (another state may be other contents),
and its digest."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple


class FileState(NamedTuple):
    """The inode's own time tells of a write whose time was set back; it moves with modes and links too."""

    n_bytes: int
    changed_ns: int
    inode_changed_ns: int
    device: int
    inode: int


def file_state(path: Path) -> FileState:
    """Raises `OSError`."""
    found = path.stat()
    return FileState(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_dev, found.st_ino)


def sha256_of_file(path: Path) -> str:
    """Read now. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
