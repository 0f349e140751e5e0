"""The most memory that this process had resident in a window (Linux).

The kernel keeps the highest resident size (VmHWM in /proc/self/status); writing 5 to /proc/self/clear_refs sets it back
to what is resident now (Linux 4.0). It is of the whole process: every model that a run holds open, the pages of
mapped weights that were touched, and what earlier requests freed (`engines/freed_memory.py`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from devices.sysfs import read_word

_PROCESS = Path("/proc/self")
RESET_PEAK = "5"


class PeakMemory(NamedTuple):
    """None has a remark that says why."""

    n_bytes: int | None
    remark: str | None = None


def reset_peak_memory(process: Path = _PROCESS) -> PeakMemory | None:
    """None where the peak starts anew; else why it cannot."""
    try:
        (process / "clear_refs").write_text(RESET_PEAK, encoding="ascii")
    except OSError as error:
        if not process.is_dir():
            return PeakMemory(None, f"peak memory: told by Linux only, this is {sys.platform}")
        return PeakMemory(None, f"peak memory: the kernel does not let us reset its mark ({error.strerror})")
    return None


def peak_memory(process: Path = _PROCESS) -> PeakMemory:
    """Since `reset_peak_memory`."""
    lines = (read_word(process / "status") or "").splitlines()
    found = next((line.split() for line in lines if line.startswith("VmHWM:")), [])
    if len(found) != 3 or not found[1].isdecimal() or found[2] != "kB":
        return PeakMemory(None, "peak memory: the kernel does not tell it (no VmHWM)")
    return PeakMemory(1024 * int(found[1]))
