"""The models of the speed race, and what one of their tokens costs at least: the denominators of the limits."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch

from engines.curves.steps import request_of
from results.records import Request
from tests.fakes.random_models import copy_tokenizer

VOCABULARY = 2048
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "bos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "16 experts, top 2, width 1024": {
        "moe_intermediate_size": 1024, "num_experts": 16, "num_experts_per_tok": 2, "norm_topk_prob": True,
    },
    "dense, width 2048": {"intermediate_size": 2048},
    "128 experts, top 8, width 384": {
        "moe_intermediate_size": 384, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
}  # fmt: skip
REAL: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072, "head_dim": 128,
        "vocab_size": 151936,
    },
    "Qwen3-4B": {
        "hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728, "num_attention_heads": 32,
        "head_dim": 128, "vocab_size": 151936,
    },
    "6 of the 48 layers of Qwen3-30B-A3B": {
        "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
}  # fmt: skip
"""Shapes of models that people run, from their config.json. Heads are matrices of their own, where the first two share
them with the embedding: as much is read and multiplied."""
CACHE_BYTES = 2
"""Of one cached key or value: what llama.cpp's cache takes, and the least of all contenders."""
OWN_CACHE_BYTES = 4
"""What ours takes."""

_seeds = count(1)


def random_request(n_prompt: int, n_new: int, request_id: str = "r") -> Request:
    """Of random tokens, others each time. No end token ends its answer: the time is of n_new tokens."""
    return request_of(n_prompt, n_new, VOCABULARY, next(_seeds)).model_copy(update={"request_id": request_id})


def add_models(parser: argparse.ArgumentParser, known: Mapping[str, Any] = MODELS) -> None:
    """`models`: those named, or all of the known."""

    def model(name: str) -> str:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no model {name!r}; there are: {'; '.join(known)}")
        return name

    parser.add_argument("models", nargs="*", metavar="MODEL", type=model, default=list(known), help="; ".join(known))


def shape(name: str) -> dict[str, Any]:
    """Of its config.json."""
    return BASE | (MODELS | REAL)[name]


def is_sparse(name: str) -> bool:
    return "num_experts" in shape(name)


def build_model(name: str) -> Any:
    """A transformers model with the weights that its own initialisation draws."""
    import transformers

    if is_sparse(name):
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape(name)))
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape(name)))


def write_model(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a model of billions of weights is never whole in 32 bits
    try:
        model = build_model(name)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    copy_tokenizer(folder)
    return model


def active_weights(name: str) -> int:
    """Weights that one token meets in the layers' matrices; the head is met by the last token of a prompt only."""
    model = shape(name)
    hidden, n_layers = model["hidden_size"], model["num_hidden_layers"]
    attention = hidden * model["head_dim"] * 2 * (model["num_attention_heads"] + model["num_key_value_heads"])
    if not is_sparse(name):
        return int(n_layers * (attention + 3 * hidden * model["intermediate_size"]))
    experts = model["num_experts_per_tok"] * 3 * hidden * model["moe_intermediate_size"]
    return int(n_layers * (attention + experts + hidden * model["num_experts"]))


def attention_flop(name: str, n_prompt: int) -> int:
    """Of a prompt: for each pair of a query and a key it sees, two for qk and two for pv."""
    pairs, model = n_prompt * (n_prompt + 1) // 2, shape(name)
    features = model["num_hidden_layers"] * model["num_attention_heads"] * model["head_dim"]
    return 4 * int(features) * pairs


def prefill_flop(name: str, n_prompt: int) -> int:
    """Of a prompt: two per weight and token, and attention's."""
    return 2 * active_weights(name) * n_prompt + attention_flop(name, n_prompt)


def asked_flop(name: str, n_prompt: int) -> int:
    """Of a prompt whose last layer computes its last token alone: of the others it needs keys and values."""
    model = shape(name)
    n_layers, hidden = model["num_hidden_layers"], model["hidden_size"]
    keys_and_values = 2 * hidden * model["num_key_value_heads"] * model["head_dim"]
    features = model["num_attention_heads"] * model["head_dim"]
    of_others = active_weights(name) // n_layers - keys_and_values
    left_out = 2 * of_others * (n_prompt - 1) + 4 * features * ((n_prompt - 1) * n_prompt // 2)
    return prefill_flop(name, n_prompt) - int(left_out)


def decode_bytes(name: str, weight_bits: float, n_context: int, cache_bytes: int = CACHE_BYTES) -> float:
    """What must be read for one token: the active weights, the head, and keys and values of the context."""
    model = shape(name)
    weights = active_weights(name) + model["vocab_size"] * model["hidden_size"]
    cached = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * n_context
    return float(weights * weight_bits / 8 + cached * cache_bytes)


def reads_more(name: str, weight_bits: float, n_context: int) -> float:
    """What a token of ours reads, whose keys and values have 32 bits, as a multiple of what the limit counts."""
    ours = decode_bytes(name, weight_bits, n_context, OWN_CACHE_BYTES)
    return ours / decode_bytes(name, weight_bits, n_context)
