"""Experts that stay in the mapped checkpoint file, and the few that lie in memory: the slots of a budget.

A slot holds one expert of any layer, its biases too. What is loaded is copied from the file into a slot, in the form in
which it computes. Experts that the checkpoint holds in another form (stacked, packed, in FP8 blocks, or to be narrowed)
are made once, on loading, into a file of their own, whose bytes are copied as they are. The file's pages are given back
at once: the process holds the slots and no expert beside them. (The system may keep the file in its page cache; what is
copied then comes from memory, not from the disk.)

Legend: T tokens, H hidden, I expert width, E experts, L layers with experts, S segments of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from engines.calls import CallKind
from engines.dispatch import FILE, DispatchPlan, LayerExpert
from engines.errors import EngineError
from engines.kernels import tables
from engines.model.copier import Copier, CopyJob, CopyQueue, Mark, Part
from engines.model.copy_stamps import CopyStamps, Timed
from engines.model.experts import ExpertWeights, GatedWeights, Wave, execute
from engines.model.made_experts import ALIGNMENT, tensors_of, with_tensors, without_values
from engines.model.quantised import Arithmetic, Form, Matrix, QuantisedMatrix, store
from engines.model.tensor_files import give_back, is_mapped
from results.counters import EngineCounters


class Copied(NamedTuple):
    """What was copied into slots since it was asked last: experts that their own layer waited for, experts of later
    layers, and bytes as they were read. hits: of the experts called, those that lay there; unused: of those copied
    ahead, the ones that nothing called. None: not known here. timed: when."""

    waited_for: int
    ahead: int
    n_bytes: int
    hits: int | None = None
    unused: int | None = None
    timed: Timed | None = None

    def observed(self, planned: EngineCounters) -> EngineCounters:
        """What was planned, where it was copied otherwise: an expert may be copied twice."""
        found: dict[str, float] = {"bytes_moved": self.n_bytes, "bytes_copied": self.n_bytes, "misses": self.waited_for}
        if self.timed is not None:
            found |= {"copying_s": self.timed.copying_s}
        if self.timed is not None and self.timed.times is not None:
            found |= {f"decode_{name}": s for name, s in self.timed.times._asdict().items()}
        known = {"hits": self.hits, "prefetched_unused": self.unused if planned.prefetched is not None else None}
        return planned.model_copy(update=found | {name: n for name, n in known.items() if n is not None})


def slot_bytes(hidden: int, expert_width: int, form: Form, biased: bool = False) -> int:
    """What one slot takes of the budget. form: of the matrices in it. biased: experts have biases, which are fp32."""
    like = _likeness(hidden, expert_width, form, biased)
    return sum(_aligned(tensor.nbytes) for tensor in tensors_of(like))


def _likeness(hidden: int, width: int, form: Form, biased: bool, arithmetic: Arithmetic = "fp32") -> GatedWeights:
    """An expert without values."""

    def matrix(n_rows: int, n_columns: int) -> Matrix:
        row = store(torch.zeros(1, n_columns), form, arithmetic)  # rows are alike in every form
        if isinstance(row, Tensor):
            return _rows(row, n_rows)
        return replace(row, values=_rows(row.values, n_rows), scales=_rows(row.scales, n_rows))

    def bias(n_rows: int) -> Tensor | None:
        return torch.empty(n_rows, device="meta") if biased else None

    matrices = matrix(width, hidden), matrix(width, hidden), matrix(hidden, width)
    return GatedWeights(*matrices, bias(width), bias(width), bias(hidden))


def _rows(row: Tensor, n_rows: int) -> Tensor:
    return torch.empty(n_rows, *row.shape[1:], dtype=row.dtype, device="meta")


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


class ExpertSlots:
    """The slots of one engine. Everything is loaded by plans' transfers from `FILE`."""

    def __init__(
        self,
        layers: Sequence[ExpertWeights | None],
        n_slots: int,
        form: Form,
        copier: CopyQueue | None = None,
        stamps: CopyStamps | None = None,
    ) -> None:
        """layers: of all layers, None of dense ones; their matrices are views of a file. form: in slots; a plain one is
        made of the file's when an expert is loaded, a narrow one is the file's.

        Raises `EngineError` where they are not.
        """
        sparse = [layer for layer in layers if layer is not None]
        for expert in (one for layer in sparse for one in layer.experts):
            if not all(map(is_mapped, tensors_of(expert))):
                raise EngineError("slots are filled from a file, and experts lie in memory; load them experts_as_filed")
        one = sparse[0].experts[0]
        width, hidden = one.gate_IH.shape
        biased = one.gate_bias_I is not None
        self._n_slots = n_slots
        self._copier, self._job_of = copier or Copier(), dict[LayerExpert, CopyJob]()
        held = self._copier.held(layers)
        arithmetic = one.gate_IH.arithmetic if isinstance(one.gate_IH, QuantisedMatrix) else "fp32"
        like = _likeness(hidden, width, form, biased, arithmetic)
        if self._copier.device.type != "cpu":
            like = without_values(next(layer for layer in held if layer is not None).experts[0])
        if len(tensors_of(like)) != len(tensors_of(one)):
            raise EngineError(f"slots hold {form}, and the file other experts; load the checkpoint in that form")
        one_slot = sum(_aligned(tensor.nbytes) for tensor in tensors_of(like))
        self._memory = torch.empty(n_slots * one_slot, dtype=torch.uint8, device=self._copier.device)
        self._slots = [_slot(row, like) for row in self._memory.view(n_slots, -1)]
        self._read: list[Mark] = [self._copier.mark()] * n_slots
        """Of each slot: behind all that reads what lay there last."""
        self._sources = [None if layer is None else layer.experts for layer in held]
        self._files = [None if layer is None else layer.experts for layer in layers]
        self._layers = [None if layer is None else emptied(layer, self._slots[0]) for layer in layers]
        self._place: dict[LayerExpert, int] = {}
        self.at_hand_LE = np.zeros((len(layers), len(sparse[0].experts)), dtype=np.bool_)
        """Whether an expert lies in a slot, whole: not while it is being copied, nor until somebody waited for that."""
        self._copied = Copied(0, 0, 0)
        self.stamps = stamps or CopyStamps(self._copier)
        self.clear()

    @property
    def n_bytes(self) -> int:
        """Of all slots."""
        return self._memory.nbytes

    def clear(self) -> None:
        """Nothing lies in the slots, and nothing of the experts' file in the process."""
        self._copier.finish()
        for place in list(self._place):
            self._leave(place)
        self._free = list(range(self._n_slots))[::-1]
        for experts in self._files:
            for expert in experts or ():
                for part in tensors_of(expert):
                    give_back(part)

    def table(self, layer: int) -> tables.ExpertTable | None:
        """Of a sparse layer's experts as the kernels read them; of those alone that are at hand."""
        own = self._layers[layer]
        return None if own is None else own.table

    def break_off(self) -> None:
        """What is on its way comes without a stated rate's pauses."""
        self._copier.break_off()

    def take_copied(self) -> Copied:
        copied, self._copied = self._copied, Copied(0, 0, 0)
        return copied._replace(timed=self.stamps.take_times())

    def execute(self, layer: int, plan: DispatchPlan, hidden_TH: Tensor) -> Tensor:
        """`engines.model.experts.execute`, every expert out of its slot: bit for bit the same, in whatever waves.

        Experts of later layers are copied while the calls run, but for those that take the slot of one called. Raises
        `EngineError` where a call's expert lies in no slot.
        """
        own = self._layers[layer]
        assert own is not None  # plans are of sparse layers
        if not len(plan.transfers):
            self._arrive(own, plan.calls.expert_S.tolist(), layer)
            out_TH = execute(plan, hidden_TH, own)
            self.stamps.end_layer(layer)
            return out_TH
        ahead: list[tuple[LayerExpert, LayerExpert | None]] = []
        out_TH = execute(plan, hidden_TH, own, self._waves(layer, own, plan, ahead))
        for place, replaced in ahead:
            self._load(place, replaced, is_ahead=True)
        self.stamps.end_layer(layer)
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
                self._arrive(own, called_S[done:needed], layer)
                yield Wave(done, needed)
                done = needed
            self._load(place, replaced, is_ahead=False)
        called = {LayerExpert(layer, expert) for expert in called_S}
        while ahead and ahead[0][1] not in called:
            self._load(*ahead.pop(0), is_ahead=True)
        self._arrive(own, called_S[done:], layer)
        yield Wave(done, len(called_S))

    def _load(self, place: LayerExpert, replaced: LayerExpert | None, is_ahead: bool) -> None:
        if place in self._place:
            raise EngineError(f"expert {place.expert} of layer {place.layer} is loaded, and a plan loads it again")
        if replaced is not None:
            self._leave(replaced)
        if not self._free:
            raise EngineError(f"a plan fills more than the {self._n_slots} slots that there are")
        number = self._free.pop()
        experts, own = self._sources[place.layer], self._layers[place.layer]
        assert experts is not None
        assert own is not None
        slot, expert = self._slots[number], experts[place.expert]
        parts = [Part(*pair) for pair in zip(slot.tensors, tensors_of(expert), strict=True)]
        self._job_of[place] = job = self._copier.start(parts, after=self._read[number])
        self.stamps.copies(place.layer, job, is_ahead)
        own.put(place.expert, slot)
        self._place[place] = number
        waited_for, ahead, n_bytes = self._copied[:3]
        self._copied = Copied(waited_for + (not is_ahead), ahead + is_ahead, n_bytes + expert.n_bytes)

    def _leave(self, place: LayerExpert) -> None:
        number = self._place.pop(place, None)
        if number is None:
            raise EngineError(f"expert {place.expert} of layer {place.layer} is in no slot, and a plan replaces it")
        own = self._layers[place.layer]
        assert own is not None
        own.put(place.expert, None)
        self._job_of.pop(place, None)
        self.at_hand_LE[place] = False
        self._read[number] = self._copier.mark()
        self._free.append(number)

    def _arrive(self, own: SlottedExperts, called: Sequence[int], layer: int) -> None:
        """Waits for those of the called that are being copied."""
        missing = [expert for expert in called if own.experts.held[expert] is None]
        if missing:
            raise EngineError(f"layer {layer} calls experts {missing}, which lie in no slot; a move must fetch them")
        if self._job_of:
            jobs = [self._job_of.pop(LayerExpert(layer, expert), None) for expert in called]
            self.stamps.wait(layer, [job for job in jobs if job is not None])
            self.at_hand_LE[layer][called] = True


