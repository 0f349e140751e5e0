"""The experts of one layer, and the torch reader of a dispatch plan.

Legend: T tokens, H hidden, I expert width, J = 2I gate and up together, E experts, R rows of all expert calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.architecture import SWIGLU, GatedUnit
from engines.dispatch import DispatchPlan
from engines.kernels import native


@dataclass(frozen=True)
class ExpertWeights:
    """Stacked gated experts. gate_up_EJH: rows 0..I-1 gate, I..2I-1 up; down_EHI.

    unit: how gate and up are joined. weights_input: the router's weight multiplies what goes into an expert and not
    what comes out of it.
    """

    gate_up_EJH: Tensor
    down_EHI: Tensor
    gate_up_bias_EJ: Tensor | None = None
    down_bias_EH: Tensor | None = None
    unit: GatedUnit = SWIGLU
    weights_input: bool = False

    @property
    def n_experts(self) -> int:
        return self.gate_up_EJH.shape[0]

    @property
    def n_bytes_per_expert(self) -> int:
        stacks = (self.gate_up_EJH, self.down_EHI, self.gate_up_bias_EJ, self.down_bias_EH)
        return sum(stack[0].numel() * stack.element_size() for stack in stacks if stack is not None)


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T in the dtype of x: weights may be stored narrower (bf16), arithmetic stays fp32.

    CPUs without AVX-512 multiply bf16 a hundred times slower than fp32, and one arithmetic everywhere keeps the
    reference comparable. `to` copies nothing where the dtypes agree; a few rows are multiplied without widening the
    matrix in memory.
    """
    if x.dim() == 2 and x.shape[0] <= native.MAX_ROWS and native.serves(x, weight):
        return native.linear(x, weight, bias)
    return F.linear(x, weight.to(x.dtype), bias)


def gated_ffn(
    x: Tensor,
    gate_up_JH: Tensor,
    down_HI: Tensor,
    unit: GatedUnit = SWIGLU,
    gate_up_bias_J: Tensor | None = None,
    down_bias_H: Tensor | None = None,
) -> Tensor:
    """down(unit(gate(x), up(x))) over any number of rows."""
    gate, up = widened_linear(x, gate_up_JH, gate_up_bias_J).chunk(2, dim=-1)
    return widened_linear(join(gate, up, unit), down_HI, down_bias_H)


def join(gate: Tensor, up: Tensor, unit: GatedUnit) -> Tensor:
    """SwiGLU and its relatives: see `GatedUnit`."""
    if unit.limit is not None:
        gate, up = gate.clamp(max=unit.limit), up.clamp(-unit.limit, unit.limit)
    if unit.alpha is not None:
        return gate * torch.sigmoid(unit.alpha * gate) * (up + 1)
    return (F.silu(gate) if unit.activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def execute(plan: DispatchPlan, hidden_TH: Tensor, experts: ExpertWeights) -> Tensor:
    """Computes a dispatch plan: gather once, run each call's slices, scatter-add the valid rows by weight.

    Padding rows are gathered as zeros and go through their expert like any other row: that work is the price of a
    static shape, and leaving it out would make the technique look free. Their results are discarded.
    """
    if _is_narrow(plan, hidden_TH, experts):
        called = [expert for call in plan.calls for expert in call.experts]
        rows = [n for call in plan.calls for n in call.rows_per_expert]
        return native.mix(
            hidden_TH, experts.gate_up_EJH, experts.down_EHI, called, rows, plan.token_R, plan.weight_R.contiguous()
        )
    out_TH = torch.zeros_like(hidden_TH)
    if not plan.calls:
        return out_TH
    rows_RH = gather_rows(plan, hidden_TH)
    if experts.weights_input:
        rows_RH = rows_RH * plan.weight_R[:, None]
    result_RH = torch.empty_like(rows_RH)
    for call in plan.calls:
        row = call.first_row
        for expert, n_rows in zip(call.experts, call.rows_per_expert, strict=True):
            slice_RH = rows_RH[row : row + n_rows]
            result_RH[row : row + n_rows] = _expert(slice_RH, experts, expert)
            row += n_rows
    if not experts.weights_input:
        result_RH *= plan.weight_R[:, None]
    if not _has_padding(plan):
        return out_TH.index_add_(0, plan.token_R, result_RH)
    valid_R = plan.token_R >= 0
    return out_TH.index_add_(0, plan.token_R[valid_R], result_RH[valid_R])


def _is_narrow(plan: DispatchPlan, hidden_TH: Tensor, experts: ExpertWeights) -> bool:
    """Whether each expert has a few rows only, as in decoding, and is of the kind that the kernel computes."""
    return (
        bool(plan.calls)
        and not _has_padding(plan)
        and max(n for call in plan.calls for n in call.rows_per_expert) <= native.MAX_ROWS
        and experts.unit == SWIGLU
        and not experts.weights_input
        and experts.gate_up_bias_EJ is None
        and native.serves(hidden_TH, experts.gate_up_EJH, experts.down_EHI)
    )


def _expert(x_RH: Tensor, experts: ExpertWeights, expert: int) -> Tensor:
    gate_up_bias_EJ, down_bias_EH = experts.gate_up_bias_EJ, experts.down_bias_EH
    return gated_ffn(
        x_RH,
        experts.gate_up_EJH[expert],
        experts.down_EHI[expert],
        experts.unit,
        None if gate_up_bias_EJ is None else gate_up_bias_EJ[expert],
        None if down_bias_EH is None else down_bias_EH[expert],
    )


def gather_rows(plan: DispatchPlan, hidden_TH: Tensor) -> Tensor:
    """The input rows of all calls, rows_RH; padding rows are zero."""
    if not _has_padding(plan):
        return hidden_TH[plan.token_R]
    # Index -1 of padding rows picks the last row, which is the zero row appended here.
    return F.pad(hidden_TH, (0, 0, 0, 1))[plan.token_R]


def _has_padding(plan: DispatchPlan) -> bool:
    return any(call.valid_per_expert != call.rows_per_expert for call in plan.calls)
