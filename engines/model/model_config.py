"""A Hugging Face `config.json` read into the architecture as data.

Anything a config asks for that the transformer does not compute is an error, not a silent difference: a benchmark of
almost the right model is worth nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from engines.errors import EngineError
from engines.model.architecture import (
    AttentionConfig,
    GatedUnit,
    LatentConfig,
    MoeConfig,
    NormConfig,
    RouterConfig,
    SharedExpertConfig,
    Temperature,
)
from engines.model.architecture import ModelConfig as ModelConfig
from engines.model.config_faults import read_whole
from engines.model.config_keys import AROUND_TEXT, FAMILY_KEYS
from engines.model.config_values import (
    ConfigError,
    optional_number,
    optional_whole,
    per_layer,
    positive_number,
    positive_whole,
    switch,
    table,
    told,
    whole,
    wholes,
)
from engines.model.families import FAMILIES, Family, RouterFamily
from engines.model.rope_config import read_rope, rope_table, yarn_amplitude
from engines.model.spans import Span
from engines.model.sparse_layers import sparse_layers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONFIG_FILE, GENERATION_CONFIG = "config.json", "generation_config.json"
MAX_LAYERS = 1000
MAX_EXPERTS_IN_ALL = 100_000
"""Several times what the largest published models have: whoever asks for more would wait for names of tensors only."""


def read_model_config(folder: Path) -> ModelConfig:
    """Reads config.json (and generation_config.json, if any). Raises `EngineError` on what cannot be computed."""
    path = folder / CONFIG_FILE
    raw = read_json(path)
    return config_in(path, raw, _end_tokens(folder, raw))


def _end_tokens(folder: Path, raw: Mapping[str, Any]) -> object:
    """Beside a generation_config.json those of config.json do not count, as in transformers: it may name none."""
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return raw.get("eos_token_id")
    named = read_json(path).get("eos_token_id")
    return [] if named is None else named


def config_in(path: Path, raw: Mapping[str, Any], eos_token_id: object) -> ModelConfig:
    """As `parse_model_config`, of what stands in that file: errors name it."""
    return parse_model_config(raw, eos_token_id, str(path))


def parse_model_config(raw: Mapping[str, Any], eos_token_id: object, where: str = CONFIG_FILE) -> ModelConfig:
    """eos_token_id: a number, a list of them or None, as files may have it. Raises `EngineError` with all that is
    wrong. where: the file, for that."""

    def read(left: Mapping[str, Any], taken: Collection[str]) -> ModelConfig:
        return _parsed(left, None if "eos_token_id" in taken else eos_token_id)

    return read_whole(raw, read, {} if (name := _known_architecture(raw)) is None else FAMILY_KEYS[name].aliases, where)


def _parsed(raw: Mapping[str, Any], eos_token_id: object) -> ModelConfig:
    """Raises `ConfigError` with what is wrong first."""
    architecture = _architecture(raw)
    family, keys = FAMILIES[architecture], FAMILY_KEYS[architecture]
    file = raw
    if family.names.root:
        text = table(AROUND_TEXT.stated(raw, architecture), "text_config")
        file = {**raw, **{key: value for key, value in text.items() if value is not None}}
        raw, eos_token_id = text, file.get("eos_token_id") if eos_token_id is None else eos_token_id
    # From here on `raw` holds every key that the family has, and no other.
    raw = keys.stated(raw, architecture)
    _reject_unsupported(file, family)
    hidden, n_heads = positive_whole(raw, "hidden_size"), positive_whole(raw, "num_attention_heads")
    n_kv_heads = positive_whole(raw, "num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        words = f"num_attention_heads {n_heads} is not a multiple of num_key_value_heads {n_kv_heads}"
        raise ConfigError(words, "num_attention_heads", "num_key_value_heads")
    n_layers, max_length = _n_layers(raw, "num_hidden_layers"), positive_whole(raw, "max_position_embeddings")
    latent = _latent(raw) if family.is_latent else None
    head_dim = _head_dim(raw, hidden, n_heads) if latent is None else latent.nope_dim + latent.rope_dim
    pairs = family.rope_pairs if switch(raw, "rope_interleave", True) else "halves"
    turned_dim = head_dim if latent is None else latent.rope_dim
    moe = _moe(raw, family.router, n_layers, family, file) if family.router is not None else None
    has_dense = moe is None or len(moe.sparse_layers) < n_layers
    dense_key = "intermediate_size_mlp" if "intermediate_size_mlp" in raw else "intermediate_size"
    return ModelConfig(
        architecture=architecture,
        hidden=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        dense_width=positive_whole(raw, dense_key) if has_dense else 0,
        vocabulary_size=positive_whole(raw, "vocab_size"),
        max_length=max_length,
        norm=NormConfig(family.norm, positive_number(raw, "rms_norm_eps"), family.norm_from_one),
        rope=read_rope(raw, turned_dim, pairs, keys.ropes, family.rope_amplitudes),
        attention=_attention(raw, family, head_dim, n_layers, max_length, latent),
        unit=GatedUnit(family.activation),
        embedding_scale=hidden**0.5 if family.scales_embedding else 1.0,
        logit_softcap=optional_number(raw, "final_logit_softcapping"),
        head_bias=switch(raw, "lm_head_bias", False),
        tie_embeddings=switch(raw, "tie_word_embeddings"),
        moe=moe,
        names=family.names,
        ignored_layers=tuple(range(n_layers, n_layers + _n_layers(raw, "num_nextn_predict_layers", 0))),
        weight_dtype=_dtype(file),
        fp8_block=_fp8_block(file),
        eos_token_ids=_eos(eos_token_id),
        note=_note(file),
    )


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise EngineError(f"{path.parent}: no {path.name}; a model folder needs the Hugging Face files")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(f"{path}: cannot be read ({error}); check the file") from error
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{path}: not JSON ({error}); fetch the file again") from error
    if not isinstance(content, dict):
        raise EngineError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _known_architecture(raw: Mapping[str, Any]) -> str | None:
    found = raw.get("architectures")
    return str(found[0]) if isinstance(found, list) and len(found) == 1 and found[0] in [*FAMILIES] else None


def _architecture(raw: Mapping[str, Any]) -> str:
    if (known := _known_architecture(raw)) is not None:
        return known
    found = raw.get("architectures")
    if isinstance(found, list):
        wrong = f"{told(found)} not known"
    else:
        wrong = f"must be a list of names, found {told(found)}" if "architectures" in raw else "is missing"
    of_type = [name for name in FAMILIES if raw.get("model_type") in FAMILY_KEYS[name].model_types]
    hint = f"; of model_type {told(raw['model_type'])} it would be {of_type[:1]}" if of_type else ""
    raise ConfigError(f"architectures {wrong}{hint}; this engine runs {', '.join(FAMILIES)}", "architectures")


def _n_layers(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """default: allows 0."""
    n_layers = positive_whole(raw, key) if default is None else whole(raw, key, default)
    if n_layers > MAX_LAYERS:
        raise ConfigError(f"{key} {n_layers} is more than any model has (limit {MAX_LAYERS})", key)
    return n_layers


def _head_dim(raw: Mapping[str, Any], hidden: int, n_heads: int) -> int:
    if raw.get("head_dim") is None and hidden % n_heads:
        words = f"hidden_size {hidden} is not a multiple of num_attention_heads {n_heads}, and there is no head_dim"
        raise ConfigError(words, "hidden_size", "num_attention_heads", "head_dim")
    return positive_whole(raw, "head_dim", hidden // n_heads)


def _note(raw: Mapping[str, Any]) -> str | None:
    note = raw.get("joulebench_note")
    if note is not None and not isinstance(note, str):
        raise ConfigError(f"joulebench_note must be a text, found {told(note)}", "joulebench_note")
    return note


def _reject_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    """Weights in a form that this engine does not read."""
    known = not table(raw, "quantization_config") or _is_mxfp4(raw, family) or _fp8_block(raw) is not None
    if not known or (_fp8_block(raw) is not None and _has_joined_tensors(family)):
        raise ConfigError(
            f"quantization_config {told(raw['quantization_config'])} not supported; this engine reads fp32, fp16 and"
            " bf16 weights, fp8 projections with one scale per block where each is a tensor of its own, and mxfp4"
            " experts where a layer's are one tensor; use such a checkpoint",
            "quantization_config",
            "weight_block_size",
        )


def _is_mxfp4(raw: Mapping[str, Any], family: Family) -> bool:
    quantization = table(raw, "quantization_config")
    return family.names.stacked_experts is not None and quantization.get("quant_method") == "mxfp4"


def _fp8_block(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of one scale, as DeepSeek-V3 is published: e4m3 values, bf16 or fp32 scales beside them."""
    quantization = table(raw, "quantization_config")
    block = wholes(quantization, "weight_block_size") if quantization.get("quant_method") == "fp8" else []
    if quantization.get("fmt", "e4m3") != "e4m3" or not block:
        return None
    if len(block) != 2 or 0 in block:
        words = f"weight_block_size must be rows and columns of a block, found {block}"
        raise ConfigError(words, "weight_block_size")
    return block[0], block[1]


