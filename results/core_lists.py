"""Sets of CPU cores in the words of a plan and of the kernel: "0-3,6"."""

from __future__ import annotations

import re
from collections.abc import Collection

HIGHEST_CORE = 8191
"""The most that a Linux kernel of 2026 numbers, less one."""
_PIECE = re.compile(r"(\d{1,5})(?:\s*-\s*(\d{1,5}))?", re.ASCII)


def parse_cores(text: str) -> frozenset[int]:
    """The cores of "0-3", "0,2" or "0-1,6". Raises `ValueError` where it names none, or one twice."""
    if not text.strip():
        raise ValueError('names no core; write "0-3" or "0,2"')
    found: set[int] = set()
    for piece in text.split(","):
        match = _PIECE.fullmatch(piece.strip())
        if match is None:
            raise ValueError('is no list of cores; write "0-3" or "0,2"')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f'runs backwards at "{first}-{last}"; write "{last}-{first}"')
        if last > HIGHEST_CORE:
            raise ValueError(f"names core {last}, and cores end at {HIGHEST_CORE}")
        cores = set(range(first, last + 1))
        if twice := found & cores:
            raise ValueError(f"names core {min(twice)} twice; name each once")
        found |= cores
    return frozenset(found)


def core_words(cores: Collection[int]) -> str:
    """ "0-3,6": what `parse_cores` reads, and /proc prints."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
