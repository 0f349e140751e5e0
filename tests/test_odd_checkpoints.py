"""JSON of the right grammar and the wrong meaning, everywhere in a model folder: an error that can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.base import unheard
from engines.errors import EngineError
from engines.model.checkpoints import Checkpoint, inspect_checkpoint, load_checkpoint
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from results.messages import HEAD, TAIL, readable
from results.records import Request, Sampling
from tests.fakes.random_models import copy_bundled

LONG = 300_000
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, 10**400, 1.5, "", "x" * LONG, "\ud800", "a\x1b[31m\n", [], {}, ["F32"], {"a": 1}, [[]],
)  # fmt: skip
REMOVED = object()
FILES = ("generation_config.json", "tokenizer_config.json", "tokenizer.json")
NOT_BUNDLED: dict[str, Any] = {
    "model.safetensors.index.json": {"metadata": {"total_size": 5}, "weight_map": {"a": "model.safetensors"}},
    "special_tokens_map.json": {"eos_token": {"content": "<|end|>"}, "extra_special_tokens": ["<|user|>"]},
    "added_tokens.json": {"<|user|>": 1, "<new>": 2048},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_bundled(tmp_path / "model")


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The first few of every object and list."""
    yield at
    if isinstance(tree, dict):
        for key in list(tree)[:9]:
            yield from places(tree[key], (*at, key))
    elif isinstance(tree, list):
        for index in range(min(len(tree), 2)):
            yield from places(tree[index], (*at, index))


