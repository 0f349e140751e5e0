"""Static capacity tiers: every expert computes a number of rows that calibration froze, whatever the routing is.

Source: NPUMoE (000) §3.2 and §4.1, the arm "Ours-T": one graph per expert, so that a unit without dynamic shapes can
run it. Per layer l, with B the chunk, E experts, K per token:

    expected load of expert e = n_{l,e} / mean_e n_{l,e} * base          (the busiest: r_l * base, as printed)
    capacity of e             = the smallest tier that holds it, tier j = multiples[j] * base, rounded up to `align`
    no tier holds it          -> the largest tier, and what overflows is dropped, least salient token first

Rules that the source leaves open, as built here:
- base: the source prints B/E; the true mean under top-k is B*K/E. Both are offered, the latter is the default.
- Weights of surviving pairs stay as they are; `renormalise_survivors` scales each token's to their sum before the drop.
- Rows are computed in whole numbers and fractions, a multiple counting as the decimal number that the plan writes:
  floats would put 1.8 * 1000 * 8 / 60 above 240, and a load of exactly 48 above the tier of 48.
- A capacity never exceeds B (rounded up): a token chooses an expert at most once, so more rows could not fill.
- A call none of whose rows is valid is not launched: the runtime knows the counts before it dispatches.
- Decode steps (B = 1) have shapes of their own; a short last prefill chunk uses the full chunk's.

Legend: T tokens, K experts per token, P = T * K routed pairs, E experts, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from engines.decode_layout import DecodeLayout
from engines.dispatch import DispatchPlan, ExpertCall, Routing
from engines.errors import EngineError
from engines.profile import Profile
from engines.techniques.base import ChunkPhase
from results.records import Record


class CapacityTiersParameters(Record):
    """See the module: the source's choices where it states them."""

    technique: ClassVar[str] = "capacity_tiers"
    static_shapes: ClassVar[bool] = True
    lossless: ClassVar[bool] = False

    multiples: tuple[float, ...] = Field(default=(4.0, 2.0, 1.0), min_length=1)
    """Tiers in multiples of the base, largest first."""
    base: Literal["B/E", "BK/E"] = "BK/E"
    align: int = Field(default=16, ge=1, le=4096)
    """Rows; NPUs want multiples of 16 (§3.2)."""
    renormalise_survivors: bool = False
    calibration_prompts: int = Field(default=8, ge=1, le=100_000)

    @field_validator("multiples")
    @classmethod
    def _descending(cls, multiples: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 < m < math.inf for m in multiples) or any(not a > b for a, b in pairwise(multiples)):
            raise ValueError(f"multiples {multiples} must be finite, above 0 and descend, such as (4, 2, 1)")
        return multiples

    def build(self, prefill_chunk: int, profile: Profile | None) -> CapacityTiers:
        if profile is None:
            raise EngineError("capacity_tiers has no calibration; call calibrate with prompts before the first request")
        return CapacityTiers(self, prefill_chunk, profile)


def expected_load(
    relative_load: Sequence[Fraction], chunk: int, top_k: int, base: Literal["B/E", "BK/E"]
) -> tuple[Fraction, ...]:
    """Rows that each expert should get from one chunk: relative load times the balanced load per expert."""
    base_rows = _base_rows(len(relative_load), chunk, top_k, base)
    return tuple(load * base_rows for load in relative_load)


def frozen_capacities(
    parameters: CapacityTiersParameters, relative_load: Sequence[Fraction], chunk: int, top_k: int
) -> tuple[int, ...]:
    """Rows of each expert's graph for chunks of up to `chunk` tokens."""
    base_rows = _base_rows(len(relative_load), chunk, top_k, parameters.base)
    # str is the shortest decimal that is this float: what was written.
    multiples = [Fraction(str(multiple)) for multiple in parameters.multiples]
    tiers = [_round_up(min(multiple * base_rows, Fraction(chunk)), parameters.align) for multiple in multiples]
    loads = expected_load(relative_load, chunk, top_k, parameters.base)
    return tuple(min((tier for tier in tiers if load <= tier), default=tiers[0]) for load in loads)


