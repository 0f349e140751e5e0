"""A server that speaks OpenAI's protocol: vLLM, SGLang, llama-server, Ollama, `joulebench serve`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from engines.base import Engine
from engines.errors import EngineError
from engines.external.base import Abilities, Found, Surroundings
from engines.external.openai_flavours import FlavourName
from harness.external.base import ExternalSpec

FIND_TIMEOUT_S = 10.0
"""For a server to say what it is."""


class OpenAISpec(ExternalSpec):
    """What a server of this flavour cannot do is told when it is asked for it, and is "not supported"."""

    tag: ClassVar[str] = "openai"
    what: ClassVar[str] = "a server that speaks OpenAI's protocol, streamed: vLLM, SGLang, llama-server, Ollama"
    abilities: ClassVar[Abilities] = Abilities(
        token_ids=True,
        loglikelihoods=True,
        stamps="chunk",
        only_fixed_lengths=False,
        samples=True,
        threads="no",
        cores="no",
    )

    runs: Literal["openai"]
    url: str = Field(min_length=1, max_length=500)
    """Up to and with /v1: "http://127.0.0.1:8000/v1"."""
    model: str | None = Field(None, min_length=1, max_length=200)
    """By the server's own name; the only one that it has where it is not given."""
    flavour: FlavourName = "openai"
    """Whose server it is, for what the protocol has no word for: exact lengths, no prefix cache, ids of tokens."""
    key_variable: str | None = Field(None, min_length=1, max_length=200)
    """Environment variable that holds the key. The key itself is sent, and kept nowhere."""
    timeout_s: float = Field(600.0, gt=0, le=86_400)
    """For the first token of an answer, and between two chunks that bring some."""
    cache_is_off: bool = False
    """Your word that the server uses nothing of earlier prompts, where it cannot be told so by each request."""

    @field_validator("key_variable")
    @classmethod
    def _is_a_name(cls, told: str | None) -> str | None:
        if told is not None and not (told.isascii() and told.isidentifier()):
            raise ValueError("must be the name of an environment variable that holds the key, and not the key itself")
        return told

    @classmethod
    def look(cls, environments: Sequence[Path] = ()) -> Found:
        raise EngineError('a plan names the server, as url = "http://127.0.0.1:8000/v1"')

    def problems(self) -> Iterator[str]:
        from engines.external.openai_link import checked_url

        yield from super().problems()
        if self.model_file is not None:
            yield "model_file: a server has its model already; remove the line"
        try:
            checked_url(self.url)
        except EngineError as error:
            yield f"url: {str(error).removeprefix('url: ')}"

    def find(self) -> Found:
        """Asks the server what it is."""
        import time

        from engines.external.openai import model_names, told_version
        from engines.external.openai_link import ServerLink

        link = ServerLink(self.url, self.key_variable, min(self.timeout_s, FIND_TIMEOUT_S), time.perf_counter)
        try:
            names = model_names(link)
            if self.model is not None and self.model not in names:
                raise EngineError(f"{link.url}: has no model {self.model!r:.100}; it has {', '.join(names)[:300]}")
            version = told_version(link, self.flavour)
        finally:
            link.close()
        told = [f"{self.flavour} {version}" if version else None, f"model {self.model or ', '.join(names)}"]
        return Found(link.url, "; ".join(filter(None, told)))

    def build(self, around: Surroundings) -> Engine:
        from engines.external.openai import OpenAIEngine, ServerOptions

        options = ServerOptions(
            self.url, self.model, self.flavour, self.key_variable, self.timeout_s, self.cache_is_off
        )
        facts = around.facts
        return OpenAIEngine(options, facts.tokenizer, facts.config.max_length, around.now_s, around.device.name)
