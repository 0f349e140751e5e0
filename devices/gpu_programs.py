"""Programs besides ours that have a GPU open: their joules are in its totals, and their work makes ours slower."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

PROC = Path("/proc")
FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the machine's own (PROC_PID_INIT_INO of Linux); containers have others."""


def programs_of_others(found: Mapping[int, Collection[int]], proc: Path = PROC) -> tuple[str, ...] | None:
    """In words: "gpu0: python (pid 123)". found: process ids by GPU, of ours and of others.

    None where the driver's ids cannot be those of this container: it counts ours as somebody else's then.
    """
    me = psutil.Process()
    ours = {me.pid, *(child.pid for child in me.children(recursive=True))}
    seen = {pid for process_ids in found.values() for pid in process_ids}
    if seen and not seen & ours and not _sees_all_processes(proc):
        return None
    return tuple(
        f"gpu{index}: {_name(pid)} (pid {pid})"
        for index, process_ids in sorted(found.items())
        for pid in sorted(set(process_ids) - ours)
    )


def _sees_all_processes(proc: Path) -> bool:
    with suppress(OSError):
        return (proc / "self" / "ns" / "pid").stat().st_ino == FIRST_PID_NAMESPACE
    return False


def _name(pid: int) -> str:
    with suppress(psutil.Error):
        return psutil.Process(pid).name()
    return "a program"
