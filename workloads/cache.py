"""Requests are built once per tokenizer, not once per trial."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from workloads.base import Tokenizer

Built = TypeVar("Built")


class PerTokenizer(Generic[Built]):
    """Remembers what was built for a tokenizer and length, for as long as that tokenizer object lives.

    By identity and not by name: two tokenizers of one name may differ, and then so must the requests.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], tuple[weakref.ref[Tokenizer], Built]] = {}

    def get(self, tokenizer: Tokenizer, max_length: int, build: Callable[[], Built]) -> Built:
        key = (id(tokenizer), max_length)
        entry = self._entries.get(key)
        if entry is None or entry[0]() is not tokenizer:
            entry = (weakref.ref(tokenizer), build())
            self._entries = {k: e for k, e in self._entries.items() if e[0]() is not None} | {key: entry}
        return entry[1]
