"""How many tokens a text has at the least, told without cutting it into tokens: that takes seconds for megabytes.

No token is longer than the longest of the vocabulary. So a text of n bytes has n / longest tokens or more, if its
tokenizer keeps every byte. Tokenizers that may drop or swallow some, or whose form is not known, bound nothing.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import tokenizers

KEEP = ("ByteLevel", "Digits", "Metaspace")
"""Pre-tokenizers that take nothing from a text."""
MOST_COMPOSED = 4
"""Bytes of which NFC makes no less than one: of U+1FBE, U+0308 and U+0301, 7 bytes, it makes 2."""
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


class LeastTokens:
    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        form = json.loads(tokenizer.to_str())
        added = form.get("added_tokens") or []
        normalizers = _steps(form.get("normalizer"), "normalizers")
        self._composes = any(one["type"] == "NFC" for one in normalizers)
        self._swallows_blanks = any(token["lstrip"] or token["rstrip"] for token in added)
        longest = _longest_of(form)
        if longest is None or not all(_lengthens(one) for one in normalizers):
            longest = 0
        self._longest = longest and max(longest, *(len(token["content"].encode()) for token in added), 1)

    def of(self, text: str) -> int:
        """0 where nothing is known. text: whole Unicode, or some of it is not counted."""
        if not self._longest:
            return 0
        kept = "".join(text.split()) if self._swallows_blanks else text
        n_bytes = len(kept.encode(errors="ignore"))
        if self._composes and not unicodedata.is_normalized("NFC", kept):
            n_bytes //= MOST_COMPOSED
        return -(-n_bytes // self._longest)


def _steps(part: dict[str, Any] | None, of_several: str) -> list[dict[str, Any]]:
    """A part of tokenizer.json, or those that it is made of."""
    if part is None:
        return []
    return [one for inner in part[of_several] for one in _steps(inner, of_several)] if of_several in part else [part]


def _lengthens(normalizer: dict[str, Any]) -> bool:
    """Or leaves as long as it is. What NFC does is reckoned with."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and len(normalizer["content"].encode()) >= len(pattern.encode())
    return normalizer["type"] in ("NFC", "Prepend")


def _longest_of(form: dict[str, Any]) -> int | None:
    """Bytes of the longest token of the vocabulary; None where some byte of a text may get no token, or one token may
    stand for many that are not known."""
    model, steps = form["model"], _steps(form.get("pre_tokenizer"), "pretokenizers")
    keeps = all(one["type"] in KEEP or (one["type"] == "Split" and one["behavior"] != "Removed") for one in steps)
    if model.get("type") != "BPE" or not keeps:
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None  # a byte at such a place is another token, which may not be there
    vocabulary = model["vocab"]
    if any(one["type"] == "ByteLevel" for one in steps):
        # Here each byte is written as one character.
        has_all = all(one in vocabulary for one in tokenizers.pre_tokenizers.ByteLevel.alphabet())
        return max(map(len, vocabulary)) if has_all else None
    has_all = bool(model.get("byte_fallback")) and all(one in vocabulary for one in BYTES)
    return max(len(token.encode()) for token in vocabulary) if has_all else None
