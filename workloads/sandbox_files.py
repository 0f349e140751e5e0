"""What a sandboxed program has written and still holds: the files of its folder, and those that it deleted but keeps.

A deleted file is there as long as a descriptor or a mapping of the program is. No limit of the kernel counts it, and a
mapping of one page holds the whole file: a gigabyte of disk can hang on a megabyte of address space.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

FileKey = tuple[int, int]
"""Device and inode."""


def visible_files(folder: Path) -> Iterator[int]:
    """Bytes on the disk of each file in the folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.stat(follow_symlinks=False).st_blocks * 512


def deleted_files(pid: int, folder: Path, given: FileKey, most_bytes: int) -> Iterator[int]:
    """Bytes of each deleted file of the folder that the process holds.

    given: a deleted file that it was started with. most_bytes: what a file can have; one that is only mapped counts as
    that much, for its size is shown to root alone. Nothing for a process that has ended.
    """
    seen = {given}
    # Threads may have descriptors of their own.
    for table in _listed(f"/proc/{pid}/task"):
        for number in _listed(f"/proc/{pid}/task/{table}/fd"):
            with contextlib.suppress(OSError):
                found = os.stat(f"/proc/{pid}/task/{table}/fd/{number}")
                key = (found.st_dev, found.st_ino)
                if stat.S_ISREG(found.st_mode) and not found.st_nlink and key not in seen:
                    seen.add(key)
                    yield found.st_blocks * 512
    for _ in set(_mapped(pid, folder)) - {inode for _, inode in seen}:
        yield most_bytes


def _mapped(pid: int, folder: Path) -> Iterator[int]:
    """Inodes of the deleted files of the folder that are mapped."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                # address permissions offset device inode path, and whether the file is deleted
                if f" {folder}/" in line and line.endswith(" (deleted)\n"):
                    yield int(line.split(maxsplit=5)[4])
    except OSError:
        return


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
