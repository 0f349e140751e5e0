"""The way from a fleet's coordinator to its workers, where the scheduler between them is lost."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest

from harness.fleet import road
from harness.fleet.security import Address


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
