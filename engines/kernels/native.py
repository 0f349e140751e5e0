"""The kernels of `kernels.cpp` on torch tensors: what a layer computes, with weights as wide as they are stored.

Where `serves` says no (another device, an odd layout, no compiler) the caller computes with torch.

Legend: T tokens, H hidden, N outputs, E experts, K experts per token, R rows of all calls, C expert calls; in attention
N query heads, M key/value heads, S positions of the cache, D features of a head, P pairs of turned features.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.kernels.compile import FLAGS_VARIABLE, lacks_bf16
from engines.kernels.library import library, loaded
from engines.model.quantised import Arithmetic, Matrix, QuantisedMatrix

# Numbers of `enum Format` and `enum Arithmetic` in matrix.h.
_PLAIN_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_QUANTISED_FORMATS = {"bf16": 1, "int8": 3, "fp8": 4, "int4": 5, "mxfp4": 6}
_ARITHMETICS: dict[Arithmetic, int] = {"fp32": 0, "int8": 1, "bf16": 2}
MAX_HEAD_DIM = 512


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
    kept: tuple[object, ...]
    """Owners of the memory that the table points into."""

    @functools.cached_property
    def address(self) -> int:
        return self.chunks_LSX.ctypes.data

    def of(self, table: AttentionTable, layer: int, n_tokens: int) -> tuple[int, int]:
        """Address and number of a layer's."""
        assert (self.n_kv_heads, self.dim) == (table.layer.n_kv_heads, table.layer.dim)
        assert self.n_tokens == n_tokens
        return self.address + layer * self.chunks_LSX.strides[0], self.chunks_LSX.shape[1]


def serves(*tensors: Tensor) -> bool:
    """Whether the kernels read these activations and vectors: fp32, on the CPU, contiguous."""
    return library() is not None and all(t.dtype is torch.float32 and t.is_cpu and t.is_contiguous() for t in tensors)


@functools.cache
def why_not_bf16() -> str | None:
    """Why nothing here multiplies bf16 by itself; None where the kernels do."""
    kernels = library()
    if kernels is None:
        return f"there are no kernels, and torch would only imitate it ({loaded().reason})"
    if kernels.joulebench_multiplies_bf16():
        return lacks_bf16()
    if FLAGS_VARIABLE in os.environ:
        return lacks_bf16() or f"{FLAGS_VARIABLE} holds the kernels to less than AVX-512 BF16"
    return lacks_bf16() or "the kernels were built without AVX-512 BF16, which this processor or its compiler lacks"


def reads(matrix: Matrix) -> bool:
    """Whether the kernels read this matrix."""
    if isinstance(matrix, QuantisedMatrix):
        return matrix.values.is_cpu and (matrix.arithmetic != "bf16" or why_not_bf16() is None)
    return matrix.dtype in _PLAIN_FORMATS and matrix.is_cpu and matrix.is_contiguous()


