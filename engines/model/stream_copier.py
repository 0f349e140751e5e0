"""Copies to a device whose queues run behind the host: pinned memory, a queue of copies, events, and no waiting host.

The host gives work to two queues, that of what computes and that of copies, and is on its way before either has begun.
So the order is kept by events, each used once: a copy begins when what computes has passed the mark behind the last
read of its place; what computes goes on behind the event at the end of the copy. The host asks for times when a request
has ended.

`Streams` is what a device must do for it. CUDA's are in `engines.model.cuda_streams`; tests have others, which note
what reads and writes and hold it against the order that was asked for.

Legend: I expert width, H hidden.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from engines.errors import EngineError
from engines.model.copier import CopyJob, Mark, Part
from engines.model.experts import ExpertWeights, GatedWeights
from engines.model.made_experts import ALIGNMENT, tensors_of, with_tensors
from engines.model.quantised import QuantisedMatrix
from engines.model.tensor_files import give_back
from results.units import with_prefix

Event = Any
"""A place in one of the queues, as `Streams` tells it."""


class Streams(Protocol):
    """The two queues of a device. Each does what it is given in that order."""

    device: torch.device

    def event(self, copying: bool) -> Event:
        """A new one, behind all that the queue of copies, or that of what computes, was given so far."""
        ...

    def wait(self, event: Event, copying: bool) -> None:
        """What that queue is given from now on begins when the event is over."""
        ...

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Gives it to the queue of copies; source: pinned, of the same shape and type."""
        ...

    def is_over(self, event: Event) -> bool: ...

    def join(self, event: Event) -> None:
        """The host waits until it is over."""
        ...

    def seconds(self, first: Event, second: Event) -> float:
        """From one to the other; both are over."""
        ...

    def pinned(self, n_bytes: int) -> Tensor:
        """Memory of the host that the device reads by itself, as bytes. Raises `RuntimeError`."""
        ...


class StreamJob(CopyJob):
    """Of a `StreamCopier`."""

    def __init__(self, parts: Sequence[Part], streams: Streams, begin: Event, end: Event, zero: tuple[Event, float]):
        """zero: an event, and when it was."""
        super().__init__(parts)
        self._streams, self._begin, self._end, self._zero = streams, begin, end, zero

    @property
    def is_done(self) -> bool:
        return self._streams.is_over(self._end)

    def wait(self) -> None:
        self._streams.wait(self._end, copying=False)

    def join(self) -> None:
        self._streams.join(self._end)
        event, at_s = self._zero
        self.begin_s = at_s + self._streams.seconds(event, self._begin)
        self.end_s = at_s + self._streams.seconds(event, self._end)


class StreamCopier:
    """An `engines.model.copier.CopyQueue`. What it copies from and into lives until the device is done with it."""

    def __init__(self, streams: Streams, dtype: torch.dtype, now_s: Callable[[], float] = time.perf_counter) -> None:
        """dtype: in which the device computes, and so what is copied."""
        self.device = streams.device
        self._streams, self._dtype = streams, dtype
        event = streams.event(copying=False)
        streams.join(event)
        self._zero = event, now_s()
        self._on_way: deque[StreamJob] = deque()
        weakref.finalize(self, _end, streams, self._on_way)

    def held(self, layers: Sequence[ExpertWeights | None]) -> Sequence[ExpertWeights | None]:
        """Copies of them in pinned memory, as the device computes with them."""
        n_bytes = sum(_room(layer, self._dtype) for layer in layers if layer is not None)
        try:
            return [None if layer is None else self._pinned(layer) for layer in layers]
        except RuntimeError as error:
            raise EngineError(
                f"the experts take {with_prefix(n_bytes, 'B', digits=3)}, and so much memory of this host cannot be"
                f" pinned for {self.device} ({str(error).splitlines()[0]}); free some, raise the limit of locked memory"
                " (ulimit -l), or compute on the CPU"
            ) from error

    def _pinned(self, layer: ExpertWeights) -> ExpertWeights:
        room, begin = self._streams.pinned(_room(layer, self._dtype)), 0
        experts: list[GatedWeights] = []
        for expert in layer.experts:
            if any(isinstance(m, QuantisedMatrix) for m in (expert.gate_IH, expert.up_IH, expert.down_HI)):
                raise EngineError(f"experts in a narrow form are not copied to {self.device}; leave quantise out")
            tensors = []
            for source in tensors_of(expert):
                n_bytes = source.numel() * self._dtype.itemsize
                own = room[begin : begin + n_bytes].view(self._dtype).view(source.shape)
                own.copy_(source)
                give_back(source)
                tensors.append(own)
                begin += -(-n_bytes // ALIGNMENT) * ALIGNMENT
            experts.append(with_tensors(expert, tensors))
        return replace(layer, experts=tuple(experts))

    def start(self, parts: Sequence[Part], after: Mark | None = None) -> StreamJob:
        """Raises `EngineError` where the two of a part are unlike."""
        for into, source in parts:
            if (into.shape, into.dtype) != (source.shape, source.dtype):
                raise EngineError(f"{source.dtype} {tuple(source.shape)} into {into.dtype} {tuple(into.shape)}")
        if after is not None:
            self._streams.wait(after, copying=True)
        begin = self._streams.event(copying=True)
        for part in parts:
            self._streams.copy(*part)
        job = StreamJob(parts, self._streams, begin, self._streams.event(copying=True), self._zero)
        while self._on_way and self._on_way[0].is_done:
            self._on_way.popleft()
        self._on_way.append(job)
        return job

    def mark(self) -> Event:
        return self._streams.event(copying=False)

    def at_s(self, mark: Mark) -> float:
        self._streams.join(mark)
        event, at_s = self._zero
        return at_s + self._streams.seconds(event, mark)

    def finish(self) -> None:
        self._streams.join(self._streams.event(copying=True))

    def break_off(self) -> None:
        self.finish()


def _end(streams: Streams, on_way: deque[StreamJob]) -> None:
    """Memory that is still written to goes back to nobody."""
    if on_way:
        on_way[-1].join()
    on_way.clear()


def _room(layer: ExpertWeights, dtype: torch.dtype) -> int:
    sizes = [part.numel() * dtype.itemsize for part in tensors_of(layer.experts[0])]
    return len(layer.experts) * sum(-(-n_bytes // ALIGNMENT) * ALIGNMENT for n_bytes in sizes)
