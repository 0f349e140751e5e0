"""BoolQ: a yes-or-no question about a passage (Clark et al., 2019), as in SuperGLUE. Two examples by default.

The schema is super_glue/boolq (`label` 0 or 1, question without its mark), which is not that of google/boolq.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from workloads.datasets import Dataset, Row
from workloads.multiple_choice import Benchmark, MultipleChoice, MultipleChoiceParameters


class BoolQParameters(MultipleChoiceParameters):
    num_fewshot: int = Field(default=2, ge=0)


def _problem(row: Row) -> str | None:
    if type(row["label"]) is not int or row["label"] not in (0, 1):
        return f"label must be 0 (no) or 1 (yes), found {row['label']!r}"
    return next(
        (f"{c} must be text, found {row[c]!r}" for c in ("passage", "question") if type(row[c]) is not str), None
    )


DATASET = Dataset(
    name="boolq",
    hub_id="aps/super_glue",
    hub_config="boolq",
    columns=("passage", "question", "label"),
    problem=_problem,
)
BENCHMARK = Benchmark(definition="super_glue/boolq/default.yaml", dataset=DATASET, metrics=("acc",))


class BoolQ(MultipleChoice):
    def __init__(self, parameters: BoolQParameters, data_root: Path | None) -> None:
        super().__init__(BENCHMARK, parameters, data_root)
