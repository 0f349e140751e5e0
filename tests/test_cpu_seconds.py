"""CPU time of the CPUs that we may use: ours, and that of others."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest

from devices import cpu_seconds
from devices.cpu_seconds import counted_as_ours, host_cpu_seconds, own_cpu_seconds, parse_cpu_seconds, usable_cpus
from results.cpu_time import CpuSeconds, foreign_share
from results.trial_tables import trials
from tests.eventually import eventually
from tests.fakes.strangers import busy_stranger
from tests.run_builders import cell, run, trial

CPUS = os.sched_getaffinity(0)
STAT = """cpu  60 20 30 1200 40 5 5 10 10 0
cpu0 10 20 30 400 40 5 5 0 10 0
cpu1 0 0 0 500 0 0 0 0 0 0
cpu10 50 0 0 300 0 0 0 10 0 0
intr 12345 0 0
ctxt 678
"""
"""user, nice, system, idle, iowait, irq, softirq, steal, guest (in user already), guest_nice; ticks of 10 ms."""


@pytest.mark.parametrize(
    ("cpus", "busy_ticks", "available_ticks"),
    [
        (None, 130, 1370),
        ({0}, 70, 510),
        # The neighbour on CPU 10 is nobody's on CPU 1; a name that begins alike is another CPU.
        ({1}, 0, 500),
        ({0, 10}, 130, 870),
        # Switched off: it has no line.
        ({1, 7}, 0, 500),
    ],
)
def test_only_the_cpus_that_we_may_use_are_counted(
    cpus: set[int] | None, busy_ticks: int, available_ticks: int
) -> None:
    assert parse_cpu_seconds(STAT, cpus) == pytest.approx((busy_ticks / 100, available_ticks / 100))


def test_all_cpus_are_counted_too_where_a_meter_sees_them_and_we_may_not_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    stat.write_text(STAT)
    monkeypatch.setattr(cpu_seconds, "PROC_STAT", stat)
    bound = host_cpu_seconds({1}, with_machine=True)
    assert (bound.busy_s, bound.available_s) == (0.0, 5.0)
    assert (bound.machine_busy_s, bound.machine_available_s) == (1.3, 13.7)
    for whole in (host_cpu_seconds({0, 1, 10}, with_machine=True), host_cpu_seconds({1})):
        assert (whole.machine_busy_s, whole.machine_available_s) == (None, None)


def test_the_share_of_others_is_the_larger_of_our_cpus_and_of_the_machine() -> None:
    """One second on two of eight CPUs: we took one, and others 0.2 of ours; elsewhere they took 4 of 6."""
    before = CpuSeconds(busy_s=10.0, ours_s=5.0, available_s=100.0, machine_busy_s=50.0, machine_available_s=400.0)
    ours_alone = before.model_copy(update={"busy_s": 11.2, "ours_s": 6.0, "available_s": 102.0})
    beside = ours_alone.model_copy(update={"machine_busy_s": 55.2, "machine_available_s": 408.0})
    quiet = ours_alone.model_copy(update={"machine_busy_s": 51.2, "machine_available_s": 408.0})
    assert foreign_share(before, beside) == pytest.approx(4.2 / 8)
    assert foreign_share(before, quiet) == pytest.approx(0.2 / 2)
    without = before.model_copy(update={"machine_busy_s": None, "machine_available_s": None})
    assert foreign_share(without, beside) == pytest.approx(0.2 / 2)


def test_a_process_that_is_bound_to_one_cpu_counts_the_time_of_one() -> None:
    """As in a container that has it alone."""
    [one, *_] = sorted(CPUS)
    os.sched_setaffinity(0, {one})
    try:
        bound = usable_cpus()
        before, begun_s = host_cpu_seconds(bound), time.monotonic()
        time.sleep(1.0)
        after, elapsed_s = host_cpu_seconds(bound), time.monotonic() - begun_s
    finally:
        os.sched_setaffinity(0, CPUS)
    assert bound == {one}
    assert after.available_s - before.available_s == pytest.approx(elapsed_s, rel=0.3)


def foreign_s(before: CpuSeconds, after: CpuSeconds) -> float:
    return (after.busy_s - before.busy_s) - (after.ours_s - before.ours_s)


def test_work_of_another_process_is_foreign() -> None:
    with busy_stranger(5.0):
        time.sleep(0.3)
        before, begun_s = host_cpu_seconds(CPUS), time.monotonic()
        time.sleep(1.0)
        after, elapsed_s = host_cpu_seconds(CPUS), time.monotonic() - begun_s
    available_s = after.available_s - before.available_s
    # It gets a whole core, or its share of one where the machine is busy otherwise, and then others are foreign too.
    assert 0.4 <= foreign_s(before, after) <= available_s * 1.02
    assert available_s == pytest.approx(len(CPUS) * elapsed_s, rel=0.3)


def test_work_of_a_running_child_is_ours() -> None:
    burn = "import time\nend = time.monotonic() + 40\nwhile time.monotonic() < end: pass"
    # Its child burns, as the server of another engine would.
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    child = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    try:
        time.sleep(0.5)
        before, give_up_s = host_cpu_seconds(CPUS), time.monotonic() + 30
        # Others may need the cores too: it takes as long as it takes to get its CPU time.
        while (after := host_cpu_seconds(CPUS)).ours_s - before.ours_s < 0.4 and time.monotonic() < give_up_s:
            time.sleep(0.2)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert after.ours_s - before.ours_s >= 0.4
    # Ours is a part of all that was busy; counts in ticks of 10 ms, 4 of them at most.
    assert foreign_s(before, after) >= -0.04


def test_own_work_and_that_of_finished_children_is_ours() -> None:
    before = host_cpu_seconds(CPUS)
    until_s = time.process_time() + 0.3
    while time.process_time() < until_s:
        pass
    mine = host_cpu_seconds(CPUS)
    burn = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    with_child = host_cpu_seconds(CPUS)
    assert mine.ours_s - before.ours_s == pytest.approx(0.3, abs=0.1)
    assert with_child.ours_s - mine.ours_s >= 0.2
    assert with_child.busy_s - before.busy_s >= 0.3


BURN = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_a_child_that_another_thread_waits_for_while_we_look_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was in neither: no longer among those that run, not yet among those that were waited for."""
    before = host_cpu_seconds(CPUS)
    child = subprocess.Popen([sys.executable, "-c", BURN])
    look = cpu_seconds._running_children_s

    def waiting_first(process: psutil.Process) -> float:
        child.wait()
        return look(process)

    monkeypatch.setattr(cpu_seconds, "_running_children_s", waiting_first)
    assert host_cpu_seconds(CPUS).ours_s - before.ours_s >= 0.3


