"""Dropless dispatch: one call for each expert that has tokens, with exactly its rows.

Nothing is dropped and nothing padded, so shapes follow the routing: for units that take dynamic shapes.
Legend: T tokens, K experts per token, P = T * K routed pairs, E experts, R rows.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from engines.calibration import Calibration
from engines.dispatch import DispatchPlan, ExpertCall, Routing
from engines.techniques.base import ChunkPhase
from results.records import Record


class DroplessParameters(Record):
    """Has no parameters."""

    technique: ClassVar[str] = "dropless"
    static_shapes: ClassVar[bool] = False

    @property
    def calibration_prompts(self) -> int:
        return 0

    def build(self, prefill_chunk: int, calibration: Calibration | None) -> Dropless:
        return Dropless()


class Dropless:
    name = "dropless"
    needs_saliency = False
    couples_tokens = False

    def plan(self, routing: Routing, layer: int, phase: ChunkPhase, saliency_T: Tensor | None) -> DispatchPlan:
        n_tokens, top_k = routing.expert_ids_TK.shape
        # Stable: within an expert, rows keep the order of the tokens.
        order_P = torch.sort(routing.expert_ids_TK.reshape(-1), stable=True).indices
        calls, first_row = [], 0
        for expert, n_rows in enumerate(routing.tokens_per_expert_E().tolist()):
            if n_rows:
                calls.append(ExpertCall((expert,), (n_rows,), (n_rows,), first_row, static=False))
                first_row += n_rows
        return DispatchPlan(
            n_tokens=n_tokens,
            token_R=order_P // top_k,
            weight_R=routing.weights_TK.reshape(-1)[order_P],
            calls=tuple(calls),
            routed_pairs=n_tokens * top_k,
            dropped_pairs=0,
        )
