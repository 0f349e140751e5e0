from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.errors import EngineError
from engines.make_tiny import CONFIG
from engines.model_config import parse_model_config
from engines.rope import Llama3Scaling, RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def test_config_of_before_transformers_5_is_read() -> None:
    config = parse_model_config(LLAMA, [128001, 128008])
    assert (config.hidden, config.n_heads, config.n_kv_heads, config.head_dim) == (2048, 32, 8, 64)
    assert config.rope == RopeConfig(500000.0, 64, "halves", Llama3Scaling(32.0, 1.0, 4.0, 8192))
    assert config.eos_token_ids == (128001, 128008)
    assert (config.weight_dtype, config.moe) == (torch.bfloat16, None)
    assert (config.attention.qkv_bias, config.attention.qk_norm) == (False, None)


def test_sparse_layers_follow_the_step_and_the_exceptions() -> None:
    config = parse_model_config({**CONFIG, "num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, 0)
    assert config.moe is not None
    assert config.moe.sparse_layers == (1, 5, 7)
    assert [config.is_sparse(layer) for layer in range(4)] == [False, True, False, False]


def test_note_is_read_for_the_tables() -> None:
    assert parse_model_config(CONFIG, 0).note == "random weights"
    assert parse_model_config(LLAMA, None).note is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.* not known"),
        ({"architectures": None}, "architectures None not known"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' not supported"),
        ({"attention_bias": True}, "attention_bias True not supported"),
        ({"mlp_bias": True}, "mlp_bias True not supported"),
        ({"use_sliding_window": True}, "use_sliding_window True not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config .* not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 8}, r"layer_types \['sliding_attention'\]"),
        ({"layer_types": ["full_attention"]}, "layer_types must name 16 layers, found"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type 'dynamic' not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor must be a number"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor 1\.5 turn 96 features"),
        ({"hidden_size": None}, "hidden_size must be a whole number above 0, found None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers .* found 0"),
        ({"num_key_value_heads": 5}, "not a multiple of num_key_value_heads 5"),
        ({"head_dim": 33}, "head_dim 33 and partial_rotary_factor None turn 33 features"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
    ],
)
def test_what_the_transformer_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_model_config({**LLAMA, **changes}, None)


def test_more_choices_than_experts_are_refused() -> None:
    with pytest.raises(EngineError, match="num_experts_per_tok 17 exceeds the 16 experts"):
        parse_model_config({**CONFIG, "num_experts_per_tok": 17}, 0)
