"""The model that `joulebench train-tiny` trains: a Qwen3-MoE small enough to ship, its shape, tokenizer and folder.

It is taught (`harness.train_tiny`, `harness.training_text`) to find needles, to answer questions about generated
passages and to continue generated situations; of the world it learns nothing, and tables say so. It is the bundled
model: every path of the harness runs offline in seconds, with accuracies that mean something. transformers reads the
same folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.model.tensor_files import write_tensors

NAME = "tiny-qwen3-moe"
VOCABULARY_SIZE = 2048
END, USER, ASSISTANT, SYSTEM = SPECIAL_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "joulebench_note": "trained on generated text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 192,
    "initializer_range": 0.05,
    "intermediate_size": 512,
    "max_position_embeddings": 8192,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY_SIZE,
}


def write_model(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Weights in bf16 and the two configs, beside the tokenizer that `write_tokenizer` put there."""
    _write_json(folder / "config.json", CONFIG)
    _write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": 0})
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    write_tensors(folder / "model.safetensors", narrow, {"format": "pt"})


def write_tokenizer(folder: Path, lines: Iterable[str]) -> None:
    """Byte-level BPE; every digit is a token of its own, so that numbers of equal length cost the same."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Words with the space before them, digits one by one, runs of signs, runs of space.
    words = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise ValueError(
            f"the text gives {tokenizer.get_vocab_size()} tokens, not {VOCABULARY_SIZE}; give it more text"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
