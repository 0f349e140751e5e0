"""Tasks in several processes, each started anew: what one of them changes of its modules, no other sees."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process, resource_tracker
from typing import Final

ENDED: Final = 1


@contextmanager
def processes(
    n: int, once: bool = False, begin: Callable[..., object] | None = None, told: tuple[object, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """n of them at most. once: each does one task. begin: is called in each at first, with what is `told`.

    Whatever is raised inside, Ctrl-C too, ends them at once. Raises `BrokenProcessPool` where one ended by itself.
    """
    others = set(active_children())
    # Ctrl-C in a terminal comes to all of them, and the first process ends the others: what it starts is deaf to it.
    resource_tracker.ensure_running()  # Python starts it with the first of them, and then lets Ctrl-C through again
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pool = ProcessPoolExecutor(
        n,
        mp_context=get_context("spawn"),
        initializer=_begin,
        initargs=(begin, told),
        max_tasks_per_child=1 if once else None,
    )
    try:
        for _ in range(n):
            pool.submit(int)  # starts one
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(active_children()) - others:
            child.terminate()
        raise
    pool.shutdown()


def _begin(begin: Callable[..., object] | None, told: tuple[object, ...]) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    if begin is not None:
        begin(*told)


def _end_with_the_first() -> None:
    """Killed, it ends nobody: who waits for its next task would wait for ever."""
    first = parent_process()
    if first is not None:
        first.join()
        os._exit(ENDED)
