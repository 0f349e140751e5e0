"""The experts of one layer, and the torch reader of a dispatch plan.

Legend: T tokens, H hidden, I expert width, E experts, R rows of all expert calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.dispatch import DispatchPlan, Width
from engines.kernels import native
from engines.model.architecture import SWIGLU, GatedUnit
from engines.model.quantised import Matrix


@dataclass(frozen=True)
class GatedWeights:
    """One gated unit: an expert, a shared expert or a dense layer's feed-forward block.

    Matrices as they are stored, which may be parts of a mapped file; biases where the architecture has them.
    """

    gate_IH: Matrix
    up_IH: Matrix
    down_HI: Matrix
    gate_bias_I: Tensor | None = None
    up_bias_I: Tensor | None = None
    down_bias_H: Tensor | None = None

    @property
    def n_bytes(self) -> int:
        biases = (self.gate_bias_I, self.up_bias_I, self.down_bias_H)
        parts = (self.gate_IH, self.up_IH, self.down_HI, *(bias for bias in biases if bias is not None))
        return sum(part.nbytes for part in parts)

    @cached_property
    def table(self) -> native.ExpertTable | None:
        """The unit as the only expert of a table of the kernels, which compute SwiGLU without biases."""
        return native.expert_table([(self.gate_IH, self.up_IH, self.down_HI)]) if self.gate_bias_I is None else None


@dataclass(frozen=True)
class ExpertWeights:
    """The routed experts of a layer.

    unit: how gate and up are joined. weights_input: the router's weight multiplies what goes into an expert and not
    what comes out of it.
    """

    experts: tuple[GatedWeights, ...]
    unit: GatedUnit = SWIGLU
    weights_input: bool = False

    @property
    def n_bytes_per_expert(self) -> int:
        return self.experts[0].n_bytes

    @cached_property
    def table(self) -> native.ExpertTable | None:
        """What the kernels read; None where they do not compute this kind."""
        if self.unit != SWIGLU or self.weights_input or self.experts[0].gate_bias_I is not None:
            return None
        return native.expert_table([(one.gate_IH, one.up_IH, one.down_HI) for one in self.experts])


def widened_linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T in the dtype of x: weights may be stored narrower, arithmetic stays fp32.

    CPUs without AVX-512 multiply bf16 a hundred times slower than fp32, and one arithmetic everywhere keeps the
    reference comparable. The kernels widen weights on their way into registers; torch, where they do not serve, widens
    the whole matrix in memory (`to` copies nothing where the dtypes agree).
    """
    if x.dim() == 2 and native.serves(x) and native.reads(weight):
        return native.linear(x, weight, bias)
    return F.linear(x, weight.to(x.dtype), bias)


def gated_ffn(x: Tensor, weights: GatedWeights, unit: GatedUnit = SWIGLU) -> Tensor:
    """down(unit(gate(x), up(x))) over any number of rows."""
    if unit == SWIGLU and x.dim() == 2 and native.serves(x) and weights.table is not None:
        n_rows = len(x)
        return native.mix(x, weights.table, (0,), (n_rows,), torch.arange(n_rows), torch.ones(n_rows))
    gate = widened_linear(x, weights.gate_IH, weights.gate_bias_I)
    up = widened_linear(x, weights.up_IH, weights.up_bias_I)
    return widened_linear(join(gate, up, unit), weights.down_HI, weights.down_bias_H)


def join(gate: Tensor, up: Tensor, unit: GatedUnit) -> Tensor:
    """SwiGLU and its relatives: see `GatedUnit`."""
    if unit.limit is not None:
        gate, up = gate.clamp(max=unit.limit), up.clamp(-unit.limit, unit.limit)
    if unit.alpha is not None:
        return gate * torch.sigmoid(unit.alpha * gate) * (up + 1)
    return (F.silu(gate) if unit.activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def execute(plan: DispatchPlan, hidden_TH: Tensor, experts: ExpertWeights) -> Tensor:
    """Computes a dispatch plan: gather once, run each call's segments, scatter-add the valid rows by weight.

    Padding rows are gathered as zeros and go through their expert like any other row: that work is the price of a
    static shape, and leaving it out would make the technique look free. Their results are discarded.
    """
    calls = plan.calls
    if len(calls) and calls.is_one_after_another and experts.table is not None and native.serves(hidden_TH):
        called, rows = calls.expert_S.tolist(), calls.rows_S.tolist()
        return native.mix(hidden_TH, experts.table, called, rows, plan.token_R, plan.weight_R.contiguous())
    out_TH = torch.zeros_like(hidden_TH)
    if not len(calls):
        return out_TH
    rows_RH = gather_rows(plan, hidden_TH)
    if experts.weights_input:
        rows_RH = (rows_RH * plan.weight_R[:, None]).to(hidden_TH.dtype)
    result_RH = torch.zeros_like(rows_RH)
    for segment, expert in enumerate(calls.expert_S.tolist()):
        first, n_rows = int(calls.first_row_S[segment]), int(calls.rows_S[segment])
        width = calls.kind(int(calls.call_S[segment])).width
        weights = experts.experts[expert] if width is None else sliced(experts.experts[expert], width)
        # Parts of an expert share its rows, and their results add.
        result_RH[first : first + n_rows] += gated_ffn(rows_RH[first : first + n_rows], weights, experts.unit)
    if not experts.weights_input:
        result_RH *= plan.weight_R[:, None]
    if not _has_padding(plan):
        return out_TH.index_add_(0, plan.token_R, result_RH)
    valid_R = plan.token_R >= 0
    return out_TH.index_add_(0, plan.token_R[valid_R], result_RH[valid_R])


def sliced(weights: GatedWeights, width: Width) -> GatedWeights:
    """Columns [first, end) of the intermediate dimension, quantised ones widened; the first has the output's bias."""
    inner = slice(width.first, width.end)
    return GatedWeights(
        _widened(weights.gate_IH)[inner],
        _widened(weights.up_IH)[inner],
        _widened(weights.down_HI)[:, inner].contiguous(),
        None if weights.gate_bias_I is None else weights.gate_bias_I[inner],
        None if weights.up_bias_I is None else weights.up_bias_I[inner],
        weights.down_bias_H if width.first == 0 else None,
    )


def _widened(matrix: Matrix) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else matrix.to(torch.float32)


def gather_rows(plan: DispatchPlan, hidden_TH: Tensor) -> Tensor:
    """The input rows of all calls, rows_RH; padding rows are zero."""
    if not _has_padding(plan):
        return hidden_TH[plan.token_R]
    # Index -1 of padding rows picks the last row, which is the zero row appended here.
    return F.pad(hidden_TH, (0, 0, 0, 1))[plan.token_R]


def _has_padding(plan: DispatchPlan) -> bool:
    return len(plan.token_R) > plan.kept_pairs
