"""What the kernels of `kernels.cpp` read: matrices as wide as they are stored, and the tables of a layer's parts.

`engines.kernels.native` calls the kernels with them. A table is made once; where the kernels cannot read its weights
there is none, and the caller computes with torch.

Legend: H hidden, E experts, N query heads, Q = query heads * features, M = key/value heads * features, L layers,
S chunks, X numbers of a chunk.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.kernels.compile import BF16_NEEDS, BYTE_ATTENTION_NEEDS, FLAGS_VARIABLE, NATIVE, flags, lacks
from engines.kernels.library import library, loaded
from engines.model.quantised import Arithmetic, Matrix, QuantisedMatrix

# Numbers of `enum Format` and `enum Arithmetic` in matrix.h.
_PLAIN_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_QUANTISED_FORMATS = {"bf16": 1, "int8": 3, "fp8": 4, "int4": 5, "mxfp4": 6}
_ARITHMETICS: dict[Arithmetic, int] = {"fp32": 0, "int8": 1, "bf16": 2}
MAX_HEAD_DIM = 512
"""`kKeyColumns` of wide_rounded.h too."""


class MatrixStruct(ctypes.Structure):
    """`struct Matrix` of matrix.h. It does not keep the tensors alive that it points into."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("group_bits", ctypes.c_int32),
        ("arithmetic", ctypes.c_int32),
    )


class AttentionStruct(ctypes.Structure):
    """`struct AttentionLayer` of layer.h."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("q", "k", "v", "out")),
        *((name, ctypes.c_void_p) for name in ("q_bias", "k_bias", "v_bias", "out_bias", "q_norm", "k_norm", "sinks")),
        *((name, ctypes.c_int64) for name in ("n_heads", "n_kv_heads", "dim", "window")),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("neighbours", ctypes.c_int32),
        ("arithmetic", ctypes.c_int32),
        ("kept", ctypes.c_int32),
    )


class RouterStruct(ctypes.Structure):
    """`struct Router` of layer.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight_EH", "bias_E")),
        *((name, ctypes.c_int64) for name in ("hidden", "n_experts", "top_k")),
        *((name, ctypes.c_int32) for name in ("of_chosen", "normalise")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True)
class ExpertTable:
    """The matrices of a layer's experts as the kernels read them: gate, up and down of the first, then of the next."""

    matrices: ctypes.Array[MatrixStruct]
    kept: tuple[Matrix, ...]
    """Owners of the memory that the table points into."""
    hidden: int


@dataclass(frozen=True)
class AttentionTable:
    """One layer's attention as the kernels read it."""

    layer: AttentionStruct
    kept: tuple[Matrix | None, ...]
    hidden: int


@dataclass(frozen=True)
class RouterTable:
    """A router as the kernels read it."""

    struct: RouterStruct
    kept: tuple[Tensor | None, ...]
    hidden: int
    top_k: int


@dataclass(frozen=True)
class ChunkTable:
    """The new tokens of some sequences, whose rows follow one another, and where each layer has their keys and values:
    `struct Chunk` of layer.h, which is six numbers."""

    chunks_LSX: NDArray[np.int64]
    n_tokens: int
    n_kv_heads: int
    dim: int
    form: int
    """Of what is kept: of `enum Format`."""
    kept: tuple[object, ...]
    """Owners of the memory that the table points into."""

    @functools.cached_property
    def address(self) -> int:
        return self.chunks_LSX.ctypes.data

    def of(self, table: AttentionTable, layer: int, n_tokens: int) -> tuple[int, int]:
        """Address and number of a layer's."""
        assert (self.n_kv_heads, self.dim, self.form) == (table.layer.n_kv_heads, table.layer.dim, table.layer.kept)
        assert self.n_tokens == n_tokens
        return self.address + layer * self.chunks_LSX.strides[0], self.chunks_LSX.shape[1]


def serves(*tensors: Tensor) -> bool:
    """Whether the kernels read these activations and vectors: fp32, on the CPU, contiguous."""
    return library() is not None and all(t.dtype is torch.float32 and t.is_cpu and t.is_contiguous() for t in tensors)


@functools.cache
def why_not_bf16() -> str | None:
    """Why nothing here multiplies bf16 by itself; None where the kernels do."""
    return _why_not(BF16_NEEDS, "AVX-512 BF16 and VNNI", "joulebench_multiplies_bf16")


@functools.cache
def why_no_byte_attention() -> str | None:
    """Why attention multiplies no bytes here; None where the kernels do."""
    return _why_not(BYTE_ATTENTION_NEEDS, "AVX-512 VNNI", "joulebench_attends_by_bytes")