def _has_joined_tensors(family: Family) -> bool:
    names = family.names
    return names.fused_qkv or names.fused_dense or names.stacked_experts is not None


# --- attention -------------------------------------------------------------------------------------------------------


def _attention(
    raw: Mapping[str, Any],
    family: Family,
    head_dim: int,
    n_layers: int,
    max_length: int,
    latent: LatentConfig | None,
) -> AttentionConfig:
    says_bias = switch(raw, "attention_bias", False)
    qkv_bias = switch(raw, "qkv_bias") if "qkv_bias" in raw else family.qkv_bias
    scale = (positive_number(raw, "query_pre_attn_scalar") if "query_pre_attn_scalar" in raw else head_dim) ** -0.5
    if latent is not None:
        scale *= _latent_temperature(raw)
    rope_layers = _rope_layers(raw, n_layers)
    temperature = None
    if switch(raw, "attn_temperature_tuning", False):
        temperature = Temperature(positive_number(raw, "floor_scale"), positive_number(raw, "attn_scale"))
    return AttentionConfig(
        scale=scale,
        qkv_bias=says_bias if qkv_bias is None else qkv_bias,
        out_bias=says_bias if family.out_bias is None else family.out_bias,
        qk_norm=family.qk_norm if switch(raw, "use_qk_norm", True) else None,
        sinks=family.sinks,
        softcap=optional_number(raw, "attn_logit_softcapping"),
        clip=optional_number(raw, "clip_qkv"),
        spans=_spans(raw, family, rope_layers, max_length),
        rope_layers=rope_layers,
        temperature=temperature,
        latent=latent,
    )


