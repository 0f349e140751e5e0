"""Converts a checkpoint package by package: into a folder that a killed conversion goes on with, in bounded room.

A package is written under another name and renamed; the manifest is written last. So what has its name is whole. What
coremltools leaves in its temporary folder lies in the folder of the conversion too, and goes after each package.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from filelock import FileLock, Timeout

from devices.peak_memory import PeakMemory, peak_memory
from engines.coreml.conversion import Conversion, is_there
from engines.coreml.manifest import Manifest, PackagePlan
from engines.coreml.sums import Digests, damage, read_now
from engines.errors import EngineError
from results.units import told_apart, with_prefix

LOCK, WORK = ".convert.lock", ".work"
SPARE_BYTES = 256 << 20
"""Beyond the weights: specifications, and room for the rest of the machine."""
COPIES_AT_WORK = 2
"""Of the heaviest package, while it is written: the library's own, and the one that is renamed."""


class Following(Protocol):
    """Who is told of progress."""

    def checks(self, n_packages: int) -> None:
        """Of those that are there, whether they are as they were written."""
        ...

    def begin(self, n_packages: int, n_bytes: int, n_done: int, done_bytes: int) -> None: ...

    def package(self, package: PackagePlan) -> None: ...

    def done(self, package: PackagePlan, took_s: float) -> None: ...


class Converted(NamedTuple):
    """n_kept: packages that were there already. n_bytes: of the whole folder."""

    manifest: Manifest
    n_written: int
    n_kept: int
    n_bytes: int
    took_s: float
    peak: PeakMemory


class NoSpaceError(EngineError):
    """The disk has too little room."""


class _Unheard:
    """A `Following` that tells nobody."""

    def checks(self, n_packages: int) -> None:
        pass

    def begin(self, n_packages: int, n_bytes: int, n_done: int, done_bytes: int) -> None:
        pass

    def package(self, package: PackagePlan) -> None:
        pass

    def done(self, package: PackagePlan, took_s: float) -> None:
        pass


def convert_all(
    conversion: Conversion, folder: Path, following: Following | None = None, digests: Digests = read_now
) -> Converted:
    """What is not there yet, or is not as it was written. digests: of files that are there.

    Raises `EngineError`, `OSError`.
    """
    following = following or _Unheard()
    began_s = time.monotonic()
    check_room(folder, [package for package in conversion.packages if not is_there(folder, package)])
    conversion.begin(folder)
    with _alone(folder):
        clear_unfinished(folder)
        there = [package for package in conversion.packages if is_there(folder, package)]
        following.checks(len(there))
        damaged = damage((folder / package.path for package in there), digests)
        kept = [package for package in there if folder / package.path not in damaged]
        left = [package for package in conversion.packages if package not in kept]
        check_room(folder, left)
        done_bytes = sum(package.weight_bytes for package in kept)
        following.begin(len(conversion.packages), conversion.manifest.weight_bytes, len(kept), done_bytes)
        with _temporary_files_in(folder / WORK) as clear:
            for package in left:
                following.package(package)
                from_s = time.monotonic()
                try:
                    conversion.convert(package, folder)
                except RuntimeError as error:
                    # coremltools' writer in C++ tells so that the disk is full.
                    free = with_prefix(shutil.disk_usage(folder).free, "B", digits=3)
                    raise NoSpaceError(
                        f"{folder}: {package.path} cannot be written ({' '.join(str(error).split())};"
                        f" {free} are free); finished packages are kept, the same command goes on"
                    ) from error
                clear()
                following.done(package, time.monotonic() - from_s)
        conversion.finish(folder)
    n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    took_s = time.monotonic() - began_s
    return Converted(conversion.manifest, len(left), len(kept), n_bytes, took_s, peak_memory())


def needed_bytes(packages: list[PackagePlan]) -> int:
    """On the disk, to write these."""
    if not packages:
        return 0
    sizes = [package.weight_bytes for package in packages]
    return sum(sizes) + COPIES_AT_WORK * max(sizes) + SPARE_BYTES


def check_room(folder: Path, packages: list[PackagePlan]) -> None:
    """Raises `NoSpaceError`, before any work."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    needed, free = needed_bytes(packages), shutil.disk_usage(existing).free
    if free < needed:
        needs, has = told_apart(needed, free)
        raise NoSpaceError(
            f"{folder}: {needs} are needed for {len(packages)} packages and {has} are free; make room, or name a folder"
            " on another disk"
        )


def clear_unfinished(folder: Path) -> None:
    """What a killed conversion left behind."""
    for path in (*folder.glob("layer-*/.*"), folder / WORK):
        if path.is_dir():
            shutil.rmtree(path)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise EngineError(f"{folder}: another conversion writes there now; wait for it") from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[Callable[[], None]]:
    """Of this process, until the end. Yields what clears them."""

    def clear() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

    before = tempfile.tempdir
    clear()
    tempfile.tempdir = str(folder)
    try:
        yield clear
    finally:
        tempfile.tempdir = before
        shutil.rmtree(folder, ignore_errors=True)
