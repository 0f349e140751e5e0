"""A benchmark of lm-eval as a workload: which of its tasks, over which rows, which of them asked, and how scored.

Prompts, examples, filters and metrics are lm-eval's (`workloads.lm_eval_bridge`). Ours are the rows, the random subset,
and what happens to an item that is too long for the model: lm-eval's own models would cut its prompt at the start.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from results.records import Completion, Record, Request, Sample, Score
from workloads.base import Tokenizer, WorkloadError, n_tokens
from workloads.datasets import Row, SourceKind, choose, shortage
from workloads.lm_eval_boundary import lm_eval_code
from workloads.lm_eval_bridge import (
    AskedTask,
    check_lengths,
    load_task,
    record_tasks,
    sample_texts,
    score_tasks,
    table_of,
)
from workloads.lm_eval_index import Group


class BenchmarkParameters(Record):
    """What a plan may say about a benchmark."""

    limit: int | None = Field(default=None, ge=1)
    """Items asked, a random subset of all; None: all."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Solved examples before each question; None: as many as lm-eval's task says."""
    seed: int = 1234
    """Chooses the subset and the examples. The default is lm-eval's own few-shot seed."""
    data: SourceKind | None = None
    """None: the data folder where the run has one, else the bundled sample."""
    too_long: Literal["fail", "skip"] = "fail"
    """Items that the model's context does not hold. skip: they are left out, counted in the notes."""


class GeneratingParameters(BenchmarkParameters):
    """Of a benchmark whose answers are generated."""

    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest answer; None: as long as lm-eval's task says (256 where it says nothing)."""


@dataclass(frozen=True)
class Part:
    """One task of lm-eval within a benchmark."""

    name: str
    """What its items are called by: `hellaswag/17`."""
    definition: Mapping[str, Any]
    """lm-eval's YAML as a dict."""
    rows: Callable[[str], Sequence[Row]]
    """Rows of a split, by the task's own name of it. Raises `WorkloadError`."""
    calibration_split: str | None = None
    """Where calibration prompts come from; None: the training split, else items that are not asked."""


class Benchmark:
    """The parts as one workload: a random subset is drawn from the items of all of them."""

    scored = True

    def __init__(
        self,
        name: str,
        parts: Sequence[Part],
        parameters: BenchmarkParameters,
        data_source: str,
        group: Group | None = None,
    ) -> None:
        """group: lm-eval's group that averages over the parts; None for a single part."""
        self.name = name
        self.data_source = data_source
        self.notes: tuple[str, ...] = ()
        self._parameters = parameters
        self._parts = [_LoadedPart(part, parameters, data_source) for part in parts]
        self._group = group
        self._built: dict[tuple[str, int], tuple[tuple[Request, ...], tuple[str, ...]]] = {}

    def requests(self, tokenizer: Tokenizer, max_length: int) -> Sequence[Request]:
        key = (tokenizer.name, max_length)
        if key not in self._built:
            self._built[key] = self._build(tokenizer, max_length)
        requests, self.notes = self._built[key]
        return requests

    def calibration_prompts(self, tokenizer: Tokenizer, max_length: int, n: int) -> Sequence[Sequence[int]]:
        """Items of another split asked in the same way, or items of this one that are not asked; without answers.

        Those that the model does not hold are left out, whatever the plan says of asked ones: nothing is scored here.
        """
        asked = self._chosen
        candidates = [
            (part, i) for part, own in zip(self._parts, asked, strict=True) for i in part.for_calibration(own)
        ]
        if not candidates:
            raise WorkloadError(
                f"{self.name}: calibration needs items that are not asked, and all {sum(map(len, asked))} are; "
                "lower limit, or take a technique without calibration"
            )
        chosen = random.Random(f"{self._parameters.seed}/calibration").sample(candidates, min(n, len(candidates)))
        prompts: list[Sequence[int]] = []
        for part in self._parts:
            if own := sorted(i for other, i in chosen if other is part):
                requests = record_tasks([part.calibrating(own)], tokenizer, max_length)
                first = {request.sample_id: request for request in reversed(requests)}
                prompts += map(part.shown, first.values())
        return [prompt for prompt in prompts if len(prompt) <= max_length]

    def samples(self) -> Sequence[Sample]:
        """What each asked item says, in words, without the examples before it."""
        return [sample for part, own in zip(self._parts, self._chosen, strict=True) for sample in part.samples(own)]

    def score(self, requests: Sequence[Request], completions: Sequence[Completion]) -> Sequence[Score]:
        chosen = self._chosen
        if self._parameters.too_long == "skip":
            left = {request.sample_id for request in requests}
            chosen = [
                [i for i in own if part.sample_id(i) in left] for part, own in zip(self._parts, chosen, strict=True)
            ]
        return score_tasks(self._asked(chosen), requests, completions, self._group)

    def _build(self, tokenizer: Tokenizer, max_length: int) -> tuple[tuple[Request, ...], tuple[str, ...]]:
        recorded = record_tasks(self._asked(self._chosen), tokenizer, max_length)
        requests = self._fitting(recorded, max_length)
        notes = list(shortage(sum(part.n_documents for part in self._parts), self._parameters.limit))
        if n_empty := sum(part.n_documents == 0 for part in self._parts):
            notes.append(f"{n_empty} of {len(self._parts)} parts have no items in the data")
        if n_again := sum(part.n_repeated for part in self._parts):
            n_rows = sum(part.n_documents for part in self._parts)
            notes.append(
                f"{n_again} of {n_rows} items in the data are the same as one before; each counts, as in lm-eval"
            )
        n_items, n_left = (len({r.sample_id for r in asked}) for asked in (recorded, requests))
        if n_left < n_items:
            notes.append(f"{n_items - n_left} of {n_items} items skipped: longer than {max_length} tokens")
        return tuple(requests), tuple(notes)

    def _asked(self, chosen: Sequence[Sequence[int]]) -> list[AskedTask]:
        return [part.asked(own) for part, own in zip(self._parts, chosen, strict=True) if own]

    @cached_property
    def _chosen(self) -> list[list[int]]:
        """Positions of the asked documents, by part."""
        counts = [part.n_documents for part in self._parts]
        if not any(counts):
            raise WorkloadError(f"{self.name}: {self.data_source} has no item of what is asked; name other parts")
        positions = iter(choose(sum(counts), self._parameters.limit, self._parameters.seed))
        chosen: list[list[int]] = [[] for _ in counts]
        part, start = 0, 0
        for position in positions:
            while position >= start + counts[part]:
                part, start = part + 1, start + counts[part]
            chosen[part].append(position - start)
        return chosen

    def _fitting(self, requests: Sequence[Request], max_length: int) -> Sequence[Request]:
        """Those of items that fit the model. Raises `WorkloadError` where one does not and the plan says so."""
        remedy = f'{self.name}: {self._parts[0].shorter}, or set too_long = "skip"'
        if self._parameters.too_long == "fail":
            check_lengths(requests, max_length, remedy)
            return requests
        too_long = {request.sample_id for request in requests if n_tokens(request) > max_length}
        left = [request for request in requests if request.sample_id not in too_long]
        if not left:
            raise WorkloadError(
                f"{self.name}: none of {len(too_long)} items fits the model's {max_length} tokens; "
                f"{self._parts[0].shorter}"
            )
        return left


