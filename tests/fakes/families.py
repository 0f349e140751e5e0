"""Model folders of every family with random weights, written by transformers itself: only the reading side is ours."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.fakes.random_models import SIZES, copy_tokenizer

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
MOE = {"num_experts_per_tok": 3, "moe_intermediate_size": 48}
LATENT = {
    **MOE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    # Large, for the norms of the latents have an epsilon of their own.
    "rms_norm_eps": 0.01,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 16,
}
LONG_FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.0 + 0.5 * i for i in range(8)]}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, **LONG_FACTORS}
DEEPSEEK_YARN = {**YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.5}
# transformers' Phi-MoE takes the long amplitude with the short factors, and published code takes both long: only equal
# factors leave the two no room to differ.
PHI_MOE_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": LONG_FACTORS["short_factor"],
    "long_factor": LONG_FACTORS["short_factor"],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
}
PHI_MOE = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "lm_head_bias": True,
    # Wide enough that several experts often lie within it: the published 0.01 would leave most weights at 1.
    "router_jitter_noise": 0.2,
}
GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 24}


@dataclass(frozen=True)
class FamilyCase:
    """family: transformers' class prefix. eager: the peer computes this attention in eager mode only. mxfp4: the folder
    holds the experts as published, in 4-bit blocks."""

    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    eager: bool = False
    mxfp4: bool = False


CASES: dict[str, FamilyCase] = {
    "mixtral": FamilyCase("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "mixtral-sliding": FamilyCase("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}),
    "olmoe": FamilyCase("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "olmoe-clip": FamilyCase(
        "Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 0.7, "norm_topk_prob": True}
    ),
    "qwen2-moe": FamilyCase("Qwen2Moe", {**MOE, "num_experts": 8, "shared_expert_intermediate_size": 80}),
    "qwen2-moe-some-dense": FamilyCase(
        "Qwen2Moe",
        {
            **MOE,
            "num_experts": 8,
            "shared_expert_intermediate_size": 80,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
        },
    ),
    "qwen3": FamilyCase("Qwen3", {"head_dim": 32}),
    "phi3": FamilyCase("Phi3"),
    "phi3-sliding": FamilyCase("Phi3", {"sliding_window": 20}),
    "phi3-short-rope": FamilyCase("Phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 256}),
    "phi3-long-rope": FamilyCase("Phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 16}),
    "phi3-partial-rope": FamilyCase(
        "Phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}}
    ),
    "gemma2": FamilyCase(
        "Gemma2",
        {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
        eager=True,
    ),
    "phi-moe": FamilyCase("Phimoe", PHI_MOE),
    "phi-moe-short-rope": FamilyCase(
        "Phimoe", {**PHI_MOE, "rope_parameters": {**PHI_MOE_ROPE, "original_max_position_embeddings": 256}}
    ),
    "phi-moe-long-rope": FamilyCase(
        "Phimoe", {**PHI_MOE, "rope_parameters": {**PHI_MOE_ROPE, "original_max_position_embeddings": 16}}
    ),
    "deepseek-v2": FamilyCase("DeepseekV2", {**LATENT, "first_k_dense_replace": 1, "rope_parameters": DEEPSEEK_YARN}),
    "deepseek-v2-groups": FamilyCase(
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        | {"routed_scaling_factor": 16.0, "n_shared_experts": 1},
    ),
    "deepseek-v3": FamilyCase(
        "DeepseekV3",
        {**LATENT, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "rope_parameters": DEEPSEEK_YARN},
    ),
    "deepseek-v3-halves": FamilyCase(
        "DeepseekV3",
        {
            **LATENT,
            "n_group": 2,
            "topk_group": 1,
            "rope_interleave": False,
            "q_lora_rank": None,
            "norm_topk_prob": False,
        },
    ),
    "glm4-moe": FamilyCase(
        "Glm4Moe", {**MOE, "head_dim": 32, "n_routed_experts": 16, "attention_bias": True, "use_qk_norm": True}
    ),
    "glm4-moe-air": FamilyCase("Glm4Moe", {**MOE, "head_dim": 32, "n_routed_experts": 16}),
    "glm4-moe-lite": FamilyCase("Glm4MoeLite", LATENT),
    "gpt-oss": FamilyCase("GptOss", GPT_OSS, eager=True),
    "gpt-oss-yarn": FamilyCase(
        "GptOss", {**GPT_OSS, "rope_parameters": {**YARN, "truncate": False}, "swiglu_limit": 1.0}, eager=True
    ),
    "gpt-oss-mxfp4": FamilyCase("GptOss", GPT_OSS, eager=True, mxfp4=True),
    "llama4": FamilyCase(
        "Llama4",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "attention_chunk_size": 24,
            "rms_norm_eps": 0.01,
        }
        | {"intermediate_size_mlp": 80, "interleave_moe_layer_step": 2, "floor_scale": 16, "attn_scale": 0.5},
    ),
    "llama4-top2": FamilyCase(
        "Llama4",
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "no_rope_layers": [1, 0, 1]}
        | {"use_qk_norm": False, "attn_temperature_tuning": False},
    ),
}


def write_family(folder: Path, case: FamilyCase) -> Any:
    """Writes a folder and returns the transformers model (fp32) that it came from."""
    import transformers

    config_class = getattr(transformers, case.family + ("TextConfig" if case.family == "Llama4" else "Config"))
    # transformers writes into what it is given: a later model of the same rope would change this one's.
    config = config_class(**{**SIZES, "pad_token_id": None, **deepcopy(case.changes)})
    config._attn_implementation = "eager" if case.eager else "sdpa"
    model = getattr(transformers, case.family + "ForCausalLM")(config).eval()
    randomise(model)
    blocks = pack_experts(model) if case.mxfp4 else {}
    model.save_pretrained(folder)
    if case.mxfp4:
        rewrite_as_mxfp4(folder, blocks)
    copy_tokenizer(folder)
    return model


def pack_experts(model: Any) -> dict[str, torch.Tensor]:
    """Draws 4-bit experts, gives the model their values as transformers unpacks them, and returns the packed form."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator, packed = torch.Generator().manual_seed(8), {}
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        n_experts, n_in, n_out = parameter.shape
        shape = (n_experts, n_out, n_in // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        # Values have a root mean square of about 2.9: scales of 2^-6 to 2^-4 keep the hidden state's size.
        scales = torch.randint(121, 124, shape, generator=generator, dtype=torch.uint8)
        packed |= {name + "_blocks": blocks, name + "_scales": scales}
        with torch.no_grad():
            parameter.copy_(convert_moe_packed_tensors(blocks, scales))
    return packed


def rewrite_as_mxfp4(folder: Path, packed: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    plain = {name: t for name, t in load_file(path).items() if name + "_blocks" not in packed}
    save_file(plain | packed, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


def randomise(model: torch.nn.Module) -> None:
    """Weights that keep the hidden state's size and make every part count: norms, biases, sinks and corrections too."""
    generator = torch.Generator().manual_seed(7)
    correction = [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *correction]:
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("bias", "sinks")):
                parameter.copy_(0.5 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.dim() == 3 and ".experts." in name and "GptOss" in type(model).__name__:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
