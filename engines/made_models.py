"""Models of given sizes with random weights, in a folder like any other: to measure what a shape costs.

Routers are random too, so that all experts of a layer are chosen about as often. What they answer means nothing.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.model.checkpoints import BUNDLED_FOLDER
from engines.model.model_config import parse_model_config
from engines.model.tensor_files import write_tensors
from engines.model.wanted_tensors import tensor_shapes

NOTE = "random weights"
MOST_POSITIONS = 8192


@dataclass(frozen=True)
class MadeSizes:
    """Of a Qwen3-MoE."""

    hidden: int
    expert_width: int
    n_experts: int
    top_k: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int = 64
    vocabulary: int = 2048

    def __str__(self) -> str:
        return f"{self.n_layers} x {self.n_experts} experts of {self.hidden} x {self.expert_width}, top {self.top_k}"


def made_config(sizes: MadeSizes, dtype: torch.dtype) -> dict[str, Any]:
    """As its config.json says it."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "joulebench_note": NOTE,
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": None,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.expert_width,
        "max_position_embeddings": MOST_POSITIONS,
        "mlp_only_layers": [],
        "moe_intermediate_size": sizes.expert_width,
        "norm_topk_prob": True,
        "num_attention_heads": sizes.n_heads,
        "num_experts": sizes.n_experts,
        "num_experts_per_tok": sizes.top_k,
        "num_hidden_layers": sizes.n_layers,
        "num_key_value_heads": sizes.n_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": sizes.vocabulary,
    }


def write_made_model(folder: Path, sizes: MadeSizes, dtype: torch.dtype, seed: int = 0) -> Path:
    """Writes config, weights and the bundled tokenizer, and returns the folder. Raises `OSError`."""
    raw = made_config(sizes, dtype)
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: _random(shape, random).to(dtype) for name, shape in tensor_shapes(parse_model_config(raw, None)).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    metadata = {"format": "pt", "sizes": json.dumps(asdict(sizes))}
    write_tensors(folder / "model.safetensors", tensors, metadata)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_FOLDER / "tiny-qwen3-moe" / name, folder / name)
    return folder


def _random(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Products of the size of what goes in, and norms of 1."""
    if len(shape) == 1:
        return torch.ones(shape)
    return torch.empty(shape).uniform_(-1, 1, generator=random) * math.sqrt(3 / shape[-1])
