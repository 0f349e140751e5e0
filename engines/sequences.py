"""Sequences that an engine computes together: what a step reads of them, and when what it gave is stamped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engines.answers import Answer
from engines.base import PhaseListener
from engines.model.key_value_cache import KeyValueCache
from engines.prefix import HeldTokens


@dataclass(frozen=True)
class RunningSequence:
    """An answer with the cache that it is computed in. held: of the engine's own cache, which outlives the request."""

    answer: Answer
    cache: KeyValueCache
    held: HeldTokens | None = None
    n_cached: int = 0


class Reading(NamedTuple):
    """chunks: the next tokens of each sequence, n_rows in all. asking: answers that ask about some of them. n_asked:
    about how many, each. rows: which these are, in the same order. ends: how many of each chunk's last tokens."""

    chunks: list[list[int]]
    n_rows: int
    asking: list[Answer]
    n_asked: list[int]
    rows: list[int]
    ends: list[int]


def reading(parts: Sequence[tuple[RunningSequence, int]]) -> Reading:
    """Of a step that reads the next n tokens of each sequence."""
    chunks: list[list[int]] = []
    asking: list[Answer] = []
    n_asked: list[int] = []
    rows: list[int] = []
    ends: list[int] = []
    n_rows = 0
    for sequence, n in parts:
        answer, position = sequence.answer, sequence.cache.length
        chunks.append(answer.tokens[position : position + n])
        first = max(answer.first_asked - position, 0)
        if first < n:
            asking.append(answer)
            n_asked.append(n - first)
            rows.extend(range(n_rows + first, n_rows + n))
        ends.append(max(n - first, 0))
        n_rows += n
    return Reading(chunks, n_rows, asking, n_asked, rows, ends)


def stamp(answers: Sequence[Answer], now_s: Callable[[], float], on_phase: PhaseListener) -> None:
    """Stamps what a step gave; its values are on the host."""
    at_s = now_s()
    prefill_ended = [answer.stamp(at_s) for answer in answers]
    if any(prefill_ended):
        on_phase("prefill end", at_s)
    complete = [answer for answer in answers if answer.is_complete]
    if not complete:
        return
    if any(answer.end_s is None for answer in complete):
        end_s = now_s()
        for answer in complete:
            answer.end_s = end_s if answer.end_s is None else answer.end_s
    for end_s in sorted({answer.end_s for answer in complete if answer.end_s is not None}):
        on_phase("request end", end_s)
