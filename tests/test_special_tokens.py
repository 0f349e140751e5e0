"""Tokens that other files than tokenizer.json name, against what transformers makes of the same folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.errors import EngineError
from engines.model.checkpoints import inspect_checkpoint
from engines.model.tokenizer import Tokenizer
from tests.fakes.random_models import copy_tokenizer

ROWS = 2100
TEXTS = (
    "a<|end|>b",
    "<|im_start|>user\nhi <think>so</think><|im_end|>\n",
    "x <|im_end|> y",
    " the fox <img> the <|user|>",
)
MESSAGES = [{"role": "user", "content": "How far is it?"}]
CHATML = {"<|im_start|>": 2048, "<|im_end|>": 2049, "<think>": 2050}


def token(content: str, special: bool = True) -> dict[str, Any]:
    return {"content": content, "special": special, "lstrip": False, "rstrip": False, "normalized": False}


FOLDERS: dict[str, dict[str, dict[str, Any]]] = {
    "added_tokens.json": {"added_tokens.json": CHATML},
    "added_tokens.json of special ones": {
        "added_tokens.json": CHATML,
        "special_tokens_map.json": {"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]},
    },
    "special_tokens_map.json over the config": {
        "special_tokens_map.json": {"eos_token": token("<|user|>"), "bos_token": "<|system|>", "pad_token": "<img>"}
    },
    "neither where the config numbers tokens": {
        "added_tokens.json": CHATML,
        "special_tokens_map.json": {"eos_token": "<|user|>"},
        "tokenizer_config.json": {"added_tokens_decoder": {"2048": token("<think>", special=False)}},
    },
    "additional_special_tokens": {
        "tokenizer_config.json": {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "the"]}
    },
    "more than the config numbers": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {"2048": token("<|im_end|>")},
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        }
    },
    "tokens of named uses": {
        "tokenizer_config.json": {"extra_special_tokens": {"image_token": "<img>"}, "think_token": "<think>"}
    },
    "an end token that is new": {"tokenizer_config.json": {"eos_token": "<|im_end|>", "pad_token": "<img>"}},
    "special tokens asked in pieces": {"tokenizer_config.json": {"split_special_tokens": True}},
}


def write(folder: Path, files: dict[str, dict[str, Any]]) -> Path:
    copy_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for name, content in files.items():
        known = config if name == "tokenizer_config.json" else {}
        (folder / name).write_text(json.dumps({**known, **content}))
    return folder


def read(folder: Path, rows: int = ROWS) -> Tokenizer:
    return Tokenizer(folder, "model", (), rows)


def peer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def assert_as_transformers(folder: Path) -> None:
    theirs, ours = peer(folder), read(folder)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids
        assert ours.encode_prompt(text) == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.spell(ids) == theirs.decode(ids)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.vocabulary_size == len(theirs)


@pytest.mark.parametrize("files", FOLDERS.values(), ids=FOLDERS)
def test_tokens_named_beside_the_tokenizer_are_those_of_transformers(
    files: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    assert_as_transformers(write(tmp_path, files))


def test_an_end_token_that_is_only_a_word_of_the_vocabulary_is_one_token(tmp_path: Path) -> None:
    """Files of old have no list of added tokens."""
    folder = write(tmp_path, {})
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<|end|>"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert_as_transformers(folder)
    assert read(folder).encode("a<|end|>b")[1] == 0


def test_tokens_without_a_row_in_the_model_are_left_out(tmp_path: Path) -> None:
    files = {"tokenizer_config.json": {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}}
    folder = write(tmp_path, files)
    assert [read(folder, rows).vocabulary_size for rows in (2048, 2049, 2050)] == [2048, 2049, 2050]


def test_tokenizers_of_other_tokens_have_other_names(tmp_path: Path) -> None:
    found = []
    for i, files in enumerate(FOLDERS.values()):
        folder = tmp_path / str(i)
        folder.mkdir()
        found.append(read(write(folder, files)).name)
    assert found[0] == found[1], "the same ids: special or not, a token is read alike"
    assert len({*found}) == len(FOLDERS) - 1


def test_numbers_that_the_tokenizer_cannot_give_are_told(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"added_tokens\.json: an added token .* number 2060 there, and number 2048"):
        read(write(tmp_path, {"added_tokens.json": {"<think>": 2060}}))
    with pytest.raises(EngineError, match=r"added_tokens\.json: '<think>' has number 'x'"):
        read(write(tmp_path, {"added_tokens.json": {"<think>": "x"}}))


TEMPLATES = {
    "tokens that are there": "{{ eos_token }} {{ bos_token is defined }} {{ pad_token }} {{ image_token }}",
    "a begin token that is not": "{% if bos_token is defined and bos_token is none %}none{% endif %}{{ unk_token }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_template_gets_every_special_token_and_no_other(template: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    said = {"image_token": "<img>", "pad_token": "<|end|>", "chat_template": template}
    folder = write(tmp_path, {"tokenizer_config.json": said})
    theirs = AutoTokenizer.from_pretrained(folder)
    assert read(folder).chat(MESSAGES) == theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )


def test_templates_by_name_are_a_choice_only_where_one_is_the_default(tmp_path: Path) -> None:
    named = {"rag": "wrong", "default": "right"}
    assert read(write(tmp_path, {"tokenizer_config.json": {"chat_template": named}})).chat(MESSAGES) == "right"
    listed = [{"name": name, "template": "wrong"} for name in ("tool_use", "rag")]
    tokenizer = read(write(tmp_path, {"tokenizer_config.json": {"chat_template": listed}}))
    with pytest.raises(EngineError, match=r"has templates rag, tool_use and none is the default; write the one to use"):
        tokenizer.chat(MESSAGES)


TEMPLATE_FILES: dict[str, tuple[str | None, dict[str, str]]] = {
    "a file before the config": ("config", {"chat_template.jinja": "file"}),
    "the folder's default before the file": ("config", {"chat_template.jinja": "file", "default": "more"}),
    "the folder's default before the config": ("config", {"default": "more", "rag": "wrong"}),
    "the file beside others in the folder": ("config", {"chat_template.jinja": "file", "rag": "wrong"}),
    "others in the folder in the place of the config's": ("config", {"rag": "wrong", "tool_use": "wrong"}),
    "the config before the file of older models": ("config", {"chat_template.json": "older"}),
}


@pytest.mark.parametrize("name", TEMPLATE_FILES)
def test_of_several_templates_the_one_that_transformers_takes_is_taken(name: str, tmp_path: Path) -> None:
    said, files = TEMPLATE_FILES[name]
    write(tmp_path, {"tokenizer_config.json": {"chat_template": said}})
    (tmp_path / "additional_chat_templates").mkdir()
    for file, text in files.items():
        if file == "chat_template.json":
            (tmp_path / file).write_text(json.dumps({"chat_template": text}))
        else:
            (tmp_path / (file if "." in file else f"additional_chat_templates/{file}.jinja")).write_text(text)
    theirs, ours = peer(tmp_path), read(tmp_path)
    if isinstance(theirs.chat_template, dict) and "default" not in theirs.chat_template:
        with pytest.raises(ValueError, match="no default specified"):
            theirs.apply_chat_template(MESSAGES, tokenize=False)
        with pytest.raises(EngineError, match=r"has templates rag, tool_use and none is the default"):
            ours.chat(MESSAGES)
    else:
        assert theirs.apply_chat_template(MESSAGES, tokenize=False) == ours.chat(MESSAGES)


def test_the_template_of_an_older_model_that_also_sees_is_its_own(tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer_config.json": {"chat_template": None}})
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "older"}))
    tokenizer = read(tmp_path)
    assert tokenizer.has_chat_template
    assert tokenizer.chat(MESSAGES) == "older"


@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize(
    "named", ["GPT2Tokenizer", "GPTNeoXTokenizerFast", "Qwen2Tokenizer", "PreTrainedTokenizerFast"]
)
def test_a_blank_before_a_text_is_as_in_transformers_or_told(named: str, said: bool, tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer_config.json": {"tokenizer_class": named, "add_prefix_space": said}})
    if said and named != "PreTrainedTokenizerFast":
        assert peer(tmp_path).encode("the fox") == peer(tmp_path).encode(" the fox")
        with pytest.raises(EngineError, match=r"add_prefix_space True contradicts tokenizer\.json"):
            read(tmp_path)
    else:
        assert read(tmp_path).encode("the fox") == peer(tmp_path).encode("the fox")


def test_a_gguf_file_names_the_tokens_that_were_added(tmp_path: Path) -> None:
    """Or programs that are asked in text would cut them into pieces."""
    gguf = pytest.importorskip("gguf", reason="the package gguf writes the model")
    from engines.external.gguf_vocabulary import add_vocabulary

    folder, path = write(tmp_path, {"added_tokens.json": CHATML}), tmp_path / "vocabulary.gguf"
    facts = inspect_checkpoint("bundled:tiny-qwen3-moe")
    facts = replace(facts, folder=folder, tokenizer=read(folder), config=replace(facts.config, vocabulary_size=ROWS))
    writer = gguf.GGUFWriter(path, "llama")
    add_vocabulary(writer, facts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = gguf.GGUFReader(path).fields
    texts, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    assert texts[2048:2052] == [*CHATML, "[PAD2051]"]
    assert {*kinds[2048:2051]} == {gguf.TokenType.USER_DEFINED}
    assert (texts[0], kinds[0]) == ("<|end|>", gguf.TokenType.CONTROL)
