"""Files that are there and cannot be read."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

BROKEN_GZIP = gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20
"""A good header, then a block of a type that deflate does not have: `zlib.error`, which is no OSError."""


def unreadable(path: Path) -> Path:
    """A link to this process's own memory, whose first page is never there: reading it fails, for root too."""
    memory = Path("/proc/self/mem")
    if not memory.is_file():
        pytest.skip("no /proc/self/mem on this system")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(memory)
    return path
