"""How the next token is drawn from the logits. Legend: A positions, L vocabulary rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engines.errors import EngineError
from engines.kernels import native, tables
from engines.kernels.native import Largest
from results.records import Sampling

LOWEST_TEMPERATURE = 1e-6
"""Logits of 1e30, more than any model has, divided by this are still numbers in fp32."""


def check_sampling(sampling: Sampling, whose: str) -> None:
    """Raises `EngineError`, beginning with `whose`, on values that no distribution has."""
    if not sampling.temperature >= 0 or sampling.temperature == math.inf:
        raise EngineError(f"{whose}: temperature {sampling.temperature} is no finite number from 0 on; 0 is greedy")
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise EngineError(
            f"{whose}: temperature {sampling.temperature} is below {LOWEST_TEMPERATURE}, where logits divided by it "
            "overflow; 0 is greedy"
        )
    if not 0 < sampling.top_p <= 1:
        raise EngineError(f"{whose}: top_p {sampling.top_p} is outside (0, 1]; 1 keeps all tokens")
    if sampling.top_k < 0:
        raise EngineError(f"{whose}: top_k {sampling.top_k} is below 0; 0 keeps all tokens")
    if not -(2**63) <= sampling.seed < 2**64:
        raise EngineError(f"{whose}: seed {sampling.seed} has more than 64 bits; take a smaller one")


def token_probabilities(logits_L: Tensor, sampling: Sampling) -> Tensor:
    """Probability of each token: temperature, then the top k, then the smallest set that holds top_p of the rest."""
    logits_L = logits_L.float() / sampling.temperature
    if 0 < sampling.top_k < logits_L.shape[0]:
        threshold = torch.topk(logits_L, sampling.top_k).values[-1]
        logits_L = logits_L.masked_fill(logits_L < threshold, float("-inf"))
    probability_L = torch.softmax(logits_L, dim=-1)
    if sampling.top_p < 1:
        sorted_L, order_L = torch.sort(probability_L, descending=True, stable=True)
        before_L = torch.cumsum(sorted_L, dim=-1) - sorted_L
        # The likeliest stays, whatever a top_p below fp32's smallest number rounds to.
        probability_L = probability_L.index_fill(0, order_L[1:][before_L[1:] >= sampling.top_p], 0.0)
        probability_L = probability_L / probability_L.sum()
    return probability_L


def choose_token(
    logits_AL: Tensor, sampling: Sampling, generator: torch.Generator, largest: Largest | None = None
) -> int:
    """By the last row: greedy at temperature 0, else one draw of the request's own generator. largest: of that row,
    where it is known: a greedy choice then takes no view of the logits, which costs 15 us between two tokens.

    Raises `EngineError` where the largest logit is not finite, as it is not when any of them is NaN: an argmax over NaN
    would be a token like any other.
    """
    most, best = largest or _largest(logits_AL[-1])
    if not math.isfinite(most):
        raise EngineError(f"largest logit is {most}; activations overflow, or weights are damaged")
    if sampling.temperature == 0:
        return best
    # On the host, where the generator is: a seed draws the same from the same logits on every device.
    return int(torch.multinomial(token_probabilities(logits_AL[-1].cpu(), sampling), 1, generator=generator))


def _largest(logits_L: Tensor) -> Largest:
    if tables.serves(logits_L):
        return native.largest(logits_L)  # torch wakes its threads for so many
    most, best = logits_L.max(dim=-1)
    return float(most), int(best)
