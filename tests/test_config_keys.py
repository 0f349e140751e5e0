"""What a family reads of its config, and what it takes absence for, against transformers' own classes and logits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.errors import EngineError
from engines.model.config_keys import FAMILY_KEYS, GPT_OSS_ROPE, READ_OF_EVERY_FILE
from engines.model.idle_keys import CHANGES_NO_NUMBER, OFF
from engines.model.model_config import parse_model_config
from tests.config_mutations import (
    BASES,
    NOT_MUTATED,
    Peers,
    absent,
    config_class,
    harmless,
    mutations,
    raw_of,
    values_by_key,
)

ONE_OF_EACH = {case.family: case for case in BASES.values()}
NOT_OF_THE_CLASS = {
    # Read by the model, or by its loading, and no field of the class; None of a key is the same as none.
    "Glm4MoeLite": {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    "GptOss": {"rope_parameters": GPT_OSS_ROPE},
}


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_absence_means_what_the_familys_own_class_says(family: str) -> None:
    theirs, keys = config_class(ONE_OF_EACH[family]), FAMILY_KEYS[family + "ForCausalLM"]
    fields = {field.name: field.default for field in dataclasses.fields(theirs)}
    names = {key: alias for alias, key in keys.aliases.items()}
    wanted: dict[str, Any] = {"rope_theta": theirs.default_theta, "partial_rotary_factor": None}
    if "partial_rotary_factor" in keys.absent:
        said = theirs().rope_parameters.get("partial_rotary_factor")
        wanted["partial_rotary_factor"] = None if said == 1 else said
    for key, value in keys.absent.items():
        ours = NOT_OF_THE_CLASS.get(family, {}).get(
            key, wanted.get(key, fields.get(key, fields.get(names.get(key, key))))
        )
        assert value == ours, key


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_every_key_of_the_familys_class_is_known(family: str) -> None:
    """A key that a later transformers adds fails here until somebody has looked at what it does."""
    theirs, keys = config_class(ONE_OF_EACH[family]), FAMILY_KEYS[family + "ForCausalLM"]
    known = {*keys.absent, *keys.only, *keys.aliases, *keys.unread, *CHANGES_NO_NUMBER, *READ_OF_EVERY_FILE}
    assert {field.name for field in dataclasses.fields(theirs)} - known == set()
    for alias, key in theirs.attribute_map.items():
        assert {keys.aliases.get(alias, alias)} == {keys.aliases.get(key, key)}, "two names of one thing"
    assert theirs.model_type in keys.model_types


@pytest.mark.parametrize("name", BASES)
def test_keys_of_other_families_are_named_or_change_nothing(name: str, tmp_path: Path) -> None:
    raw, peers = raw_of(BASES[name]), Peers(BASES[name], tmp_path)
    keys = FAMILY_KEYS[raw["architectures"][0]]
    foreign = {*values_by_key()} - {*keys.absent, *keys.only, *keys.aliases} - NOT_MUTATED - READ_OF_EVERY_FILE
    assert len(foreign - CHANGES_NO_NUMBER) > 20
    for key in foreign:
        values = [value for value in values_by_key()[key] if key not in OFF or value != OFF[key]]
        planted = {**raw, key: values[-1] if values else 3}
        refusal = peers.refusal(planted)
        if key in CHANGES_NO_NUMBER or key in keys.unread:
            assert peers.parsed(planted) == peers.parsed(raw)
        else:
            assert refusal is not None, key
            assert f"'{key}' is" in refusal


def assert_same_logits(peers: Peers, raw: dict[str, Any], told: str) -> bool:
    """False where transformers takes no such file."""
    theirs = peers.theirs(raw)
    if theirs is None:
        return False
    expected, folder = theirs
    bound, ours = 1e-4 * max(1.0, float(expected.std())), peers.ours(raw, folder)
    if (ours - expected).abs().max() >= bound:
        # A deep model of random weights may magnify rounding: transformers' own logits stray from what doubles give by
        # 0.75e-4 in one of 32 layers, on a Zen 3. Doubles decide, by the same bound.
        expected = peers.in_doubles(raw, folder)
    assert (ours - expected).abs().max() < bound, told
    return True


@pytest.mark.numbers
@pytest.mark.parametrize("name", BASES)
def test_logits_agree_where_all_but_sizes_is_absent(name: str, tmp_path: Path) -> None:
    peers = Peers(BASES[name], tmp_path)
    assert assert_same_logits(peers, absent(raw_of(BASES[name]), BASES[name]), "absent")


@pytest.mark.numbers
@pytest.mark.parametrize("name", BASES)
def test_logits_agree_whatever_the_harmless_keys_say(name: str, tmp_path: Path) -> None:
    peers, raw = Peers(BASES[name], tmp_path), raw_of(BASES[name])
    before = peers.theirs(raw)
    assert before is not None
    planted = harmless(raw, BASES[name], 0)
    assert len([key for key in planted if planted[key] != raw.get(key)]) > 40
    assert assert_same_logits(peers, planted, "harmless")
    after = peers.theirs(planted)
    assert after is not None
    assert (after[0] - before[0]).abs().max() < 1e-5, "a key that does change a number stands among the harmless ones"


CONTRADICTS = {
    "Qwen2": {"attention_bias", "qkv_bias", "bias", "use_bias", "add_bias"},
    "Qwen2Moe": {"attention_bias", "bias", "use_bias", "add_bias", "n_shared_experts"},
    "Qwen3": {"use_qk_norm", "qk_norm"},
    "Qwen3Moe": {"use_qk_norm", "qk_norm"},
    "Olmoe": {"use_qk_norm", "qk_norm"},
    "Gemma2": {"use_sliding_window", "embedding_multiplier", "embedding_scale", "scale_emb", "scale_embedding"},
    "Mixtral": {"use_sliding_window", "norm_topk_prob"},
    "GptOss": {"qkv_bias", "mlp_bias", "bias", "use_bias", "add_bias", "norm_topk_prob", "use_sliding_window"},
    "DeepseekV2": {"rope_interleave", "rope_interleaved", "shared_expert_intermediate_size"},
    "DeepseekV3": {"rope_interleaved", "shared_expert_intermediate_size"},
    "Glm4Moe": {"shared_expert_intermediate_size"},
    "Glm4MoeLite": {"rope_interleaved", "shared_expert_intermediate_size"},
    "Llama4": {"rope_interleave", "rope_interleaved", "n_shared_experts", "shared_expert_intermediate_size"},
}
"""What a family of `BASES` does without being asked, or under another name: that it is off is not true of it."""
SAID_OF_THE_CASE = {
    "phi-moe": {"qkv_bias", "bias", "use_bias", "add_bias"},
    "glm4-moe": {"qkv_bias", "bias", "use_bias", "add_bias", "qk_norm"},
    "llama4": {"qk_norm", "moe_layer_freq", "decoder_sparse_step"},
}
"""What these configs ask for under another name: attention_bias, use_qk_norm, every second layer."""


def planted_off(name: str) -> tuple[dict[str, Any], set[str]]:
    """A config with every key that its family lacks at the value at which it computes nothing, and those refused."""
    raw, keys = raw_of(BASES[name]), FAMILY_KEYS[BASES[name].family + "ForCausalLM"]
    lacking = {key: value for key, value in OFF.items() if key not in {*keys.absent, *keys.aliases, *keys.unread, *raw}}
    refused = {key for key, value in lacking.items() if refuses({**raw, key: value}, key)}
    return {**raw, **{key: value for key, value in lacking.items() if key not in refused}}, refused


def refuses(raw: dict[str, Any], key: str) -> bool:
    """Whether there is an error that names the key."""
    try:
        parse_model_config(raw, None)
    except EngineError as error:
        return key in str(error)
    return False


@pytest.mark.numbers
@pytest.mark.parametrize("name", BASES)
def test_keys_at_which_nothing_is_computed_leave_the_logits(name: str, tmp_path: Path) -> None:
    raw = raw_of(BASES[name])
    planted, refused = planted_off(name)
    assert refused == CONTRADICTS.get(BASES[name].family, set()) | SAID_OF_THE_CASE.get(name, set())
    assert len(planted) - len(raw) > 20
    expected = Peers(BASES[name], tmp_path).theirs(raw)
    found = Peers(BASES[name], tmp_path / "planted").theirs(planted)
    assert expected is not None
    assert found is not None
    assert torch.equal(expected[0], found[0]), "transformers makes something of a value that should be off"
    assert assert_same_logits(Peers(BASES[name], tmp_path / "ours"), planted, "off")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mixtral", {"norm_topk_prob": False}),
        ("qwen3", {"use_qk_norm": False}),
        ("qwen2", {"qkv_bias": False}),
        *((name, {"attention_multiplier": 1.0}) for name in BASES),
        ("llama", {"routed_scaling_factor": 1.5}),
        ("llama", {"is_causal": False}),
        ("llama", {"n_group": True}),
        ("llama", {"routed_scaling_factor": False}),
        ("glm4-moe", {"bias": False, "attention_bias": True}),
    ],
)
def test_off_that_is_not_true_of_the_family_stays_an_error(name: str, changes: dict[str, Any]) -> None:
    assert refuses({**raw_of(BASES[name]), **changes}, next(iter(changes)))


def test_window_that_is_switched_off_is_off_where_the_config_has_none() -> None:
    raw = raw_of(BASES["mixtral"])
    assert not refuses({**raw, "use_sliding_window": False, "sliding_window": None}, "use_sliding_window")
    assert refuses({**raw, "use_sliding_window": False, "sliding_window": 7}, "use_sliding_window")


def test_published_files_with_keys_of_their_trainers_are_read() -> None:
    """SmolLM2 and other Llamas of nanotron, gemma-2-27b, Scout's outer file."""
    llama = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}
    for name, changes in (
        ("llama", llama),
        ("gemma2", {"_attn_implementation": "eager"}),
        ("llama", {"quantization_config": {}}),
    ):
        raw = raw_of(BASES[name])
        assert parse_model_config({**raw, **changes}, None) == parse_model_config(raw, None)
    scout = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": raw_of(BASES["llama4"])}
    outer = {"partial_rotary_factor": 1.0, "attention_bias": False}
    assert parse_model_config({**scout, **outer}, None) == parse_model_config(scout, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_each_mutation_is_named_or_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    peers, raw = Peers(BASES[name], tmp_path), raw_of(BASES[name])
    n_named = n_same = 0
    for mutation in mutations(raw):
        refusal = peers.refusal(mutation.raw)
        if refusal is not None:
            assert any(key in refusal for key in mutation.keys), (mutation.told, refusal)
            n_named += 1
            continue
        try:
            n_same += assert_same_logits(peers, mutation.raw, mutation.told)
        except EngineError as error:
            pytest.fail(f"{mutation.told}: {error}")
    assert n_named > 100
    assert n_same > 30
