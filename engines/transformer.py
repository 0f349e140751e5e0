"""One transformer for every family of `engines.families`, computed chunk by chunk against a key/value cache.

Arithmetic is fp32 whatever the weights are stored in. A chunk is any run of tokens that continues what the cache holds:
a whole prompt, a piece of one, or one token of decoding; the result does not depend on where prompts are cut.

Legend: T tokens of the chunk, H hidden, P pairs of turned features, L vocabulary rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.attention import Chunk, attend, kernel_table, view_of
from engines.attention import KeyValueCache as KeyValueCache
from engines.checkpoints import Checkpoint
from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.experts import GatedWeights, execute, gated_ffn, widened_linear
from engines.oracle import Oracle, mix_experts
from engines.rope import rope_frequencies, rotation
from engines.router import route
from engines.techniques.base import ChunkPhase, Technique
from engines.weights import SparseWeights


class Transformer:
    """The model without its technique, which each call brings: calibration and measurement share one set of weights."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self._weights = checkpoint.weights
        self._tables = [
            kernel_table(weights.attention, self.config, layer)
            for layer, weights in enumerate(checkpoint.weights.layers)
        ]

    def forward(
        self, tokens_T: Tensor, cache: KeyValueCache, technique: Technique, phase: ChunkPhase
    ) -> tuple[Tensor, list[DispatchPlan | None]]:
        """Runs one chunk at the cache's end. Returns normed hidden_TH and each layer's plan (None for dense layers)."""
        chunk = self._chunk(tokens_T.shape[0], cache)
        hidden_TH = F.embedding(tokens_T, self._weights.embedding_LH).float() * self.config.embedding_scale
        plans: list[DispatchPlan | None] = []
        for layer, weights in enumerate(self._weights.layers):
            attended_TH = attend(
                weights.attention_norm(hidden_TH),
                weights.attention,
                self.config,
                layer,
                chunk,
                cache,
                self._tables[layer],
            )
            # Saliency [S, 000 §3.2] is the attention block's own output, before the residual is added.
            saliency_T = torch.linalg.vector_norm(attended_TH, dim=-1) if technique.needs_saliency else None
            if weights.after_attention_norm is not None:
                attended_TH = weights.after_attention_norm(attended_TH)
            hidden_TH = hidden_TH + attended_TH
            mixed_TH, plan = self._mlp(weights.mlp_norm(hidden_TH), weights.mlp, layer, technique, phase, saliency_T)
            if weights.after_mlp_norm is not None:
                mixed_TH = weights.after_mlp_norm(mixed_TH)
            hidden_TH = hidden_TH + mixed_TH
            plans.append(plan)
        cache.length = chunk.end
        return self._weights.norm(hidden_TH), plans

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """logits_TL of normed hidden states; the caller picks the rows it needs, for the head is large."""
        logits_TL = widened_linear(hidden_TH, self._weights.head_LH, self._weights.head_bias_L)
        cap = self.config.logit_softcap
        return logits_TL if cap is None else cap * torch.tanh(logits_TL / cap)

    def _chunk(self, n_tokens: int, cache: KeyValueCache) -> Chunk:
        position, end = cache.length, cache.length + n_tokens
        if not cache.keys or end > cache.n_positions:
            raise EngineError(f"chunk ends at position {end}, beyond the cache; call cache.start with enough positions")
        frequency_P, amplitude = rope_frequencies(self.config.rope, cache.n_positions)
        cos_TP, sin_TP = rotation(frequency_P, amplitude, position, n_tokens)
        views = {span: view_of(span, position, n_tokens) for span in set(self.config.attention.spans)}
        return Chunk(position, n_tokens, cos_TP, sin_TP, views)

    def _mlp(
        self,
        normed_TH: Tensor,
        mlp: GatedWeights | SparseWeights,
        layer: int,
        technique: Technique,
        phase: ChunkPhase,
        saliency_T: Tensor | None,
    ) -> tuple[Tensor, DispatchPlan | None]:
        if isinstance(mlp, GatedWeights):
            return gated_ffn(normed_TH, mlp, self.config.unit), None
        moe = self.config.moe
        assert moe is not None  # sparse weights are read only where the config has experts
        routing = route(normed_TH, mlp.router, moe.router)
        plan = technique.plan(routing, layer, phase, saliency_T)
        if isinstance(technique, Oracle):
            mixed_TH = mix_experts(normed_TH, routing, mlp.experts)
        else:
            mixed_TH = execute(plan, normed_TH, mlp.experts)
        if mlp.shared is None:
            return mixed_TH, plan
        shared_TH = gated_ffn(normed_TH, mlp.shared, self.config.unit)
        if mlp.shared_gate_1H is not None:
            shared_TH = shared_TH * torch.sigmoid(widened_linear(normed_TH, mlp.shared_gate_1H))
        return mixed_TH + shared_TH, plan
