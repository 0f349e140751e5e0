"""Attention over a key/value cache: grouped-query and latent, with what families add to the softmax.

Legend: T tokens of the chunk, S tokens seen, N query heads, M key/value heads, D features of a query, V of a value,
G query heads that one key/value head serves, R rank of the latent, P pairs of turned features, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.architecture import AttentionConfig, LatentConfig, ModelConfig, Span, Temperature
from engines.errors import EngineError
from engines.experts import widened_linear
from engines.kernels import native
from engines.norms import NormWeights
from engines.quantised import Matrix
from engines.rope import turn


@dataclass(frozen=True)
class AttentionWeights:
    """Projections as [out, in]; biases and norms where the architecture has them. sinks_N: see `AttentionConfig`."""

    q_QH: Matrix
    k_MH: Matrix
    v_MH: Matrix
    out_HQ: Matrix
    q_bias_Q: Tensor | None
    k_bias_M: Tensor | None
    v_bias_M: Tensor | None
    out_bias_H: Tensor | None
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    sinks_N: Tensor | None


@dataclass(frozen=True)
class LatentWeights:
    """q_down and q_norm: None where queries have no bottleneck. kv_down: latent rows, then the turned key's.

    key_up_NDR, value_up_NVR: from the latent to each head's unturned key and its value.
    """

    q_down_RH: Matrix | None
    q_norm: NormWeights | None
    q_QR: Matrix
    kv_down_RH: Matrix
    kv_norm: NormWeights
    key_up_NDR: Tensor
    value_up_NVR: Tensor
    out_HQ: Matrix


class KeyValueCache:
    """What attention keeps of one sequence, in buffers of fixed size, fp32.

    keys, values: per layer [M, positions, D]; for latent attention keys are [1, positions, R + turned features] and
    values, which are the keys' first R features, take no room.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.length = 0
        self.n_positions = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def start(self, n_positions: int, n_kept: int = 0) -> None:
        """For a sequence of up to n_positions that begins with the first n_kept held now.

        Buffers stay where they are long enough.
        """
        if n_kept > self.length:
            raise EngineError(f"cache holds {self.length} positions and cannot keep {n_kept}; keep fewer")
        if not self.keys or self.keys[0].shape[1] < n_positions:
            key_shape, value_shape = _cached_shapes(self._config, n_positions)
            keys = [torch.empty(key_shape) for _ in range(self._config.n_layers)]
            values = [torch.empty(value_shape) for _ in range(self._config.n_layers)]
            if n_kept:
                for new, old in zip([*keys, *values], [*self.keys, *self.values], strict=True):
                    new[:, :n_kept] = old[:, :n_kept]
            self.keys, self.values = keys, values
        self.length, self.n_positions = n_kept, n_positions


