"""Conversations as requests: every question in its context, with the answers on record or with the model's own.

With recorded answers each prompt is known beforehand and is the same for every arm. With generated answers only the
first is; a later request says which one it follows and holds the tokens behind that one's answer: those with which the
chat template ends an answer, sets the next question and gives the cue. `results.requests` puts them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from results.records import Request
from workloads.base import Tokenizer, WorkloadError

Answers = Literal["recorded", "generated"]
Message = dict[str, str]

STANDS_ON_OWN_ANSWERS = (
    "each turn stands on what its own arm answered before, so arms that answer otherwise are asked other prompts"
)
NO_TEMPLATE = (
    'the model brings no chat template: its turns are asked as plain lines, "user: ..." and "assistant:", which it was'
    " not trained on"
)
_ANSWER = "the-answer-of-joulebench-stands-here"
"""Stands for an answer while a chat template is rendered."""


class Turn(NamedTuple):
    """One question in its context, which it ends, and how many tokens its answer may have."""

    sample_id: str
    history: list[Message]
    max_new_tokens: int


def conversation_requests(turns: Sequence[Turn], tokenizer: Tokenizer, answers: Answers) -> list[Request]:
    """One request a turn. With generated answers each turn's history is the one before, an answer, and more."""
    if answers == "recorded":
        return [whole_turn(turn, tokenizer) for turn in turns]
    first = [whole_turn(turn, tokenizer) for turn in turns[:1]]
    return first + [_following(turn, before, tokenizer) for before, turn in pairwise(turns)]


def template_notes(tokenizer: Tokenizer) -> tuple[str, ...]:
    """What a reader must know of prompts that no template of the model's own made."""
    return () if tokenizer.has_chat_template else (NO_TEMPLATE,)


def whole_turn(turn: Turn, tokenizer: Tokenizer) -> Request:
    """A turn with its whole context."""
    # A template sets the begin token where it wants one. A text of no template begins as any other.
    text = tokenizer.chat(turn.history)
    return _request(turn, tokenizer.encode(text) if tokenizer.has_chat_template else tokenizer.encode_prompt(text))


def _following(turn: Turn, before: Turn, tokenizer: Tokenizer) -> Request:
    place = len(before.history)
    answer = {"role": "assistant", "content": _ANSWER}
    text = tokenizer.chat([*turn.history[:place], answer, *turn.history[place + 1 :]])
    _, *behind = text.split(_ANSWER)
    if len(behind) != 1:
        raise WorkloadError(
            f"{turn.sample_id}: the chat template of {tokenizer.name} shows an answer of the assistant {len(behind)} "
            'times, once is expected; set answers = "recorded"'
        )
    request = _request(turn, tokenizer.encode(behind[0]))
    return request.model_copy(update={"follows": before.sample_id})


def _request(turn: Turn, prompt_ids: Sequence[int]) -> Request:
    return Request(
        request_id=turn.sample_id,
        sample_id=turn.sample_id,
        kind="generate",
        prompt_ids=tuple(prompt_ids),
        max_new_tokens=turn.max_new_tokens,
    )
