"""The experts of one layer, and the torch reader of a dispatch plan.

Legend: T tokens, H hidden, I expert width, E experts, R rows of all expert calls, S segments (the rows of one expert in
one call), C calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engines.calls import CallKind, Calls, Width
from engines.dispatch import DispatchPlan
from engines.kernels import native, tables
from engines.model.architecture import SWIGLU, GatedUnit
from engines.model.quantised import Matrix, QuantisedMatrix, rounded

MOST_PARTS = 4
"""Wholes whose parts are kept: a decode step and a prefill may each cut experts in a way of their own."""


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
    def table(self) -> tables.ExpertTable | None:
        """The unit as the only expert of a table of the kernels, which compute SwiGLU without biases."""
        return tables.expert_table([(self.gate_IH, self.up_IH, self.down_HI)]) if self.gate_bias_I is None else None


@dataclass(frozen=True)
class ExpertWeights:
    """The routed experts of a layer.

    unit: how gate and up are joined. weights_input: the router's weight multiplies what goes into an expert and not
    what comes out of it.
    """

    experts: Sequence[GatedWeights]
    unit: GatedUnit = SWIGLU
    weights_input: bool = False

    @property
    def n_bytes_per_expert(self) -> int:
        return self.experts[0].n_bytes

    @property
    def kernels_know_it(self) -> bool:
        """As far as it does not hang on the matrices."""
        return self.unit == SWIGLU and not self.weights_input

    @cached_property
    def table(self) -> tables.ExpertTable | None:
        """What the kernels read; None where they do not compute this kind."""
        if not self.kernels_know_it or self.experts[0].gate_bias_I is not None:
            return None
        return tables.expert_table([(one.gate_IH, one.up_IH, one.down_HI) for one in self.experts])

    def parts(self, kind: CallKind) -> ExpertWeights:
        """What calls of a kind compute of each expert. Kept, for slices of columns are copies, those of one whole as
        large as the matrix; but no more than `MOST_PARTS` wholes of them, the last used."""
        if kind.is_whole:
            return self
        key = kind.width, kind.hidden, kind.is_first_slice
        found = self._parts.pop(key, None)
        if found is None:
            own = tuple(sliced(one, kind) for one in self.experts)
            found = ExpertWeights(own, self.unit, self.weights_input)
            while self._parts and self._share(key) + sum(map(self._share, self._parts)) > MOST_PARTS:
                del self._parts[next(iter(self._parts))]
        self._parts[key] = found
        return found

    def _share(self, key: tuple[Width | None, Width | None, bool]) -> float:
        """Of a whole expert."""
        width, hidden = self.experts[0].gate_IH.shape
        parts = ((key[0], width), (key[1], hidden))
        return math.prod((part.end - part.first) / whole for part, whole in parts if part is not None)

    def cut(self, kind: CallKind, experts: Sequence[int]) -> ExpertWeights:
        """The same of some experts, numbered anew, and not kept."""
        return ExpertWeights(tuple(sliced(self.experts[e], kind) for e in experts), self.unit, self.weights_input)

    @cached_property
    def _parts(self) -> dict[tuple[Width | None, Width | None, bool], ExpertWeights]:
        return {}


def widened_rows(matrix: Tensor, row_T: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Those rows of a matrix, times a scale. By the kernels' threads where they serve: torch's would be woken."""
    if dtype is torch.float32 and row_T.is_cpu and tables.serves() and tables.reads(matrix):
        return native.rows(matrix, row_T.contiguous(), scale)
    rows_TN = F.embedding(row_T, matrix).to(dtype)
    return rows_TN if scale == 1 else rows_TN * scale


