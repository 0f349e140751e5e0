"""DeepSeek-MoE (V1) by its definition (Dai et al. 2024, §3), from tensors by their published names: whole sequences, no
cache, one expert at a time. transformers has no such model to ask.

Legend: T tokens, H hidden, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5
    return tensors


def published_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, rows = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (rows, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (rows, hidden),
    }

    def mlp(prefix: str, width: int) -> None:
        shapes[prefix + "gate_proj.weight"] = shapes[prefix + "up_proj.weight"] = (width, hidden)
        shapes[prefix + "down_proj.weight"] = (hidden, width)

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name in ("q", "k", "v", "o"):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (hidden, hidden)
        if not is_sparse(config, layer):
            mlp(prefix + "mlp.", config["intermediate_size"])
            continue
        width = config["moe_intermediate_size"]
        shapes[prefix + "mlp.gate.weight"] = (config["n_routed_experts"], hidden)
        mlp(prefix + "mlp.shared_experts.", width * config["n_shared_experts"])
        for expert in range(config["n_routed_experts"]):
            mlp(f"{prefix}mlp.experts.{expert}.", width)
    return shapes


def is_sparse(config: dict[str, Any], layer: int) -> bool:
    return bool(layer >= config["first_k_dense_replace"] and layer % config["moe_layer_freq"] == 0)


def logits(config: dict[str, Any], tensors: dict[str, Tensor], tokens_T: Tensor) -> Tensor:
    x_TH = tensors["model.embed_tokens.weight"][tokens_T]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        normed_TH = _rms(x_TH, tensors[prefix + "input_layernorm.weight"], config["rms_norm_eps"])
        x_TH = x_TH + _attention(config, tensors, prefix + "self_attn.", normed_TH)
        normed_TH = _rms(x_TH, tensors[prefix + "post_attention_layernorm.weight"], config["rms_norm_eps"])
        if not is_sparse(config, layer):
            x_TH = x_TH + _swiglu(tensors, prefix + "mlp.", normed_TH)
        else:
            x_TH = x_TH + _experts(config, tensors, prefix + "mlp.", normed_TH)
    return _rms(x_TH, tensors["model.norm.weight"], config["rms_norm_eps"]) @ tensors["lm_head.weight"].T


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _swiglu(tensors: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    gate, up = x @ tensors[prefix + "gate_proj.weight"].T, x @ tensors[prefix + "up_proj.weight"].T
    return (gate * gate.sigmoid() * up) @ tensors[prefix + "down_proj.weight"].T


def _experts(config: dict[str, Any], tensors: dict[str, Tensor], prefix: str, x_TH: Tensor) -> Tensor:
    """Eq. 9-11: shared experts of every token, plus the k best by softmax, weighed by their softmax as it is; or by
    their shares, where there are several and the config says so, as the published code has it."""
    out_TH = _swiglu(tensors, prefix + "shared_experts.", x_TH)
    scores_TE = (x_TH @ tensors[prefix + "gate.weight"].T).softmax(-1)
    for token, x_H in enumerate(x_TH):
        chosen = scores_TE[token].argsort(descending=True)[: config["num_experts_per_tok"]]
        shared_out = config["norm_topk_prob"] and len(chosen) > 1
        whole = scores_TE[token, chosen].sum() if shared_out else 1.0
        for expert in chosen.tolist():
            out_TH[token] += scores_TE[token, expert] / whole * _swiglu(tensors, f"{prefix}experts.{expert}.", x_H)
    return out_TH


def _attention(config: dict[str, Any], tensors: dict[str, Tensor], prefix: str, x_TH: Tensor) -> Tensor:
    n_tokens, n_heads = len(x_TH), config["num_attention_heads"]
    dim = x_TH.shape[1] // n_heads
    pair = torch.arange(dim // 2)
    stretched = (config["rope_scaling"] or {}).get("factor", 1.0)
    angle = torch.arange(n_tokens)[:, None] / stretched * config["rope_theta"] ** (-2.0 * pair / dim)
    heads = []
    for head in range(n_heads):
        rows = slice(head * dim, (head + 1) * dim)
        q, k, v = (x_TH @ tensors[f"{prefix}{name}_proj.weight"][rows].T for name in ("q", "k", "v"))
        q, k = (
            torch.view_as_complex(torch.stack(x.chunk(2, dim=-1), dim=-1).contiguous())
            * torch.polar(torch.ones_like(angle), angle)
            for x in (q, k)
        )
        score = (q @ k.conj().T).real / dim**0.5
        score = score.masked_fill(torch.ones(n_tokens, n_tokens).triu(1).bool(), float("-inf"))
        heads.append(score.softmax(-1) @ v)
    return torch.cat(heads, dim=-1) @ tensors[prefix + "o_proj.weight"].T
