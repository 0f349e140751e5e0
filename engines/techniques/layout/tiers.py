"""Static capacity tiers: every expert computes rows that calibration froze, alone or in a group of its tier.

Source: NPUMoE (000) §3.2, §4.1 and §4.2, the arms "T" and "TG". Per layer, with B the chunk, E experts, K per token:

    expected load of expert e = n_e / mean(n) * B K / E
    capacity of e             = the smallest tier that holds it, tier j = multiples[j] * base, rounded up to `align`
    no tier holds it          -> the largest tier; what overflows is dropped, least salient token first
    groups                    = experts of one tier in order of popularity, `group_size` a graph, its weights within
                                `graph_bytes`, which must hold an expert; a graph computes all its experts

Rules that the source leaves open, as built here:
- The load is always the true one. The source prints its tiers as {4, 2, 1} B/E; its Table 3 (1.25 slots a routed pair
  at K = 2) says that they are {2, 1, 0.5} B K / E. Both are the same at K = 2; `base` chooses the form elsewhere.
- Rows are computed in whole numbers and fractions, a multiple counting as the decimal number that the plan writes:
  floats would put 1.8 * 1000 * 8 / 60 above 240, and a load of exactly 48 above the tier of 48.
- A capacity never exceeds B (rounded up): a token chooses an expert at most once, so more rows could not fill.
- A graph none of whose experts has tokens is not launched: the runtime knows the counts before it dispatches.
- Decoding (`decode_graphs`): "single" launches for each chosen expert a graph of its own with `decode_rows` rows, the
  smallest capacity of the source's; "same" the graphs of prefill, "cpu" computes exact rows on the CPU.
- A short last chunk has the full chunk's shapes.
- Weights of surviving pairs stay as they are; `renormalise_survivors` scales each token's to their sum before the drop.

Legend: E experts, S segments (a row range of one expert), C calls, G graphs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby, pairwise
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from engines.calls import Integers
from engines.decode_layout import DecodeLayout
from engines.errors import EngineError
from engines.profile import Profile
from engines.residency import Booleans
from engines.techniques.base import Overflow, Rows
from engines.techniques.context import NOTHING, BuildContext, ChunkPhase, LayerInput
from engines.techniques.layout.capacity import rounded_up
from engines.techniques.layout.exact import one_call_each
from results.records import Record

Base = Literal["B/E", "BK/E"]
PRINTED: dict[Base, tuple[float, ...]] = {"BK/E": (2.0, 1.0, 0.5), "B/E": (4.0, 2.0, 1.0)}
GRAPH_BYTES = 1288490189
"""1.2 GiB: 8 experts of 150 MiB run in one graph, 16 do not (§4.2, Table 5)."""


class TiersParameters(Record):
    """See the module: the source's choices where it states them."""

    static: ClassVar[bool] = True
    needs_profile: ClassVar[bool] = True

    kind: Literal["tiers"] = "tiers"
    multiples: tuple[float, ...] | None = Field(default=None, min_length=1)
    """Tiers in multiples of the base, largest first. None: as printed for that base."""
    base: Base = "BK/E"
    align: int = Field(default=16, ge=1, le=4096)
    """Rows; NPUs want multiples of 16 (§3.2)."""
    grouped: bool = False
    group_size: int = Field(default=4, ge=1, le=4096)
    graph_bytes: int = Field(default=GRAPH_BYTES, ge=1)
    decode_graphs: Literal["single", "same", "cpu"] = "single"
    decode_rows: int = Field(default=32, ge=1, le=1 << 20)
    """Of the graph of a single expert in decoding."""
    overflow: Literal["saliency", "order"] = "saliency"
    renormalise_survivors: bool = False

    @field_validator("multiples")
    @classmethod
    def _descending(cls, multiples: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if multiples is None:
            return None
        if any(not 0 < m < math.inf for m in multiples) or any(not a > b for a, b in pairwise(multiples)):
            raise ValueError("must be finite, above 0 and descend, such as [2, 1, 0.5]")
        return multiples

    @property
    def lossless(self) -> bool:
        return False

    def too_small(self, expert_bytes: int) -> str | None:
        """Why no graph holds an expert of so many bytes, or None."""
        if not self.grouped or expert_bytes <= self.graph_bytes:
            return None
        return (
            f"graph_bytes = {self.graph_bytes} holds no expert of {expert_bytes} bytes; give at least so many, or place"
            " experts on the cpu"
        )

    def build(self, context: BuildContext) -> Tiers:
        return Tiers(self, context)


def expected_load(relative_load: Sequence[Fraction], chunk: int, top_k: int) -> tuple[Fraction, ...]:
    """Rows that each expert should get from one chunk: relative load times the balanced load of an expert."""
    return tuple(load * Fraction(chunk * top_k, len(relative_load)) for load in relative_load)


def tier_rows(parameters: TiersParameters, n_experts: int, chunk: int, top_k: int) -> tuple[int, ...]:
    """Rows of each tier for chunks of up to `chunk` tokens, largest first."""
    base_rows = Fraction(chunk * (top_k if parameters.base == "BK/E" else 1), n_experts)
    # str is the shortest decimal that is this float: what was written.
    multiples = [Fraction(str(m)) for m in parameters.multiples or PRINTED[parameters.base]]
    return tuple(rounded_up(min(m * base_rows, Fraction(chunk)), parameters.align) for m in multiples)


def frozen_capacities(
    parameters: TiersParameters, relative_load: Sequence[Fraction], chunk: int, top_k: int
) -> tuple[int, ...]:
    """Rows of each expert for chunks of up to `chunk` tokens."""
    tiers = tier_rows(parameters, len(relative_load), chunk, top_k)
    loads = expected_load(relative_load, chunk, top_k)
    return tuple(min((tier for tier in tiers if load <= tier), default=tiers[0]) for load in loads)


def frozen_groups(capacities: Sequence[int], popularity: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Experts of one capacity, the largest first, each in order of popularity, at most `most` together."""
    by_tier = sorted(popularity, key=lambda expert: -capacities[expert])  # stable: popularity within a tier
    groups = []
    for _, of_tier in groupby(by_tier, key=lambda expert: capacities[expert]):
        members = tuple(of_tier)
        groups += [members[i : i + most] for i in range(0, len(members), most)]
    return groups


class Graphs(NamedTuple):
    """The frozen graphs of a layer: their experts one after another, and where each graph begins."""

    expert_S: Integers
    rows_S: Integers
    starts_G: Integers
    n_members_G: Integers

    @property
    def experts(self) -> list[tuple[int, ...]]:
        """Of each graph."""
        ends = [*self.starts_G[1:], len(self.expert_S)]
        return [tuple(self.expert_S[a:b].tolist()) for a, b in zip(self.starts_G, ends, strict=True)]


class Tiers:
    """With shapes frozen at construction."""

    asks = NOTHING
    static = True
    skips_padding = False

    def __init__(self, parameters: TiersParameters, context: BuildContext) -> None:
        profile = context.profile
        if profile is None:
            raise EngineError("tiers have no profile; calibrate with prompts before the first request")
        self.overflow: Overflow = parameters.overflow
        self.renormalise = parameters.renormalise_survivors
        self.decode_graphs = parameters.decode_graphs
        self._graphs = {layer: _graphs(parameters, profile, layer, context) for layer in profile.tokens_per_expert}
        self.may_overflow = any(int(graphs.rows_S.min()) < context.chunk for graphs in self._graphs.values())
        self._single_rows = parameters.decode_rows

    def graphs(self, layer: int) -> Graphs:
        return self._graphs[layer]

    def capacities(self, layer: int, phase: ChunkPhase = "prefill") -> tuple[int, ...]:
        """Rows of each expert's graph."""
        graphs = self._graphs[layer]
        if phase == "decode" and self.decode_graphs == "single":
            return (self._single_rows,) * len(graphs.expert_S)
        capacity_E = np.empty_like(graphs.rows_S)
        capacity_E[graphs.expert_S] = graphs.rows_S
        return tuple(capacity_E.tolist())

    def rows(self, seen: LayerInput, load_E: Integers, own_E: Booleans | None = None) -> Rows:
        if seen.phase == "decode" and self.decode_graphs == "single":
            expert_S = load_E.nonzero()[0]
            return one_call_each(expert_S, np.full(len(expert_S), self._single_rows), load_E)
        graphs = self._graphs[seen.layer]
        has_load_S: NDArray[np.bool_] = load_E[graphs.expert_S] > 0
        is_launched_G = np.logical_or.reduceat(has_load_S, graphs.starts_G)
        is_launched_S = np.repeat(is_launched_G, graphs.n_members_G)
        laid = one_call_each(graphs.expert_S[is_launched_S], graphs.rows_S[is_launched_S], load_E)
        n_members_C = graphs.n_members_G[is_launched_G]
        return laid._replace(starts_C=np.cumsum(n_members_C) - n_members_C)

    def decode_layout(self, layer: int, n_experts: int) -> DecodeLayout | None:
        capacities = self.capacities(layer, "decode")
        if self.decode_graphs == "single":
            return DecodeLayout(capacities)
        group_of_E = [0] * len(capacities)
        for number, experts in enumerate(self._graphs[layer].experts):
            for expert in experts:
                group_of_E[expert] = number
        return DecodeLayout(capacities, tuple(group_of_E))


def _graphs(parameters: TiersParameters, profile: Profile, layer: int, context: BuildContext) -> Graphs:
    capacities = frozen_capacities(parameters, profile.relative_load(layer), context.chunk, profile.top_k)
    if parameters.grouped:
        most = parameters.group_size
        if context.sizes is not None:
            reason = parameters.too_small(context.sizes.expert_bytes)
            if reason is not None:
                raise EngineError(reason)
            most = min(most, parameters.graph_bytes // context.sizes.expert_bytes)
        groups = frozen_groups(capacities, profile.popularity(layer), most)
    else:
        groups = [(expert,) for expert in range(len(capacities))]
    expert_S = np.array([expert for group in groups for expert in group], dtype=np.int64)
    n_members_G = np.array([len(group) for group in groups], dtype=np.int64)
    rows_S = np.array(capacities, dtype=np.int64)[expert_S]
    return Graphs(expert_S, rows_S, np.cumsum(n_members_G) - n_members_G, n_members_G)
