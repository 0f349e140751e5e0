"""What a layer's router chose beside what an earlier layer had predicted for it: recall@k and rank alignment (003 §3.3,
§4.1), as counts.

Legend: T tokens, K experts per token, X experts predicted for a token; as many, unless a technique hints at others.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]


class Routed(Protocol):
    """Experts of each token and their weights; an `engines.dispatch.Routing` is one."""

    @property
    def expert_ids_TK(self) -> Tensor: ...
    @property
    def weights_TK(self) -> Tensor: ...


class Foretold(NamedTuple):
    """recalled: of the pairs that the router chose, those whose expert was predicted for their token. aligned_K: of
    each rank by routing weight, tokens whose predicted expert of that rank is the router's."""

    tokens: int
    recalled: int
    aligned_K: tuple[int, ...]

    def __add__(self, other: object) -> Foretold:
        if not isinstance(other, Foretold):
            return NotImplemented
        aligned_K = tuple(a + b for a, b in zip(self.aligned_K, other.aligned_K, strict=True))
        return Foretold(self.tokens + other.tokens, self.recalled + other.recalled, aligned_K)


def foretold(chosen: Routed, predicted: Routed) -> Foretold:
    """Of the tokens of one step."""
    chosen_TK, predicted_TX = ranked(chosen), ranked(predicted)
    n_tokens, top_k = chosen_TK.shape
    n_ranks = min(top_k, predicted_TX.shape[1])
    aligned_K = torch.zeros(top_k, dtype=torch.int64)
    aligned_K[:n_ranks] = (chosen_TK[:, :n_ranks] == predicted_TX[:, :n_ranks]).sum(0).cpu()
    return Foretold(n_tokens, n_recalled(chosen.expert_ids_TK, predicted.expert_ids_TK), tuple(aligned_K.tolist()))


def n_recalled(chosen_TK: Tensor | Integers, predicted_TX: Tensor | Integers) -> int:
    """Of the pairs that the router chose, those whose expert was predicted for their token."""
    is_hit_TKX: Any = chosen_TK[:, :, None] == predicted_TX[:, None, :]
    return int(is_hit_TKX.any(-1).sum())


def ranked(routing: Routed) -> Tensor:
    """[T, K] experts of each token by falling weight; of equal weights the lower expert index ranks first."""
    by_index = routing.expert_ids_TK.sort(dim=-1)
    order = routing.weights_TK.gather(-1, by_index.indices).sort(dim=-1, descending=True, stable=True).indices
    return by_index.values.gather(-1, order)
