"""CUDA's two queues: the stream on which torch computes, and one of copies beside it.

Written, and not yet run on a GPU: `tests/test_cuda_copies.py` needs one.
"""

from __future__ import annotations

import torch
from torch import Tensor


class CudaStreams:
    """An `engines.model.stream_copier.Streams`. An event is CUDA's, made anew each time, so that none is waited for
    that was meant for something before."""

    def __init__(self, device: torch.device) -> None:
        """device: with its number, or torch's own at this time."""
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._copying = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def event(self, copying: bool) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream(copying))
        return event

    def wait(self, event: torch.cuda.Event, copying: bool) -> None:
        self._stream(copying).wait_event(event)

    def copy(self, into: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._copying):
            into.copy_(source, non_blocking=True)

    def is_over(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())  # type: ignore[no-untyped-call]

    def join(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return float(first.elapsed_time(second)) / 1e3

    def pinned(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def _stream(self, copying: bool) -> torch.cuda.Stream:
        return self._copying if copying else torch.cuda.current_stream(self.device)