def widened_linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T in the dtype of x: weights may be stored narrower; arithmetic is theirs, as a rule fp32.

    CPUs without AVX-512 multiply bf16 a hundred times slower than fp32, and one arithmetic everywhere keeps the
    reference comparable. The kernels widen weights on their way into registers; torch, where they do not serve, widens
    the whole matrix in memory (`to` copies nothing where the dtypes agree).
    """
    if x.dim() == 2 and tables.serves(x) and tables.reads(weight):
        return native.linear(x, weight, bias)
    taken = rounded(x, weight.arithmetic) if isinstance(weight, QuantisedMatrix) else x
    return F.linear(taken, weight.to(x.dtype), bias)


def gated(shared_TH: Tensor, x_TH: Tensor, gate_1H: Tensor) -> Tensor:
    """What a shared expert gives, as far as its gate lets it through."""
    if tables.serves(shared_TH, x_TH) and tables.reads(gate_1H):
        return native.gated(shared_TH, x_TH, gate_1H)
    return shared_TH * torch.sigmoid(widened_linear(x_TH, gate_1H))


def gated_ffn(x: Tensor, weights: GatedWeights, unit: GatedUnit = SWIGLU) -> Tensor:
    """down(unit(gate(x), up(x))) over any number of rows."""
    if unit == SWIGLU and x.dim() == 2 and tables.serves(x) and weights.table is not None:
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


class Wave(NamedTuple):
    """Segments [first, end) of a plan, whose experts are at hand together."""

    first: int
    end: int


def execute(
    plan: DispatchPlan, hidden_TH: Tensor, experts: ExpertWeights, waves: Iterable[Wave] | None = None
) -> Tensor:
    """Computes a dispatch plan: gather once, run each call's segments, scatter-add the valid rows by weight.

    Padding rows are gathered as zeros and go through their expert like any other row: that work is the price of a
    static shape, and leaving it out would make the technique look free. Their results are discarded.

    waves: all segments of whole experts in their order, wave by wave; an expert is read after its wave is asked for,
    and the result is that of one wave, bit for bit.
    """
    calls = plan.calls
    if len(calls) and calls.is_one_after_another and experts.table is not None and tables.serves(hidden_TH):
        if waves is not None:
            return _mix_waves(plan, hidden_TH, experts.table, waves)
        called, rows = calls.expert_S.tolist(), calls.rows_S.tolist()
        return native.mix(hidden_TH, experts.table, called, rows, plan.token_R, plan.weight_R.contiguous())
    out_TH = torch.zeros_like(hidden_TH)
    if not len(calls):
        return out_TH
    if is_grouped(calls, experts) and tables.serves(hidden_TH):
        for kind_number, kind in enumerate(calls.kinds):
            out_TH += _mix_parts(plan, kind_number, kind, hidden_TH, experts)
        return out_TH
    rows_RH = gather_rows(plan, hidden_TH)
    if experts.weights_input:
        rows_RH = (rows_RH * plan.weight_R[:, None]).to(hidden_TH.dtype)
    result_RH = torch.zeros_like(rows_RH)
    for wave in (Wave(0, len(calls.expert_S)),) if waves is None else waves:
        for rows, weights, kind in _segments(calls, experts, wave):
            if kind.hidden is None:
                # Parts of an expert share its rows, and their results add.
                result_RH[rows] += gated_ffn(rows_RH[rows], weights, experts.unit)
    if any(kind.hidden is not None for kind in calls.kinds):
        _add_hidden_slices(result_RH, rows_RH, calls, experts)
    if not experts.weights_input:
        result_RH *= plan.weight_R[:, None]
    if not _has_padding(plan):
        return out_TH.index_add_(0, plan.token_R, result_RH)
    valid_R = plan.token_R >= 0
    return out_TH.index_add_(0, plan.token_R[valid_R], result_RH[valid_R])


def is_grouped(calls: Calls, experts: ExpertWeights) -> bool:
    """Whether the kernels compute all experts of a layer, or each slice of them, in one call; else Python goes from one
    expert to the next."""
    if experts.table is None:
        return False
    if any(kind.once for kind in calls.kinds) and not isinstance(experts.experts[0].down_HI, Tensor):
        return False
    sums_after_activation = all(kind.hidden is None for kind in calls.kinds)
    return sums_after_activation and all(kind.once or experts.parts(kind).table is not None for kind in calls.kinds)


def _mix_parts(
    plan: DispatchPlan, kind_number: int, kind: CallKind, hidden_TH: Tensor, experts: ExpertWeights
) -> Tensor:
    """The calls of one kind. Parts of an expert share its rows, and their weighted results add."""
    calls = plan.calls
    of_kind_C = slice(None) if calls.kind_C is None else calls.kind_C == kind_number
    of_kind_S = np.zeros(len(calls), dtype=bool)
    of_kind_S[of_kind_C] = True
    segments = np.flatnonzero(of_kind_S[calls.call_S] & (calls.rows_S > 0))
    if not len(segments):
        return torch.zeros_like(hidden_TH)
    rows_S, starts_S = calls.rows_S[segments], calls.first_row_S[segments]
    before_S = np.cumsum(rows_S) - rows_S
    rows_R = torch.from_numpy(np.repeat(starts_S - before_S, rows_S) + np.arange(rows_S.sum()))
    called = calls.expert_S[segments].tolist()
    if kind.once:
        table, called = experts.cut(kind, called).table, list(range(len(called)))
    else:
        table = experts.parts(kind).table
    assert table is not None  # `is_grouped` said so
    return native.mix(hidden_TH, table, called, rows_S.tolist(), plan.token_R[rows_R], plan.weight_R[rows_R])


def _mix_waves(plan: DispatchPlan, hidden_TH: Tensor, table: tables.ExpertTable, waves: Iterable[Wave]) -> Tensor:
    called, rows, weight_R = plan.calls.expert_S.tolist(), plan.calls.rows_S.tolist(), plan.weight_R.contiguous()
    out_TH: Tensor | None = None
    for wave in waves:
        if wave.end > wave.first:
            out_TH = native.mix(hidden_TH, table, called, rows, plan.token_R, weight_R, wave, out_TH)
    assert out_TH is not None  # the plan has calls
    return out_TH


def _segments(calls: Calls, experts: ExpertWeights, wave: Wave) -> Iterator[tuple[slice, GatedWeights, CallKind]]:
    """Rows of the row space, the weights that compute them, and the kind of their call."""
    for segment, expert in enumerate(calls.expert_S[wave.first : wave.end].tolist(), wave.first):
        first, n_rows = int(calls.first_row_S[segment]), int(calls.rows_S[segment])
        kind = calls.kind(int(calls.call_S[segment]))
        if n_rows:
            own = sliced(experts.experts[expert], kind) if kind.once else experts.parts(kind).experts[expert]
            yield slice(first, first + n_rows), own, kind


def _add_hidden_slices(result_RH: Tensor, rows_RH: Tensor, calls: Calls, experts: ExpertWeights) -> None:
    """What calls with slices of the model width compute: sums of gate and up, added over the slices of a row; then each
    slice its columns of the result."""
    every = Wave(0, len(calls.expert_S))
    segments = [segment for segment in _segments(calls, experts, every) if segment[2].hidden is not None]
    n_inner = segments[0][1].gate_IH.shape[0]
    gate_RI, up_RI = rows_RH.new_zeros(2, len(rows_RH), n_inner)
    for rows, weights, kind in segments:
        x = rows_RH[rows, _columns(kind.hidden)].contiguous()
        gate_RI[rows] += widened_linear(x, weights.gate_IH, weights.gate_bias_I)
        up_RI[rows] += widened_linear(x, weights.up_IH, weights.up_bias_I)
    for rows, weights, kind in segments:
        inner = join(gate_RI[rows], up_RI[rows], experts.unit)
        result_RH[rows, _columns(kind.hidden)] += widened_linear(inner, weights.down_HI, weights.down_bias_H)


def _columns(part: Width | None) -> slice:
    return slice(None) if part is None else slice(part.first, part.end)


def sliced(weights: GatedWeights, kind: CallKind) -> GatedWeights:
    """The part of an expert that calls of a kind compute. Of results that add up only the first has the bias."""
    if kind.hidden is not None:
        hidden = _columns(kind.hidden)
        return GatedWeights(
            _of_columns(weights.gate_IH, kind.hidden),
            _of_columns(weights.up_IH, kind.hidden),
            weights.down_HI[hidden],
            weights.gate_bias_I if kind.is_first_slice else None,
            weights.up_bias_I if kind.is_first_slice else None,
            None if weights.down_bias_H is None else weights.down_bias_H[hidden],
        )
    assert kind.width is not None  # whole experts are not sliced
    inner = _columns(kind.width)
    return GatedWeights(
        weights.gate_IH[inner],
        weights.up_IH[inner],
        _of_columns(weights.down_HI, kind.width),
        None if weights.gate_bias_I is None else weights.gate_bias_I[inner],
        None if weights.up_bias_I is None else weights.up_bias_I[inner],
        weights.down_bias_H if kind.is_first_slice else None,
    )


def _of_columns(matrix: Matrix, part: Width) -> Matrix:
    """A copy that lies as the kernels read it; widened where a narrow form cannot be cut there."""
    if isinstance(matrix, Tensor):
        return matrix[:, part.first : part.end].contiguous()
    cut = matrix.columns(part.first, part.end)
    return matrix.to(torch.float32)[:, part.first : part.end].contiguous() if cut is None else cut


def gather_rows(plan: DispatchPlan, hidden_TH: Tensor) -> Tensor:
    """The input rows of all calls, rows_RH; padding rows are zero."""
    if not _has_padding(plan):
        return hidden_TH[plan.token_R]
    # Index -1 of padding rows picks the last row, which is the zero row appended here.
    return F.pad(hidden_TH, (0, 0, 0, 1))[plan.token_R]


def _has_padding(plan: DispatchPlan) -> bool:
    return len(plan.token_R) > plan.kept_pairs
