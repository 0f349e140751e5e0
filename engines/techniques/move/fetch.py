"""Experts that a GPU computes and that do not lie in its memory are fetched for that step, and not kept.

Some may lie there from the start, as far as its memory goes: Fiddler's most popular, or the first of MoE-OnDemand. The
others come from where they lie: the CPU's memory, or of N units expert e from unit e mod N. They pass through a buffer
beside those slots, and are gone when their layer ran.

On this host weights lie in one memory whatever the unit: transfers are counted, not timed.

Legend: E experts, L layers, S segments, C calls, X experts that the GPU computes.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from devices.base import Unit
from engines.calls import Calls, distinct
from engines.dispatch import LayerExpert, Link, Prediction, Transfers
from engines.errors import EngineError
from engines.residency import Slots
from engines.techniques.base import Moved
from engines.techniques.context import Asks, BuildContext, LayerInput, ModelSizes
from results.records import Record

GPU: Unit = "gpu"


class FetchParameters(Record):
    moves_weights: ClassVar[bool] = True
    moves_all: ClassVar[bool] = False
    loads_from_file: ClassVar[bool] = False

    kind: Literal["fetch"] = "fetch"
    gpu_slots: int = Field(default=0, ge=0, le=2**24)
    """Experts, of all layers together, that lie in the GPU's memory from the start and stay there."""
    stay: Literal["popular", "first"] = "popular"
    """Which: the most chosen in calibration, of all layers, or those of the lowest numbers, of each layer alike."""

    @property
    def needs_profile(self) -> bool:
        return self.gpu_slots > 0 and self.stay == "popular"

    def too_many(self, sizes: ModelSizes) -> str | None:
        """Why the model has not so many experts, or None."""
        n = sizes.n_sparse_layers * sizes.n_experts
        if self.gpu_slots <= n:
            return None
        return f"gpu_slots = {self.gpu_slots} experts in the GPU's memory, and the model has {n}; lower it"

    def build(self, context: BuildContext) -> Fetches:
        """Raises `EngineError`."""
        sizes = context.sizes
        if sizes is None:
            raise EngineError("a dense model has no experts to fetch; use dropless")
        if (reason := self.too_many(sizes)) is not None:
            raise EngineError(reason)
        layers = context.sparse_layers
        if not self.needs_profile:
            ranked = [LayerExpert(layer, expert) for expert in range(sizes.n_experts) for layer in layers]
        else:
            if context.profile is None:
                raise EngineError("the most popular experts are known from a profile; calibrate first")
            counts = context.profile.tokens_per_expert
            every = [LayerExpert(layer, expert) for layer in layers for expert in range(sizes.n_experts)]
            ranked = sorted(every, key=lambda place: -counts[place.layer][place.expert])
        return Fetches(tuple(ranked[: self.gpu_slots]), context)


class Fetches:
    prefetches = False
    keeps_what_lies = True

    def __init__(self, from_start: tuple[LayerExpert, ...], context: BuildContext) -> None:
        self.asks = Asks(slots={GPU: Slots(len(from_start), "model", from_start)})
        homes = [unit for unit in context.units if unit != GPU] or ["cpu"]
        self._links = tuple(Link(unit, GPU) for unit in homes)
        self._bytes = context.bytes_to_move

    def moved(self, seen: LayerInput, calls: Calls, prediction: Prediction | None) -> Moved:
        assert seen.residency is not None  # it asks for slots
        called_X = calls.expert_S
        if calls.kind_C is not None:
            of_gpu_C = calls.kind_C == [kind.unit for kind in calls.kinds].index(GPU)
            called_X = called_X[of_gpu_C if len(calls) == len(called_X) else of_gpu_C[calls.call_S]]
        elif calls.kinds[0].unit != GPU:
            called_X = called_X[:0]
        called_X = distinct(called_X)
        missing_X = called_X[~seen.residency.holds_E(GPU, seen.layer)[called_X]]
        n = len(missing_X)
        if n == 0:
            return Moved(hits=len(called_X), misses=0)
        transfers = Transfers(
            missing_X,
            np.full(n, seen.layer),
            np.full(n, self._bytes),
            self._links,
            None if len(self._links) == 1 else missing_X % len(self._links),
            stays_M=np.zeros(n, dtype=np.bool_),
        )
        return Moved(transfers, hits=len(called_X) - n, misses=n)
