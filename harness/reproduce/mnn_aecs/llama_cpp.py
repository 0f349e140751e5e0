"""How llama.cpp divides a token's work over unlike cores, and what a token of one model takes by that.

llama.cpp cuts a product of a matrix and one vector in pieces of 64 rows. Each thread takes the next piece when it is
done, so that a fast core takes more of them. A matrix of fewer than four pieces a thread is dealt out instead: each
thread gets as many rows, and the product takes as long as the slowest core. A barrier ends every product
(`ggml_compute_forward_mul_mat` of b4735, which the authors' public testbed builds).

Table 8 has llama.cpp on all eight cores of each Android phone. Qwen2.5-1.5B is 1536 wide: 24 pieces, dealt out. The
other models are 2048 or wider: 32 pieces, taken. So the anchor is slow where cores are unlike, and nowhere else.

A core's speed is its highest clock, and 0.4 of that on an efficiency core, as the search's model of a phone has had it
(`core_clusters`). Nothing here is fitted. Arithmetic binds, not memory: that is assumed. On the phones with efficiency
cores MNN reads the anchor's weights 1.7 to 2.3 times as fast; those of the wider models 1.2 to 1.9 times as fast, and
0.9 times in Llama3.2-3B on the Galaxy A56. Attention itself, norms and the width of the head's weights are left out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from devices.models.core_clusters import biggest_first, clusters_of, core_speed
from devices.models.sheet import load_sheet
from engines.pricing.model_shape import ModelShape
from harness.reproduce.ledger import ledger
from harness.reproduce.mnn_aecs.places import SHEETS, cores_row

ENGINE = "llama.cpp"
ROWS_A_PIECE = 64
PIECES_A_THREAD = 4
"""Of fewer, rows are dealt out."""


class Product(NamedTuple):
    """A matrix that a token meets: rows is the width of its result. times: how many such matrices."""

    times: int
    rows: int
    columns: int


def products(shape: ModelShape) -> Iterator[Product]:
    """Of a dense model."""
    queries, keys = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    yield Product(shape.n_layers, queries, shape.hidden)
    yield Product(2 * shape.n_layers, keys, shape.hidden)
    yield Product(shape.n_layers, shape.hidden, queries)
    yield Product(2 * shape.n_layers, shape.dense_width, shape.hidden)
    yield Product(shape.n_layers, shape.hidden, shape.dense_width)
    yield Product(1, shape.vocabulary, shape.hidden)


def seconds(product: Product, speeds: Sequence[float]) -> float:
    """Of one such matrix. speeds: weights a second of each thread's core."""
    n_pieces = math.ceil(product.rows / ROWS_A_PIECE)
    if n_pieces < PIECES_A_THREAD * len(speeds):
        return math.ceil(product.rows / len(speeds)) * product.columns / min(speeds)
    rows, left = math.ceil(product.rows / n_pieces), product.rows
    free_at = [(0.0, speed) for speed in speeds]
    while left > 0:
        at, speed = heapq.heappop(free_at)
        taken = min(rows, left)
        left -= taken
        heapq.heappush(free_at, (at + taken * product.columns / speed, speed))
    return max(at for at, _ in free_at)


def core_speeds(phone: str) -> tuple[float, ...]:
    """Of llama.cpp's threads, which take the biggest cores first."""
    clusters = clusters_of(load_sheet(SHEETS[phone]).clusters)
    taken = biggest_first(clusters, round(ledger().calibration(cores_row(ENGINE, phone))))
    return tuple(core_speed(cluster) for cluster, n in zip(clusters, taken, strict=True) for _ in range(n))


@cache
def token_seconds(phone: str, shape: ModelShape) -> float:
    """Of all its products, in an unknown unit: only ratios count."""
    speeds = core_speeds(phone)
    return sum(product.times * seconds(product, speeds) for product in products(shape))
