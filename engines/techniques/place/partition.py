"""Which of the experts of a step run on the GPU, given what each costs there and elsewhere.

    least_sum     each where it costs less
    least_max     the two units work side by side: the slower of them shall end as early as can be
    least_split   the heaviest h on the GPU, the rest where they lie: h of the least max(GPU, busiest of the others)

The least max of two unlike units is the partition problem. Up to EXACT_UP_TO experts all subsets are tried, which is
every decode step of one token; beyond, experts are ordered by what the other unit costs over what the GPU costs, the
best cut is taken, and single experts change sides, or two change places, while that helps. `tests/test_partition.py`
holds it against all subsets and shows the gap.

Legend: X experts that have rows, S ways to divide them, N units that are not the GPU, H experts on the GPU, T steps.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.calls import Integers

Seconds = NDArray[np.float64]
Booleans = NDArray[np.bool_]
EXACT_UP_TO = 10
"""Experts: 1024 subsets, some 20 us."""
FEW = 16
"""Experts: numbers one by one take less time than arrays."""


def least_sum(gpu_X: Seconds, other_X: Seconds) -> Booleans:
    """Whether each runs on the GPU. Equal costs: there."""
    return gpu_X <= other_X


def least_max(gpu_X: Seconds, other_X: Seconds) -> Booleans:
    """Whether each runs on the GPU. Finite costs."""
    if len(gpu_X) > EXACT_UP_TO:
        return nearly_least_max(gpu_X, other_X)
    is_on_gpu_SX, is_elsewhere_SX = _subsets(len(gpu_X))
    took_S = np.maximum(is_on_gpu_SX @ gpu_X, is_elsewhere_SX @ other_X)
    best_X: Booleans = is_on_gpu_SX[took_S.argmin()] > 0
    return best_X


@cache
def _subsets(n: int) -> tuple[Seconds, Seconds]:
    """[2^n, n], 1 for those in it, and the same of those that are not; the first has all."""
    is_out = ((np.arange(2**n)[:, None] >> np.arange(n)) & 1).astype(np.float64)
    return 1 - is_out, is_out


def nearly_least_max(gpu_X: Seconds, other_X: Seconds) -> Booleans:
    """The best cut of the order by ratio, mended while a single change helps."""
    order_X = np.argsort(np.arctan2(gpu_X, other_X), kind="stable")  # by their ratio
    on_gpu_H = np.concatenate([[0.0], gpu_X[order_X].cumsum()])
    elsewhere_H = np.concatenate([other_X[order_X][::-1].cumsum()[::-1], [0.0]])
    is_on_gpu_X = np.zeros(len(gpu_X), dtype=np.bool_)
    is_on_gpu_X[order_X[: np.maximum(on_gpu_H, elsewhere_H).argmin()]] = True
    took = Took(float(gpu_X[is_on_gpu_X].sum()), float(other_X[~is_on_gpu_X].sum()))
    while True:
        change = _best_change(is_on_gpu_X, gpu_X, other_X, took)
        if change is None:
            return is_on_gpu_X
        changed_X, after = change
        if max(after) >= max(took) * (1 - 1e-12):  # no rounding error counts as help
            return is_on_gpu_X
        is_on_gpu_X[changed_X] = ~is_on_gpu_X[changed_X]
        took = after


class Took(NamedTuple):
    """Seconds."""

    gpu: float
    other: float


def _best_change(is_on_gpu_X: Booleans, gpu_X: Seconds, other_X: Seconds, took: Took) -> tuple[list[int], Took] | None:
    """The expert that goes over, or the two that change places, after which the slower unit ends earliest."""
    here, there = is_on_gpu_X.nonzero()[0], (~is_on_gpu_X).nonzero()[0]
    # Nobody, or one of each side: row and column 0 stand for nobody.
    leaves_gpu, comes_gpu = np.append(0.0, gpu_X[here])[:, None], np.append(0.0, gpu_X[there])
    comes_other, leaves_other = np.append(0.0, other_X[here])[:, None], np.append(0.0, other_X[there])
    after_gpu, after_other = took.gpu - leaves_gpu + comes_gpu, took.other + comes_other - leaves_other
    after = np.maximum(after_gpu, after_other)
    row, column = np.unravel_index(after.argmin(), after.shape)
    changed = [int(x) for x in (*here[row - 1 : row], *there[column - 1 : column])]
    return (changed, Took(float(after_gpu[row, column]), float(after_other[row, column]))) if changed else None


def least_split(gpu_X: Seconds, other_X: Seconds, home_X: Integers, n_others: int) -> int:
    """How many of the first experts run on the GPU; equal times: the fewest. home_X: the other unit of each."""
    if len(gpu_X) <= FEW:
        return _least_split_of_few(gpu_X.tolist(), other_X.tolist(), home_X.tolist(), n_others)
    return int(least_splits(gpu_X[None], other_X[None], home_X[None], n_others)[0])


def least_splits(gpu_TX: Seconds, other_TX: Seconds, home_TX: Integers, n_others: int) -> Integers:
    """The same of many steps at once, T of them, that all have as many experts."""
    n_steps, n_experts = gpu_TX.shape
    on_gpu_TH = np.concatenate([np.zeros((n_steps, 1)), gpu_TX.cumsum(1)], axis=1)
    other_TXN = np.zeros((n_steps, n_experts + 1, n_others))
    np.put_along_axis(other_TXN[:, :-1], home_TX[:, :, None], other_TX[:, :, None], axis=2)
    busiest_TH = other_TXN[:, ::-1].cumsum(1)[:, ::-1].max(2)
    found_T: Integers = np.maximum(on_gpu_TH, busiest_TH).argmin(1)
    return found_T


def _least_split_of_few(gpu_X: list[float], other_X: list[float], home_X: list[int], n_others: int) -> int:
    left_N, busiest_H = [0.0] * n_others, [0.0]
    for other, home in zip(reversed(other_X), reversed(home_X), strict=True):
        left_N[home] += other
        busiest_H.append(max(busiest_H[-1], left_N[home]))
    found, on_gpu, least = 0, 0.0, busiest_H.pop()
    for h, gpu in enumerate(gpu_X, 1):
        on_gpu += gpu
        took = max(on_gpu, busiest_H.pop())
        if took < least:
            found, least = h, took
    return found
