"""Streamed text of tokenizers that have a token for each byte (Llama 2's kind)."""

from __future__ import annotations

import itertools

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from engines.model.tokenizer import Tokenizer
from engines.serving.pieces import TextPieces

BEGIN, BLANK_A, B = 256, 257, 258
WORDS = [[BEGIN], [BLANK_A], [B], [0xC3, 0xA9], [0xFF], [0xE4]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<s>": BEGIN, "\u2581a": BLANK_A, "b": B}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    made.add_special_tokens(["<s>"])
    steps = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    made.decoder = tokenizers.decoders.Sequence(steps)
    folder = tmp_path_factory.mktemp("bytes")
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder, "bytes", (), B + 1)


@given(words=st.lists(st.sampled_from(WORDS), max_size=12))
def test_pieces_of_byte_tokens_are_the_beginning_of_the_whole_text(
    tokenizer: Tokenizer, words: list[list[int]]
) -> None:
    """One byte that is no text turns its whole run into replacement characters, over a special token too."""
    token_ids = list(itertools.chain.from_iterable(words))
    pieces = TextPieces(tokenizer.decode, (), tokenizer.open_ids)
    told = "".join(map(pieces.add, token_ids))
    assert tokenizer.decode(token_ids).startswith(told)


def test_a_run_of_byte_tokens_is_told_with_the_next_token_that_is_none(tokenizer: Tokenizer) -> None:
    pieces = TextPieces(tokenizer.decode, (), tokenizer.open_ids)
    assert [pieces.add(token) for token in (B, 0xC3, 0xA9, BLANK_A, B)] == ["b", "", "", "é a", "b"]


def test_a_line_ends_at_once_and_a_long_run_is_told_as_far_as_it_is_whole(tokenizer: Tokenizer) -> None:
    """Llama 2 ends a line with a byte, and some scripts have no other tokens."""
    pieces = TextPieces(tokenizer.decode, (), tokenizer.open_ids)
    assert [pieces.add(token) for token in (B, 0x0A)] == ["b", "\n"]
    told = [pieces.add(token) for token in (0xC3, 0xA9) * 20]
    assert told == [""] * 33 + ["\u00e9" * 17] + ["", "\u00e9"] * 3
