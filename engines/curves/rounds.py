"""Times of pieces of work, in turns, so that what slows the machine for a while slows all of them alike.

A round goes through all pieces. One in which other processes took too much of the CPU's time is disturbed: a piece's
time is the median of its quiet rounds, and of all rounds where too few were quiet, which is told.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from devices.cpu_seconds import host_cpu_seconds, usable_cpus
from results.cpu_time import CpuSeconds, foreign_share

MAX_FOREIGN_SHARE = 0.1
"""Of the CPU time that there was, as `protocol.max_foreign_cpu_share` of a plan."""
TICKS_S = 0.02
"""Two ticks of the accounting, as windows of trials are granted."""


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
    """A measured piece. n_rounds: whose median it is; is_quiet: whether nobody disturbed those."""

    piece: Piece
    seconds: float
    n_rounds: int
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
    n_disturbed: of n_rounds."""

    points: tuple[Point, ...]
    foreign_share: float | None
    n_rounds: int
    n_disturbed: int

    @property
    def is_quiet(self) -> bool:
        return self.n_disturbed * 2 < self.n_rounds


def _cpu_seconds() -> CpuSeconds:
    return host_cpu_seconds(usable_cpus())


def measured(
    works: Sequence[Work],
    n_rounds: int,
    on_round: Callable[[int], object] = lambda done: None,
    cpu_seconds: Callable[[], CpuSeconds] = _cpu_seconds,
    max_foreign_share: float = MAX_FOREIGN_SHARE,
) -> Measured:
    """One round to warm up, then n_rounds. on_round: told how many are done."""
    for work in works:
        work.seconds()
    rounds: list[tuple[list[Sequence[float]], bool]] = []
    first = last = cpu_seconds()
    for number in range(1, n_rounds + 1):
        before = last
        taken = [work.seconds() for work in works]
        last = cpu_seconds()
        rounds.append((taken, not _is_disturbed(before, last, max_foreign_share)))
        on_round(number)
    quiet = [taken for taken, is_quiet in rounds if is_quiet]
    is_quiet = len(quiet) * 2 > n_rounds
    kept = quiet if is_quiet else [taken for taken, _ in rounds]
    points = [
        Point(piece, statistics.median(taken[w][i] for taken in kept), len(kept), is_quiet)
        for w, work in enumerate(works)
        for i, piece in enumerate(work.pieces)
    ]
    return Measured(tuple(points), foreign_share(first, last), n_rounds, n_rounds - len(quiet))


def _is_disturbed(before: CpuSeconds, after: CpuSeconds, most: float) -> bool:
    share = foreign_share(before, after)
    if share is None:
        return False
    available_s = after.available_s - before.available_s
    return share * available_s - TICKS_S > most * available_s
