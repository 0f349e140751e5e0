"""The least number of tokens of a long text: never more than the tokenizer gives it."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.model.text_length import BYTES, MOST_COMPOSED, LeastTokens
from engines.model.tokenizer import LONG_TEXT, Tokenizer
from tests.fakes.random_models import BUNDLED, copy_tokenizer

BUNDLED_FORM: dict[str, Any] = json.loads((BUNDLED / "tokenizer.json").read_text())
PIECES = (
    "the",
    " the",
    "  ",
    "\n",
    "\t",
    "é",
    "e\u0301",
    "\u1fbe\u0308\u0301",
    "\u2126\u0313\u0300\u0345",
    "東京",
    "🦊",
    "<|end|>",
    "x1",
)


def made(**changes: Any) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(BUNDLED_FORM | changes))


@cache
def sentence_pieces(byte_fallback: bool = True) -> tokenizers.Tokenizer:
    """As Llama 2's: blanks are written as ▁, and what has no token is spelt in bytes."""
    words = ["<unk>", *BYTES, "▁", "t", "h", "e", "▁t", "▁th", "▁the", "東"]
    merges = [["▁", "t"], ["▁t", "h"], ["▁th", "e"]]
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": byte_fallback, "merges": merges}
    normalizer = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    form: dict[str, Any] = {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": None}
    return tokenizers.Tokenizer.from_str(
        json.dumps(form | {"model": model | {"vocab": {word: i for i, word in enumerate(words)}}})
    )


@cache
def swallowing() -> tokenizers.Tokenizer:
    """As Phi-3's: a special token takes all blanks behind it."""
    first, *others = BUNDLED_FORM["added_tokens"]
    return made(added_tokens=[first | {"rstrip": True}, *others])


@cache
def swallowing_before() -> tokenizers.Tokenizer:
    first, *others = BUNDLED_FORM["added_tokens"]
    return made(added_tokens=[first | {"lstrip": True}, *others])


@cache
def composing() -> tokenizers.Tokenizer:
    return made(normalizer={"type": "NFC"})


BOUNDING: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytes": cache(made),
    "pieces": sentence_pieces,
    "swallows": swallowing,
    "composes": composing,
}


@pytest.mark.parametrize("form", BOUNDING)
@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=4).filter(str.isprintable), max_size=30), st.integers(1, 40))
def test_no_text_has_fewer_tokens(form: str, pieces: list[str], n_times: int) -> None:
    tokenizer = BOUNDING[form]()
    text = "".join(pieces) * n_times
    least = LeastTokens(tokenizer).of(text)
    assert least <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("form", BOUNDING)
def test_a_long_text_has_many(form: str) -> None:
    """Letters alone: of n of them no token takes more than the longest of its vocabulary, which has below 16 bytes."""
    assert LeastTokens(BOUNDING[form]()).of("z" * 160_000) >= 10_000


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (lambda: sentence_pieces(byte_fallback=False), "z" * 10_000),
        (lambda: made(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}), "\n" * 10_000),
        (
            lambda: made(
                normalizer={"type": "Replace", "pattern": {"Regex": "z+"}, "content": "z"},
            ),
            "z" * 10_000,
        ),
        (lambda: made(normalizer={"type": "Replace", "pattern": {"String": "zz"}, "content": ""}), "z" * 10_000),
        (
            lambda: made(
                pre_tokenizer={
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Split", "pattern": {"String": "z"}, "behavior": "Removed", "invert": False},
                        BUNDLED_FORM["pre_tokenizer"],
                    ],
                }
            ),
            "z" * 10_000,
        ),
        (lambda: made(pre_tokenizer={"type": "WhitespaceSplit"}), " " * 10_000),
        (
            lambda: made(
                model=BUNDLED_FORM["model"]
                | {"vocab": {k: v for k, v in BUNDLED_FORM["model"]["vocab"].items() if k == "a"}, "merges": []}
            ),
            "z" * 10_000,
        ),
        (lambda: made(model=BUNDLED_FORM["model"] | {"continuing_subword_prefix": "##", "merges": []}), "z" * 10_000),
        (swallowing, "<|end|>" + " " * 10_000),
        (swallowing_before, " " * 10_000 + "<|end|>"),
    ],
    ids=(
        "unknown in one",
        "strips",
        "replaces runs",
        "replaces",
        "removes",
        "blanks",
        "bytes without tokens",
        "parts",
        "token",
        "token behind",
    ),
)
def test_what_may_be_swallowed_bounds_nothing(tokenizer: Callable[[], tokenizers.Tokenizer], text: str) -> None:
    """Each of these gives ten thousand characters next to no token."""
    own = tokenizer()
    assert len(own.encode(text, add_special_tokens=False).ids) <= 2
    assert LeastTokens(own).of(text) <= 1


def test_no_character_is_composed_of_more_bytes() -> None:
    """Of every character that NFC leaves: the longest spelling of each part of it. Behind these none has parts."""
    longest: dict[str, int] = {}
    characters = [c for c in map(chr, range(0x30000)) if not 0xD800 <= ord(c) < 0xE000]
    for c in characters:
        parts = unicodedata.normalize("NFD", c)
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), len(c.encode()))
    spelt = {c: sum(longest[part] for part in unicodedata.normalize("NFD", c)) / len(c.encode()) for c in characters}
    worst = max((c for c in characters if unicodedata.is_normalized("NFC", c)), key=spelt.__getitem__)
    assert (worst, spelt[worst]) == ("\u0390", 3.5)
    assert spelt[worst] <= MOST_COMPOSED


def test_a_short_text_is_not_looked_at(tmp_path: Path) -> None:
    copy_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path, "model", (), 2048)
    assert tokenizer.least_tokens("z" * (LONG_TEXT - 1)) == 0
    assert tokenizer.least_tokens("z" * LONG_TEXT) > 0
