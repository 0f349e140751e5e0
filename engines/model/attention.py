"""Attention: grouped-query and latent, with what families add to the softmax.

A step holds the new tokens of one sequence or of several, row after row. Projections are computed for all rows at once,
so that their weights are read once; scores and sums for each sequence alone, against its own cache.

Legend: T tokens of the step or, where a function takes one chunk, of the chunk; S tokens seen, N query heads,
M key/value heads, D features of a query, V of a value, G query heads that one key/value head serves, R rank of the
latent, P pairs of turned features, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.kernels import native, tables
from engines.model.architecture import AttentionConfig, LatentConfig, ModelConfig, Temperature
from engines.model.experts import widened_linear
from engines.model.key_value_cache import SharedRows, Step
from engines.model.norms import NormWeights
from engines.model.quantised import Arithmetic, Matrix, rounded
from engines.model.rope import turn
from engines.model.whole_numbers import whole_shares, whole_values


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
    arithmetic: Arithmetic = "fp32"
    """Of what attention of more than one token multiplies: see `mix_values`."""
    kept: torch.dtype = torch.float32
    """How a cache keeps keys and values."""


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


def attend(
    x_TH: Tensor,
    weights: AttentionWeights | LatentWeights,
    config: ModelConfig,
    layer: int,
    step: Step,
    table: tables.AttentionTable | None,
) -> Tensor:
    """The attention block of one layer: writes each chunk's keys and values to its cache and returns its output.

    table: of `kernel_table`; None has torch compute. The kernel computes the block whole, projections included.
    """
    if table is not None and tables.serves(x_TH):
        cos_TP, sin_TP = _turns(config, layer, step)
        if step.shared is None:
            return native.attend(x_TH, table, cos_TP, sin_TP, step.chunk_table, layer)
        query_TQ, key_TM, value_TM = native.project(x_TH, table, cos_TP, sin_TP)
        _cache(step, layer, *_shared_by_head(step.shared, key_TM, value_TM, config.head_dim))
        return native.attend_cached(query_TQ, table, step.chunk_table, layer)
    if isinstance(weights, LatentWeights):
        latent = config.attention.latent
        assert latent is not None  # latent weights are read only where the config is latent
        return _latent_attention(x_TH, weights, config, latent, layer, step)
    span = config.attention.spans[layer]
    query_NTD, key_MTD, value_MTD = _project(x_TH, weights, config, layer, step)
    if step.shared is not None:
        key_TM, value_TM = (x.transpose(0, 1).flatten(1) for x in (key_MTD, value_MTD))
        key_MTD, value_MTD = _shared_by_head(step.shared, key_TM, value_TM, config.head_dim)
    _cache(step, layer, key_MTD, value_MTD)
    mixed = []
    for chunk in step.chunks:
        view, keys, values = chunk.views[span], chunk.cache.keys[layer], chunk.cache.values[layer]
        key_MSD, value_MSD = (x[:, view.first : chunk.end].to(query_NTD.dtype) for x in (keys, values))
        query, sinks_N = query_NTD[:, chunk.rows], weights.sinks_N
        arithmetic = weights.arithmetic if chunk.n_tokens > 1 else "fp32"
        mixed.append(mix_values(query, key_MSD, value_MSD, view.mask_TS, config.attention, sinks_N, arithmetic))
    return widened_linear(_rows_of_heads(mixed), weights.out_HQ, weights.out_bias_H)


def keep_only(
    x_TH: Tensor,
    weights: AttentionWeights | LatentWeights,
    config: ModelConfig,
    layer: int,
    step: Step,
    table: tables.AttentionTable | None,
) -> None:
    """As `attend`, of which it writes the keys and values and computes nothing else. step: shared with no other
    process."""
    if table is not None and tables.serves(x_TH):
        cos_TP, sin_TP = _turns(config, layer, step)
        native.attend(x_TH, table, cos_TP, sin_TP, step.chunk_table, layer, keeps_only=True)
    elif isinstance(weights, LatentWeights):
        assert config.attention.latent is not None  # as in `attend`
        _cache_latents(step, layer, _latent_row(x_TH, weights, config, config.attention.latent, step))
    else:
        _cache(step, layer, *_keys_and_values(x_TH, weights, config, layer, step))


def _turns(config: ModelConfig, layer: int, step: Step) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """cos_TP and sin_TP of a layer that turns queries and keys."""
    return (step.cos_TP, step.sin_TP) if config.attention.rope_layers[layer] else (None, None)


def _shared_by_head(shared: SharedRows, key_TM: Tensor, value_TM: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values of all rows, key_MTD and value_MTD, in one exchange."""
    n_heads = key_TM.shape[1] // head_dim
    gathered_TX = shared.gathered(torch.cat([key_TM, value_TM], dim=1))
    by_head = gathered_TX.view(-1, 2 * n_heads, head_dim).transpose(0, 1)
    return by_head[:n_heads], by_head[n_heads:]


