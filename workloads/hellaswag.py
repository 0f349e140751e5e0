"""HellaSwag: which of four endings continues an everyday situation? (Zellers et al., 2019.) 10 examples by default."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from workloads.benchmark import BenchmarkParameters
from workloads.datasets import Dataset, Row, not_text
from workloads.everyday import hellaswag_rows
from workloads.single_task import SingleTask, TaskBenchmark


class HellaSwagParameters(BenchmarkParameters):
    num_fewshot: int | None = Field(default=10, ge=0)


def _problem(row: Row) -> str | None:
    endings, label = row["endings"], row["label"]
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(e, str) and e.strip() for e in endings):
        return f"endings must be a list of at least two texts, none of them empty, found {endings!r}"
    if str(label) not in map(str, range(len(endings))):
        return f"label must be the position of one of {len(endings)} endings, found {label!r}"
    return not_text(row, ("activity_label", "ctx_a", "ctx_b"))


DATASET = Dataset(
    name="hellaswag",
    hub_id="Rowan/hellaswag",
    columns=("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    problem=_problem,
    generate=hellaswag_rows,
)
TASK = SingleTask("hellaswag", "hellaswag/hellaswag.yaml", DATASET)


class HellaSwag(TaskBenchmark):
    def __init__(self, parameters: HellaSwagParameters, data_root: Path | None) -> None:
        super().__init__(TASK, parameters, data_root)
