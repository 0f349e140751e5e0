"""Decoding one token, for every technique that can say beforehand what a choice leads to.

The kernels compute the experts by the technique's `DecodeLayout`; its plan of the step is made when somebody asks, and
must be of the same calls. So that nobody counts or prices what did not run, one that is not is an error.

Where they know the layers whole, a step is one call of them: what `engines.model.transformer` computes layer by layer,
but nothing waits for Python. Models with parts that only some families have are left to the transformer, which has each
layer's experts computed the same way.

Legend: H hidden, E experts, K experts per token, L sparse layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from engines.calls import CallKind, Width
from engines.decode_layout import PLAIN, DecodeLayout
from engines.dispatch import DispatchPlan, Routing
from engines.errors import EngineError
from engines.kernels.decoder import MAX_CHOSEN, Decoder, DecoderLayer, LayoutTable, layout_table
from engines.kernels.native import AttentionTable, ExpertTable
from engines.model.architecture import SWIGLU, ModelConfig
from engines.model.attention import KeyValueCache
from engines.model.experts import GatedWeights
from engines.model.router import kernel_router
from engines.model.weights import LayerWeights, ModelWeights, SparseWeights
from engines.techniques.base import Technique
from engines.techniques.context import LayerInput


@dataclass(frozen=True)
class Computed:
    """What a sparse layer of a step computed. rows_E: rows of each expert's calls; None: one for each chosen expert.
    layout: whose slices were computed."""

    routing: Routing
    rows_E: Tensor | None
    layout: DecodeLayout = PLAIN

    def rows_of_calls(self) -> dict[int, int]:
        if self.rows_E is None:
            return dict.fromkeys(self.routing.expert_ids_TK[0].tolist(), 1)
        return {expert: n_rows for expert, n_rows in enumerate(self.rows_E.tolist()) if n_rows}

    def check(self, plan: DispatchPlan, name: str, layer: int) -> None:
        """Raises `EngineError` where the plan is not what was computed. name: of the technique."""
        ran, planned = self.rows_of_calls(), _rows_by_slice(plan)
        slices = [_Slice(width=w) for w in self.layout.widths] + [_Slice(hidden=w) for w in self.layout.hidden]
        for one in slices or [_Slice()]:
            rows = planned.pop(one, {})
            if ran != rows:
                raise EngineError(
                    f"{name} decoded layer {layer} with rows {ran} by expert and planned {rows}{one};"
                    " its decode_layout must say what its plan does"
                )
        for one, rows in planned.items():
            raise EngineError(
                f"{name} planned layer {layer} with rows {rows} by expert{one or ' of whole experts'}, and decoded none"
                " of them; its decode_layout must say what its plan does"
            )


class StepPlans(Sequence[DispatchPlan | None]):
    """The plans of one step. That of a layer which was computed by its layout is made when somebody asks: most are only
    counted, after the time of the step is taken.

    Raises `EngineError` where such a plan is not what was computed.
    """

    def __init__(
        self,
        technique: Technique,
        computed: Sequence[Computed | DispatchPlan | None],
        fused: bool,
        grouped: Set[bool] = frozenset(),
    ) -> None:
        """computed: of each layer what was computed or, where that followed a plan, the plan; None of a dense one.
        fused: whether the step was one call. grouped: of layers that followed a plan, whether all their experts were
        computed together."""
        self._technique = technique
        self.computed = computed
        self.is_fused = fused
        self.grouped = grouped

    @property
    def waited(self) -> bool:
        """Whether a layer's experts waited until its plan was made."""
        return any(isinstance(computed, DispatchPlan) for computed in self.computed)

    def tell(self, listener: Callable[[int, Routing], None]) -> None:
        """What each sparse layer's router chose."""
        for layer, computed in enumerate(self.computed):
            if isinstance(computed, Computed):
                listener(layer, computed.routing)

    def __len__(self) -> int:
        return len(self.computed)

    def __getitem__(self, layer: int) -> DispatchPlan | None:  # type: ignore[override]
        computed = self.computed[layer]
        if not isinstance(computed, Computed):
            return computed
        plan = self._technique.plan(LayerInput(layer, "decode", computed.routing))
        computed.check(plan, self._technique.name, layer)
        return plan

    def __iter__(self) -> Iterator[DispatchPlan | None]:
        return (self[layer] for layer in range(len(self)))


class _Slice(NamedTuple):
    """Of an expert; all of it where nothing is given."""

    width: Width | None = None
    hidden: Width | None = None

    def __str__(self) -> str:
        if self.width is None and self.hidden is None:
            return ""
        part, of = (self.width, "") if self.width is not None else (self.hidden, " of the model width")
        assert part is not None
        return f" in columns {part.first} to {part.end}{of}"


