"""What this machine can do at most: the rate of large GEMMs, and of reading memory once through.

Each is the best of several ways, because a limit that one library misses would flatter whoever is compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from engines.kernels import native
from tests.benchmarks.timing import Figure, Turns, between, instant, timed

GEMMS = ((2048, 2048, 2048), (4096, 1024, 4096))
"""Rows, columns shared, outputs: a square one, and one like those of a long prompt in the race."""
READ_SHAPE = (65536, 1024)
"""256 MiB of fp32: far beyond any cache."""
REPEATS = 3


@dataclass(frozen=True)
class Limit:
    figure: Figure
    way: str


class Limits:
    """Measured in turn with the contenders; of a turn the best of a few repeats counts, of all turns the median."""

    def __init__(self, n_turns: int) -> None:
        self._n_turns = n_turns
        self._gemms = gemm_ways()
        self._reads = read_ways()
        self._flop_per_s = {way: Turns() for way in self._gemms}
        self._bytes_per_s = {way: Turns() for way in self._reads}

    def turn(self) -> None:
        for ways, rates in ((self._gemms, self._flop_per_s), (self._reads, self._bytes_per_s)):
            for way, (amount, work) in ways.items():
                before = instant()
                fastest_s = min(timed(work).seconds for _ in range(REPEATS))
                rates[way].add(amount / fastest_s, between(before, instant()).is_quiet)

    @property
    def flop_per_s(self) -> Limit:
        return best(self._flop_per_s, self._n_turns)

    @property
    def bytes_per_s(self) -> Limit:
        return best(self._bytes_per_s, self._n_turns)


def best(rates: Mapping[str, Turns], n_turns: int) -> Limit:
    figures = {way: turns.figure(n_turns) for way, turns in rates.items()}
    way = max(figures, key=lambda name: figures[name].median)
    return Limit(figures[way], way)


Ways = dict[str, tuple[int, Callable[[], object]]]
"""By name: how much is done (FLOP, bytes), and what does it."""


def gemm_ways() -> Ways:
    """With the second matrix transposed, as every linear layer has it."""

    def way(m: int, k: int, n: int) -> tuple[int, Callable[[], object]]:
        a_MK, b_NK, out_MN = torch.randn(m, k), torch.randn(n, k), torch.empty(m, n)
        return 2 * m * k * n, lambda: torch.mm(a_MK, b_NK.T, out=out_MN)

    return {f"{m} x {k} x {n}": way(m, k, n) for m, k, n in GEMMS}


def read_ways() -> Ways:
    # numpy asks for huge pages, torch does not: with them a stream of reads misses fewer addresses.
    flat = np.empty(READ_SHAPE, np.float32).ravel()
    flat[:] = 1
    matrix_NH = torch.from_numpy(flat).view(READ_SHAPE)
    x_1H = torch.randn(1, READ_SHAPE[1])
    n_threads = torch.get_num_threads()
    pool, pieces = ThreadPoolExecutor(n_threads), np.array_split(flat, n_threads)
    ways: dict[str, Callable[[], object]] = {
        "torch sum": matrix_NH.sum,
        "torch integer sum": matrix_NH.view(torch.int64).sum,
        "torch matrix-vector product": lambda: torch.mv(matrix_NH, x_1H[0]),
        "numpy dot on each thread": lambda: list(pool.map(np.dot, pieces, pieces)),
    }
    if native.serves(x_1H, matrix_NH):
        ways["our matrix-vector kernel"] = lambda: native.linear(x_1H, matrix_NH)
    return {name: (flat.nbytes, way) for name, way in ways.items()}
