"""The models of the speed race, and what one of their tokens costs at least: the denominators of the limits."""

from __future__ import annotations

import argparse
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
CACHE_BYTES = 2
"""Of one cached key or value: what llama.cpp's cache takes, and the least of all contenders."""
OWN_CACHE_BYTES = 4
"""What ours takes."""

_seeds = count(1)


def random_request(n_prompt: int, n_new: int, request_id: str = "r") -> Request:
    """Of random tokens, others each time. No end token ends its answer: the time is of n_new tokens."""
    return request_of(n_prompt, n_new, VOCABULARY, next(_seeds)).model_copy(update={"request_id": request_id})


def add_models(parser: argparse.ArgumentParser) -> None:
    """`models`: those named, or all."""

    def model(name: str) -> str:
        if name not in MODELS:
            raise argparse.ArgumentTypeError(f"no model {name!r}; there are: {'; '.join(MODELS)}")
        return name

    parser.add_argument("models", nargs="*", metavar="MODEL", type=model, default=list(MODELS), help="; ".join(MODELS))


def is_sparse(name: str) -> bool:
    return "num_experts" in MODELS[name]


def build_model(name: str) -> Any:
    """A transformers model with the weights that its own initialisation draws."""
    import transformers

    if is_sparse(name):
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**BASE, **MODELS[name]))
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**BASE, **MODELS[name]))


def write_model(name: str, folder: Path) -> Any:
    torch.manual_seed(0)
    model = build_model(name)
    model.save_pretrained(folder)
    copy_tokenizer(folder)
    return model


def active_weights(name: str) -> int:
    """Weights that one token meets in the layers' matrices; the head is met by the last token of a prompt only."""
    hidden, model = BASE["hidden_size"], MODELS[name]
    attention = hidden * BASE["head_dim"] * 2 * (BASE["num_attention_heads"] + BASE["num_key_value_heads"])
    if not is_sparse(name):
        return int(BASE["num_hidden_layers"] * (attention + 3 * hidden * model["intermediate_size"]))
    experts = model["num_experts_per_tok"] * 3 * hidden * model["moe_intermediate_size"]
    return int(BASE["num_hidden_layers"] * (attention + experts + hidden * model["num_experts"]))


def attention_flop(n_prompt: int) -> int:
    """Of a prompt, in any of the models: for each pair of a query and a key it sees, two for qk and two for pv."""
    pairs = n_prompt * (n_prompt + 1) // 2
    features = BASE["num_hidden_layers"] * BASE["num_attention_heads"] * BASE["head_dim"]
    return 4 * int(features) * pairs


def prefill_flop(name: str, n_prompt: int) -> int:
    """Of a prompt: two per weight and token, and attention's."""
    return 2 * active_weights(name) * n_prompt + attention_flop(n_prompt)


def asked_flop(name: str, n_prompt: int) -> int:
    """Of a prompt whose last layer computes its last token alone: of the others it needs keys and values."""
    n_layers, hidden = BASE["num_hidden_layers"], BASE["hidden_size"]
    keys_and_values = 2 * hidden * BASE["num_key_value_heads"] * BASE["head_dim"]
    features = BASE["num_attention_heads"] * BASE["head_dim"]
    of_others = active_weights(name) // n_layers - keys_and_values
    left_out = 2 * of_others * (n_prompt - 1) + 4 * features * ((n_prompt - 1) * n_prompt // 2)
    return prefill_flop(name, n_prompt) - int(left_out)


def decode_bytes(name: str, weight_bits: float, n_context: int, cache_bytes: int = CACHE_BYTES) -> float:
    """What must be read for one token: the active weights, the head, and keys and values of the context."""
    weights = active_weights(name) + VOCABULARY * BASE["hidden_size"]
    cached = 2 * BASE["num_hidden_layers"] * BASE["num_key_value_heads"] * BASE["head_dim"] * n_context
    return float(weights * weight_bits / 8 + cached * cache_bytes)


def reads_more(name: str, weight_bits: float, n_context: int) -> float:
    """What a token of ours reads, whose keys and values have 32 bits, as a multiple of what the limit counts."""
    ours = decode_bytes(name, weight_bits, n_context, OWN_CACHE_BYTES)
    return ours / decode_bytes(name, weight_bits, n_context)