class ScoredOnce(Benchmark):
    """Repeats of an arm mostly answer the same, and are scored once.

    Scoring a thousand items takes seconds, and some metrics a second an item (ROUGE of truthfulqa_gen).
    """

    def score(self, requests: Sequence[Request], completions: Sequence[Completion]) -> Sequence[Score]:
        answers = tuple((c.request_id, c.text, c.loglikelihood, c.is_greedy) for c in completions)
        if answers not in self._scored:
            self._scored[answers] = super().score(requests, completions)
        return self._scored[answers]

    @cached_property
    def _scored(self) -> dict[tuple[Any, ...], Sequence[Score]]:
        return {}


class _LoadedPart:
    """A part with lm-eval's task over its rows, which is loaded when it is first wanted."""

    def __init__(self, part: Part, parameters: BenchmarkParameters, data_source: str) -> None:
        self._part = part
        self._seed = parameters.seed
        self._data_source = data_source
        self._n_examples, self._definition = _settled(part, parameters)

    @property
    def shorter(self) -> str:
        """The remedy for items that are too long."""
        remedies = []
        if self._n_examples:
            remedies.append(f"lower num_fewshot (now {self._n_examples})")
        if self._definition["output_type"] == "generate_until":
            remedies.append("lower max_new_tokens")
        return " or ".join(remedies) or "use a model with a longer context"

    @cached_property
    def n_documents(self) -> int:
        has_rows = len(self._part.rows(_asked_split(self._definition))) > 0
        return len(self._task.eval_docs) if has_rows else 0

    @cached_property
    def n_repeated(self) -> int:
        """Rows that are there before: an interval over the items takes each as one more."""
        rows = self._part.rows(_asked_split(self._definition))
        return len(rows) - len(set(map(repr, rows))) if isinstance(rows, list) else 0

    def sample_id(self, document: int) -> str:
        return f"{self._part.name}/{document}"

    def asked(self, documents: Sequence[int]) -> AskedTask:
        # lm-eval draws examples as it goes: the same items get the same ones only from the same start.
        self._task.set_fewshot_seed(self._seed)
        all_asked = len(documents) == self.n_documents
        return AskedTask(self._task, [self.sample_id(i) for i in documents], None if all_asked else documents)

    def samples(self, documents: Sequence[int]) -> list[Sample]:
        return sample_texts(self.asked(documents))

    def for_calibration(self, asked: Sequence[int]) -> Sequence[int]:
        """Positions that `calibrating` takes."""
        if self._calibration_split:
            return range(len(self._part.rows(self._calibration_split)))
        return sorted(set(range(self.n_documents)) - set(asked))

    def calibrating(self, chosen: Sequence[int]) -> AskedTask:
        split = self._calibration_split
        if not split:
            return self.asked(chosen)
        rows = self._part.rows(split)
        task = self._load([rows[i] for i in chosen])
        return AskedTask(task, [f"{self._part.name}/{split}/{i}" for i in chosen])

    def shown(self, request: Request) -> tuple[int, ...]:
        """What a calibration is shown of a request: its prompt, or the text where that is all there is."""
        if self._definition["output_type"] == "loglikelihood_rolling":
            return request.prompt_ids + request.continuation_ids[:-1]
        return request.prompt_ids

    @cached_property
    def _calibration_split(self) -> str | None:
        split = self._part.calibration_split or self._part.definition.get("training_split")
        return None if split == _asked_split(self._definition) else split

    @cached_property
    def _task(self) -> Any:
        return self._load(table_of(self._part.rows(_asked_split(self._definition))))

    def _load(self, documents: Any) -> Any:
        """lm-eval's task with these rows, or a table of them, as what is asked. Raises `WorkloadError`."""
        name, definition = self._part.name, self._definition
        splits = {_asked_split(definition): documents}
        examples = _example_split(definition) if self._n_examples else None
        if examples:
            splits.setdefault(examples, table_of(self._part.rows(examples)))
        with lm_eval_code(
            f"{name}: lm-eval's task cannot read the rows of {self._data_source}",
            f"the schema of {self._part.definition.get('dataset_path')} is expected",
        ):
            task = load_task(definition, splits, self._seed)
        # Where examples come from the split that is asked, lm-eval draws one more, and drops the question itself.
        n_wanted = self._n_examples + (task.fewshot_cfg.split == task.config.test_split)
        if self._n_examples and len(task.sampler.df) < n_wanted:
            raise WorkloadError(
                f"{name}: num_fewshot {self._n_examples} needs {n_wanted} {examples or 'written'} items, there are "
                f"{len(task.sampler.df)} ({self._data_source}); lower num_fewshot"
            )
        return task


