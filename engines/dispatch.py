"""The dispatch plan: what a technique decides for one MoE layer and one chunk of tokens.

It has two readers: `engines.model.experts.execute` computes it in torch, `engines.pricing.schedule` turns it into
operations that a hardware model prices. Accuracy and price cannot drift apart, because both read this.

Legend: T tokens, K experts per token, E experts, R rows of all expert calls, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from results.records import EngineCounters


@dataclass(frozen=True)
class Routing:
    """The router's choice. expert_ids_TK: int64; weights_TK: as the model combines them."""

    expert_ids_TK: Tensor
    weights_TK: Tensor
    n_experts: int

    def tokens_per_expert_E(self) -> Tensor:
        return torch.bincount(self.expert_ids_TK.reshape(-1), minlength=self.n_experts)


@dataclass(frozen=True)
class ExpertCall:
    """One launch: the experts of one graph, each over its own contiguous slice of the plan's rows.

    Expert i of the call owns `rows_per_expert[i]` rows, of which the first `valid_per_expert[i]` carry tokens and the
    rest are zero padding. `static` says that the shape was frozen before the routing was known, so that a unit without
    dynamic shapes can run the call.
    """

    experts: tuple[int, ...]
    rows_per_expert: tuple[int, ...]
    valid_per_expert: tuple[int, ...]
    first_row: int
    static: bool

    @property
    def n_rows(self) -> int:
        return sum(self.rows_per_expert)


@dataclass(frozen=True)
class Transfer:
    """Weights that must move over a link for this layer."""

    link: str
    n_bytes: int
    when: Literal["before", "overlapped"]


@dataclass(frozen=True)
class DispatchPlan:
    """Calls over one row space. token_R: source token of each row, -1 for padding; weight_R: 0 for padding."""

    n_tokens: int
    token_R: Tensor
    weight_R: Tensor
    calls: tuple[ExpertCall, ...]
    routed_pairs: int
    dropped_pairs: int
    transfers: tuple[Transfer, ...] = ()

    def counters(self) -> EngineCounters:
        computed = sum(call.n_rows for call in self.calls)
        valid = sum(sum(call.valid_per_expert) for call in self.calls)
        return EngineCounters(
            routed_pairs=self.routed_pairs,
            dropped_pairs=self.dropped_pairs,
            computed_rows=computed,
            padded_rows=computed - valid,
            expert_calls=len(self.calls),
            bytes_moved=sum(t.n_bytes for t in self.transfers),
        )
