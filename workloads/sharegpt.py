"""ShareGPT: conversations of people with an assistant, replayed turn by turn. Not scored.

Each human turn that has a recorded answer is one request, whose length bounds the new tokens. A turn's prompt is the
conversation so far, with the recorded answers (every arm is asked the same) or with what the model said itself
(`answers`). The engine's `reuse_prefix` says whether the conversation so far is computed again. Of a turn's prompt this
is computed:

    answers     reuse_prefix = false    reuse_prefix = true
    recorded    all of it               from where the recorded answer differs from the model's: that answer, the turn
    generated   all of it               the turn, and the last token of the answer, which was chosen but never read

(Under a technique that couples tokens only whole prefill chunks are kept: `engines.prefix`.)

A third of the file begins in the middle of a conversation, with an answer to a question that is not there. Such answers
are left out and the replay starts at the first human turn. Neighbouring messages of one role are joined. A turn whose
question or answer is blank is left out and counted: an answer of no tokens bounds none. Turns that are too long for the
model are left out, never cut, and `notes` counts them, or they are an error (`too_long`). The last fifth of the file is
never asked: it is for calibration.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path

from pydantic import Field

from results.records import Record
from workloads.base import Tokenizer, WorkloadError, n_tokens
from workloads.conversations import (
    STANDS_ON_OWN_ANSWERS,
    Answers,
    Message,
    Turn,
    conversation_requests,
    template_notes,
    whole_turn,
)
from workloads.datasets import Dataset, Row, SourceKind, choose, data_source, shortage
from workloads.fitting import TooLong, fitting
from workloads.generation import Built, GenerationWorkload
from workloads.small_talk import sharegpt_rows

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
}


class ShareGPTParameters(Record):
    """What a plan may say about the replay."""

    limit: int | None = Field(default=None, ge=1)
    """Conversations, a random subset; None: all that are not reserved for calibration."""
    max_turns: int | None = Field(default=None, ge=1)
    """Human turns of each conversation, from its start; None: all."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Upper bound of an answer; the recorded answer's length is the other bound."""
    answers: Answers = "recorded"
    """Those that stand in a turn's prompt: of the file, or what the model said."""
    too_long: TooLong = "skip"
    """Turns longer than the model's context."""
    seed: int = 0
    data: SourceKind | None = None
    """None: the data folder where the run has one, else the bundled sample."""


def _problem(row: Row) -> str | None:
    messages, own_id = row["conversations"], row["id"]
    if own_id is not None and (not isinstance(own_id, str | int) or isinstance(own_id, bool)):
        return f"id must be a text or a whole number, found {own_id!r:.80}"
    if not isinstance(messages, list) or not messages:
        return f"conversations must be a list of messages, found {messages!r:.80}"
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("value"), str):
            return f'a message must have "from" and "value", found {message!r:.80}'
        role = message.get("from")
        if not isinstance(role, str) or role not in ROLES:
            return f"unknown role {role!r:.80} (known: {', '.join(ROLES)})"
    return None


DATASET = Dataset(
    name="sharegpt",
    hub_id="anon8231489123/ShareGPT_Vicuna_unfiltered",
    hub_files="ShareGPT_V3_unfiltered_cleaned_split.json",
    columns=("id", "conversations"),
    problem=_problem,
    generate=sharegpt_rows,
)


