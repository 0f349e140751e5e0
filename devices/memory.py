"""Memory that this process may use: the machine's, or less where a control group, as a container has one, limits it.

Linux kills whatever goes beyond such a limit, whatever the machine has left. Version 2 of control groups and version 1,
the process's own group and all above it; a container often sees its own one as the root.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


class MemoryHere(NamedTuple):
    """limit: the file that says so; None: all that the machine has."""

    n_bytes: int
    limit: Path | None = None

    def told(self, size: str) -> str:
        """size: of it, in words."""
        if self.limit is None:
            return f"this machine has {size} of memory"
        return f"{self.limit} leaves this process {size} of memory"


class _Names(NamedTuple):
    """Files of a group; inactive: in `memory.stat`, cached files that give way."""

    limit: str
    taken: str
    inactive: str


_VERSION_2 = _Names("memory.max", "memory.current", "inactive_file")
_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def usable_memory(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> MemoryHere:
    """The most that this process may use."""
    found = [MemoryHere(int(psutil.virtual_memory().total))]
    found += [MemoryHere(n_bytes, group / names.limit) for group, names, n_bytes in _limits(groups, own)]
    return min(found, key=lambda one: one.n_bytes)


def available_bytes(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Memory that can still be taken before something is killed for it: cached files give way."""
    found = [int(psutil.virtual_memory().available)]
    for group, names, limit in _limits(groups, own):
        with suppress(OSError):
            kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            taken = int((group / names.taken).read_text()) - int(kinds[names.inactive])
            found.append(max(limit - taken, 0))
    return min(found)


def _limits(groups: Path, own: Path) -> Iterator[tuple[Path, _Names, int]]:
    """Groups that have a limit of memory."""
    lines = own.read_text().splitlines() if own.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers not in ("", "memory"):
            continue
        names = _VERSION_1 if controllers else _VERSION_2
        root = groups / controllers
        inside = Path(path.lstrip("/"))
        for part in (inside, *inside.parents):
            group = root / part
            with suppress(OSError):  # a group without a memory controller
                limit = (group / names.limit).read_text().strip()
                if limit != "max":
                    yield group, names, int(limit)
