"""The architecture of a model as data, read from a Hugging Face `config.json`.

Three families are one transformer with switches: Llama (rope scaling), Qwen2 (bias on q, k, v) and Qwen3-MoE (q/k norm
per head, sparse layers). Anything a config asks for that the transformer does not compute is an error, not a silent
difference: a benchmark of almost the right model is worth nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engines.errors import EngineError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rope scaling: long wavelengths are stretched by `factor`, short ones kept, a ramp in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_length: int


@dataclass(frozen=True)
class MoeConfig:
    """The sparse layers. expert_width is the inner width of one expert, in features."""

    n_experts: int
    top_k: int
    expert_width: int
    norm_topk_prob: bool
    sparse_layers: tuple[int, ...]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes in features, tokens and layers; `weight_dtype` is what the files hold."""

    architecture: str
    hidden: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    dense_width: int
    vocabulary_size: int
    """Rows of the embedding, which may be more than the tokenizer's ids."""
    max_length: int
    rms_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    qkv_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    moe: MoeConfig | None
    weight_dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    """From generation_config.json, else config.json; empty where neither says."""
    note: str | None
    """What a reader must know before believing an accuracy (`joulebench_note`), such as "random weights"."""

    def is_sparse(self, layer: int) -> bool:
        return self.moe is not None and layer in self.moe.sparse_layers


def read_model_config(folder: Path) -> ModelConfig:
    """Reads config.json (and generation_config.json, if any). Raises `EngineError` on what cannot be computed."""
    raw = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    eos = generation.get("eos_token_id")
    return parse_model_config(raw, eos if eos is not None else raw.get("eos_token_id"))


def parse_model_config(raw: Mapping[str, Any], eos_token_id: int | list[int] | None) -> ModelConfig:
    architecture = _architecture(raw)
    _reject_unsupported(raw)
    hidden, n_heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    n_kv_heads = _positive(raw, "num_key_value_heads", n_heads)
    head_dim = _positive(raw, "head_dim", hidden // n_heads)
    if n_heads % n_kv_heads:
        raise EngineError(
            f"config.json: num_attention_heads {n_heads} is not a multiple of num_key_value_heads {n_kv_heads}"
        )
    if head_dim % 2:
        raise EngineError(f"config.json: head_dim {head_dim} is odd; rotary embedding turns features in pairs")
    n_layers = _positive(raw, "num_hidden_layers")
    theta, scaling = _rope(raw)
    return ModelConfig(
        architecture=architecture,
        hidden=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        dense_width=_positive(raw, "intermediate_size"),
        vocabulary_size=_positive(raw, "vocab_size"),
        max_length=_positive(raw, "max_position_embeddings"),
        rms_eps=_number(raw, "rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3MoeForCausalLM",
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        moe=_moe(raw, n_layers) if architecture == "Qwen3MoeForCausalLM" else None,
        weight_dtype=_dtype(raw),
        eos_token_ids=_eos(eos_token_id),
        note=raw.get("joulebench_note"),
    )


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise EngineError(f"{path.parent}: no {path.name}; a model folder needs the Hugging Face files")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"{path}: not JSON ({error}); fetch the file again") from error
    if not isinstance(content, dict):
        raise EngineError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _architecture(raw: Mapping[str, Any]) -> str:
    found = raw.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or found[0] not in ARCHITECTURES:
        raise EngineError(
            f"config.json: architectures {found!r} not known; this engine runs {', '.join(ARCHITECTURES)}"
        )
    return str(found[0])


def _reject_unsupported(raw: Mapping[str, Any]) -> None:
    """Each switch here changes the mathematics, and the transformer does not have it."""
    wanted: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "use_sliding_window": (False, None),
        "quantization_config": (None,),
    }
    for key, accepted in wanted.items():
        if key in raw and raw[key] not in accepted:
            raise EngineError(f"config.json: {key} {raw[key]!r} not supported; this engine computes {accepted[0]!r}")
    other = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    if other:
        raise EngineError(f"config.json: layer_types {other} not supported; this engine computes full attention")


def _rope(raw: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Theta and scaling, from `rope_parameters` (since transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise EngineError(f"config.json: partial_rotary_factor {partial} not supported; this engine turns whole heads")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise EngineError(f"config.json: rope type {kind!r} not supported; this engine has 'default' and 'llama3'")
    return theta, Llama3Scaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_length=_positive(rope, "original_max_position_embeddings"),
    )


def _moe(raw: Mapping[str, Any], n_layers: int) -> MoeConfig:
    # transformers 5 writes num_local_experts, earlier versions num_experts.
    n_experts = _positive(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts")
    top_k = _positive(raw, "num_experts_per_tok")
    if top_k > n_experts:
        raise EngineError(f"config.json: num_experts_per_tok {top_k} exceeds the {n_experts} experts")
    step = _positive(raw, "decoder_sparse_step", 1)
    dense = set(raw.get("mlp_only_layers") or ())
    return MoeConfig(
        n_experts=n_experts,
        top_k=top_k,
        expert_width=_positive(raw, "moe_intermediate_size"),
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        sparse_layers=tuple(n for n in range(n_layers) if n not in dense and (n + 1) % step == 0),
    )


def _dtype(raw: Mapping[str, Any]) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise EngineError(f"config.json: dtype {name!r} not supported; this engine reads {', '.join(DTYPES)}")
    return DTYPES[name]


def _eos(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _number(raw: Mapping[str, Any], key: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise EngineError(f"config.json: {key} must be a number above 0, found {value!r}")
    return float(value)


def _positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise EngineError(f"config.json: {key} must be a whole number above 0, found {value!r}")
    return value
