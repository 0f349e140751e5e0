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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from engines.calls import Width
from engines.decode_layout import PLAIN, DecodeLayout
from engines.dispatch import DispatchPlan, Routing
from engines.errors import EngineError
from engines.kernels.decoder import MAX_CHOSEN, Decoder, DecoderLayer, Ends, StepRoom
from engines.kernels.guesses import GuessTable
from engines.kernels.laid_out import HeldTable, layout_table
from engines.kernels.tables import AttentionTable, reads
from engines.model.architecture import SWIGLU, ModelConfig
from engines.model.experts import GatedWeights
from engines.model.guessed import GuessedStep
from engines.model.key_value_cache import KeyValueCache
from engines.model.router import kernel_router
from engines.model.said_layouts import SaidLayouts
from engines.model.weights import LayerWeights, ModelWeights
from engines.residency import Residency
from engines.shown import Shown
from engines.techniques.base import Technique
from engines.techniques.context import LayerInput


@dataclass(frozen=True)
class Computed:
    """What a sparse layer of a step computed. routing: its router's choice. rows_E: rows of each expert's calls; None:
    one for each that was executed. layout: whose slices were computed. plan: of a layer that was left to its plan, for
    experts had to be brought."""

    routing: Routing
    rows_E: Tensor | None
    layout: DecodeLayout = PLAIN
    plan: DispatchPlan | None = None

    def rows_of_calls(self, executed: Routing | None = None) -> dict[int, int]:
        if self.rows_E is None:
            return dict.fromkeys((executed or self.routing).expert_ids_TK[0].tolist(), 1)
        return {expert: n_rows for expert, n_rows in enumerate(self.rows_E.tolist()) if n_rows}

    def check(self, plan: DispatchPlan, name: str, layer: int, executed: Routing | None = None) -> None:
        """Raises `EngineError` where the plan is not what was computed, with all experts where they lay. name: of the
        technique. executed: in the place of the router's choice."""
        ran, planned = self.rows_of_calls(executed), _rows_by_slice(plan)
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
        shown: Shown | None = None,
    ) -> None:
        """computed: of each layer what was computed or, where that followed a plan, the plan; None of a dense one.
        fused: whether the step was one call, but for layers whose experts had to be brought. grouped: of layers that
        followed a plan, whether all their experts were computed together. shown: of a technique that is shown what
        lies where: such plans are made once, in the order of steps."""
        self._technique = technique
        self.computed = computed
        self.is_fused = fused
        self.grouped = grouped
        self._shown = shown if shown is not None and shown.residency is not None else None
        self._settled: list[DispatchPlan | None] | None = None

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
        if not isinstance(self.computed[layer], Computed):
            return self.computed[layer]  # type: ignore[return-value]
        if self._shown is None:
            return self._plan(layer, None)
        if self._settled is None:
            self._shown.settle(self)
        assert self._settled is not None  # it was deferred
        return self._settled[layer]

    def settle(self, residency: Residency) -> None:
        """Makes the plans, each as things lay then, and has each applied. Raises `EngineError`."""
        self._settled = []
        for layer in range(len(self.computed)):
            plan = self._plan(layer, residency)
            if plan is not None:
                residency.apply(layer, plan)
            self._settled.append(plan)

    def _plan(self, layer: int, residency: Residency | None) -> DispatchPlan | None:
        computed = self.computed[layer]
        if not isinstance(computed, Computed):
            return computed
        if computed.plan is not None:
            return computed.plan
        left = None if residency is None else 0
        seen = LayerInput(layer, "decode", computed.routing, residency=residency, prefill_left=left)
        executed = None
        guessed = self.computed.guessed if isinstance(self.computed, _WholeStep) else None
        if guessed is not None:
            seen = replace(seen, predicted=guessed.for_layer(layer), guess=guessed.made_in(layer))
            executed = guessed.executed(layer)
        plan = self._technique.plan(seen)
        computed.check(plan, self._technique.name, layer, executed)
        if self._shown is not None and self._shown.slots is not None and len(plan.transfers):
            raise EngineError(f"{self._technique.name} planned to bring experts to layer {layer}, and all lay there")
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