class CapacityTiers:
    """Plans with the capacities frozen at construction."""

    name = "capacity_tiers"
    needs_saliency = True
    couples_tokens = True

    def __init__(self, parameters: CapacityTiersParameters, prefill_chunk: int, profile: Profile) -> None:
        chunks: dict[ChunkPhase, int] = {"prefill": prefill_chunk, "decode": 1}
        self._renormalise = parameters.renormalise_survivors
        self._capacities = {
            (layer, phase): frozen_capacities(parameters, profile.relative_load(layer), chunk, profile.top_k)
            for layer in profile.tokens_per_expert
            for phase, chunk in chunks.items()
        }

    def capacities(self, layer: int, phase: ChunkPhase) -> tuple[int, ...]:
        """Rows of each expert's graph."""
        return self._capacities[layer, phase]

    def decode_layout(self, layer: int) -> DecodeLayout | None:
        """One token fits any capacity: it chooses an expert once, and a capacity is 1 row or more."""
        return DecodeLayout(rows_E=self._capacities[layer, "decode"])

    def plan(self, routing: Routing, layer: int, phase: ChunkPhase, saliency_T: Tensor | None) -> DispatchPlan:
        n_tokens, top_k = routing.expert_ids_TK.shape
        if n_tokens == 1:  # has nothing to rank
            saliency_T = routing.weights_TK.new_zeros(1)
        if saliency_T is None:
            raise EngineError(
                "capacity_tiers ranks overflow by saliency; pass the norm of each token's attention output"
            )
        capacity = self._capacities[layer, phase]
        load = routing.tokens_per_expert_E().tolist()
        valid = [min(n, c) for n, c in zip(load, capacity, strict=True)]

        calls, first_row_of, n_rows = [], [0] * len(capacity), 0
        for expert, n_valid in enumerate(valid):
            first_row_of[expert] = n_rows
            if n_valid:
                calls.append(ExpertCall((expert,), (capacity[expert],), (n_valid,), n_rows, static=True))
                n_rows += capacity[expert]

        expert_P, token_P, weight_P = _by_expert_then_saliency(routing, saliency_T)
        device = expert_P.device
        rank_P = torch.arange(n_tokens * top_k, device=device) - _starts(load, device)[expert_P]
        kept_P = rank_P < torch.tensor(valid, device=device)[expert_P]
        if self._renormalise:
            weight_P = _renormalised(weight_P, token_P, kept_P, n_tokens)
        row_of_kept = (torch.tensor(first_row_of, device=device)[expert_P] + rank_P)[kept_P]
        token_R = torch.full((n_rows,), -1, dtype=torch.int64, device=device)
        weight_R = torch.zeros(n_rows, dtype=weight_P.dtype, device=device)
        token_R[row_of_kept] = token_P[kept_P]
        weight_R[row_of_kept] = weight_P[kept_P]
        return DispatchPlan(
            n_tokens=n_tokens,
            token_R=token_R,
            weight_R=weight_R,
            calls=tuple(calls),
            routed_pairs=n_tokens * top_k,
            dropped_pairs=n_tokens * top_k - sum(valid),
        )


def _base_rows(n_experts: int, chunk: int, top_k: int, base: Literal["B/E", "BK/E"]) -> Fraction:
    return Fraction(chunk * (top_k if base == "BK/E" else 1), n_experts)


def _round_up(rows: Fraction, align: int) -> int:
    return math.ceil(rows / align) * align


def _by_expert_then_saliency(routing: Routing, saliency_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The routed pairs as (expert_P, token_P, weight_P): by expert; inside, most salient first, then earlier token."""
    by_saliency_T = torch.sort(saliency_T, descending=True, stable=True).indices
    expert_P = routing.expert_ids_TK[by_saliency_T].reshape(-1)
    order_P = torch.sort(expert_P, stable=True).indices
    token_P = by_saliency_T[order_P // routing.expert_ids_TK.shape[1]]
    return expert_P[order_P], token_P, routing.weights_TK[by_saliency_T].reshape(-1)[order_P]


def _starts(load: list[int], device: torch.device) -> Tensor:
    """Index of each expert's first pair among pairs sorted by expert."""
    load_E = torch.tensor(load, device=device)
    return torch.cumsum(load_E, 0) - load_E


def _renormalised(weight_P: Tensor, token_P: Tensor, kept_P: Tensor, n_tokens: int) -> Tensor:
    """Surviving weights scaled so that each token's add up to what its routed weights added up to.

    A token that lost all its pairs has nothing to scale: its weights are not used.
    """
    routed_T = torch.zeros(n_tokens, dtype=weight_P.dtype, device=weight_P.device).index_add_(0, token_P, weight_P)
    kept_T = torch.zeros_like(routed_T).index_add_(0, token_P, weight_P * kept_P)
    scale_T = torch.where(kept_T > 0, routed_T / kept_T.clamp_min(torch.finfo(kept_T.dtype).tiny), 1.0)
    return weight_P * scale_T[token_P]
