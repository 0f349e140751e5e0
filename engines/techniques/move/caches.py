"""Experts that are loaded when they are called: on demand, or through a cache of some slots.

Sources: MoE-OnDemand of 001 §IV-A, and caches of earlier work, of which 003 §2 speaks. Neither says more of them. As
built here, for the distinct experts that the calls of a layer name, in their order:

    what lies in a slot is a hit, and is not given up while anything else can be
    a miss takes a free slot; else that of the expert which the policy names
    where all slots hold what this layer calls, a miss takes that of the call which ran longest ago, or, if none ran
    yet, of the hit that would run last, which then is fetched again, as a miss

    lru      the slots are each layer's own; the expert whose last use is longest ago goes
    lfu      the same; the one that the fewest plans called goes, of equal ones that of longest ago
    static   each layer's chosen experts stay once loaded; all others share slots for top_k of them, oldest first

Uses are counted by plan (a step's layer), not by token, and go on while an expert is in no slot. Ties fall to the lower
index. Loads are as many as misses, and with `prefetch` those beside them that were predicted: when a layer's calls ran,
what the route told of a later layer and what lies in no slot takes one by the same rule; nothing that was predicted
goes for another, so what finds no slot waits until it is called. A guess is no use: only calls are.

Legend: T tokens, K experts per token, E experts, S segments, X distinct experts called, M misses, L layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from engines.calls import Calls, Integers
from engines.dispatch import NO_TRANSFERS, LayerExpert, Prediction, Transfers, way_to
from engines.errors import EngineError, FewSlotsError
from engines.profile import Profile
from engines.residency import Booleans, Residency, Slots
from engines.techniques.base import Moved
from engines.techniques.context import Asks, BuildContext, LayerInput, ModelSizes, check_slots
from engines.techniques.move.cache_steps import CacheStep, step_of_layers, step_of_stayers
from results.records import Record

Evict = Literal["lru", "lfu", "static"]
FREE = LayerExpert(-1, -1)


class CacheParameters(Record):
    moves_weights: ClassVar[bool] = True
    moves_all: ClassVar[bool] = True
    loads_from_file: ClassVar[bool] = True

    kind: Literal["cache"] = "cache"
    evict: Evict = "lru"
    """Which expert goes: the one used longest ago, the one used least, or none of the chosen, which stay."""
    slots: int | None = Field(default=None, ge=1, le=65536)
    """Experts of each layer; as many as the plan's expert_memory holds where it is not given."""
    stay: Literal["popular", "first"] = "popular"
    """Which experts stay under `static`: the most chosen in calibration, or those of the lowest numbers."""
    prefetch: bool = False
    """Load what the route predicts for the next layer while this one is in turn, beside what is called."""

    @property
    def needs_profile(self) -> bool:
        return self.evict == "static" and self.stay == "popular"

    def slots_of_model(self, sizes: ModelSizes, held: int | None) -> int:
        """Slots of all layers together. held: how many the plan's memory holds. Raises `EngineError`."""
        check_slots(self.slots, sizes)
        spare = sizes.top_k if self.evict == "static" else 0
        least = sizes.n_sparse_layers * (self.slots or 1) + spare
        if held is None and self.slots is None:
            raise FewSlotsError("the cache has no expert_memory", least, "give it slots", is_given=False)
        if held is not None and held < least:
            words = f" and {spare} that all share" if spare else ""
            raise FewSlotsError(
                f"the memory for experts holds {held}, and a cache of {self.slots or 1} in each of"
                f" {sizes.n_sparse_layers} layers{words} needs {least}",
                least,
            )
        return sizes.n_sparse_layers * self.slots_of_layer(sizes, held) + spare

    def slots_of_layer(self, sizes: ModelSizes, held: int | None) -> int:
        spare = sizes.top_k if self.evict == "static" else 0
        found = self.slots if self.slots is not None else ((held or 0) - spare) // sizes.n_sparse_layers
        return min(found, sizes.n_experts)

    def build(self, context: BuildContext) -> Cache:
        sizes, held = sizes_of(context), context.expert_slots
        in_all, in_layer = self.slots_of_model(sizes, held), self.slots_of_layer(sizes, held)
        if self.evict != "static":
            return Cache(context, Slots(in_layer), by_use=self.evict == "lfu", prefetches=self.prefetch)
        stays_LE = _staying(sizes, in_layer, context.profile if self.stay == "popular" else None)
        slots = Slots(in_all, "model")
        return Cache(context, slots, stays_LE=stays_LE, n_shared=sizes.top_k, prefetches=self.prefetch)


