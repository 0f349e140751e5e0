"""Times of pieces of work, in turns, so that what slows the machine for a while slows all of them alike.

A round goes through all pieces. A run is disturbed in which threads of this process waited for a CPU that another
process had; where the system does not tell that, the whole round in which others took too much of the CPU's time. A
piece's time is the median of its quiet runs, and of all where too few were quiet, which is told.

The system says how long threads waited, not for whom, and threads of one process wait for each other too (a pool that
spins while another computes). Others had no more CPU time than what these threads left, so that the lesser counts.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from devices.cpu_seconds import host_cpu_seconds, usable_cpus
from results.cpu_time import CpuSeconds, foreign_share

MAX_FOREIGN_SHARE = 0.1
"""Of the CPU time that there was, as `protocol.max_foreign_cpu_share` of a plan."""
TICKS_S = 0.02
"""Two ticks of the accounting, as windows of trials are granted."""


MOST_POINTS = 0.9


class Piece(NamedTuple):
    """What a time is of. curve: the kind of work. shape: in words. amounts: as `devices.models.fit` takes them."""

    curve: str
    shape: str
    amounts: Mapping[str, float]


class Work(Protocol):
    """Work with the pieces that it gives a time for."""

    @property
    def pieces(self) -> Sequence[Piece]: ...

    def seconds(self) -> Sequence[float]:
        """Does it once, and returns the time of each piece."""
        ...


class Point(NamedTuple):
    """A measured piece. n_runs: whose median it is; is_quiet: whether nobody disturbed those."""

    piece: Piece
    seconds: float
    n_runs: int
    is_quiet: bool


@dataclass(frozen=True)
class Called:
    """Work that is a call: `Work` of one piece. now_s waits for a device that runs ahead. before: each time, untimed;
    what a call reads must not lie in a cache because the call before read it."""

    piece: Piece
    call: Callable[[], object]
    now_s: Callable[[], float] = time.perf_counter
    before: Callable[[], object] = lambda: None

    @property
    def pieces(self) -> Sequence[Piece]:
        return (self.piece,)

    def seconds(self) -> Sequence[float]:
        self.before()
        begin_s = self.now_s()
        self.call()
        return [self.now_s() - begin_s]


class Measured(NamedTuple):
    """points: of all pieces. foreign_share: of the CPU time in all rounds; None where the system does not tell.
    n_disturbed: runs of work, of n_runs in n_rounds."""

    points: tuple[Point, ...]
    foreign_share: float | None
    n_rounds: int
    n_runs: int
    n_disturbed: int

    @property
    def is_quiet(self) -> bool:
        """Of the points, at least nine of ten: a fit is no better than its points."""
        return sum(point.is_quiet for point in self.points) >= MOST_POINTS * len(self.points)


class Rounds(NamedTuple):
    """So far. n_disturbed: runs of work, of n_runs."""

    n_done: int
    n_disturbed: int
    n_runs: int


class ThreadTimes(NamedTuple):
    """Of all threads of this process so far: on a CPU, and ready to run while something else had it."""

    ran_s: float
    waited_s: float


class Readings(NamedTuple):
    """What tells that others used the machine. cpu_seconds: over a round. threads: None where the system does not tell.
    n_cpus: that this process may use."""

    cpu_seconds: Callable[[], CpuSeconds]
    threads: Callable[[], ThreadTimes | None]
    n_cpus: int
    now_s: Callable[[], float] = time.perf_counter


def thread_times(tasks: Path = Path("/proc/self/task")) -> ThreadTimes | None:
    """By the scheduler's accounting (Linux): on a CPU, waiting for one, both in nanoseconds, and slices."""
    ran_ns = waited_ns = 0
    try:
        for path in tasks.glob("*/schedstat"):
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
                ran, waited, _ = map(int, path.read_text().split())
                ran_ns, waited_ns = ran_ns + ran, waited_ns + waited
    except (OSError, ValueError):
        return None
    return ThreadTimes(ran_ns * 1e-9, waited_ns * 1e-9) if waited_ns else None


def this_machine() -> Readings:
    """Its CPUs that this process may use, as it is called."""
    n_cpus = len(usable_cpus() or range(os.cpu_count() or 1))
    return Readings(lambda: host_cpu_seconds(usable_cpus()), thread_times, n_cpus)


class _Run(NamedTuple):
    seconds: Sequence[float]
    is_quiet: bool | None
    """None where threads' waiting is not told."""


def measured(
    works: Sequence[Work],
    n_rounds: int,
    on_round: Callable[[Rounds], object] = lambda done: None,
    readings: Readings | None = None,
) -> Measured:
    """One round to warm up, then n_rounds. on_round: told what is done. readings: of this machine if not given."""
    readings = readings or this_machine()
    for work in works:
        work.seconds()
    runs_W: list[list[_Run]] = [[] for _ in works]
    first = last = readings.cpu_seconds()
    for number in range(1, n_rounds + 1):
        before = last
        found = [_run(work, readings) for work in works]
        last = readings.cpu_seconds()
        is_quiet = not _is_disturbed(before, last)
        for runs, one in zip(runs_W, found, strict=True):
            runs.append(one._replace(is_quiet=is_quiet) if one.is_quiet is None else one)
        on_round(Rounds(number, _disturbed(runs_W), number * len(works)))
    points = [point for work, runs in zip(works, runs_W, strict=True) for point in _points(work, runs)]
    return Measured(tuple(points), foreign_share(first, last), n_rounds, n_rounds * len(works), _disturbed(runs_W))


def _disturbed(runs_W: Sequence[Sequence[_Run]]) -> int:
    return sum(not run.is_quiet for runs in runs_W for run in runs)


def _run(work: Work, readings: Readings) -> _Run:
    before, begin_s = readings.threads(), readings.now_s()
    seconds = work.seconds()
    took_s, after = readings.now_s() - begin_s, readings.threads()
    if before is None or after is None:
        return _Run(seconds, None)
    left_s = readings.n_cpus * took_s - (after.ran_s - before.ran_s)
    lost_s = min(after.waited_s - before.waited_s, left_s)
    return _Run(seconds, lost_s <= MAX_FOREIGN_SHARE * took_s)


def _points(work: Work, runs: Sequence[_Run]) -> Iterator[Point]:
    """The median of the quiet runs; of all, where fewer than a third were."""
    quiet = [run for run in runs if run.is_quiet]
    is_quiet = len(quiet) >= max(1, len(runs) / 3)
    kept = quiet if is_quiet else runs
    for i, piece in enumerate(work.pieces):
        yield Point(piece, statistics.median(run.seconds[i] for run in kept), len(kept), is_quiet)


def _is_disturbed(before: CpuSeconds, after: CpuSeconds) -> bool:
    share = foreign_share(before, after)
    if share is None:
        return False
    available_s = after.available_s - before.available_s
    return share * available_s - TICKS_S > MAX_FOREIGN_SHARE * available_s