def _settled(part: Part, parameters: BenchmarkParameters) -> tuple[int, dict[str, Any]]:
    """(examples before each question, the definition with what the plan says). Splits that nothing reads are out."""
    definition = dict(part.definition)
    own = definition.get("num_fewshot")
    n_examples = (own or 0) if parameters.num_fewshot is None else parameters.num_fewshot
    if own == 0 and n_examples:
        raise WorkloadError(
            f"{part.name}: lm-eval defines it without examples, found num_fewshot = {n_examples}; remove the line"
        )
    definition["num_fewshot"] = n_examples
    wanted = {_asked_split(definition), *([_example_split(definition)] if n_examples else [])}
    for key in ("training_split", "validation_split", "test_split", "fewshot_split"):
        if definition.get(key) not in wanted:
            definition[key] = None
    if settings := definition.get("fewshot_config"):
        definition["fewshot_config"] = {k: v for k, v in settings.items() if k != "split" or v in wanted}
    definition.setdefault("output_type", "generate_until")
    if isinstance(parameters, GeneratingParameters) and parameters.max_new_tokens is not None:
        if definition["output_type"] != "generate_until":
            raise WorkloadError(
                f"{part.name}: asks for likelihoods and generates nothing, found max_new_tokens = "
                f"{parameters.max_new_tokens}; remove the line"
            )
        generation = dict(definition.get("generation_kwargs") or {})
        definition["generation_kwargs"] = generation | {"max_gen_toks": parameters.max_new_tokens}
    return n_examples, definition


def _asked_split(definition: Mapping[str, Any]) -> str:
    """The split that lm-eval asks: test where the task has one, else validation."""
    split = definition.get("test_split") or definition.get("validation_split")
    if not split:
        raise WorkloadError(f"{definition['task']}: lm-eval's definition names no split to ask; take another task")
    return str(split)


def _example_split(definition: Mapping[str, Any]) -> str | None:
    """The split that lm-eval takes examples from; None where they are written into the definition."""
    settings = definition.get("fewshot_config") or {}
    named = settings.get("split") or definition.get("fewshot_split")
    if named or settings.get("samples") is not None:
        return named
    return definition.get("training_split") or definition.get("validation_split") or definition.get("test_split")
