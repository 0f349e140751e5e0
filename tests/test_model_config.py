from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import EngineError, lines_of
from engines.model.checkpoints import tensor_shapes
from engines.model.model_config import parse_model_config, read_model_config
from engines.model.rope_config import Llama3Scaling, RopeConfig
from engines.pricing.shapes import shape_named
from engines.tiny.model import CONFIG
from tests.config_mutations import BASES, raw_of
from tests.fakes.published import PUBLISHED

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
    assert parse_model_config(CONFIG | {"joulebench_note": "random weights"}, 0).note == "random weights"
    assert parse_model_config(LLAMA, None).note is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.* not known"),
        ({"architectures": None}, "architectures must be a list of names, found None; this engine runs Llama"),
        ({"architectures": "MixtralForCausalLM"}, "architectures must be a list of names, found 'MixtralForCausalLM'"),
        ({"architectures": []}, r"architectures \[\] not known"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' not supported"),
        ({"attention_bias": True}, "attention_bias True not supported"),
        ({"mlp_bias": True}, "mlp_bias True not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config .* not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type 'dynamic' not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor must be a number"),
        ({"hidden_size": None}, "hidden_size must be a whole number above 0, found None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers .* found 0"),
        ({"num_key_value_heads": 5}, "not a multiple of num_key_value_heads 5"),
        ({"head_dim": 33}, "head_dim 33 and partial_rotary_factor None turn 33 features"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        # sizes that lie
        ({"num_attention_heads": 24, "num_key_value_heads": 24}, "hidden_size 2048 is not a multiple of .* 24"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 is more than any model has"),
        ({"hidden_size": 2**40}, "hidden_size .* found a number of 13 digits, beyond 2147483647"),
        ({"vocab_size": -5}, "vocab_size must be a whole number above 0, found -5"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings .* found a number of 401 digits"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0, found nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps .* found a number of 401 digits"),
        ({"rope_theta": 1.0}, "rope_theta 1.0 must be above 1"),
        ({"rope_scaling": {**LLAMA["rope_scaling"], "low_freq_factor": 5.0}}, "low_freq_factor 5.0 must not exceed"),
        # types that lie
        ({"hidden_size": 2048.0}, "hidden_size must be a whole number .* found 2048.0"),
        ({"hidden_size": True}, "hidden_size must be a whole number .* found True"),
        ({"num_hidden_layers": "16"}, "num_hidden_layers must be a whole number .* found '16'"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, found 'false'"),
        ({"rope_scaling": "llama3"}, "rope_scaling must be an object, found 'llama3'"),
        ({"quantization_config": [1]}, r"quantization_config must be an object, found \[1\]"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures .* not known"),
        ({"torch_dtype": {"a": 1}}, "dtype {'a': 1} not supported"),
        ({"joulebench_note": 5}, "joulebench_note must be a text, found 5"),
    ],
)
def test_what_the_transformer_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_model_config({**LLAMA, **changes}, None)


def problems_of(raw: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(EngineError) as raised:
        parse_model_config(raw, None)
    return lines_of(raised.value)


def test_all_faults_of_a_config_are_told_at_once() -> None:
    """Sizes, a parameter of rope, an unknown key, and forms of weights."""
    raw = PUBLISHED["Mixtral-8x7B-v0.1"].config | {
        "hidden_size": "4096",
        "vocab_size": -1,
        "num_local_experts": 0,
        "clip_qkv": 8.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": "x"},
        "torch_dtype": "int3",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]},
    }
    found = problems_of(raw)
    assert len(found) == 7, found
    for fault in (
        "config.json: 'clip_qkv' is 8.0, but MixtralForCausalLM has no such key",
        "config.json: hidden_size must be a whole number above 0, found '4096'",
        "config.json: vocab_size must be a whole number above 0, found -1",
        "config.json: num_local_experts must be a whole number above 0, found 0",
        "config.json: low_freq_factor must be a number above 0, found 'x'",
        "config.json: dtype 'int3' not supported",
        "config.json: weight_block_size must be rows and columns of a block, found [0, 128]",
    ):
        assert any(one.startswith(fault) for one in found), (fault, found)


def test_what_hangs_on_a_wrong_value_is_no_fault_of_its_own() -> None:
    """14 heads divide neither the family's own width nor its keys and values; 28 layers are not its own number."""
    raw = PUBLISHED["Qwen3-0.6B"].config | {"layer_types": ["full_attention"] * 28, "num_attention_heads": 14}
    del raw["head_dim"]
    assert problems_of(raw | {"hidden_size": None, "num_key_value_heads": None, "num_hidden_layers": 0}) == (
        "config.json: hidden_size must be a whole number above 0, found None",
        "config.json: num_hidden_layers must be a whole number above 0, found 0",
    )


def test_faults_within_the_text_of_a_model_of_pictures_are_told_at_once() -> None:
    raw = PUBLISHED["Llama-4-Scout-17B-16E"].config
    wrong = raw | {"text_config": raw["text_config"] | {"num_hidden_layers": "48", "rms_norm_eps": 0}}
    assert problems_of(wrong) == (
        "config.json: num_hidden_layers must be a whole number above 0, found '48'",
        "config.json: rms_norm_eps must be a number above 0, found 0",
    )


def test_a_config_of_thousands_of_unknown_keys_tells_twenty() -> None:
    found = problems_of(LLAMA | {f"key_{i}": i for i in range(3000)})
    assert len(found) == 21
    assert found[-1] == "config.json: more may be wrong than these 20"


def test_a_config_that_says_no_architecture_is_told_so() -> None:
    with pytest.raises(EngineError, match=r"^config\.json: architectures is missing; this engine runs Llama"):
        parse_model_config({}, None)


@pytest.mark.parametrize(("model_type", "name"), [("qwen2", "Qwen2ForCausalLM"), ("phimoe", "PhimoeForCausalLM")])
def test_an_architecture_that_is_null_is_told_by_the_model_type(model_type: str, name: str) -> None:
    """transformers goes by the model type alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] == name
    with pytest.raises(EngineError, match=rf"found None; of model_type '{model_type}' it would be \['{name}'\]"):
        parse_model_config({"architectures": None, "model_type": model_type}, None)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("Qwen3-0.6B", {"use_sliding_window": True}, "use_sliding_window True not supported"),
        (
            "Qwen3-0.6B",
            {"layer_types": ["sliding_attention"] * 28},
            r"layer_types \['sliding_attention'\] not supported",
        ),
        ("Qwen3-0.6B", {"layer_types": ["full_attention"]}, "layer_types must name 28 layers, found"),
        ("Qwen3-0.6B", {"layer_types": [[1]] * 28}, r"layer_types \['\[1\]'\] not supported"),
        ("Qwen3-0.6B", {"layer_types": "full_attention"}, "layer_types must name 28 layers, found 'full_attention'"),
        ("gemma-2-2b", {"sliding_window": None}, "layer_types .* not supported here with sliding_window None"),
        ("GLM-4.5-Air", {"partial_rotary_factor": 1.5}, r"partial_rotary_factor 1\.5 turn 192 features"),
        (
            "GLM-4.5-Air",
            {"partial_rotary_factor": "0.5"},
            "partial_rotary_factor must be a number above 0, found '0.5'",
        ),
        ("DeepSeek-V3", {"num_nextn_predict_layers": 10**6}, "num_nextn_predict_layers 1000000 is more than any model"),
        ("DeepSeek-V3", {"norm_topk_prob": None}, "norm_topk_prob must be true or false, found None"),
        (
            "DeepSeek-V3",
            {"n_group": 256, "topk_group": 8},
            "n_group 256 leaves one of n_routed_experts 256 to a group, and a group is as good as its two best",
        ),
        ("Llama-4-Scout-17B-16E", {"text_config": 5}, "text_config must be an object, found 5"),
        (
            "Llama-4-Scout-17B-16E",
            {"hidden_size": 64},
            "'hidden_size' is 64, but Llama4ForConditionalGeneration has no",
        ),
        # keys of other families
        ("Mixtral-8x7B-v0.1", {"clip_qkv": 8.0}, "'clip_qkv' is 8.0, but MixtralForCausalLM has no such key; it might"),
        ("Mixtral-8x7B-v0.1", {"final_logit_softcapping": 30.0}, "'final_logit_softcapping' is 30.0"),
        ("Mixtral-8x7B-v0.1", {"no_rope_layers": [1, 0]}, r"'no_rope_layers' is \[1, 0\]"),
        ("Qwen3-0.6B", {"query_pre_attn_scalar": 64}, "'query_pre_attn_scalar' is 64"),
        ("OLMoE-1B-7B-0924", {"routed_scaling_factor": 2.0}, "'routed_scaling_factor' is 2.0"),
        ("OLMoE-1B-7B-0924", {"n_group": 2}, "'n_group' is 2"),
        ("gpt-oss-20b", {"attention_chunk_size": 64}, "'attention_chunk_size' is 64"),
        ("DeepSeek-V2-Lite", {"rope_interleave": False}, "rope_interleave False not supported"),
        ("Phi-3.5-MoE-instruct", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 not supported"),
        ("Mixtral-8x7B-v0.1", {"num_experts": 4}, "num_experts 4 contradicts num_local_experts 8"),
        ("Mixtral-8x7B-v0.1", {"model_type": "llama"}, "model_type 'llama' does not belong to MixtralForCausalLM"),
        ("Mixtral-8x7B-v0.1", {"x" * 300: 1}, r"config.json: 'xxx.*\.\.\. is 1"),
    ],
)
def test_what_a_family_does_not_have_is_refused(model: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_model_config({**PUBLISHED[model].config, **changes}, None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_null_of_a_key_that_a_family_does_not_have_says_nothing(name: str) -> None:
    raw = PUBLISHED[name].config
    foreign = {key: None for key in ("clip_qkv", "vision_tower", "n_shared_tokens") if key not in raw}
    assert parse_model_config({**foreign, **raw}, None) == parse_model_config(raw, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 10**6}, "num_experts 1000000 in 4 layers are more experts than any model has"),
        ({"num_experts": None}, "num_experts must be a whole number above 0, found None"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be a whole number above 0, found 0"),
        ({"mlp_only_layers": 5}, "mlp_only_layers must be a list of whole numbers from 0, found 5"),
        ({"norm_topk_prob": [True]}, r"norm_topk_prob must be true or false, found \[True\]"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "rows and columns .* found"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}, "rows and columns .* found"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": "ab"}},
            "weight_block_size must be a list",
        ),
    ],
)
def test_experts_that_lie_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_model_config({**CONFIG, **changes}, 0)


OLD: dict[str, Any] = PUBLISHED["deepseek-moe-16b-base"].config | {"num_hidden_layers": 4}
LITE: dict[str, Any] = PUBLISHED["GLM-4.7-Flash"].config | {"num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (CONFIG | {"mlp_only_layers": [1, 4]}, "mlp_only_layers names layer 4, and num_hidden_layers 4 ends at 3"),
        (CONFIG | {"mlp_only_layers": [1, 2, 1]}, "mlp_only_layers names layer 1 more than once"),
        (CONFIG | {"mlp_only_layers": [-1]}, r"mlp_only_layers must be a list of whole numbers from 0, found \[-1\]"),
        (CONFIG | {"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number above 0, found 0"),
        (CONFIG | {"decoder_sparse_step": 1.5}, "decoder_sparse_step must be a whole number above 0, found 1.5"),
        (CONFIG | {"decoder_sparse_step": 5}, "decoder_sparse_step 5 is more than num_hidden_layers 4"),
        (OLD | {"first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number from 0, found -1"),
        (OLD | {"first_k_dense_replace": 5}, "first_k_dense_replace 5 is more than num_hidden_layers 4"),
        (OLD | {"moe_layer_freq": 0}, "moe_layer_freq must be a whole number above 0, found 0"),
        (OLD | {"moe_layer_freq": 5}, "moe_layer_freq 5 is more than num_hidden_layers 4"),
        (LITE | {"mlp_layer_types": ["dense", "sparse", "thick", "sparse"]}, "mlp_layer_types must .* found .thick"),
        (LITE | {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types must name 4 layers"),
    ],
)  # fmt: skip
def test_layers_that_the_model_does_not_have_are_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=f"config.json: {message}"):
        parse_model_config(raw, 0)


def test_a_small_model_may_have_fewer_layers_than_its_family_has_dense_ones() -> None:
    """transformers: DeepSeek-V3 takes 3 where the file says nothing, and `layer_idx >= first_k_dense_replace`."""
    raw = raw_of(BASES["deepseek-v3"]) | {"num_hidden_layers": 2, "first_k_dense_replace": 3}
    silent = {key: value for key, value in raw.items() if key != "first_k_dense_replace"}
    moe = parse_model_config(silent, 0).moe
    assert moe is not None
    assert moe.sparse_layers == ()
    with pytest.raises(EngineError, match="first_k_dense_replace 3 is more than num_hidden_layers 2"):
        parse_model_config(raw, 0)


def test_an_error_names_the_file_that_was_given(tmp_path: Path) -> None:
    own = tmp_path / "mine.json"
    own.write_text(json.dumps(CONFIG | {"mlp_only_layers": [99]}))
    with pytest.raises(EngineError, match=f"^{re.escape(str(own))}: mlp_only_layers names layer 99"):
        shape_named(str(own))
    (tmp_path / "config.json").write_bytes(own.read_bytes())
    for read in (lambda: read_model_config(tmp_path), lambda: shape_named(str(tmp_path))):
        with pytest.raises(EngineError, match=f"^{re.escape(str(tmp_path / 'config.json'))}: mlp_only_layers names"):
            read()


@pytest.mark.parametrize("eos", ["<|end|>", [0, "x"], {}, -1, 1.5, [[0]]])
def test_end_tokens_that_are_no_numbers_are_refused(eos: object) -> None:
    with pytest.raises(EngineError, match="eos_token_id must be a list of whole numbers"):
        parse_model_config(CONFIG, eos)


@pytest.mark.parametrize("size", [2**20, 2**31 - 1])
def test_tensors_that_no_file_can_hold_are_named_without_being_made(size: int) -> None:
    config = parse_model_config({**LLAMA, "hidden_size": size, "vocab_size": 2**31 - 1, "head_dim": 64}, None)
    with pytest.raises(EngineError, match=r"a tensor 'model\.embed_tokens\.weight' of .*; no file holds one as large"):
        tensor_shapes(config)


VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 3, -1, 10**9, 10**400, float("nan"), float("inf"), "", "x", "llama3"])
    | st.integers()
    | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["rope_type", "factor", "x"]), inner),
    max_leaves=5,
)
KEYS = sorted(set().union(*(model.config for model in PUBLISHED.values())) | {"text_config", "moe_layers"})


@given(st.sampled_from(sorted(PUBLISHED)), st.sampled_from(KEYS), VALUES)
@settings(max_examples=400)
def test_any_value_of_any_key_is_read_or_refused_and_never_a_crash(model: str, key: str, value: object) -> None:
    raw = {**PUBLISHED[model].config, key: value}
    try:
        config = parse_model_config(raw, raw.get("eos_token_id"))
    except EngineError:
        return
    assert config.n_heads % config.n_kv_heads == 0
    assert 0 < config.rope.dim <= config.head_dim


def test_more_choices_than_experts_are_refused() -> None:
    with pytest.raises(EngineError, match="num_experts_per_tok 17 exceeds the 16 experts"):
        parse_model_config({**CONFIG, "num_experts_per_tok": 17}, 0)
