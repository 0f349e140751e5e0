"""The kernels of `kernels.cpp` on torch tensors: what a layer computes, with weights as wide as they are stored.

Where `tables.serves` says no (another device, an odd layout, no compiler) the caller computes with torch.

Legend: T tokens, H hidden, N outputs, K experts per token, R rows of all calls, C expert calls; in attention Q = query
heads * features, M = key/value heads * features, P pairs of turned features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from engines.kernels.library import library
from engines.kernels.tables import AttentionTable, ChunkTable, ExpertTable, RouterTable, address, described, serves
from engines.model.quantised import Matrix

Largest = tuple[float, int]
"""Of some numbers: the largest, NaN where one is none, and where it stands first."""


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


def largest(x_N: Tensor) -> Largest:
    """`serves(x)` must hold."""
    assert len(x_N)
    value = ctypes.c_float()
    best = _kernels().joulebench_largest(x_N.data_ptr(), len(x_N), ctypes.byref(value))
    return value.value, best


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


def attend(
    x_TH: Tensor,
    table: AttentionTable,
    cos_TP: Tensor | None,
    sin_TP: Tensor | None,
    chunks: ChunkTable,
    layer: int,
    keeps_only: bool = False,
) -> Tensor:
    """The attention block of the tokens of some sequences: writes their keys and values and returns its output.

    layer: whose keys and values these are. cos, sin: None where it turns nothing. `serves(x)` must hold. keeps_only:
    the same keys and values are written, and nothing else is computed; the output has no rows.
    """
    n_tokens, hidden = x_TH.shape
    assert hidden == table.hidden
    out_TH = torch.empty(0, hidden) if keeps_only else torch.empty_like(x_TH)
    _kernels().joulebench_attention(
        ctypes.byref(table.layer),
        x_TH.data_ptr(),
        n_tokens,
        *_turns(cos_TP, sin_TP, n_tokens),
        *chunks.of(table, layer, n_tokens),
        None if keeps_only else out_TH.data_ptr(),
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
