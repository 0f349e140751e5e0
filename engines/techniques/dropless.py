"""Dropless dispatch: one call for each expert that has tokens, with exactly its rows.

Nothing is dropped and nothing padded, so shapes follow the routing: for units that take dynamic shapes.
Legend: T tokens, K experts per token, P = T * K routed pairs, E experts, R rows.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor

from engines.decode_layout import PLAIN, DecodeLayout
from engines.dispatch import DispatchPlan, ExpertCall, Routing
from engines.profile import Profile
from engines.techniques.base import ChunkPhase
from results.records import Record

FEW_PAIRS = 32
"""For these, as in decoding, lists are faster than tensors."""


class DroplessParameters(Record):
    """Has no parameters."""

    technique: ClassVar[str] = "dropless"
    static_shapes: ClassVar[bool] = False
    lossless: ClassVar[bool] = True

    @property
    def calibration_prompts(self) -> int:
        return 0

    def build(self, prefill_chunk: int, profile: Profile | None) -> Dropless:
        return Dropless()


class Dropless:
    name = "dropless"
    needs_saliency = False
    couples_tokens = False

    def plan(self, routing: Routing, layer: int, phase: ChunkPhase, saliency_T: Tensor | None) -> DispatchPlan:
        n_tokens, top_k = routing.expert_ids_TK.shape
        if n_tokens * top_k <= FEW_PAIRS:
            return _plan_few(routing)
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

    def decode_layout(self, layer: int) -> DecodeLayout | None:
        return PLAIN


@lru_cache(maxsize=4096)
def _call(expert: int, n_rows: int, first_row: int) -> ExpertCall:
    return ExpertCall((expert,), (n_rows,), (n_rows,), first_row, static=False)


def _plan_few(routing: Routing) -> DispatchPlan:
    n_tokens, top_k = routing.expert_ids_TK.shape
    expert_P = [expert for of_token in routing.expert_ids_TK.tolist() for expert in of_token]
    weight_P = [weight for of_token in routing.weights_TK.tolist() for weight in of_token]
    order_P = sorted(range(len(expert_P)), key=expert_P.__getitem__)
    calls, first_row = [], 0
    for expert, rows in groupby(order_P, key=expert_P.__getitem__):
        n_rows = len(tuple(rows))
        calls.append(_call(expert, n_rows, first_row))
        first_row += n_rows
    device = routing.weights_TK.device
    return DispatchPlan(
        n_tokens=n_tokens,
        token_R=torch.tensor([pair // top_k for pair in order_P], device=device),
        weight_R=torch.tensor([weight_P[pair] for pair in order_P], dtype=routing.weights_TK.dtype, device=device),
        calls=tuple(calls),
        routed_pairs=len(expert_P),
        dropped_pairs=0,
    )
