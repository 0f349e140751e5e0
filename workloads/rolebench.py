"""RoleBench (Wang et al., RoleLLM, ACL Findings 2024), English: questions to somebody in a role, answered in its voice.

Scored with ROUGE-L against the reference answers of the data set, the best of them counting (F-measure, no stemming;
`rouge_score`). It measures overlap of words, so a random or small model is near 0.1 whatever it says.

The data set has three test sets: of questions for one role (`role_specific`), with instructions or with roles that no
training example has (`generalization`), and of questions anybody may be asked (`general`, new roles only). Its prompts
come with a description of each role, which is not part of the test files: here the model is told the name alone, so
scores are below those of the paper. The last fifth of the file is never asked: it is for calibration.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from pydantic import Field

from results.records import Completion, Record, Request, Score
from workloads.base import Tokenizer, WorkloadError, n_tokens
from workloads.conversations import Turn, template_notes, whole_turn
from workloads.datasets import Dataset, Row, SourceKind, choose, data_source, shortage
from workloads.fitting import TooLong, fitting
from workloads.generation import Built, GenerationWorkload

HUB = "ZenMoore/RoleBench"
COLUMNS = ("role", "question", "generated")
METRIC = "rouge_l"


class RoleBenchParameters(Record):
    """What a plan may say about RoleBench."""

    generalization: Literal["role", "instruction"] = "role"
    """What no training example has: the role, or the instruction."""
    questions: Literal["role_specific", "general"] = "role_specific"
    limit: int | None = Field(default=None, ge=1)
    """Questions, a random subset; None: all that are not reserved for calibration."""
    max_new_tokens: int = Field(default=256, ge=1)
    too_long: TooLong = "skip"
    """Questions longer than the model's context."""
    seed: int = 0
    data: SourceKind | None = None
    """None: the data folder where the run has one, else the bundled sample (which has but one test set)."""


def _problem(row: Row) -> str | None:
    if not all(isinstance(row[key], str) and row[key].strip() for key in ("role", "question")):
        return f"role and question must be texts that are not empty, found {row['role']!r:.80}, {row['question']!r:.80}"
    references = row["generated"]
    if not isinstance(references, list) or not references or not all(isinstance(r, str) for r in references):
        return f"generated must be a list of reference answers, found {references!r:.80}"
    return None


class RoleBench(GenerationWorkload):
    name = "rolebench"
    scored = True

    def __init__(self, parameters: RoleBenchParameters, data_root: Path | None) -> None:
        super().__init__()
        self._parameters = parameters
        self._source = data_source(parameters.data, data_root)
        self._dataset, self._split = _test_set(parameters, self._source.kind)
        self.data_source = self._source.label(self._dataset)
        self._rows: list[Row] | None = None
        self._references: dict[str, list[str]] = {}
        """By sample id, of all questions asked so far."""

    def calibration_prompts(self, tokenizer: Tokenizer, max_length: int, n: int) -> Sequence[Sequence[int]]:
        """Questions of the reserved fifth, from the end of the file."""
        rows, n_asked = self._read()
        requests = (self._request(i, rows[i], tokenizer) for i in reversed(range(n_asked, len(rows))))
        return [r.prompt_ids for r in islice((r for r in requests if n_tokens(r) <= max_length), n)]

    def score(self, requests: Sequence[Request], completions: Sequence[Completion]) -> Sequence[Score]:
        """ROUGE-L of each answer, and their mean with its standard error."""
        values = [rouge_l(self._references[c.sample_id], c.text) for c in completions]
        stderr = statistics.stdev(values) / math.sqrt(len(values)) if len(values) >= 2 else None
        return [
            *(Score(metric=METRIC, value=v, sample_id=c.sample_id) for v, c in zip(values, completions, strict=True)),
            Score(metric=METRIC, value=statistics.fmean(values), stderr=stderr, n=len(values)),
        ]

    def _build(self, tokenizer: Tokenizer, max_length: int) -> Built:
        rows, n_asked = self._read()
        chosen = choose(n_asked, self._parameters.limit, self._parameters.seed)
        asked_for = [self._request(i, rows[i], tokenizer) for i in chosen]
        self._references |= {r.sample_id: rows[i]["generated"] for r, i in zip(asked_for, chosen, strict=True)}
        requests, skipped = fitting(asked_for, max_length, self._parameters.too_long, self.name, "questions")
        if not requests:
            raise WorkloadError(
                f"rolebench: none of {len(asked_for)} questions fits the model's {max_length} tokens with an answer of "
                f"{self._parameters.max_new_tokens}; lower max_new_tokens, or use a model with a longer context"
            )
        short = shortage(n_asked, self._parameters.limit, len(rows) - n_asked)
        return Built(requests, (*short, *skipped, *template_notes(tokenizer)))

    def _read(self) -> tuple[list[Row], int]:
        """(rows, how many of them may be asked); a question that is there twice for a role is there once, with the
        reference answers of both."""
        if self._rows is None:
            found: dict[tuple[str, str], Row] = {}
            for row in self._source.rows(self._dataset, self._split):
                first = found.setdefault((row["role"], row["question"]), row | {"generated": []})
                first["generated"] += row["generated"]
            self._rows = list(found.values())
        if len(self._rows) < 2:
            raise WorkloadError(
                f"rolebench: {self.data_source} has one question; add another, since the last is for calibration"
            )
        return self._rows, len(self._rows) - max(1, len(self._rows) // 5)

    def _request(self, position: int, row: Row, tokenizer: Tokenizer) -> Request:
        question = f"Answer as {row['role']} would, in that voice and from what {row['role']} knows.\n\n"
        history = [{"role": "user", "content": question + row["question"].strip()}]
        sample_id = f"{self._dataset.name}/{self._split}/{position}"
        return whole_turn(Turn(sample_id, history, self._parameters.max_new_tokens), tokenizer)


def rouge_l(references: Sequence[str], answer: str) -> float:
    """F-measure of ROUGE-L against the reference that the answer is closest to."""
    from rouge_score.rouge_scorer import RougeScorer

    scores = RougeScorer(["rougeL"], use_stemmer=False).score_multi(references, answer)
    return float(scores["rougeL"].fmeasure)


def _test_set(parameters: RoleBenchParameters, kind: SourceKind) -> tuple[Dataset, str]:
    """(data set, split). In a folder: rolebench/role_generalization_eng/role_specific_test.jsonl[.gz] and so on."""
    generalization, questions = parameters.generalization, parameters.questions
    hub_files = f"rolebench-eng/{generalization}-generalization/{questions}/test.jsonl"
    name, split = f"rolebench/{generalization}_generalization_eng", f"{questions}_test"
    if kind == "sample":
        name, split = "rolebench", "test"
    return Dataset(name, hub_id=HUB, hub_files=hub_files, columns=COLUMNS, problem=_problem), split
