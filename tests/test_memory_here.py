"""Memory that control groups leave, of made-up files as both of their versions have them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from devices.memory import available_bytes, usable_memory

MIB = 2**20
NO_LIMIT_1 = 9223372036854771712
"""What version 1 shows where there is none, as read on a Linux 6.1."""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 MiB, half of them free."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * MIB, available=32 * MIB))


class Groups:
    """Below a folder, and the process's own ones."""

    def __init__(self, folder: Path) -> None:
        self.groups, self.own = folder / "fs", folder / "cgroup"
        self.lines: list[str] = []

    def version_2(self, path: str, limit: str, taken: int = 0, inactive: int = 0) -> None:
        self._write(self.groups / path, {"max": limit, "current": str(taken)}, f"inactive_file {inactive}")

    def version_1(self, path: str, limit: int, taken: int = 0, inactive: int = 0) -> None:
        names = {"limit_in_bytes": str(limit), "usage_in_bytes": str(taken)}
        stat = f"inactive_file 0\ntotal_inactive_file {inactive}"
        self._write(self.groups / "memory" / path, names, stat)

    def _write(self, folder: Path, files: dict[str, str], stat: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (files | {"stat": f"anon 1\n{stat}"}).items():
            (folder / f"memory.{name}").write_text(f"{text}\n")

    def member(self, *lines: str) -> None:
        self.own.write_text("".join(f"{line}\n" for line in lines))

    def usable(self) -> tuple[int, str | None]:
        found = usable_memory(self.groups, self.own)
        return found.n_bytes, None if found.limit is None else str(found.limit.relative_to(self.groups))

    def available(self) -> int:
        return available_bytes(self.groups, self.own)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def test_without_control_groups_it_is_the_machines(groups: Groups) -> None:
    assert (groups.usable(), groups.available()) == ((64 * MIB, None), 32 * MIB)
    groups.member("0::/user.slice")  # of a kernel without the controller
    assert (groups.usable(), groups.available()) == ((64 * MIB, None), 32 * MIB)


def test_it_is_what_the_narrowest_group_leaves(groups: Groups) -> None:
    """A job of 3 MiB has taken 2 MiB, of which half is cached files; the slice above it has no limit."""
    groups.member("0::/slice/job")
    groups.version_2("slice", "max", 5 * MIB)
    groups.version_2("slice/job", str(3 * MIB), 2 * MIB, MIB)
    assert (groups.usable(), groups.available()) == ((3 * MIB, "slice/job/memory.max"), 2 * MIB)
    groups.version_2("slice", str(2 * MIB), 2 * MIB, 0)
    assert (groups.usable(), groups.available()) == ((2 * MIB, "slice/memory.max"), 0)


def test_a_container_that_sees_its_group_as_the_root_is_limited_by_it(groups: Groups) -> None:
    """Its own line may name a path that only the host has."""
    groups.version_2("", str(8 * MIB), 3 * MIB, MIB)
    for line in ("0::/", "0::/docker/0123", "0::/../job"):
        groups.member(line)
        assert (groups.usable(), groups.available()) == ((8 * MIB, "memory.max"), 6 * MIB), line


def test_version_1_has_files_of_its_own_below_its_controller(groups: Groups) -> None:
    groups.member("9:name=systemd:/", "4:memory:/pods/job", "3:cpu,cpuacct:/", "0::/")
    groups.version_1("", NO_LIMIT_1, 40 * MIB)
    groups.version_1("pods", 16 * MIB, 9 * MIB, MIB)
    assert (groups.usable(), groups.available()) == ((16 * MIB, "memory/pods/memory.limit_in_bytes"), 8 * MIB)
    groups.version_1("pods/job", 4 * MIB, 5 * MIB, MIB // 2)  # beyond its limit, which was lowered
    assert (groups.usable(), groups.available()) == ((4 * MIB, "memory/pods/job/memory.limit_in_bytes"), 0)


def test_a_limit_above_the_machines_memory_is_none(groups: Groups) -> None:
    groups.member("0::/")
    groups.version_2("", str(65 * MIB))
    assert groups.usable() == (64 * MIB, None)


def test_it_says_what_limits_it(groups: Groups) -> None:
    assert usable_memory(groups.groups, groups.own).told("64 MiB") == "this machine has 64 MiB of memory"
    groups.member("0::/")
    groups.version_2("", str(8 * MIB))
    told = usable_memory(groups.groups, groups.own).told("8 MiB")
    assert told == f"{groups.groups}/memory.max leaves this process 8 MiB of memory"
