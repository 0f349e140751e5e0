"""CPU time: how much of it a machine had, how much was busy, and how much of that was ours.

A container or `taskset` leaves a process some of a machine's CPUs. What happens on the others disturbs its times
little, so only the CPUs that this process may use are counted. But a meter of the whole package has the joules of all:
beside one, those of the machine are counted too. A quota of CPU time (cgroup's cpu.max) takes none of them away: there
the time that others use still is time that we do not get.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from results.cpu_time import CpuSeconds

PROC_STAT = Path("/proc/stat")
TICKS_PER_S = 100
"""USER_HZ: the same on every Linux."""
MOST_LOOKS = 5
"""At children, until none was waited for meanwhile."""


def usable_cpus() -> frozenset[int] | None:
    """The CPUs that this thread may run on; None where the system does not tell (macOS: all of them)."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def host_cpu_seconds(cpus: Collection[int] | None = None, with_machine: bool = False) -> CpuSeconds:
    """CPU time of these CPUs (None: of all) since boot, and of this process with its children, running or finished.
    with_machine: also of all CPUs, where these are not all.

    Time that the hypervisor gave to other machines (steal) counts as busy for others: it was taken from us.
    """
    stat = PROC_STAT.read_text() if PROC_STAT.is_file() else None
    busy_s, available_s = _of_all_cpus() if stat is None else parse_cpu_seconds(stat, cpus)
    machine: dict[str, float] = {}
    if with_machine and stat is not None and cpus is not None and n_cpus(stat) > len(cpus):
        machine = dict(zip(("machine_busy_s", "machine_available_s"), parse_cpu_seconds(stat), strict=True))
    return CpuSeconds(
        busy_s=busy_s,
        ours_s=time.process_time() + _all_children_s() + _working.seconds(descendants=False),
        available_s=available_s,
        **machine,
    )


@dataclass(eq=False)
class _Counted:
    """A process that computes for us. is_own: we descend to it anyway. parent: which of the others started it."""

    process: psutil.Process
    is_own: bool
    parent: _Counted | None
    used_s: float = 0.0
    waited_s: float = 0.0
    """Of its children that it has waited for."""
    lost_s: float = 0.0
    """Of those of the others below it that have ended, and that nobody of them waited for: as they were last read."""
    is_gone: bool = False

    def read(self) -> None:
        with suppress(psutil.AccessDenied):
            try:
                times = self.process.cpu_times()
            except psutil.NoSuchProcess:
                self.is_gone = True
                return
            self.used_s, self.waited_s = float(times.user + times.system), _children_s(times)

    @property
    def seconds(self) -> float:
        return self.used_s + self.waited_s + self.lost_s


class _Working:
    """Processes that compute for us, each with the CPU time that was last read of it."""

    def __init__(self, process_ids: Collection[int] = ()) -> None:
        self._lock = threading.Lock()
        own = {child.pid for child in psutil.Process().children(recursive=True)} if process_ids else set()
        found: dict[int, _Counted] = {}
        parents: dict[int, int] = {}
        for pid in process_ids:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process = psutil.Process(pid)
                found[pid], parents[pid] = _Counted(process, pid in own, None), process.ppid()
        for pid, one in found.items():
            one.parent = found.get(parents[pid])
        self._found = sorted(found.values(), key=_n_above)
        self._parents = [one for one in self._found if any(other.parent is one for other in self._found)]

    def seconds(self, descendants: bool) -> float:
        """Of all of them, or without those that we started."""
        with self._lock:
            self._look()
            return sum(one.seconds for one in self._found if descendants or not one.is_own)

    def _look(self) -> None:
        """One that has ended used what it had used when it was last looked at, and a little more: it is told by whoever
        waited for it, and counts no more by itself then."""
        gone_before = [one for one in self._found if one.is_gone]
        before_s = {one: one.waited_s for one in self._parents}
        for _ in range(MOST_LOOKS):
            for one in self._found:
                one.read()
            told_s = [one.waited_s for one in self._parents]
            for one in self._parents:
                one.read()
            if told_s == [one.waited_s for one in self._parents]:
                break
        ended_s: defaultdict[_Counted, float] = defaultdict(float)
        for one in reversed(self._found):
            waited_s = one.waited_s - before_s.get(one, one.waited_s)
            missing_s = max(0.0, ended_s[one] - waited_s)
            if one.is_gone and one not in gone_before and one.parent is not None and one.parent not in gone_before:
                # Its last children it may have waited for, unseen. What it had lost before nobody will tell.
                ended_s[one.parent] += one.used_s + one.waited_s + missing_s
                one.parent.lost_s += one.lost_s
                one.used_s = one.waited_s = one.lost_s = 0.0
            else:
                one.lost_s += missing_s


