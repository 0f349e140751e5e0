"""Waiting for what another process or thread does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 120.0
"""Far more than a loaded machine takes. A test that passes waits for next to none of it."""


def eventually(condition: Callable[[], object]) -> bool:
    """Whether it comes true."""
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def is_alive(pid: int) -> bool:
    """A process that has ended and that nobody has waited for is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: Iterable[int]) -> bool:
    """Whether none of them is left in the end."""
    return eventually(lambda: not any(map(is_alive, pids)))


def running(word: str) -> list[int]:
    """Other processes with that in their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if word.encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found
