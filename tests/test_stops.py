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
from tests.eventually import PATIENCE_S
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


def test_a_real_stop_is_counted() -> None:
    code = """if True:
        import sys
        from harness.interrupts import count_stops, n_stops
        count_stops()
        print("ready", flush=True)
        sys.stdin.readline()
        print(n_stops(), flush=True)
    """
    given = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(given, stdin=pipe, stdout=pipe, text=True, env=environment()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate("go on\n", PATIENCE_S)
    assert said == "1\n"
