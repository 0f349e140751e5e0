"""Experts that are loaded when they are called: on demand, or through a cache of some slots.

Sources: MoE-OnDemand of 001 §2, whose first experts stay, and the caches that 001 and 003 compare themselves with.
As built here, for the distinct experts that the calls of a layer name, in their order:

    what lies in a slot is a hit, and is not given up while anything else can be
    a miss takes a free slot; else that of the expert which the policy names
    where all slots hold what this layer calls, a miss takes that of the call which ran longest ago, or, if none ran
    yet, of the hit that would run last, which then is fetched again, as a miss

    lru      the slots are each layer's own; the expert whose last use is longest ago goes
    lfu      the same; the one that the fewest plans called goes, of equal ones that of longest ago
    static   each layer's chosen experts stay once loaded; all others share slots for top_k of them, oldest first

Uses are counted by plan (a step's layer), not by token, and go on while an expert is in no slot. Ties fall to the lower
index. Loads are as many as misses: nothing is fetched ahead.

Legend: E experts, X distinct experts called, M misses, L layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from engines.calls import Calls
from engines.dispatch import FILE, LayerExpert, Link, Prediction, Transfers
from engines.errors import EngineError
from engines.profile import Profile
from engines.residency import Booleans, Residency, Slots
from engines.techniques.base import Moved
from engines.techniques.context import Asks, BuildContext, LayerInput, ModelSizes
from results.records import Record

Evict = Literal["lru", "lfu", "static"]
FREE = LayerExpert(-1, -1)


class CacheParameters(Record):
    moves_weights: ClassVar[bool] = True
    loads_from_file: ClassVar[bool] = True

    kind: Literal["cache"] = "cache"
    evict: Evict = "lru"
    """Which expert goes: the one used longest ago, the one used least, or none of the chosen, which stay."""
    slots: int | None = Field(default=None, ge=1, le=65536)
    """Experts of each layer; as many as the plan's expert_memory holds where it is not given."""
    stay: Literal["popular", "first"] = "popular"
    """Which experts stay under `static`: the most chosen in calibration, or those of the lowest numbers."""

    @property
    def needs_profile(self) -> bool:
        return self.evict == "static" and self.stay == "popular"

    def slots_of_model(self, sizes: ModelSizes, held: int | None) -> int:
        """Slots of all layers together. held: how many the plan's memory holds. Raises `EngineError`."""
        spare = sizes.top_k if self.evict == "static" else 0
        least = sizes.n_sparse_layers * (self.slots or 1) + spare
        if held is None and self.slots is None:
            raise EngineError("give the engine an expert_memory, or the cache its slots")
        if held is not None and held < least:
            words = f" and {spare} that all share" if spare else ""
            raise EngineError(
                f"the memory for experts holds {held}, and a cache of {self.slots or 1} in each of"
                f" {sizes.n_sparse_layers} layers{words} needs {least}; give it more"
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
            return Cache(context, Slots(in_layer), by_use=self.evict == "lfu")
        stays_LE = _staying(sizes, in_layer, context.profile if self.stay == "popular" else None)
        return Cache(context, Slots(in_all, "model"), stays_LE=stays_LE, n_shared=sizes.top_k)


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

    prefetches = False

    def __init__(
        self,
        context: BuildContext,
        slots: Slots,
        by_use: bool = False,
        stays_LE: Booleans | None = None,
        n_shared: int | None = None,
    ) -> None:
        """by_use: the least used goes, else the one of longest ago. stays_LE: experts with a slot of their own, beside
        which n_shared slots serve the others; None: all share all."""
        (self._unit,) = context.units
        self.asks = Asks(slots={self._unit: slots})
        self._is_of_layer = slots.of == "layer"
        self._by_use, self._stays_LE = by_use, stays_LE
        self._n_shared = slots.n if n_shared is None else n_shared
        self._bytes = context.bytes_to_move
        self._links = (Link(FILE, self._unit),)

    def moved(self, seen: LayerInput, calls: Calls, prediction: Prediction | None) -> Moved:
        assert seen.residency is not None  # it asks for slots
        called_S = calls.expert_S
        is_hit_S = seen.residency.holds_E(self._unit, seen.layer)[called_S]
        called = list(dict.fromkeys(called_S.tolist()))
        if is_hit_S.all():
            return Moved(hits=len(called), misses=0)
        stays = set() if self._stays_LE is None else set(self._stays_LE[seen.layer].nonzero()[0].tolist())
        goes, n_free = self._given_up(seen.residency, seen.layer, called)
        fetched = _fetched(seen.layer, called, set(called_S[is_hit_S].tolist()), stays, goes, n_free)
        n = len(fetched)
        transfers = Transfers(
            np.array([expert for expert, _ in fetched]),
            np.full(n, seen.layer),
            np.full(n, self._bytes),
            self._links,
            replaced_M2=np.array([slot or FREE for _, slot in fetched]),
        )
        return Moved(transfers, hits=len(called) - n, misses=n)

    def _given_up(self, held: Residency, layer: int, called: Sequence[int]) -> tuple[deque[LayerExpert], int]:
        """What lies in shared slots and is not called, in the order in which it goes; and how many of them are free."""
        first, end = (layer, layer + 1) if self._is_of_layer else (0, None)
        goes_LE = held.whole_LE(self._unit)[first:end].copy()
        if self._stays_LE is not None:
            goes_LE &= ~self._stays_LE[first:end]
        n_free = self._n_shared - int(goes_LE.sum())
        goes_LE[layer - first, list(called)] = False
        layer_X, expert_X = goes_LE.nonzero()
        layer_X += first
        last_X = held.last_use_LE[layer_X, expert_X]
        order_X = np.lexsort((last_X, held.uses_LE[layer_X, expert_X] if self._by_use else last_X))
        places = zip(layer_X[order_X].tolist(), expert_X[order_X].tolist(), strict=True)
        return deque(LayerExpert(*place) for place in places), n_free


def _fetched(
    layer: int, called: Sequence[int], hits: set[int], stays: set[int], goes: deque[LayerExpert], n_free: int
) -> list[tuple[int, LayerExpert | None]]:
    """The misses in their order, each with whom it replaces. stays: experts with a slot of their own."""
    fetched: list[tuple[int, LayerExpert | None]] = []
    ran: deque[int] = deque()
    for expert in called:
        if expert in stays:
            if expert not in hits:
                fetched.append((expert, None))
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
            fetched.append((expert, replaced))
        ran.append(expert)
    return fetched
