"""Experts, and slices of them, that come to the GPU from the memory of NDP units (001, §III-C and D).

What the GPU computes of a step and does not have passes through a buffer beside its slots, and is gone when the layer
ran.

With `prefetch` the GPU keeps the x most chosen experts of each layer, by the prompt of the request that runs and by
nothing else: choices are counted while it is read, and experts fetched at the first layer of the first decode step, for
all layers. One that no token of the prompt chose is not fetched; equal counts: the lower number. What lies there from
the request before stays where it is wanted again, and is replaced where not. x is as many as the memory holds in every
layer alike, or `slots`, or K. The first layer's come too late for its first token, which is computed without them.

On this host weights lie in one memory whatever the unit: transfers are counted, not timed.

Legend: T tokens, L layers, E experts, S segments, C calls, K kinds of calls or, of ids, experts per token, X experts
called, M transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from devices.base import Unit
from engines.calls import CallKind, Calls, Integers
from engines.dispatch import NO_TRANSFERS, LayerExpert, Link, Prediction, Transfers
from engines.errors import EngineError, FewSlotsError
from engines.residency import Booleans, Slots
from engines.techniques.base import Moved
from engines.techniques.context import NOTHING, Asks, BuildContext, LayerInput, ModelSizes, check_slots
from results.records import Record

GPU: Unit = "gpu"
HOST: Unit = "cpu"
"""The units are DIMMs of its memory, and each holds a slice of every expert: they travel as one."""
MOST_KNOWN = 64
"""Kinds of calls of which it is remembered what the GPU computes."""


class SlicesParameters(Record):
    moves_weights: ClassVar[bool] = True
    moves_all: ClassVar[bool] = False
    loads_from_file: ClassVar[bool] = False

    kind: Literal["slices"] = "slices"
    prefetch: bool = False
    """Whether the most chosen experts of a prompt are fetched when it is read."""
    slots: int | None = Field(default=None, ge=1, le=65536)
    """Experts of each layer that the GPU keeps; as many as the plan's expert_memory holds, or, where none is given, as
    a token chooses."""

    @property
    def needs_profile(self) -> bool:
        return False

    def slots_of_layer(self, sizes: ModelSizes, held: int | None) -> int:
        """sizes: of the model that is priced, whose layers share the memory. held: how many experts the plan's memory
        holds, of all layers. Raises `EngineError`."""
        check_slots(self.slots, sizes)
        wanted = self.slots or (sizes.top_k if held is None else held // sizes.n_sparse_layers)
        least = sizes.n_sparse_layers * max(wanted, 1)
        if held is not None and held < least:
            raise FewSlotsError(
                f"the memory for experts holds {held}, and {max(wanted, 1)} in each of {sizes.n_sparse_layers} layers"
                f" need {least}",
                least,
            )
        return min(wanted, sizes.n_experts)

    def build(self, context: BuildContext) -> Slices:
        """Raises `EngineError`."""
        sizes = context.sizes
        if sizes is None:
            raise EngineError("a dense model has no experts to fetch; use dropless")
        if not self.prefetch:
            return Slices(context, sizes, None, ())
        n_slots = self.slots_of_layer(context.priced_sizes or sizes, context.expert_slots)
        return Slices(context, sizes, n_slots, context.sparse_layers)


class _OfGpu(NamedTuple):
    """The segments of calls that the GPU computes, and what each takes to travel. columns_X2: None: whole experts."""

    kinds: tuple[CallKind, ...]
    kind_C: Integers | None
    segment_X: Integers
    n_bytes_X: Integers
    columns_X2: Integers | None


class Slices:
    """An `engines.techniques.base.Move`."""

    keeps_what_lies = True

    def __init__(self, context: BuildContext, sizes: ModelSizes, n_slots: int | None, layers: Sequence[int]) -> None:
        """n_slots: of each layer; None where nothing is kept. layers: those with experts, where something is."""
        self.prefetches = n_slots is not None
        self.asks = NOTHING if n_slots is None else Asks(counts=True, slots={GPU: Slots(n_slots)})
        self._n_slots, self._layers = n_slots or 0, layers
        self._width, self._bytes = sizes.expert_width, context.bytes_to_move
        self._links = (Link(HOST, GPU),)
        self._known: dict[int, _OfGpu] = {}

    def moved(self, seen: LayerInput, calls: Calls, prediction: Prediction | None) -> Moved:
        if not self.prefetches:
            return Moved(self._passing(seen.layer, calls, None))
        assert seen.residency is not None
        assert seen.counts is not None  # it asks for both
        held_E = seen.residency.holds_E(GPU, seen.layer)
        passing = self._passing(seen.layer, calls, held_E)
        if seen.phase == "prefill":
            return Moved(passing)
        ids_TK = seen.routing.expert_ids_TK
        # A token chooses an expert once.
        chosen_X = ids_TK.numpy()[0] if len(ids_TK) == 1 and ids_TK.is_cpu else np.unique(calls.expert_S)
        hits, n_chosen = int(np.count_nonzero(held_E[chosen_X])), len(chosen_X)
        if seen.layer == self._layers[0] and not seen.counts.decode_LE[seen.layer].any():
            ahead = self._ahead(seen.counts.prefill_LE, seen.residency.whole_LE(GPU))
            passing = _joined(passing, ahead, self._width)
        return Moved(passing, hits=hits, misses=n_chosen - hits)

    def _passing(self, layer: int, calls: Calls, held_E: Booleans | None) -> Transfers:
        """What the GPU's calls need and does not lie there."""
        own = self._of_gpu(calls)
        expert_X, n_bytes_X, columns_X2 = calls.expert_S[own.segment_X], own.n_bytes_X, own.columns_X2
        if held_E is not None and len(expert_X):
            is_held_X = held_E[expert_X]
            if is_held_X.all():
                return NO_TRANSFERS
            if is_held_X.any():
                missing_X = ~is_held_X
                expert_X, n_bytes_X = expert_X[missing_X], n_bytes_X[missing_X]
                columns_X2 = None if columns_X2 is None else columns_X2[missing_X]
        n = len(expert_X)
        if n == 0:
            return NO_TRANSFERS
        layer_M, stays_M = np.full(n, layer), np.zeros(n, dtype=np.bool_)
        return Transfers(expert_X, layer_M, n_bytes_X, self._links, width_M2=columns_X2, stays_M=stays_M)

    def _of_gpu(self, calls: Calls) -> _OfGpu:
        """Calls of one token share their kinds with those of the tokens before."""
        known = self._known.get(id(calls.kinds))
        if known is None or known.kinds is not calls.kinds or known.kind_C is not calls.kind_C:
            known = self._told(calls)
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[id(calls.kinds)] = known
        return known

    def _told(self, calls: Calls) -> _OfGpu:
        is_here_K = np.array([kind.unit == GPU for kind in calls.kinds], dtype=np.bool_)
        columns_K2 = np.array([kind.width or (0, self._width) for kind in calls.kinds], dtype=np.int64).reshape(-1, 2)
        # Every call is of one expert: rows are exact.
        kind_X = np.zeros(len(calls.expert_S), dtype=np.int64) if calls.kind_C is None else calls.kind_C
        segment_X = is_here_K[kind_X].nonzero()[0]
        columns_X2 = columns_K2[kind_X[segment_X]]
        n_columns_X = columns_X2[:, 1] - columns_X2[:, 0]
        is_whole = bool((n_columns_X == self._width).all())
        n_bytes_X = self._bytes * n_columns_X // self._width
        return _OfGpu(calls.kinds, calls.kind_C, segment_X, n_bytes_X, None if is_whole else columns_X2)

    def _ahead(self, prefill_LE: Integers, held_LE: Booleans) -> Transfers:
        """Of all layers, the most chosen experts that do not lie there yet, each into a free slot or another's."""
        layer_M: list[int] = []
        expert_M: list[int] = []
        replaced_M: list[tuple[int, int]] = []
        for layer in self._layers:
            ranked = np.argsort(-prefill_LE[layer], kind="stable")[: self._n_slots]
            wanted_E = np.zeros(prefill_LE.shape[1], dtype=np.bool_)
            wanted_E[ranked[prefill_LE[layer][ranked] > 0]] = True
            coming = (wanted_E & ~held_LE[layer]).nonzero()[0].tolist()
            going = (held_LE[layer] & ~wanted_E).nonzero()[0].tolist()
            n_free = self._n_slots - int(np.count_nonzero(held_LE[layer]))
            layer_M += [layer] * len(coming)
            expert_M += coming
            replaced_M += [LayerExpert(-1, -1)] * min(n_free, len(coming))
            replaced_M += [LayerExpert(layer, expert) for expert in going[: max(len(coming) - n_free, 0)]]
        if not expert_M:
            return NO_TRANSFERS
        return Transfers(
            np.array(expert_M, dtype=np.int64),
            np.array(layer_M, dtype=np.int64),
            np.full(len(expert_M), self._bytes),
            self._links,
            replaced_M2=np.array(replaced_M, dtype=np.int64),
        )


def _joined(passing: Transfers, ahead: Transfers, width: int) -> Transfers:
    """What passes through first: calls wait for it."""
    if not len(passing) or not len(ahead):
        return passing if len(passing) else ahead
    n, m = len(passing), len(ahead)
    whole_M2 = np.array([[0, width]])
    columns_M2 = None
    if passing.width_M2 is not None:
        columns_M2 = np.concatenate([passing.width_M2, whole_M2.repeat(m, 0)])
    assert ahead.replaced_M2 is not None
    return Transfers(
        np.concatenate([passing.expert_M, ahead.expert_M]),
        np.concatenate([passing.layer_M, ahead.layer_M]),
        np.concatenate([passing.n_bytes_M, ahead.n_bytes_M]),
        passing.links,
        width_M2=columns_M2,
        replaced_M2=np.concatenate([np.full((n, 2), -1), ahead.replaced_M2]),
        stays_M=np.arange(n + m) >= n,
    )