def sizes_of(context: BuildContext) -> ModelSizes:
    if context.sizes is None:
        raise EngineError("experts are loaded into slots, and the model is dense; use dropless")
    return context.sizes


def _staying(sizes: ModelSizes, n: int, profile: Profile | None) -> Booleans:
    """[L, E]: whether the expert stays. profile: the n most chosen of each layer do; None: those of the lowest
    numbers."""
    stays_LE = np.zeros((sizes.n_layers, sizes.n_experts), dtype=np.bool_)
    if profile is None:
        stays_LE[:, :n] = True
        return stays_LE
    for layer in profile.tokens_per_expert:
        stays_LE[layer, list(profile.popularity(layer)[:n])] = True
    return stays_LE


class Cache:
    """One rule of giving slots up, over the slots of each layer or over those of all layers."""

    keeps_what_lies = False

    def __init__(
        self,
        context: BuildContext,
        slots: Slots,
        by_use: bool = False,
        stays_LE: Booleans | None = None,
        n_shared: int | None = None,
        prefetches: bool = False,
    ) -> None:
        """by_use: the least used goes, else the one of longest ago. stays_LE: experts with a slot of their own, beside
        which n_shared slots serve the others; None: all share all."""
        (self.unit,) = context.units
        self.prefetches = prefetches
        self.asks = Asks(slots={self.unit: slots})
        self._is_of_layer = slots.of == "layer"
        self._by_use, self._stays_LE = by_use, stays_LE
        self._shares_LE = None if stays_LE is None else ~stays_LE
        self._stays_L: dict[int, frozenset[int]] = {}
        self._n_shared = slots.n if n_shared is None else n_shared
        self._bytes = context.bytes_to_move
        self._links = (way_to(self.unit),)

    def moved(self, seen: LayerInput, calls: Calls, prediction: Prediction | None) -> Moved:
        assert seen.residency is not None  # it asks for slots
        called_S = calls.expert_S
        is_hit_S = seen.residency.holds_E(self.unit, seen.layer)[called_S]
        called = list(dict.fromkeys(called_S.tolist()))
        if is_hit_S.all() and (prediction is None or not self.prefetches):
            return Moved(hits=len(called), misses=0)
        # More than are called, and than are predicted, never go.
        n_ahead = seen.residency.uses_LE.shape[1] if prediction is not None and self.prefetches else 0
        goes, n_free = self._given_up(seen.residency, seen.layer, called, n_ahead)
        hits = set(called_S[is_hit_S].tolist())
        fetched, ran, n_free = _fetched(seen.layer, called, hits, self._stays(seen.layer), goes, n_free)
        ahead: list[_Fetch] = []
        if prediction is not None and self.prefetches:
            if self._is_of_layer:
                wanted = _experts(prediction)
                goes, n_free = self._given_up(seen.residency, prediction.layer, wanted, n_ahead)
            else:
                goes.extend(LayerExpert(seen.layer, expert) for expert in ran)
            ahead = self._ahead(seen.residency, prediction, goes, n_free)
        return Moved(self._transfers([*fetched, *ahead]), hits=len(called) - len(fetched), misses=len(fetched))

    def step(self, held: Residency, ids_LK: Integers, first_layer: int) -> CacheStep | None:
        """What one decoded token's experts do in all layers from the first with experts on; None where more matters
        than `CacheStep` says."""
        if self.prefetches or self._n_shared < ids_LK.shape[1]:
            return None
        held_LE, last_use_LE = held.whole_LE(self.unit)[first_layer:], held.last_use_LE[first_layer:]
        if self._stays_LE is not None:
            return step_of_stayers(ids_LK, held_LE, last_use_LE, self._stays_LE[first_layer:], self._n_shared)
        uses_LE = held.uses_LE[first_layer:] if self._by_use else None
        return step_of_layers(ids_LK, held_LE, last_use_LE, uses_LE, self._n_shared)

    def _stays(self, layer: int) -> frozenset[int]:
        if layer not in self._stays_L:
            own = [] if self._stays_LE is None else self._stays_LE[layer].nonzero()[0].tolist()
            self._stays_L[layer] = frozenset(own)
        return self._stays_L[layer]

    def _transfers(self, fetched: Sequence[_Fetch]) -> Transfers:
        if not fetched:
            return NO_TRANSFERS
        return Transfers(
            np.array([place.expert for place, _ in fetched]),
            np.array([place.layer for place, _ in fetched]),
            np.full(len(fetched), self._bytes),
            self._links,
            replaced_M2=np.array([replaced or FREE for _, replaced in fetched]),
        )

    def _ahead(self, held: Residency, prediction: Prediction, goes: deque[LayerExpert], n_free: int) -> list[_Fetch]:
        """Predicted experts that lie in no slot, each with whom it replaces. goes: in the order in which they do."""
        layer, wanted = prediction.layer, _experts(prediction)
        is_held_E, stays = held.holds_E(self.unit, layer), self._stays(layer)
        told = {LayerExpert(layer, expert) for expert in wanted}
        going = deque(place for place in goes if place not in told)
        found: list[_Fetch] = []
        for expert in wanted:
            if is_held_E[expert]:
                continue
            replaced = None
            if expert not in stays:
                if n_free > 0:
                    n_free -= 1
                elif going:
                    replaced = going.popleft()
                else:
                    break
            found.append((LayerExpert(layer, expert), replaced))
        return found

    def _given_up(self, held: Residency, layer: int, called: list[int], n_ahead: int) -> tuple[deque[LayerExpert], int]:
        """What lies in shared slots and is not called, in the order in which it goes, the first of them for whatever is
        called and n_ahead more; and how many slots are free."""
        first, end = (layer, layer + 1) if self._is_of_layer else (0, None)
        held_LE = held.whole_LE(self.unit)[first:end]
        goes_LE = held_LE.copy() if self._shares_LE is None else held_LE & self._shares_LE[first:end]
        n_free = self._n_shared - int(np.count_nonzero(goes_LE))
        goes_LE[layer - first, called] = False
        n_experts = goes_LE.shape[1]
        place_X = goes_LE.reshape(-1).nonzero()[0] + first * n_experts
        last_X = held.last_use_LE.reshape(-1)[place_X]
        if self._by_use:
            order_X = np.lexsort((last_X, held.uses_LE.reshape(-1)[place_X]))
        else:
            order_X = last_X.argsort(kind="stable")
        places = place_X[order_X[: len(called) + n_ahead]].tolist()
        return deque(LayerExpert(*divmod(place, n_experts)) for place in places), n_free


