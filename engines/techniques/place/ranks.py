"""Places over processes ("ranks"): slices of every expert, whole experts, both, or experts with replicas of busy ones.

Sources: the Neuron guide (004): tensor and expert parallelism, the router in sequence parallel, EPLB, all-to-all-v
against all-gather. Attention is no part of this: every rank has its weights whole (`engines.parallel.transformer`).

Legend: T tokens of a step, E experts, I expert width, N ranks, S slots of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from devices.base import Unit
from engines.calls import Integers, Width
from engines.errors import EngineError
from engines.techniques.base import Layout, Piece, Share
from engines.techniques.context import NOTHING, BuildContext, LayerInput, ModelSizes
from engines.techniques.place.packing import Packed, flat, hierarchical
from engines.techniques.place.units import slices
from results.records import Record

MOST_RANKS = 4
RankExchange = Literal["all_to_all", "all_gather"]
RouterGather = Literal["selection", "logits"]


class Held(NamedTuple):
    """What a rank holds of a layer's experts. width: of each of them; None: whole."""

    experts: tuple[int, ...]
    width: Width | None = None


def unit_of(rank: int) -> Unit:
    return f"rank:{rank}"


class RanksParameters(Record):
    """What all of them have."""

    sequence_parallel: bool = True
    """In prefill each rank has some of the tokens: norms, router and attention are computed once for each token, and
    rows travel to the experts. Else every rank has all tokens, as in decoding, and results alone travel."""
    router_gather: RouterGather = "selection"
    """What ranks tell each other of their tokens' routing: the choice of each (experts and weights), or all logits."""

    @property
    def units(self) -> tuple[Unit, ...]:
        """The first; how many there are stands in the plan beside the technique."""
        return (unit_of(0),)

    @property
    def row_exchange(self) -> RankExchange:
        return "all_gather"

    @model_validator(mode="after")
    def _is_read(self) -> RanksParameters:
        if not self.sequence_parallel:
            given = [
                ("router_gather", self.router_gather != "selection"),
                ("exchange", self.row_exchange == "all_gather"),
            ]
            for name, is_given in given:
                if is_given and name in type(self).model_fields:
                    raise ValueError(f"{name} needs sequence_parallel = true, and has no effect here; remove it")
        return self

    def problem(self, ranks: int, sizes: ModelSizes) -> str | None:
        """Why so many ranks cannot compute this model, or None."""
        raise NotImplementedError

    def _grid(self, ranks: int, sizes: ModelSizes, profile_load: Mapping[int, Sequence[int]] | None) -> _Grid:
        raise NotImplementedError

    def build(self, context: BuildContext, layout: Layout) -> Ranks:
        if context.sizes is None:
            raise EngineError("ranks share experts, and the model is dense; take another technique")
        reason = self.problem(context.ranks, context.sizes)
        if reason is not None:
            raise EngineError(reason)
        loads = None if context.profile is None else context.profile.tokens_per_expert
        return Ranks(self._grid(context.ranks, context.sizes, loads), context.ranks, context.sizes.n_experts)


class TensorParallelParameters(RanksParameters):
    """Each rank has columns of every expert: gate and up by columns, down by rows, results added."""

    kind: Literal["tensor_parallel"] = "tensor_parallel"

    def problem(self, ranks: int, sizes: ModelSizes) -> str | None:
        return _too_narrow(ranks, sizes)

    def _grid(self, ranks: int, sizes: ModelSizes, profile_load: Mapping[int, Sequence[int]] | None) -> _Grid:
        return _Grid((tuple(range(sizes.n_experts)),) * ranks, slices(sizes.expert_width, ranks))


class ExpertParallelParameters(RanksParameters):
    """Each rank has some experts whole, in runs of E / N."""

    kind: Literal["expert_parallel"] = "expert_parallel"
    exchange: RankExchange = "all_to_all"
    """Of a step's rows: each to the ranks that compute it, and their results back; or all rows to all ranks."""

    @property
    def row_exchange(self) -> RankExchange:
        return self.exchange

    def problem(self, ranks: int, sizes: ModelSizes) -> str | None:
        return _too_many(ranks, sizes)

    def _grid(self, ranks: int, sizes: ModelSizes, profile_load: Mapping[int, Sequence[int]] | None) -> _Grid:
        return _Grid(tuple(tuple(range(*part)) for part in slices(sizes.n_experts, ranks)), None)


