"""Sums over the processes of one machine, through memory that they share: the kernels' end of it.

Legend: N ranks, L sparse layers, E experts.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from engines.kernels.library import library
from engines.kernels.tables import int64s, serves

LINE = 64


class _Exchange(ctypes.Structure):
    """`struct Exchange` of exchange.h."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("n_ranks", ctypes.c_int64),
        ("most_values", ctypes.c_int64),
        ("turn", ctypes.c_uint64),
        ("limit_s", ctypes.c_double),
        ("local_LE", ctypes.c_void_p),
        ("splits_attention", ctypes.c_int32),
        ("holders_LE", ctypes.c_void_p),
        ("takers", ctypes.c_void_p),
    )


class _Holders(ctypes.Structure):
    """`struct Exchange::Holders`."""

    _fields_ = (("first", ctypes.c_int64), ("n", ctypes.c_int64))


class RankLostError(RuntimeError):
    """A rank of a sum is gone, or took too long."""


class SharedSums:
    """One rank's end. All ranks add up the same sums in the same order."""

    def __init__(self, path: Path, rank: int, n_ranks: int, most_values: int, limit_s: float) -> None:
        """path: a file of the same sizes for all, of zeros when the first one comes. most_values: of one sum.
        limit_s: so long a rank is waited for. Raises `OSError`."""
        self.most_values = most_values
        with path.open("r+b") as file:
            self._mapping = mmap.mmap(file.fileno(), file_bytes(n_ranks, most_values))
        self._first = ctypes.c_uint64.from_buffer(self._mapping)
        address = ctypes.addressof(self._first)
        self._struct = _Exchange(address, rank, n_ranks, most_values, 0, limit_s, None, 0, None, None)
        self._kept: tuple[object, ...] = ()
        kernels = library()
        assert kernels is not None  # `SharedSums` are made where they are
        self._kernels = kernels
        helpers = kernels.joulebench_helpers(ctypes.byref(self._struct))
        self._end_helpers = weakref.finalize(self, _end_helpers, kernels, helpers, self._first)

    def add_up(self, values: Tensor) -> None:
        """In place. `serves(values)` must hold. Raises `RankLostError`."""
        assert serves(values)
        assert values.numel() <= self.most_values
        if not self._kernels.joulebench_sum(ctypes.byref(self._struct), values.data_ptr(), values.numel()):
            raise RankLostError("a rank of a sum is gone")

    def of_step(
        self,
        local_LE: Sequence[Sequence[int]],
        splits_attention: bool,
        holders_LE: Sequence[Sequence[tuple[int, ...]]] | None = None,
    ) -> object:
        """What a decode step in one call of the kernels adds up with (`Decoder.step`). local_LE: where each expert of
        each sparse layer stands among this rank's; -1: elsewhere. splits_attention: each rank computes its heads, for
        all. holders_LE: the ranks that have an expert; a token's experts of the same ranks are dealt to them in turn,
        by number. None: every rank computes what it has."""
        local = int64s([number for local_E in local_LE for number in local_E])
        self._struct.local_LE, self._struct.splits_attention = ctypes.addressof(local), splits_attention
        self._struct.holders_LE = self._struct.takers = None
        self._kept = (local,)
        if holders_LE is not None:
            takers, first_of = list[int](), dict[tuple[int, ...], int]()
            for ranks in (ranks for holders_E in holders_LE for ranks in holders_E):
                if ranks not in first_of:
                    first_of[ranks] = len(takers)
                    takers += ranks
            holders = [_Holders(first_of[ranks], len(ranks)) for holders_E in holders_LE for ranks in holders_E]
            held, in_turn = (_Holders * len(holders))(*holders), int64s(takers)
            self._struct.holders_LE, self._struct.takers = ctypes.addressof(held), ctypes.addressof(in_turn)
            self._kept = local, held, in_turn
        return ctypes.byref(self._struct)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside of it this thread waits, and the other ranks may compute on its core."""
        self._kernels.joulebench_lend(ctypes.byref(self._struct))
        try:
            yield
        finally:
            self._kernels.joulebench_take_back(ctypes.byref(self._struct))

    def leave(self) -> None:
        """No rank waits for another from now on: whoever waits is told that one is lost."""
        self._first.value = 1
        self._end_helpers()


def _end_helpers(kernels: ctypes.CDLL, helpers: int, kept: object) -> None:
    """kept: holds the memory in which they look."""
    kernels.joulebench_end_helpers(helpers)


def file_bytes(n_ranks: int, most_values: int) -> int:
    """Of the file that ranks share."""
    box = -(-4 * most_values // LINE) * LINE
    return LINE + n_ranks * (LINE + 2 * box)