class Server:
    """Processes of a server, in place of psutil's: by id (parent, used, of children that it has waited for)."""

    times: ClassVar[dict[int, tuple[int, float, float]]] = {}

    def __init__(self, pid: int = 1) -> None:
        self.pid = pid

    def ppid(self) -> int:
        return self.times[self.pid][0]

    def children(self, recursive: bool) -> list[psutil.Process]:
        return []

    def cpu_times(self) -> SimpleNamespace:
        if self.pid not in self.times:
            raise psutil.NoSuchProcess(self.pid)
        _, used_s, waited_s = self.times[self.pid]
        return SimpleNamespace(user=used_s, system=0.0, children_user=waited_s, children_system=0.0)


@pytest.mark.parametrize(
    ("later", "all_s"),
    [
        # The worker of 20 s computes 1 s more, and its server waits for it: 5 + 21, and 3 of the worker's worker.
        ({10: (1, 5.0, 24.0)}, 29.0),
        # Nobody waits for it (the server ignores SIGCHLD): what was last read of both.
        ({10: (1, 5.0, 0.0)}, 28.0),
        # The worker's worker ends alone; its worker waits for it.
        ({10: (1, 5.0, 0.0), 11: (10, 20.0, 3.5)}, 28.5),
        # Its worker ends first, and init waits for it then.
        ({10: (1, 5.0, 20.0), 12: (1, 4.0, 0.0)}, 29.0),
        ({10: (1, 5.0, 20.0)}, 28.0),
        ({}, 28.0),
    ],
)
def test_a_worker_that_its_server_has_waited_for_counts_once(
    monkeypatch: pytest.MonkeyPatch, later: dict[int, tuple[int, float, float]], all_s: float
) -> None:
    monkeypatch.setattr(psutil, "Process", Server)
    monkeypatch.setattr(Server, "times", {10: (1, 5.0, 0.0), 11: (10, 20.0, 0.0), 12: (11, 3.0, 0.0)})
    with counted_as_ours([12, 10, 11]):
        before_s = own_cpu_seconds() - time.process_time()
        Server.times = later
        for _ in range(2):
            assert own_cpu_seconds() - time.process_time() - before_s == pytest.approx(all_s - 28, abs=0.01)


