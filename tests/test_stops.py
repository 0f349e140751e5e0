"""Ctrl-Z and `fg` in a trial: the pause is in its figures, and so it is in no mean."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from harness.interrupts import count_stops
from harness.opening import open_run
from harness.plan import build_plan
from harness.progress import PlainProgress
from harness.runner import Runner
from results.cells import STOPPED, answering
from results.environments import Conditions
from results.store import Store
from results.tables import tidy
from tests.command import environment
from tests.eventually import PATIENCE_S, eventually
from tests.fakes.machine import FakeBench, FakeDevice
from tests.plans import FAST, raw_plan


class StoppedDevice(FakeDevice):
    """At the end of the first window this process gets what a shell sends to go on with it."""

    n_looked = 0

    def conditions(self) -> Conditions:
        self.n_looked += 1
        if self.n_looked == 2:
            signal.raise_signal(signal.SIGCONT)
        return super().conditions()


@pytest.fixture
def stops_are_counted() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    count_stops()
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.usefixtures("stops_are_counted")
def test_a_trial_in_which_it_was_stopped_is_marked_and_in_no_mean(tmp_path: Path) -> None:
    bench = FakeBench()
    bench.fake_device = StoppedDevice(bench.machine, bench.fake_device.meters)
    plan = build_plan(raw_plan(protocol=FAST | {"repeats": 3}))
    with open_run(plan, tmp_path / "run", False, bench) as store:
        Runner(plan, store, bench, PlainProgress(Console(file=io.StringIO()))).run()
    with Store.view(tmp_path / "run") as store:
        data = store.data()
    assert [trial.marks for trial in data.trials] == [(STOPPED,), (), ()]
    e2e = tidy(data).query("metric == 'e2e'").to_dict("records")[0]
    assert (e2e["n"], e2e["reason"]) == (2, "1 of 3 trials left out (stopped)")
    assert answering(data.trials) == list(data.trials), "its answers are no others for it"


OF_A_WORKER = """if True:
    import subprocess, sys
    from harness.interrupts import count_stops
    count_stops()
    subprocess.run([sys.executable, *sys.argv[1:]], check=True)
"""


@pytest.mark.parametrize("is_worker", [False, True])
def test_a_real_stop_is_counted(is_worker: bool) -> None:
    """Of a worker too, which the command starts: what it imports has threads before it counts."""
    code = """if True:
        import os, sys, threading
        if sys.argv[1:]:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        from harness.interrupts import count_stops, n_stops
        count_stops()
        print(os.getpid(), flush=True)
        sys.stdin.readline()
        print(n_stops(), flush=True)
    """
    given = [sys.executable, "-c", *((OF_A_WORKER, "-c", code, "has threads") if is_worker else (code,))]
    pipe = subprocess.PIPE
    with subprocess.Popen(given, stdin=pipe, stdout=pipe, text=True, env=environment()) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        assert eventually(lambda: "State:\tT" in Path(f"/proc/{pid}/status").read_text("utf-8"))
        os.kill(pid, signal.SIGCONT)
        said, _ = process.communicate("go on\n", PATIENCE_S)
    assert said == "1\n"


def test_two_that_look_at_once_do_not_wait_for_the_next_stop() -> None:
    """As in a worker whose coordinator was lost: its last trial may still run beside another."""
    code = """if True:
        import os, signal, threading
        from harness.interrupts import count_stops, n_stops
        count_stops()
        gate = threading.Barrier(9)

        def look():
            for _ in range(300):
                gate.wait()
                n_stops()

        for _ in range(8):
            threading.Thread(target=look, daemon=True).start()
        for _ in range(300):
            os.kill(os.getpid(), signal.SIGCONT)
            gate.wait(10)
        print("none waits", flush=True)
        os._exit(0)
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=60)
    assert ended.stdout == "none waits\n", ended.stderr
