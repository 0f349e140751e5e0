"""Experts that stay in the mapped checkpoint file, and the few that lie in memory: the slots of a budget.

A slot holds one expert of any layer. What is loaded is copied from the file into a slot, in the form in which it
computes, and the file's pages are given back at once: the process holds the slots and no expert beside them. (The
system may keep the file in its page cache; what is copied then comes from memory, not from the disk.)

Legend: E experts, S segments of a plan, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

import torch
from torch import Tensor

from engines.calls import CallKind
from engines.dispatch import FILE, DispatchPlan, LayerExpert
from engines.errors import EngineError
from engines.kernels import native
from engines.model.experts import ExpertWeights, GatedWeights, Wave, execute
from engines.model.tensor_files import give_back, is_mapped

ALIGNMENT = 64
"""Bytes at which a matrix begins in its slot: a cache line, and what the kernels' widest loads ask."""


class Copied(NamedTuple):
    """What was copied into slots since it was asked last: experts that their own layer waited for, experts of later
    layers, and bytes read from the file."""

    waited_for: int
    ahead: int
    n_bytes: int


def slot_bytes(hidden: int, expert_width: int, dtype: torch.dtype) -> int:
    """What one slot takes of the budget."""
    one = hidden * expert_width * dtype.itemsize
    return 3 * -(-one // ALIGNMENT) * ALIGNMENT


class ExpertSlots:
    """The slots of one engine. Everything is loaded by plans' transfers from `FILE`."""

    def __init__(self, layers: Sequence[ExpertWeights | None], n_slots: int, dtype: torch.dtype) -> None:
        """layers: of all layers, None of dense ones; their matrices are views of the file. dtype: in slots.

        Raises `EngineError` where they are not.
        """
        sparse = [layer for layer in layers if layer is not None]
        for expert in (one for layer in sparse for one in layer.experts):
            if expert.gate_bias_I is not None or not all(is_mapped(part) for part in _parts(expert)):
                raise EngineError(
                    "experts of this checkpoint do not lie in the file as they compute (biases, packed or stacked"
                    " matrices, or FP8 blocks), and expert_memory keeps them there; leave it out"
                )
        width, hidden = sparse[0].experts[0].gate_IH.shape
        self._n_slots = n_slots
        self._memory = torch.empty(n_slots * slot_bytes(hidden, width, dtype), dtype=torch.uint8)
        self._slots = [_slot(row, hidden, width, dtype) for row in self._memory.view(n_slots, -1)]
        self._files = [None if layer is None else layer.experts for layer in layers]
        self._layers = [None if layer is None else _emptied(layer, self._slots[0]) for layer in layers]
        self._place: dict[LayerExpert, int] = {}
        self._copied = Copied(0, 0, 0)
        self.clear()

    @property
    def n_bytes(self) -> int:
        """Of all slots."""
        return self._memory.nbytes

    def clear(self) -> None:
        """Nothing lies in the slots, and nothing of the experts' file in the process."""
        for place in list(self._place):
            self._leave(place)
        self._free = list(range(self._n_slots))[::-1]
        for experts in self._files:
            for expert in experts or ():
                for part in _parts(expert):
                    give_back(part)

    def take_copied(self) -> Copied:
        copied, self._copied = self._copied, Copied(0, 0, 0)
        return copied

    def execute(self, layer: int, plan: DispatchPlan, hidden_TH: Tensor) -> Tensor:
        """`engines.model.experts.execute`, every expert out of its slot: bit for bit the same, in whatever waves.

        Prefetches follow the calls. Raises `EngineError` where a call's expert lies in no slot.
        """
        own = self._layers[layer]
        assert own is not None  # plans are of sparse layers
        if not len(plan.transfers):
            self._check(own, plan.calls.expert_S.tolist(), layer)
            return execute(plan, hidden_TH, own)
        ahead: list[tuple[LayerExpert, LayerExpert | None]] = []
        out_TH = execute(plan, hidden_TH, own, self._waves(layer, own, plan, ahead))
        for place, replaced in ahead:
            self._load(place, replaced)
        n_ahead = len(ahead)
        done = self._copied
        self._copied = done._replace(waited_for=done.waited_for - n_ahead, ahead=done.ahead + n_ahead)
        return out_TH

    def _waves(
        self,
        layer: int,
        own: SlottedExperts,
        plan: DispatchPlan,
        ahead: list[tuple[LayerExpert, LayerExpert | None]],
    ) -> Iterator[Wave]:
        """Segments whose experts lie in slots together. A transfer into the slot of an expert that is still to be
        computed waits until it is. ahead: what later layers wait for is put there."""
        called_S = plan.calls.expert_S.tolist()
        first_of = {expert: s for s, expert in reversed(list(enumerate(called_S)))}
        last_of = {expert: s for s, expert in enumerate(called_S)}
        done = 0
        for transfer in plan.transfers:
            if transfer.source != FILE:
                raise EngineError(f"a slot is filled from the file, and a plan says from {transfer.source}")
            place = LayerExpert(transfer.layer, transfer.expert)
            if transfer.layer != layer:
                ahead.append((place, transfer.replaces))
                continue
            needed = first_of.get(transfer.expert, len(called_S))
            replaced = transfer.replaces
            if replaced is not None and replaced.layer == layer and done <= last_of.get(replaced.expert, -1) < needed:
                self._check(own, called_S[done:needed], layer)
                yield Wave(done, needed)
                done = needed
            self._load(place, replaced)
        self._check(own, called_S[done:], layer)
        yield Wave(done, len(called_S))

    def _load(self, place: LayerExpert, replaced: LayerExpert | None) -> None:
        if place in self._place:
            raise EngineError(f"expert {place.expert} of layer {place.layer} is loaded, and a plan loads it again")
        if replaced is not None:
            self._leave(replaced)
        if not self._free:
            raise EngineError(f"a plan fills more than the {self._n_slots} slots that there are")
        number = self._free.pop()
        experts, own = self._files[place.layer], self._layers[place.layer]
        assert experts is not None
        assert own is not None
        slot, expert = self._slots[number], experts[place.expert]
        for into, part in zip(slot.matrices, _parts(expert), strict=True):
            into.copy_(part)
            give_back(part)
        own.put(place.expert, slot)
        self._place[place] = number
        n, ahead, n_bytes = self._copied
        self._copied = Copied(n + 1, ahead, n_bytes + expert.n_bytes)

    def _leave(self, place: LayerExpert) -> None:
        number = self._place.pop(place, None)
        if number is None:
            raise EngineError(f"expert {place.expert} of layer {place.layer} is in no slot, and a plan replaces it")
        own = self._layers[place.layer]
        assert own is not None
        own.put(place.expert, None)
        self._free.append(number)

    def _check(self, own: SlottedExperts, called: Sequence[int], layer: int) -> None:
        missing = [expert for expert in called if own.experts.held[expert] is None]
        if missing:
            raise EngineError(f"layer {layer} calls experts {missing}, which lie in no slot; a move must fetch them")


@dataclass(frozen=True)
class _Slot:
    weights: GatedWeights
    matrices: tuple[Tensor, Tensor, Tensor]
    described: native.ExpertTable | None


class _Held(Sequence[GatedWeights]):
    """The experts of a layer that lie in slots."""

    def __init__(self, n_experts: int) -> None:
        self.held: list[GatedWeights | None] = [None] * n_experts

    def __len__(self) -> int:
        return len(self.held)

    @overload
    def __getitem__(self, expert: int) -> GatedWeights: ...
    @overload
    def __getitem__(self, expert: slice) -> Sequence[GatedWeights]: ...
    def __getitem__(self, expert: int | slice) -> GatedWeights | Sequence[GatedWeights]:
        found = self.held[expert]
        assert isinstance(found, GatedWeights)  # whoever computes has checked
        return found


@dataclass(frozen=True)
class SlottedExperts(ExpertWeights):
    """A layer's experts, of which the kernels' table names those in slots."""

    experts: _Held
    slots_table: native.ExpertTable | None = None

    @cached_property
    def table(self) -> native.ExpertTable | None:
        return self.slots_table

    def parts(self, kind: CallKind) -> ExpertWeights:
        if not kind.is_whole:
            raise EngineError("slots hold whole experts, and a plan computes slices")
        return self

    def put(self, expert: int, slot: _Slot | None) -> None:
        """None: nothing lies there, and nothing may be computed."""
        self.experts.held[expert] = None if slot is None else slot.weights
        if self.slots_table is not None and slot is not None and slot.described is not None:
            self.slots_table.matrices[3 * expert : 3 * expert + 3] = list(slot.described.matrices)


def _slot(memory: Tensor, hidden: int, width: int, dtype: torch.dtype) -> _Slot:
    parts = memory.view(3, -1)[:, : hidden * width * dtype.itemsize]
    gate_IH, up_IH = (part.view(dtype).view(width, hidden) for part in parts[:2])
    matrices = gate_IH, up_IH, parts[2].view(dtype).view(hidden, width)
    return _Slot(GatedWeights(*matrices), matrices, native.expert_table([matrices]))


def _emptied(layer: ExpertWeights, slot: _Slot) -> SlottedExperts:
    """No expert lies in a slot; the kernels' table names the first slot for each until then."""
    n_experts, table = len(layer.experts), None
    if slot.described is not None and layer.kernels_know_it:
        table = native.expert_table([slot.matrices] * n_experts)
    return SlottedExperts(_Held(n_experts), layer.unit, layer.weights_input, table)


def _parts(expert: GatedWeights) -> tuple[Tensor, Tensor, Tensor]:
    parts = expert.gate_IH, expert.up_IH, expert.down_HI
    if not all(isinstance(part, Tensor) for part in parts):
        raise EngineError("quantised experts are made on loading, and expert_memory keeps experts in the file")
    return parts  # type: ignore[return-value]
