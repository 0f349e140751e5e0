"""The kernels of this process: from the cache, built, or none, and then why."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.kernels.cache import KIND, Kept, Manifest, add, find, forget
from engines.kernels.compile import FLAGS_VARIABLE, CompileError, Compiler, compilers, has, lacking, shown
from results.environments import TORCH_ALONE
from results.own_cache import CacheError, cache_folder, prepared
from results.scratch import ScratchFolder

logger = logging.getLogger(__name__)

NOTICED_S = 2.0
"""A compilation that takes longer is told."""


@dataclass(frozen=True)
class Loaded:
    """kernels None: torch computes everything; reason says why."""

    kernels: ctypes.CDLL | None
    manifest: Manifest | None = None
    instruction_set: str | None = None
    reason: str | None = None


def library() -> ctypes.CDLL | None:
    """The kernels, built if they are not in the cache; None where that fails, with the reason in the log."""
    return loaded().kernels


@functools.cache
def loaded() -> Loaded:
    """What this process computes with, decided once."""
    try:
        try:
            return load_first(prepared(cache_folder(KIND)))
        except CacheError as error:
            logger.warning("the kernels are built anew for this process alone, which takes seconds: %s", error)
        # A library may go from the disk once it is mapped.
        with ScratchFolder("kernels") as scratch:
            return load_first(scratch, stays=False)
    except (CompileError, CacheError, OSError) as error:
        logger.warning("the engine runs on torch alone, %s: %s", TORCH_ALONE, error)
        return Loaded(None, reason=str(error))


def load_first(folder: Path, stays: bool = True) -> Loaded:
    """The first library of a folder, found or built there, that loads; one that is there before one to be built.
    stays: whether the next process finds the folder.

    What does not load is forgotten, and the next compiler is tried; with none left, what a compiler that is gone built
    serves. Raises `CompileError` where nothing loads, `CacheError`.
    """
    failures: list[str] = []
    there = list(compilers())
    for compiler in there[:1] if os.environ.get("CXX") else there:
        if found := _first_that_loads(find(folder, compiler), compiler, failures):
            return found
    for compiler in there:
        if found := _first_that_loads(find(folder, compiler), compiler, failures) or _built(
            folder, compiler, failures, stays
        ):
            return found
    if found := _first_that_loads(find(folder), None, failures):
        return found
    raise CompileError("; ".join(failures) or "no C++ compiler found; install g++ (Debian: apt install g++)")


def _built(folder: Path, compiler: Compiler, failures: list[str], stays: bool) -> Loaded | None:
    """None, and one failure more, where the compiler fails or what it wrote does not load."""
    try:
        with told_when_long(compiler, stays):
            kept = add(folder, compiler)
    except CompileError as error:
        failures.append(str(error))
        return None
    return _first_that_loads([kept], compiler, failures)


@contextlib.contextmanager
def told_when_long(compiler: Compiler, stays: bool) -> Iterator[None]:
    """One line, once somebody must wonder what is going on. stays: whether the next process finds what is built."""
    how_often = "once for this machine and version" if stays else "in this process alone"
    words = f"compiling the kernels with %s: about ten seconds, {how_often}"
    told = threading.Timer(NOTICED_S, logger.info, (words, compiler))
    told.daemon = True
    told.start()
    try:
        yield
    finally:
        told.cancel()


def _first_that_loads(kept: list[Kept], compiler: Compiler | None, failures: list[str]) -> Loaded | None:
    for one in kept:
        try:
            found = _loaded(one)
        except CompileError as error:
            failures.append(f"what {shown(str(compiler or one.manifest.compiler))} built is of no use here: {error}")
            forget(one)
            continue
        if failures:
            logger.warning("%s; kernels of %s are used", "; ".join(failures), one.manifest.compiler)
        return found
    return None


def _loaded(kept: Kept) -> Loaded:
    kernels = load(kept)
    instruction_set = kernels.joulebench_instruction_set().decode("ascii", "replace")
    lacks = lacking(kept.manifest.needs) if kept.manifest.is_for_others else []
    if lacks or not has(instruction_set):
        words = f" and uses {', '.join(lacks)}" if lacks else ""
        raise CompileError(
            f"{kept.library.name} is for {instruction_set}{words}, which this processor lacks ({FLAGS_VARIABLE})"
        )
    return Loaded(kernels, kept.manifest, instruction_set)


def load(kept: Kept) -> ctypes.CDLL:
    """Loads a library and declares its functions. Raises `CompileError`."""
    try:
        kernels = _mapped(kept.contents)
        for name, (result, arguments) in _functions().items():
            function = getattr(kernels, f"joulebench_{name}")
            function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError) as error:
        raise CompileError(f"{kept.library.name} does not load ({shown(str(error))})") from error
    return kernels


def _mapped(contents: bytes) -> ctypes.CDLL:
    """Of a copy in memory that has no name, or for as long as loading takes in a folder that only we can enter.

    So nobody can exchange, or cut short, what was checked. Raises `OSError`.
    """
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            # Left open: the loader knows libraries by name, and would take the next of this number for this one.
            descriptor = os.memfd_create("joulebench-kernels")
            with open(descriptor, "wb", closefd=False) as file:
                file.write(contents)
            return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    with ScratchFolder("kernels") as scratch:
        path = scratch / "kernels.so"
        path.write_bytes(contents)
        return ctypes.CDLL(str(path))


def _functions() -> dict[str, tuple[Any, list[Any]]]:
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    f32 = ctypes.c_float
    step = [
        *(pointer, i64, i64, pointer, pointer, pointer, i64),
        *(pointer, pointer, i64, i64, *(pointer,) * 11, f32, pointer, i64, *(pointer,) * 3),
        *(i64, pointer, i32),
    ]
    return {
        "instruction_set": (ctypes.c_char_p, []),
        "multiplies_bf16": (i32, []),
        "attends_by_bytes": (i32, []),
        "choose": (i32, [i32, pointer, i32]),
        "spin": (None, [i64]),
        "rows": (i32, [pointer, pointer, i64, f32, pointer, i32]),
        "linear": (None, [pointer, pointer, i64, pointer, pointer, i32]),
        "gate": (None, [pointer, pointer, i64, pointer, i64, pointer, i32]),
        "largest": (i64, [pointer, i64, pointer]),
        "experts": (None, [pointer, i64, *(pointer,) * 5, i64, pointer, i64, i64, i32]),
        "add": (None, [pointer, pointer, i64, pointer, i32]),
        "rms_norm": (None, [pointer, i64, i64, pointer, f32, pointer, i32]),
        "attention": (None, [pointer, pointer, i64, pointer, pointer, i64, pointer, i64, pointer, i32]),
        "project": (None, [pointer, pointer, i64, pointer, pointer, i64, *(pointer,) * 3, i32]),
        "attend": (None, [pointer, pointer, i64, pointer, i64, pointer, i32]),
        "route": (None, [pointer, pointer, i64, pointer, pointer, i32]),
        "laid_out": (i32, [pointer, pointer, i64, i64, *(pointer,) * 6, i64, i32]),
        "step": (i64, step),
        "batch": (None, [pointer, i64, i64, pointer, i64, pointer, i64, *(pointer,) * 4, f32, pointer, pointer, i32]),
        "sum": (i32, [pointer, pointer, i64]),
        "lend": (None, [pointer]),
        "take_back": (None, [pointer]),
        "helpers": (pointer, [pointer]),
        "end_helpers": (None, [pointer]),
    }
