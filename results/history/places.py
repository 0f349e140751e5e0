"""Where a stretch of points could split, how far apart the parts are there, and how rare that is.

x_i: points, w_i: their weights. A place is (t, k): parts [0, t) and [t, k). S(t, k) sums w_i w_j |x_i - x_j| over i < t
and j < k, W_k the weights before k. With J_k = S(k, k) / W_k the distance of `results.history.changes` is

    Q(t, k) = (2 S(t, k) - W_k J_t - W_t J_k) / (W_k - W_t)

of all places at once, from one table of S.

**Ties.** Points of few values (scores, counts) have many orders of the very same Q, and rounding tells these apart. S
is a sum of terms that are not negative, over at most n of them each way: with the roundings of W, Q is right to
8 n eps S(n, n) / W, W the four lightest weights together. Two of them that differ by no more than twice that are equal:
such a shuffling reaches Q, and of such places the first one is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Order = NDArray[np.intp]

P_VALUE: Final = 0.001
LEAST_SEGMENT: Final = 4
SHUFFLES: Final = 1000
"""As few as can tell: where none of them reaches Q, the share is taken for (1 + 0) / (1 + 1000) (Davison and Hinkley
1997, section 4.2), and that is below `P_VALUE`. One that reaches it decides too: 2 / 1001 is not."""
BLOCK: Final = 20
"""Rows that are summed at once: a running sum of a matrix waits for each of its additions."""
ROWS: Final = 64
"""Of places that are looked at at once, so that they stay in the processor's cache."""


class Shuffler(Protocol):
    def permutation(self, x: int) -> Order: ...


class Places:
    """Of a stretch of at least two segments."""

    def __init__(self, x: Array, weights: Array) -> None:
        n = len(x)
        size = -(-n // BLOCK) * BLOCK
        self._n, self._weights, self._padding = n, weights, np.arange(n, size)
        self._distances = np.zeros((size, size))
        self._distances[:n, :n] = np.abs(x[:, None] - x[None, :]) * (weights[:, None] * weights[None, :])
        self._sums, self._turned = np.empty((size, size)), np.empty((size, size))
        self._q, self._other = np.empty(ROWS * size), np.empty(ROWS * size)
        lightest = float(np.sort(weights)[:LEAST_SEGMENT].sum())
        self._tie = 16 * n * float(np.finfo(np.float64).eps) * float(self._distances.sum()) / lightest

    def best(self) -> tuple[float, int, int]:
        """(Q, t, k) of the largest Q; 0 where all points are alike."""
        order = np.arange(self._n)
        largest = self._largest(order)
        if largest <= self._tie:
            return 0.0, LEAST_SEGMENT, self._n
        for first, q in self._of_places():
            row, column = divmod(int(np.argmax(q >= largest - self._tie)), q.shape[1])
            if q[row, column] >= largest - self._tie:
                return largest, first + row, first + LEAST_SEGMENT + column
        raise AssertionError("the largest is at no place")

    def reaches(self, order: Order, q: float) -> bool:
        """Whether the points in this order have so large a Q somewhere."""
        return self._largest(order) >= q - self._tie

    def is_rare(self, q: float, t: int, k: int, rng: Shuffler) -> bool:
        """Whether fewer than `P_VALUE` of all orders have so large a Q as this one has at (t, k).

        Orders that differ only within the parts have the same Q there. Where these are as many already, no other is
        looked at: of 13 points none is rare. Else `SHUFFLES` orders are drawn, and the first that reaches Q ends it.
        """
        n = self._n
        alike = math.lgamma(t + 1) + math.lgamma(k - t + 1) + math.lgamma(n - k + 1) - math.lgamma(n + 1)
        # Of two parts, either may come first.
        if alike + math.log(2 if k == n else 1) >= math.log(P_VALUE):
            return False
        return not any(self.reaches(rng.permutation(n), q) for _ in range(SHUFFLES))

    def _largest(self, order: Order) -> float:
        self._sum(order)
        return max(float(q.max()) for _, q in self._of_places())

    def _sum(self, order: Order) -> None:
        """S of the points in this order: the running sum of rows, turned, and again."""
        padded = np.concatenate([order, self._padding])
        self._weights_before = np.cumsum(self._weights[order])
        np.take(self._distances, padded, axis=0, out=self._sums, mode="clip")
        _sum_down(self._sums)
        np.copyto(self._turned, self._sums.T)
        np.take(self._turned, padded, axis=0, out=self._sums, mode="clip")
        _sum_down(self._sums)

    def _of_places(self) -> Iterator[tuple[int, Array]]:
        """(first, Q of t = first + row and k = first + LEAST_SEGMENT + column), in turn, in one and the same memory."""
        n, sums, weights = self._n, self._sums, self._weights_before
        own = np.diagonal(sums)[:n] / weights
        for first in range(LEAST_SEGMENT, n - LEAST_SEGMENT + 1, ROWS):
            end = min(first + ROWS, n - LEAST_SEGMENT + 1)
            t, k = slice(first - 1, end - 1), slice(first + LEAST_SEGMENT - 1, n)
            shape = end - first, n - first - LEAST_SEGMENT + 1
            q, other = (memory[: shape[0] * shape[1]].reshape(shape) for memory in (self._q, self._other))
            np.multiply(sums[t, k], 2, out=q)
            q -= np.multiply(own[t, None], weights[None, k], out=other)
            q -= np.multiply(weights[t, None], own[None, k], out=other)
            np.subtract(weights[None, k], weights[t, None], out=other)
            # Behind t lies a whole segment; elsewhere Q is 0.
            other[:, : shape[0]][np.tri(shape[0], min(shape), -1, dtype=np.bool_)] = np.inf
            q /= other
            yield first, q


def _sum_down(matrix: Array) -> None:
    """Each row becomes the sum of all up to it."""
    blocks = matrix.reshape(-1, BLOCK, matrix.shape[1])
    for i in range(1, BLOCK):
        np.add(blocks[:, i - 1], blocks[:, i], out=blocks[:, i])
    blocks[1:] += np.cumsum(blocks[:-1, -1:], axis=0)
