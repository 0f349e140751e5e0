"""What helps where a disk could not be written, by what the system said: room, a mode, or another disk."""

from __future__ import annotations

import errno
import sqlite3

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTCONN)
ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
"""What SQLite says on a full disk: of a file, and of the memory that several processes share of it."""
PRIMARY_CODE = 0xFF
"""Of SQLite's extended codes."""


def remedy_of(error: OSError | sqlite3.Error) -> str:
    """What to do, in the words of a command."""
    if isinstance(error, sqlite3.Error):
        return _of_database(error)
    if error.errno in FULL:
        return "make room"
    if error.errno in CLOSED:
        return "make it writable (chmod, or a mount that is not read-only)"
    if error.errno == errno.EIO:
        return "look at the disk, which failed (dmesg says how)"
    if error.errno in GONE:
        return "see that the folder and its disk are there"
    return "see that it can be written"


def is_full(error: object) -> bool:
    """Whether SQLite found no room."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) in ROOM


def is_io_error(error: object) -> bool:
    """Whether SQLite could not read or write the disk, for another reason."""
    return isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_IOERR and not is_full(error)


def _of_database(error: sqlite3.Error) -> str:
    code = _code(error)
    if is_full(error):
        return "make room"
    if code == sqlite3.SQLITE_IOERR:
        # A quota, and a limit on the size of files, are no full disk to SQLite.
        return "look at the disk, which failed (dmesg says how), or make room where a quota is reached"
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return "make it writable (chmod, or a mount that is not read-only)"
    return "see that it can be written"


def _code(error: sqlite3.Error) -> int:
    """0 where it is none of SQLite's, but of Python's module."""
    return int(getattr(error, "sqlite_errorcode", 0)) & PRIMARY_CODE
