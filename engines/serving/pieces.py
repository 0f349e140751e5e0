"""The text of an answer, piece by piece as its tokens come: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer shows for bytes that are no character yet."""
MOST_OPEN = 32
"""Tokens of a run that are waited for: some ten characters."""


class TextPieces:
    """Joined, the pieces and the `rest` are the whole text. What a piece costs does not grow with the answer."""

    def __init__(self, decode: Decode, stops: Sequence[str], open_ids: Container[int] = ()) -> None:
        """open_ids: tokens behind which nothing is told, for what comes next may change how they show. Of a long run of
        them, as of a script without tokens of its own, all is told that is whole."""
        self._decode = decode
        self._n_open = 0
        self._open_ids = open_ids
        self._stops = tuple(stop for stop in stops if stop)
        self._token_ids: list[int] = []
        self._context, self._read = 0, 0
        """Tokens [context, read) are told; they are decoded again with those behind, for a blank may hang on them."""
        self._held = ""
        """Decoded, and perhaps the beginning of a stop string."""
        self._told = ""

    def add(self, token_id: int) -> str:
        """What may be shown now."""
        self._token_ids.append(token_id)
        self._n_open = self._n_open + 1 if token_id in self._open_ids else 0
        if 0 < self._n_open <= MOST_OPEN:
            return ""
        before = self._decode(self._token_ids[self._context : self._read])
        text = self._decode(self._token_ids[self._context :])
        if len(text) <= len(before) or text.endswith(UNFINISHED):
            return ""
        self._context, self._read = self._read, len(self._token_ids)
        self._held += text[len(before) :]
        n_kept = self._n_kept()
        piece, self._held = self._held[: len(self._held) - n_kept], self._held[len(self._held) - n_kept :]
        self._told += piece
        return piece

    def rest(self, whole: str) -> str:
        """What is left to show of the whole text, already cut at its stop string."""
        return whole[len(self._told) :]

    def _n_kept(self) -> int:
        """Characters from where a stop string stands, or may begin."""
        stands = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if stands:
            return len(self._held) - min(stands)
        longest = 0
        for stop in self._stops:
            for n in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:n]):
                    longest = n
                    break
        return longest