def _rows_by_slice(plan: DispatchPlan) -> dict[_Slice, dict[int, int]]:
    """Of each expert's calls."""
    calls = plan.calls
    slice_K = [_Slice(kind.width, kind.hidden) for kind in calls.kinds]
    kind_S = [0] * len(calls.expert_S) if calls.kind_C is None else calls.kind_C[calls.call_S].tolist()
    found: dict[_Slice, dict[int, int]] = {}
    for expert, n_rows, kind in zip(calls.expert_S.tolist(), calls.rows_S.tolist(), kind_S, strict=True):
        rows = found.setdefault(slice_K[kind], {})
        rows[expert] = rows.get(expert, 0) + n_rows
    return found


@dataclass(frozen=True)
class SaidLayouts:
    """What a technique said of every layer, None of dense ones; and the same as the kernels read it."""

    technique: Technique
    layouts: Sequence[DecodeLayout | None]
    table: LayoutTable


class AskedLayouts:
    """The layouts of the technique that decodes."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self._weights = weights
        self._n_experts = 0 if config.moe is None else config.moe.n_experts
        self._is_sparse = [config.moe is not None and config.is_sparse(layer) for layer in range(config.n_layers)]
        self._last: SaidLayouts | None = None

    def of(self, technique: Technique) -> SaidLayouts | None:
        """None where it decides something between router and experts, or computes slices that the kernels do not read.
        Asked once for each technique that comes: what it says is frozen, and a request is of one."""
        last = self._last
        if last is not None and last.technique is technique:
            return last
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
        self._last = SaidLayouts(technique, layouts, layout_table(layouts, self._n_experts, slices))
        return self._last

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


class FusedDecoder:
    """Decode steps of a model whose layers the kernels know whole."""

    def __init__(self, decoder: Decoder, config: ModelConfig) -> None:
        self._decoder = decoder
        self._config = config

    def step(
        self,
        hidden_1H: Tensor,
        cos_1P: Tensor,
        sin_1P: Tensor,
        cache: KeyValueCache,
        said: SaidLayouts,
        exchange: object = None,
    ) -> StepPlans:
        """Turns the embedded token into the last layer's output, in place. The cache's length is the caller's.
        exchange: of `Decoder.step`."""
        ids_LK, weights_LK, rows_LE = self._decoder.step(
            hidden_1H, cos_1P, sin_1P, cache.keys, cache.values, cache.length, said.table, exchange
        )
        computed: list[Computed | None] = []
        row = 0
        for layout in said.layouts:
            if layout is None or self._config.moe is None:
                computed.append(None)
                continue
            routing = Routing(ids_LK[row : row + 1], weights_LK[row : row + 1], self._config.moe.n_experts)
            rows_E = None if rows_LE is None or layout.is_plain else rows_LE[row]
            computed.append(Computed(routing, rows_E, layout))
            row += 1
        return StepPlans(said.technique, computed, fused=True)


def fused_decoder(
    config: ModelConfig, weights: ModelWeights, tables: Sequence[AttentionTable | None]
) -> FusedDecoder | None:
    """None where a layer has something that the kernels do not know. tables: of `attention.kernel_table`."""
    layers = [
        _layer(layer, config, number, table)
        for number, (layer, table) in enumerate(zip(weights.layers, tables, strict=True))
    ]
    known = [layer for layer in layers if layer is not None]
    return FusedDecoder(Decoder(known), config) if len(known) == len(layers) else None


def _layer(
    weights: LayerWeights, config: ModelConfig, number: int, table: AttentionTable | None
) -> DecoderLayer | None:
    norms = (weights.attention_norm, weights.mlp_norm)
    has_other_norms = weights.after_attention_norm is not None or weights.after_mlp_norm is not None
    if table is None or has_other_norms or any(norm.bias is not None for norm in norms) or config.unit != SWIGLU:
        return None
    router = experts = always = None
    if isinstance(weights.mlp, GatedWeights):
        always = weights.mlp.table
        if always is None:
            return None
    else:
        moe, mlp = config.moe, weights.mlp
        assert moe is not None  # sparse weights are read only where the config has experts
        router, experts = kernel_router(mlp.router, moe.router), mlp.experts.table
        if router is None or experts is None or moe.top_k > MAX_CHOSEN or mlp.shared_gate_1H is not None:
            return None
        if mlp.shared is not None:
            always = mlp.shared.table
            if always is None:
                return None
    return DecoderLayer(
        weights.attention_norm.weight,
        table,
        weights.mlp_norm.weight,
        config.norm.eps,
        router,
        experts,
        always,
        config.attention.rope_layers[number],
    )
