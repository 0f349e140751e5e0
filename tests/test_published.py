"""Published checkpoints as they describe themselves: read without today's transformers in between."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.model.architecture import GatedUnit, NormConfig, RouterConfig, SharedExpertConfig, Temperature
from engines.model.checkpoints import inspect_checkpoint, load_checkpoint, tensor_shapes
from engines.model.model_config import ModelConfig, parse_model_config
from engines.model.spans import Span
from engines.model.transformer import KeyValueCache, Transformer
from engines.techniques.presets import dropless
from tests.fakes import deepseek_v1
from tests.fakes.families import CASES, write_family
from tests.fakes.published import PUBLISHED
from tests.fakes.random_models import copy_tokenizer


def config_of(name: str, **changes: Any) -> ModelConfig:
    return parse_model_config({**PUBLISHED[name].config, **changes}, None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensors_have_the_published_names_and_add_up_to_the_published_parameters(name: str) -> None:
    shapes = tensor_shapes(config_of(name))
    assert set(PUBLISHED[name].names) <= shapes.keys()
    # A byte of 4-bit blocks holds two parameters; their scales are none.
    n_values = sum(
        0 if tensor.endswith(("_scales", "_scale_inv")) else math.prod(shape) * (2 if tensor.endswith("_blocks") else 1)
        for tensor, shape in shapes.items()
    )
    decimals = len(PUBLISHED[name].parameters_b.partition(".")[2])
    assert f"{n_values / 1e9:.{decimals}f}" == PUBLISHED[name].parameters_b


def test_configs_say_what_their_papers_say() -> None:
    moe = {name: config.moe for name in PUBLISHED if (config := config_of(name)).moe is not None}
    assert moe["Mixtral-8x7B-v0.1"].router == RouterConfig("softmax", 2, normalise=True)
    assert moe["OLMoE-1B-7B-0924"].router == RouterConfig("softmax", 8)
    assert moe["Qwen1.5-MoE-A2.7B"].shared == SharedExpertConfig(5632, gated=True)
    assert moe["Phi-3.5-MoE-instruct"].router == RouterConfig("sparsemixer", 2, jitter=0.01)
    assert moe["gpt-oss-20b"].unit == GatedUnit("silu", alpha=1.702, limit=7.0)
    assert moe["deepseek-moe-16b-base"].shared == SharedExpertConfig(2816, gated=False)
    assert moe["DeepSeek-V3"].router == RouterConfig(
        "sigmoid", 8, True, 2.5, n_groups=8, top_groups=4, group_score="two best", has_correction=True
    )
    assert moe["DeepSeek-V3"].sparse_layers == tuple(range(3, 61))
    assert moe["DeepSeek-V2-Lite"].sparse_layers == tuple(range(1, 27))
    assert moe["Llama-4-Scout-17B-16E"].weights_input


def test_attention_of_published_configs() -> None:
    assert config_of("gpt-oss-20b").attention.spans == (Span("sliding", 128), None) * 12
    assert config_of("gemma-2-2b").attention.spans == (Span("sliding", 4096), None) * 13
    assert config_of("Phi-3-mini-4k-instruct").attention.spans == (Span("sliding", 2047),) * 32
    assert config_of("Phi-3.5-MoE-instruct").attention.spans == (None,) * 32, "its window is its whole context"
    assert config_of("Phi-3.5-MoE-instruct").norm == NormConfig("layer", 1e-5)
    scout = config_of("Llama-4-Scout-17B-16E").attention
    assert scout.spans == ((Span("chunked", 8192),) * 3 + (None,)) * 12
    assert scout.rope_layers == ((True,) * 3 + (False,)) * 12
    assert scout.temperature == Temperature(8192, 0.1)
    # 1 / sqrt(128 + 64), sharpened by (0.1 * 0.707 * ln 40 + 1)^2.
    assert config_of("DeepSeek-V2-Lite").attention.scale == pytest.approx(0.0721688 * 1.260804**2, rel=1e-5)
    assert config_of("GLM-4.5-Air").rope.dim == 64
    unsaid = {key: v for key, v in PUBLISHED["GLM-4.5-Air"].config.items() if key != "partial_rotary_factor"}
    assert parse_model_config(unsaid, None).rope.dim == 64, "half a head unless the config says"
    assert config_of("gemma-2-2b").tie_embeddings


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("DeepSeek-V2-Lite", {"norm_topk_prob": True}, "norm_topk_prob True not supported"),
        ("DeepSeek-V2-Lite", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' not supported"),
        ("DeepSeek-V3", {"topk_method": "greedy"}, "topk_method 'greedy' not supported"),
        ("DeepSeek-V3", {"n_group": 7}, "topk_group 4 of n_group 7 equal groups"),
        ("DeepSeek-V3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config .*fp8"),
        (
            "Phi-3-mini-4k-instruct",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "quantization_config .*fp8",
        ),
        ("DeepSeek-V3", {"kv_lora_rank": None}, "kv_lora_rank must be a whole number"),
        ("Mixtral-8x7B-v0.1", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config .*mxfp4"),
        ("Phi-3.5-MoE-instruct", {"num_experts_per_tok": 4}, "num_experts_per_tok 4 not supported; sparsemixer"),
        ("gemma-2-2b", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' not supported"),
        ("gpt-oss-20b", {"layer_types": ["linear_attention"] * 24}, r"layer_types \['linear_attention'\]"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        config_of(name, **changes)


# --- folders ---------------------------------------------------------------------------------------------------------


def logits_of(folder: Path, tokens: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    model = Transformer(load_checkpoint(str(folder), torch.float32))
    cache = KeyValueCache(model.config)
    cache.start(len(tokens))
    with torch.inference_mode():
        hidden = [model.forward(chunk, cache, dropless(), "prefill")[0] for chunk in tokens.split(chunks)]
        return model.logits(torch.cat(hidden))


def random_tokens(n: int) -> torch.Tensor:
    return torch.randint(0, 2048, (n,), generator=torch.Generator().manual_seed(3))


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path)


@pytest.mark.numbers
def test_layer_that_predicts_further_ahead_is_left_out_and_the_one_after_it_is_not(tmp_path: Path) -> None:
    """DeepSeek-V3 and GLM-4.5 publish num_nextn_predict_layers = 1 beyond the last layer; transformers skips it too."""
    theirs = write_family(tmp_path, CASES["deepseek-v3"])
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    tokens = random_tokens(30)
    add_tensors(
        tmp_path, {"model.layers.3.eh_proj.weight": torch.zeros(64, 128), "model.layers.3.enorm.weight": torch.ones(64)}
    )
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0]
    assert (logits_of(tmp_path, tokens, [30]) - expected).abs().max() < 1e-4
    add_tensors(tmp_path, {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)})
    with pytest.raises(EngineError, match=r"tensor 'model\.layers\.4\.eh_proj\.weight' left over \(1 in all\)"):
        inspect_checkpoint(str(tmp_path))


@pytest.mark.numbers
def test_text_half_of_a_model_that_sees_is_read_from_the_level_below(tmp_path: Path) -> None:
    """Llama 4 as published: config under text_config, tensors under language_model, the vision half beside them."""
    theirs = write_family(tmp_path, CASES["llama4"])
    text_config = json.loads((tmp_path / "config.json").read_text())
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    tensors |= {
        "vision_model.class_embedding": torch.zeros(8),
        "multi_modal_projector.linear_1.weight": torch.zeros(2, 2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    outer = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text_config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tokens = random_tokens(40)
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0]
    assert (logits_of(tmp_path, tokens, [25, 15]) - expected).abs().max() < 1e-4
    assert load_checkpoint(str(tmp_path), torch.float32).tokenizer.eos_token_ids == (0,)


@pytest.mark.numbers
def test_phi_moe_is_known_by_its_published_name_too(tmp_path: Path) -> None:
    write_family(tmp_path, CASES["phi-moe"])
    tokens = random_tokens(10)
    expected = logits_of(tmp_path, tokens, [10])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["PhiMoEForCausalLM"]}))
    assert torch.equal(logits_of(tmp_path, tokens, [10]), expected)


@pytest.mark.parametrize(
    ("case", "tensor"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w3.weight"),
        ("phi-moe", "model.layers.2.input_layernorm.bias"),
        ("gpt-oss", "model.layers.0.mlp.experts.down_proj"),
        ("gpt-oss-mxfp4", "model.layers.0.mlp.experts.down_proj_scales"),
        ("deepseek-v3", "model.layers.2.mlp.gate.e_score_correction_bias"),
        ("gemma2", "model.layers.0.post_feedforward_layernorm.weight"),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight"),
        ("llama4", "model.layers.1.feed_forward.shared_expert.up_proj.weight"),
    ],
)
def test_missing_and_misshapen_tensors_of_every_kind_are_named(tmp_path: Path, case: str, tensor: str) -> None:
    write_family(tmp_path, CASES[case])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({name: t for name, t in tensors.items() if name != tensor}, path)
    with pytest.raises(EngineError, match=f"tensor '{tensor}' missing"):
        inspect_checkpoint(str(tmp_path))
    save_file(tensors | {tensor: tensors[tensor][:-1].clone()}, path)
    with pytest.raises(EngineError, match=f"tensor '{tensor}' has shape .*, config.json asks for"):
        load_checkpoint(str(tmp_path), torch.float32)


@pytest.mark.numbers
@pytest.mark.parametrize("case", ["gpt-oss", "gpt-oss-mxfp4", "deepseek-v3", "gemma2", "phi3", "llama4"])
def test_narrow_weights_compute_as_if_they_were_wide(tmp_path: Path, case: str) -> None:
    """A folder of bf16 values, held as bf16 or fp32: stacks, latents and fused tensors keep their values."""
    write_family(tmp_path, CASES[case])
    path = tmp_path / "model.safetensors"
    save_file({n: t.bfloat16() if t.is_floating_point() else t for n, t in load_file(path).items()}, path)
    tokens, logits = random_tokens(20), []
    for dtype in (torch.bfloat16, torch.float32):
        model = Transformer(load_checkpoint(str(tmp_path), dtype))
        cache = KeyValueCache(model.config)
        cache.start(20)
        with torch.inference_mode():
            logits.append(model.logits(model.forward(tokens, cache, dropless(), "prefill")[0]))
    assert torch.equal(*logits)


@pytest.mark.numbers
def test_fp8_projections_are_values_times_the_scale_of_their_block(tmp_path: Path) -> None:
    """DeepSeek-V3's own storage, in blocks of 16 x 24 that do not divide the matrices. The oracle is a folder of the
    products, multiplied block by block."""
    write_family(tmp_path / "plain", CASES["deepseek-v3"])
    plain, packed = load_file(tmp_path / "plain" / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(5)
    for name, weight in list(plain.items()):
        if not name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight")):
            packed[name] = weight
            continue
        scale = 2 ** torch.randint(-6, -3, (-(-weight.shape[0] // 16), -(-weight.shape[1] // 24)), generator=generator)
        packed[name] = (32 * weight).to(torch.float8_e4m3fn)
        packed[name + "_scale_inv"] = scale.float()
        plain[name] = packed[name].float()
        for row, column in itertools.product(range(scale.shape[0]), range(scale.shape[1])):
            plain[name][16 * row : 16 * row + 16, 24 * column : 24 * column + 24] *= scale[row, column]
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    shutil.copytree(tmp_path / "plain", tmp_path / "fp8")
    save_file(packed, tmp_path / "fp8" / "model.safetensors")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 24]}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    tokens = random_tokens(20)
    assert torch.equal(logits_of(tmp_path / "fp8", tokens, [20]), logits_of(tmp_path / "plain", tokens, [20]))
    del config["quantization_config"]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=r"_scale_inv' left over"):
        load_checkpoint(str(tmp_path / "fp8"), torch.float32)


# --- DeepSeek-MoE V1, which transformers does not have ---------------------------------------------------------------

V1: dict[str, Any] = {
    **PUBLISHED["deepseek-moe-16b-base"].config,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-6,
    "eos_token_id": 0,
}


@pytest.fixture(scope="module")
def v1_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek-v1")
    save_file(deepseek_v1.random_tensors(deepseek_v1.published_shapes(V1)), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(V1))
    copy_tokenizer(folder)
    return folder


@pytest.mark.numbers
@pytest.mark.parametrize("chunks", [[60], [7, 40, 1, 12], [50] + [1] * 10], ids=["whole", "uneven", "decode"])
def test_deepseek_v1_is_its_definition(v1_folder: Path, chunks: list[int]) -> None:
    tokens = random_tokens(60)
    expected = deepseek_v1.logits(V1, load_file(v1_folder / "model.safetensors"), tokens)
    assert expected.std() > 0.5
    assert (logits_of(v1_folder, tokens, chunks) - expected).abs().max() < 1e-4


@pytest.mark.numbers
@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": True},
        {"norm_topk_prob": True, "num_experts_per_tok": 1},
        {"first_k_dense_replace": 0},
        {"first_k_dense_replace": 0, "moe_layer_freq": 2},
        {"rope_theta": 300.0},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rms_norm_eps": 0.3},
    ],
    ids=str,
)
def test_deepseek_v1_is_its_definition_whatever_its_keys_say(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = {**V1, **changes}
    tensors = deepseek_v1.random_tensors(deepseek_v1.published_shapes(config))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    copy_tokenizer(tmp_path)
    tokens = random_tokens(40)
    expected = deepseek_v1.logits(config, tensors, tokens)
    assert (logits_of(tmp_path, tokens, [40]) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("routed_scaling_factor", 2.0), ("n_group", 2), ("topk_method", "greedy"), ("clip_qkv", 1.0)],
        *[("partial_rotary_factor", 0.5), ("sliding_window", 8), ("rope_interleave", True), ("mlp_bias", True)],
        *[("rope_scaling", {"type": "yarn", "factor": 4.0}), ("scoring_func", "sigmoid"), ("hidden_act", "gelu")],
    ],
)
def test_what_deepseek_v1_does_not_have_is_named(key: str, value: Any) -> None:
    with pytest.raises(EngineError, match="rope_type" if key == "rope_scaling" else key):
        parse_model_config({**V1, key: value}, None)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        # Keys that stand in the published files beside those that matter.
        (
            "gpt-oss-20b",
            {"experts_per_token": 4, "initial_context_length": 4096, "router_aux_loss_coef": 0.9, "use_cache": True}
            | {"attention_dropout": 0.0, "initializer_range": 0.02, "pad_token_id": 199999, "model_type": "gpt_oss"}
            | {"output_router_logits": False, "transformers_version": "4.55.0.dev0"},
        ),
        (
            "Phi-3-mini-4k-instruct",
            {"_name_or_path": "Phi-4-mini-instruct", "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}
            | {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "full_attn_mod": 1, "interpolate_factor": 1, "mlp_bias": False}
            | {"lm_head_bias": False, "partial_rotary_factor": 1.0, "pad_token_id": 199999, "model_type": "phi3"},
        ),
        (
            "GLM-4.7-Flash",
            {"model_type": "glm4_moe_lite", "moe_layer_freq": 1, "mlp_layer_types": None, "rope_interleave": True},
        ),
    ],
)
def test_keys_of_published_files_that_say_nothing_are_taken(name: str, others: dict[str, Any]) -> None:
    assert config_of(name, **others) == config_of(name)


def test_keys_of_a_text_half_are_those_of_the_model_alone() -> None:
    published = PUBLISHED["Llama-4-Scout-17B-16E"].config
    text = published["text_config"]
    for changes in ({}, {"attn_temperature_tuning": False}, {"tie_word_embeddings": True}, {"attention_bias": True}):
        inside = parse_model_config({**published, "text_config": {**text, **changes}}, None)
        alone = parse_model_config({**text, **changes, "architectures": ["Llama4ForCausalLM"]}, None)
        assert (inside.attention, inside.moe, inside.rope) == (alone.attention, alone.moe, alone.rope)
        assert (inside.tie_embeddings, inside.dense_width) == (alone.tie_embeddings, alone.dense_width)
    with pytest.raises(EngineError, match=r"'clip_qkv' is 1\.0, but Llama4ForConditionalGeneration has no such key"):
        parse_model_config({**published, "text_config": {**text, "clip_qkv": 1.0}}, None)


@pytest.mark.numbers
def test_deepseek_v1_continues_as_its_definition_does(v1_folder: Path) -> None:
    tensors = load_file(v1_folder / "model.safetensors")
    tokens = random_tokens(10)
    while len(tokens) < 10 + 64:
        last = deepseek_v1.logits(V1, tensors, tokens)[-1]
        tokens = torch.cat([tokens, last.argmax()[None]])
    greedy = logits_of(v1_folder, tokens[:-1], [10] + [1] * 63)[9:].argmax(-1)
    assert torch.equal(greedy, tokens[10:])
    assert len(set(greedy.tolist())) > 4


@pytest.mark.numbers
def test_deepseek_v1_first_layer_is_dense(v1_folder: Path) -> None:
    model = Transformer(load_checkpoint(str(v1_folder), torch.float32))
    cache = KeyValueCache(model.config)
    cache.start(5)
    plans: list[DispatchPlan | None] = model.forward(random_tokens(5), cache, dropless(), "prefill")[1]
    assert [plan is not None for plan in plans] == [False, True, True]
