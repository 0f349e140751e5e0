"""One transformer for every family of `engines.model.families`, computed chunk by chunk against a key/value cache.

Arithmetic on the CPU is fp32 whatever the weights are stored in; `engines.model.accelerator` has others. A chunk is any
run of tokens that continues what a cache holds: a whole prompt, a piece of one, or one token of decoding; the result
does not depend on where prompts are cut. A step computes one chunk, or the chunks of several sequences, their rows one
after another.

Legend: T tokens of the step, H hidden, P pairs of turned features, L vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engines.decode_layout import PLAIN
from engines.dispatch import DispatchPlan, Prediction, Routing
from engines.freed_memory import keep_freed_memory
from engines.kernels import tables
from engines.kernels.laid_out import mix_laid_out
from engines.kernels.native import Largest
from engines.model.accelerator import (
    Backend,
    DeviceType,
    StackedExperts,
    execute_stacked,
    find_backend,
    moved,
    multiplies_groups,
)
from engines.model.attention import attend, keep_only, kernel_table
from engines.model.checkpoints import Checkpoint
from engines.model.decode import FusedDecoder, fused_decoder
from engines.model.experts import (
    ExpertWeights,
    GatedWeights,
    execute,
    gated,
    gated_ffn,
    is_grouped,
    widened_linear,
    widened_rows,
)
from engines.model.guessed import GuessedStep
from engines.model.key_value_cache import Chunk, Step, check_rooms, view_of
from engines.model.key_value_cache import KeyValueCache as KeyValueCache
from engines.model.norms import row_norms, summed
from engines.model.rope_config import LongRope, as_transformers
from engines.model.router import route
from engines.model.said_layouts import AskedLayouts, SaidLayouts
from engines.model.step_plans import Computed, StepPlans
from engines.model.weights import SparseWeights
from engines.observers import LayerObserver, SparseLayerStep
from engines.oracle import Oracle, mix_experts
from engines.shown import Shown
from engines.techniques.base import Technique
from engines.techniques.context import NOTHING, ChunkPhase, HiddenState

RoutingListener = Callable[[int, Routing, ChunkPhase], None]
"""Told a layer and its router's choice, before a technique plans it, and the phase of the step."""


class Asked(NamedTuple):
    """What a step is computed by and for, the same in all its layers. said: what the technique makes of one decoded
    token; None where it must be asked for a plan first."""

    technique: Technique
    phase: ChunkPhase
    observer: LayerObserver | None
    on_routing: RoutingListener | None
    said: SaidLayouts | None
    shown: Shown


class Decoded(NamedTuple):
    """What a step gave: logits of the rows that are asked about, None where there are none, and what its layers did.
    largest: of the last row's logits, where it is known already."""

    logits_AL: Tensor | None
    plans: StepPlans
    largest: Largest | None = None


