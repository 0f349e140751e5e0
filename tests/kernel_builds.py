"""A cache of kernels of its own with a small source to build, for tests that build."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.kernels import cache, library
from engines.kernels.compile import FLAGS_VARIABLE, compilers
from engines.kernels.library import Loaded, loaded
from results.own_cache import prepared

SYMBOLS = tuple(name for name in library._functions() if name != "instruction_set")
STAND_IN = (
    'extern "C" {'
    + "".join(f"void joulebench_{name}() {{}} " for name in SYMBOLS)
    + 'const char* joulebench_instruction_set() { return "SSE2"; } }'
)
"""In place of the kernels where only the keeping is tested: compiled in a tenth of a second."""


def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, empty, with a small source to build."""
    source = tmp_path / "kernels.cpp"
    source.write_text(STAND_IN)
    monkeypatch.setattr("engines.kernels.compile.SOURCES", (source,))
    monkeypatch.setattr("engines.kernels.compile.HEADERS", ())
    # Kept for the process: what a test says of the processor would be said to all that follow in this worker.
    monkeypatch.setattr("engines.kernels.compile._processor", lambda: "a processor")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(FLAGS_VARIABLE, "")
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "joulebench" / "kernels"


def load_anew() -> Loaded:
    """As a process that begins would."""
    return loaded.__wrapped__()


def build_only(folder: Path) -> None:
    """As another process did: what this one has loaded must not be damaged under it."""
    cache.add(prepared(folder), next(compilers()))


def library_in(folder: Path) -> Path:
    (found,) = folder.glob("*.so")
    return found


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path