def _cached_shapes(config: ModelConfig, n_positions: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    latent = config.attention.latent
    if latent is not None:
        return (1, n_positions, latent.kv_rank + latent.rope_dim), (1, n_positions, 0)
    shape = (config.n_kv_heads, n_positions, config.head_dim)
    return shape, shape


@dataclass(frozen=True)
class View:
    """What a chunk sees of the cache in a layer: positions from `first` on, and of those where mask_TS is true."""

    first: int
    mask_TS: Tensor | None


def view_of(span: Span | None, position: int, n_tokens: int) -> View:
    """The chunk at `position` sees its past through the span. No mask where everything from `first` on is seen."""
    first = 0
    if span is not None and span.kind == "sliding":
        first = max(0, position - span.n_tokens + 1)
    elif span is not None:
        first = position // span.n_tokens * span.n_tokens
    if n_tokens == 1:
        return View(first, None)
    query_T1 = torch.arange(position, position + n_tokens)[:, None]
    key_S = torch.arange(first, position + n_tokens)
    mask_TS = key_S <= query_T1
    if span is not None and span.kind == "sliding":
        mask_TS &= key_S > query_T1 - span.n_tokens
    elif span is not None:
        mask_TS &= key_S // span.n_tokens == query_T1 // span.n_tokens
    return View(first, mask_TS)


@dataclass(frozen=True)
class Chunk:
    """Where the new tokens stand. cos_TP and sin_TP turn queries and keys, in layers that do so."""

    position: int
    n_tokens: int
    cos_TP: Tensor
    sin_TP: Tensor
    views: dict[Span | None, View]

    @property
    def end(self) -> int:
        return self.position + self.n_tokens


def attend(
    x_TH: Tensor,
    weights: AttentionWeights | LatentWeights,
    config: ModelConfig,
    layer: int,
    chunk: Chunk,
    cache: KeyValueCache,
    table: native.AttentionTable | None,
) -> Tensor:
    """The attention block of one layer: writes the chunk's keys and values to the cache and returns its output.

    table: of `kernel_table`; None has torch compute.
    """
    if table is not None and native.serves(x_TH):
        cos_TP, sin_TP = (chunk.cos_TP, chunk.sin_TP) if config.attention.rope_layers[layer] else (None, None)
        return native.attend(x_TH, table, cos_TP, sin_TP, cache.keys[layer], cache.values[layer], chunk.position)
    view = chunk.views[config.attention.spans[layer]]
    if isinstance(weights, LatentWeights):
        latent = config.attention.latent
        assert latent is not None  # latent weights are read only where the config is latent
        return _latent_attention(x_TH, weights, config, latent, cache.keys[layer], chunk, view)
    query_NTD, key_MTD, value_MTD = _project(x_TH, weights, config, layer, chunk)
    cache.keys[layer][:, chunk.position : chunk.end] = key_MTD
    cache.values[layer][:, chunk.position : chunk.end] = value_MTD
    key_MSD = cache.keys[layer][:, view.first : chunk.end]
    value_MSD = cache.values[layer][:, view.first : chunk.end]
    mixed_NTD = mix_values(query_NTD, key_MSD, value_MSD, view.mask_TS, config.attention, weights.sinks_N)
    return widened_linear(mixed_NTD.transpose(0, 1).flatten(1), weights.out_HQ, weights.out_bias_H)


def kernel_table(
    weights: AttentionWeights | LatentWeights, config: ModelConfig, layer: int
) -> native.AttentionTable | None:
    """The layer as the kernels compute it; None for what only some families have."""
    attention, span = config.attention, config.attention.spans[layer]
    is_plain = attention.clip is None and attention.softcap is None and attention.qk_norm in (None, "head")
    is_tempered = attention.temperature is not None and not attention.rope_layers[layer]
    if (
        isinstance(weights, LatentWeights)
        or not is_plain
        or is_tempered
        or (span is not None and span.kind != "sliding")
    ):
        return None
    norms = None
    if weights.q_norm is not None and weights.k_norm is not None:
        norms = (weights.q_norm.weight, weights.k_norm.weight, weights.q_norm.eps)
    return native.attention_table(
        weights.q_QH,
        weights.k_MH,
        weights.v_MH,
        weights.out_HQ,
        (weights.q_bias_Q, weights.k_bias_M, weights.v_bias_M, weights.out_bias_H),
        norms,
        weights.sinks_N,
        config.head_dim,
        None if span is None else span.n_tokens,
        attention.scale,
        config.rope.pairs == "neighbours",
    )


def _project(
    x_TH: Tensor, weights: AttentionWeights, config: ModelConfig, layer: int, chunk: Chunk
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by head, normed where the model does so, and turned to their positions."""
    attention, head_dim = config.attention, config.head_dim
    query_TQ = widened_linear(x_TH, weights.q_QH, weights.q_bias_Q)
    key_TM = widened_linear(x_TH, weights.k_MH, weights.k_bias_M)
    value_TM = widened_linear(x_TH, weights.v_MH, weights.v_bias_M)
    if weights.q_norm is not None and weights.k_norm is not None and attention.qk_norm == "all heads":
        query_TQ, key_TM = weights.q_norm(query_TQ), weights.k_norm(key_TM)
    if attention.clip is not None:
        query_TQ, key_TM, value_TM = (x.clamp(-attention.clip, attention.clip) for x in (query_TQ, key_TM, value_TM))
    query_NTD, key_MTD, value_MTD = (
        x.view(chunk.n_tokens, -1, head_dim).transpose(0, 1) for x in (query_TQ, key_TM, value_TM)
    )
    if weights.q_norm is not None and weights.k_norm is not None and attention.qk_norm == "head":
        query_NTD, key_MTD = weights.q_norm(query_NTD), weights.k_norm(key_MTD)
    if attention.rope_layers[layer]:
        query_NTD, key_MTD = (turn(x, chunk.cos_TP, chunk.sin_TP, config.rope.pairs) for x in (query_NTD, key_MTD))
        if attention.qk_norm == "l2":
            query_NTD, key_MTD = (F.rms_norm(x, (head_dim,), eps=config.norm.eps) for x in (query_NTD, key_MTD))
    elif attention.temperature is not None:
        query_NTD = query_NTD * _temperature_T1(attention.temperature, chunk)
    return query_NTD, key_MTD, value_MTD


def _temperature_T1(temperature: Temperature, chunk: Chunk) -> Tensor:
    place_T = torch.arange(chunk.position + 1, chunk.end + 1, dtype=torch.float32)
    return (1 + temperature.strength * torch.log1p((place_T / temperature.floor_tokens).floor()))[:, None]


def mix_values(
    query_NTD: Tensor,
    key_MSD: Tensor,
    value_MSD: Tensor,
    mask_TS: Tensor | None,
    config: AttentionConfig,
    sinks_N: Tensor | None,
) -> Tensor:
    """softmax(scale * q k) v by head; each key/value head serves N/M query heads in a row."""
    if sinks_N is None and config.softcap is None:
        return F.scaled_dot_product_attention(
            query_NTD[None], key_MSD[None], value_MSD[None], attn_mask=mask_TS, scale=config.scale, enable_gqa=True
        )[0]
    # One key/value head at a time: written out, the scores of all heads over a long past would not fit in memory.
    n_served = query_NTD.shape[0] // key_MSD.shape[0]
    mixed = []
    for head, (key_SD, value_SD) in enumerate(zip(key_MSD, value_MSD, strict=True)):
        served = slice(head * n_served, (head + 1) * n_served)
        score_GTS = config.scale * (query_NTD[served] @ key_SD.T)
        if config.softcap is not None:
            score_GTS = config.softcap * torch.tanh(score_GTS / config.softcap)
        if mask_TS is not None:
            score_GTS = score_GTS.masked_fill(~mask_TS, float("-inf"))
        sink_G = None if sinks_N is None else sinks_N[served]
        mixed.append(_softmax_with_sink(score_GTS, sink_G) @ value_SD)
    return torch.cat(mixed)


def _softmax_with_sink(score_GTS: Tensor, sink_G: Tensor | None) -> Tensor:
    if sink_G is None:
        return score_GTS.softmax(dim=-1)
    sink_GT1 = sink_G[:, None, None].expand(*score_GTS.shape[:2], 1)
    return torch.cat([score_GTS, sink_GT1], dim=-1).softmax(dim=-1)[..., :-1]


def _latent_attention(
    x_TH: Tensor,
    weights: LatentWeights,
    config: ModelConfig,
    latent: LatentConfig,
    cached_1SK: Tensor,
    chunk: Chunk,
    view: View,
) -> Tensor:
    """DeepSeek-V2 §2.1.2, §2.1.3. The cache holds the normed latent and the one turned key (K = R + turned features).

    Keys and values are expanded for all heads, or the queries are brought to the latent instead and the values expanded
    after the sum ("absorbed"): the same products in another order, chosen by which takes fewer.
    """
    cached_1SK[0, chunk.position : chunk.end] = _latent_row(x_TH, weights, config, latent, chunk)
    seen_1SK = cached_1SK[:, view.first : chunk.end]
    query_NTD, turned_NTD = _latent_queries(x_TH, weights, config, latent, chunk)
    key_up_NDR, value_up_NVR = weights.key_up_NDR.float(), weights.value_up_NVR.float()
    expanding = latent.kv_rank * (latent.nope_dim + latent.value_dim)
    absorbing = chunk.n_tokens * (2 * latent.kv_rank - latent.nope_dim - latent.value_dim)
    if expanding < absorbing:
        n_heads = query_NTD.shape[0]
        seen_1SR, turned_1SD = seen_1SK[..., : latent.kv_rank], seen_1SK[..., latent.kv_rank :]
        key_NSD = torch.cat([seen_1SR @ key_up_NDR.mT, turned_1SD.expand(n_heads, -1, -1)], dim=-1)
        value_NSV = seen_1SR @ value_up_NVR.mT
        query_NTD = torch.cat([query_NTD, turned_NTD], dim=-1)
        mixed_NTV = mix_values(query_NTD, key_NSD, value_NSV, view.mask_TS, config.attention, None)
    else:
        query_NTK = torch.cat([query_NTD @ key_up_NDR, turned_NTD], dim=-1)
        seen_1SR = seen_1SK[..., : latent.kv_rank]
        mixed_NTR = mix_values(query_NTK, seen_1SK, seen_1SR, view.mask_TS, config.attention, None)
        mixed_NTV = mixed_NTR @ value_up_NVR.mT
    return widened_linear(mixed_NTV.transpose(0, 1).flatten(1), weights.out_HQ)


def _latent_row(
    x_TH: Tensor, weights: LatentWeights, config: ModelConfig, latent: LatentConfig, chunk: Chunk
) -> Tensor:
    latent_TR, key_TD = torch.split(widened_linear(x_TH, weights.kv_down_RH), [latent.kv_rank, latent.rope_dim], dim=-1)
    return torch.cat([weights.kv_norm(latent_TR), turn(key_TD, chunk.cos_TP, chunk.sin_TP, config.rope.pairs)], dim=-1)


def _latent_queries(
    x_TH: Tensor, weights: LatentWeights, config: ModelConfig, latent: LatentConfig, chunk: Chunk
) -> tuple[Tensor, Tensor]:
    """Each head's unturned and turned features."""
    narrow_TR = x_TH
    if weights.q_down_RH is not None and weights.q_norm is not None:
        narrow_TR = weights.q_norm(widened_linear(x_TH, weights.q_down_RH))
    query_NTD = widened_linear(narrow_TR, weights.q_QR).view(chunk.n_tokens, config.n_heads, -1).transpose(0, 1)
    plain_NTD, turned_NTD = torch.split(query_NTD, [latent.nope_dim, latent.rope_dim], dim=-1)
    return plain_NTD, turn(turned_NTD, chunk.cos_TP, chunk.sin_TP, config.rope.pairs)
