"""Two buffers for experts that lie elsewhere, used in turn: one layer computes while the next one's experts arrive.

Algorithm 1 of 003: what a plan fetches ahead is copied into one buffer, while the calls of the layer before run from
the other. Copies are made one after another. What a layer lacks is copied first, and its calls wait for it; a copy
waits for the calls that read what lay in its place; nothing else waits. When a layer is done its buffer is empty again:
what the next token needs is copied anew. A thread of the CPU copies, or a stream of a GPU: see `CopyQueue`.

Experts come from the mapped file that they lie in: the checkpoint's, or one that they were made into on loading
(narrowed, packed, stacked, in FP8 blocks).

Legend: T tokens, H hidden, S segments of a plan, M transfers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.model.copier import CopyJob, CopyQueue, Mark, Part
from engines.model.copy_stamps import CopyStamps
from engines.model.experts import ExpertWeights, GatedWeights, Wave, execute
from engines.model.made_experts import ALIGNMENT, tensors_of, with_tensors
from engines.model.quantised import PLAIN_DTYPES, Form
from engines.model.slots import Copied, Slot, SlottedExperts, emptied

NOTHING_COPIED = Copied(0, 0, 0, 0, 0)


def buffered_bytes(expert: GatedWeights, form: Form) -> int:
    """What an expert takes of a buffer. form: in which it computes."""
    return sum(_aligned(part) for part in tensors_of(_like(expert, form, "meta")))


@dataclass
class _Buffer:
    """layer: whose experts it holds. slot_of, job_of: of an expert of that layer: where it lies, and its copying."""

    free: list[int]
    layer: int | None = None
    slot_of: dict[int, int] = field(default_factory=dict)
    job_of: dict[int, CopyJob] = field(default_factory=dict)


class LayerBuffers:
    """The two of one engine. Everything is loaded by plans' transfers: of the plan's layer, or of one after it."""

    def __init__(
        self,
        layers: Sequence[ExpertWeights | None],
        n_slots: int,
        form: Form,
        copier: CopyQueue,
        stamps: CopyStamps | None = None,
    ) -> None:
        """layers: of all layers, None of dense ones. n_slots: of both, half of them each. form: as they compute."""
        sparse = [number for number, layer in enumerate(layers) if layer is not None]
        self._sources = copier.held(layers)
        shape = next(layer for layer in self._sources if layer is not None).experts[0]
        self._copier = copier
        self._slots = [_slot(shape, form, copier.device) for _ in range(n_slots)]
        self._read: list[Mark] = [copier.mark()] * n_slots
        """Of each slot: behind all that reads what lay there last."""
        self.n_bytes = n_slots * buffered_bytes(shape, form)
        self._layers = [None if layer is None else emptied(layer, self._slots[0]) for layer in layers]
        half = n_slots // 2
        self._buffers = [_Buffer(list(range(half))), _Buffer(list(range(half, 2 * half)))]
        self._buffer_of = {layer: self._buffers[i % 2] for i, layer in enumerate(sparse)}
        self._copied = NOTHING_COPIED
        self.stamps = stamps or CopyStamps(copier)

    def clear(self) -> None:
        """Nothing lies in the buffers, and nothing is on its way."""
        self._copier.finish()
        for buffer in self._buffers:
            self._empty(buffer)

    def break_off(self) -> None:
        """What is on its way comes without a stated rate's pauses."""
        self._copier.break_off()

    def take_copied(self) -> Copied:
        copied, self._copied = self._copied, NOTHING_COPIED
        return copied._replace(timed=self.stamps.take_times())

    def execute(self, layer: int, plan: DispatchPlan, hidden_TH: Tensor) -> Tensor:
        """`engines.model.experts.execute`, every expert out of its buffer: bit for bit the same, in whatever waves.

        Raises `EngineError` where a call's expert is in no buffer and in no transfer.
        """
        own, buffer = self._layers[layer], self._buffer_of[layer]
        assert own is not None  # plans are of sparse layers
        if buffer.layer != layer:
            self._empty(buffer)
            buffer.layer = layer
        is_own_M = plan.transfers.layer_M == layer
        missing = plan.transfers.expert_M[is_own_M].tolist()
        ahead = list(
            zip(plan.transfers.layer_M[~is_own_M].tolist(), plan.transfers.expert_M[~is_own_M].tolist(), strict=True)
        )
        out_TH = execute(plan, hidden_TH, own, self._waves(layer, own, buffer, plan, missing, ahead))
        self._empty(buffer)
        self.stamps.end_layer(layer)
        return out_TH

    def _waves(
        self,
        layer: int,
        own: SlottedExperts,
        buffer: _Buffer,
        plan: DispatchPlan,
        missing: Sequence[int],
        ahead: Sequence[tuple[int, int]],
    ) -> Iterator[Wave]:
        """Segments whose experts lie in the buffer together: one wave, unless the layer calls more than it holds."""
        called_S = plan.calls.expert_S.tolist()
        first_of = {expert: s for s, expert in reversed(list(enumerate(called_S)))}
        last_of = {expert: s for s, expert in enumerate(called_S)}
        arrived = set(buffer.slot_of)  # ahead: of all that lies here now, each is a hit or was copied for nothing
        hits = first_of.keys() & arrived
        waiting = [(first_of[expert], expert) for expert in missing]
        heapify(waiting)
        done = 0
        while waiting:
            needed, expert = heappop(waiting)
            if not buffer.free:
                self._leave(own, buffer, [e for e in buffer.slot_of if last_of.get(e, -1) < done])
            if not buffer.free and done < needed:
                self._wait(layer, buffer, called_S[done:needed])
                yield Wave(done, needed)
                done = needed
                self._leave(own, buffer, [e for e in buffer.slot_of if last_of[e] < done])
            if not buffer.free:
                # All that lies here is needed yet: the last of it is copied a second time.
                goes = max(buffer.slot_of, key=lambda e: called_S.index(e, done))
                if first_of[goes] >= done:
                    hits.discard(goes)  # before it was called
                self._leave(own, buffer, [goes])
                heappush(waiting, (called_S.index(goes, done), goes))
            self._load(layer, buffer, expert, is_ahead=False)
            self._note(waited_for=1)
        for later, expert in ahead:
            self._load_ahead(later, expert)
        self._note(ahead=len(ahead), hits=len(hits), unused=len(arrived - hits))
        self._wait(layer, buffer, called_S[done:])
        yield Wave(done, len(called_S))

    def _load_ahead(self, layer: int, expert: int) -> None:
        buffer = self._buffer_of[layer]
        if buffer.layer != layer:
            self._empty(buffer)
            buffer.layer = layer
        self._load(layer, buffer, expert, is_ahead=True)

    def _load(self, layer: int, buffer: _Buffer, expert: int, is_ahead: bool) -> None:
        if expert in buffer.slot_of:
            raise EngineError(f"expert {expert} of layer {layer} is loaded, and a plan loads it again")
        if not buffer.free:
            raise EngineError(f"a plan fetches more experts of layer {layer} than a buffer holds")
        number = buffer.free.pop()
        experts, own = self._sources[layer], self._layers[layer]
        assert experts is not None
        assert own is not None
        slot, source = self._slots[number], experts.experts[expert]
        parts = [Part(*pair) for pair in zip(slot.tensors, tensors_of(source), strict=True)]
        job = self._copier.start(parts, after=self._read[number])
        buffer.slot_of[expert], buffer.job_of[expert] = number, job
        own.put(expert, slot)
        self.stamps.copies(layer, job, is_ahead)
        self._note(n_bytes=job.n_bytes)

    def _note(self, waited_for: int = 0, ahead: int = 0, n_bytes: int = 0, hits: int = 0, unused: int = 0) -> None:
        w, a, n, h, u, _ = self._copied
        self._copied = Copied(w + waited_for, a + ahead, n + n_bytes, (h or 0) + hits, (u or 0) + unused)

    def _wait(self, layer: int, buffer: _Buffer, called: Sequence[int]) -> None:
        lacking = [expert for expert in called if expert not in buffer.job_of]
        if lacking:
            raise EngineError(f"layer {layer} calls experts {lacking}, which lie in no buffer; a move must fetch them")
        self.stamps.wait(layer, [buffer.job_of[expert] for expert in called])

    def _leave(self, own: SlottedExperts, buffer: _Buffer, experts: Sequence[int]) -> None:
        """The calls that read them were given to what computes."""
        if not experts:
            return
        read = self._copier.mark()
        for expert in experts:
            own.put(expert, None)
            number = buffer.slot_of.pop(expert)
            self._read[number] = read
            buffer.free.append(number)
            del buffer.job_of[expert]

    def _empty(self, buffer: _Buffer) -> None:
        """Slots are free at once: what is still on its way into one arrives before anything that follows it there, and
        what follows waits for the calls that were given."""
        if buffer.layer is None:
            return
        own = self._layers[buffer.layer]
        assert own is not None
        self._leave(own, buffer, list(buffer.slot_of))
        buffer.layer = None


# --- what an expert is made of ---------------------------------------------------------------------------------------


def _like(expert: GatedWeights, form: Form, device: torch.device | str) -> GatedWeights:
    """Room for one of its shapes. Plain matrices are held in a plain form; biases are computed as they are held."""
    dtype = PLAIN_DTYPES.get(form)
    rooms = []
    for one in tensors_of(expert):
        is_plain = one.dim() == 2 and one.dtype in PLAIN_DTYPES.values()
        rooms.append(
            torch.empty(one.shape, dtype=dtype if dtype is not None and is_plain else one.dtype, device=device)
        )
    return with_tensors(expert, rooms)


def _slot(shape: GatedWeights, form: Form, device: torch.device) -> Slot:
    own = _like(shape, form, device)
    return Slot(own, tensors_of(own), own.table)


def _aligned(part: Tensor) -> int:
    return -(-part.nbytes // ALIGNMENT) * ALIGNMENT
