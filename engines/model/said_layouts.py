"""What a technique says of decoded tokens beforehand, layer by layer, and the same as the kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from engines.calls import CallKind
from engines.decode_layout import DecodeLayout
from engines.kernels.guesses import GuessTable
from engines.kernels.laid_out import LayoutTable, layout_table
from engines.kernels.tables import ExpertTable
from engines.model.guessed import kernel_guesses
from engines.model.model_config import ModelConfig
from engines.model.weights import ModelWeights, SparseWeights
from engines.techniques.base import Technique


@dataclass(frozen=True)
class SaidLayouts:
    """What a technique said of every layer, None of dense ones; and the same as the kernels read it. guesses: None
    where nothing is guessed."""

    technique: Technique
    layouts: Sequence[DecodeLayout | None]
    table: LayoutTable
    guesses: GuessTable | None = None


class AskedLayouts:
    """The layouts of the technique that decodes."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self._weights = weights
        self._n_experts = 0 if config.moe is None else config.moe.n_experts
        self._is_sparse = [config.moe is not None and config.is_sparse(layer) for layer in range(config.n_layers)]
        self._last: tuple[Technique, SaidLayouts | None] | None = None
        self._guessing: tuple[Technique, GuessTable | None] | None = None

    @cached_property
    def are_all_computed(self) -> bool:
        """Whether the kernels know the experts of every layer that has some."""
        mlps = [layer.mlp for layer in self._weights.layers]
        return all(mlp.experts.table is not None for mlp in mlps if isinstance(mlp, SparseWeights))

    def of(self, technique: Technique) -> SaidLayouts | None:
        """None where it decides something between router and experts, or computes slices or guesses that the kernels do
        not know.
        Asked once for each technique that comes: what it says is frozen, and a request is of one."""
        if self._last is None or self._last[0] is not technique:
            self._last = technique, self._asked(technique)
        return self._last[1]

    def _asked(self, technique: Technique) -> SaidLayouts | None:
        layouts: list[DecodeLayout | None] = []
        slices: list[list[ExpertTable]] = []
        for layer, is_sparse in enumerate(self._is_sparse):
            layout = technique.decode_layout(layer) if is_sparse else None
            if is_sparse and layout is None:
                return None
            layouts.append(layout)
            tables = [] if layout is None else self._sliced(layer, layout)
            if tables is None:
                return None
            slices.append(tables)
        guesses = self.guesses(technique)
        if guesses is None and technique.guesses is not None:
            return None
        return SaidLayouts(technique, layouts, layout_table(layouts, self._n_experts, slices), guesses)

    def guesses(self, technique: Technique) -> GuessTable | None:
        """How layers guess the next one's experts, as the kernels take it. None where nothing is guessed, or by what
        they do not know. Made once for each technique that comes."""
        if self._guessing is None or self._guessing[0] is not technique:
            sparse = [layer for layer, is_sparse in enumerate(self._is_sparse) if is_sparse]
            rules = technique.guesses
            table = None if rules is None else kernel_guesses(rules, sparse, len(self._is_sparse))
            self._guessing = technique, table
        return self._guessing[1]

    def _sliced(self, layer: int, layout: DecodeLayout) -> list[ExpertTable] | None:
        """What each slice computes of the experts."""
        mlp = self._weights.layers[layer].mlp
        assert isinstance(mlp, SparseWeights)  # only of them it is asked
        if layout.slices and mlp.experts.table is None:
            return None
        kinds = [CallKind(width=w) for w in layout.widths] + [CallKind(hidden=w) for w in layout.hidden]
        if layout.slices:
            width, hidden = mlp.experts.experts[0].gate_IH.shape
            if layout.slices[-1].end != (hidden if layout.hidden else width):
                return None  # they are of the larger model that a sheet prices in this one's place
        tables = [mlp.experts.parts(kind).table for kind in kinds]
        known = [table for table in tables if table is not None]
        return known if len(known) == len(tables) else None
