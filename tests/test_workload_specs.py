"""What a plan may say of a workload is a record of its own, which says what it builds."""

from __future__ import annotations

from typing import get_type_hints

import pytest

from harness.catalog import WORKLOADS
from harness.matrix import CellPlan
from harness.schema import WORKLOAD
from harness.workload_specs import SPEC_OF, WorkloadSpec
from workloads.base import WorkloadError

NOT_SHIPPED = {"ruler_qa_squad", "ruler_qa_hotpot", "azure_trace"}
"""Of these no items come with the project, and they look for their file when they are built."""


def test_every_workload_that_is_listed_can_be_named_and_no_other() -> None:
    assert set(SPEC_OF) == set(WORKLOADS)


def test_a_cell_tells_the_type_checker_which_workloads_there_are() -> None:
    assert get_type_hints(CellPlan, include_extras=True)["workload"] == WorkloadSpec


@pytest.mark.parametrize("name", sorted(set(WORKLOADS) - NOT_SHIPPED - {"lm_eval"}))
def test_a_name_builds_the_workload_of_that_name(name: str) -> None:
    built = WORKLOAD.read({"name": name}).build(None, allow_code=True)
    assert name.removeprefix("ruler_") == built.name.removeprefix("ruler_")


def test_any_task_is_called_by_the_name_that_lm_eval_gives_it() -> None:
    assert WORKLOAD.read({"name": "lm_eval", "task": "arc_easy"}).build(None, allow_code=False).name == "arc_easy"


@pytest.mark.parametrize("name", sorted(NOT_SHIPPED))
def test_what_needs_a_file_says_so_by_its_own_name(name: str) -> None:
    with pytest.raises(WorkloadError, match=rf"^{name}\b.*JOULEBENCH_DATA"):
        WORKLOAD.read({"name": name}).build(None, allow_code=False)