def _why_not(needs: Mapping[str, str], named: str, is_done: str) -> str | None:
    """is_done: the kernels' own word."""
    kernels = library()
    if kernels is None:
        return f"there are no kernels, and torch would only imitate it ({loaded().reason})"
    reason = lacks(needs)
    if reason or getattr(kernels, is_done)():
        return reason
    if [flag for flag in flags() if flag.startswith("-m")] == [NATIVE]:
        return f"the kernels were built without {named}, which this processor or its compiler lacks"
    return f"{FLAGS_VARIABLE} holds the kernels to less than {named}"


def reads(matrix: Matrix) -> bool:
    """Whether the kernels read this matrix."""
    if isinstance(matrix, QuantisedMatrix):
        return matrix.values.is_cpu and (matrix.arithmetic != "bf16" or why_not_bf16() is None)
    return matrix.dtype in _PLAIN_FORMATS and matrix.is_cpu and matrix.is_contiguous()


def expert_table(experts: Sequence[tuple[Matrix, Matrix, Matrix]]) -> ExpertTable | None:
    """Of each expert's gate, up and down; None where the kernels cannot read one of them."""
    kept = tuple(matrix for one in experts for matrix in one)
    if library() is None or not all(map(reads, kept)):
        return None
    return ExpertTable((MatrixStruct * len(kept))(*map(described, kept)), kept, experts[0][0].shape[1])


def fills_registers(head_dim: int) -> bool:
    return head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM


def attention_table(
    q_QH: Matrix,
    k_MH: Matrix,
    v_MH: Matrix,
    out_HQ: Matrix,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    norms: tuple[Tensor, Tensor, float] | None,
    sinks_N: Tensor | None,
    head_dim: int,
    window: int | None,
    scale: float,
    neighbours: bool,
    arithmetic: Arithmetic = "fp32",
    kept: torch.dtype = torch.float32,
) -> AttentionTable | None:
    """norms: of each head's query and key, with their epsilon. window: positions that a query sees, None for all.
    arithmetic: of what attention of more than one token multiplies. kept: the dtype of keys and values in
    caches.

    None where the kernels cannot read a matrix, do not multiply bf16 by itself or the heads do not fill registers.
    """
    matrices = (q_QH, k_MH, v_MH, out_HQ)
    vectors = (*biases, *(norms[:2] if norms is not None else (None, None)), sinks_N)
    why_not = {"bf16": why_not_bf16, "int8": why_no_byte_attention}.get(arithmetic)
    fits = fills_registers(head_dim) and (why_not is None or why_not() is None)
    if not fits or not all(map(reads, matrices)) or not serves(*(v for v in vectors if v is not None)):
        return None
    layer = AttentionStruct(
        *map(described, matrices),
        *map(address, vectors),
        q_QH.shape[0] // head_dim,
        k_MH.shape[0] // head_dim,
        head_dim,
        window or 0,
        scale,
        norms[2] if norms is not None else 0.0,
        neighbours,
        _ARITHMETICS[arithmetic],
        plain_format(kept),
    )
    return AttentionTable(layer, (*matrices, *vectors), q_QH.shape[1])


def router_table(
    weight_EH: Tensor, bias_E: Tensor | None, top_k: int, of_chosen: bool, normalise: bool, scale: float
) -> RouterTable | None:
    """of_chosen: softmax over the chosen experts, and not over all. None where the kernels cannot read the weights."""
    if not serves(weight_EH) or (bias_E is not None and not serves(bias_E)):
        return None
    n_experts, hidden = weight_EH.shape
    assert top_k <= n_experts
    struct = RouterStruct(address(weight_EH), address(bias_E), hidden, n_experts, top_k, of_chosen, normalise, scale)
    return RouterTable(struct, (weight_EH, bias_E), hidden, top_k)


def plain_format(dtype: torch.dtype) -> int:
    """Of `enum Format`."""
    return _PLAIN_FORMATS[dtype]


def int64s(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def described(matrix: Matrix) -> MatrixStruct:
    rows, columns = matrix.shape
    if isinstance(matrix, Tensor):
        return MatrixStruct(matrix.data_ptr(), None, rows, columns, _PLAIN_FORMATS[matrix.dtype], 0, 0)
    group_bits = 0 if matrix.group is None else matrix.group.bit_length() - 1
    number = _QUANTISED_FORMATS[matrix.kind]
    arithmetic = _ARITHMETICS[matrix.arithmetic]
    return MatrixStruct(
        matrix.values.data_ptr(), matrix.scales.data_ptr(), rows, columns, number, group_bits, arithmetic
    )
