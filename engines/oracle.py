"""The mixture of experts by its definition, to check by eye; and as a technique, so that a whole run can use it.

y_t = sum_k w_{t,k} down_e(silu(gate_e(x_t)) * up_e(x_t)) with e = id_{t,k}

Legend: T tokens, H hidden, I expert width, K experts per token.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from engines.calibration import Calibration
from engines.dispatch import DispatchPlan, ExpertCall, Routing
from engines.experts import ExpertWeights
from engines.techniques.base import ChunkPhase
from results.records import Record


def mix_experts(hidden_TH: Tensor, routing: Routing, experts: ExpertWeights) -> Tensor:
    """One token and one chosen expert at a time; nothing of the dispatch plan or its executor is used."""
    out_TH = torch.zeros_like(hidden_TH)
    for token, x_H in enumerate(hidden_TH):
        for choice, expert in enumerate(routing.expert_ids_TK[token].tolist()):
            gate_IH, up_IH = experts.gate_up_EJH[expert].to(x_H.dtype).chunk(2)
            down_HI = experts.down_EHI[expert].to(x_H.dtype)
            gate_I, up_I = gate_IH @ x_H, up_IH @ x_H
            inner_I = gate_I * torch.sigmoid(gate_I) * up_I
            out_TH[token] += routing.weights_TK[token, choice] * (down_HI @ inner_I)
    return out_TH


class OracleParameters(Record):
    """Has no parameters."""

    technique: ClassVar[str] = "oracle"
    static_shapes: ClassVar[bool] = False

    @property
    def calibration_prompts(self) -> int:
        return 0

    def build(self, prefill_chunk: int, calibration: Calibration | None) -> Oracle:
        return Oracle()


class Oracle:
    """One call of one row for each (token, expert) pair: the loop of `mix_experts` written as a plan.

    The transformer computes this technique with `mix_experts`; the plan is what counters and observers read.
    """

    name = "oracle"
    needs_saliency = False

    def plan(self, routing: Routing, layer: int, phase: ChunkPhase, saliency_T: Tensor | None) -> DispatchPlan:
        n_tokens, top_k = routing.expert_ids_TK.shape
        expert_of_pair = routing.expert_ids_TK.reshape(-1).tolist()
        return DispatchPlan(
            n_tokens=n_tokens,
            token_R=torch.arange(n_tokens * top_k, device=routing.expert_ids_TK.device) // top_k,
            weight_R=routing.weights_TK.reshape(-1),
            calls=tuple(ExpertCall((e,), (1,), (1,), row, static=False) for row, e in enumerate(expert_of_pair)),
            routed_pairs=n_tokens * top_k,
            dropped_pairs=0,
        )
