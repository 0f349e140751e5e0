"""What a client may ask, key by key. A key that is not served is refused: ignored, it would be another request.

The keys are OpenAI's, and those that vLLM and llama-server added for measuring (`ignore_eos`, `min_tokens`,
`return_token_ids`, `cache_prompt`, `cache_salt`).
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from results.printable import printable

MOST_TOP = 20
"""Alternatives of a token, as most servers allow."""
MOST_TOKENS = 1 << 30
MOST_STOPS = 64
MOST_PROMPTS = 256
"""Of one request; so many may wait in all."""
MOST_KEYS = 100
"""Of one object; there are not so many."""
MOST_OPENED = 100_000
"""Objects and lists of a body. To read some million of them took 10 s, in which no other client was answered."""
_OPENED = re.compile(rb'"(?:[^"\\]|\\.)*+"?+|([{\[])', re.DOTALL)
"""A string, whatever is in it; or what opens an object or a list."""
Strings = Annotated[list[str], Field(fail_fast=True)]
"""One error is enough. All of a body of megabytes took minutes, in which no other client was answered."""
Ids = Annotated[list[int], Field(fail_fast=True)]
NotUsed = Annotated[float, Field(ge=0, le=0)]
"""Keys that clients send with the value that does nothing."""
NotScaled = Annotated[float, Field(ge=1, le=1)]
"""As that."""
DEFAULT_TOKENS = 16
"""The protocol's own number, where a client gives none."""


class BadRequestError(Exception):
    """What a client asked wrongly, in one line: what, the value found, the remedy."""


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, told: Any) -> Any:
        if isinstance(told, dict) and len(told) > MOST_KEYS:
            raise PydanticCustomError("keys", "{n} keys; at most {most} are read", {"n": len(told), "most": MOST_KEYS})
        return told


class StreamOptions(_Keys):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Asked(_Keys):
    """Keys of both roads. What is null was left out."""

    model: str | None = None
    temperature: float = Field(1.0, ge=0)
    """The protocol's own value: who wants greedy asks for 0."""
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    """0 and -1 keep all tokens."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | Strings | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] = 1
    user: str | None = None
    """Told by some clients; of no effect."""
    presence_penalty: NotUsed = 0
    frequency_penalty: NotUsed = 0
    repetition_penalty: NotScaled = 1
    min_p: NotUsed = 0
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    return_token_ids: bool = False
    cache_prompt: bool | None = None
    """False: nothing that is held of the request before may be used."""
    cache_salt: str | None = None
    """As `cache_prompt = false`, in vLLM's words."""

    @model_validator(mode="before")
    @classmethod
    def _left_out(cls, told: Any) -> Any:
        return {key: value for key, value in told.items() if value is not None} if isinstance(told, dict) else told

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_fresh(self) -> bool:
        return self.cache_prompt is False or self.cache_salt is not None

    def check(self) -> None:
        """What no single key says. Raises `BadRequestError`."""
        if len(self.stops) > MOST_STOPS:
            raise BadRequestError(f"stop: {len(self.stops)} strings; give at most {MOST_STOPS}")
        if self.min_tokens and not self.ignore_eos:
            raise BadRequestError(
                f"min_tokens {self.min_tokens}: end tokens are never forbidden for a part of an answer; send"
                " ignore_eos = true for an exact length"
            )
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("stream_options: only with stream = true")


class CompletionAsked(Asked):
    prompt: str | Ids | Strings | Annotated[list[Ids], Field(max_length=MOST_PROMPTS, fail_fast=True)]
    max_tokens: int = Field(DEFAULT_TOKENS, ge=0, le=MOST_TOKENS)
    """0 only with echo: the prompt is scored, and nothing is added."""
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    echo: bool = False
    best_of: Literal[1] = 1
    return_tokens_as_token_ids: bool = False

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several, each as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast(list[str] | list[list[int]], self.prompt)

    def check(self) -> None:
        super().check()
        if not self.prompts:
            raise BadRequestError("prompt: is an empty list; give a text, or token ids")
        if len(self.prompts) > MOST_PROMPTS:
            raise BadRequestError(f"prompt: {len(self.prompts)} of them; give at most {MOST_PROMPTS} at once")
        if self.max_tokens == 0 and not self.echo:
            raise BadRequestError("max_tokens 0: asks for nothing; add echo = true to score the prompt, or ask for 1")
        if self.stream and (len(self.prompts) > 1 or self.echo):
            raise BadRequestError("stream: takes one prompt, and no echo; leave stream out")


class TextPart(_Keys):
    type: Literal["text"]
    text: str


class Message(_Keys):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]

    @property
    def said(self) -> dict[str, str]:
        """As a chat template takes it. Parts are lines, as in vLLM and llama-server."""
        content = self.content
        return {
            "role": self.role,
            "content": content if isinstance(content, str) else "\n".join(part.text for part in content),
        }


class ChatAsked(Asked):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """The newer name of `max_tokens`: clients that know both servers give both."""

    def check(self) -> None:
        super().check()
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise BadRequestError(
                f"max_tokens {self.max_tokens} and max_completion_tokens {self.max_completion_tokens} are two names of"
                " one limit; give one of them"
            )

    @property
    def most_tokens(self) -> int | None:
        """None: as many as the model has room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


A = TypeVar("A", CompletionAsked, ChatAsked)


def read_asked(schema: type[A], body: bytes) -> A:
    """Raises `BadRequestError` with all that is wrong."""
    if _opens_many(body):
        raise BadRequestError(f"the body has more than {MOST_OPENED} objects and lists; ask for less at once")
    try:
        asked = schema.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise BadRequestError(printable("; ".join(dict.fromkeys(map(_told, error.errors()))), 1000)) from error
    asked.check()
    return asked


def _opens_many(body: bytes) -> bool:
    if body.count(b"{") + body.count(b"[") <= MOST_OPENED:
        return False
    opened = (found for found in _OPENED.finditer(body) if found[1])
    return next(islice(opened, MOST_OPENED, None), None) is not None


def _told(error: Any) -> str:
    if error["loc"][:1] == ("messages",) and error["loc"][2:3] == ("content",) and error["loc"][3:]:
        # One error for each kind that it could have been.
        return f'messages[{error["loc"][1]}].content: must be a text, or parts {{"type": "text", "text": "..."}} alone'
    where = _place(error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{where}: this server does not know the key; leave it out"
    if where == "prompt" and error["type"] != "missing":
        return f"prompt: must be a text, a list of token ids, or a list of several of one kind, {MOST_PROMPTS} at most"
    if error["type"] == "missing":
        return f"{where}: is missing"
    if error["type"] == "json_invalid":
        return f"the body is no JSON ({error['msg']})"
    return f"{where}: {error['msg']} (found {reprlib.repr(error['input']):.60})"


def _place(loc: Sequence[str | int]) -> str:
    """`messages[0].content`. Of other keys the name alone: behind it stand kinds that the value could have been."""
    if not loc:
        return "the body"
    inner = loc[1:] if loc[0] == "messages" else ()
    return str(loc[0]) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inner)
