"""lm-eval's tasks with collection and scoring apart.

lm-eval runs a model and scores it in one call. Here the model runs in a measured window that is not lm-eval's, so each
task is evaluated twice: before the window with a model that records every request, after it with one that answers from
the completions. Prompts, few-shot examples, filters, metrics and aggregation are lm-eval's own, both times.

Nothing is fetched: the task definition is the YAML inside the installed lm-eval, its items are ours (`custom_dataset`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from results.records import Completion, Request, Score
from workloads.base import Tokenizer, WorkloadError, n_tokens
from workloads.datasets import Row


def lm_eval_tasks() -> Path:
    """The folder of lm-eval's task definitions."""
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent


def load_task(definition: Mapping[str, Any], splits: Mapping[str, Sequence[Row]], seed: int) -> Any:
    """An lm-eval task over our own items.

    definition: lm-eval's YAML as a dict, changed where needed. splits: rows by split name. seed: draws the few-shot
    examples; tasks with the same seed and items get the same ones in the same order.
    """
    from datasets import Dataset
    from lm_eval.tasks import TaskManager

    tables = {split: Dataset.from_list(list(rows)) for split, rows in splits.items()}
    config = {key: value for key, value in definition.items() if key not in ("tag", "dataset_path", "dataset_name")}
    config |= {"dataset_path": "", "custom_dataset": lambda **_: tables}
    with _quiet():
        task = TaskManager(include_defaults=False).load([config])["tasks"][config["task"]]
    task.set_fewshot_seed(seed)
    return task


def record_requests(task: Any, tokenizer: Tokenizer, sample_ids: Sequence[str]) -> list[Request]:
    """What lm-eval asks of a model, in its order. `sample_ids[i]` names document i."""
    from workloads.lm_eval_models import RecordingLM

    model = RecordingLM(tokenizer, sample_ids)
    _evaluate(task, model)
    return model.recorded


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
    from workloads.lm_eval_models import AnsweringLM

    if [c.request_id for c in completions] != [r.request_id for r in requests]:
        raise WorkloadError(
            f"{len(completions)} completions for {len(requests)} requests, or in another order; "
            "give one completion for each request, in the order of the requests"
        )
    model = AnsweringLM(requests, {c.request_id: c for c in completions}, sample_ids)
    results = _evaluate(task, model)
    name = task.config.task
    logged, aggregates = results["samples"][name], results["results"][name]
    scores = []
    for theirs, ours in metrics.items():
        better = bool(results["higher_is_better"][name][theirs])
        values = [float(sample[theirs]) for sample in logged]
        scores += [
            Score(metric=ours, value=value, sample_id=sample_ids[sample["doc_id"]], higher_is_better=better)
            for sample, value in zip(logged, values, strict=True)
        ]
        aggregate = float(aggregates[f"{theirs},none"])
        stderr = _standard_error(aggregates.get(f"{theirs}_stderr,none"), aggregate, values)
        scores.append(Score(metric=ours, value=aggregate, stderr=stderr, n=len(values), higher_is_better=better))
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


def _evaluate(task: Any, model: Any) -> Any:
    from lm_eval.evaluator import evaluate

    # At 0 bootstrap iterations lm-eval leaves out every standard error; at 1 it gives the closed form of the mean,
    # and no metric of our tasks is one that it would bootstrap.
    with _quiet():
        return evaluate(model, {"tasks": {task.config.task: task}}, bootstrap_iters=1, log_samples=True)


def _standard_error(given: Any, aggregate: float, values: Sequence[float]) -> float | None:
    """lm-eval's where it has one, else the closed form, sd / sqrt(n), of an aggregate that is the plain mean."""
    if isinstance(given, float):
        return given
    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2 or not math.isclose(aggregate, mean):
        return None
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


@contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval warns at each load of defaults that we chose on purpose, and `datasets` draws a bar for each map."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("lm_eval")
    level, had_bars = logger.level, not are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if had_bars:
            enable_progress_bars()
