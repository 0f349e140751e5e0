"""Decoding one token, for every technique that can say beforehand what a choice leads to.

The kernels compute the experts by the technique's `DecodeLayout`; its plan of the step is made when somebody asks, and
must be of the same calls (`engines.model.step_plans`). So that nobody counts or prices what did not run, one that is
not is an error.

Where they know the layers whole, a step is one call of them: what `engines.model.transformer` computes layer by layer,
but nothing waits for Python. Models with parts that only some families have are left to the transformer, which has each
layer's experts computed the same way.

Legend: T sequences, H hidden, E experts, K experts per token, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from engines.dispatch import DispatchPlan, Routing
from engines.kernels.decoder import MAX_CHOSEN, Decoder, DecoderLayer, Ends, chunk_table
from engines.kernels.guesses import GuessTable
from engines.kernels.laid_out import HeldTable, layout_table
from engines.kernels.native import Largest
from engines.kernels.tables import AttentionTable, reads
from engines.model.architecture import SWIGLU, ModelConfig
from engines.model.experts import GatedWeights
from engines.model.guessed import GuessedStep
from engines.model.key_value_cache import KeyValueCache
from engines.model.router import kernel_router
from engines.model.said_layouts import SaidLayouts
from engines.model.step_plans import StepPlans, WholeStep
from engines.model.weights import LayerWeights, ModelWeights
from engines.shown import Shown


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
    def largest(self) -> Largest:
        """Of the logits of the last `step` from a token's id."""
        return self._decoder.largest

    def batch(
        self, token_ids: Sequence[int], caches: Sequence[KeyValueCache], said: SaidLayouts
    ) -> tuple[Tensor, StepPlans]:
        """One token of each sequence, from its id to logits_TV, by a technique that batches exactly. Lengths of caches
        are the caller's."""
        n_tokens = len(token_ids)
        room = self._decoder.room_of_batch(n_tokens)
        turns = [cache.turns.up_to(cache.length + 1) for cache in caches]
        chunks = chunk_table([(cache.table, cache.length, 1) for cache in caches])
        logits_TV = self._decoder.batch(token_ids, turns, chunks, room)
        computed = WholeStep(said, room, self._n_experts, n_tokens)
        computed.n_done = len(said.layouts)
        return logits_TV, StepPlans(said.technique, computed, fused=True)

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
        computed = WholeStep(said, room, self._n_experts)

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
