"""Which tokens a model folder names beside its tokenizer.json, and in which order transformers adds those it lacks.

Newer exports name them in tokenizer_config.json alone (`added_tokens_decoder`). Where that key is absent, older files
beside it count too: special_tokens_map.json and added_tokens.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import EngineError
from engines.model.model_config import read_json

TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Of every model, in the order in which they are added; a model may name more (`image_token`)."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class NamedToken:
    """number: the id that it must get; None: the next one that is free. path: the file that names it."""

    text: str
    flags: Mapping[str, bool]
    path: Path
    number: int | None = None


@dataclass(frozen=True)
class SpecialTokens:
    """by_key: the texts of special tokens by the key that names them (`eos_token`). others: special tokens that have no
    name. numbered: every added token that a file gives a number."""

    by_key: Mapping[str, str]
    others: tuple[NamedToken, ...]
    numbered: tuple[NamedToken, ...]
    path: Path

    def in_order(self) -> Iterator[NamedToken]:
        """As transformers adds those that are not among tokenizer.json's added tokens."""
        yield from self.numbered
        for text in self.by_key.values():
            yield NamedToken(text, {"special": True}, self.path)
        yield from self.others


def read_special_tokens(folder: Path, config: Mapping[str, Any]) -> SpecialTokens:
    """config: of tokenizer_config.json. Raises `EngineError`."""
    path, numbered = folder / TOKENIZER_CONFIG, config.get("added_tokens_decoder")
    if isinstance(numbered, dict):
        said = dict(config)
    else:
        said, numbered = {**config, **_read(folder / SPECIAL_TOKENS)}, {}
    others = said.get("extra_special_tokens") or said.get("additional_special_tokens")
    by_name = others if isinstance(others, dict) else {}
    keys = [*NAMED, *(key for key in said if key.endswith("_token") and key not in NAMED), *by_name]
    by_key = {key: text for key in keys if (text := token_text(by_name.get(key, said.get(key))))}
    listed = others if isinstance(others, list) else []
    unnamed = tuple(
        NamedToken(text, {**_flags(token), "special": True}, path) for token in listed if (text := token_text(token))
    )
    found = [
        NamedToken(text, _flags(token), path, int(number))
        for number, token in numbered.items()
        if number.isdecimal() and (text := token_text(token))
    ]
    if "added_tokens_decoder" not in config:
        special = {*by_key.values(), *(token.text for token in unnamed)}
        found += _of_added_tokens(folder / ADDED_TOKENS, special)
    return SpecialTokens(by_key, unnamed, tuple(sorted(found, key=lambda token: token.number or 0)), path)


def _of_added_tokens(path: Path, special: set[str]) -> list[NamedToken]:
    found = []
    for text, number in _read(path).items():
        if type(number) is not int or number < 0:
            raise EngineError(f"{path}: {text!r:.80} has number {number!r:.80}; fetch the file again")
        flags = {"special": text in special, "normalized": text not in special}
        found.append(NamedToken(text, flags, path, number))
    return [token for token in found if token.text]


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _flags(token: Any) -> dict[str, bool]:
    kinds = token if isinstance(token, dict) else {}
    return {key: value for key, value in kinds.items() if key in FLAGS and isinstance(value, bool)}


def token_text(token: Any) -> str | None:
    """Special tokens are stored as text or as an object with its `content`; anything else is none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
