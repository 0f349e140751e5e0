"""`joulebench fleet join`: a worker process for each device, started again where it dies."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.fleet.dask_worker import EXIT_NO_COORDINATOR, WorkerAsked
from results.own_python import own_module
from results.printable import with_colon
from results.scratch import ScratchFolder

AGAIN_AFTER_S = (0.2, 1.0, 5.0, 15.0)
"""Before a worker that ended is started again: longer where it ends again and again."""
LIVES_S = 60.0
"""After which a worker that ended had begun well."""
LOOK_EVERY_S = 0.1
WORKER = "harness.fleet.dask_worker"


@dataclass
class _Worker:
    asked: WorkerAsked
    process: subprocess.Popen[bytes] | None = None
    scratch: ScratchFolder | None = None
    """Of that process."""
    started_s: float = 0.0
    n_short: int = 0
    start_at_s: float = 0.0
    code: int | None = None
    """Once it has ended for good."""


def join(asked: Sequence[WorkerAsked], say: Callable[[str], None], module: str = WORKER) -> int:
    """Until all workers have ended for good. Returns 0, or the code of those that found no coordinator.

    module: what runs in each process.
    """
    workers = [_Worker(one) for one in asked]
    try:
        while any(w.code is None for w in workers):
            for worker in workers:
                _tend(worker, say, module)
            time.sleep(LOOK_EVERY_S)
    finally:
        for worker in workers:
            if worker.process is not None and worker.process.poll() is None:
                worker.process.kill()
                worker.process.wait()
            if worker.scratch is not None:
                worker.scratch.close()
    return max(w.code or 0 for w in workers)


def _tend(worker: _Worker, say: Callable[[str], None], module: str) -> None:
    now_s = time.monotonic()
    if worker.code is not None:
        return
    if worker.process is None:
        if now_s >= worker.start_at_s:
            worker.scratch = ScratchFolder("fleet")
            asked = worker.asked.model_copy(update={"folder": str(worker.scratch.path)})
            command = [*own_module(module), asked.model_dump_json()]
            worker.process, worker.started_s = subprocess.Popen(command, stdin=subprocess.PIPE), now_s
        return
    code = worker.process.poll()
    if code is None:
        return
    worker.process = None
    if worker.scratch is not None:
        worker.scratch.close()
    if code in (0, EXIT_NO_COORDINATOR):
        worker.code = code
        return
    worker.n_short = 0 if now_s - worker.started_s > LIVES_S else worker.n_short + 1
    wait_s = AGAIN_AFTER_S[min(worker.n_short, len(AGAIN_AFTER_S) - 1)]
    worker.start_at_s = now_s + wait_s
    how = f"signal {-code}" if code < 0 else f"code {code}"
    say(f"{with_colon(worker.asked.device)} its worker ended ({how}); started again in {wait_s:g} s")
