"""Servers that speak OpenAI's protocol, and how each is told what the protocol itself has no word for.

From the documentation and the request schemas of each, in 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

FlavourName = Literal["joulebench", "vllm", "sglang", "llama-server", "ollama", "openai"]
IGNORE_EOS: Mapping[str, Any] = MappingProxyType({"ignore_eos": True})


@dataclass(frozen=True)
class Flavour:
    """exact: keys for an answer of exactly so many tokens; none: it cannot be asked. least: the key that forbids end
    tokens before the asked number. fresh: keys that let nothing of an earlier prompt be used. salt: the key that does
    so by a value of its own for each request. ids: keys by which the new tokens' ids come back. plain: keys that turn
    off penalties of the server or of the model's generation_config.json. draws: keys by which a request that draws is
    held to what it asks.
    """

    takes_ids: bool
    """A prompt as token ids. Without, it gets a text, and its own count of the prompt must agree with ours."""
    exact: Mapping[str, Any] = field(default_factory=dict)
    least: str | None = None
    fresh: Mapping[str, Any] = field(default_factory=dict)
    salt: str | None = None
    ids: Mapping[str, Any] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)
    draws: Mapping[str, Any] = field(default_factory=dict)
    continuous_usage: bool = False
    """It counts the tokens with each chunk, where that is asked."""
    scores_prompts: bool = False
    """`echo` with `logprobs` tells what the model says of each token of the prompt."""
    names_ids: bool = False
    """`return_tokens_as_token_ids` writes tokens as their ids there."""
    top_k: bool = False
    version_road: str | None = None
    """Where it tells its build, beside the protocol."""
    version_keys: tuple[str, ...] = ("version",)


FLAVOURS: Mapping[FlavourName, Flavour] = MappingProxyType(
    {
        "joulebench": Flavour(
            takes_ids=True,
            exact=IGNORE_EOS,
            fresh={"cache_prompt": False},
            ids={"return_token_ids": True},
            continuous_usage=True,
            scores_prompts=True,
            names_ids=True,
            top_k=True,
            version_road="/version",
        ),
        "vllm": Flavour(
            takes_ids=True,
            exact=IGNORE_EOS,
            least="min_tokens",
            salt="cache_salt",
            ids={"return_token_ids": True},
            # What a request leaves out they take from generation_config.json, greedy or not.
            plain={"repetition_penalty": 1.0},
            draws={"top_k": -1, "min_p": 0.0},
            continuous_usage=True,
            scores_prompts=True,
            names_ids=True,
            top_k=True,
            version_road="/version",
        ),
        "sglang": Flavour(
            takes_ids=True,
            exact=IGNORE_EOS,
            least="min_tokens",
            salt="cache_salt",
            ids={"return_token_ids": True},
            # What a request leaves out they take from generation_config.json, greedy or not.
            plain={"repetition_penalty": 1.0},
            draws={"top_k": -1, "min_p": 0.0},
            continuous_usage=True,
            scores_prompts=True,
            top_k=True,
            version_road="/get_server_info",
        ),
        "llama-server": Flavour(
            takes_ids=True,
            exact=IGNORE_EOS,
            fresh={"cache_prompt": False},
            # Its log-probabilities carry the ids; it has no other key for them on this road.
            ids={"logprobs": 1},
            plain={"repeat_penalty": 1.0},
            # Else from the 40 likeliest, and of them by 0.05 of the likeliest.
            draws={"top_k": 0, "min_p": 0.0},
            top_k=True,
            version_road="/props",
            version_keys=("build_info",),
        ),
        "ollama": Flavour(takes_ids=False, version_road="/api/version"),
        "openai": Flavour(takes_ids=True),
    }
)