def changed(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    if value is REMOVED and len(at) == 1:
        del copy[at[0]]
    else:
        copy[at[0]] = changed(copy[at[0]], at[1:], value)
    return copy


def assert_loads_or_tells(folder: Path) -> bool:
    """Whether it was refused; anything but our error passes through and fails the test."""
    told = ""
    try:
        inspect_checkpoint(str(folder))
    except EngineError as error:
        told = str(error)
    assert len(told) < 1.1 * (HEAD + TAIL)
    assert all(c.isprintable() or c == "\n" for c in told)
    return bool(told)


@pytest.mark.parametrize("name", [*FILES, *NOT_BUNDLED])
def test_odd_values_in_json_files_are_told(name: str, folder: Path) -> None:
    path = folder / name
    tree = NOT_BUNDLED[name] if name in NOT_BUNDLED else json.loads(path.read_text())
    if name == "tokenizer.json":  # the vocabulary makes it long, and one entry of it is like another
        tree["model"]["merges"] = tree["model"]["merges"][:3]
        tree["model"]["vocab"] = dict(list(tree["model"]["vocab"].items())[:300])
    tried = refused = 0
    for at in places(tree):
        for value in (*ODD, REMOVED) if at else ODD:
            path.write_text(json.dumps(changed(tree, at, value)))
            refused += assert_loads_or_tells(folder)
            tried += 1
    assert tried > 30
    assert refused > tried / 10, "odd values that nothing minds would show that nothing reads the file"


def test_odd_values_in_a_tensor_header_are_told(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    tree = json.loads(content[8 : 8 + length])
    tree = {name: tree[name] for name in list(tree)[:3]}
    for at in places(tree):
        for value in (*ODD, REMOVED) if at else ODD:
            header = json.dumps(changed(tree, at, value)).encode()
            path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
            assert assert_loads_or_tells(folder)


@pytest.mark.parametrize("dtype", [["F32"], {}, 5, None])
def test_dtype_that_is_no_text_is_told(dtype: Any, folder: Path) -> None:
    path = folder / "model.safetensors"
    header = json.dumps({"w": {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(EngineError, match="tensor 'w' has dtype "):
        inspect_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "x" * 300, "a\0b", "\ud800", ""])
def test_index_names_files_of_its_own_folder_only(name: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(EngineError, match=r"weight_map names .*, no file of this folder"):
        inspect_checkpoint(str(folder))


def test_chat_template_that_is_not_utf8_is_told(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }} \xff")
    with pytest.raises(EngineError, match=r"chat_template\.jinja: not UTF-8 \(.*\); fetch the file again"):
        inspect_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError: "),
        ("{{ messages + 1 }}", "TypeError: "),
        ("{{ 'x'.encode('no such') }}", "LookupError: "),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError: "),
    ],
)
def test_template_that_fails_as_a_program_does_is_told(template: str, words: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = inspect_checkpoint(str(folder)).tokenizer
    with pytest.raises(EngineError, match=f"chat template of .*: {words}"):
        tokenizer.chat([{"role": "user", "content": "hello"}])


def test_text_that_is_not_unicode_is_told(folder: Path) -> None:
    tokenizer = inspect_checkpoint(str(folder)).tokenizer
    for encode in (tokenizer.encode, tokenizer.encode_prompt):
        with pytest.raises(EngineError, match=r"a text of 3 characters .* is it whole Unicode"):
            encode("a\ud800b")


def test_message_keeps_its_ends_and_steers_no_terminal() -> None:
    long = readable("what: " + "x" * LONG + "; the remedy")
    assert long.startswith("what: xxx")
    assert long.endswith("xxx; the remedy")
    assert len(long) < 1.1 * (HEAD + TAIL)
    assert readable("red \x1b[31m \ud800 line\nnext") == "red \\x1b[31m \\ud800 line\nnext"
    assert readable("plain, with ä and 語") == "plain, with ä and 語"


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sampling": Sampling(temperature=1.0, seed=2**70)}, "seed 1180591620717411303424 has more than 64 bits"),
        ({"sampling": Sampling(temperature=1.0, seed=-(2**63) - 1)}, "has more than 64 bits"),
        ({"sampling": Sampling(temperature=1e-320)}, "temperature 1e-320 is below 1e-06"),
        ({"stop": ("\n", "a\ud800")}, r"stop string 'a\\ud800' holds half a character"),
        ({"prompt_ids": (2**70,)}, "holds token id 1180591620717411303424"),
    ],
)
def test_values_that_no_generation_can_take_are_refused(fields: Any, words: str, checkpoint: Checkpoint) -> None:
    asked = {"request_id": "r", "sample_id": "s", "kind": "generate", "prompt_ids": (5,), "max_new_tokens": 2}
    engine = ReferenceEngine(checkpoint, DroplessParameters())
    with pytest.raises(EngineError, match=words):
        engine.run(Request(**(asked | fields)), unheard)
    with pytest.raises(EngineError, match=words):
        engine.run_batch([Request(**(asked | fields))], unheard)


@pytest.mark.parametrize("seed", [2**64 - 1, -(2**63)])
def test_outermost_seeds_and_the_lowest_temperature_draw(seed: int, checkpoint: Checkpoint) -> None:
    sampling = Sampling(temperature=1e-6, seed=seed)
    asked = Request(
        request_id="r", sample_id="s", kind="generate", prompt_ids=(5,), max_new_tokens=2, sampling=sampling
    )
    greedy = asked.model_copy(update={"sampling": Sampling()})
    engine = ReferenceEngine(checkpoint, DroplessParameters())
    assert engine.run(asked, unheard).token_ids == engine.run(greedy, unheard).token_ids


@pytest.mark.parametrize("threads", [-1, 0, 10**8, 1.5, True])
def test_thread_counts_that_no_machine_has_are_refused(threads: Any, checkpoint: Checkpoint) -> None:
    with pytest.raises(EngineError, match=f"threads {threads} must be 1 to "):
        ReferenceEngine(checkpoint, DroplessParameters(), threads=threads)


@pytest.mark.parametrize("chunk", [0, 2**70])
def test_chunks_that_no_tensor_can_be_cut_into_are_refused(chunk: int, checkpoint: Checkpoint) -> None:
    with pytest.raises(EngineError, match=f"prefill_chunk {chunk} must be 1 to "):
        ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=chunk)
