"""A loop on a thread of its own: results, errors, and the limits of waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from devices.base import TransientDeviceError
from devices.ios import event_loop
from devices.ios.event_loop import EventLoopThread


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread("test-loop")
    yield thread
    thread.close()


def test_results_and_errors_come_back_to_the_caller(loop: EventLoopThread) -> None:
    async def add(a: int, b: int) -> int:
        return a + b

    async def fail() -> None:
        raise LookupError("nothing here")

    assert loop.run(add(2, 3), 1.0, "adding") == 5
    with pytest.raises(LookupError, match="nothing here"):
        loop.run(fail(), 1.0, "failing")


def test_what_takes_longer_than_its_limit_is_cancelled(loop: EventLoopThread) -> None:
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()  # for ever
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TransientDeviceError, match=r"the answer: no answer in 0\.1 s"):
        loop.run(wait(), 0.1, "the answer")
    assert cancelled.wait(60)


def test_a_blocked_loop_is_not_waited_for_either(loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "GRACE_S", 0.1)
    goes_on = threading.Event()

    async def block() -> None:
        goes_on.wait()  # what a library must not do

    try:
        with pytest.raises(TransientDeviceError, match="no answer"):
            loop.run(block(), 0.1, "blocking")
    finally:
        goes_on.set()


def test_closing_ends_the_thread_and_what_runs_on_it(loop: EventLoopThread) -> None:
    n_before = threading.active_count()
    other = EventLoopThread("another-loop")
    assert threading.active_count() == n_before + 1
    other.close()
    assert threading.active_count() == n_before
    other.close()