class TpEpParameters(RanksParameters):
    """Experts dealt to groups of ranks, each expert in slices over the ranks of its group."""

    kind: Literal["tp_ep"] = "tp_ep"
    exchange: RankExchange = "all_to_all"
    """As of `expert_parallel`."""
    tensor_ranks: int = Field(default=2, ge=1, le=MOST_RANKS)
    """Ranks of a group."""

    @property
    def row_exchange(self) -> RankExchange:
        return self.exchange

    def problem(self, ranks: int, sizes: ModelSizes) -> str | None:
        if ranks % self.tensor_ranks:
            return f"ranks = {ranks} cannot be dealt in groups of tensor_ranks = {self.tensor_ranks}; give a divisor"
        return _too_narrow(self.tensor_ranks, sizes) or _too_many(ranks // self.tensor_ranks, sizes)

    def _grid(self, ranks: int, sizes: ModelSizes, profile_load: Mapping[int, Sequence[int]] | None) -> _Grid:
        own = [tuple(range(*part)) for part in slices(sizes.n_experts, ranks // self.tensor_ranks)]
        widths = slices(sizes.expert_width, self.tensor_ranks)
        return _Grid(tuple(own[rank // self.tensor_ranks] for rank in range(ranks)),
                     [widths[rank % self.tensor_ranks] for rank in range(ranks)])  # fmt: skip


class EplbParameters(RanksParameters):
    """Experts dealt by the load of calibration, with replicas of busy ones in spare slots."""

    kind: Literal["eplb"] = "eplb"
    exchange: RankExchange = "all_to_all"
    """As of `expert_parallel`."""
    spare_slots: int = Field(default=1, ge=0, le=64)
    """Of each rank, beyond the E / N that hold every expert once."""
    nodes: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Above 1: groups of experts are kept inside a node (hierarchical)."""
    groups: int = Field(default=1, ge=1, le=1024)
    """Of experts, in runs of E / groups."""

    @property
    def row_exchange(self) -> RankExchange:
        return self.exchange

    @model_validator(mode="after")
    def _has_groups(self) -> EplbParameters:
        if self.nodes == 1 and self.groups != 1:
            raise ValueError("groups needs nodes above 1, and has no effect here; remove it")
        if self.groups % self.nodes:
            raise ValueError(f"groups = {self.groups} cannot be dealt to nodes = {self.nodes}; give a multiple")
        return self

    def problem(self, ranks: int, sizes: ModelSizes) -> str | None:
        if ranks % self.nodes:
            return f"ranks = {ranks} cannot be dealt to nodes = {self.nodes}; give a divisor"
        if sizes.n_experts % self.groups:
            return f"{sizes.n_experts} experts make no groups = {self.groups} of one size; give a divisor"
        of_node, of_rank = sizes.n_experts // self.nodes, -(-sizes.n_experts // ranks)
        most = of_node - of_rank
        if self.spare_slots > max(most, 1):  # of one rank too, the default means nothing
            where = f"the {of_node} experts of its node" if self.nodes > 1 else f"{of_node} experts"
            return (
                f"spare_slots = {self.spare_slots}: a rank has {of_rank} of {where}, and there are {most} others;"
                " lower it"
            )
        return _too_many(ranks, sizes)

    def _grid(self, ranks: int, sizes: ModelSizes, profile_load: Mapping[int, Sequence[int]] | None) -> _Grid:
        if profile_load is None:
            raise EngineError("eplb places experts by their load, and has no profile; calibrate it")
        slots = -(-sizes.n_experts // ranks) + self.spare_slots
        by_layer = {
            layer: flat(load_E, ranks, slots)
            if self.nodes == 1
            else hierarchical(load_E, ranks, slots, self.groups, self.nodes)
            for layer, load_E in profile_load.items()
        }
        return _Grid((), None, by_layer)


def _too_many(ranks: int, sizes: ModelSizes) -> str | None:
    if ranks <= sizes.n_experts:
        return None
    return f"{ranks} ranks cannot share {sizes.n_experts} experts; give at most as many ranks as experts"


def _too_narrow(ranks: int, sizes: ModelSizes) -> str | None:
    if ranks <= sizes.expert_width:
        return None
    return f"{ranks} ranks cannot share {sizes.expert_width} columns of an expert; give fewer ranks"


class _Grid(NamedTuple):
    """Which experts each rank has, in which width; by_layer where layers differ."""

    experts_N: Packed
    widths_N: Sequence[Width] | None
    by_layer: Mapping[int, Packed] | None = None


class Ranks:
    """The shares: experts that the same ranks have form one."""

    asks = NOTHING

    def __init__(self, grid: _Grid, n_ranks: int, n_experts: int) -> None:
        self.n_ranks = n_ranks
        self._grid = grid
        self._n_experts = n_experts
        self._shares: dict[int | None, tuple[Share, ...]] = {}
        packed = () if grid.by_layer is None else grid.by_layer.values()
        self.has_replicas = any(sum(map(len, slots_N)) > n_experts for slots_N in packed)

    def held(self, layer: int, rank: int) -> Held:
        """What `rank` computes with in a layer."""
        experts = self._experts_N(layer)[rank]
        widths = self._grid.widths_N
        return Held(tuple(dict.fromkeys(experts)), None if widths is None else widths[rank])

    def holders_E(self, layer: int) -> list[tuple[int, ...]]:
        """The ranks that have each expert; one that has it in several slots, as often."""
        at_E: list[list[int]] = [[] for _ in range(self._n_experts)]
        for rank, experts in enumerate(self._experts_N(layer)):
            for expert in experts:
                at_E[expert].append(rank)
        return [tuple(at) for at in at_E]

    def shares(self, seen: LayerInput, load_E: Integers) -> Sequence[Share]:
        return self.shares_of(seen.layer)

    def shares_of(self, layer: int) -> Sequence[Share]:
        """Of whatever load."""
        key = None if self._grid.by_layer is None else layer
        if key not in self._shares:
            self._shares[key] = self._made(self.holders_E(layer))
        return self._shares[key]

    def decode_shares(self, layer: int) -> Sequence[Share] | None:
        """None: what a rank computes of a step it must know before the step."""
        return None

    def _experts_N(self, layer: int) -> Packed:
        by_layer = self._grid.by_layer
        return self._grid.experts_N if by_layer is None else by_layer[layer]

    def _made(self, holders_E: Sequence[tuple[int, ...]]) -> tuple[Share, ...]:
        widths = self._grid.widths_N
        by_ranks: dict[tuple[int, ...], list[int]] = {}
        for expert, at in enumerate(holders_E):
            by_ranks.setdefault(at, []).append(expert)
        made = []
        for ranks, own in by_ranks.items():
            is_own_E = np.zeros(self._n_experts, dtype=np.bool_)
            is_own_E[own] = True
            pieces = tuple(
                Piece(unit_of(rank), None if widths is None else widths[rank], overlaps=True) for rank in ranks
            )
            is_replicated = widths is None and len(pieces) > 1
            made.append(Share(pieces, is_own_E, dealt=is_replicated, cut=is_replicated))
        return tuple(made)
