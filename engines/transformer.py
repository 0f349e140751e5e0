"""One pre-norm transformer for Llama, Qwen2 and Qwen3-MoE, computed chunk by chunk against a key/value cache.

Arithmetic is fp32 whatever the weights are stored in. A chunk is any run of tokens that continues what the cache holds:
a whole prompt, a piece of one, or one token of decoding; the result does not depend on where prompts are cut.

Legend: T tokens of the chunk, S tokens in the cache after the chunk, H hidden, N query heads, M key/value heads,
D head_dim, L vocabulary rows, E experts.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.checkpoints import AttentionWeights, Checkpoint, DenseWeights, LayerWeights
from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.experts import execute, swiglu, widened_linear
from engines.model_config import Llama3Scaling, ModelConfig
from engines.oracle import Oracle, mix_experts
from engines.router import route
from engines.techniques.base import ChunkPhase, Technique


class KeyValueCache:
    """Keys and values of one sequence, in buffers of fixed size. keys, values: per layer [M, positions, D], fp32."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.length = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def start(self, n_positions: int) -> None:
        """Empties the cache for a sequence of up to n_positions; buffers are kept where they are long enough."""
        self.length = 0
        if not self.keys or self.keys[0].shape[1] < n_positions:
            shape = (self._config.n_kv_heads, n_positions, self._config.head_dim)
            self.keys = [torch.empty(shape) for _ in range(self._config.n_layers)]
            self.values = [torch.empty(shape) for _ in range(self._config.n_layers)]


