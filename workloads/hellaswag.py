"""HellaSwag: which of four endings continues an everyday situation? (Zellers et al., 2019.) 10 examples by default."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from workloads.datasets import Dataset, Row
from workloads.multiple_choice import Benchmark, MultipleChoice, MultipleChoiceParameters


class HellaSwagParameters(MultipleChoiceParameters):
    num_fewshot: int = Field(default=10, ge=0)


def _problem(row: Row) -> str | None:
    endings, label = row["endings"], row["label"]
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(e, str) and e for e in endings):
        return f"endings must be a list of at least two texts, found {endings!r}"
    if str(label) not in map(str, range(len(endings))):
        return f"label must be the position of one of {len(endings)} endings, found {label!r}"
    return next(
        (
            f"{c} must be text, found {row[c]!r}"
            for c in ("activity_label", "ctx_a", "ctx_b")
            if type(row[c]) is not str
        ),
        None,
    )


DATASET = Dataset(
    name="hellaswag",
    hub_id="Rowan/hellaswag",
    columns=("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    problem=_problem,
)
BENCHMARK = Benchmark(definition="hellaswag/hellaswag.yaml", dataset=DATASET, metrics=("acc", "acc_norm"))


class HellaSwag(MultipleChoice):
    def __init__(self, parameters: HellaSwagParameters, data_root: Path | None) -> None:
        super().__init__(BENCHMARK, parameters, data_root)