_Fetch = tuple[LayerExpert, LayerExpert | None]
"""What is loaded, and whose slot it takes; None: a free one."""


def _experts(prediction: Prediction) -> list[int]:
    """The distinct ones, by number."""
    found: list[int] = np.unique(prediction.routing.ids_on_host_TK).tolist()
    return found


def _fetched(
    layer: int, called: Sequence[int], hits: set[int], stays: frozenset[int], goes: deque[LayerExpert], n_free: int
) -> tuple[list[_Fetch], deque[int], int]:
    """The misses in their order; what of this layer lies in shared slots then, and how many of those are free. stays:
    experts with a slot of their own. goes: is left with what still can go."""
    fetched: list[_Fetch] = []
    ran: deque[int] = deque()
    for expert in called:
        if expert in stays:
            if expert not in hits:
                fetched.append((LayerExpert(layer, expert), None))
            continue
        if expert not in hits:
            replaced = None
            if n_free > 0:
                n_free -= 1
            elif goes:
                replaced = goes.popleft()
            elif ran:
                replaced = LayerExpert(layer, ran.popleft())
            else:
                last = max(hits - stays, key=called.index)
                hits.remove(last)
                replaced = LayerExpert(layer, last)
            fetched.append((LayerExpert(layer, expert), replaced))
        ran.append(expert)
    return fetched, ran, n_free
