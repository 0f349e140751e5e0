"""A checkpoint's layer as the content of a package, and what of a checkpoint no package can hold.

Legend: H hidden, I expert width, Q = query heads * features, M = key/value heads * features, N query heads, D features
of a head, P pairs of turned features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.coreml.contents import (
    Array,
    AttentionContent,
    Content,
    ExpertsContent,
    GatedContent,
    HeadNorm,
    LinearContent,
    n_weight_bytes,
)
from engines.coreml.manifest import PackagePlan, Weights
from engines.errors import EngineError
from engines.model.architecture import ModelConfig
from engines.model.attention import AttentionWeights
from engines.model.experts import GatedWeights
from engines.model.norms import NormWeights
from engines.model.quantised import Matrix
from engines.model.rope import rope_frequencies
from engines.model.weights import LayerWeights, SparseWeights


def unsupported(config: ModelConfig, on_npu: bool) -> Iterator[str]:
    """Parts of a model that no graph of ours computes. on_npu: whether attention is a graph."""
    if config.moe is None:
        yield "no experts (a dense model)"
    if not on_npu:
        return
    attention = config.attention
    if attention.latent is not None:
        yield "latent attention (MLA)"
    if attention.temperature is not None:
        yield "attention temperature by position"
    if config.n_kv_heads * config.head_dim % 32:
        yield f"keys of {config.n_kv_heads} x {config.head_dim} features, and a state's are a multiple of 32"


def expert_bytes(config: ModelConfig, weights: Weights) -> int:
    """Of one expert as it is stored."""
    moe = config.moe
    assert moe is not None  # dense models are refused
    return gated_bytes(config.hidden, moe.expert_width, moe.expert_bias, weights)


def gated_bytes(hidden: int, width: int, has_bias: bool, weights: Weights) -> int:
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    return n_weight_bytes(shapes, (2 * width + hidden) if has_bias else 0, weights)


def attention_bytes(config: ModelConfig, weights: Weights) -> int:
    """Its matrices and biases; vectors of norms and sinks are below one in a thousand and not counted."""
    hidden, query = config.hidden, config.n_heads * config.head_dim
    kept = config.n_kv_heads * config.head_dim
    shapes = ((query, hidden), (kept, hidden), (kept, hidden), (hidden, query))
    attention = config.attention
    n_bias = (query + 2 * kept if attention.qkv_bias else 0) + (hidden if attention.out_bias else 0)
    return n_weight_bytes(shapes, n_bias, weights)


def turns_pairs(config: ModelConfig, layer: int) -> int:
    """P of a layer, 0 where it turns nothing."""
    if not config.attention.rope_layers[layer]:
        return 0
    frequency_P, _ = rope_frequencies(config.rope, 1)
    return len(frequency_P)


def content_of(package: PackagePlan, layer: LayerWeights, config: ModelConfig) -> Content:
    """The weights of a package, fp16. Raises `EngineError` for one that fp16 cannot hold."""
    where = f"layer {package.layer}, {package.role}"
    if package.role == "attention":
        assert isinstance(layer.attention, AttentionWeights)  # latent attention is refused
        return _attention(layer.attention, config, package.layer, where)
    moe = config.moe
    assert moe is not None  # dense models are refused
    if package.role == "experts":
        assert isinstance(layer.mlp, SparseWeights)
        own = layer.mlp.experts
        units = {expert: _gated(own.experts[expert], f"{where} {expert}") for expert in package.experts}
        return ExpertsContent(units, own.unit)
    gated = layer.mlp if package.role == "dense" else layer.mlp.shared if isinstance(layer.mlp, SparseWeights) else None
    assert isinstance(gated, GatedWeights)
    return ExpertsContent({0: _gated(gated, where)}, config.unit)


def _gated(weights: GatedWeights, where: str) -> GatedContent:
    return GatedContent(
        _linear(weights.gate_IH, weights.gate_bias_I, f"{where}, gate"),
        _linear(weights.up_IH, weights.up_bias_I, f"{where}, up"),
        _linear(weights.down_HI, weights.down_bias_H, f"{where}, down"),
    )


def _attention(weights: AttentionWeights, config: ModelConfig, layer: int, where: str) -> AttentionContent:
    attention, width, n_pairs = config.attention, config.head_dim, turns_pairs(config, layer)
    order = _halves(width, n_pairs) if n_pairs and config.rope.pairs == "neighbours" else None
    over_all = attention.qk_norm == "all heads"

    def linear(matrix: Matrix, bias: Tensor | None, name: str, n_heads: int | None = None) -> LinearContent:
        return _linear(matrix, bias, f"{where}, {name}", None if n_heads is None else _of_heads(order, n_heads, width))

    def norm(weights: NormWeights | None, n_heads: int) -> HeadNorm | None:
        if attention.qk_norm == "l2" and n_pairs:
            return HeadNorm(None, config.norm.eps)
        if weights is None:
            return None
        if weights.bias is not None:
            raise EngineError(f"{where}: a norm of queries with a bias has no graph here")
        places = _of_heads(order, n_heads if over_all else 1, width)
        weight = weights.weight.numpy()
        return HeadNorm(weight if places is None else weight[places], weights.eps, over_all)

    return AttentionContent(
        linear(weights.q_QH, weights.q_bias_Q, "query", config.n_heads),
        linear(weights.k_MH, weights.k_bias_M, "key", config.n_kv_heads),
        linear(weights.v_MH, weights.v_bias_M, "value"),
        linear(weights.out_HQ, weights.out_bias_H, "out"),
        config.n_heads,
        config.n_kv_heads,
        width,
        n_pairs,
        attention.scale,
        norm(weights.q_norm, config.n_heads),
        norm(weights.k_norm, config.n_kv_heads),
        attention.qk_norm == "l2",
        attention.clip,
        attention.softcap,
        None if weights.sinks_N is None else weights.sinks_N.float().numpy(),
    )


def _halves(width: int, n_pairs: int) -> Any:
    """The order in which neighbours become halves: `engines.model.rope.turn` gives them so."""
    turned = np.arange(2 * n_pairs)
    return np.concatenate([turned[0::2], turned[1::2], np.arange(2 * n_pairs, width)])


def _of_heads(order: Any, n_heads: int, width: int) -> Any:
    return None if order is None else (np.arange(n_heads)[:, None] * width + order).reshape(-1)


def _linear(matrix: Matrix, bias: Tensor | None, where: str, rows: Any = None) -> LinearContent:
    weight = _narrow(matrix.to(torch.float32) if not isinstance(matrix, Tensor) else matrix, where)
    own_bias = None if bias is None else _narrow(bias, f"{where}'s bias")
    if rows is not None:
        weight, own_bias = weight[rows], None if own_bias is None else own_bias[rows]
    return LinearContent(weight, own_bias)


def _narrow(tensor: Tensor, where: str) -> Array:
    found: Array = tensor.to(torch.float16).numpy()
    if not np.isfinite(found).all():
        raise EngineError(
            f"{where}: a weight of {float(tensor.abs().max()):.4g} is beyond fp16's 65504, in which graphs are"
        )
    return found
