"""Who copies weights while another computes, and on the CPU: a thread, one copy after the other, at a stated rate.

Whoever fills buffers asks the same on every machine (`CopyQueue`): a copy begins after what computes has read what lay
in its place (`mark`, `start`), what computes goes on after the copy (`CopyJob.wait`), and nothing else waits. On the
CPU a call of arithmetic has read all when it returns, so that a mark is only a time; on a GPU, whose queues run behind
the host, it is an event (`engines.model.stream_copier`).

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
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engines.errors import EngineError
from engines.model.tensor_files import give_back

if TYPE_CHECKING:
    from engines.model.experts import ExpertWeights

PIECE_BYTES = 1 << 22
LEAST_PIECE_BYTES = 1 << 14
PACED_S = 2.5e-4
"""Of a stated rate: pieces take this long."""
CONVERTED_AT_ONCE = 1 << 14
"""Values: torch shares out more than 32767 among threads, which compute here."""
SHORTEST_SLEEP_S = 5e-5
LONGEST_SLEEP_S = 0.1
"""That nothing wakes: waits that something does are a little less exact."""
LONGEST_END_S = 30.0
"""That copies which nobody waits for may take."""


class Part(NamedTuple):
    """What is copied from where to where: tensors of one shape."""

    into: Tensor
    source: Tensor


Mark = Any
"""A place in the order of what computes, as a `CopyQueue` tells it; nobody else looks into it."""


class CopyQueue(Protocol):
    """One queue of copies beside what computes; they are made in their order, one after another."""

    device: torch.device
    """Where they go, and where what they bring is computed."""

    def held(self, layers: Sequence[ExpertWeights | None]) -> Sequence[ExpertWeights | None]:
        """The experts of all layers as they are copied from. Raises `EngineError` where they cannot be held so."""
        ...

    def start(self, parts: Sequence[Part], after: Mark | None = None) -> CopyJob:
        """Queues them behind what is queued. after: what computes may read there until it has come so far."""
        ...

    def mark(self) -> Mark:
        """Behind all that was given to what computes so far."""
        ...

    def at_s(self, mark: Mark) -> float:
        """When what computes came there; waits until it does."""
        ...

    def finish(self) -> None:
        """Waits for all that was queued."""
        ...

    def break_off(self) -> None:
        """As `finish`, where nobody wants the times of what is queued: a stated rate does not hold it up."""
        ...


class CopyJob:
    """Copies in a queue. begin_s, end_s: when they were made; n_bytes: read from their sources."""

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
        """What computes goes on when what it copies may be read. Raises `EngineError` where copying failed."""
        self.join()

    def join(self) -> None:
        """The same of whoever asks, so that its times are known."""
        self._done.wait()
        if self._error is not None:
            raise EngineError(f"an expert could not be copied ({self._error})") from self._error


class Copier:
    """One thread and its queue: a `CopyQueue` of the CPU. It ends with this object."""

    device = torch.device("cpu")

    def __init__(self, bytes_per_s: float | None = None, now_s: Callable[[], float] = time.perf_counter) -> None:
        """bytes_per_s: read from sources; None: as fast as it goes."""
        self.bytes_per_s = bytes_per_s
        jobs: SimpleQueue[CopyJob | None] = SimpleQueue()
        pace = _Pace(bytes_per_s, now_s)
        thread = threading.Thread(target=_work, args=(jobs, pace, now_s), name="copier", daemon=True)
        thread.start()
        self._jobs, self._pace = jobs, pace
        self.mark: Callable[[], Mark] = now_s
        """See `CopyQueue`. No method that asks it: each token takes two."""
        weakref.finalize(self, _end, jobs, thread, pace)

    def held(self, layers: Sequence[ExpertWeights | None]) -> Sequence[ExpertWeights | None]:
        return layers

    def start(self, parts: Sequence[Part], after: Mark | None = None) -> CopyJob:
        """after: is over, for arithmetic here has read all when it returns."""
        job = CopyJob(parts)
        self._jobs.put(job)
        return job

    def at_s(self, mark: Mark) -> float:
        return float(mark)

    def finish(self) -> None:
        self.start(()).join()

    def break_off(self) -> None:
        self._pace.ends.set()
        self.finish()
        self._pace.ends.clear()


def _end(jobs: SimpleQueue[CopyJob | None], thread: threading.Thread, pace: _Pace) -> None:
    """With its copier, or before Python ends: a thread that is stopped inside of torch then takes the process along."""
    pace.ends.set()
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(LONGEST_END_S)


class _Pace:
    """When copied bytes would have arrived over a link of a rate."""

    def __init__(self, bytes_per_s: float | None, now_s: Callable[[], float]) -> None:
        self._rate, self._now_s, self._free_s = bytes_per_s, now_s, -float("inf")
        self.ends = threading.Event()
        """No more pauses, nor the rest of one: whoever asked for the copies has gone."""
        self.piece_bytes = PIECE_BYTES
        if bytes_per_s is not None:
            self.piece_bytes = min(PIECE_BYTES, max(LEAST_PIECE_BYTES, int(bytes_per_s * PACED_S)))

    def begin(self, queued: bool) -> None:
        """queued: it waited for the link, which then loses no time between the two."""
        if not queued:
            self._free_s = self._now_s()

    def copied(self, n_bytes: int) -> None:
        """Sleeps until they would have arrived."""
        if self._rate is None or self.ends.is_set():
            return
        self._free_s += n_bytes / self._rate
        left_s = self._free_s - self._now_s()
        if left_s > LONGEST_SLEEP_S:
            self.ends.wait(left_s)
        elif left_s > SHORTEST_SLEEP_S:
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