def _n_above(one: _Counted) -> int:
    return 0 if one.parent is None else 1 + _n_above(one.parent)


_working = _Working()


@contextmanager
def counted_as_ours(process_ids: Collection[int]) -> Iterator[None]:
    """Meanwhile the CPU time of these processes is ours: a server that answers us, ranks that compute with us."""
    global _working
    before, _working = _working, _Working(process_ids)
    try:
        yield
    finally:
        _working = before


class _Programs:
    """Programs that we start one after another, and what they used. Its sum never falls: a program that has ended used
    what its parent's clock says once it was waited for, or what was last read of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, float] = {}
        """By process id: the most that was read of it and of what it started."""
        self._ended_s = 0.0

    def seconds(self) -> float:
        with self._lock:
            for pid, before_s in self._running.items():
                self._running[pid] = max(before_s, _tree_s(pid))
            return self._ended_s + sum(self._running.values())

    def begin(self, pid: int) -> None:
        with self._lock:
            self._running[pid] = 0.0

    def end(self, pid: int, waited_s: float) -> None:
        with self._lock:
            self._ended_s += max(self._running.pop(pid, 0.0), waited_s)


_programs = _Programs()


@contextmanager
def program_of_ours(pid: int) -> Iterator[None]:
    """A program that we have just started, and that is waited for before this ends: its CPU time is ours."""
    before_s = _waited_s()
    _programs.begin(pid)
    try:
        yield
    finally:
        _programs.end(pid, _waited_s() - before_s)


def _waited_s() -> float:
    """CPU time of all children that were waited for, to microseconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def own_cpu_seconds() -> float:
    """Of this process, of those that are `counted_as_ours` and of each `program_of_ours`; read in microseconds each."""
    return time.process_time() + _working.seconds(descendants=True) + _programs.seconds()


def parse_cpu_seconds(stat: str, cpus: Collection[int] | None = None) -> tuple[float, float]:
    """/proc/stat: (busy, available) seconds of these CPUs; None: of all, which is its first line.

    A line is user, nice, system, idle, iowait, irq, softirq, steal; guest times stand behind, and are in user and nice.
    """
    names = ["cpu"] if cpus is None else [f"cpu{cpu}" for cpu in cpus]
    ticks = [[int(t) for t in line.split()[1:9]] for line in stat.splitlines() if line.partition(" ")[0] in names]
    available = sum(map(sum, ticks))
    return (available - sum(t[3] + t[4] for t in ticks)) / TICKS_PER_S, available / TICKS_PER_S


def n_cpus(stat: str) -> int:
    """Lines of single CPUs in /proc/stat."""
    return sum(line.startswith("cpu") and not line.startswith("cpu ") for line in stat.splitlines())


def _of_all_cpus() -> tuple[float, float]:
    times = psutil.cpu_times()
    available_s = sum(times)
    return available_s - times.idle, available_s


def _children_s(times: Any) -> float:
    """Of a process' CPU times that of its children that have ended and were waited for."""
    return float(getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0))


def _has_children() -> bool:
    """Whether there is a child to look for: looking takes milliseconds, this microseconds."""
    if not hasattr(os, "waitid"):  # macOS
        return True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _all_children_s() -> float:
    """Of children that run and of those that were waited for. What another thread waits for between the two looks is in
    neither: then it is looked again."""
    for _ in range(MOST_LOOKS):
        waited_s = _waited_s()
        children_s = waited_s + (_running_children_s(psutil.Process()) if _has_children() else 0.0)
        if _waited_s() == waited_s:
            break
    return children_s


def _tree_s(pid: int) -> float:
    """CPU time of a process that runs, and of what it started: by /proc's own list of children, as a search through
    all processes would cost more than is measured. Where there is no such list: of the process, and of its children
    once they have ended."""
    total_s = 0.0
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError, ValueError):
        process = psutil.Process(pid)
        times = process.cpu_times()
        total_s = float(times.user + times.system) + _children_s(times)
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            total_s += sum(_tree_s(int(child)) for child in listed.read_text().split())
    return total_s


def _running_children_s(process: psutil.Process) -> float:
    """CPU time of its descendants that run, and of those that these have waited for."""
    total_s = 0.0
    for child in process.children(recursive=True):
        # One that ends just now is nobody's, until its parent has waited for it.
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            times = child.cpu_times()
            total_s += float(times.user + times.system) + _children_s(times)
    return total_s
