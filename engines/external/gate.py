"""Before any number: does an engine that is not ours answer like a language model, and like this one?

A few short questions whose greedy answers our engine gives, from the same weights. A build that is broken on this
machine, a model file that was badly converted, or another model may answer fast; only its words tell. Narrow weights
may change an answer, so it is asked whether most answers begin as ours do, not whether they are equal.

Where our engine cannot answer, for the weights are not here or do not fit, what every language model knows stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from engines.base import Engine, unheard
from engines.external.base import Answer, AnswersAside
from results.records import Request


class Question(NamedTuple):
    """known: words of which one stands in the answer of any language model that is sound; none where all is right."""

    text: str
    known: tuple[str, ...] = ()


QUESTIONS = (
    Question("The capital of France is", ("Paris",)),
    Question("Question: what is 2 + 2?\nAnswer:", ("4", "four", "Four")),
    Question("Once upon a time there was a"),
)
N_TOKENS = 12
MOST_OF_ONE = 0.8
"""Of an answer: the share of one token from which it only repeats itself."""
CLEARLY_NOT = 0.5
"""The share up to which ours does not: a model of random weights repeats nearly as much by itself."""
LEAST_REPEATED = 4
"""Tokens of an answer from which that share says something."""
LEAST_READABLE = 0.8
"""Of an answer's characters: the share that can be read. Damaged weights say signs of no script, or halves of them."""


class ReadsText(NamedTuple):
    """The two halves of a tokenizer."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


def requests_of(encode: Callable[[str], Sequence[int]]) -> list[Request]:
    return [
        Request(
            request_id=f"gate {i}",
            sample_id=f"gate {i}",
            kind="generate",
            prompt_ids=tuple(encode(question.text)),
            max_new_tokens=N_TOKENS,
        )
        for i, question in enumerate(QUESTIONS)
    ]


def answers_of(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    """Raises `EngineError`, `DeviceError`."""
    if isinstance(engine, AnswersAside):
        return [engine.answer_aside(request) for request in requests]
    return [*run_answers(engine, requests)]


def run_answers(engine: Engine, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """Raises `EngineError`. Counters are emptied: no window holds these tokens."""
    found = [engine.run(request, unheard).token_ids for request in requests]
    engine.take_counters()
    engine.reset()
    return found


def faults(
    ours: Sequence[tuple[int, ...]], theirs: Sequence[Answer], reads: ReadsText, begin_alike: bool = True
) -> tuple[str, ...]:
    """What is wrong with an engine's answers beside ours, in words; empty where nothing is.

    begin_alike: whether they must begin as ours; a technique that drops tokens may change them."""
    found, n = [], len(ours)
    same = sum(_begins_alike(own, its, reads) for own, its in zip(ours, theirs, strict=True))
    if begin_alike and 2 * same < n:
        found.append(f"{n - same} of {n} short answers begin with another token than ours")
    repeats = [
        _repeats(its, reads) and not _repeats(own, reads, CLEARLY_NOT) for own, its in zip(ours, theirs, strict=True)
    ]
    if any(repeats):
        found.append(f"{sum(repeats)} of {n} answers repeat one token, and ours do not")
    unread = [not _is_readable(its, reads) and _is_readable(own, reads) for own, its in zip(ours, theirs, strict=True)]
    if any(unread):
        found.append(f"{sum(unread)} of {n} answers cannot be read, and ours can")
    return tuple(found)


def faults_alone(theirs: Sequence[Answer], reads: ReadsText) -> tuple[str, ...]:
    """The same without answers of ours: beside what is known."""
    found, n = [], len(theirs)
    asked = [(question, _text(its, reads)) for question, its in zip(QUESTIONS, theirs, strict=True) if question.known]
    if not any(word in text for question, text in asked for word in question.known):
        wanted = ", ".join(question.known[0] for question, _ in asked)
        found.append(f"none of {len(asked)} short answers has a word that is known ({wanted})")
    if repeats := sum(_repeats(its, reads) for its in theirs):
        found.append(f"{repeats} of {n} answers repeat one token")
    if unread := sum(not _is_readable(its, reads) for its in theirs):
        found.append(f"{unread} of {n} answers cannot be read")
    return tuple(found)


def _begins_alike(own: tuple[int, ...], its: Answer, reads: ReadsText) -> bool:
    """By the first token; of a text by what ours shows first, for blanks around an answer are anybody's."""
    if not isinstance(its, str):
        return own[:1] == its[:1]
    shown = next((text for n in range(1, len(own) + 1) if (text := reads.decode(own[:n]).strip(" \n\ufffd"))), "")
    return its.strip().startswith(shown) if shown else not its.strip()


def _repeats(answer: Answer, reads: ReadsText, above: float = MOST_OF_ONE) -> bool:
    tokens = tuple(reads.encode(answer)) if isinstance(answer, str) else answer
    return len(tokens) >= LEAST_REPEATED and max(map(tokens.count, set(tokens))) > above * len(tokens)


def _is_readable(answer: Answer, reads: ReadsText) -> bool:
    text = _text(answer, reads)
    return sum((c.isprintable() or c.isspace()) and c != "\ufffd" for c in text) >= LEAST_READABLE * len(text)


def _text(answer: Answer, reads: ReadsText) -> str:
    return answer if isinstance(answer, str) else reads.decode(answer)
