"""A benchmark that is one task of lm-eval over one data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from workloads.benchmark import BenchmarkParameters, Part, ScoredOnce
from workloads.datasets import Dataset, Row, data_source
from workloads.kept import once
from workloads.lm_eval_index import lm_eval_tasks, read_definition


@dataclass(frozen=True)
class SingleTask:
    """Which task, over which rows."""

    name: str
    definition: str
    """The YAML, below lm-eval's folder of tasks."""
    dataset: Dataset
    as_asked: Callable[[Row], Row] | None = None
    """Turns a row of the data set into one of the schema that the task reads; None: it is."""
    splits: Mapping[str, str] = field(default_factory=dict)
    """The task's name of a split -> the data set's, where they differ."""
    calibration_split: str | None = None
    """None: the task's training split."""


class TaskBenchmark(ScoredOnce):
    """A `SingleTask` as a workload."""

    def __init__(self, task: SingleTask, parameters: BenchmarkParameters, data_root: Path | None) -> None:
        source = data_source(parameters.data, data_root)

        @cache
        def rows(split: str) -> list[Row]:
            found = source.rows(task.dataset, task.splits.get(split, split))
            as_asked = task.as_asked
            if as_asked is None:
                return found
            return once((source, task.dataset.key, as_asked, split), lambda: [as_asked(row) for row in found])

        path = lm_eval_tasks() / task.definition
        part = Part(task.name, once(path, lambda: read_definition(path)), rows, task.calibration_split)
        super().__init__(task.name, [part], parameters, source.label(task.dataset))
