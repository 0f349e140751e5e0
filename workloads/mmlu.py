"""MMLU: multiple-choice questions of 57 subjects (Hendrycks et al., 2021), 5 examples of the same subject by default.

All subjects stand in one file, with a column `subject`. lm-eval has a task for each and four groups of them; a score
over several weights each question alike, as lm-eval's group does. Where `limit` leaves a subject without a question,
the averages are over the others.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from workloads.base import WorkloadError
from workloads.benchmark import BenchmarkParameters, Part, ScoredOnce
from workloads.datasets import Dataset, Row, data_source, not_text
from workloads.kept import once
from workloads.lm_eval_index import Group, find_definition


class MMLUParameters(BenchmarkParameters):
    num_fewshot: int | None = Field(default=5, ge=0)
    subjects: tuple[str, ...] = ()
    """As the data names them: `anatomy`, `high_school_physics`; empty: all 57."""


def _problem(row: Row) -> str | None:
    choices = row["choices"]
    if not isinstance(choices, list) or len(choices) != 4 or not all(isinstance(c, str) for c in choices):
        return f"choices must be a list of four texts, found {choices!r:.80}"
    if type(row["answer"]) is not int or not 0 <= row["answer"] < 4:
        return f"answer must be a position from 0 to 3, found {row['answer']!r}"
    return not_text(row, ("question", "subject"))


DATASET = Dataset(
    name="mmlu",
    hub_id="cais/mmlu",
    hub_config="all",
    columns=("question", "subject", "choices", "answer"),
    problem=_problem,
)


class MMLU(ScoredOnce):
    def __init__(self, parameters: MMLUParameters, data_root: Path | None) -> None:
        source = data_source(parameters.data, data_root)
        group = once("mmlu", lambda: find_definition("mmlu"))
        assert isinstance(group, Group)  # of the pinned lm-eval
        by_subject = {str(task["dataset_name"]): task for task in group.tasks()}
        if unknown := [subject for subject in parameters.subjects if subject not in by_subject]:
            raise WorkloadError(f"mmlu: no subject {', '.join(unknown)}; known: {', '.join(sorted(by_subject))}")

        def rows(split: str) -> dict[str, list[Row]]:
            return once((source, "mmlu", split), lambda: by_subject_of(split))

        def by_subject_of(split: str) -> dict[str, list[Row]]:
            found: dict[str, list[Row]] = {subject: [] for subject in by_subject}
            for row in source.rows(DATASET, split):
                if row["subject"] not in found:
                    raise WorkloadError(
                        f"mmlu: a {split} row of unknown subject {row['subject']!r}; subjects are written as "
                        f"{next(iter(by_subject))}"
                    )
                found[row["subject"]].append(row)
            return found

        parts = [
            # The dev split is the examples, the validation split is asked by nobody.
            Part(f"mmlu/{subject}", task, lambda split, subject=subject: rows(split)[subject], "validation")  # type: ignore[misc]
            for subject, task in by_subject.items()
            if not parameters.subjects or subject in parameters.subjects
        ]
        super().__init__("mmlu", parts, parameters, source.label(DATASET), group)