@pytest.mark.parametrize("waited_s", [20.0, 24.0, 27.0])
def test_what_nobody_has_waited_for_is_no_part_of_what_its_worker_used_later(
    monkeypatch: pytest.MonkeyPatch, waited_s: float
) -> None:
    """The worker ignores that its own worker ends, with 3 s. Then it ends too, after 4 s more, or its server waits for
    another process of 3 s as well: both were taken for those 3 s."""
    monkeypatch.setattr(psutil, "Process", Server)
    monkeypatch.setattr(Server, "times", {10: (1, 5.0, 0.0), 11: (10, 20.0, 0.0), 12: (11, 3.0, 0.0)})
    with counted_as_ours([10, 11, 12]):
        before_s = own_cpu_seconds() - time.process_time()
        for later, more_s in (
            ({10: (1, 5.0, 0.0), 11: (10, 20.0, 0.0)}, 0.0),
            ({10: (1, 5.0, waited_s)}, waited_s - 20.0),
            ({}, waited_s - 20.0),
        ):
            Server.times = later
            assert own_cpu_seconds() - time.process_time() - before_s == pytest.approx(more_s, abs=0.01)


def test_what_a_process_takes_with_it_makes_others_no_busier_than_all_were() -> None:
    """Its parent ends and does not wait for it: whoever adopts it has its CPU time, and ours falls."""
    burn = [sys.executable, "-c", BURN.replace("0.3", "1.0") + "time.sleep(60)"]
    start = f"import subprocess\nprint(subprocess.Popen({burn}, stdout=subprocess.DEVNULL).pid, flush=True)\ninput()"
    parent = subprocess.Popen(
        [sys.executable, "-c", start],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    orphan = psutil.Process(int(parent.stdout.readline()))
    try:
        assert eventually(lambda: orphan.cpu_times().user + orphan.cpu_times().system >= 0.9)
        before = host_cpu_seconds(CPUS)
        parent.communicate("go on\n", timeout=30)
        time.sleep(0.1)  # several ticks
        after = host_cpu_seconds(CPUS)
    finally:
        orphan.kill()
    assert after.ours_s < before.ours_s - 0.4
    share = foreign_share(before, after)
    assert share is not None
    assert share <= (after.busy_s - before.busy_s) / (after.available_s - before.available_s)


def test_cpu_use_of_a_trial_is_our_cpu_time_over_its_window() -> None:
    """3.94 s of two threads in 2 s are 197 %, as tables of phones tell it; what others took is not in it."""
    before = CpuSeconds(busy_s=10.0, ours_s=5.0, available_s=100.0)
    after = CpuSeconds(busy_s=20.0, ours_s=8.94, available_s=108.0)
    window = {"window_start_s": 1.0, "window_end_s": 3.0}
    counted = trial(repeat=0, cpu_before=before, cpu_after=after, **window)
    uncounted = trial(repeat=1, cpu_before=before, **window)
    failed = trial(repeat=2, cpu_before=before, cpu_after=after, window_start_s=None, window_end_s=None)
    at_rest = trial(repeat=3, cpu_before=before, cpu_after=before, **window)
    told = trials(run([cell()], [counted, uncounted, failed, at_rest]))["cpu_use"].tolist()
    assert told == pytest.approx([1.97, math.nan, math.nan, 0.0], nan_ok=True)


@pytest.mark.parametrize(("lost_s", "told"), [(1e-9, 0.0), (0.005, 0.0), (0.02, math.nan), (5.0, math.nan)])
def test_cpu_time_that_a_process_took_with_it_is_not_a_rest(lost_s: float, told: float) -> None:
    """A busy engine that had gone by the second reading was at rest by the table."""
    before = CpuSeconds(busy_s=10.0, ours_s=6.0, available_s=100.0)
    after = CpuSeconds(busy_s=14.0, ours_s=6.0 - lost_s, available_s=108.0)
    one = trial(cpu_before=before, cpu_after=after, window_start_s=1.0, window_end_s=3.0)
    assert trials(run([cell()], [one]))["cpu_use"].tolist() == pytest.approx([told], nan_ok=True)