class _WholeStep(Sequence[Computed | None]):
    """What the layers of a step computed that was one call, told when somebody asks."""

    def __init__(self, said: SaidLayouts, room: StepRoom, n_experts: int) -> None:
        self._said = said
        self._room = room
        self._n_experts = n_experts
        self.by_plan: dict[int, DispatchPlan] = {}
        """Of layers whose experts had to be brought."""
        self.n_done = 0
        """Layers, all of them unless the step was broken off."""

    def __len__(self) -> int:
        return self.n_done

    def __getitem__(self, layer: int) -> Computed | None:  # type: ignore[override]
        return self._told[range(self.n_done)[layer]]

    def __iter__(self) -> Iterator[Computed | None]:
        return iter(self._told[: self.n_done])

    @cached_property
    def guessed(self) -> GuessedStep | None:
        """Inside of the step; None where nothing was."""
        guesses = self._said.guesses
        return None if guesses is None else GuessedStep(guesses, self._room, self._n_experts)

    @cached_property
    def _told(self) -> list[Computed | None]:
        """Once the step is over."""
        ids_LK, weights_LK, rows_LE = self._room.ids_LK, self._room.weights_LK, self._room.rows_LE(self._n_experts)
        told: list[Computed | None] = []
        row = 0
        for layer, layout in enumerate(self._said.layouts):
            if layout is None:
                told.append(None)
                continue
            routing = Routing(ids_LK[row : row + 1], weights_LK[row : row + 1], self._n_experts)
            rows_E = None if rows_LE is None or layout.is_plain else rows_LE[row]
            told.append(Computed(routing, rows_E, layout, self.by_plan.get(layer)))
            row += 1
        return told


class BroughtExperts(Protocol):
    """Computes the experts of a layer of one token by its plan, which brings those that are lacking."""

    def __call__(self, layer: int, routing: Routing, normed_1H: Tensor) -> tuple[Tensor, DispatchPlan]: ...


class PlannedExperts(Protocol):
    """Computes the experts of a layer of one token by a plan that it makes of what the layer knows."""

    def __call__(
        self, layer: int, routing: Routing, residual_1H: Tensor, normed_1H: Tensor, guessed: GuessedStep | None
    ) -> tuple[Tensor, DispatchPlan]:
        """guessed: what the kernels have guessed so far; None where they do not."""
        ...


