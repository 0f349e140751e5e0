"""Shapes of published models against what their config.json files say, and against the parameters of their pages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engines.errors import EngineError
from engines.model.model_config import parse_model_config
from engines.model.quantised import FORMS, Form, Quantisation, bits_of_value, store
from engines.pricing.attention import attention
from engines.pricing.model_shape import LatentShape, ModelShape, WeightBits
from engines.pricing.priced_step import PricedStep
from engines.pricing.schedule import lm_head
from engines.pricing.shapes import NAMED_SHAPES, config_of_shape, own_shape, quantised, shape_named, sizes_of
from tests.fakes.published import PUBLISHED

TELLS = {
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "gemma-2-2b": "gemma-2-2b",
    "Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "OLMoE-1B-7B-0924": "olmoe-1b-7b",
    "Qwen1.5-MoE-A2.7B": "qwen1.5-moe-a2.7b",
    "Phi-3.5-MoE-instruct": "phi-3.5-moe",
    "Phi-tiny-MoE-instruct": "phi-tiny-moe",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "deepseek-moe-16b-base": "deepseek-moe-16b",
    "DeepSeek-V2-Lite": "deepseek-v2-lite",
    "DeepSeek-V3": "deepseek-v3",
    "GLM-4.5-Air": "glm-4.5-air",
    "GLM-4.7-Flash": "glm-4.7-flash",
    "Llama-4-Scout-17B-16E": "llama-4-scout",
}
PARAMETERS_B = {
    "dbrx": 132.0, "deepseek-v2": 236.0, "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09,
    "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21,
}  # fmt: skip
"""As their pages have it, of those whose whole config is not among the published ones here."""


@pytest.mark.parametrize("published", TELLS)
def test_a_named_shape_is_what_its_config_says(published: str) -> None:
    config = parse_model_config(PUBLISHED[published].config, None)
    named = NAMED_SHAPES[TELLS[published]]
    assert own_shape(named.name, config) == named


def test_every_named_shape_is_held_against_something() -> None:
    assert set(NAMED_SHAPES) == {*TELLS.values(), *PARAMETERS_B}


@pytest.mark.parametrize("name", NAMED_SHAPES)
def test_parameters_are_those_of_the_models_page(name: str) -> None:
    """Without norms and biases: within 1 %."""
    known = {TELLS[one]: float(PUBLISHED[one].parameters_b) for one in TELLS} | PARAMETERS_B
    assert NAMED_SHAPES[name].parameters.total / 1e9 == pytest.approx(
        known[name], rel=0.02 if name == "glm-4.7-flash" else 0.01
    )


def test_a_shape_is_read_from_a_config_on_disk(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED["GLM-4.7-Flash"].config))
    read = shape_named(str(folder / "config.json"))
    assert read.name == "my-model"
    assert read.latent == LatentShape(768, 512, 192, 64, 256)
    assert shape_named(str(folder)) == read
    other = tmp_path / "glm.json"
    other.write_bytes((folder / "config.json").read_bytes())
    assert shape_named(str(other)) == replace(read, name="glm")
    assert [config_of_shape(str(one)) for one in (folder, other, "dbrx")] == [folder / "config.json", other, None]
    other.write_text(json.dumps(PUBLISHED["GLM-4.7-Flash"].config | {"quantization_config": {"quant_method": "gptq"}}))
    assert shape_named(str(other)) == replace(read, name="glm"), "no weights are read, so their form is no matter"
    with pytest.raises(EngineError, match=r"no config\.json"):
        shape_named(str(tmp_path))
    with pytest.raises(EngineError, match=r"no config\.json"):
        shape_named(str(tmp_path / "absent" / "config.json"))
    with pytest.raises(EngineError, match=r"no shape 'mixtral'.*mixtral-8x7b.*path of its config.json"):
        shape_named("mixtral")


# --- latent attention ------------------------------------------------------------------------------------------------


def test_latent_attention_of_deepseek_v2_by_its_paper() -> None:
    """DeepSeek-V2 (arXiv 2405.04434, Table 1): 9/2 d_h values a token and layer are cached, d_h = 128. Its queries pass
    1536, its values come to 128 heads of 128."""
    shape = NAMED_SHAPES["deepseek-v2"]
    assert shape.cached_values == 9 * 128 / 2
    by_hand = 5120 * 1536 + 1536 * 128 * 192 + 5120 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 5120
    assert shape.attention_weights == by_hand


def test_decoding_works_on_the_latent_and_a_prompt_expands_it() -> None:
    """One head of 2 + 1 and values of 4, a latent of 3, by hand. Decoding over 100 keys: scores of 3 + 1 and sums of 3.
    A prompt of 100 at once: scores of 2 + 1 and sums of 4."""
    shape = ModelShape("toy", 1, 8, 1, 1, 3, 8, 0, 0, 0, 16, latent=LatentShape(None, 30, 2, 1, 4))
    weights = 8 * 3 + 8 * 31 + 30 * 6 + 4 * 8
    assert shape.attention_weights == weights
    decoding = shape.attention_work(1, 100)
    assert decoding == (2 * weights, 2 * (30 + 1 + 30))
    prompt = shape.attention_work(100, 100)
    assert prompt == (2 * 100 * weights, 2 * (2 + 1 + 4))


def test_a_chunk_behind_a_prompt_expands_what_is_cached_again() -> None:
    shape = ModelShape("toy", 1, 8, 1, 1, 3, 8, 0, 0, 0, 16, latent=LatentShape(None, 30, 2, 1, 4))
    chunk = shape.attention_work(50, 100)
    assert chunk == (2 * 50 * shape.attention_weights + 2 * 50 * 30 * 6, 2 * (2 + 1 + 4))


def test_the_cache_of_latent_attention_is_read_once_for_each_sequence() -> None:
    shape = NAMED_SHAPES["glm-4.7-flash"]
    (one,) = attention(PricedStep(4, 1000, "decode", 4), shape, "gpu", apart=False, reads=True)
    assert one.moved_bytes == 4 * 1000 * (512 + 64) * 2
    assert one.weight_bytes == shape.attention_weights * 2


# --- widths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_bits_of_a_stored_value_are_those_that_storing_takes(form: Form) -> None:
    stored = store(torch.randn(16, 256), form)
    assert 8 * stored.nbytes / (16 * 256) == pytest.approx(bits_of_value(form, 256))


def test_narrow_weights_are_narrow_and_activations_stay() -> None:
    shape = NAMED_SHAPES["qwen3-30b-a3b"]
    narrow = quantised(shape, Quantisation(experts="int4-g64", head="int8"))
    assert narrow.bits == WeightBits(4.5, 16.0, 16.0, 8 + 32 / 2048)
    assert narrow.expert_bytes == 3 * 2048 * 768 * 4.5 / 8
    assert lm_head(1, narrow).weight_bytes == 2048 * 151936 * (8 + 32 / 2048) / 8
    assert narrow.attention_bytes == shape.attention_bytes == shape.attention_weights * 2
    sizes = sizes_of(narrow)
    assert sizes is not None
    assert (sizes.expert_bytes, sizes.activation_bytes) == (3 * 2048 * 768 * 4.5 / 8, 2)


def test_latent_attentions_expansion_is_never_narrow() -> None:
    shape = quantised(NAMED_SHAPES["deepseek-v3"], Quantisation(attention="int4-g32"))
    kept = 512 * 128 * 256
    assert shape.attention_bytes == (shape.attention_weights - kept) * 5 / 8 + kept * 2
