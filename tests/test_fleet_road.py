"""The way from a fleet's coordinator to its workers, where the scheduler between them is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from harness.fleet import road
from harness.fleet.dask_worker import WorkerAsked
from harness.fleet.security import Address
from results.own_python import own_module
from tests.eventually import eventually


@pytest.mark.waits
def test_a_scheduler_that_is_lost_while_its_coordinator_begins_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However little time a port is waited for: this one was had."""
    monkeypatch.setattr(road, "BEGINS_WITHIN_S", 0.0)
    monkeypatch.setattr(road, "ANSWERS_WITHIN_S", 1.0)
    connect = road.DaskRoad._connect

    def lost_at_first(self: road.DaskRoad) -> None:
        if self.n_schedulers == 1:
            assert self.scheduler_pid is not None
            os.kill(self.scheduler_pid, signal.SIGKILL)
            os.waitid(os.P_PID, self.scheduler_pid, os.WEXITED | os.WNOWAIT)
        connect(self)

    monkeypatch.setattr(road.DaskRoad, "_connect", lost_at_first)
    way = road.DaskRoad(Address("127.0.0.1", 0), None)
    way.open()
    try:
        assert way.n_schedulers == 2
        assert way.devices() == {}
    finally:
        way.close(is_over=True)


@pytest.mark.waits
def test_a_scheduler_that_is_killed_before_it_listens_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """That says nothing of the address, however little time a port is waited for."""
    monkeypatch.setattr(road, "BEGINS_WITHIN_S", 0.0)
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def killed_at_first(*arguments: Any, **keywords: Any) -> subprocess.Popen[str]:
        started.append(popen(*arguments, **keywords))
        if len(started) == 1:
            started[0].kill()
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", killed_at_first)
    way = road.DaskRoad(Address("127.0.0.1", 0), None)
    way.open()
    try:
        assert [process.returncode for process in started] == [-signal.SIGKILL, None]
        assert way.devices() == {}
    finally:
        way.close(is_over=True)


@contextmanager
def worker(address: Address, device: str, folder: Path) -> Iterator[None]:
    asked = WorkerAsked(address=str(address), device=device, wait_s=60, folder=str(folder))
    command = [*own_module("tests.held_worker"), asked.model_dump_json()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.getcwd()})
    try:
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.mark.waits
def test_an_answer_that_takes_long_is_no_lost_one_and_holds_no_other_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After 10 s, of a trace of an hour over a slow network, it was lost, and so its trial failed after the third; and
    until then nobody else's answer was looked at."""
    monkeypatch.setattr(road, "ANSWERS_WITHIN_S", 2.0)
    monkeypatch.setattr(road, "SAY_EVERY_S", 0.1)
    way = road.DaskRoad(Address("127.0.0.1", 0), None)
    way.open()
    seen: list[road.Event] = []

    def has_come(*events: road.Event) -> bool:
        seen.extend(way.events(0.1))
        return all(event in seen for event in events)

    try:
        with worker(way.address, "slow", tmp_path), worker(way.address, "other", tmp_path):
            assert eventually(lambda: way.devices() == {"slow": 1, "other": 1})
            way.send("a", "slow", str(tmp_path / "sent").encode())
            assert eventually(lambda: has_come(road.Said("a", road.FETCHING)))
            for i in range(3):
                way.send(f"b{i}", "other", b"")
                assert eventually(lambda i=i: has_come(road.Came(f"b{i}", b"answer")))
            n_said = seen.count(road.Said("a", road.FETCHING))
            assert eventually(lambda: has_come() and seen.count(road.Said("a", road.FETCHING)) > n_said + 30)
            (tmp_path / "sent").touch()
            assert eventually(lambda: has_come(road.Came("a", b"answer")))
    finally:
        way.close(is_over=True)
    assert not [event for event in seen if isinstance(event, road.Lost | road.Down)]
    assert way.events(0.0) == []


class Tunnel:
    """To a port of this machine. `hang`: what is open takes all that is sent, and brings nothing; what is new works."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listens = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listens.getsockname()[1])
        self._open: list[threading.Event] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def n_open(self) -> int:
        """Of those that do not hang."""
        return sum(not hangs.is_set() for hangs in self._open)

    def hang(self) -> None:
        for hangs in self._open:
            hangs.set()

    def close(self) -> None:
        self._listens.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                one, _ = self._listens.accept()
                other = socket.create_connection(("127.0.0.1", self._port))
                self._open.append(threading.Event())
                for ends in ((one, other), (other, one)):
                    threading.Thread(target=self._carry, args=(*ends, self._open[-1]), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket, hangs: threading.Event) -> None:
        with suppress(OSError):
            while content := one.recv(1 << 16):
                if not hangs.is_set():
                    other.sendall(content)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.mark.waits
def test_a_worker_whose_tunnel_hangs_joins_again(tmp_path: Path) -> None:
    """Its connection stays open, and so it waited for an answer for as long as it lived, and its device was absent."""
    way = road.DaskRoad(Address("127.0.0.1", 0), None)
    way.open()
    tunnel = Tunnel(way.address.port)
    try:
        with worker(tunnel.address, "a", tmp_path):
            for i in range(3):
                assert eventually(lambda: tunnel.n_open() >= 2)  # what is sent, and heartbeats
                assert eventually(lambda: way.devices() == {"a": 1})
                way.send(f"{i}", "a", b"")
                assert eventually(lambda i=i: road.Came(f"{i}", b"answer") in way.events(0.1))
                tunnel.hang()
    finally:
        tunnel.close()
        way.close(is_over=True)


@pytest.mark.parametrize("logger", ["distributed.worker", "tornado.application", "asyncio"])
def test_what_dask_says_of_a_broken_connection_is_told_in_our_words(logger: str) -> None:
    """A heartbeat that a proxy damaged was 40 lines of a traceback, and then the worker joined again."""
    code = "from harness.fleet.dask_settings import settle_dask; settle_dask(); import distributed, logging;"
    code += f"print(logging.getLogger({logger!r}).isEnabledFor(logging.ERROR))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
