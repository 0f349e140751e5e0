"""What is asked and how it is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from results.messages import readable
from results.records import Completion, Divergence, Request, Sample, Score


class Tokenizer(Protocol):
    """The part of a tokenizer that workloads need; `engines.model.tokenizer.Tokenizer` is one."""

    name: str
    """Equal names mean equal token ids and chat prompts: requests are built once for each name."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    """What a text of which every token is asked begins with; None for a model without a begin token."""

    @property
    def vocabulary_size(self) -> int: ...
    @property
    def has_chat_template(self) -> bool:
        """Whether the model brought one of its own; else `chat` makes plain text, as any other."""
        ...

    def encode(self, text: str) -> list[int]: ...
    def encode_prompt(self, text: str) -> list[int]:
        """With the tokens that the model expects before a text, such as a begin token."""
        ...

    def decode(self, token_ids: list[int]) -> str: ...
    def chat(self, messages: list[dict[str, str]]) -> str:
        """The prompt of a conversation ([{"role", "content"}]) up to and including the cue for the assistant."""
        ...


class WorkloadError(Exception):
    """Data that is absent, of another schema, or does not fit the model: what, the value found, the remedy."""

    def __str__(self) -> str:
        return readable(super().__str__())


def n_tokens(request: Request) -> int:
    """Tokens that the model must hold for a request: the prompt and its answer.

    A continuation's last token is asked about and never read.
    """
    return len(request.prompt_ids) + max(0, len(request.continuation_ids) - 1) + request.max_new_tokens


class Workload(Protocol):
    """A set of requests and their scoring. Building and scoring happen outside the measured window."""

    name: str
    data_source: str
    """Where the items came from, for the tables: "sample", "generated", a folder, or a hub id."""
    scored: bool
    """False for latency and energy workloads."""
    notes: tuple[str, ...]
    """What a reader must know of the requests last built: turns skipped, fewer items than asked for. Often empty."""

    def requests(self, tokenizer: Tokenizer, max_length: int) -> Sequence[Request]:
        """The same requests for every arm with the same tokenizer. Raises `WorkloadError`.

        Each fits the model: prompt and answer (new tokens, or the continuation up to its last) are at most
        `max_length` tokens.
        """
        ...

    def calibration_prompts(self, tokenizer: Tokenizer, max_length: int, n: int) -> Sequence[Sequence[int]]:
        """Up to n prompts of the same kind from items that `requests` never asks (train split, other seed)."""
        ...

    def score(self, requests: Sequence[Request], completions: Sequence[Completion]) -> Sequence[Score]:
        """Per-sample scores and the aggregates (sample_id None). Completions come in the order of the requests."""
        ...


@runtime_checkable
class TellsEarly(Protocol):
    """A workload whose samples are all of one size: one of them shows what all would, before they are built."""

    @property
    def most_tokens(self) -> int:
        """That the model must hold for one of its requests (`n_tokens`); known without a tokenizer."""
        ...

    def has_requests(self, tokenizer: Tokenizer, max_length: int) -> bool:
        """Whether `requests` would give any; the notes say why not. Raises `WorkloadError` where it would."""
        ...


@runtime_checkable
class TellsSamples(Protocol):
    """A workload that knows its samples in words; of others, a report shows the prompts."""

    def samples(self) -> Sequence[Sample]:
        """What each asked sample says, by its id. Examples before the question are left out."""
        ...


@runtime_checkable
class TellsExpected(Protocol):
    """A workload that knows the right answers, but whose questions are as long as a tokenizer makes them."""

    def expected(self) -> Mapping[str, str]:
        """Right answers by sample id."""
        ...


@runtime_checkable
class ComparesDistributions(Protocol):
    """A workload that scores how far an arm's next-token distributions are from the reference arm's."""

    def score_divergences(self, divergences: Sequence[Divergence]) -> Sequence[Score]:
        """Per-sample scores and the aggregates. One divergence for each request, in their order."""
        ...