def _latent(raw: Mapping[str, Any]) -> LatentConfig:
    return LatentConfig(
        q_rank=optional_whole(raw, "q_lora_rank"),
        kv_rank=positive_whole(raw, "kv_lora_rank"),
        nope_dim=positive_whole(raw, "qk_nope_head_dim"),
        rope_dim=positive_whole(raw, "qk_rope_head_dim"),
        value_dim=positive_whole(raw, "v_head_dim"),
    )


def _latent_temperature(raw: Mapping[str, Any]) -> float:
    """DeepSeek sharpens scores by YaRN's amplitude squared instead of scaling cosine and sine."""
    rope = rope_table(raw)
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    return yarn_amplitude(positive_number(rope, "factor"), positive_number(rope, "mscale_all_dim")) ** 2


def _rope_layers(raw: Mapping[str, Any], n_layers: int) -> tuple[bool, ...]:
    """`no_rope_layers` of Llama 4 says 1 where a layer does turn; an empty list means every fourth does not."""
    if "no_rope_layers" not in raw:
        return (True,) * n_layers
    interval = positive_whole(raw, "no_rope_layer_interval")
    listed = wholes(raw, "no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(n_layers)]
    return tuple(bool(turns) for turns in per_layer(listed, "no_rope_layers", n_layers))


def _spans(
    raw: Mapping[str, Any], family: Family, rope_layers: tuple[bool, ...], max_length: int
) -> tuple[Span | None, ...]:
    n_layers = len(rope_layers)
    listed = raw.get("layer_types")
    kinds = None if listed is None else per_layer(listed, "layer_types", n_layers)
    sizes: dict[str, Span | None] = {"full_attention": None}
    if family.window_layers is not None and (window := optional_whole(raw, "sliding_window")) is not None:
        sizes["sliding_attention"] = _limiting(Span("sliding", window), max_length)
    if (chunk := optional_whole(raw, "attention_chunk_size")) is not None:
        sizes["chunked_attention"] = _limiting(Span("chunked", chunk), max_length)
    if kinds is None and family.window_layers == "all":
        kinds = ["sliding_attention" if "sliding_attention" in sizes else "full_attention"] * n_layers
    elif kinds is None and family.window_layers == "even":
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(n_layers)]
    elif kinds is None and "attention_chunk_size" in raw:
        kinds = ["chunked_attention" if turns else "full_attention" for turns in rope_layers]
    other = sorted({str(kind) for kind in kinds or () if kind not in [*sizes]})
    if other:
        named = {key: raw[key] for key in ("sliding_window", "attention_chunk_size") if key in raw}
        size = "".join(f" with {key} {told(value)}" for key, value in named.items())
        words = f"layer_types {other} not supported here{size}; this engine computes {list(sizes)}"
        raise ConfigError(words, "layer_types", *named)
    return tuple(sizes[kind] for kind in kinds) if kinds is not None else (None,) * n_layers


