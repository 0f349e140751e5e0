"""MT-bench (Zheng et al., 2023): 80 questions of eight kinds, each with a second one about the answer. Not scored.

The benchmark's score is a judgement by another model; what is measured here is what answering takes. The second turn
stands on the model's own first answer, since there is none on record: arms that answer otherwise are asked other
prompts. Every fifth question is never asked, two of each kind: these are for calibration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from pydantic import Field

from results.records import Record, Request
from workloads.base import Tokenizer, WorkloadError, n_tokens
from workloads.conversations import (
    STANDS_ON_OWN_ANSWERS,
    Message,
    Turn,
    conversation_requests,
    template_notes,
    whole_turn,
)
from workloads.datasets import Dataset, Row, choose, data_source, shortage
from workloads.fitting import TooLong, fitting
from workloads.generation import Built, GenerationWorkload

RESERVED_EVERY = 5


class MTBenchParameters(Record):
    """What a plan may say about MT-bench."""

    limit: int | None = Field(default=None, ge=1)
    """Questions of two turns, a random subset; None: all that are not reserved for calibration."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Of each turn."""
    too_long: TooLong = "skip"
    """Turns longer than the model's context, were all answers before them as long as they may be."""
    seed: int = 0
    data: Literal["sample", "folder"] | None = None
    """None: the data folder where the run has one, else the bundled sample."""


def _problem(row: Row) -> str | None:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        return f"turns must be a list of questions, none of them empty, found {turns!r:.80}"
    return None


DATASET = Dataset(
    name="mt_bench",
    hub_id="FastChat's question.jsonl",
    columns=("question_id", "category", "turns"),
    problem=_problem,
)


class MTBench(GenerationWorkload):
    name = "mt_bench"

    def __init__(self, parameters: MTBenchParameters, data_root: Path | None) -> None:
        super().__init__()
        self._parameters = parameters
        self._source = data_source(parameters.data, data_root)
        self.data_source = self._source.label(DATASET)

    def calibration_prompts(self, tokenizer: Tokenizer, max_length: int, n: int) -> Sequence[Sequence[int]]:
        """First turns of the reserved questions."""
        requests = (whole_turn(self._turns(row)[0], tokenizer) for row in self._split()[1])
        return [r.prompt_ids for r in islice((r for r in requests if n_tokens(r) <= max_length), n)]

    def _build(self, tokenizer: Tokenizer, max_length: int) -> Built:
        asked, reserved = self._split()
        chosen = [asked[i] for i in choose(len(asked), self._parameters.limit, self._parameters.seed)]
        asked_for: list[Request] = []
        for row in chosen:
            asked_for += conversation_requests(self._turns(row), tokenizer, "generated")
        requests, skipped = fitting(asked_for, max_length, self._parameters.too_long, self.name, "turns")
        if not requests:
            raise WorkloadError(
                f"mt_bench: none of {len(asked_for)} turns fits the model's {max_length} tokens with an answer of "
                f"{self._parameters.max_new_tokens}; lower max_new_tokens, or use a model with a longer context"
            )
        kept_back = f"{len(reserved)} of {len(asked) + len(reserved)} questions are for calibration, and never asked"
        notes = (*shortage(len(asked), self._parameters.limit), kept_back, *skipped, STANDS_ON_OWN_ANSWERS)
        return Built(requests, (*notes, *template_notes(tokenizer)))

    def _split(self) -> tuple[list[Row], list[Row]]:
        """(questions that may be asked, reserved ones)."""
        rows = self._source.rows(DATASET, "test")
        name, n = Counter(str(row["question_id"]) for row in rows).most_common(1)[0]
        if n > 1:  # the second turn would stand on the answer to another question
            raise WorkloadError(
                f"mt_bench: {self.data_source}: question_id {name} stands {n} times; it must stand once"
            )
        reserved = rows[RESERVED_EVERY - 1 :: RESERVED_EVERY]
        if not reserved:
            found = "one question" if len(rows) == 1 else f"{len(rows)} questions"
            raise WorkloadError(
                f"mt_bench: {self.data_source} has {found}; at least {RESERVED_EVERY} are needed, since "
                f"every {RESERVED_EVERY}th is for calibration"
            )
        return [row for i, row in enumerate(rows, start=1) if i % RESERVED_EVERY], reserved

    def _turns(self, row: Row) -> list[Turn]:
        """Each with all questions before it; the answers between are the model's, so their places are empty."""
        turns: list[Turn] = []
        history: list[Message] = []
        for number, question in enumerate(row["turns"], start=1):
            if history:
                history = [*history, {"role": "assistant", "content": ""}]
            history = [*history, {"role": "user", "content": question}]
            sample_id = f"mt_bench/{row['question_id']}/turn{number}"
            turns.append(Turn(sample_id, history, self._parameters.max_new_tokens))
        return turns