class FusedDecoder:
    """Decode steps of a model whose layers the kernels know whole."""

    def __init__(self, decoder: Decoder, config: ModelConfig) -> None:
        self._decoder = decoder
        self._n_experts = 0 if config.moe is None else config.moe.n_experts
        n_layers = len(decoder.layers)
        nowhere_LE = np.zeros((n_layers, self._n_experts), dtype=np.bool_)
        never_LE = np.zeros((n_layers, self._n_experts), dtype=np.int64)
        self._nothing_held = HeldTable(nowhere_LE, never_LE, never_LE, np.zeros(1, dtype=np.int64))
        self._plain = layout_table([None] * n_layers, self._n_experts, [()] * n_layers)

    @property
    def knows_ends(self) -> bool:
        """Whether a step can start from a token's id, and end with logits."""
        return self._decoder.ends is not None

    @property
    def stops(self) -> bool:
        """Whether a step can be left before the experts of each layer: shared experts come behind the routed ones here,
        and a guess at the next layer's wants them before."""
        return all(layer.router is None or layer.always is None for layer in self._decoder.layers)

    def step_by_plans(
        self,
        hidden_1H: Tensor,
        cache: KeyValueCache,
        planned: PlannedExperts,
        shown: Shown,
        guesses: GuessTable | None = None,
    ) -> tuple[Tensor, list[DispatchPlan | None]]:
        """Turns the embedded token into the last layer's output, in place, every layer's experts left to `planned`.
        Gives the same normed for the head, and the plans of all layers, None of dense ones. The cache's length is the
        caller's. guesses: how the kernels guess before each stop; None: `planned` guesses where somebody does."""
        plans: list[DispatchPlan | None] = [None] * len(self._decoder.layers)
        room = self._decoder.room(self._plain, guesses)
        guessed = None if guesses is None else GuessedStep(guesses, room, self._n_experts)
        states = None if guesses is None else shown.likeness.rows(guesses.layers, guesses.hidden)

        def lacking(layer: int, normed_1H: Tensor, ids_1K: Tensor, weights_1K: Tensor) -> Tensor:
            routing = Routing(ids_1K, weights_1K, self._n_experts)
            mixed_1H, plans[layer] = planned(layer, routing, hidden_1H, normed_1H, guessed)
            return mixed_1H

        try:
            normed_1H = self._decoder.step(
                *(hidden_1H, cache.turns.up_to(cache.length + 1), cache.table, cache.length),
                *(self._plain, room),
                held=self._nothing_held,
                lacking=lacking,
                guesses=guesses,
                states=states,
            )
        except BaseException:
            if guesses is not None:
                shown.likeness.drop_rows()
            raise
        return normed_1H, plans

    def step(
        self,
        start: Tensor | int,
        cache: KeyValueCache,
        said: SaidLayouts,
        shown: Shown,
        brought: BroughtExperts,
        exchange: object = None,
    ) -> tuple[Tensor, StepPlans]:
        """What `Decoder.step` gives of a token's start. The cache's length is the caller's.

        Where experts lie in slots, a layer that calls one which does not is left to `brought`. Ends of layers are
        stamped there, of the one before, and of the last. exchange: of `Decoder.step`.
        """
        stamps, guesses = shown.stamps, said.guesses
        room = self._decoder.room(said.table, guesses)
        computed = _WholeStep(said, room, self._n_experts)

        def lacking(layer: int, normed_1H: Tensor, ids_1K: Tensor, weights_1K: Tensor) -> Tensor:
            if stamps is not None and layer > computed.n_done:
                stamps.end_layer(layer - 1)
            computed.n_done = layer
            routing = Routing(ids_1K, weights_1K, self._n_experts)
            mixed_1H, computed.by_plan[layer] = brought(layer, routing, normed_1H)
            computed.n_done = layer + 1
            return mixed_1H

        plans = StepPlans(said.technique, computed, fused=True, shown=shown)
        defers = shown.residency is not None and shown.defer()
        states = None if guesses is None else shown.likeness.rows(guesses.layers, guesses.hidden)
        try:
            made = self._decoder.step(
                *(start, cache.turns.up_to(cache.length + 1), cache.table, cache.length, said.table, room),
                *(shown.held, lacking, exchange, guesses, states),
            )
            if stamps is not None and stamps.tell_layers and computed.n_done < len(said.layouts):
                stamps.end_layer(len(said.layouts) - 1)
            computed.n_done = len(said.layouts)
        except BaseException:
            if guesses is not None:
                shown.likeness.drop_rows()
            raise
        finally:
            if defers:
                shown.deferred(plans)
        return made, plans


def fused_decoder(
    config: ModelConfig, weights: ModelWeights, tables: Sequence[AttentionTable | None]
) -> FusedDecoder | None:
    """None where a layer has something that the kernels do not know. tables: of `attention.kernel_table`."""
    layers = [
        _layer(layer, config, number, table)
        for number, (layer, table) in enumerate(zip(weights.layers, tables, strict=True))
    ]
    known = [layer for layer in layers if layer is not None]
    if len(known) < len(layers) or weights.norm.bias is not None:
        return None
    ends = None
    if reads(weights.embedding_LH) and reads(weights.head_LH):
        ends = Ends(weights.embedding_LH, weights.head_LH, weights.head_bias_L, config.embedding_scale)
    return FusedDecoder(Decoder(known, weights.norm.weight, weights.norm.eps, ends), config)


def _layer(
    weights: LayerWeights, config: ModelConfig, number: int, table: AttentionTable | None
) -> DecoderLayer | None:
    norms = (weights.attention_norm, weights.mlp_norm)
    has_other_norms = weights.after_attention_norm is not None or weights.after_mlp_norm is not None
    if table is None or has_other_norms or any(norm.bias is not None for norm in norms) or config.unit != SWIGLU:
        return None
    router = experts = always = gate = None
    if isinstance(weights.mlp, GatedWeights):
        always = weights.mlp.table
        if always is None:
            return None
    else:
        moe, mlp = config.moe, weights.mlp
        assert moe is not None  # sparse weights are read only where the config has experts
        router, experts = kernel_router(mlp.router, moe.router), mlp.experts.table
        if router is None or experts is None or moe.top_k > MAX_CHOSEN:
            return None
        if mlp.shared is not None:
            always, gate = mlp.shared.table, mlp.shared_gate_1H
            if always is None or (gate is not None and not reads(gate)):
                return None
    return DecoderLayer(
        weights.attention_norm.weight,
        table,
        weights.mlp_norm.weight,
        config.norm.eps,
        router,
        experts,
        always,
        gate,
        config.attention.rope_layers[number],
    )
