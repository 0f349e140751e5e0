"""Memory for weights in large pages.

A token reads every weight once, from beginning to end. In the system's usual pages of 4 KB a processor looks up where
each one lies, and small matrices of an ordinary allocator lie between pages of other things. Linux gives pages of 2 MB
where they are asked for and it has some; else nothing changes. Memory is taken as it is first written, as everywhere.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
"""Of x86, and of Arm where usual pages have 4 KB."""
SHARED = 16 * LARGE_PAGE
"""What small tensors share. One that takes an eighth of it has memory of its own."""
ALIGNMENT = 64
"""A line of the cache: the kernels' widest loads ask no more."""


class LargePages:
    """Room for tensors that live about as long as each other: small ones share memory, which goes back when the last of
    them ends. `close` when no more are to come."""

    def __init__(self) -> None:
        self._shared: _Mapping | None = None

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor whose values are yet to be written."""
        n_bytes = math.prod(shape) * dtype.itemsize
        if not hasattr(mmap, "MADV_HUGEPAGE") or not n_bytes:
            return torch.empty(tuple(shape), dtype=dtype)
        if n_bytes >= SHARED // 8:
            return _Mapping(n_bytes).take(n_bytes).view(dtype).view(tuple(shape))
        if self._shared is None or self._shared.n_left < n_bytes:
            self.close()
            self._shared = _Mapping(SHARED)
        return self._shared.take(n_bytes).view(dtype).view(tuple(shape))

    def close(self) -> None:
        """What no tensor took of a large page goes back, so that a model takes no more memory than its weights."""
        if self._shared is not None:
            self._shared.give_back_rest()
            self._shared = None


class _Mapping:
    """Memory of this process alone, handed out from its beginning on. It lives as long as a tensor in it."""

    def __init__(self, n_bytes: int) -> None:
        self._map = mmap.mmap(-1, n_bytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._taken = -self._bytes.data_ptr() % LARGE_PAGE  # what lies before is never written
        self._end = self._taken + n_bytes
        if whole := n_bytes // LARGE_PAGE * LARGE_PAGE:  # beyond them a large page would be more than was asked for
            with contextlib.suppress(OSError):  # a system without large pages
                self._map.madvise(mmap.MADV_HUGEPAGE, self._taken, whole)

    @property
    def n_left(self) -> int:
        return self._end - self._taken

    def take(self, n_bytes: int) -> Tensor:
        begin = self._taken
        self._taken = begin + -(-n_bytes // ALIGNMENT) * ALIGNMENT
        return self._bytes[begin : begin + n_bytes]

    def give_back_rest(self) -> None:
        begin = -(-self._taken // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin < len(self._map):
            self._map.madvise(mmap.MADV_DONTNEED, begin, len(self._map) - begin)
