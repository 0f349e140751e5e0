"""A fleet of three phones in which everything is killed at random: every trial is in the store once.

Nothing here is a question of speed: each phone's last repeat is held until the last kill. So the run cannot be over
before it, and no worker can be dead when the run ends. A slow machine only takes longer.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Timer

import psutil
import pytest

from results.store import Store
from tests.command import EXECUTABLE, environment
from tests.eventually import PATIENCE_S, running
from tests.fakes.adb_server import FakeAdbServer
from tests.fleet_phones import SERIALS, phones_plan, three_phones
from tests.fleet_worker import HELD, LOG
from tests.free_ports import free_port
from tests.plans import write_plan

pytestmark = [pytest.mark.slow, pytest.mark.alone]

N_KILLS = 50
N_COORDINATORS = 3
"""Killed on top of that."""
REPEATS = 30
N_CELLS = 2 * len(SERIALS)
LIMIT_S = 900.0
"""90 s, where the machine has nothing else to do."""


class KilledFleet:
    """Processes of one fleet: a coordinator, its scheduler, and three workers under one `join`."""

    def __init__(self, folder: Path, server: FakeAdbServer, seed: int) -> None:
        self.server = server
        self.run = folder / "run"
        self.killed: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._plan = write_plan(folder / "plan.toml", phones_plan(folder, REPEATS))
        self._log = (folder / "log").open("w")
        self._environment = environment() | {
            "ANDROID_ADB_SERVER_PORT": str(server.port),
            "JOULEBENCH_STATE": str(folder / "state"),
            "PYTHONPATH": os.getcwd(),
        }
        self._port = free_port()
        self._address = f"127.0.0.1:{self._port}"
        for phone in server.phones:
            phone.file(HELD, str(REPEATS - 1))
        worker = [sys.executable, "-m", "tests.fleet_worker", "join", f"tcp://{self._address}"]
        self.workers = self._start(worker)
        self.coordinator = self._start_coordinator()

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=self._environment, stdout=self._log, stderr=self._log)

    def _start_coordinator(self) -> subprocess.Popen[bytes]:
        command = [str(EXECUTABLE), "fleet", "start", str(self._plan), "--out", str(self.run)]
        given = ["--listen", self._address, "--most-losses", "1000"]
        return self._start([*command, *given, *(["--resume"] if self._is_begun() else [])])

    def _is_begun(self) -> bool:
        return self.run.is_dir() and Store.holds_run(self.run)

    def n_finished(self) -> int:
        if not self._is_begun():
            return 0
        with Store.view(self.run) as store:
            return len(store.finished())

    def kill(self, what: str) -> bool:
        """False where there is nothing of it to kill right now."""
        if what == "phone":
            phone = self._rng.choice(self.server.phones)
            phone.pull_cable()
            Timer(self._rng.uniform(0.05, 0.5), phone.plug_in).start()
        elif what == "coordinator":
            self.coordinator.kill()
            self.coordinator.wait()
            self.coordinator = self._start_coordinator()
        else:
            found = self._children(self.workers, "tests.fleet_worker") if what == "worker" else self._scheduler()
            if not found:
                return False
            self._rng.choice(found).send_signal(signal.SIGKILL)
        self.killed[what] += 1
        return True

    def kill_in_a_trial(self) -> bool:
        """The worker of the first phone, in the middle of the trial that is held there. False where it is not there."""
        phone = self.server.phones[0]
        word, _, repeat, _ = phone.local(LOG).read_text().splitlines()[-1].split()
        own = self._children(self.workers, phone.serial)
        if not own or (word, repeat) != ("begin", str(REPEATS - 1)) or not running(str(phone.local(HELD))):
            return False
        own[0].kill()
        return True

    def release(self) -> None:
        """What was held may end."""
        for phone in self.server.phones:
            phone.local(HELD).unlink()

    def _scheduler(self) -> list[psutil.Process]:
        """Once its coordinator has reached it. One that is killed again and again before that is given up after half a
        minute, and a slow machine may take as long to start a few."""
        with suppress(psutil.Error):
            links = psutil.Process(self.coordinator.pid).net_connections("tcp")
            if any(one.status == psutil.CONN_ESTABLISHED and one.raddr.port == self._port for one in links):
                return self._children(self.coordinator, "harness.fleet.dask_scheduler")
        return []

    def _children(self, parent: subprocess.Popen[bytes], word: str) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return [one for one in psutil.Process(parent.pid).children() if word in " ".join(one.cmdline())]
        return []

    def end(self) -> None:
        for process in (self.coordinator, self.workers):
            process.kill()
            process.wait()
        self._log.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[KilledFleet]:
    with three_phones(tmp_path) as server:
        fleet = KilledFleet(tmp_path, server, seed=17)
        try:
            yield fleet
        finally:
            fleet.end()


@pytest.mark.timeout(2 * LIMIT_S)
def test_every_trial_is_kept_once_whatever_is_killed(fleet: KilledFleet, tmp_path: Path) -> None:
    rng = random.Random(3)
    until_s = time.monotonic() + LIMIT_S

    def wait_for(happens: Callable[[], object]) -> None:
        while not happens():
            assert time.monotonic() < until_s, (tmp_path / "log").read_text()
            assert fleet.coordinator.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)

    wait_for(fleet.n_finished)
    kinds = ["worker", "phone", "scheduler"]
    order = [kinds[i % 3] for i in range(N_KILLS)]
    rng.shuffle(order)
    for place in sorted(rng.sample(range(N_KILLS), N_COORDINATORS), reverse=True):
        order.insert(place, "coordinator")
    for what in order:
        time.sleep(rng.uniform(0.1, 0.9))
        wait_for(lambda: fleet.kill(what))  # noqa: B023 - within this round
    wait_for(fleet.kill_in_a_trial)
    assert fleet.n_finished() < N_CELLS * REPEATS
    with Store.view(fleet.run) as store:
        assert store.data().is_unfinished
    fleet.release()
    assert fleet.coordinator.wait(max(1.0, until_s - time.monotonic())) == 0, (tmp_path / "log").read_text()
    assert fleet.workers.wait(PATIENCE_S) == 0
    assert sum(fleet.killed.values()) == N_KILLS + N_COORDINATORS
    with Store.view(fleet.run) as store:
        trials = store.trials()
        assert len(store.samples()) == 1
        assert not store.data().is_unfinished
    asked = Counter((t.cell_id, t.repeat) for t in trials)
    assert len(asked) == N_CELLS * REPEATS
    assert set(asked.values()) == {1}
    assert {repeat for _, repeat in asked} == set(range(REPEATS))
    assert {t.status for t in trials} == {"ok"}
    # What was kept is what a phone did: each of its trials was begun there, some of them more than once.
    begun: Counter[tuple[str, int]] = Counter()
    for phone in fleet.server.phones:
        for line in phone.local(LOG).read_text().splitlines():
            word, cell_id, repeat, _ = line.split()
            begun[cell_id, int(repeat)] += word == "begin"
    assert begun.keys() == asked.keys()
    assert sum(begun.values()) > len(asked), "at least the attempt that was killed in the middle of its trial"
