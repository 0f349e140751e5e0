from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engines.errors import EngineError
from engines.model.tokenizer import Tokenizer
from tests.fakes.random_models import BUNDLED, copy_bundled, copy_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How far is 12 miles, in km?"},
]
TEXTS = ["The fox reads 1234 maps.", "  two  spaces\n\nand lines\t", "Zürich — 東京 🦊", "a<|end|>b", ""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy_tokenizer(tmp_path)
    return tmp_path


def read(folder: Path, embedding_rows: int = 2048) -> Tokenizer:
    return Tokenizer(folder, "model", (), embedding_rows)


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_agree_with_transformers(text: str) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(BUNDLED), read(BUNDLED)
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_long_text_lets_other_threads_run_and_has_the_tokens_that_transformers_gives_it() -> None:
    """The binding held on to Python for seconds with 4 MB of text, and every other client of a server waited."""
    from transformers import AutoTokenizer

    text = "A line of a long prompt, with 12 numbers and naïve words.\n" * 3000
    tokenizer, ended = read(BUNDLED), threading.Event()
    pauses_s: list[float] = []

    def run() -> None:
        seen_s = time.monotonic()
        while not ended.wait(0.001):
            now_s = time.monotonic()
            pauses_s.append(now_s - seen_s)
            seen_s = now_s

    other = threading.Thread(target=run)
    other.start()
    begun_s = time.monotonic()
    ids = tokenizer.encode(text)
    took_s = time.monotonic() - begun_s
    ended.set()
    other.join()
    assert max(pauses_s, default=took_s) < 0.6 * took_s
    assert ids == AutoTokenizer.from_pretrained(BUNDLED).encode(text, add_special_tokens=False)


def test_chat_agrees_with_transformers() -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(BUNDLED)
    assert read(BUNDLED).chat(MESSAGES) == theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )


