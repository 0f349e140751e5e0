"""Rounds of measured work, by a clock and readings of our own: which runs count, and what is said of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engines.curves.rounds import Called, Piece, Readings, Rounds, ThreadTimes, measured, thread_times
from results.cpu_time import CpuSeconds


@dataclass
class Machine:
    """Two CPUs, of which our threads keep one busy. Each run of work takes what stands next, of which another process
    had a CPU for a share, and for so long the threads waited; and so long for each other."""

    runs: Iterator[tuple[float, float]]
    at_s: float = 0.0
    ran: float = 0.0
    waited: float = 0.0
    foreign: float = 0.0
    for_each_other: float = 0.0
    tells_waiting: bool = True
    done: list[float] = field(default_factory=list)

    def run(self) -> None:
        took_s, share = next(self.runs)
        self.at_s += took_s
        self.ran += (2.0 if self.for_each_other else 1.0) * took_s
        self.foreign += share * took_s
        self.waited += (share + self.for_each_other) * took_s
        self.done.append(took_s)

    def cpu_seconds(self) -> CpuSeconds:
        return CpuSeconds(busy_s=self.at_s + self.foreign, ours_s=self.at_s, available_s=2 * self.at_s)

    @property
    def readings(self) -> Readings:
        return Readings(self.cpu_seconds, self.threads, 2, lambda: self.at_s)

    def threads(self) -> ThreadTimes | None:
        return ThreadTimes(self.ran, self.waited) if self.tells_waiting else None

    def work(self) -> Called:
        return Called(Piece("curve", "shape", {}), self.run, lambda: self.at_s)


def machine(*runs: tuple[float, float], tells_waiting: bool = True) -> Machine:
    return Machine(iter(runs), tells_waiting=tells_waiting)


def test_the_median_of_quiet_runs_counts() -> None:
    """The first run warms up. Of five others, one was disturbed; the quiet ones took 1, 2, 3 and 4 s."""
    one = machine((50.0, 0.0), (1.0, 0.0), (9.0, 0.5), (2.0, 0.05), (3.0, 0.0), (4.0, 0.0))
    found = measured([one.work()], 5, readings=one.readings)
    assert found.points[0].seconds == 2.5
    assert (found.points[0].n_runs, found.points[0].is_quiet) == (4, True)
    assert (found.n_runs, found.n_disturbed, found.is_quiet) == (5, 1, True)


def test_a_machine_that_others_use_is_said_to_be_busy() -> None:
    """Fewer than a third of the runs were quiet: the median of all, and the point says so."""
    one = machine((1.0, 0.0), (1.0, 0.0), (5.0, 0.5), (6.0, 0.5), (7.0, 0.5))
    found = measured([one.work()], 4, readings=one.readings)
    assert found.points[0].seconds == 5.5
    assert (found.points[0].is_quiet, found.is_quiet, found.n_disturbed) == (False, False, 3)
    assert found.foreign_share == pytest.approx(0.5 * (5 + 6 + 7) / (2 * (1 + 5 + 6 + 7)))


def test_threads_that_wait_for_each_other_do_not_make_a_busy_machine() -> None:
    """They keep both CPUs busy all the time, so that no other process can have had one."""
    one = machine((1.0, 0.0), (1.0, 0.0), (2.0, 0.0), (3.0, 0.0))
    one.for_each_other = 0.4
    found = measured([one.work()], 3, readings=one.readings)
    assert (found.n_disturbed, found.is_quiet, found.points[0].seconds) == (0, True, 2.0)


def test_without_the_schedulers_word_a_round_is_disturbed_by_its_share_of_cpu_time() -> None:
    """A fifth of two CPUs is the limit of 0.1: 1 s of 2.0 available is beyond it, 0.1 s is not."""
    one = machine((1.0, 0.0), (1.0, 0.1), (1.0, 1.0), (1.0, 0.0), tells_waiting=False)
    found = measured([one.work()], 3, readings=one.readings)
    assert found.n_disturbed == 1


def test_each_round_goes_through_all_work() -> None:
    one = machine(*[(1.0, 0.0)] * 8)
    heard: list[Rounds] = []
    works: Sequence[Called] = [one.work(), one.work()]
    found = measured(works, 3, heard.append, one.readings)
    assert heard == [(1, 0, 2), (2, 0, 4), (3, 0, 6)]
    assert len(one.done) == 8
    assert len(found.points) == 2


def test_each_round_tells_how_many_runs_were_disturbed_so_far() -> None:
    """A fit on a busy machine went on for minutes, and was refused at its end. The first run warms up."""
    one = machine((1.0, 0.0), (1.0, 0.5), (1.0, 0.0), (1.0, 0.5))
    heard: list[Rounds] = []
    measured([one.work()], 3, heard.append, one.readings)
    assert heard == [(1, 1, 1), (2, 1, 2), (3, 2, 3)]


def test_times_are_read_of_all_threads(tmp_path: Path) -> None:
    """Nanoseconds on a CPU, waiting, and slices."""
    for number, text in enumerate(("3000000000 1500000000 3\n", "1000000000 500000000 3\n")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "schedstat").write_text(text)
    assert thread_times(tmp_path) == pytest.approx((4.0, 2.0))


@pytest.mark.parametrize("text", ["", "1 x 2", "7"])
def test_what_is_no_accounting_tells_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "schedstat").write_text(text)
    assert thread_times(tmp_path) is None
    assert thread_times(tmp_path / "absent") is None
