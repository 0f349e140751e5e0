"""Which leading tokens of a request need not be computed, because the key/value cache holds them from the one before.

A token's keys and values depend on the tokens before it, so two requests share them exactly as far as their tokens
agree from the first on. Two things narrow that:

- A technique may couple the tokens of a chunk (`Technique.couples_tokens`): under a capacity, whether a token is
  dropped depends on its neighbours. Then only whole prefill chunks are kept, which both requests cut alike. Tokens that
  decoding wrote are never kept: it computes them one by one, in shapes of its own.
- LongRoPE turns all keys of a sequence by factors that its greatest length chooses: `turned_alike`.

Every layer's cache here holds all positions, in sliding windows too, so that it can be cut anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from engines.model.rope import rope_frequencies
from engines.model.rope_config import RopeConfig
from engines.techniques.context import ChunkPhase
from results.records import Request

logger = logging.getLogger(__name__)


class HeldTokens:
    """The tokens whose keys and values a cache holds, in order.

    The record must never claim what the cache lacks: `keep` it short before the cache is overwritten, and `add` a chunk
    only after all of its layers are computed.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._n_prefilled = 0

    def __len__(self) -> int:
        return len(self._token_ids)

    def keep(self, n_tokens: int) -> None:
        """Forgets all but the first n."""
        del self._token_ids[n_tokens:]
        self._n_prefilled = min(self._n_prefilled, n_tokens)

    def add(self, token_ids: Sequence[int], phase: ChunkPhase) -> None:
        """A chunk that was computed behind the tokens held so far."""
        self._token_ids.extend(token_ids)
        if phase == "prefill":
            self._n_prefilled = len(self._token_ids)

    def shared(self, token_ids: Sequence[int], whole_chunks_of: int | None) -> int:
        """How many leading tokens of a request are held.

        whole_chunks_of: the prefill chunk, where only whole ones may be kept; None where each token stands alone.
        """
        n_held = len(self._token_ids) if whole_chunks_of is None else self._n_prefilled
        limit = min(len(token_ids), n_held)
        n_alike = next((i for i in range(limit) if token_ids[i] != self._token_ids[i]), limit)
        return n_alike if whole_chunks_of is None else n_alike // whole_chunks_of * whole_chunks_of


def turned_alike(rope: RopeConfig, n_positions: int, other_n_positions: int) -> bool:
    """Whether sequences of up to so many positions turn their keys by the same angles."""
    frequency_P, amplitude = rope_frequencies(rope, n_positions)
    other_P, other_amplitude = rope_frequencies(rope, other_n_positions)
    return amplitude == other_amplitude and torch.equal(frequency_P, other_P)


def reusable(
    held: HeldTokens, request: Request, whole_chunks_of: int | None, rope: RopeConfig, held_for: int, turned_for: int
) -> int:
    """How many leading tokens of a request need not be computed.

    whole_chunks_of: as of `HeldTokens.shared`. held_for, turned_for: positions up to which the held tokens are turned,
    and the request's. The last prompt token is always computed: its logits are wanted, and only keys and values are
    kept.
    """
    n_cached = held.shared(request.prompt_ids[:-1], whole_chunks_of)
    if n_cached and not turned_alike(rope, held_for, turned_for):
        logger.info(
            "request %s computes %d tokens again: rope turns up to %d positions otherwise than the %d before",
            request.request_id,
            n_cached,
            turned_for,
            held_for,
        )
        return 0
    return n_cached
