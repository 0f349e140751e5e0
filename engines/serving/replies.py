"""What a client is told: texts, log-probabilities, counts, in the words of the protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from engines.model.tokenizer import Tokenizer
from engines.serving.answer import TokenSaid
from engines.serving.asked import ChatAsked, CompletionAsked
from engines.serving.computing import Answered
from engines.serving.pieces import Decode, TextPieces

LOWEST = -9999.0
"""What vLLM tells in the place of minus infinity, which JSON does not know."""


class TokenPlaces:
    """Where in a text its tokens begin, in characters; all that make up one character begin where it does."""

    def __init__(self, decode: Decode, start: int = 0) -> None:
        self._pieces = TextPieces(decode, ())
        self._at = start

    def of_next(self, token_id: int) -> int:
        at = self._at
        self._at += len(self._pieces.add(token_id))
        return at


def completion_choice(index: int, answered: Answered, asked: CompletionAsked, tokenizer: Tokenizer) -> dict[str, Any]:
    """Of a text: with its prompt in front where that is asked (echo)."""
    only_prompt = asked.max_tokens == 0
    new_ids = () if only_prompt else answered.completion.token_ids
    text = "" if only_prompt else answered.completion.text
    prompt_ids = answered.request.prompt_ids
    prompt = asked.prompts[index]
    shown = prompt if isinstance(prompt, str) else tokenizer.decode(prompt_ids)
    choice: dict[str, Any] = {
        "index": index,
        "text": shown + text if asked.echo else text,
        "logprobs": None,
        "finish_reason": "length" if only_prompt else answered.ended_by,
    }
    if asked.logprobs is not None:
        first = list(prompt_ids[:1]) if asked.echo else []
        said = answered.said[: len(prompt_ids) - 1] if only_prompt else answered.said
        places: list[int] = []
        if asked.echo:
            # Special tokens of a text that was asked are written in it.
            are_written = shown != tokenizer.decode(prompt_ids)
            of_prompt = TokenPlaces(tokenizer.spell if are_written else tokenizer.decode)
            places += map(of_prompt.of_next, prompt_ids)
        of_new = TokenPlaces(tokenizer.decode, len(shown) if asked.echo else 0)
        places += map(of_new.of_next, new_ids)
        choice["logprobs"] = scored_text(said, asked, tokenizer.spell, places, first)
    if asked.return_token_ids:
        choice |= {"token_ids": list(new_ids), "prompt_token_ids": list(prompt_ids)}
    return choice


def chat_choice(answered: Answered, asked: ChatAsked) -> dict[str, Any]:
    message = {"role": "assistant", "content": answered.completion.text}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": answered.ended_by}
    if asked.return_token_ids:
        choice |= {
            "token_ids": list(answered.completion.token_ids),
            "prompt_token_ids": list(answered.request.prompt_ids),
        }
    return choice


def scored_text(
    said: Sequence[TokenSaid],
    asked: CompletionAsked,
    spell: Decode,
    places: Sequence[int],
    first_ids: Sequence[int] = (),
) -> dict[str, Any]:
    """places: where each token begins. first_ids: tokens in front of which nothing stands, so that the model says
    nothing of them."""

    def text_of(token_id: int) -> str:
        return f"token_id:{token_id}" if asked.return_tokens_as_token_ids else spell([token_id])

    nothing: list[None] = [None] * len(first_ids)
    return {
        "tokens": [*map(text_of, first_ids), *(text_of(one.token_id) for one in said)],
        "token_logprobs": [*nothing, *(_finite(one.log_probability) for one in said)],
        "top_logprobs": [*nothing, *(_top(one, text_of) for one in said)],
        "text_offset": list(places),
    }


def _top(said: TokenSaid, text_of: Callable[[int], str]) -> dict[str, float]:
    """By text, of which two tokens may have the same: the likelier one is told. Its own token is among them."""
    told = {text_of(said.token_id): _finite(said.log_probability)}
    for token_id, value in said.top:
        text = text_of(token_id)
        told[text] = max(_finite(value), told.get(text, LOWEST))
    return told


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST


def usage_of(found: Sequence[Answered], n_new: int | None = None) -> dict[str, Any]:
    """n_new: new tokens of each, where fewer are told than were computed."""
    n_prompt = sum(one.completion.n_prompt_tokens for one in found)
    n_told = sum(one.completion.n_generated if n_new is None else n_new for one in found)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_told,
        "total_tokens": n_prompt + n_told,
        "prompt_tokens_details": {"cached_tokens": sum(one.completion.n_cached_tokens for one in found)},
    }
