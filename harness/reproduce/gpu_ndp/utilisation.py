"""Of the experts that are fetched ahead, how many does a token use (001, Fig. 6)? Counted on recorded routing.

The x most chosen experts of each layer are fetched, by counts of two kinds: of the same request, before the tokens that
are asked about (its prefill; a trace without prompts gives the first half of an answer), and of all other requests (its
calibration data). Utilisation: of the x, the share that a token chooses, the mean over layers and tokens.

Legend: S requests, T tokens, L layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engines.calls import Integers
from harness.reproduce.gpu_ndp.stage import Spread

OWN_SHARE = 0.5
"""Of an answer, what is counted as its prompt."""


class Utilisation(NamedTuple):
    """own: counted on the request itself. others: on all other requests. chance: K / E."""

    kept: int
    own: Spread
    others: Spread
    chance: float


def utilisations(sequences: Sequence[Integers], n_experts: int, kept: Sequence[int]) -> list[Utilisation]:
    """sequences: ids_TLK of each request, two tokens or more. kept: x, of each layer."""
    n_layers, top_k = sequences[0].shape[1:]
    counted = [counts_LE(ids_TLK, n_experts) for ids_TLK in sequences]
    all_LE = np.sum(counted, axis=0)
    found = []
    for n_kept in kept:
        own: list[float] = []
        others: list[float] = []
        n_tokens: list[int] = []
        for ids_TLK, whole_LE in zip(sequences, counted, strict=True):
            n_own = max(round(OWN_SHARE * len(ids_TLK)), 1)
            asked_LE = counts_LE(ids_TLK[n_own:], n_experts)
            n_tokens.append(len(ids_TLK) - n_own)
            for into, by_LE in ((own, counts_LE(ids_TLK[:n_own], n_experts)), (others, all_LE - whole_LE)):
                fetched_LX = np.argsort(-by_LE, axis=1, kind="stable")[:, :n_kept]
                into.append(float(np.take_along_axis(asked_LE, fetched_LX, axis=1).sum()))
        per_token = n_kept * n_layers
        found.append(
            Utilisation(
                n_kept, _ratio(own, n_tokens, per_token), _ratio(others, n_tokens, per_token), top_k / n_experts
            )
        )
    return found


def counts_LE(ids_TLK: Integers, n_experts: int) -> Integers:
    """How many of the tokens chose each expert of each layer."""
    n_layers = ids_TLK.shape[1]
    numbered = ids_TLK.astype(np.int64) + n_experts * np.arange(n_layers)[None, :, None]
    return np.bincount(numbered.reshape(-1), minlength=n_layers * n_experts).reshape(n_layers, n_experts)


def _ratio(used: Sequence[float], n_tokens: Sequence[int], per_token: int) -> Spread:
    """Of sums, and its standard error over requests, which differ in length."""
    total = sum(used) / (sum(n_tokens) * per_token)
    off = np.array(used) - total * per_token * np.array(n_tokens)
    n = len(used)
    error = np.sqrt((off**2).sum() * n / (n - 1)) / (sum(n_tokens) * per_token) if n > 1 else 0.0
    return Spread(total, float(error))