class Transformer:
    """The model without its technique, which each call brings: calibration and measurement share one set of weights."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self._weights = checkpoint.weights
        self._inverse_frequency_D2 = rope_frequencies(self.config)

    def forward(
        self, tokens_T: Tensor, cache: KeyValueCache, technique: Technique, phase: ChunkPhase
    ) -> tuple[Tensor, list[DispatchPlan | None]]:
        """Runs one chunk at the cache's end. Returns normed hidden_TH and each layer's plan (None for dense layers)."""
        n_new, position = tokens_T.shape[0], cache.length
        end = position + n_new
        if not cache.keys or end > cache.keys[0].shape[1]:
            raise EngineError(f"chunk ends at position {end}, beyond the cache; call cache.start with enough positions")
        cos_TD, sin_TD = rotation(self._inverse_frequency_D2, position, n_new)
        mask_TS = _causal_mask(position, n_new)
        hidden_TH = F.embedding(tokens_T, self._weights.embedding_LH).float()
        plans: list[DispatchPlan | None] = []
        for layer, weights in enumerate(self._weights.layers):
            normed_TH = self._norm(hidden_TH, weights.attention_norm_H)
            query_NTD, key_MTD, value_MTD = self._project(normed_TH, weights.attention, cos_TD, sin_TD)
            cache.keys[layer][:, position:end] = key_MTD
            cache.values[layer][:, position:end] = value_MTD
            attended_TH = _attend(
                query_NTD, cache.keys[layer][:, :end], cache.values[layer][:, :end], mask_TS, weights.attention.out_HQ
            )
            # Saliency [S, 000 §3.2] is the attention block's own output, before the residual is added.
            saliency_T = torch.linalg.vector_norm(attended_TH, dim=-1) if technique.needs_saliency else None
            hidden_TH = hidden_TH + attended_TH
            mixed_TH, plan = self._mlp(hidden_TH, weights, layer, technique, phase, saliency_T)
            hidden_TH = hidden_TH + mixed_TH
            plans.append(plan)
        cache.length = end
        return self._norm(hidden_TH, self._weights.norm_H), plans

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """logits_TL of normed hidden states; the caller picks the rows it needs, for the head is large."""
        return widened_linear(hidden_TH, self._weights.head_LH)

    def _norm(self, x_TH: Tensor, weight_H: Tensor) -> Tensor:
        return F.rms_norm(x_TH, weight_H.shape, weight_H, self.config.rms_eps)

    def _project(
        self, x_TH: Tensor, weights: AttentionWeights, cos_TD: Tensor, sin_TD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head, normed where the model does so, and turned to their positions."""
        n_new, head_dim = x_TH.shape[0], self.config.head_dim
        query_TND = widened_linear(x_TH, weights.q_QH, weights.q_bias_Q).view(n_new, -1, head_dim)
        key_TMD = widened_linear(x_TH, weights.k_MH, weights.k_bias_M).view(n_new, -1, head_dim)
        value_TMD = widened_linear(x_TH, weights.v_MH, weights.v_bias_M).view(n_new, -1, head_dim)
        if weights.q_norm_D is not None and weights.k_norm_D is not None:
            query_TND = self._norm(query_TND, weights.q_norm_D)
            key_TMD = self._norm(key_TMD, weights.k_norm_D)
        query_NTD, key_MTD = query_TND.transpose(0, 1), key_TMD.transpose(0, 1)
        return turn(query_NTD, cos_TD, sin_TD), turn(key_MTD, cos_TD, sin_TD), value_TMD.transpose(0, 1)

    def _mlp(
        self,
        hidden_TH: Tensor,
        weights: LayerWeights,
        layer: int,
        technique: Technique,
        phase: ChunkPhase,
        saliency_T: Tensor | None,
    ) -> tuple[Tensor, DispatchPlan | None]:
        normed_TH = self._norm(hidden_TH, weights.mlp_norm_H)
        mlp, moe = weights.mlp, self.config.moe
        if isinstance(mlp, DenseWeights):
            return swiglu(normed_TH, mlp.gate_up, mlp.down_HW), None
        assert moe is not None  # sparse weights are read only where the config has experts
        routing = route(normed_TH, mlp.router_EH, moe.top_k, moe.norm_topk_prob)
        plan = technique.plan(routing, layer, phase, saliency_T)
        if isinstance(technique, Oracle):
            return mix_experts(normed_TH, routing, mlp.experts), plan
        return execute(plan, normed_TH, mlp.experts), plan


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each feature pair, in radian: theta^(-2i/D), scaled where the config says so."""
    exponent_D2 = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequency_D2 = 1.0 / (config.rope_theta**exponent_D2)
    return frequency_D2 if config.rope_scaling is None else _llama3_scaled(frequency_D2, config.rope_scaling)


def _llama3_scaled(frequency_D2: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1: divide by `factor` the frequencies that turn less than `low_freq_factor` times over the original
    length, keep those that turn more than `high_freq_factor` times, and interpolate linearly between."""
    turns_D2 = scaling.original_max_length * frequency_D2 / (2 * math.pi)
    ramp_D2 = (turns_D2 - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_D2 = ramp_D2.clamp(0.0, 1.0)
    return kept_D2 * frequency_D2 + (1.0 - kept_D2) * frequency_D2 / scaling.factor


def rotation(frequency_D2: Tensor, position: int, n_tokens: int) -> tuple[Tensor, Tensor]:
    """cos_TD and sin_TD of n_tokens from `position` on; both halves of a head use the same angles."""
    positions_T = torch.arange(position, position + n_tokens, dtype=torch.float32)
    angle_TD = torch.outer(positions_T, frequency_D2).repeat(1, 2)
    return angle_TD.cos(), angle_TD.sin()


def turn(x_NTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary embedding as Hugging Face stores it: feature i is paired with feature i + D/2."""
    low, high = x_NTD.chunk(2, dim=-1)
    return x_NTD * cos_TD + torch.cat([-high, low], dim=-1) * sin_TD


def _causal_mask(position: int, n_tokens: int) -> Tensor | None:
    """True where token t (at position + t) may look at s; None for one token, which may look at everything."""
    if n_tokens == 1:
        return None
    shape = (n_tokens, position + n_tokens)
    return torch.ones(shape, dtype=torch.bool).tril(diagonal=position)


def _attend(query_NTD: Tensor, key_MSD: Tensor, value_MSD: Tensor, mask_TS: Tensor | None, out_HQ: Tensor) -> Tensor:
    """Grouped-query attention and its output projection."""
    mixed_NTD = F.scaled_dot_product_attention(
        query_NTD[None], key_MSD[None], value_MSD[None], attn_mask=mask_TS, enable_gqa=True
    )[0]
    return widened_linear(mixed_NTD.transpose(0, 1).flatten(1), out_HQ)
