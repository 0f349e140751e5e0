"""ShareGPT: conversations of people with an assistant, replayed turn by turn. Not scored.

Each human turn that has a recorded answer is one request: its prompt is the conversation so far with the recorded
answers, not the model's own, so every arm is asked the same. The recorded answer's length bounds the new tokens.

A third of the file begins in the middle of a conversation, with an answer to a question that is not there. Such
answers are left out and the replay starts at the first human turn. Neighbouring messages of one role are joined. Turns
that are too long for the model are left out, never cut; `notes` counts them. The last fifth of the file is never asked:
it is for calibration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from results.records import Completion, Record, Request, Score
from workloads.base import Tokenizer, WorkloadError, n_tokens
from workloads.datasets import Dataset, Row, SourceKind, choose, data_source, shortage

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
}
Message = dict[str, str]


class ShareGPTParameters(Record):
    """What a plan may say about the replay."""

    limit: int | None = Field(default=None, ge=1)
    """Conversations, a random subset; None: all that are not reserved for calibration."""
    max_turns: int | None = Field(default=None, ge=1)
    """Human turns of each conversation, from its start; None: all."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Upper bound of an answer; the recorded answer's length is the other bound."""
    seed: int = 0
    data: SourceKind | None = None
    """None: the data folder where the run has one, else the bundled sample."""


def _problem(row: Row) -> str | None:
    messages = row["conversations"]
    if not isinstance(messages, list) or not messages:
        return f"conversations must be a list of messages, found {messages!r:.80}"
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("value"), str):
            return f'a message must have "from" and "value", found {message!r:.80}'
        if message.get("from") not in ROLES:
            return f"unknown role {message.get('from')!r} (known: {', '.join(ROLES)})"
    return None


DATASET = Dataset(
    name="sharegpt",
    hub_id="anon8231489123/ShareGPT_Vicuna_unfiltered",
    hub_files="ShareGPT_V3_unfiltered_cleaned_split.json",
    columns=("id", "conversations"),
    problem=_problem,
)


class Turn(NamedTuple):
    """One human message in its context, and what was answered then."""

    sample_id: str
    history: list[Message]
    answer: str


class ShareGPT:
    name = "sharegpt"
    scored = False

    def __init__(self, parameters: ShareGPTParameters, data_root: Path | None) -> None:
        self._parameters = parameters
        self._source = data_source(parameters.data, data_root)
        self.data_source = self._source.label(DATASET)
        self.notes: tuple[str, ...] = ()
        self._conversations: list[Row] | None = None
        self._built: dict[tuple[str, int], tuple[tuple[Request, ...], tuple[str, ...]]] = {}

    def requests(self, tokenizer: Tokenizer, max_length: int) -> Sequence[Request]:
        key = (tokenizer.name, max_length)
        if key not in self._built:
            self._built[key] = self._build(tokenizer, max_length)
        requests, self.notes = self._built[key]
        return requests

    def calibration_prompts(self, tokenizer: Tokenizer, max_length: int, n: int) -> Sequence[Sequence[int]]:
        """Turns of the reserved conversations, from the end of the file."""
        reserved = reversed(self._split()[1])
        turns = (turn for row in reserved for turn in _turns(row, self._parameters.max_turns))
        requests = (self._request(turn, tokenizer) for turn in turns)
        return [r.prompt_ids for r in islice((r for r in requests if n_tokens(r) <= max_length), n)]

    def score(self, requests: Sequence[Request], completions: Sequence[Completion]) -> Sequence[Score]:
        """Nothing: there is no right answer to an open question."""
        return ()

    def _build(self, tokenizer: Tokenizer, max_length: int) -> tuple[tuple[Request, ...], tuple[str, ...]]:
        asked, _ = self._split()
        chosen = [asked[i] for i in choose(len(asked), self._parameters.limit, self._parameters.seed)]
        turns = [turn for row in chosen for turn in _turns(row, self._parameters.max_turns)]
        candidates = [self._request(turn, tokenizer) for turn in turns]
        requests = tuple(r for r in candidates if n_tokens(r) <= max_length)
        if not requests:
            raise WorkloadError(
                f"sharegpt: none of {len(turns)} turns of {len(chosen)} conversations fits the model's {max_length} "
                "tokens; lower max_new_tokens, or use a model with a longer context"
            )
        notes = list(shortage(len(asked), self._parameters.limit))
        if n_skipped := len(turns) - len(requests):
            notes.append(f"{n_skipped} of {len(turns)} turns skipped: longer than {max_length} tokens")
        if n_chunks := sum(ROLES[row["conversations"][0]["from"]] == "assistant" for row in chosen):
            notes.append(f"{n_chunks} of {len(chosen)} conversations begin with an answer, which was left out")
        return requests, tuple(notes)

    def _split(self) -> tuple[list[Row], list[Row]]:
        """(conversations that may be asked, reserved ones), each with an id of its own."""
        if self._conversations is None:
            rows = self._source.rows(DATASET, "test")
            by_id = {row["id"]: row for row in reversed(rows)}
            self._conversations = [row for row in rows if by_id[row["id"]] is row]
        n_reserved = max(1, len(self._conversations) // 5)
        if n_reserved == len(self._conversations):
            raise WorkloadError(
                f"sharegpt: {self.data_source} has one conversation; add another, since the last is for calibration"
            )
        return self._conversations[:-n_reserved], self._conversations[-n_reserved:]

    def _request(self, turn: Turn, tokenizer: Tokenizer) -> Request:
        n_answer_tokens = len(tokenizer.encode(turn.answer))
        return Request(
            request_id=turn.sample_id,
            sample_id=turn.sample_id,
            kind="generate",
            prompt_ids=tuple(tokenizer.encode(tokenizer.chat(turn.history))),
            max_new_tokens=max(1, min(n_answer_tokens, self._parameters.max_new_tokens)),
        )


def _turns(conversation: Row, max_turns: int | None) -> Iterator[Turn]:
    """The human turns that were answered, numbered from 1 in the conversation."""
    messages = _messages(conversation["conversations"])
    number = 0
    for i in range(len(messages) - 1):
        if messages[i]["role"] == "user" and messages[i + 1]["role"] == "assistant":
            number += 1
            if max_turns is not None and number > max_turns:
                return
            yield Turn(f"sharegpt/{conversation['id']}/turn{number}", messages[: i + 1], messages[i + 1]["content"])


def _messages(recorded: Sequence[Message]) -> list[Message]:
    """In chat form, from the first human turn on (a system message before it is kept), same roles joined."""
    messages: list[Message] = []
    for message in recorded:
        role, content = ROLES[message["from"]], message["value"]
        if role == "assistant" and not any(m["role"] == "user" for m in messages):
            continue
        if messages and messages[-1]["role"] == role:
            messages[-1] = {"role": role, "content": messages[-1]["content"] + "\n\n" + content}
        else:
            messages.append({"role": role, "content": content})
    return messages
