"""The process of one device's worker: `python -m harness.fleet.dask_worker JSON`. `joulebench fleet join` starts it.

A lost scheduler ends Dask's worker and not this process: it connects again, and its models stay loaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from harness.fleet.dask_settings import PAGES, SERIAL, TOPIC, resource_of, settle_dask, when_parent_ends
from harness.fleet.security import HOST, Tls, read_address, security_of
from harness.fleet.worker_side import Say, WorkerSide
from harness.interrupts import count_stops
from harness.terminal import log_to_terminal
from results.printable import with_colon
from results.records import Record

if TYPE_CHECKING:
    from distributed.worker import Worker

EXIT_NO_COORDINATOR = 3
TRY_EVERY_S = 0.5
LOOK_EVERY_S = 0.2
UNHEARD_S = 120.0
"""Without an answer to a heartbeat: a tunnel whose other end is gone takes all that is sent, and brings nothing."""
CLOSES_WITHIN_S = 10.0
LEAST_JOIN_S, MOST_JOIN_S = 2.0, 20.0
"""Of one try, where what answers is no coordinator of ours and says nothing."""

log = logging.getLogger("fleet")


class WorkerAsked(Record):
    address: str
    device: str
    tls: Tls | None = None
    wait_s: float
    """For a coordinator, at the beginning and after it was lost."""
    folder: str = ""
    """For all that is temporary. `join` makes it, and takes it away: it may have to kill this process."""


class Side(Protocol):
    """What answers messages here: `harness.fleet.worker_side.WorkerSide`."""

    def answer(self, content: object, say: Say) -> bytes: ...
    def close(self, is_over: bool) -> None:
        """is_over: the run has all of its trials."""
        ...


_side: list[Side] = []
"""The one of this process."""
_over = threading.Event()


def run_task(content: bytes, lease_id: str) -> bytes:
    """What Dask calls here, by its name."""
    from distributed.worker import get_worker

    worker = get_worker()
    return _side[0].answer(content, lambda words: worker.log_event(TOPIC, {"lease_id": lease_id, "words": words[:200]}))


def leave() -> None:
    """The run is over. The coordinator calls it on all workers."""
    _over.set()


async def work(asked: WorkerAsked) -> int:
    """The exit code."""
    from distributed.worker import Worker

    seen_s = time.monotonic()
    was_there = True
    while not _over.is_set():
        worker = Worker(
            asked.address,
            nthreads=1,
            resources={SERIAL: 1, resource_of(asked.device): 1},
            local_directory=asked.folder,
            security=security_of(asked.tls),
            memory_limit=None,
            dashboard=False,
            dashboard_address=PAGES,
            # Whoever connects to a worker runs code, too. A coordinator on another machine reaches it at the address
            # that this machine has towards it.
            host=HOST if read_address(asked.address, asked.tls).is_local else None,
        )
        try:
            left_s = asked.wait_s - (time.monotonic() - seen_s)
            await asyncio.wait_for(worker, timeout=min(MOST_JOIN_S, max(LEAST_JOIN_S, left_s)))
            log.warning("%s joined %s", with_colon(asked.device), asked.address)
            was_there = True
            try:
                await ended(worker)
            finally:
                seen_s = time.monotonic()
        except (OSError, TimeoutError, RuntimeError, ValueError) as error:
            if was_there:
                log.warning(
                    "%s no coordinator at %s (%s); trying again", with_colon(asked.device), asked.address, _short(error)
                )
                was_there = False
        finally:
            with suppress(TimeoutError):
                closing = worker.close(timeout=1, executor_wait=False, reason="joulebench")
                await asyncio.wait_for(closing, CLOSES_WITHIN_S)
        if not _over.is_set():
            if time.monotonic() - seen_s > asked.wait_s:
                log.error("%s no coordinator at %s for %.0f s", with_colon(asked.device), asked.address, asked.wait_s)
                return EXIT_NO_COORDINATOR
            await asyncio.sleep(TRY_EVERY_S)
    log.warning("%s the run is over", with_colon(asked.device))
    return 0


async def ended(worker: Worker) -> None:
    """Until it lost its scheduler, or the run is over. Raises `TimeoutError` where nothing is heard any more."""
    finished = asyncio.ensure_future(worker.finished())
    latency_s, n_alike = worker.latency, 0
    try:
        while not finished.done() and not _over.is_set():
            await asyncio.wait([finished], timeout=LOOK_EVERY_S)
            # Each answer to a heartbeat moves it. Looks are counted, so that no time counts in which we stood still.
            n_alike = n_alike + 1 if worker.latency == latency_s else 0
            latency_s = worker.latency
            if n_alike * LOOK_EVERY_S >= UNHEARD_S:
                raise TimeoutError(f"nothing was heard of it for {UNHEARD_S:.0f} s")
    finally:
        finished.cancel()


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def main(side: Side) -> None:
    log_to_terminal(logging.WARNING, "%(message)s")
    asked = WorkerAsked.model_validate_json(sys.argv[1])
    _side.append(side)
    count_stops()
    settle_dask()
    # That a name is not known is told by us.
    warnings.filterwarnings("ignore", message="Couldn't detect a suitable IP address", category=RuntimeWarning)
    tempfile.tempdir = asked.folder
    when_parent_ends(lambda: _end_with_join(asked.folder))
    code = asyncio.run(work(asked))
    side.close(is_over=code == 0)
    sys.stdout.flush()
    os._exit(code)  # a trial of a coordinator that was lost may still run in its thread


def _end_with_join(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    # Dask finds `run_task` by its module's name: in this process that must be this very module.
    from harness.fleet import dask_worker

    dask_worker.main(WorkerSide())
