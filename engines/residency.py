"""Which slice of which expert of which layer lies in which memory, and what was used when.

The engine owns it, applies every executed plan to it once, and shows it to the technique. Arrays throughout: a decode
step asks and applies it for every layer.

Legend: L layers, E experts, X experts called or what happens to them, S segments, M transfers, T tokens, K experts per
token, P places: layer and expert in one number, or routed pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from devices.base import Unit
from engines.calls import Integers
from engines.dispatch import DispatchPlan, LayerExpert, Transfers
from engines.errors import EngineError

Phase = Literal["prefill", "decode"]
Booleans = NDArray[np.bool_]


class Slots(NamedTuple):
    """How many experts a memory holds at once: of each layer, or of all layers together. A slice takes its share.

    from_start: those that lie in slots before anything ran, as weights that are loaded with the model.
    """

    n: int
    of: Literal["layer", "model"] = "layer"
    from_start: tuple[LayerExpert, ...] = ()


class Residency:
    """What lies where. At first what lies there from the start.

    uses_LE, last_use_LE: plans that called the expert, and the number of the last one, from 1; 0 for never. They go on
    where an expert is replaced. n_plans_1: how many there were, one number.
    """

    def __init__(self, n_layers: int, n_experts: int, expert_width: int, slots: Mapping[Unit, Slots]) -> None:
        """slots: of the memories that are watched; what is sent to others is not kept here."""
        self._shape = n_layers, n_experts
        self._expert_width = expert_width
        self.slots = dict(slots)
        self.uses_LE, self.last_use_LE = np.zeros((2, *self._shape), dtype=np.int64)
        self.n_plans_1 = np.zeros(1, dtype=np.int64)
        self.reset()

    def reset(self) -> None:
        """What lies somewhere lay there from the start, and nothing was used."""
        # In their place: the kernels count uses there too.
        self.uses_LE[:], self.last_use_LE[:], self.n_plans_1[:] = 0, 0, 0
        self._columns_LE2: dict[Unit, Integers] = {u: np.zeros((*self._shape, 2), np.int64) for u in self.slots}
        self._whole_LE: dict[Unit, Booleans] = {u: np.zeros(self._shape, np.bool_) for u in self.slots}
        for unit, slots in self.slots.items():
            for layer, expert in slots.from_start:
                self._columns_LE2[unit][layer, expert] = 0, self._expert_width
                self._whole_LE[unit][layer, expert] = True
        self._n_held_L = {unit: self._n_columns(unit, slice(None)) for unit in self.slots}
        self._waiting_LE = np.zeros(self._shape, dtype=np.bool_)
        self._n_waiting = self._n_unused = 0
        self._has_prefetched = False
        for unit, slots in self.slots.items():
            for layer in {layer for layer, _ in slots.from_start}:
                self._check_room(unit, layer)

    def copy(self) -> Residency:
        """The same, to go on apart."""
        made = copy(self)
        made.uses_LE, made.last_use_LE = self.uses_LE.copy(), self.last_use_LE.copy()
        made.n_plans_1 = self.n_plans_1.copy()
        made._columns_LE2 = {unit: columns_LE2.copy() for unit, columns_LE2 in self._columns_LE2.items()}
        made._whole_LE = {unit: whole_LE.copy() for unit, whole_LE in self._whole_LE.items()}
        made._n_held_L = {unit: n_held_L.copy() for unit, n_held_L in self._n_held_L.items()}
        made._waiting_LE = self._waiting_LE.copy()
        return made

    def is_as(self, other: Residency) -> bool:
        """Whether the same lies in the same places and was used alike."""
        same = [(self.uses_LE, other.uses_LE), (self.last_use_LE, other.last_use_LE), (self.n_plans_1, other.n_plans_1)]
        same += [(self._columns_LE2[unit], other._columns_LE2[unit]) for unit in self.slots]
        return all(np.array_equal(own, its) for own, its in same)

    def holds_E(self, unit: Unit, layer: int) -> Booleans:
        """Whether the unit's memory holds the whole expert. Not to be written to."""
        held_E: Booleans = self._whole_LE[unit][layer]
        return held_E

    def whole_LE(self, unit: Unit) -> Booleans:
        """The same of all layers."""
        return self._whole_LE[unit]

    def columns_E2(self, unit: Unit, layer: int) -> Integers:
        """First and end of the intermediate columns that it holds of each expert; both 0 for none. Not to be written
        to."""
        columns_E2: Integers = self._columns_LE2[unit][layer]
        return columns_E2

    def n_free(self, unit: Unit, layer: int) -> float:
        """Slots that nothing lies in: of the layer, or of the model. Slices take their share of one."""
        slots, n_held_L = self.slots[unit], self._n_held_L[unit]
        return slots.n - int(n_held_L[layer] if slots.of == "layer" else n_held_L.sum()) / self._expert_width

    def _n_columns(self, unit: Unit, layers: slice) -> Integers:
        """Of each of these layers, the columns of all experts that it holds."""
        held_LE2 = self._columns_LE2[unit][layers]
        found: Integers = held_LE2[..., 1].sum(axis=1) - held_LE2[..., 0].sum(axis=1)
        return found

    def apply(self, layer: int, plan: DispatchPlan) -> None:
        """What lies where once the plan of a layer ran. Raises `EngineError` where it fills more slots than there
        are."""
        self.n_plans_1 += 1
        called_X = plan.calls.expert_S
        self.last_use_LE[layer][called_X] = self.n_plans_1[0]
        uses_E = self.uses_LE[layer]
        uses_E[called_X] = uses_E[called_X] + 1  # once, however many slices it was called in
        self.passed(layer, called_X)
        if len(plan.transfers):
            self._move(layer, plan.transfers)

    def apply_token(
        self, unit: Unit, first_layer: int, called_LK: Integers, place_X: Integers, comes_X: Booleans
    ) -> None:
        """The same of one token in several layers, one after another, whose plans were not made. place_X, comes_X: what
        happens to whole experts on that unit, in turn: that of a place in [L, E] comes, or goes."""
        n_layers = len(called_LK)
        layers = slice(first_layer, first_layer + n_layers)
        np.put_along_axis(self.last_use_LE[layers], called_LK, self.n_plans_1 + np.arange(1, n_layers + 1)[:, None], 1)
        self.n_plans_1 += n_layers
        uses_LE = self.uses_LE[layers]
        np.put_along_axis(uses_LE, called_LK, np.take_along_axis(uses_LE, called_LK, 1) + 1, 1)
        if self._n_waiting:
            for layer, called_K in enumerate(called_LK, first_layer):
                self.passed(layer, called_K)
        self._set_whole(unit, place_X, comes_X)
        self._check_room(unit, first_layer + int(self._n_held_L[unit][layers].argmax()))

    def passed(self, layer: int, called_X: Integers) -> None:
        """What was fetched ahead and is called now was not fetched for nothing."""
        if self._n_waiting:
            waiting_E = self._waiting_LE[layer]
            self._n_waiting -= int(waiting_E[np.unique(called_X)].sum())
            waiting_E[called_X] = False

    def take_unused(self) -> int | None:
        """Prefetched experts that left their slot, or lie there still, without having been called; none counts twice.

        Asked at the end of a request: what nobody needed until then was fetched for nothing. None where nothing was
        ever prefetched.
        """
        if not self._has_prefetched:
            return None
        unused = self._n_unused + self._n_waiting
        self._waiting_LE[:] = False
        self._n_waiting = self._n_unused = 0
        return unused

    def _move(self, layer: int, transfers: Transfers) -> None:
        n_experts = self._shape[1]
        if len(transfers.links) == 1 and transfers.stays_M is None and transfers.width_M2 is None:
            (link,) = transfers.links
            if link.target in self.slots and not self._n_waiting and bool((transfers.layer_M == layer).all()):
                self._exchange_whole(link.target, layer, transfers)
                return
        link_M = np.zeros(len(transfers), dtype=np.int64) if transfers.link_M is None else transfers.link_M
        for number, link in enumerate(transfers.links):
            if link.target not in self.slots:
                continue
            own_M = link_M == number
            if transfers.stays_M is not None:
                own_M &= transfers.stays_M
            if not own_M.any():
                continue
            layer_M = transfers.layer_M[own_M]
            arriving_M = layer_M * n_experts + transfers.expert_M[own_M]
            leaving_M = np.full(len(arriving_M), -1)
            if transfers.replaced_M2 is not None:
                replaced_M2 = transfers.replaced_M2[own_M]
                leaving_M = np.where(replaced_M2[:, 1] < 0, -1, replaced_M2[:, 0] * n_experts + replaced_M2[:, 1])
            columns_M2 = np.array([[0, self._expert_width]]).repeat(len(arriving_M), 0)
            if transfers.width_M2 is not None:
                columns_M2 = transfers.width_M2[own_M]
            self._exchange(link.target, leaving_M, arriving_M, columns_M2, layer_M > layer)

    def _exchange_whole(self, unit: Unit, layer: int, transfers: Transfers) -> None:
        """As `_exchange`, of whole experts of the layer that ran: a cache's, at every layer of every step."""
        n_experts, expert_M = self._shape[1], transfers.expert_M
        event_X = np.full(2 * len(expert_M), -1)
        event_X[1::2] = layer * n_experts + expert_M
        if transfers.replaced_M2 is not None:
            replaced_M2 = transfers.replaced_M2
            event_X[::2] = np.where(replaced_M2[:, 1] < 0, -1, replaced_M2[:, 0] * n_experts + replaced_M2[:, 1])
        comes_X = np.arange(len(event_X)) % 2 == 1
        happens_X = event_X >= 0
        event_X, comes_X = event_X[happens_X], comes_X[happens_X]
        self._set_whole(unit, event_X, comes_X)
        self._check_room(unit, layer)

    def _set_whole(self, unit: Unit, event_X: Integers, comes_X: Booleans) -> None:
        """Experts come whole, or go; the last thing that happens to one is what it comes to."""
        columns_P2 = self._columns_LE2[unit].reshape(-1, 2)
        columns_P2[event_X, 0] = 0
        columns_P2[event_X, 1] = comes_X * self._expert_width
        self._whole_LE[unit].reshape(-1)[event_X] = comes_X
        self._changed(unit, event_X)

    def _changed(self, unit: Unit, event_X: Integers) -> None:
        """Counts again what is held of the layers of these experts."""
        layers = list({event // self._shape[1] for event in event_X.tolist()})
        held_XE2 = self._columns_LE2[unit][layers]
        self._n_held_L[unit][layers] = held_XE2[..., 1].sum(1) - held_XE2[..., 0].sum(1)

    def _exchange(
        self, unit: Unit, leaving_M: Integers, arriving_M: Integers, columns_M2: Integers, ahead_M: Booleans
    ) -> None:
        """One transfer after the other: the last thing that happens to an expert is what it comes to."""
        event_X = np.stack([leaving_M, arriving_M], 1).reshape(-1)
        columns_X2 = np.stack([np.zeros_like(columns_M2), columns_M2], 1).reshape(-1, 2)
        is_ahead_X = np.stack([np.zeros_like(ahead_M), ahead_M], 1).reshape(-1)
        happens_X = event_X >= 0
        event_X, columns_X2, is_ahead_X = event_X[happens_X], columns_X2[happens_X], is_ahead_X[happens_X]
        waiting_P = self._waiting_LE.reshape(-1)
        if self._n_waiting or is_ahead_X.any():
            self._has_prefetched = True
            for event, is_ahead in zip(event_X.tolist(), is_ahead_X.tolist(), strict=True):
                self._n_unused += bool(waiting_P[event]) and not is_ahead
                waiting_P[event] = is_ahead
            self._n_waiting = int(waiting_P.sum())
        self._columns_LE2[unit].reshape(-1, 2)[event_X] = columns_X2
        self._whole_LE[unit].reshape(-1)[event_X] = columns_X2[:, 1] - columns_X2[:, 0] == self._expert_width
        self._changed(unit, event_X)
        for moved_layer in {int(event) // self._shape[1] for event in arriving_M}:
            self._check_room(unit, moved_layer)

    def _check_room(self, unit: Unit, layer: int) -> None:
        if self.n_free(unit, layer) < -1e-9:
            slots = self.slots[unit]
            raise EngineError(f"a plan brings more experts to {unit} than its {slots.n} slots a {slots.of} hold")


class Counts:
    """How often each expert was chosen so far by the tokens of the requests that run. phase_LE: by the routers.

    busiest_L: the most pairs that one expert of the layer got in one step of prefill.
    """

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self.prefill_LE, self.decode_LE = np.zeros((2, n_layers, n_experts), dtype=np.int64)
        self.busiest_L = np.zeros(n_layers, dtype=np.int64)

    def reset(self) -> None:
        for counts in (self.prefill_LE, self.decode_LE, self.busiest_L):
            counts[:] = 0

    def add(self, layer: int, phase: Phase, expert_ids_TK: Tensor) -> None:
        counts_E = (self.prefill_LE if phase == "prefill" else self.decode_LE)[layer]
        ids_P = expert_ids_TK.reshape(-1).cpu().numpy()
        if len(expert_ids_TK) == 1:
            counts_E[ids_P] += 1  # a token chooses an expert once
            n_busiest = 1
        else:
            load_E = np.bincount(ids_P, minlength=len(counts_E))
            counts_E += load_E
            n_busiest = int(load_E.max())
        if phase == "prefill":
            self.busiest_L[layer] = max(int(self.busiest_L[layer]), n_busiest)
