"""lm-eval's tasks with collection and scoring apart.

lm-eval runs a model and scores it in one call. Here the model runs in a measured window that is not lm-eval's, so each
task meets two models: before the window one that records every request, after it, in an evaluation by lm-eval, one that
answers from the completions. Prompts, few-shot examples, filters, metrics and aggregation are lm-eval's own.

Nothing is fetched: the task definition is the YAML inside the installed lm-eval, its items are ours (`custom_dataset`).
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from results.records import Completion, Request, Sample, Score
from workloads.base import Tokenizer, WorkloadError, n_tokens
from workloads.datasets import Row
from workloads.kept import once
from workloads.lm_eval_boundary import COMPARE_ROWS, lm_eval_code
from workloads.lm_eval_index import Group
from workloads.lm_eval_index import lm_eval_tasks as lm_eval_tasks

RANDOM_SEED, NUMPY_SEED = 0, 1234
"""lm-eval's defaults for a whole evaluation."""
MetricNames = Callable[[str, str], str | None]
"""(lm-eval's metric, its filter) -> our name of it; None leaves it out."""


@dataclass(frozen=True)
class AskedTask:
    """A task of lm-eval, and which of its documents are asked."""

    task: Any
    sample_ids: Sequence[str]
    """What the asked documents are called, in their order."""
    documents: Sequence[int] | None = None
    """Their positions in the task, ascending; None: all."""

    @property
    def name(self) -> str:
        return str(self.task.config.task)


def table_of(rows: Sequence[Row]) -> Any:
    """Rows as lm-eval's tasks take them (`datasets.Dataset`); made once a run of each list of them."""
    from datasets import Dataset

    # The rows are kept beside it, so that their id stays their own.
    return once(("table", id(rows)), lambda: (rows, Dataset.from_list(list(rows))))[1]


def load_task(definition: Mapping[str, Any], splits: Mapping[str, Any], seed: int) -> Any:
    """An lm-eval task over our own items.

    definition: lm-eval's YAML as a dict, changed where needed. splits: rows by split name, or `table_of` them. seed:
    draws the few-shot examples; tasks with the same seed and items get the same ones in the same order.
    """
    from datasets import Dataset
    from lm_eval.tasks import TaskManager

    tables = {
        split: rows if isinstance(rows, Dataset) else Dataset.from_list(list(rows)) for split, rows in splits.items()
    }
    config = {key: value for key, value in definition.items() if key not in ("tag", "dataset_path", "dataset_name")}
    config |= {"dataset_path": "", "custom_dataset": lambda **_: tables}
    if process := config.get("process_docs"):
        config["process_docs"] = _once(process)
    with _quiet():
        task = TaskManager(include_defaults=False).load([config])["tasks"][config["task"]]
    task.set_fewshot_seed(seed)
    return task


def record_requests(
    task: Any, tokenizer: Tokenizer, sample_ids: Sequence[str], max_length: int | None = None
) -> list[Request]:
    """What lm-eval asks of a model, in its order, over all documents. `sample_ids[i]` names document i."""
    return record_tasks([AskedTask(task, sample_ids)], tokenizer, max_length)


def record_tasks(tasks: Sequence[AskedTask], tokenizer: Tokenizer, max_length: int | None = None) -> list[Request]:
    """What lm-eval asks of a model, in its order. max_length: the model's, for tasks that ask for whole texts."""
    from workloads.lm_eval_models import RecordingLM

    model = RecordingLM(tokenizer, {asked.name: asked.sample_ids for asked in tasks}, max_length)
    with _quiet(), _seeded():
        for asked in tasks:
            with lm_eval_code(f"{asked.name}: lm-eval cannot ask its items", COMPARE_ROWS):
                asked.task.build_all_requests(samples=None if asked.documents is None else list(asked.documents))
                instances = [instance for instance in asked.task.instances for _ in range(instance.repeats)]
                getattr(model, instances[0].request_type)(instances)
    return list(model.recorded.values())


def sample_texts(asked: AskedTask) -> list[Sample]:
    """What each asked document says, in words, without the examples before it."""
    samples = []
    documents = asked.task.eval_docs
    positions = range(len(documents)) if asked.documents is None else asked.documents
    for sample_id, position in zip(asked.sample_ids, positions, strict=True):
        with _seeded(), lm_eval_code(f"{sample_id}: lm-eval cannot tell its question and answer", COMPARE_ROWS):
            samples.append(_sample_text(asked.task, sample_id, documents[position]))
    return samples


