"""The user's cache: files that cost seconds to make anew, trusted only where nobody else can have written them."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from results.home import home_folder

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class CacheError(Exception):
    """A folder or a file in it that cannot be used or trusted; the message says why, and what to do."""


def cache_folder(kind: str) -> Path:
    """The user's, for one kind of files. Raises `CacheError` for a user without a home."""
    # A relative path is to be ignored (XDG Base Directory Specification): it would follow the current folder.
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named) / "joulebench" / kind
    home = home_folder()
    if home is None:
        raise CacheError("this user has no home folder; set XDG_CACHE_HOME to a folder of yours")
    return home / ".cache" / "joulebench" / kind


def prepared(folder: Path) -> Path:
    """The folder, made where it is not there, ours alone to write. Raises `CacheError`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise CacheError(f"{folder} is no folder; remove it, or set XDG_CACHE_HOME to a folder of yours")
        if found.st_uid != os.geteuid():
            raise CacheError(
                f"{folder} belongs to user {found.st_uid}, not to you ({os.geteuid()}); set XDG_CACHE_HOME to a folder"
                " of yours"
            )
        if found.st_mode & OTHERS_WRITE:
            folder.chmod(0o700)
        os.listdir(folder)
    except OSError as error:
        raise CacheError(f"{folder} cannot be used ({error}); set XDG_CACHE_HOME to a folder that can") from error
    return folder


def own_bytes(path: Path, limit: int) -> bytes:
    """Of a plain file that is ours and that nobody else can write; at most one byte more than `limit`."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise CacheError(f"{path} is no plain file")
            if found.st_uid != os.geteuid():
                raise CacheError(f"{path} belongs to user {found.st_uid}, not to you ({os.geteuid()})")
            if found.st_mode & OTHERS_WRITE:
                raise CacheError(f"{path} can be written by others (mode {found.st_mode & 0o777:o})")
            return file.read(limit + 1)
    except OSError as error:
        raise CacheError(f"{path} cannot be read ({error})") from error


def put(path: Path, contents: bytes) -> None:
    """At once or not at all, in place of whatever lies there. Raises `OSError`."""
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(contents)
        if path.is_dir():
            clear(path)
        Path(unfinished).replace(path)
    except OSError:
        clear(Path(unfinished))
        raise


def clear(path: Path) -> None:
    """Whatever lies at a name of ours; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