class Transformer:
    """The model without its technique, which each call brings: calibration and measurement share one set of weights."""

    _exchange: object = None
    """Of `Decoder.step`: how processes with some of the experts each add up."""

    def __init__(self, checkpoint: Checkpoint, backend: Backend | None = None, experts_stay: bool = False) -> None:
        """backend: None computes on the CPU in fp32, with the kernels where they serve. experts_stay: on the host; an
        engine brings them when they are called."""
        keep_freed_memory()
        self.config = checkpoint.config
        self._device = None if backend is None else backend.device
        self._dtype = torch.float32 if backend is None else backend.dtype
        self._kept = checkpoint.weights.kept if backend is None else backend.dtype
        self.weights = self._weights = (
            checkpoint.weights if backend is None else moved(checkpoint.weights, backend, experts_stay)
        )
        self._tables = [
            kernel_table(weights.attention, self.config, layer) if backend is None else None
            for layer, weights in enumerate(self._weights.layers)
        ]
        self._decoder = fused_decoder(self.config, self._weights, self._tables)
        self._layouts = AskedLayouts(self.config, self._weights)

    @property
    def decodes_in_one_call(self) -> bool:
        """Whether the kernels know its layers whole."""
        return self._decoder is not None

    def new_cache(self) -> KeyValueCache:
        """An empty one, where this model computes."""
        return KeyValueCache(self.config, self._device, self._kept)

    def forward(
        self,
        tokens_T: Tensor,
        cache: KeyValueCache,
        technique: Technique,
        phase: ChunkPhase,
        observer: LayerObserver | None = None,
        on_routing: RoutingListener | None = None,
        shown: Shown | None = None,
    ) -> tuple[Tensor, StepPlans]:
        """Runs one chunk at the cache's end. Returns normed hidden_TH and each layer's plan (None for dense layers)."""
        return self.forward_batch([tokens_T], [cache], technique, phase, observer, on_routing, shown)

    def forward_batch(
        self,
        chunks: Sequence[Tensor],
        caches: Sequence[KeyValueCache],
        technique: Technique,
        phase: ChunkPhase,
        observer: LayerObserver | None = None,
        on_routing: RoutingListener | None = None,
        shown: Shown | None = None,
        ends: Sequence[int] | None = None,
    ) -> tuple[Tensor, StepPlans]:
        """Runs one chunk of tokens for each sequence, at the end of its own cache, in one step.

        hidden_TH holds the rows of the first chunk, then those of the next. Each layer has one plan for all rows:
        experts see the tokens of all sequences together, and a technique that couples tokens couples those of different
        sequences, as in serving systems that batch. An observed step gives the same, computed layer by layer.

        on_routing: told what each sparse layer's router chose, but in fused steps: their `StepPlans` tell it.
        shown: what a technique that asks for more than routing is shown of its engine; kept up to date here.
        ends: how many rows at the end of each chunk somebody asks about. hidden_TH holds these alone then, and of the
        others the last layer computes keys and values and nothing else: its plan is that of the rows asked about, None
        where there are none. It changes no answer of a technique to which tokens stand alone. None: all rows.
        """
        shown = shown or Shown(NOTHING, None)
        tokens_T = self._own_rows(chunks[0] if len(chunks) == 1 else torch.cat([*chunks]))
        if self._device is not None:
            tokens_T = tokens_T.to(self._device)
        hidden_TH = widened_rows(self._weights.embedding_LH, tokens_T, self._dtype, self.config.embedding_scale)
        is_one_token = phase == "decode" and len(caches) == len(tokens_T) == 1 and self._device is None
        said = self._said(technique, shown) if is_one_token and observer is None else None
        if said is not None and self._decoder is not None:
            return self._in_one_call(self._decoder, hidden_TH, caches[0], said, shown)
        plans: list[Computed | DispatchPlan | None] = []
        made = StepPlans(technique, plans, fused=False, shown=None if said is None else shown)
        asked = Asked(technique, phase, observer, on_routing, said, shown)
        stopping = self._stopping(asked) if is_one_token else None
        if stopping is not None:
            caches[0].check_room(1)
            planned = partial(self._planned, asked)
            guesses = None if shown.plans_first else self._layouts.guesses(technique)
            normed_TH, by_plans = stopping.step_by_plans(hidden_TH, caches[0], planned, shown, guesses)
            caches[0].length += 1
            plans += by_plans
            return normed_TH, made
        step = self._step([len(tokens_T) for tokens_T in chunks], caches)
        defers = said is not None and shown.defer()
        try:
            hidden_TH = self._layers(hidden_TH, step, asked, plans, ends)
        finally:
            if defers:
                shown.deferred(made)
        normed_TH = self._weights.norm(hidden_TH) if len(hidden_TH) else hidden_TH
        for chunk in step.cached:
            chunk.cache.length = chunk.end
        if phase == "prefill":
            made.grouped = self._grouped(technique, plans)
        return normed_TH, made

    def decode(self, token: int, cache: KeyValueCache, technique: Technique, shown: Shown) -> Decoded | None:
        """What `forward` and `logits` give of one decoded token, where all of that is one call of the kernels; None,
        and nothing done, where it is not."""
        if self._device is not None or self._decoder is None or not self._decoder.knows_ends:
            return None
        said = self._said(technique, shown)
        if said is None:
            return None
        logits_1L, plans = self._in_one_call(self._decoder, token, cache, said, shown)
        largest = self._decoder.largest if self.config.logit_softcap is None else None
        return Decoded(self._capped(logits_1L), plans, largest)

    def decode_batch(
        self, token_ids: Sequence[int], caches: Sequence[KeyValueCache], technique: Technique, shown: Shown
    ) -> Decoded | None:
        """As `decode`, of one token of each sequence."""
        decoder = self._decoder
        if self._device is not None or decoder is None or not decoder.knows_ends or not technique.batches_exactly:
            return None
        said = self._said(technique, shown)
        if said is None:
            return None
        check_rooms([1] * len(caches), caches)
        logits_TL, plans = decoder.batch(token_ids, caches, said)
        for cache in caches:
            cache.length += 1
        return Decoded(self._capped(logits_TL), plans)

    def _in_one_call(
        self, decoder: FusedDecoder, start: Tensor | int, cache: KeyValueCache, said: SaidLayouts, shown: Shown
    ) -> tuple[Tensor, StepPlans]:
        """What `FusedDecoder.step` gives of one token, at the cache's end."""
        cache.check_room(1)
        made = decoder.step(start, cache, said, shown, partial(_brought, said.technique, shown), self._exchange)
        cache.length += 1
        return made

    def _said(self, technique: Technique, shown: Shown) -> SaidLayouts | None:
        """What the technique says of one token. Where something lies in slots all layers go by that, or none."""
        if shown.plans_first:
            return None
        said = self._layouts.of(technique)
        if said is not None and said.guesses is not None and self._decoder is None:
            return None  # guesses are made inside of whole steps alone
        return said if shown.residency is None or self._layouts.are_all_computed else None

    def _stopping(self, asked: Asked) -> FusedDecoder | None:
        """What decodes a token whose layers wait for their plans, and stops before the experts of each; None where it
        computes otherwise what somebody wants to see between: attention's output, shared experts before the routed."""
        wants_more = asked.observer is not None or asked.technique.needs_saliency or isinstance(asked.technique, Oracle)
        if self._decoder is None or wants_more or asked.said is not None or not self._decoder.stops:
            return None
        return self._decoder

    def _planned(
        self,
        asked: Asked,
        layer: int,
        routing: Routing,
        residual_1H: Tensor,
        normed_1H: Tensor,
        guessed: GuessedStep | None,
    ) -> tuple[Tensor, DispatchPlan]:
        """The experts of a layer of one decoded token, by its plan. Both states are written over when it is done."""
        if asked.on_routing is not None:
            asked.on_routing(layer, routing, asked.phase)
        state = None
        if asked.technique.asks.hidden_state and guessed is None:
            # What was guessed from them is compared when the request has ended.
            state = HiddenState(residual_1H.clone(), normed_1H.clone(), None)
        mlp = self._weights.layers[layer].mlp
        assert isinstance(mlp, SparseWeights)  # the decoder stops at no other
        guess = None if guessed is None else guessed.made_in(layer)
        return self._by_plan(asked, layer, routing, None, state, normed_1H, mlp, guess)

    def _layers(
        self,
        hidden_TH: Tensor,
        step: Step,
        asked: Asked,
        plans: list[Computed | DispatchPlan | None],
        ends: Sequence[int] | None,
    ) -> Tensor:
        """One after the other. plans: what each computed is added. ends: as of `forward_batch`."""
        wants_norm = (asked.technique.needs_saliency and asked.said is None) or asked.observer is not None
        for layer, weights in enumerate(self._weights.layers):
            normed_TH = weights.attention_norm(hidden_TH)
            if ends is not None and layer == len(self._weights.layers) - 1:
                hidden_TH, normed_TH, step = self._at_ends(hidden_TH, normed_TH, step, ends)
                if not len(hidden_TH):
                    plans.append(None)
                    return hidden_TH
            attended_TH = self._attend(normed_TH, layer, step)
            # Saliency [S, 000 §3.2] is the attention block's own output, before the residual is added.
            saliency_T = row_norms(attended_TH) if wants_norm else None
            if weights.after_attention_norm is not None:
                attended_TH = weights.after_attention_norm(attended_TH)
            hidden_TH = summed(hidden_TH, attended_TH)
            normed_TH = weights.mlp_norm(hidden_TH)
            mixed_TH, plan = self._mlp(normed_TH, hidden_TH, weights.mlp, layer, saliency_T, asked)
            if weights.after_mlp_norm is not None:
                mixed_TH = weights.after_mlp_norm(mixed_TH)
            hidden_TH = summed(hidden_TH, mixed_TH)
            plans.append(plan)
        return hidden_TH

    def _at_ends(
        self, hidden_TH: Tensor, normed_TH: Tensor, step: Step, ends: Sequence[int]
    ) -> tuple[Tensor, Tensor, Step]:
        """What the last layer goes on with: the rows at each chunk's end. Keys and values of the others are kept."""
        befores = [chunk.n_tokens - n for chunk, n in zip(step.chunks, ends, strict=True)]
        last = len(self._weights.layers) - 1
        if any(befores):
            rows, before = step.of_parts([(0, n) for n in befores], self._device)
            attention = self._weights.layers[last].attention
            keep_only(normed_TH[rows], attention, self.config, last, before, self._tables[last])
        rows, at_ends = step.of_parts(list(zip(befores, ends, strict=True)), self._device)
        return hidden_TH[rows], normed_TH[rows], at_ends

    def _grouped(self, technique: Technique, plans: Sequence[Computed | DispatchPlan | None]) -> set[bool]:
        """Of layers that followed a plan, whether all experts were computed together and not one after the other."""
        found = set()
        for plan, weights in zip(plans, self._weights.layers, strict=True):
            if not isinstance(plan, DispatchPlan) or not isinstance(weights.mlp, SparseWeights):
                continue
            experts = weights.mlp.experts
            if isinstance(technique, Oracle):
                found.add(False)
            elif isinstance(experts, StackedExperts):
                found.add(multiplies_groups(plan.calls, experts))
            else:
                found.add(is_grouped(plan.calls, experts))
        return found

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """logits_TL of normed hidden states, fp32; the caller picks the rows it needs, for the head is large."""
        return self._capped(widened_linear(hidden_TH, self._weights.head_LH, self._weights.head_bias_L).float())

    def _capped(self, logits_TL: Tensor) -> Tensor:
        cap = self.config.logit_softcap
        return logits_TL if cap is None else cap * torch.tanh(logits_TL / cap)

    def _own_rows(self, tokens_T: Tensor) -> Tensor:
        """Those of a step that this model computes: all."""
        return tokens_T

    def _step(self, n_tokens: Sequence[int], caches: Sequence[KeyValueCache]) -> Step:
        check_rooms(n_tokens, caches)
        chunks: list[Chunk] = []
        turns: list[tuple[Tensor, Tensor]] = []
        row = 0
        for n, cache in zip(n_tokens, caches, strict=True):
            position = cache.length
            views = {span: view_of(span, position, n, self._device) for span in set(self.config.attention.spans)}
            chunks.append(Chunk(cache, position, n, row, views))
            turns.append(cache.turns.at(position, n))
            row += n
        cos_TP, sin_TP = turns[0] if len(turns) == 1 else map(torch.cat, zip(*turns, strict=True))
        if self._device is not None:
            cos_TP, sin_TP = cos_TP.to(self._device), sin_TP.to(self._device)
        return Step(chunks, cos_TP, sin_TP)

    def _mlp(
        self,
        normed_TH: Tensor,
        residual_TH: Tensor,
        mlp: GatedWeights | SparseWeights,
        layer: int,
        saliency_T: Tensor | None,
        asked: Asked,
    ) -> tuple[Tensor, Computed | DispatchPlan | None]:
        if isinstance(mlp, GatedWeights):
            return self._every_token(normed_TH, mlp, layer), None
        technique, phase, observer, on_routing, said, shown = asked
        moe = self.config.moe
        assert moe is not None  # sparse weights are read only where the config has experts
        routing = route(normed_TH, mlp.router, moe.router)
        if on_routing is not None:
            on_routing(layer, routing, phase)
        table = mlp.experts.table if said is None or shown.kept_slots is None else shown.kept_slots.table(layer)
        if said is not None and table is not None and tables.serves(normed_TH, routing.weights_TK):
            chosen = routing.expert_ids_TK, routing.weights_TK
            layout, rows_E, plan = said.layouts[layer] or PLAIN, None, None
            ran = mix_laid_out(normed_TH, table, said.table, layer, *chosen, shown.held)
            if ran is not None:
                mixed_TH, rows_E = ran
                if shown.slots is not None:
                    shown.slots.stamps.end_layer(layer)
            else:
                mixed_TH, plan = _brought(technique, shown, layer, routing, normed_TH)
            return _sum(mixed_TH, self._shared(normed_TH, mlp, layer)), Computed(routing, rows_E, layout, plan)
        shared_TH = self._shared(normed_TH, mlp, layer)
        state = HiddenState(residual_TH, normed_TH, shared_TH)
        mixed_TH, plan = self._by_plan(asked, layer, routing, saliency_T, state, normed_TH, mlp)
        if observer is not None:
            assert saliency_T is not None  # computed for whoever observes
            observer.layer(
                SparseLayerStep(layer, phase, saliency_T, normed_TH, routing, mixed_TH, residual_TH, shared_TH)
            )
        return _sum(mixed_TH, shared_TH), plan

    def _by_plan(
        self,
        asked: Asked,
        layer: int,
        routing: Routing,
        saliency_T: Tensor | None,
        state: HiddenState | None,
        normed_TH: Tensor,
        mlp: SparseWeights,
        guess: Prediction | None = None,
    ) -> tuple[Tensor, DispatchPlan]:
        """The routed experts of a layer, which wait for its plan. guess: made already, of a state that is not shown."""
        technique, shown = asked.technique, asked.shown
        seen = shown.layer(layer, asked.phase, routing, saliency_T, state)
        if guess is not None:
            seen = replace(seen, guess=guess)
        plan = technique.plan(seen)
        if isinstance(technique, Oracle):
            mixed_TH = mix_experts(normed_TH, routing, mlp.experts)
        elif isinstance(mlp.experts, StackedExperts):
            mixed_TH = execute_stacked(plan, normed_TH, mlp.experts)
        elif shown.slots is not None:
            mixed_TH = shown.slots.execute(layer, plan, normed_TH)
        else:
            mixed_TH = self._execute(plan, normed_TH, mlp.experts, layer)
        shown.ran(seen, plan)
        return mixed_TH, plan

    def _attend(self, normed_TH: Tensor, layer: int, step: Step) -> Tensor:
        return attend(normed_TH, self._weights.layers[layer].attention, self.config, layer, step, self._tables[layer])

    def _execute(self, plan: DispatchPlan, normed_TH: Tensor, experts: ExpertWeights, layer: int) -> Tensor:
        return execute(plan, normed_TH, experts)

    def _every_token(self, normed_TH: Tensor, weights: GatedWeights, layer: int) -> Tensor:
        """A dense layer's block, or shared experts."""
        return gated_ffn(normed_TH, weights, self.config.unit)

    def _shared(self, normed_TH: Tensor, mlp: SparseWeights, layer: int) -> Tensor | None:
        if mlp.shared is None:
            return None
        shared_TH = self._every_token(normed_TH, mlp.shared, layer)
        if mlp.shared_gate_1H is not None:
            shared_TH = gated(shared_TH, normed_TH, mlp.shared_gate_1H)
        return shared_TH


