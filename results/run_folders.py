"""The folder of a run: whether one can be there, room for it, and which files are its own."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from results.database import DATABASE, StoreError, UnwrittenError, holds_run
from results.units import told_apart

FREE_BYTES_NEEDED: Final = 64 * 1024 * 1024
"""A run does not start, and a trial is not written, with less room than this on the disk."""
OWN_NAMES: Final = {DATABASE, *(f"{DATABASE}-{s}" for s in ("journal", "wal", "shm")), "run.lock", "traces"}
"""The journal exists only for the moment before the database is in WAL mode; a kill may leave it."""


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


def check_holds_run(directory: Path) -> None:
    """Raises `StoreError` where there is nothing to look at or to go on with."""
    if holds_run(directory / DATABASE):
        return
    if lost := trace_files(directory):
        raise StoreError(without_rows(directory, lost))
    absent = "" if (directory / DATABASE).is_file() else f" ({DATABASE} is absent)"
    raise StoreError(f"{directory} holds no run{absent}; give the folder that `joulebench run` wrote")


def remove_new(directory: Path, found: set[str], made: bool) -> None:
    """Undoes a folder that could not be created: all of it, or what was not there before."""
    if made:
        shutil.rmtree(directory, ignore_errors=True)
        return
    for name in OWN_NAMES - found:
        if name == "traces":
            shutil.rmtree(directory / name, ignore_errors=True)
        else:
            # Another error is on its way up, and is the one to tell.
            with contextlib.suppress(OSError):
                (directory / name).unlink(missing_ok=True)


def trace_files(directory: Path) -> list[Path]:
    """Those of finished trials, and of one whose rows a kill left unwritten."""
    return sorted((directory / "traces").glob("*.parquet"))


def without_rows(directory: Path, lost: Sequence[Path]) -> str:
    """What is wrong with trace files of trials that the database lacks, and the remedy."""
    many = f"{len(lost)} trace files" if len(lost) > 1 else "a trace file"
    return (
        f"{directory / 'traces'} holds {many} of trials that {DATABASE} does not hold ({lost[0].name}); was it emptied,"
        f" or its {DATABASE}-wal lost? Put back the {DATABASE} and {DATABASE}-wal of then, or name another --out"
    )