@dataclass(frozen=True)
class Slot:
    """Room for one expert, and the same as the kernels read it; None of an expert with biases, or where they do not."""

    weights: GatedWeights
    tensors: tuple[Tensor, ...]
    described: tables.ExpertTable | None

    @property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix]:
        return self.weights.gate_IH, self.weights.up_IH, self.weights.down_HI


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
    slots_table: tables.ExpertTable | None = None

    @cached_property
    def table(self) -> tables.ExpertTable | None:
        return self.slots_table

    def parts(self, kind: CallKind) -> ExpertWeights:
        if not kind.is_whole:
            raise EngineError("slots hold whole experts, and a plan computes slices")
        return self

    def put(self, expert: int, slot: Slot | None) -> None:
        """None: nothing lies there, and nothing may be computed."""
        self.experts.held[expert] = None if slot is None else slot.weights
        if self.slots_table is not None and slot is not None and slot.described is not None:
            self.slots_table.matrices[3 * expert : 3 * expert + 3] = list(slot.described.matrices)


def _slot(memory: Tensor, like: GatedWeights) -> Slot:
    tensors, begin = [], 0
    for one in tensors_of(like):
        tensors.append(memory[begin : begin + one.nbytes].view(one.dtype).view(one.shape))
        begin += _aligned(one.nbytes)
    weights = with_tensors(like, tensors)
    return Slot(weights, tuple(tensors), weights.table)


def emptied(layer: ExpertWeights, slot: Slot) -> SlottedExperts:
    """No expert lies in a slot; the kernels' table names the first slot for each until then."""
    n_experts, table = len(layer.experts), None
    if slot.described is not None and layer.kernels_know_it:
        table = tables.expert_table([slot.matrices] * n_experts)
    return SlottedExperts(_Held(n_experts), layer.unit, layer.weights_input, table)
