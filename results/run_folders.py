"""The folder that a run shall have: whether one can be there, and room for it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from results.database import StoreError, UnwrittenError
from results.units import told_apart

FREE_BYTES_NEEDED: Final = 64 * 1024 * 1024
"""A run does not start, and a trial is not written, with less room than this on the disk."""


def check_free_space(directory: Path, is_begun: bool = False) -> None:
    """Raises `UnwrittenError` when the disk under a (perhaps not yet existing) folder has too little room. is_begun: a
    run is in it, which goes on where it was broken off."""
    existing = _existing(directory)
    room = shutil.disk_usage(existing)
    # What has no bytes at all is no disk (/proc, /sys), or does not tell: whoever writes there hears why it cannot be.
    remedy = "and go on with --resume" if is_begun else "or name a folder on another disk with --out"
    if room.total and os.access(existing, os.W_OK) and room.free < FREE_BYTES_NEEDED:
        free, needed = told_apart(room.free, FREE_BYTES_NEEDED)
        raise UnwrittenError(
            f"only {free} are free on the disk of {directory}, {needed} are needed; make room {remedy}"
        )


def check_can_be_made(directory: Path) -> None:
    """Raises `StoreError` where a (perhaps not yet existing) folder cannot be written. Writes nothing itself: another
    run may be about to begin there."""
    existing = _existing(directory)
    remedy = "name a folder that can be written with --out"
    if not existing.is_dir():
        raise StoreError(f"cannot create the run folder {directory}: {existing} is no folder; {remedy}")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UnwrittenError(f"cannot create the run folder {directory}: {existing} cannot be written; {remedy}")


def _existing(directory: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(p for p in (directory.absolute(), *directory.absolute().parents) if p.exists())


def check_is_folder(directory: Path) -> None:
    """Raises `StoreError` where something lies that is no folder: a file, a device."""
    try:
        is_other = not directory.is_dir() and (directory.exists() or directory.is_symlink())
    except OSError as error:  # a name that is too long
        raise StoreError(
            f"{str(directory)[:80]}: no folder can be there ({error.strerror}); name another one"
        ) from error
    if is_other:
        raise StoreError(f"{directory} is no folder; name another one")
