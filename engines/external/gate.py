"""Before any number: does an engine that is not ours answer like a language model, and like this one?

A few short questions whose greedy answers our engine gives, from the same weights. A build that is broken on this
machine, a model file that was badly converted, or another model may answer fast; only its words tell. Narrow weights
may change an answer, so it is asked whether most answers begin as ours do, not whether they are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engines.base import Engine, unheard
from results.records import Request

QUESTIONS = ("The capital of France is", "Question: what is 2 + 2?\nAnswer:", "Once upon a time there was a")
N_TOKENS = 12
MOST_OF_ONE = 0.8
"""Of an answer: the share of one token from which it only repeats itself."""
LEAST_READABLE = 0.8
"""Of an answer's characters: the share that can be read. Damaged weights say signs of no script, or halves of them."""


def requests_of(encode: Callable[[str], Sequence[int]]) -> list[Request]:
    return [
        Request(
            request_id=f"gate {i}",
            sample_id=f"gate {i}",
            kind="generate",
            prompt_ids=tuple(encode(question)),
            max_new_tokens=N_TOKENS,
            ignore_end_tokens=True,
        )
        for i, question in enumerate(QUESTIONS)
    ]


def answers_of(engine: Engine, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """Raises `EngineError`. Counters are emptied: no window holds these tokens."""
    found = [engine.run(request, unheard).token_ids for request in requests]
    engine.take_counters()
    engine.reset()
    return found


def faults(
    ours: Sequence[tuple[int, ...]], theirs: Sequence[tuple[int, ...]], decode: Callable[[Sequence[int]], str]
) -> tuple[str, ...]:
    """What is wrong with an engine's answers, in words; empty where nothing is."""
    found = []
    same = sum(own[:1] == its[:1] for own, its in zip(ours, theirs, strict=True))
    if 2 * same < len(ours):
        found.append(f"{len(ours) - same} of {len(ours)} short answers begin with another token than ours")
    repeats = [_of_one(its) > MOST_OF_ONE >= _of_one(own) for own, its in zip(ours, theirs, strict=True)]
    if any(repeats):
        found.append(f"{sum(repeats)} of {len(ours)} answers repeat one token, and ours do not")
    texts = [(_readable(decode(own)), _readable(decode(its))) for own, its in zip(ours, theirs, strict=True)]
    unread = [its < LEAST_READABLE <= own for own, its in texts]
    if any(unread):
        found.append(f"{sum(unread)} of {len(ours)} answers cannot be read, and ours can")
    return tuple(found)


def _of_one(tokens: Sequence[int]) -> float:
    """The share of the commonest token."""
    return max(map(tokens.count, set(tokens)), default=len(tokens)) / max(len(tokens), 1)


def _readable(text: str) -> float:
    """The share of characters that can be read."""
    return sum((c.isprintable() or c.isspace()) and c != "\ufffd" for c in text) / len(text) if text else 1.0