def _limiting(span: Span, max_length: int) -> Span | None:
    """A span that no sequence can exceed is none."""
    return span if span.n_tokens < max_length else None


# --- experts ---------------------------------------------------------------------------------------------------------


def _moe(
    raw: Mapping[str, Any], router: RouterFamily, n_layers: int, family: Family, file: Mapping[str, Any]
) -> MoeConfig:
    key = router.n_experts_key
    n_experts, top_k = positive_whole(raw, key), positive_whole(raw, "num_experts_per_tok")
    if top_k > n_experts:
        raise ConfigError(f"num_experts_per_tok {top_k} exceeds the {n_experts} experts", "num_experts_per_tok", key)
    if n_experts * n_layers > MAX_EXPERTS_IN_ALL:
        raise ConfigError(
            f"{key} {n_experts} in {n_layers} layers are more experts than any model has (limit {MAX_EXPERTS_IN_ALL} in"
            " all)",
            key,
            "num_hidden_layers",
        )
    if router.scoring == "sparsemixer" and top_k != 2:
        words = f"num_experts_per_tok {top_k} not supported; sparsemixer chooses 2"
        raise ConfigError(words, "num_experts_per_tok")
    expert_width = positive_whole(raw, router.width_key)
    return MoeConfig(
        n_experts=n_experts,
        expert_width=expert_width,
        router=_router(raw, router, n_experts, top_k),
        shared=_shared_experts(raw, router, expert_width),
        unit=_expert_unit(raw, family),
        expert_bias=router.expert_bias,
        weights_input=router.weights_input,
        mxfp4=_is_mxfp4(file, family),
        sparse_layers=sparse_layers(raw, n_layers, file.keys()),
    )


def _expert_unit(raw: Mapping[str, Any], family: Family) -> GatedUnit:
    if "swiglu_limit" not in raw:
        return GatedUnit(family.activation)
    alpha, limit = positive_number(raw, "swiglu_alpha"), positive_number(raw, "swiglu_limit")
    return GatedUnit(family.activation, alpha=alpha, limit=limit)


def _router(raw: Mapping[str, Any], router: RouterFamily, n_experts: int, top_k: int) -> RouterConfig:
    by_group = "n_group" in raw and raw.get("topk_method") != "greedy"
    n_groups = positive_whole(raw, "n_group") if by_group else 1
    top_groups = positive_whole(raw, "topk_group") if by_group else 1
    if n_experts % n_groups or top_groups > n_groups or top_k > n_experts // n_groups * top_groups:
        raise ConfigError(
            f"num_experts_per_tok {top_k} of {router.n_experts_key} {n_experts} cannot be chosen from topk_group"
            f" {top_groups} of n_group {n_groups} equal groups",
            *("num_experts_per_tok", router.n_experts_key, "topk_group", "n_group"),
        )
    if router.group_score == "two best" and top_groups < n_groups == n_experts:
        raise ConfigError(
            f"n_group {n_groups} leaves one of {router.n_experts_key} {n_experts} to a group, and a group is as good as"
            " its two best",
            *("n_group", router.n_experts_key),
        )
    normalise = switch(raw, "norm_topk_prob") if router.normalise == "config" else router.normalise
    return RouterConfig(
        scoring=router.scoring,
        top_k=top_k,
        normalise=normalise and (top_k > 1 or router.normalises_one),
        scale=positive_number(raw, "routed_scaling_factor") if "routed_scaling_factor" in raw else 1.0,
        n_groups=n_groups,
        top_groups=top_groups,
        group_score=router.group_score,
        has_bias=router.has_bias,
        has_correction=router.has_correction,
        jitter=positive_number(raw, "router_jitter_noise") if router.scoring == "sparsemixer" else 0.0,
    )


def _shared_experts(raw: Mapping[str, Any], router: RouterFamily, expert_width: int) -> SharedExpertConfig | None:
    if router.shared == "gated":
        return SharedExpertConfig(positive_whole(raw, "shared_expert_intermediate_size"), gated=True)
    if router.shared == "one plain":
        return SharedExpertConfig(expert_width, gated=False)
    n_shared = optional_whole(raw, "n_shared_experts") if router.shared == "plain" else None
    return SharedExpertConfig(expert_width * n_shared, gated=False) if n_shared is not None else None


def _dtype(raw: Mapping[str, Any]) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in [*DTYPES]:
        words = f"dtype {told(name)} not supported; this engine reads {', '.join(DTYPES)}"
        raise ConfigError(words, "dtype", "torch_dtype")
    return DTYPES[name]


def _eos(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    listed = value if isinstance(value, list) else [value]
    return tuple(wholes({"eos_token_id": listed}, "eos_token_id"))