def _cache(step: Step, layer: int, key_MTD: Tensor, value_MTD: Tensor) -> None:
    """Of each sequence its own."""
    for chunk in step.cached:
        for held_MSD, new_MTD in ((chunk.cache.keys[layer], key_MTD), (chunk.cache.values[layer], value_MTD)):
            held_MSD[:, chunk.position : chunk.end] = _as_kept(new_MTD[:, chunk.rows], held_MSD.dtype)


def _cache_latents(step: Step, layer: int, row_TK: Tensor) -> None:
    for chunk in step.cached:
        chunk.cache.keys[layer][0, chunk.position : chunk.end] = row_TK[chunk.rows]


def _as_kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As `keep` of kept.h: what is too large for a half is no number."""
    kept = x.to(dtype)
    return kept.masked_fill(kept.isinf(), float("nan")) if dtype is torch.float16 is not x.dtype else kept


def _rows_of_heads(mixed: Sequence[Tensor]) -> Tensor:
    """Each chunk's [N, T, V] one under another, as [T, N * V]."""
    together_NTV = mixed[0] if len(mixed) == 1 else torch.cat([*mixed], dim=1)
    return together_NTV.transpose(0, 1).flatten(1)


def why_torch_attends(config: ModelConfig, layer: int) -> str | None:
    """What the kernels do not compute of a layer's attention; None where they compute it."""
    attention, span = config.attention, config.attention.spans[layer]
    is_tempered = attention.temperature is not None and not attention.rope_layers[layer]
    reasons = {
        "latent attention": attention.latent is not None,
        "a soft cap of scores": attention.softcap is not None,
        "clipped queries, keys and values": attention.clip is not None,
        "a norm over all heads at once": attention.qk_norm == "all heads",
        "an L2 norm of queries and keys": attention.qk_norm == "l2",
        "attention in chunks": span is not None and span.kind == "chunked",
        "queries scaled by their position": is_tempered,
        f"heads of {config.head_dim} values": not tables.fills_registers(config.head_dim),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def kernel_table(
    weights: AttentionWeights | LatentWeights, config: ModelConfig, layer: int
) -> tables.AttentionTable | None:
    """The layer as the kernels compute it; None for what only some families have."""
    if isinstance(weights, LatentWeights) or why_torch_attends(config, layer) is not None:
        return None
    attention, span = config.attention, config.attention.spans[layer]
    norms = None
    if weights.q_norm is not None and weights.k_norm is not None:
        norms = (weights.q_norm.weight, weights.k_norm.weight, weights.q_norm.eps)
    return tables.attention_table(
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
        weights.arithmetic,
        weights.kept,
    )


def _project(
    x_TH: Tensor, weights: AttentionWeights, config: ModelConfig, layer: int, step: Step
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by head, normed where the model does so, and turned to their positions."""
    attention = config.attention
    query_NTD = _by_head(x_TH, weights.q_QH, weights.q_bias_Q, weights.q_norm, config)
    if attention.rope_layers[layer]:
        query_NTD = _placed(query_NTD, config, step)
    elif attention.temperature is not None:
        query_NTD = (query_NTD * _temperature_T1(attention.temperature, step).to(x_TH.device)).to(x_TH.dtype)
    return query_NTD, *_keys_and_values(x_TH, weights, config, layer, step)


def _keys_and_values(
    x_TH: Tensor, weights: AttentionWeights, config: ModelConfig, layer: int, step: Step
) -> tuple[Tensor, Tensor]:
    key_MTD = _by_head(x_TH, weights.k_MH, weights.k_bias_M, weights.k_norm, config)
    if config.attention.rope_layers[layer]:
        key_MTD = _placed(key_MTD, config, step)
    return key_MTD, _by_head(x_TH, weights.v_MH, weights.v_bias_M, None, config)


def _by_head(
    x_TH: Tensor, weight_QH: Matrix, bias_Q: Tensor | None, norm: NormWeights | None, config: ModelConfig
) -> Tensor:
    """[heads, T, D], clipped where the model does so. norm: over what its config says."""
    kind, clip = config.attention.qk_norm, config.attention.clip
    made_TQ = widened_linear(x_TH, weight_QH, bias_Q)
    if norm is not None and kind == "all heads":
        made_TQ = norm(made_TQ)
    if clip is not None:
        made_TQ = made_TQ.clamp(-clip, clip)
    made_TND = made_TQ.view(len(x_TH), -1, config.head_dim)
    if norm is not None and kind == "head":
        # As they lie: of heads that lie apart the kernels read none.
        made_TND = norm(made_TND)
    return made_TND.transpose(0, 1)


def _placed(x_NTD: Tensor, config: ModelConfig, step: Step) -> Tensor:
    """Queries or keys of a layer that turns them."""
    turned_NTD = _turned(x_NTD, config, step)
    if config.attention.qk_norm == "l2":
        return F.rms_norm(turned_NTD, (config.head_dim,), eps=config.norm.eps)
    return turned_NTD


def _turned(x_NTD: Tensor, config: ModelConfig, step: Step) -> Tensor:
    """Turned by fp32 angles, and given back in the dtype it came in."""
    return turn(x_NTD, step.cos_TP, step.sin_TP, config.rope.pairs).to(x_NTD.dtype)


def _temperature_T1(temperature: Temperature, step: Step) -> Tensor:
    places = [torch.arange(chunk.position + 1, chunk.end + 1, dtype=torch.float32) for chunk in step.chunks]
    place_T = torch.cat(places)
    return (1 + temperature.strength * torch.log1p((place_T / temperature.floor_tokens).floor()))[:, None]


def mix_values(
    query_NTD: Tensor,
    key_MSD: Tensor,
    value_MSD: Tensor,
    mask_TS: Tensor | None,
    config: AttentionConfig,
    sinks_N: Tensor | None,
    arithmetic: Arithmetic = "fp32",
) -> Tensor:
    """softmax(scale * q k) v by head; each key/value head serves N/M query heads in a row. The softmax is fp32.
    arithmetic: queries and keys are `rounded` so, and values, and shares before they are made to add up to 1, too: to
    `whole_values` and `whole_shares` where queries and keys are rounded to int8."""
    unit_MS = None
    if arithmetic != "fp32":
        query_NTD = rounded(config.scale * query_NTD, arithmetic) / config.scale
        key_MSD = rounded(key_MSD, arithmetic)
        if arithmetic == "int8":
            value_MSD, unit_MS = whole_values(value_MSD)
        else:
            value_MSD = rounded(value_MSD, arithmetic)
    elif sinks_N is None and config.softcap is None:
        return F.scaled_dot_product_attention(
            query_NTD[None], key_MSD[None], value_MSD[None], attn_mask=mask_TS, scale=config.scale, enable_gqa=True
        )[0]
    # One key/value head at a time: written out, the scores of all heads over a long past would not fit in memory.
    n_served = query_NTD.shape[0] // key_MSD.shape[0]
    mixed = []
    for head, (key_SD, value_SD) in enumerate(zip(key_MSD, value_MSD, strict=True)):
        served = slice(head * n_served, (head + 1) * n_served)
        score_GTS = config.scale * (query_NTD[served] @ key_SD.T).float()
        if config.softcap is not None:
            score_GTS = config.softcap * torch.tanh(score_GTS / config.softcap)
        if mask_TS is not None:
            score_GTS = score_GTS.masked_fill(~mask_TS, float("-inf"))
        sink_G = None if sinks_N is None else sinks_N[served]
        share_GTS = _shares(score_GTS, sink_G, arithmetic)
        if unit_MS is not None:
            share_GTS = whole_shares(share_GTS, unit_MS[head])
        mixed.append(share_GTS.to(value_SD.dtype) @ value_SD)
    return torch.cat(mixed)


def _shares(score_GTS: Tensor, sink_G: Tensor | None, arithmetic: Arithmetic) -> Tensor:
    if sink_G is not None:
        sink_GT1 = sink_G[:, None, None].expand(*score_GTS.shape[:2], 1)
        score_GTS = torch.cat([score_GTS, sink_GT1], dim=-1)
    share_GTS = score_GTS.softmax(dim=-1)
    if arithmetic == "bf16":
        largest_GT1 = share_GTS.amax(dim=-1, keepdim=True)
        share_GTS = rounded(share_GTS / largest_GT1, arithmetic) * largest_GT1
    return share_GTS if sink_G is None else share_GTS[..., :-1]


def _latent_attention(
    x_TH: Tensor, weights: LatentWeights, config: ModelConfig, latent: LatentConfig, layer: int, step: Step
) -> Tensor:
    """DeepSeek-V2 §2.1.2, §2.1.3. The cache holds the normed latent and the turned key (K = R + turned features)."""
    row_TK = _latent_row(x_TH, weights, config, latent, step)
    query_NTD, turned_NTD = _latent_queries(x_TH, weights, config, latent, step)
    if step.shared is not None:
        row_TK = step.shared.gathered(row_TK)
    _cache_latents(step, layer, row_TK)
    mixed = []
    for chunk in step.chunks:
        view, cached_1SK = chunk.views[config.attention.spans[layer]], chunk.cache.keys[layer]
        seen_1SK = cached_1SK[:, view.first : chunk.end]
        queries = (query_NTD[:, chunk.rows], turned_NTD[:, chunk.rows])
        mixed.append(_mix_latents(*queries, seen_1SK, view.mask_TS, weights, config.attention, latent))
    return widened_linear(_rows_of_heads(mixed), weights.out_HQ)


def _mix_latents(
    query_NTD: Tensor,
    turned_NTD: Tensor,
    seen_1SK: Tensor,
    mask_TS: Tensor | None,
    weights: LatentWeights,
    attention: AttentionConfig,
    latent: LatentConfig,
) -> Tensor:
    """One chunk's mixed_NTV.

    Keys and values are expanded for all heads, or the queries are brought to the latent instead and the values expanded
    after the sum ("absorbed"): the same products in another order, chosen by which takes fewer.
    """
    n_heads, n_tokens, _ = query_NTD.shape
    key_up_NDR, value_up_NVR = (x.to(query_NTD.dtype) for x in (weights.key_up_NDR, weights.value_up_NVR))
    expanding = latent.kv_rank * (latent.nope_dim + latent.value_dim)
    absorbing = n_tokens * (2 * latent.kv_rank - latent.nope_dim - latent.value_dim)
    seen_1SR = seen_1SK[..., : latent.kv_rank]
    if expanding < absorbing:
        turned_1SD = seen_1SK[..., latent.kv_rank :]
        key_NSD = torch.cat([seen_1SR @ key_up_NDR.mT, turned_1SD.expand(n_heads, -1, -1)], dim=-1)
        value_NSV = seen_1SR @ value_up_NVR.mT
        return mix_values(torch.cat([query_NTD, turned_NTD], dim=-1), key_NSD, value_NSV, mask_TS, attention, None)
    query_NTK = torch.cat([query_NTD @ key_up_NDR, turned_NTD], dim=-1)
    return mix_values(query_NTK, seen_1SK, seen_1SR, mask_TS, attention, None) @ value_up_NVR.mT


def _latent_row(x_TH: Tensor, weights: LatentWeights, config: ModelConfig, latent: LatentConfig, step: Step) -> Tensor:
    """What the cache holds of each token."""
    latent_TR, key_TD = torch.split(widened_linear(x_TH, weights.kv_down_RH), [latent.kv_rank, latent.rope_dim], dim=-1)
    return torch.cat([weights.kv_norm(latent_TR), _turned(key_TD, config, step)], dim=-1)


def _latent_queries(
    x_TH: Tensor, weights: LatentWeights, config: ModelConfig, latent: LatentConfig, step: Step
) -> tuple[Tensor, Tensor]:
    """Each head's unturned and turned features."""
    narrow_TR = x_TH
    if weights.q_down_RH is not None and weights.q_norm is not None:
        narrow_TR = weights.q_norm(widened_linear(x_TH, weights.q_down_RH))
    query_NTD = widened_linear(narrow_TR, weights.q_QR).view(len(x_TH), config.n_heads, -1).transpose(0, 1)
    plain_NTD, turned_NTD = torch.split(query_NTD, [latent.nope_dim, latent.rope_dim], dim=-1)
    return plain_NTD, _turned(turned_NTD, config, step)
