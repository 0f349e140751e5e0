"""Experts lie on a host; two buffers beside the unit that computes take those of one layer each, in turn (003 §5.1).

Where the plan gives the engine a memory for experts they are really copied (`engines.model.buffers`), and a buffer
holds half of what fits into it; else copies are counted, and a buffer holds all experts of a layer.

While layer l computes from one buffer, the other is filled for the next layer with experts: those that were predicted,
or in a prefill without predictions all of them. What a layer needs and lacks is fetched before its calls. A buffer is
written over two layers later, so nothing is found there by the next token: that would be a cache.

Legend: T tokens, K experts per token, E experts, S segments, X experts called, M transfers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np

from engines.calls import Calls, Integers, distinct
from engines.dispatch import NO_TRANSFERS, Prediction, Routing, Transfers, way_to
from engines.errors import EngineError, FewSlotsError
from engines.techniques.base import Moved
from engines.techniques.context import Asks, BuildContext, LayerInput, ModelSizes
from results.records import Record


class TwoBuffersParameters(Record):
    """prefetch: fill the other buffer meanwhile; else everything is fetched when its layer asks for it."""

    moves_weights: ClassVar[bool] = True
    moves_all: ClassVar[bool] = True
    loads_from_file: ClassVar[bool] = False

    kind: Literal["two_buffers"] = "two_buffers"
    prefetch: bool = True

    @property
    def needs_profile(self) -> bool:
        return False

    def build(self, context: BuildContext) -> TwoBuffers:
        """Raises `EngineError` for a dense model."""
        if context.sizes is None:
            raise EngineError("a dense model has no experts to fetch; use dropless")
        copies = context.moved_expert_bytes is not None
        held = buffer_size(context.sizes, context.expert_slots)
        return TwoBuffers(dict(pairwise(context.sparse_layers)), held, context.bytes_to_move, self.prefetch, copies)


def buffer_size(sizes: ModelSizes, n_slots: int | None) -> int:
    """Experts that one buffer holds. n_slots: of both together; None: as many as a layer has.

    Raises `EngineError` where it does not hold those of one token.
    """
    held = sizes.n_experts if n_slots is None else min(n_slots // 2, sizes.n_experts)
    if held < sizes.top_k:
        raise FewSlotsError(
            f"the memory for experts holds {n_slots}, and two buffers for the {sizes.top_k} experts of a token need"
            f" {2 * sizes.top_k}",
            2 * sizes.top_k,
        )
    return held


class TwoBuffers:
    keeps_what_lies = False

    def __init__(
        self, next_layer: dict[int, int], n_held: int, expert_bytes: int, prefetch: bool, copies: bool = False
    ) -> None:
        """next_layer: the next one with experts, of each but the last. n_held: experts of a buffer, of which the first
        are fetched ahead where there are more. copies: whether calls wait for what is copied."""
        self.asks = Asks(waits=copies)
        self.prefetches = prefetch
        self._next_layer, self._followers = next_layer, {*next_layer.values()}
        self._expert_bytes = expert_bytes
        self._n_held = n_held
        self._all_E, self._none_E = np.arange(n_held), np.arange(0)

    def moved(self, seen: LayerInput, calls: Calls, prediction: Prediction | None) -> Moved:
        called_X = distinct(calls.expert_S)
        missing_X = called_X
        ahead, next_X = seen.layer, self._none_E
        unused = None
        if self.prefetches:
            lying_X = self._filled_before(seen)
            lies_E = np.zeros(seen.routing.n_experts, dtype=np.bool_)
            lies_E[lying_X] = True
            missing_X = called_X[~lies_E[called_X]]
            unused = len(lying_X) - (len(called_X) - len(missing_X))
            ahead, next_X = self._next_layer.get(seen.layer, seen.layer), self._fills_now(seen, prediction)
        expert_M = np.concatenate([missing_X, next_X])
        transfers = NO_TRANSFERS
        if len(expert_M):
            layer_M = np.full(len(expert_M), ahead)
            layer_M[: len(missing_X)] = seen.layer
            bytes_M = np.full(len(expert_M), self._expert_bytes)
            links = (way_to(calls.kinds[0].unit),)
            transfers = Transfers(expert_M, layer_M, bytes_M, links, as_one=True)
        return Moved(transfers, (), len(called_X) - len(missing_X), len(missing_X), unused)

    def _filled_before(self, seen: LayerInput) -> Integers:
        """What the layer before fetched for this one."""
        if seen.predicted is not None:
            return self._experts(seen.predicted)
        return self._all_E if seen.phase == "prefill" and seen.layer in self._followers else self._none_E

    def _fills_now(self, seen: LayerInput, prediction: Prediction | None) -> Integers:
        if prediction is not None:
            return self._experts(prediction.routing)
        return self._all_E if seen.phase == "prefill" and seen.layer in self._next_layer else self._none_E

    def _experts(self, routing: Routing) -> Integers:
        """As many as a buffer holds."""
        ids_TK = routing.ids_on_host_TK
        return distinct(np.sort(ids_TK[0]) if len(ids_TK) == 1 else ids_TK.reshape(-1))[: self._n_held]
