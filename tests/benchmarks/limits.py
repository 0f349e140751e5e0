"""What this machine can do at most: the rate of large GEMMs in each arithmetic, and of reading memory once through.

Each is the best of several ways, because a limit that one library misses would flatter whoever is compared with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engines.kernels import native, tables
from engines.model.quantised import Arithmetic, Form, store
from tests.benchmarks.llama_cpp import LlamaBench
from tests.benchmarks.race_models import prefill_flop
from tests.benchmarks.timing import Figure, Turns, between, instant, timed

GEMMS = ((2048, 2048, 2048), (4096, 1024, 4096))
"""Rows, columns shared, outputs: a square one, and one like those of a long prompt in the race."""
READ_SHAPE = (262144, 1024)
"""1 GiB of fp32: four times the third cache of a large server's processor."""
REPEATS = 3

Ways = dict[str, Callable[[], float]]
"""By name: what takes its rate (FLOP/s, bytes/s) once."""


@dataclass(frozen=True)
class DensePrefill:
    """A dense model of the race as llama.cpp's file."""

    llama: LlamaBench
    gguf: Path
    name: str
    n_prompt: int = 512

    def flop_per_s(self) -> float:
        return prefill_flop(self.name, self.n_prompt) / self.n_prompt * self.llama.prefill(self.gguf, self.n_prompt)


@dataclass(frozen=True)
class Limit:
    figure: Figure
    way: str


class Limits:
    """Measured in turn with the contenders; of a turn the best of a few repeats counts, of all turns the median."""

    def __init__(self, n_turns: int, gemms: Mapping[Arithmetic, Ways]) -> None:
        """gemms: see `gemm_ways`, for each arithmetic that is asked about."""
        self._n_turns = n_turns
        self._gemms, self._reads = gemms, read_ways()
        self._flop_per_s = {arithmetic: {way: Turns() for way in ways} for arithmetic, ways in gemms.items()}
        self._bytes_per_s = {way: Turns() for way in self._reads}

    def turn(self) -> None:
        for arithmetic, ways in self._gemms.items():
            taken(ways, self._flop_per_s[arithmetic])
        taken(self._reads, self._bytes_per_s)

    def flop_per_s(self, arithmetic: Arithmetic) -> Limit:
        return best(self._flop_per_s[arithmetic], self._n_turns)

    @property
    def bytes_per_s(self) -> Limit:
        return best(self._bytes_per_s, self._n_turns)


def taken(ways: Ways, rates: Mapping[str, Turns]) -> None:
    for name, rate in ways.items():
        before = instant()
        found = rate()
        rates[name].add(found, between(before, instant()).is_quiet)


def best(rates: Mapping[str, Turns], n_turns: int) -> Limit:
    figures = {way: turns.figure(n_turns) for way, turns in rates.items()}
    way = max(figures, key=lambda name: figures[name].median)
    return Limit(figures[way], way)


def rate_of(amount: int, work: Callable[[], object]) -> Callable[[], float]:
    """amount: of FLOP or bytes that the work does."""
    return lambda: amount / min(timed(work).seconds for _ in range(REPEATS))


# --- large products ---------------------------------------------------------------------------------------------------
# With the second matrix transposed, as every linear layer has it.

OUR_FORMS: dict[Arithmetic, tuple[Form, ...]] = {
    "fp32": ("fp32", "bf16", "int8"),
    "int8": ("int8", "int4-g32"),
    "bf16": ("bf16",),
}


Product = Callable[[], object]


def gemm_ways(arithmetic: Arithmetic, prefill: DensePrefill | None) -> Ways:
    """Of torch's library, of oneDNN, of our kernels, and of llama.cpp where it multiplies so."""
    ways = {way: rate_of(flop, work) for way, (flop, work) in large_products(arithmetic).items()}
    if prefill is not None:
        ways[f"llama.cpp, {prefill.gguf.stem}, {prefill.name}"] = prefill.flop_per_s
    return ways


