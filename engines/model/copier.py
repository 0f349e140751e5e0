"""A thread that copies weights while another computes: one after the other, at a stated rate if one is given.

Pieces are copied outside of Python's lock, by this thread alone, so that a thread that computes goes on. Pages of
mapped files leave the process once they are copied.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from engines.errors import EngineError
from engines.model.tensor_files import give_back

PIECE_BYTES = 1 << 22
LEAST_PIECE_BYTES = 1 << 14
PACED_S = 2.5e-4
"""Of a stated rate: pieces take this long."""
CONVERTED_AT_ONCE = 1 << 14
"""Values: torch shares out more than 32767 among threads, which compute here."""
SHORTEST_SLEEP_S = 5e-5
LONGEST_END_S = 30.0
"""That copies which nobody waits for may take."""


class Part(NamedTuple):
    """What is copied from where to where: tensors of one shape."""

    into: Tensor
    source: Tensor


class CopyJob:
    """Copies in the queue of a `Copier`. begin_s, end_s: when they were made; n_bytes: read from their sources."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.n_bytes = sum(part.source.nbytes for part in parts)
        self.begin_s = self.end_s = 0.0
        self._error: BaseException | None = None
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def finish(self, begin_s: float, end_s: float, error: BaseException | None = None) -> None:
        self.begin_s, self.end_s, self._error = begin_s, end_s, error
        self._done.set()

    def wait(self) -> None:
        """Until what it copies may be read. Raises `EngineError` where copying failed."""
        self._done.wait()
        if self._error is not None:
            raise EngineError(f"an expert could not be copied ({self._error})") from self._error


class Copier:
    """One thread and its queue. It ends with this object."""

    def __init__(self, bytes_per_s: float | None = None, now_s: Callable[[], float] = time.perf_counter) -> None:
        """bytes_per_s: read from sources; None: as fast as it goes."""
        self.bytes_per_s = bytes_per_s
        jobs: SimpleQueue[CopyJob | None] = SimpleQueue()
        pace = _Pace(bytes_per_s, now_s)
        thread = threading.Thread(target=_work, args=(jobs, pace, now_s), name="copier", daemon=True)
        thread.start()
        self._jobs = jobs
        weakref.finalize(self, _end, jobs, thread)

    def start(self, parts: Sequence[Part]) -> CopyJob:
        """Queues them behind what is queued."""
        job = CopyJob(parts)
        self._jobs.put(job)
        return job

    def finish(self) -> None:
        """Waits for all that was queued."""
        self.start(()).wait()


def _end(jobs: SimpleQueue[CopyJob | None], thread: threading.Thread) -> None:
    """With its copier, or before Python ends: a thread that is stopped inside of torch then takes the process along."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(LONGEST_END_S)


class _Pace:
    """When copied bytes would have arrived over a link of a rate."""

    def __init__(self, bytes_per_s: float | None, now_s: Callable[[], float]) -> None:
        self._rate, self._now_s, self._free_s = bytes_per_s, now_s, -float("inf")
        self.piece_bytes = PIECE_BYTES
        if bytes_per_s is not None:
            self.piece_bytes = min(PIECE_BYTES, max(LEAST_PIECE_BYTES, int(bytes_per_s * PACED_S)))

    def begin(self, queued: bool) -> None:
        """queued: it waited for the link, which then loses no time between the two."""
        if not queued:
            self._free_s = self._now_s()

    def copied(self, n_bytes: int) -> None:
        """Sleeps until they would have arrived."""
        if self._rate is None:
            return
        self._free_s += n_bytes / self._rate
        left_s = self._free_s - self._now_s()
        if left_s > SHORTEST_SLEEP_S:
            time.sleep(left_s)


def _work(jobs: SimpleQueue[CopyJob | None], pace: _Pace, now_s: Callable[[], float]) -> None:
    with torch.inference_mode():
        while True:
            was_empty = jobs.empty()
            job = jobs.get()
            if job is None:
                return
            begin_s, error = now_s(), None
            pace.begin(not was_empty)
            try:
                for part in job.parts:
                    _copy(part, pace)
                    give_back(part.source)
            except Exception as caught:  # noqa: BLE001  whoever waits raises it
                error = caught
            job.finish(begin_s, now_s(), error)
            del job


def _copy(part: Part, pace: _Pace) -> None:
    into, source = part
    if into.shape != source.shape:
        raise EngineError(f"{tuple(source.shape)} into {tuple(into.shape)}")
    if into.dtype is source.dtype and into.is_contiguous() and source.is_contiguous():
        for first in range(0, source.nbytes, pace.piece_bytes):
            n_bytes = min(pace.piece_bytes, source.nbytes - first)
            ctypes.memmove(into.data_ptr() + first, source.data_ptr() + first, n_bytes)
            pace.copied(n_bytes)
        return
    if into.is_contiguous() and source.is_contiguous():
        into, source = into.view(-1), source.view(-1)
    row = max(1, source[:1].numel())
    n_rows = max(1, min(CONVERTED_AT_ONCE, pace.piece_bytes // source.itemsize) // row)
    for into_part, source_part in zip(torch.split(into, n_rows), torch.split(source, n_rows), strict=True):
        into_part.copy_(source_part)
        pace.copied(source_part.nbytes)
