"""What a plan lets an engine hold of its experts: a budget of bytes, and the slots that fit in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engines.errors import EngineError
from engines.model.accelerator import Backend
from engines.model.buffers import LayerBuffers, buffered_bytes
from engines.model.copier import Copier, CopyQueue
from engines.model.copy_stamps import CopyStamps
from engines.model.experts import ExpertWeights
from engines.model.made_experts import tensors_of
from engines.model.quantised import PLAIN_DTYPES, Form, plain_form
from engines.model.slots import ExpertSlots, slot_bytes
from engines.model.stream_copier import StreamCopier
from engines.model.weights import ModelWeights, SparseWeights
from engines.techniques.base import Technique, TechniqueParameters
from engines.techniques.context import BuildContext, ModelSizes
from engines.techniques.move.two_buffers import TwoBuffersParameters, buffer_size
from engines.techniques.parameters import Composed


@dataclass(frozen=True)
class ExpertMemory:
    """n_bytes: of all slots together; None: as many slots as the technique asks for, and no buffers. form: in which
    they compute. copy_bytes_per_s: what they are filled with at most; None: as fast as it goes."""

    n_bytes: int | None = None
    form: Form = "fp32"
    copy_bytes_per_s: float | None = None

    def loads(self, technique: TechniqueParameters) -> bool:
        """Whether experts are really copied: always by a technique whose experts lie in slots; by one that fills two
        buffers where the plan gives it the memory, and else its copies are counted."""
        return technique.loads_from_file or (self.n_bytes is not None and fills_buffers(technique))

    def n_slots(self, sizes: ModelSizes, biased: bool) -> int | None:
        """How many experts it holds; None where it has no limit. biased: each with its biases."""
        return None if self.n_bytes is None else self.n_bytes // self.slot_bytes(sizes, biased)

    def slot_bytes(self, sizes: ModelSizes, biased: bool) -> int:
        """What one expert takes of it."""
        return slot_bytes(sizes.hidden, sizes.expert_width, self.form, biased)

    def counted(self, context: BuildContext, weights: ModelWeights) -> BuildContext:
        """The context, with what a technique that copies nothing here takes for the memory of a GPU, and for the bytes
        of an expert: narrow ones would be copied as they are held, others as files hold them, two bytes a weight; those
        of a model that is priced are its own, on a sheet that was fitted here as they are held."""
        if context.sizes is None:
            return context
        n_slots = None if self.n_bytes is None else self.n_bytes // context.sizes.expert_bytes
        n_bytes = None
        if self.form not in PLAIN_DTYPES and context.priced_sizes is None:
            n_bytes = next(layer.n_bytes_per_expert for layer in expert_layers(weights) if layer is not None)
        return replace(context, expert_slots=n_slots, counted_expert_bytes=n_bytes)

    def told(self, context: BuildContext, weights: ModelWeights, backend: Backend | None) -> BuildContext:
        """The context, with what a technique that loads experts needs. backend: where they are computed; None: on the
        CPU, by the kernels. Raises `EngineError` for a dense model."""
        experts = [layer for layer in expert_layers(weights) if layer is not None]
        if context.sizes is None or not experts:
            raise EngineError("experts are loaded into slots, and the model is dense; use dropless")
        one = experts[0].experts[0]
        form, moved_bytes = self.form, experts[0].n_bytes_per_expert
        if backend is not None:
            form = plain_form(backend.dtype)
            moved_bytes = sum(part.numel() for part in tensors_of(one)) * backend.dtype.itemsize
        n_slots = None if self.n_bytes is None else self.n_bytes // buffered_bytes(one, form)
        return replace(context, expert_slots=n_slots, moved_expert_bytes=moved_bytes)

    def slots(
        self,
        technique: Technique,
        weights: ModelWeights,
        context: BuildContext,
        backend: Backend | None,
        now_s: Callable[[], float],
    ) -> ExpertSlots | LayerBuffers:
        """As many as the technique asks for, or two buffers. context: as `told`. Raises `EngineError` where slots are
        to be filled from a file and experts lie in memory, and where a device cannot be copied to."""
        layers, copier = expert_layers(weights), self._queue(backend, now_s)
        form = self.form if backend is None else plain_form(backend.dtype)
        stamps = CopyStamps(copier)
        if not technique.asks.slots:
            assert context.sizes is not None  # `told` looked
            n_of_one = buffer_size(context.sizes, context.expert_slots)
            return LayerBuffers(layers, 2 * n_of_one, form, copier, stamps)
        (asked,) = technique.asks.slots.values()
        n_of = sum(layer is not None for layer in layers) if asked.of == "layer" else 1
        return ExpertSlots(layers, asked.n * n_of, form, copier, stamps)

    def _queue(self, backend: Backend | None, now_s: Callable[[], float]) -> CopyQueue:
        if backend is None:
            return Copier(self.copy_bytes_per_s, now_s)
        if self.copy_bytes_per_s is not None:
            raise EngineError(f"copy_bytes_per_s does not limit copies to {backend.device}; leave it out")
        if backend.device.type != "cuda":
            raise EngineError(f"experts are copied for the CPU or for cuda, and not for {backend.device}")
        from engines.model.cuda_streams import CudaStreams

        return StreamCopier(CudaStreams(backend.device), backend.dtype, now_s)


def fills_buffers(technique: TechniqueParameters) -> bool:
    return isinstance(technique, Composed) and isinstance(technique.choices.move, TwoBuffersParameters)


def expert_layers(weights: ModelWeights) -> Sequence[ExpertWeights | None]:
    """The routed experts of all layers; None of a dense one."""
    return [layer.mlp.experts if isinstance(layer.mlp, SparseWeights) else None for layer in weights.layers]
