"""Model folders with random weights, written by transformers itself: only the reading side is ours."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from engines.model.checkpoints import BUNDLED_FOLDER

BUNDLED = BUNDLED_FOLDER / "tiny-qwen3-moe"
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
    "bos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE: dict[str, Any] = {"head_dim": 32, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "qwen3-moe": {**MOE, "norm_topk_prob": True},
    "qwen3-moe-unnormalised": {**MOE, "norm_topk_prob": False},
    "qwen3-moe-some-dense": {**MOE, "norm_topk_prob": True, "mlp_only_layers": [1], "num_experts_per_tok": 3},
    "qwen3-moe-sparse-step": {**MOE, "norm_topk_prob": True, "decoder_sparse_step": 2},
}


def write_random_model(folder: Path, kind: str, max_shard_size: str = "1GB") -> Any:
    """Writes a folder and returns the transformers model (fp32) that it came from."""
    import transformers

    family = kind.split("-")[0]
    config_class, model_class = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }[family]
    model = model_class(config_class(**SIZES, **KINDS[kind])).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    copy_tokenizer(folder)
    return model


def copy_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder / name)


def copy_bundled(folder: Path) -> Path:
    """A copy of the bundled model to damage."""
    return Path(shutil.copytree(BUNDLED, folder))
