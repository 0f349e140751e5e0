"""A device of two queues that runs nothing ahead, and holds every read and copy against the order that was asked for.

What computes is watched call by call (`watching`). It fails where a call reads what a copy brings and was not told to
wait for, and where a copy goes to a place that a call given before may still read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VIEWS = {"t", "view", "detach", "transpose", "slice", "alias", "expand", "unsqueeze", "select", "split", "as_strided"}


class Moment(NamedTuple):
    """In one of the queues: behind all that it was given by a number."""

    copying: bool
    number: int


@dataclass
class Given:
    """A copy: when it was given to its queue, and the last call that read its place since."""

    into: Tensor
    source: Tensor
    number: int
    is_made: bool = False
    last_read: int = 0


@dataclass
class NotedStreams:
    """late: copies are made when something waits for them, and spoil their place when they are given."""

    late: bool = True
    pinned_bytes: int = 1 << 40
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    n_copies: int = 0
    n_host_waits: int = 0

    def __post_init__(self) -> None:
        self._number = 0
        self._waited_by_copies = self._waited_by_compute = 0
        self._given: dict[int, Given] = {}
        """By the address of their place."""
        self._is_copying = False

    def event(self, copying: bool) -> Moment:
        self._number += 1
        return Moment(copying, self._number)

    def wait(self, event: Moment, copying: bool) -> None:
        assert event.copying != copying, "a queue waits for the other"
        if copying:
            self._waited_by_copies = max(self._waited_by_copies, event.number)
        else:
            self._waited_by_compute = max(self._waited_by_compute, event.number)
            self._make(event.number)

    def copy(self, into: Tensor, source: Tensor) -> None:
        self._number += 1
        self.n_copies += 1
        before = self._given.get(into.data_ptr())
        if before is not None:
            assert before.last_read < self._waited_by_copies or not before.last_read, (
                f"a copy may begin while call {before.last_read} reads what lies in its place"
            )
            assert before.is_made or self.late
            self._make(before.number)
        own = self._given[into.data_ptr()] = Given(into, source, self._number)
        if self.late:
            with self._copying():
                into.fill_(float("nan"))
        else:
            self._make(own.number)

    def is_over(self, event: Moment) -> bool:
        return not event.copying or all(one.is_made for one in self._given.values() if one.number <= event.number)

    def join(self, event: Moment) -> None:
        self.n_host_waits += 1
        self._make(event.number)

    def seconds(self, first: Moment, second: Moment) -> float:
        return (second.number - first.number) * 1e-6

    def pinned(self, n_bytes: int) -> Tensor:
        self.pinned_bytes -= n_bytes
        if self.pinned_bytes < 0:
            raise RuntimeError("out of memory: pin_memory\nand more that nobody reads")
        return torch.empty(n_bytes, dtype=torch.uint8)

    def _make(self, until: int) -> None:
        with self._copying():
            for one in self._given.values():
                if one.number <= until and not one.is_made:
                    one.into.copy_(one.source)
                    one.is_made = True

    @contextmanager
    def _copying(self) -> Iterator[None]:
        was, self._is_copying = self._is_copying, True
        yield
        self._is_copying = was

    def read(self, tensors: Sequence[Tensor], call: str) -> None:
        """By a call that is given to what computes."""
        if self._is_copying:
            return
        self._number += 1
        for tensor in tensors:
            one = self._given.get(tensor.data_ptr())
            if one is not None:
                assert one.number < self._waited_by_compute, f"{call} reads an expert that nobody waited for"
                one.last_read = self._number

    @contextmanager
    def watching(self) -> Iterator[None]:
        with _Watch(self):
            yield


class _Watch(TorchDispatchMode):
    def __init__(self, streams: NotedStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in VIEWS:
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._streams.read([leaf for leaf in leaves if leaf.device.type == "cpu"], name)
        return func(*args, **(kwargs or {}))
