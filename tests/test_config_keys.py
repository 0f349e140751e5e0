"""What a family reads of its config, and what it takes absence for, against transformers' own classes and logits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engines.config_keys import CHANGES_NO_NUMBER, FAMILY_KEYS, GPT_OSS_ROPE, READ_OF_EVERY_FILE
from engines.errors import EngineError
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
        planted = {**raw, key: values_by_key()[key][-1] if values_by_key()[key] else 3}
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
    scale = max(1.0, float(expected.std()))
    assert (peers.ours(raw, folder) - expected).abs().max() < 1e-4 * scale, told
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