def _sample_text(task: Any, sample_id: str, document: Any) -> Sample:
    question, expected = task.doc_to_text(document), task.doc_to_target(document)
    choices = task.doc_to_choice(document) if task.config.doc_to_choice is not None else []
    if task.multiple_input:  # the choices are the questions, and which of them is right is where a text would be
        question, expected = expected, question
    if isinstance(expected, list):
        expected = " | ".join(str(choices[e]) if choices and isinstance(e, int) else str(e) for e in expected)
    elif choices and isinstance(expected, int):
        expected = choices[expected]
    return Sample(sample_id=sample_id, question=str(question), expected=str(expected), choices=tuple(choices))


def score_completions(
    task: Any,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    sample_ids: Sequence[str],
    metrics: Mapping[str, str],
) -> list[Score]:
    """lm-eval's metrics per sample, then over the task.

    metrics: lm-eval's name of each metric -> ours. The task must be a fresh one with the same items and seed.
    """
    asked = [AskedTask(task, sample_ids)]
    return score_tasks(asked, requests, completions, name=lambda metric, _filter: metrics.get(metric))


def as_lm_eval_names(metric: str, filter_name: str) -> str:
    """lm-eval's own key: `exact_match,strict-match`; without the filter where the task has none."""
    return metric if filter_name == "none" else f"{metric},{filter_name}"


def score_tasks(
    tasks: Sequence[AskedTask],
    requests: Sequence[Request],
    completions: Sequence[Completion],
    group: Group | None = None,
    name: MetricNames = as_lm_eval_names,
) -> list[Score]:
    """lm-eval's metrics per sample, then over the tasks and over their group.

    Of a group, the whole's metric has the plain name, that of a part the part's alias behind a slash: `acc`,
    `acc/stem`, `acc/anatomy`. A metric whose values of a sample are no numbers (a perplexity is made of pairs) has no
    scores of samples. Parts that were not asked are left out of the averages, as in lm-eval.
    """
    from workloads.lm_eval_models import AnsweringLM

    if [c.request_id for c in completions] != [r.request_id for r in requests]:
        raise WorkloadError(
            f"{len(completions)} completions for {len(requests)} requests, or in another order; "
            "give one completion for each request, in the order of the requests"
        )
    sample_ids = {asked.name: asked.sample_ids for asked in tasks}
    model = AnsweringLM(requests, {c.request_id: c for c in completions}, sample_ids)
    whole = tasks[0].name if group is None else group.definition["group"]
    with lm_eval_code(f"{whole}: lm-eval cannot score the answers", f"give it what it asks for, or {COMPARE_ROWS}"):
        groups = {} if group is None else _groups(group, {asked.name: asked.task for asked in tasks})
        results = _evaluate(tasks, model, groups)
    better = {
        part: {m for m, up in all_.items() if up is not False} for part, all_ in results["higher_is_better"].items()
    }
    values = {asked.name: _sample_values(asked, results["samples"][asked.name], name) for asked in tasks}
    scores = [
        Score(metric=metric, value=float(value), sample_id=sample_id, higher_is_better=theirs in better[part])
        for part, of_metrics in values.items()
        for (theirs, metric), of_samples in of_metrics.items()
        for sample_id, value in of_samples.items()
        if _is_number(value)
    ]
    # lm-eval lists tasks, then groups from below: the whole comes first here.
    for part, aggregates in reversed(results["results"].items()):
        members = [task.task_name for task in groups[part].get_all_tasks()] if part in groups else [part]
        for metric, theirs, value, stderr in _aggregates(aggregates, name):
            own = [v for member in members for v in values[member].get((theirs, metric), {}).values()]
            scores.append(
                Score(
                    metric=metric if part == whole else f"{metric}/{aggregates['alias']}",
                    value=value,
                    stderr=_standard_error(stderr, value, own),
                    n=len(own),
                    higher_is_better=theirs in better[members[0]],
                )
            )
    return scores


def check_lengths(requests: Sequence[Request], max_length: int, remedy: str) -> None:
    """Raises `WorkloadError` where a request does not fit the model.

    lm-eval's own models would cut such a prompt at its start: a "10-shot" score with three examples left. Not here.
    """
    too_long = [r for r in requests if n_tokens(r) > max_length]
    if too_long:
        longest = max(too_long, key=n_tokens)
        n_items, n_all = len({r.sample_id for r in too_long}), len({r.sample_id for r in requests})
        raise WorkloadError(
            f"{n_items} of {n_all} items do not fit the model's {max_length} tokens "
            f"(longest: {longest.sample_id} with {n_tokens(longest)}); {remedy}"
        )


