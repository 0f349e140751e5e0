"""What a server said, read with suspicion: texts, ids and counts of the types that they should have, or an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engines.errors import EngineError
from results.printable import printable


class Usage(NamedTuple):
    """As the server counts; None where it does not say."""

    n_prompt: int | None = None
    n_new: int | None = None
    n_cached: int | None = None


NOT_COUNTED = Usage()


@dataclass
class Piece:
    """A chunk that brought something of the answer. n_so_far: tokens of the answer until here, where it counts them."""

    at_s: float
    text: str
    token_ids: tuple[int, ...]
    n_so_far: int | None = None


@dataclass
class Streamed:
    """Of a stream: its pieces, and what it said at its end."""

    pieces: list[Piece] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    """Names of the model that answers, as the server told them."""
    n_told_ids: int = 0
    usage: Usage = NOT_COUNTED
    finish_reason: str | None = None
    end_s: float | None = None
    """When the last chunk was here that says anything of the answer."""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for piece in self.pieces for token in piece.token_ids)

    def add(self, at_s: float, told: Any) -> bool:
        """Whether it brought something of the answer. Raises `EngineError`."""
        mapping = _mapping(told, "a chunk")
        if (model := model_in(mapping)) is not None:
            self.models.add(model)
        usage = usage_in(mapping)
        # What one chunk told, a later one that is silent of it does not take back.
        self.usage = Usage(*(was if now is None else now for now, was in zip(usage, self.usage, strict=True)))
        choices = mapping.get("choices") or []
        if not isinstance(choices, list) or len(choices) > 1:
            raise EngineError(f"choices: one was asked, found {_shown(choices)}")
        if not choices:
            return False
        choice = _mapping(choices[0], "a choice")
        text, token_ids = _text(choice), ids_in(choice)
        reason = choice.get("finish_reason")
        if reason is not None:
            self.finish_reason, self.end_s = str(reason)[:80], at_s
        # A first chunk that only names the role, or a last one that only ends, is no token.
        if not text and not token_ids:
            return False
        self.pieces.append(Piece(at_s, text, token_ids, usage.n_new))
        self.n_told_ids += len(token_ids)
        self.end_s = at_s
        return True


def model_in(told: Mapping[str, Any]) -> str | None:
    """None where the server does not say which model answers."""
    found = told.get("model")
    return found if isinstance(found, str) and found else None


def usage_in(told: Mapping[str, Any]) -> Usage:
    """Also where llama-server tells what it held (`timings`)."""
    found = told.get("usage")
    timings = told.get("timings")
    held = timings.get("cache_n") if isinstance(timings, dict) else None
    if found is None:
        return Usage(None, None, _count(held, "timings.cache_n"))
    usage = _mapping(found, "usage")
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        _count(usage.get("prompt_tokens"), "usage.prompt_tokens"),
        _count(usage.get("completion_tokens"), "usage.completion_tokens"),
        _count(held if cached is None else cached, "usage.prompt_tokens_details.cached_tokens"),
    )


def ids_in(choice: Mapping[str, Any]) -> tuple[int, ...]:
    """Of new tokens: vLLM's key, or the ids in llama-server's log-probabilities."""
    found = choice.get("token_ids")
    if found is None:
        scored = choice.get("logprobs")
        content = scored.get("content") if isinstance(scored, dict) else None
        found = [row.get("id") for row in content if isinstance(row, dict)] if isinstance(content, list) else []
    if not isinstance(found, list) or not all(type(token) is int and token >= 0 for token in found):
        raise EngineError(f"token ids: must be numbers from 0 on, found {_shown(found)}")
    return tuple(found)


class Scored(NamedTuple):
    """Of a text with its prompt: each token's name, its log-probability, and those of the likeliest at its place."""

    tokens: Sequence[str]
    log_probabilities: Sequence[Any]
    likeliest: Sequence[Any]


def scored_in(told: Any) -> Scored:
    """Of an answer with echo and logprobs. Raises `EngineError`."""
    choices = _mapping(told, "the answer").get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        raise EngineError(f"choices: one was asked, found {_shown(choices)}")
    found = _mapping(choices[0], "a choice").get("logprobs")
    if not isinstance(found, dict) or not isinstance(found.get("token_logprobs"), list):
        raise EngineError(
            f"logprobs: no log-likelihoods of the prompt came, found {_shown(found)}; the server does not score"
            " prompts, or is of another flavour"
        )
    lists = [found.get(key) for key in ("tokens", "token_logprobs", "top_logprobs")]
    n = len(found["token_logprobs"])
    if not all(isinstance(one, list) and len(one) == n for one in lists):
        raise EngineError(f"logprobs: tokens, token_logprobs and top_logprobs must be as long, found {_shown(found)}")
    return Scored(*(one or [] for one in lists))


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    found = choice.get("text") if not isinstance(delta, dict) else delta.get("content")
    if found is None:
        return ""
    if not isinstance(found, str):
        raise EngineError(f"text: must be a text, found {_shown(found)}")
    return found


def _count(found: Any, what: str) -> int | None:
    if found is None:
        return None
    if type(found) is not int or not 0 <= found < 1 << 40:
        raise EngineError(f"{what}: must be a count, found {_shown(found)}")
    return found


def _mapping(found: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise EngineError(f"{what}: must be an object, found {_shown(found)}")
    return found


def _shown(found: Any) -> str:
    return printable(repr(found), 80)