class ShareGPT(GenerationWorkload):
    name = "sharegpt"

    def __init__(self, parameters: ShareGPTParameters, data_root: Path | None) -> None:
        super().__init__()
        self._parameters = parameters
        self._source = data_source(parameters.data, data_root)
        self.data_source = self._source.label(DATASET)
        self._conversations: list[Row] | None = None
        self._notes_of_ids: tuple[str, ...] = ()

    def calibration_prompts(self, tokenizer: Tokenizer, max_length: int, n: int) -> Sequence[Sequence[int]]:
        """Turns of the reserved conversations, from the end of the file."""
        reserved = reversed(self._split()[1])
        talks = ((row["id"], _messages(row["conversations"])) for row in reserved)
        requests = (whole_turn(turn, tokenizer) for talk in talks for turn in self._turns(*talk, tokenizer))
        return [r.prompt_ids for r in islice((r for r in requests if n_tokens(r) <= max_length), n)]

    def _build(self, tokenizer: Tokenizer, max_length: int) -> Built:
        asked, reserved = self._split()
        chosen = [asked[i] for i in choose(len(asked), self._parameters.limit, self._parameters.seed)]
        talks = [_messages(row["conversations"]) for row in chosen]
        asked_for = [
            request
            for row, messages in zip(chosen, talks, strict=True)
            for request in conversation_requests(
                list(self._turns(row["id"], messages, tokenizer)), tokenizer, self._parameters.answers
            )
        ]
        if not asked_for:
            raise WorkloadError(
                f"sharegpt: no human turn of {len(chosen)} conversations has an answer behind it, and no other is asked"
                f" ({self.data_source}); raise limit, or name other data"
            )
        requests, skipped = fitting(asked_for, max_length, self._parameters.too_long, self.name, "turns")
        if not requests:
            raise WorkloadError(
                f"sharegpt: none of {len(asked_for)} turns of {len(chosen)} conversations fits the model's "
                f"{max_length} tokens; lower max_new_tokens, or use a model with a longer context"
            )
        notes = [*self._notes_of_ids, *shortage(len(asked), self._parameters.limit, len(reserved)), *skipped]
        if self._parameters.answers == "generated":
            notes.append(STANDS_ON_OWN_ANSWERS)
        if n_chunks := sum(ROLES[row["conversations"][0]["from"]] == "assistant" for row in chosen):
            notes.append(f"{n_chunks} of {len(chosen)} conversations begin with an answer, which was left out")
        if n_blank := sum(_is_blank(messages, i) for messages in talks for i in self._answered(messages)):
            notes.append(f"{n_blank} turns have a blank question or answer, and were left out")
        return Built(requests, (*notes, *template_notes(tokenizer)))

    def _split(self) -> tuple[list[Row], list[Row]]:
        """(conversations that may be asked, reserved ones), each with an id of its own."""
        if self._conversations is None:
            rows = self._source.rows(DATASET, "test")
            self._conversations, self._notes_of_ids = _told_apart(rows)
        n_reserved = max(1, len(self._conversations) // 5)
        if n_reserved == len(self._conversations):
            raise WorkloadError(
                f"sharegpt: {self.data_source} has one conversation; add another, since the last is for calibration"
            )
        return self._conversations[:-n_reserved], self._conversations[-n_reserved:]

    def _turns(self, own_id: str, messages: list[Message], tokenizer: Tokenizer) -> Iterator[Turn]:
        """The human turns that were answered, numbered from 1 in the conversation."""
        for number, i in enumerate(self._answered(messages), start=1):
            if _is_blank(messages, i):
                continue
            n_answer_tokens = len(tokenizer.encode(messages[i + 1]["content"]))
            yield Turn(
                f"sharegpt/{own_id}/turn{number}",
                messages[: i + 1],
                max(1, min(n_answer_tokens, self._parameters.max_new_tokens)),
            )

    def _answered(self, messages: Sequence[Message]) -> list[int]:
        """Positions of the questions with an answer behind them."""
        return [
            i
            for i in range(len(messages) - 1)
            if messages[i]["role"] == "user" and messages[i + 1]["role"] == "assistant"
        ][: self._parameters.max_turns]


def _is_blank(messages: Sequence[Message], i: int) -> bool:
    """A question, or the answer behind it."""
    return not all(message["content"].strip() for message in messages[i : i + 2])


def _told_apart(rows: Sequence[Row]) -> tuple[list[Row], tuple[str, ...]]:
    """Conversations with an id of their own, as text, and what was done to those that had none.

    One without an id is named after its place, by a name that no other has as its id. Of several with one id the first
    is kept: published files hold the same conversation more than once.
    """
    ids = {str(row["id"]) for row in rows if row["id"] is not None}
    by_id: dict[str, Row] = {}
    n_unnamed = n_repeated = 0
    for number, row in enumerate(rows, start=1):
        n_unnamed += row["id"] is None
        own_id = _free_name(f"row{number}", ids) if row["id"] is None else str(row["id"])
        n_repeated += own_id in by_id
        by_id.setdefault(own_id, {**row, "id": own_id})
    notes = []
    if n_unnamed:
        notes.append(f"{n_unnamed} of {len(rows)} conversations have no id and are named after their row")
    if n_repeated:
        notes.append(f"{n_repeated} of {len(rows)} conversations have the id of one before, and were left out")
    return list(by_id.values()), tuple(notes)


def _free_name(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name


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
