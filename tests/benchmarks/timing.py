"""Seconds of a piece of work, whether other processes left it alone meanwhile, and the median of its quiet turns."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

MAX_FOREIGN_SHARE = 0.1
"""Of all cores' time, taken by other processes: beyond it a turn counts as disturbed."""
TICKS_S = 0.02
"""Two ticks of /proc/stat: its resolution must not condemn a turn of 100 ms."""


@dataclass(frozen=True)
class Timed:
    seconds: float
    is_quiet: bool


@dataclass(frozen=True)
class Instant:
    """Busy seconds of the machine, and of this process with its finished children, at a moment."""

    at_s: float
    busy_s: float
    own_s: float


def instant(at_s: float | None = None) -> Instant:
    """at_s: the moment as it was stamped, where that was not just now (`time.perf_counter`)."""
    moment_s = time.perf_counter() if at_s is None else at_s
    # user, nice, system, idle, iowait, irq, softirq, steal: of all but idle and iowait
    fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
    ticks = [int(field) for field in fields]
    return Instant(moment_s, (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]))


def between(a: Instant, b: Instant) -> Timed:
    seconds = b.at_s - a.at_s
    foreign_s = (b.busy_s - a.busy_s) - (b.own_s - a.own_s)
    return Timed(seconds, foreign_s - TICKS_S <= MAX_FOREIGN_SHARE * seconds * (os.cpu_count() or 1))


def timed(work: Callable[[], object]) -> Timed:
    before = instant()
    work()
    return between(before, instant())


@dataclass(frozen=True)
class Figure:
    """The median of some turns. turns: how many there were, for the reader."""

    median: float
    turns: str
    is_quiet: bool


@dataclass
class Turns:
    """What was measured in the turns that no neighbour disturbed; `disturbed` keeps the others."""

    quiet: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)

    def add(self, value: float, is_quiet: bool) -> None:
        (self.quiet if is_quiet else self.disturbed).append(value)

    def figure(self, n_turns: int) -> Figure:
        """Of the quiet turns; of all turns, and the reader is told, where there were fewer quiet ones than n_turns."""
        if len(self.quiet) >= n_turns:
            return Figure(statistics.median(self.quiet), _turns(len(self.quiet)), True)
        everything = self.quiet + self.disturbed
        told = f"DISTURBED: {len(self.disturbed)} of {_turns(len(everything))}"
        return Figure(statistics.median(everything), told, False)


def _turns(n: int) -> str:
    return "1 turn" if n == 1 else f"{n} turns"
