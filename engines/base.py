"""What the harness asks of an engine, and what an engine reports while it works."""

from __future__ import annotations

from typing import Literal, Protocol

from results.records import Completion, EngineCounters, Request

PhaseEvent = Literal["request start", "prefill end", "request end"]


class PhaseListener(Protocol):
    """Called by the engine at each phase edge with the time stamp it also puts into the `Completion`.

    A meter that can be read at will takes a reading here, so that phases shorter than the sampling interval resolve.
    """

    def __call__(self, event: PhaseEvent, at_s: float) -> None: ...


class Tokenizer(Protocol):
    """The part of a tokenizer that workloads need. `name` identifies it in hashes."""

    name: str
    eos_token_ids: tuple[int, ...]

    @property
    def vocabulary_size(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: list[int]) -> str: ...
    def chat(self, messages: list[dict[str, str]]) -> str:
        """The prompt of a conversation ([{"role", "content"}]) up to and including the cue for the assistant."""
        ...


class Engine(Protocol):
    """A model that answers requests. At least: the reference engine, and the modelled engine of `engines.schedule`."""

    tokenizer: Tokenizer
    max_length: int
    time_method: Literal["measured", "modelled"]

    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        """Answers one request. Raises `EngineError` on a request that it cannot take."""
        ...

    def take_counters(self) -> EngineCounters:
        """What the technique did since the last call, and starts counting anew."""
        ...


class EngineError(Exception):
    """A request or a model that the engine cannot take: what, the value found, the remedy."""
