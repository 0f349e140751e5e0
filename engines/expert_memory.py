"""What a plan lets an engine hold of its experts: a budget of bytes, and the slots that fit in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engines.errors import EngineError
from engines.model.experts import ExpertWeights
from engines.model.quantised import Form
from engines.model.slots import ExpertSlots, slot_bytes
from engines.model.weights import ModelWeights, SparseWeights
from engines.techniques.base import Technique
from engines.techniques.context import BuildContext, ModelSizes


@dataclass(frozen=True)
class ExpertMemory:
    """n_bytes: of all slots together; None: as many slots as the technique asks for. form: in which they compute."""

    n_bytes: int | None = None
    form: Form = "fp32"

    def n_slots(self, sizes: ModelSizes) -> int | None:
        """How many experts it holds; None where it has no limit."""
        one = slot_bytes(sizes.hidden, sizes.expert_width, self.form)
        return None if self.n_bytes is None else self.n_bytes // one

    def told(self, context: BuildContext, weights: ModelWeights) -> BuildContext:
        """The context, with what a technique that loads experts needs. Raises `EngineError` for a dense model."""
        experts = [layer for layer in _expert_layers(weights) if layer is not None]
        if context.sizes is None or not experts:
            raise EngineError("experts are loaded into slots, and the model is dense; use dropless")
        width, hidden = experts[0].experts[0].gate_IH.shape
        n_slots = self.n_slots(context.sizes._replace(hidden=hidden, expert_width=width))
        return replace(context, expert_slots=n_slots, moved_expert_bytes=experts[0].n_bytes_per_expert)

    def slots(self, technique: Technique, weights: ModelWeights) -> ExpertSlots:
        """As many as the technique asks for. Raises `EngineError` where experts are no views of their file."""
        layers = _expert_layers(weights)
        (asked,) = technique.asks.slots.values()
        n_of = sum(layer is not None for layer in layers) if asked.of == "layer" else 1
        return ExpertSlots(layers, asked.n * n_of, self.form)


def _expert_layers(weights: ModelWeights) -> Sequence[ExpertWeights | None]:
    """Of all layers; None of a dense one."""
    return [layer.mlp.experts if isinstance(layer.mlp, SparseWeights) else None for layer in weights.layers]