def _brought(
    technique: Technique, shown: Shown, layer: int, routing: Routing, normed_1H: Tensor
) -> tuple[Tensor, DispatchPlan]:
    """The experts of a layer of one decoded token, by a plan that brings those which lie in no slot."""
    assert shown.slots is not None  # else all experts lie at hand
    seen = shown.layer(layer, "decode", routing, None, None)
    plan = technique.plan(seen)
    mixed_1H = shown.slots.execute(layer, plan, normed_1H)
    shown.ran(seen, plan)
    return mixed_1H, plan


def _sum(mixed_TH: Tensor, shared_TH: Tensor | None) -> Tensor:
    return mixed_TH if shared_TH is None else summed(mixed_TH, shared_TH)


def model_of(
    checkpoint: Checkpoint,
    torch_device: DeviceType = "cpu",
    compute_dtype: torch.dtype | None = None,
    long_rope: LongRope = "at_once",
    experts_stay: bool = False,
) -> Transformer:
    """What engines compute with, its weights where they compute: once for all arms of a run. Raises `EngineError`.

    experts_stay: as of `Transformer`."""
    return Transformer(with_long_rope(checkpoint, long_rope), find_backend(torch_device, compute_dtype), experts_stay)


def with_long_rope(checkpoint: Checkpoint, long_rope: LongRope) -> Checkpoint:
    """The model as it takes LongRoPE's long factors."""
    if long_rope == "at_once":
        return checkpoint
    return replace(checkpoint, config=replace(checkpoint.config, rope=as_transformers(checkpoint.config.rope)))
