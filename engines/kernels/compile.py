"""Builds the kernels with the machine's own compiler, once, into the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = tuple(sorted(SOURCE.parent.glob("*.h")))
# No -ffast-math: sums must not lose NaN or infinity.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-pthread", "-shared", "-fPIC")
TIMEOUT_S = 120


class CompileError(Exception):
    """No compiler, or one that does not take this source."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, built if they are not in the cache; None where that fails, with the reason in the log."""
    try:
        return load(build(cache_folder()))
    except CompileError as error:
        logger.warning("the engine runs on torch alone, several times slower with narrow weights: %s", error)
        return None


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "joulebench" / "kernels"


def build(folder: Path) -> Path:
    """Compiles into `folder` unless this source was built there for this processor. Raises `CompileError`."""
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise CompileError("no C++ compiler found; install g++ (Debian: apt install g++)")
    source = "".join(path.read_text(encoding="utf-8") for path in (SOURCE, *HEADERS))
    key = hashlib.sha256(f"{source} {FLAGS} {compiler} {_processor()}".encode()).hexdigest()
    target = folder / f"kernels-{key[:16]}.so"
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unfinished = Path(scratch) / target.name
            _compile(compiler, unfinished)
            unfinished.replace(target)  # at once, so that another process never loads half a file
    except OSError as error:
        raise CompileError(f"{folder} cannot be written ({error}); set XDG_CACHE_HOME to a folder that can") from error
    logger.info("built %s with %s", target, compiler)
    return target


def _compile(compiler: str, target: Path) -> None:
    try:
        done = subprocess.run(
            [compiler, *FLAGS, str(SOURCE), "-o", str(target)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{compiler} took more than {TIMEOUT_S} s on {SOURCE.name}") from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise CompileError(f"{compiler} failed on {SOURCE.name}: {first}; g++ 12 and clang 16 are known to take it")


def load(path: Path) -> ctypes.CDLL:
    """Loads a built library and declares its functions."""
    try:
        kernels = ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(f"{path} does not load ({error}); delete it to build it anew") from error
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    f32 = ctypes.c_float
    arguments = {
        "linear": [pointer, pointer, i64, pointer, pointer, i32],
        "experts": [pointer, i64, pointer, pointer, pointer, pointer, pointer, i64, pointer, i32],
        "rms_norm": [pointer, i64, i64, pointer, f32, pointer, i32],
        "attention": [pointer, pointer, i64, pointer, pointer, i64, pointer, i64, pointer, i32],
        "route": [pointer, pointer, i64, pointer, pointer],
        "step": [
            *(pointer, i64, i64, pointer, pointer, pointer, i64),
            *(pointer, pointer, i64, i64, pointer, pointer, i32),
        ],
    }
    for name, types in arguments.items():
        function = getattr(kernels, f"joulebench_{name}")
        function.argtypes, function.restype = types, None
    return kernels


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return f"{platform.machine()} {platform.processor()}"
    lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    described = ("model", "flags", "Features", "CPU part")
    return " ".join(sorted({line for line in lines if line.startswith(described)}))
