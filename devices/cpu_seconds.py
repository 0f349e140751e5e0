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
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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


class _Working:
    """Processes that compute for us, each with the CPU time that was last read of it and whether we descend to it."""

    def __init__(self, process_ids: Collection[int] = ()) -> None:
        own = {child.pid for child in psutil.Process().children(recursive=True)} if process_ids else set()
        self._found: list[tuple[psutil.Process, bool]] = []
        self._last_s: dict[int, float] = {}
        for pid in process_ids:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                self._found.append((psutil.Process(pid), pid in own))

    def seconds(self, descendants: bool) -> float:
        """Of all of them, or without those that we started."""
        total_s = 0.0
        for process, is_own in self._found:
            if is_own and not descendants:
                continue
            # One that has ended used what it had used when it was last looked at, and a little more.
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                times = process.cpu_times()
                self._last_s[process.pid] = float(times.user + times.system) + _children_s(process)
            total_s += self._last_s.get(process.pid, 0.0)
        return total_s


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


def _children_s(process: psutil.Process) -> float:
    """CPU time of its children that have ended and were waited for."""
    times = process.cpu_times()
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
        total_s = float(times.user + times.system) + _children_s(process)
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
            total_s += float(times.user + times.system) + _children_s(child)
    return total_s