def _evaluate(tasks: Sequence[AskedTask], model: Any, groups: Mapping[str, Any]) -> Any:
    from lm_eval.api.metrics import mean
    from lm_eval.evaluator import evaluate

    # At 0 iterations lm-eval leaves out every standard error; at 1 it gives the closed form of a mean, but a metric
    # that it would bootstrap gets none from a single draw, and it starts processes for it.
    is_mean = all(aggregate is mean for asked in tasks for aggregate in asked.task.aggregation().values())
    with _quiet(), _seeded():
        return evaluate(
            model,
            {"tasks": {asked.name: asked.task for asked in tasks}, "groups": dict(groups)},
            samples={asked.name: list(asked.documents) for asked in tasks if asked.documents is not None},
            bootstrap_iters=int(is_mean),
            log_samples=True,
        )


def _groups(group: Group, tasks: Mapping[str, Any]) -> dict[str, Any]:
    """lm-eval's group and those below it by name, of the given tasks alone."""
    from lm_eval.api.group import Group as LmEvalGroup
    from lm_eval.config.group import GroupConfig

    known = {field.name for field in fields(GroupConfig)}
    own = LmEvalGroup.from_config({key: value for key, value in group.definition.items() if key in known})
    groups = {own.name: own}
    for member in group.members:
        if isinstance(member, Group):
            groups |= (below := _groups(member, tasks))
            if (name := member.definition["group"]) in below:
                own.add(below[name])
        elif member["task"] in tasks:
            own.add(tasks[member["task"]])
    return {name: found for name, found in groups.items() if found.get_all_tasks()}


def _sample_values(
    asked: AskedTask, logged: Sequence[Mapping[str, Any]], name: MetricNames
) -> dict[tuple[str, str], dict[str, Any]]:
    """(lm-eval's metric, ours) -> sample id -> the sample's value."""
    of_document = dict(zip(asked.documents or range(len(asked.sample_ids)), asked.sample_ids, strict=True))
    values: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for sample in logged:
        for theirs in sample["metrics"]:
            metric = name(theirs, sample["filter"])
            if metric is not None:
                values[theirs, metric][of_document[sample["doc_id"]]] = sample[theirs]
    return values


def _aggregates(results: Mapping[str, Any], name: MetricNames) -> Iterator[tuple[str, str, float, Any]]:
    """(our metric, lm-eval's, value, lm-eval's standard error) of a task or a group."""
    for key, value in results.items():
        theirs, comma, filter_name = key.partition(",")
        if comma and not theirs.endswith("_stderr"):
            metric = name(theirs, filter_name)
            if metric is not None:
                yield metric, theirs, float(value), results.get(f"{theirs}_stderr,{filter_name}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number, np.bool_))


def _standard_error(given: Any, aggregate: float, values: Sequence[Any]) -> float | None:
    """lm-eval's where it has one, else the closed form, sd / sqrt(n), of an aggregate that is the plain mean."""
    if isinstance(given, float):
        return given
    n = len(values)
    if n < 2 or not all(map(_is_number, values)):
        return None
    mean = math.fsum(values) / n
    if not math.isclose(aggregate, mean):
        return None
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


@contextmanager
def _seeded() -> Iterator[None]:
    """Tasks draw from Python's and numpy's own generators (GPQA shuffles its choices): from lm-eval's seeds of them, so
    that a resumed run, another worker and another run ask the same."""
    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(RANDOM_SEED)
    np.random.seed(NUMPY_SEED)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)


def _once(process: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """lm-eval asks for a split's documents again and again, and would process them each time."""

    def seeded(split: Any) -> Any:
        with _seeded():
            return process(split)

    done: dict[int, tuple[Any, Any]] = {}

    def processed(split: Any) -> Any:
        # The split is kept beside what was made of it, so that its id stays its own.
        if id(split) not in done:
            done[id(split)] = once((process, id(split)), lambda: (split, seeded(split)))
        return done[id(split)][1]

    return processed


@contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval warns at each load of defaults that we chose on purpose, and draws a bar for each task and each map."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("lm_eval")
    level, had_bars = logger.level, not are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    disable_progress_bars()
    try:
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            yield
    finally:
        logger.setLevel(level)
        if had_bars:
            enable_progress_bars()
