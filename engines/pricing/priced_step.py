"""One forward chunk: so many tokens, and the keys that they meet."""

from __future__ import annotations

from dataclasses import dataclass

from engines.model.spans import Span
from engines.techniques.context import ChunkPhase


@dataclass(frozen=True)
class PricedStep:
    """One forward chunk: T new tokens, L keys to attend to, the new ones included, each of n_sequences its own L."""

    n_tokens: int
    kv_length: int
    phase: ChunkPhase = "prefill"
    n_sequences: int = 1

    def n_keys(self, span: Span | None = None) -> int:
        """Of a sequence, from the first that one of its queries sees: min(L, T - 1 + W) of a window that slides."""
        first = self.kv_length - self.n_tokens // self.n_sequences
        return self.kv_length - (0 if span is None else span.first_seen(first))

    def met_pairs(self, tile: int = 1, span: Span | None = None) -> int:
        """Of queries and keys, those that are multiplied: so many queries of a sequence at a time meet all keys that
        one of them sees, and an incomplete tile takes as long. One query alone has no tile."""
        n_own, length = self.n_tokens // self.n_sequences, self.kv_length
        rows = 1 if n_own == 1 else tile
        if span is not None:
            begins = range(length - n_own, length, rows)
            met = sum(min(begin + rows, length) - span.first_seen(begin) for begin in begins)
            return self.n_sequences * rows * met
        whole, left = divmod(n_own, rows)
        of_whole = rows * (whole * (length - n_own) + rows * whole * (whole + 1) // 2)
        return self.n_sequences * (of_whole + (rows * length if left else 0))