def large_products(arithmetic: Arithmetic) -> dict[str, tuple[int, Product]]:
    """By name: of torch's library, of oneDNN and of our kernels, with the FLOP of each."""
    found = {}
    for m, k, n in GEMMS:
        a_MK, b_NK = torch.randn(m, k), torch.randn(n, k)
        products = {
            **libraries(arithmetic, a_MK, b_NK),
            **{f"our kernels, {form}": ours(a_MK, b_NK, form, arithmetic) for form in OUR_FORMS[arithmetic]},
        }
        for who, work in products.items():
            if work is not None:
                found[f"{who}, {m} x {k} x {n}"] = 2 * m * k * n, work
    return found


def products_of_shapes(arithmetic: Arithmetic, rows: Sequence[int], k: int, n: int) -> dict[str, tuple[int, Product]]:
    """By library: one product for each matrix of weights, with as many rows as are given for it, and the FLOP of all.

    Each has weights of its own, as experts have. A matrix without rows is left out.
    """
    works: dict[str, list[Product]] = defaultdict(list)
    for m in filter(None, rows):
        for who, work in libraries(arithmetic, torch.randn(m, k), torch.randn(n, k)).items():
            if work is not None:
                works[who].append(work)

    def all_of(products: list[Product]) -> Product:
        return lambda: [product() for product in products]

    return {who: (2 * sum(rows) * k * n, all_of(products)) for who, products in works.items()}


def ours(a_MK: Tensor, b_NK: Tensor, form: Form, arithmetic: Arithmetic) -> Product | None:
    if not tables.serves(a_MK):
        return None
    stored = store(b_NK, form, arithmetic)
    return lambda: native.linear(a_MK, stored)


def libraries(arithmetic: Arithmetic, a_MK: Tensor, b_NK: Tensor) -> dict[str, Product | None]:
    if arithmetic == "bf16":
        return {"oneDNN bf16": one_dnn(a_MK.bfloat16(), b_NK.bfloat16())}
    if arithmetic == "int8":
        return {"oneDNN int8": one_dnn_bytes(a_MK, b_NK)}
    out_MN = torch.empty(len(a_MK), len(b_NK))
    return {"torch": lambda: torch.mm(a_MK, b_NK.T, out=out_MN), "oneDNN": one_dnn(a_MK, b_NK)}


def one_dnn(a_MK: Tensor, b_NK: Tensor) -> Product | None:
    """The second matrix is laid out as oneDNN likes it, once, as it may be of weights."""
    if not torch.backends.mkldnn.is_available():
        return None
    laid_out = torch.ops.mkldnn._reorder_linear_weight(b_NK, len(a_MK))
    return lambda: torch.ops.mkldnn._linear_pointwise(a_MK, laid_out, None, "none", [], "")


def one_dnn_bytes(a_MK: Tensor, b_NK: Tensor) -> Product | None:
    """Bytes to floats: the input is rounded already, with one scale, so this does less than a layer must."""
    if "onednn" not in torch.backends.quantized.supported_engines:
        return None
    rounded_MK = torch.randint(0, 256, a_MK.shape, dtype=torch.uint8)
    weights = torch.randint(-127, 128, b_NK.shape, dtype=torch.int8)
    laid_out = torch.ops.onednn.qlinear_prepack(weights, list(a_MK.shape))
    scales_N, zeros_N = torch.ones(len(b_NK)), torch.zeros(len(b_NK), dtype=torch.int32)
    return lambda: torch.ops.onednn.qlinear_pointwise(
        rounded_MK, 1.0, 0, laid_out, scales_N, zeros_N, None, 1.0, 0, torch.float32, "none", [], ""
    )


# --- reading ----------------------------------------------------------------------------------------------------------


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
    if tables.serves(x_1H, matrix_NH):
        ways["our matrix-vector kernel"] = lambda: native.linear(x_1H, matrix_NH)
    return {name: rate_of(flat.nbytes, way) for name, way in ways.items()}