def ask_for_begin_token(folder: Path) -> None:
    """The file's post-processor puts <|end|> before every text, as Llama's puts its begin token."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
    }
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))


def test_a_prompt_begins_as_the_tokenizer_begins_texts_by_default(folder: Path) -> None:
    from transformers import AutoTokenizer

    ask_for_begin_token(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = read(folder)
    for text in TEXTS:
        assert ours.encode_prompt(text) == theirs.encode(text, truncation=False)
    assert ours.encode_prompt(TEXTS[0])[0] == 0
    assert ours.encode_prompt("<|end|>a") == ours.encode("<|end|>a")
    assert read(BUNDLED).encode_prompt(TEXTS[0]) == read(BUNDLED).encode(TEXTS[0])


def test_no_begin_or_end_token_is_added_to_a_bare_text_even_where_the_file_asks_for_one(folder: Path) -> None:
    ask_for_begin_token(folder)
    assert read(folder).encode(TEXTS[0]) == read(BUNDLED).encode(TEXTS[0])


def test_the_tokenizers_own_end_token_ends_answers_beside_those_that_the_model_names(folder: Path) -> None:
    assert read(folder).eos_token_ids == (0,)
    assert Tokenizer(folder, "model", (7, 9), 2048).eos_token_ids == (0, 7, 9)
    change_config(folder, eos_token={"content": "<|user|>", "special": True})
    assert read(folder).eos_token_ids == (1,)
    change_config(folder, eos_token=None)
    assert read(folder).eos_token_ids == ()


def test_the_first_of_several_end_tokens_is_the_one_that_transformers_reads_from_the_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    found = Tokenizer(folder, "model", (7, 0, 9), 2048).eos_token_ids
    assert found[0] == AutoTokenizer.from_pretrained(folder).eos_token_id
    assert found == (0, 7, 9)


def test_begin_token_is_the_one_that_transformers_reads_from_the_config(folder: Path) -> None:
    from transformers import AutoTokenizer

    assert read(folder).bos_token_id is None
    change_config(folder, bos_token="<|user|>")
    assert read(folder).bos_token_id == AutoTokenizer.from_pretrained(folder).bos_token_id == 1


def test_vocabulary_size_is_the_tokenizers_not_the_embeddings() -> None:
    assert read(BUNDLED, embedding_rows=3000).vocabulary_size == 2048


def test_name_tells_tokenizers_apart(folder: Path) -> None:
    before = read(folder).name
    path = folder / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    assert before.startswith("model@")
    assert read(folder).name != before


def test_templates_are_found_in_file_list_and_config_in_this_order(folder: Path) -> None:
    change_config(
        folder,
        chat_template=[
            {"name": "tool_use", "template": "wrong"},
            {"name": "default", "template": "{{ messages|length }} turns {{ eos_token }}"},
        ],
    )
    assert read(folder).chat(MESSAGES) == "2 turns <|end|>"
    (folder / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.role|tojson }}\n{% endfor %}\n")
    assert read(folder).chat(MESSAGES) == '"system"\n"user"\n'


def test_tokens_that_only_the_config_names_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    def token(content: str, special: bool) -> dict[str, Any]:
        flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
        return {"content": content, "special": special, **flags}

    named = {"2048": token("<|im_start|>", True), "2049": token("<|im_end|>", True), "2050": token("<think>", False)}
    before = read(folder, 2100)
    change_config(folder, added_tokens_decoder=named)
    theirs, ours = AutoTokenizer.from_pretrained(folder), read(folder, 2100)
    text = "<|im_start|>user\nhi <think>so</think><|im_end|>\n"
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text) == ids != before.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocabulary_size == 2051
    assert ours.name != before.name, "equal names mean equal ids"
    assert read(folder, 2049).vocabulary_size == 2049, "the model has rows for one of them"
    change_config(folder, added_tokens_decoder={"2060": token("<|im_start|>", True)})
    with pytest.raises(EngineError, match=r"'<\|im_start\|>' is number 2060 there, and number 2048"):
        read(folder, 2100)


TEMPLATES = {
    "indented JSON": "{{ messages | tojson(indent=4) }}",
    "sorted JSON": "{{ messages | tojson(separators=(',', ':'), sort_keys=True, ensure_ascii=True) }}",
    "answers marked for training": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}\n"
    "{{ m.content }} {{ x }}{% endgeneration %}{{ x }}{% endfor %}",
    "tools that are none": "{{ tools is none }} {{ documents is none }} {{ tools is defined }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_template_finds_what_transformers_gives_it(folder: Path, template: str) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(BUNDLED)
    change_config(folder, chat_template=template)
    assert read(folder).chat(MESSAGES) == theirs.apply_chat_template(
        MESSAGES, chat_template=template, tokenize=False, add_generation_prompt=True
    )


def test_template_that_asks_for_the_date_makes_the_same_prompt_every_day(folder: Path) -> None:
    """As GPT-OSS's does; Llama 3's asks only where it is there, and has a day of its own otherwise."""
    change_config(folder, chat_template="Current date: {{ strftime_now('%Y-%m-%d') }}, {{ strftime_now('%H:%M') }}")
    assert read(folder).chat(MESSAGES) == "Current date: 2025-01-01, 00:00"
    change_config(folder, chat_template="{{ strftime_now.__self__.year }}")
    with pytest.raises(EngineError, match="unsafe"):
        read(folder).chat(MESSAGES)


def test_model_without_a_template_gets_plain_turns(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    assert read(folder).chat(MESSAGES) == "system: Be brief.\nuser: How far is 12 miles, in km?\nassistant:"


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ raise_exception('no system turn') }}", "no system turn"), ("{% for %}", "chat template of model@")],
)
def test_template_that_refuses_or_is_broken_is_an_engine_error(folder: Path, template: str, message: str) -> None:
    change_config(folder, chat_template=template)
    with pytest.raises(EngineError, match=message):
        read(folder).chat(MESSAGES)


def test_template_cannot_reach_python(folder: Path) -> None:
    change_config(folder, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(EngineError, match="unsafe"):
        read(folder).chat(MESSAGES)


def test_ids_beyond_the_embedding_are_refused(folder: Path) -> None:
    with pytest.raises(EngineError, match=r"tokenizer does not match the model: ids up to 2047, embedding rows 2047"):
        read(folder, embedding_rows=2047)
    with pytest.raises(EngineError, match=r"tokenizer does not match the model: end tokens \[5000\]"):
        Tokenizer(folder, "model", (5000,), 2048)


def test_absent_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no tokenizer\.json"):
        read(tmp_path)
    copied = copy_bundled(tmp_path / "copy")
    (copied / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineError, match=r"tokenizer\.json: not a tokenizer"):
        read(copied)
