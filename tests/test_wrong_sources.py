"""Folders and files that are no model as they are: each is told what it is, and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engines.errors import EngineError
from engines.model.checkpoints import inspect_checkpoint
from tests.fakes.random_models import copy_bundled

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_bundled(tmp_path / "model")


def refused(source: Path) -> str:
    with pytest.raises(EngineError) as error:
        inspect_checkpoint(str(source))
    return str(error.value)


@pytest.mark.parametrize("whole", [False, True])
def test_an_adapter_is_refused_also_beside_weights_to_which_transformers_adds_it(whole: bool, folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-30B-A3B"}))
    if not whole:
        (folder / "config.json").unlink()
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    told = refused(folder)
    assert "adapter_config.json: an adapter of 'Qwen/Qwen3-30B-A3B'" in told
    assert "merge it with peft" in told


@pytest.mark.parametrize("above", ["models--owner--name", "."])
def test_a_folder_of_the_hubs_cache_names_the_snapshot_in_it(above: str, folder: Path) -> None:
    cache = folder.parent / "hub"
    snapshot = cache / "models--owner--name" / "snapshots" / COMMIT
    shutil.copytree(folder, snapshot)
    assert refused(cache / above).endswith(f"no config.json; the model lies deeper: name {snapshot}")
    assert inspect_checkpoint(str(snapshot)).config.n_layers > 0


def test_a_folder_of_several_models_names_one(folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "other")
    assert refused(folder.parent).endswith(f"name {folder}, or one of 1 others in it")


def test_a_gguf_file_is_told_where_it_can_be_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "m-Q4_0.gguf")
    for source in (folder / "m-Q4_0.gguf", folder):
        assert 'as model_file of a "llama.cpp" engine' in refused(source)
    (folder / "config.json").unlink()
    assert "no config.json, only m-Q4_0.gguf; name the Hugging Face folder" in refused(folder)


def test_a_file_of_a_model_names_its_folder(folder: Path) -> None:
    assert refused(folder / "model.safetensors").endswith(f"is a file, and a model is a folder; name {folder}")


def test_weights_under_other_names_are_told(folder: Path) -> None:
    (folder / "training_args.bin").write_bytes(b"")
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    assert "only model.fp16.safetensors; rename it to model.safetensors if it is the whole model" in refused(folder)
    shutil.copy(folder / "model.fp16.safetensors", folder / "model-00001-of-00002.safetensors")
    assert refused(folder).endswith("only model-00001-of-00002.safetensors, model.fp16.safetensors; fetch the index")


def test_tensors_of_another_prefix_are_named_beside_the_missing_ones(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({f"language_model.{name}": t for name, t in tensors.items()}, folder / "model.safetensors")
    n = len(tensors)
    assert (
        f"'model.embed_tokens.weight' missing ({n} in all), 'language_model.model.embed_tokens.weight' left over ({n}"
        in refused(folder)
    )


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json"])
def test_a_tokenizer_of_another_form_is_told_how_to_write_it(name: str, folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / name)
    assert f"no tokenizer.json, only {name}; write the model's fast tokenizer" in refused(folder)