def linear(x_TH: Tensor, weight: Matrix, bias_N: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; `serves` and `reads` must hold."""
    (n_tokens, hidden), (n_outputs, n_columns) = x_TH.shape, weight.shape
    assert n_tokens
    assert hidden == n_columns
    assert bias_N is None or (serves(bias_N) and len(bias_N) == n_outputs)
    out_TN = torch.empty(n_tokens, n_outputs)
    _kernels().joulebench_linear(
        ctypes.byref(described(weight)),
        x_TH.data_ptr(),
        n_tokens,
        address(bias_N),
        out_TN.data_ptr(),
        torch.get_num_threads(),
    )
    return out_TN


def rows(matrix: Matrix, row_T: Tensor, scale: float = 1.0) -> Tensor:
    """matrix[row_T] in fp32, times scale; `reads` must hold. Raises IndexError, as torch does."""
    n_rows, n_columns = matrix.shape
    assert row_T.dtype is torch.int64
    assert row_T.is_cpu
    assert row_T.is_contiguous()
    out_TN = torch.empty(len(row_T), n_columns)
    is_whole = _kernels().joulebench_rows(
        ctypes.byref(described(matrix)), row_T.data_ptr(), len(row_T), scale, out_TN.data_ptr(), torch.get_num_threads()
    )
    if not is_whole:
        beyond = next(row for row in row_T.tolist() if not 0 <= row < n_rows)
        raise IndexError(f"a matrix of {n_rows} rows has no row {beyond}")
    return out_TN


def gated(shared_TH: Tensor, x_TH: Tensor, gate_1H: Tensor) -> Tensor:
    """What a shared expert gives, times the sigmoid of x @ gate.T; `serves(shared, x)` and `reads(gate)` must hold."""
    (n_tokens, width), hidden = shared_TH.shape, x_TH.shape[1]
    assert len(x_TH) == n_tokens > 0
    assert gate_1H.shape == (1, hidden)
    out_TH = torch.empty_like(shared_TH)
    _kernels().joulebench_gate(
        ctypes.byref(described(gate_1H)),
        x_TH.data_ptr(),
        n_tokens,
        shared_TH.data_ptr(),
        width,
        out_TH.data_ptr(),
        torch.get_num_threads(),
    )
    return out_TH


def largest(x_N: Tensor) -> tuple[float, int]:
    """The largest number, NaN where one is none, and where it stands first. `serves(x)` must hold."""
    assert len(x_N)
    value = ctypes.c_float()
    best = _kernels().joulebench_largest(x_N.data_ptr(), len(x_N), ctypes.byref(value))
    return value.value, best


def expert_table(experts: Sequence[tuple[Matrix, Matrix, Matrix]]) -> ExpertTable | None:
    """Of each expert's gate, up and down; None where the kernels cannot read one of them."""
    kept = tuple(matrix for one in experts for matrix in one)
    if library() is None or not all(map(reads, kept)):
        return None
    return ExpertTable((MatrixStruct * len(kept))(*map(described, kept)), kept, experts[0][0].shape[1])


def mix(
    hidden_TH: Tensor,
    experts: ExpertTable,
    experts_C: Sequence[int],
    rows_C: Sequence[int],
    token_R: Tensor,
    weight_R: Tensor,
    made: tuple[int, int] | None = None,
    onto_TH: Tensor | None = None,
) -> Tensor:
    """Weighted sum of SwiGLU experts, out_TH: call c runs expert experts_C[c] on the next rows_C[c] rows.

    Row r is token token_R[r], -1 for padding, and its result is added to that token times weight_R[r]. `serves` must
    hold. made: calls [first, end) are made now, and no other expert is read. onto_TH: what the calls before them gave,
    to which theirs is added in place; all parts together give what one call gives, bit for bit.
    """
    n_tokens, hidden = hidden_TH.shape
    assert experts.hidden == hidden
    assert all(n >= 1 for n in rows_C)
    assert sum(rows_C) == len(token_R) == len(weight_R)
    assert token_R.is_contiguous()
    assert serves(weight_R)
    firsts = [0]
    for n_rows in rows_C:
        firsts.append(firsts[-1] + n_rows)
    n_calls = len(experts_C)
    out_TH = torch.empty_like(hidden_TH) if onto_TH is None else onto_TH
    _kernels().joulebench_experts(
        experts.matrices,
        n_calls,
        (ctypes.c_int64 * n_calls)(*experts_C),
        (ctypes.c_int64 * (n_calls + 1))(*firsts),
        hidden_TH.data_ptr(),
        token_R.data_ptr(),
        weight_R.data_ptr(),
        n_tokens,
        out_TH.data_ptr(),
        *((0, n_calls) if made is None else made),
        torch.get_num_threads(),
    )
    return out_TH


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension; `serves(x, weight)` must hold."""
    width = x.shape[-1]
    assert weight.shape == (width,)
    out = torch.empty_like(x)
    _kernels().joulebench_rms_norm(
        x.data_ptr(), x.numel() // width, width, weight.data_ptr(), eps, out.data_ptr(), torch.get_num_threads()
    )
    return out


def add(a: Tensor, b: Tensor) -> Tensor:
    """Of the same shape; `serves(a, b)` must hold."""
    assert a.shape == b.shape
    out = torch.empty_like(a)
    _kernels().joulebench_add(a.data_ptr(), b.data_ptr(), a.numel(), out.data_ptr(), torch.get_num_threads())
    return out


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
) -> AttentionTable | None:
    """norms: of each head's query and key, with their epsilon. window: positions that a query sees, None for all.

    None where the kernels cannot read a matrix or the heads do not fill registers.
    """
    matrices = (q_QH, k_MH, v_MH, out_HQ)
    vectors = (*biases, *(norms[:2] if norms is not None else (None, None)), sinks_N)
    fits = head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM
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
    )
    return AttentionTable(layer, (*matrices, *vectors), q_QH.shape[1])


def attend(
    x_TH: Tensor,
    table: AttentionTable,
    cos_TP: Tensor | None,
    sin_TP: Tensor | None,
    chunks: ChunkTable,
    layer: int,
) -> Tensor:
    """The attention block of the tokens of some sequences: writes their keys and values and returns its output.

    layer: whose keys and values these are. cos, sin: None where it turns nothing. `serves(x)` must hold.
    """
    n_tokens, hidden = x_TH.shape
    assert hidden == table.hidden
    out_TH = torch.empty_like(x_TH)
    _kernels().joulebench_attention(
        ctypes.byref(table.layer),
        x_TH.data_ptr(),
        n_tokens,
        *_turns(cos_TP, sin_TP, n_tokens),
        *chunks.of(table, layer, n_tokens),
        out_TH.data_ptr(),
        torch.get_num_threads(),
    )
    return out_TH


def project(
    x_TH: Tensor, table: AttentionTable, cos_TP: Tensor | None, sin_TP: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The first half of `attend`: query_TQ, key_TM and value_TM, normed and turned, head behind head."""
    n_tokens, hidden = x_TH.shape
    assert hidden == table.hidden
    one = table.layer
    made = [torch.empty(n_tokens, n_heads * one.dim) for n_heads in (one.n_heads, one.n_kv_heads, one.n_kv_heads)]
    _kernels().joulebench_project(
        ctypes.byref(one),
        x_TH.data_ptr(),
        n_tokens,
        *_turns(cos_TP, sin_TP, n_tokens),
        *(part.data_ptr() for part in made),
        torch.get_num_threads(),
    )
    query_TQ, key_TM, value_TM = made
    return query_TQ, key_TM, value_TM


def attend_cached(query_TQ: Tensor, table: AttentionTable, chunks: ChunkTable, layer: int) -> Tensor:
    """The second half: the block's output, with keys and values of all these tokens in the caches."""
    n_tokens = len(query_TQ)
    assert serves(query_TQ)
    assert query_TQ.shape[1] == table.layer.n_heads * table.layer.dim
    out_TH = torch.empty(n_tokens, table.hidden)
    _kernels().joulebench_attend(
        ctypes.byref(table.layer),
        query_TQ.data_ptr(),
        n_tokens,
        *chunks.of(table, layer, n_tokens),
        out_TH.data_ptr(),
        torch.get_num_threads(),
    )
    return out_TH


def _turns(cos_TP: Tensor | None, sin_TP: Tensor | None, n_tokens: int) -> tuple[int | None, int | None, int]:
    if cos_TP is None or sin_TP is None:
        return None, None, 0
    assert cos_TP.shape == sin_TP.shape == (n_tokens, cos_TP.shape[1])
    assert serves(cos_TP, sin_TP)
    return cos_TP.data_ptr(), sin_TP.data_ptr(), cos_TP.shape[1]


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


def route(x_TH: Tensor, router: RouterTable) -> tuple[Tensor, Tensor]:
    """ids_TK and weights_TK; `serves(x)` must hold."""
    n_tokens, hidden = x_TH.shape
    assert hidden == router.hidden
    ids_TK = torch.empty(n_tokens, router.top_k, dtype=torch.int64)
    weights_TK = torch.empty(n_tokens, router.top_k)
    _kernels().joulebench_route(
        ctypes.byref(router.struct),
        x_TH.data_ptr(),
        n_tokens,
        ids_TK.data_ptr(),
        weights_TK.data_ptr(),
        torch.get_num_threads(),
    )
    return ids_TK, weights_TK


def _kernels() -> ctypes.CDLL:
    kernels = library()
    assert kernels is not None  # `serves` said so
    return kernels


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
