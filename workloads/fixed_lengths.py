"""Prompts and answers of exactly so many tokens: one point of a latency or energy curve. Not scored.

A grid is a sweep of the plan, so that each pair of lengths is a cell with an interval of its own:

    [sweep]
    "workload.fixed_lengths.prompt_tokens" = [64, 256, 1024]
    "workload.fixed_lengths.new_tokens" = [128, 256, 512]

Exact: a prompt is cut by token ids (`workloads.prose`), end tokens do not end an answer, there are no stop strings, and
a window in which an answer came out otherwise fails.

With `arrivals_per_s` requests arrive by a Poisson process of that rate, whether the engine is free or not. One engine
and a constant service time S make that an M/D/1 queue: at a load of rho = rate x S the mean wait is
rho S / (2 (1 - rho)) (Pollaczek and Khinchine), which tells what to expect before anything is run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from pydantic import Field

from results.records import Record, Request
from workloads.base import Tokenizer
from workloads.fitting import TooLong, told_too_long
from workloads.generation import Built, GenerationWorkload
from workloads.prose import exact_prompt


class FixedLengthsParameters(Record):
    """What a plan may say about requests of fixed lengths."""

    prompt_tokens: int = Field(default=256, ge=1)
    new_tokens: int = Field(default=128, ge=1)
    limit: int = Field(default=4, ge=1, le=100_000)
    """Requests, each with another text."""
    arrivals_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Rate of the Poisson process; None: each request comes once the one before is answered."""
    too_long: TooLong = "fail"
    """Lengths beyond the model's context: an error, or no cell for this model."""
    seed: int = 0


class FixedLengths(GenerationWorkload):
    name = "fixed_lengths"
    data_source = "generated"

    def __init__(self, parameters: FixedLengthsParameters, data_root: Path | None) -> None:
        super().__init__()
        self._parameters = parameters

    def calibration_prompts(self, tokenizer: Tokenizer, max_length: int, n: int) -> Sequence[Sequence[int]]:
        """Other texts of the same length."""
        p = self._parameters
        length = min(p.prompt_tokens, max_length)
        return [exact_prompt(tokenizer, length, f"fixed_lengths/calibration/seed{p.seed}/{i}") for i in range(n)]

    @property
    def most_tokens(self) -> int:
        return self._parameters.prompt_tokens + self._parameters.new_tokens

    def has_requests(self, tokenizer: Tokenizer, max_length: int) -> bool:
        self.notes = self._told_too_long(max_length)
        return not self.notes

    def _names(self) -> list[str]:
        p = self._parameters
        return [f"fixed_lengths/{p.prompt_tokens}+{p.new_tokens}/seed{p.seed}/{i}" for i in range(p.limit)]

    def _told_too_long(self, max_length: int) -> tuple[str, ...]:
        p = self._parameters
        if self.most_tokens <= max_length:
            return ()
        return told_too_long(
            dict.fromkeys(self._names(), self.most_tokens), max_length, p.too_long, self.name, "requests"
        )

    def _build(self, tokenizer: Tokenizer, max_length: int) -> Built:
        p = self._parameters
        names = self._names()
        if notes := self._told_too_long(max_length):
            return Built((), notes)
        arrivals_s = _poisson(p.arrivals_per_s, p.limit, p.seed) if p.arrivals_per_s else [None] * p.limit
        requests = tuple(
            exact_request(name, exact_prompt(tokenizer, p.prompt_tokens, name), p.new_tokens, arrival_s)
            for name, arrival_s in zip(names, arrivals_s, strict=True)
        )
        return Built(requests, ())


def exact_request(name: str, prompt_ids: Sequence[int], n_new_tokens: int, arrival_s: float | None) -> Request:
    return Request(
        request_id=name,
        sample_id=name,
        kind="generate",
        prompt_ids=tuple(prompt_ids),
        max_new_tokens=n_new_tokens,
        ignore_end_tokens=True,
        arrival_s=arrival_s,
    )


def _poisson(rate_per_s: float, n: int, seed: int) -> list[float]:
    """Arrival times of a Poisson process: gaps are exponential."""
    rng = random.Random(f"arrivals/{seed}")
    return list(accumulate(rng.expovariate(rate_per_s) for _ in range(n)))
