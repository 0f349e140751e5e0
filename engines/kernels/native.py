"""The kernels of `narrow.cpp` on torch tensors: products of one to eight rows with a matrix as wide as it is stored.

Where `serves` says no (another device, more rows, an odd layout, no compiler) the caller computes with torch.

Legend: T tokens, H hidden, N outputs, E experts, J = 2I gate and up together, I expert width, R rows of all calls,
C expert calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from engines.kernels.compile import library
from engines.quantised import QuantisedMatrix

MAX_ROWS = 8
"""Of one product. Beyond, a GEMM that reads each weight once for many rows is faster, even after widening it."""

# Numbers of `enum Format` in narrow.cpp.
_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INT8, _INT4 = 3, 4

Matrix = Tensor | QuantisedMatrix


def serves(x: Tensor, *matrices: Matrix) -> bool:
    """Whether the kernels can multiply rows of x, [T, H] with T up to 8 per product, with these matrices."""
    if x.dtype is not torch.float32 or not x.is_cpu or not x.is_contiguous() or library() is None:
        return False
    return all(isinstance(m, QuantisedMatrix) or _is_plain(m) for m in matrices)


def _is_plain(matrix: Tensor) -> bool:
    return matrix.dtype in _FORMATS and matrix.is_cpu and matrix.is_contiguous()


def linear(x_TH: Tensor, weight: Matrix, bias_N: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias for 1 to 8 rows; `serves` must hold."""
    (n_tokens, hidden), (n_outputs, n_columns) = x_TH.shape, weight.shape
    assert 1 <= n_tokens <= MAX_ROWS
    assert hidden == n_columns
    assert bias_N is None or (bias_N.is_contiguous() and bias_N.dtype is torch.float32 and len(bias_N) == n_outputs)
    out_TN = torch.empty(n_tokens, n_outputs)
    values, scales, number, group_bits = _described(weight)
    _kernels().joulebench_linear(
        values,
        scales,
        number,
        group_bits,
        n_outputs,
        hidden,
        x_TH.data_ptr(),
        n_tokens,
        None if bias_N is None else bias_N.data_ptr(),
        out_TN.data_ptr(),
        torch.get_num_threads(),
    )
    return out_TN


def mix(
    hidden_TH: Tensor,
    gate_up_EJH: Matrix,
    down_EHI: Matrix,
    experts_C: Sequence[int],
    rows_C: Sequence[int],
    token_R: Tensor,
    weight_R: Tensor,
) -> Tensor:
    """Weighted sum of SwiGLU experts, out_TH: call c runs expert experts_C[c] on the next rows_C[c] (1 to 8) rows.

    Row r is token token_R[r], and its result is added to that token times weight_R[r]. `serves` must hold; both stacks
    are stored alike.
    """
    n_tokens, hidden = hidden_TH.shape
    assert gate_up_EJH.shape[-1] == down_EHI.shape[-2] == hidden
    assert all(1 <= n <= MAX_ROWS for n in rows_C)
    assert sum(rows_C) == len(token_R) == len(weight_R)
    assert token_R.is_contiguous()
    assert weight_R.is_contiguous()
    assert weight_R.dtype is torch.float32
    firsts = [0]
    for n_rows in rows_C:
        firsts.append(firsts[-1] + n_rows)
    n_calls = len(experts_C)
    out_TH = torch.empty_like(hidden_TH)
    gate_up, gate_up_scales, number, group_bits = _described(gate_up_EJH)
    down, down_scales, down_number, down_group_bits = _described(down_EHI)
    assert (number, group_bits) == (down_number, down_group_bits)
    _kernels().joulebench_experts(
        gate_up,
        gate_up_scales,
        down,
        down_scales,
        number,
        group_bits,
        hidden,
        down_EHI.shape[-1],
        n_calls,
        (ctypes.c_int64 * n_calls)(*experts_C),
        (ctypes.c_int64 * (n_calls + 1))(*firsts),
        hidden_TH.data_ptr(),
        token_R.data_ptr(),
        weight_R.data_ptr(),
        n_tokens,
        out_TH.data_ptr(),
        torch.get_num_threads(),
    )
    return out_TH


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension; x and weight fp32 and contiguous, `serves(x)` must hold."""
    width = x.shape[-1]
    assert weight.shape == (width,)
    assert serves(weight)
    out = torch.empty_like(x)
    _kernels().joulebench_rms_norm(x.data_ptr(), x.numel() // width, width, weight.data_ptr(), eps, out.data_ptr())
    return out


def can_attend(query_NTD: Tensor, key_MSD: Tensor, value_MSD: Tensor) -> bool:
    """One token, heads whose positions follow each other, features that fill registers."""
    return (
        query_NTD.shape[1] == 1
        and query_NTD.shape[-1] % 8 == 0
        and query_NTD.shape[-1] == value_MSD.shape[-1]
        and key_MSD.stride() == value_MSD.stride()
        and key_MSD.stride()[1:] == (key_MSD.shape[-1], 1)
        and key_MSD.dtype is value_MSD.dtype is torch.float32
        and serves(query_NTD)
    )


def attend(query_N1D: Tensor, key_MSD: Tensor, value_MSD: Tensor, scale: float) -> Tensor:
    """softmax(scale * q k) v of one token that sees all S positions, [N, 1, D]; `can_attend` must hold."""
    n_heads, _, dim = query_N1D.shape
    n_kv_heads, n_seen, _ = key_MSD.shape
    assert n_heads % n_kv_heads == 0
    out_N1D = torch.empty_like(query_N1D)
    _kernels().joulebench_attend(
        query_N1D.data_ptr(),
        key_MSD.data_ptr(),
        value_MSD.data_ptr(),
        key_MSD.stride(0),
        n_heads,
        n_kv_heads,
        n_seen,
        dim,
        scale,
        out_N1D.data_ptr(),
        torch.get_num_threads(),
    )
    return out_N1D


def _kernels() -> ctypes.CDLL:
    kernels = library()
    assert kernels is not None  # `serves` said so
    return kernels


def _described(matrix: Matrix) -> tuple[int, int | None, int, int]:
    """Address of values, address of scales, format number, log2 of an int4 group's columns."""
    if isinstance(matrix, Tensor):
        return matrix.data_ptr(), None, _FORMATS[matrix.dtype], 0
    values, scales = matrix.values.data_ptr(), matrix.scales.data_ptr()
    if matrix.group is None:
        return values, scales, _INT8, 0
    return values, scales, _INT4, matrix.group.bit_length() - 1
