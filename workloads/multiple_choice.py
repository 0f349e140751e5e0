"""Multiple-choice benchmarks: each choice is a log-likelihood request, the likeliest choice is the answer.

lm-eval's task builds the prompts and scores them. acc takes the choice with the highest log-likelihood, acc_norm the
highest per character.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from results.records import Completion, Record, Request, Score
from workloads.base import Tokenizer, WorkloadError
from workloads.datasets import Dataset, Row, SourceKind, choose, data_source, shortage
from workloads.lm_eval_bridge import check_lengths, lm_eval_tasks, load_task, record_requests, score_completions


class MultipleChoiceParameters(Record):
    """What a plan may say about a multiple-choice benchmark."""

    limit: int | None = Field(default=None, ge=1)
    """Items asked, a random subset; None: all of the validation split."""
    num_fewshot: int = Field(default=0, ge=0)
    """Solved examples before each question, drawn from the train split."""
    seed: int = 1234
    """Chooses the subset and the examples. The default is lm-eval's own few-shot seed."""
    data: SourceKind | None = None
    """None: the data folder where the run has one, else the bundled sample."""


@dataclass(frozen=True)
class Benchmark:
    """A task of lm-eval: its YAML below `lm_eval/tasks`, the data set it reads, the metrics it reports."""

    definition: str
    dataset: Dataset
    metrics: tuple[str, ...]


class MultipleChoice:
    """Asks the validation split; few-shot examples and calibration prompts come from the train split."""

    scored = True

    def __init__(self, benchmark: Benchmark, parameters: MultipleChoiceParameters, data_root: Path | None) -> None:
        self.name = benchmark.dataset.name
        self._benchmark = benchmark
        self._parameters = parameters
        self._source = data_source(parameters.data, data_root)
        self.data_source = self._source.label(benchmark.dataset)
        self.notes: tuple[str, ...] = ()
        self._rows: dict[str, list[Row]] = {}
        self._built: dict[str, tuple[Request, ...]] = {}

    def requests(self, tokenizer: Tokenizer, max_length: int) -> Sequence[Request]:
        if tokenizer.name not in self._built:
            self._built[tokenizer.name] = self._build(tokenizer)
        requests = self._built[tokenizer.name]
        self._check_lengths(requests, max_length)
        return requests

    def calibration_prompts(self, tokenizer: Tokenizer, max_length: int, n: int) -> Sequence[Sequence[int]]:
        """Prompts, without choices, of train items asked in the same way with other examples before them."""
        train = self._split("train")
        chosen = random.Random(f"{self._parameters.seed}/calibration").sample(range(len(train)), min(n, len(train)))
        task = self._task([train[i] for i in chosen])
        requests = record_requests(task, tokenizer, [f"{self.name}/train/{i}" for i in chosen])
        first_choices = [request for request in requests if request.request_id.endswith("#0")]
        self._check_lengths(first_choices, max_length)
        return [request.prompt_ids for request in first_choices]

    def score(self, requests: Sequence[Request], completions: Sequence[Completion]) -> Sequence[Score]:
        asked = self._asked()
        metrics = {metric: metric for metric in self._benchmark.metrics}
        return score_completions(self._task(self._pick(asked)), requests, completions, self._sample_ids(asked), metrics)

    def _build(self, tokenizer: Tokenizer) -> tuple[Request, ...]:
        asked = self._asked()
        self.notes = shortage(len(self._split("validation")), self._parameters.limit)
        return tuple(record_requests(self._task(self._pick(asked)), tokenizer, self._sample_ids(asked)))

    def _asked(self) -> list[int]:
        return choose(len(self._split("validation")), self._parameters.limit, self._parameters.seed)

    def _pick(self, asked: Sequence[int]) -> list[Row]:
        rows = self._split("validation")
        return [rows[i] for i in asked]

    def _sample_ids(self, asked: Sequence[int]) -> list[str]:
        return [f"{self.name}/{i}" for i in asked]

    def _split(self, split: str) -> list[Row]:
        if split not in self._rows:
            self._rows[split] = self._source.rows(self._benchmark.dataset, split)
        return self._rows[split]

    def _task(self, rows: Sequence[Row]) -> Any:
        from lm_eval.tasks._yaml_loader import load_yaml

        shots = self._parameters.num_fewshot
        definition = load_yaml(lm_eval_tasks() / self._benchmark.definition)
        definition |= {"num_fewshot": shots, "training_split": "train" if shots else None}
        splits: dict[str, Sequence[Row]] = {"validation": rows}
        if shots:
            splits["train"] = self._split("train")
            # lm-eval draws one more than it needs and drops the question itself where it is among them.
            if len(splits["train"]) <= shots:
                raise WorkloadError(
                    f"{self.name}: num_fewshot {shots} needs {shots + 1} train items, there are "
                    f"{len(splits['train'])} ({self.data_source}); lower num_fewshot"
                )
        return load_task(definition, splits, self._parameters.seed)

    def _check_lengths(self, requests: Sequence[Request], max_length: int) -> None:
        shots = self._parameters.num_fewshot
        remedy = f"lower num_fewshot (now {shots})" if shots else "use a model with a longer context"
        check_lengths(requests, max_length, f"{self.name}: {remedy}")
