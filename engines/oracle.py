"""The mixture of experts by its definition, to check by eye; and as a technique, so that a whole run can use it.

y_t = sum_k w_{t,k} down_e(silu(gate_e(x_t)) * up_e(x_t)) with e = id_{t,k}; families differ in biases, in the gated
unit, and in whether w multiplies what goes into the expert or what comes out.

Legend: T tokens, H hidden, I expert width, K experts per token, R rows, one a routed pair.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from devices.base import Unit
from engines.calls import CallKind, Calls
from engines.decode_layout import DecodeLayout
from engines.dispatch import DispatchPlan, Routing
from engines.model.experts import ExpertWeights
from engines.profile import Learnt
from engines.techniques.context import NOTHING, BuildContext, LayerInput
from results.records import Record


def mix_experts(hidden_TH: Tensor, routing: Routing, experts: ExpertWeights) -> Tensor:
    """One token and one chosen expert at a time; nothing of the dispatch plan or its executor is used."""
    out_TH = torch.zeros_like(hidden_TH)
    for token, token_H in enumerate(hidden_TH):
        for choice, expert in enumerate(routing.expert_ids_TK[token].tolist()):
            weight = routing.weights_TK[token, choice]
            x_H = weight * token_H if experts.weights_input else token_H
            y_H = _one_expert(x_H, experts, expert)
            out_TH[token] += y_H if experts.weights_input else weight * y_H
    return out_TH


def _one_expert(x_H: Tensor, experts: ExpertWeights, expert: int) -> Tensor:
    one = experts.experts[expert]
    gate_I, up_I = one.gate_IH.to(x_H.dtype) @ x_H, one.up_IH.to(x_H.dtype) @ x_H
    if one.gate_bias_I is not None and one.up_bias_I is not None:
        gate_I, up_I = gate_I + one.gate_bias_I, up_I + one.up_bias_I
    unit = experts.unit
    if unit.limit is not None:
        gate_I, up_I = torch.clip(gate_I, None, unit.limit), torch.clip(up_I, -unit.limit, unit.limit)
    if unit.alpha is not None:
        inner_I = (up_I + 1) * (gate_I / (1 + torch.exp(-unit.alpha * gate_I)))
    elif unit.activation == "silu":
        inner_I = up_I * (gate_I / (1 + torch.exp(-gate_I)))
    else:
        inner_I = up_I * 0.5 * gate_I * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate_I + 0.044715 * gate_I**3)))
    out_H = one.down_HI.to(x_H.dtype) @ inner_I
    return out_H if one.down_bias_H is None else out_H + one.down_bias_H


class OracleParameters(Record):
    """Has no parameters."""

    technique: ClassVar[str] = "oracle"
    lossless: ClassVar[bool] = True
    loads_from_file: ClassVar[bool] = False
    wanted_prompts: ClassVar[int] = 0
    learns: ClassVar[frozenset[Learnt]] = frozenset()
    backbone: ClassVar[Unit] = "cpu"
    units: ClassVar[tuple[Unit, ...]] = ("cpu",)

    def build(self, context: BuildContext) -> Oracle:
        return Oracle()


class Oracle:
    """One call of one row for each (token, expert) pair: the loop of `mix_experts` written as a plan.

    The transformer computes this technique with `mix_experts`; the plan is what counters and observers read.
    """

    name = "oracle"
    needs_saliency = False
    couples_tokens = False
    batches_exactly = False
    asks = NOTHING
    guesses = None

    def plan(self, seen: LayerInput) -> DispatchPlan:
        ids_TK = seen.routing.expert_ids_TK
        n_tokens, top_k = ids_TK.shape
        n_pairs = n_tokens * top_k
        one_R, row_R = np.ones(n_pairs, dtype=np.int64), np.arange(n_pairs)
        return DispatchPlan(
            n_tokens=n_tokens,
            token_R=torch.arange(n_pairs, device=ids_TK.device) // top_k,
            weight_R=seen.routing.weights_TK.reshape(-1),
            calls=Calls(ids_TK.reshape(-1).cpu().numpy(), one_R, one_R, row_R, row_R, (CallKind(),)),
            routed_pairs=n_pairs,
            dropped_pairs=0,
        )

    def decode_layout(self, layer: int) -> DecodeLayout | None:
        """None: `mix_experts` computes its steps."""
        return None
