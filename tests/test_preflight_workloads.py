"""Workloads before anything runs: lengths that a model does not hold, and data that leaves nothing to calibrate on."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.plan import Plan, PlanError, draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts
from harness.schema import TrialProtocol
from harness.workload_specs import SPEC_OF
from tests.fakes.items import write_data_folder, write_rows
from tests.plans import DROPLESS, TIERS, raw_plan
from workloads.base import WorkloadError

HELD = 8192
"""Tokens that the bundled model holds."""


def checked(**changes: Any) -> Plan:
    draft = draft_plan(raw_plan(**changes))
    return preflight(draft, RunParts(draft.plan.protocol))


@pytest.mark.parametrize(
    ("workload", "fitting", "longer", "most"),
    [
        ({"name": "ruler_niah_single_2", "limit": 1}, 512, HELD + 1, HELD),
        # The last token of a text is asked about and never read.
        ({"name": "fidelity", "limit": 1}, 16, HELD + 2, HELD + 1),
    ],
)
def test_a_length_of_a_sweep_that_a_model_does_not_hold_leaves_the_others_to_run(
    workload: dict[str, Any], fitting: int, longer: int, most: int
) -> None:
    sweep = {f"workload.{workload['name']}.length": [fitting, longer]}
    plan = checked(workload=[workload | {"too_long": "skip"}], sweep=sweep)
    assert [c.cell.workload_parameters["length"] for c in plan.cells] == [fitting]
    (left_out,) = plan.left_out
    assert left_out.endswith(f"length {longer} skipped: a sample may have {most} tokens with this model")
    with pytest.raises(PlanError) as caught:
        checked(workload=[workload], sweep=sweep)
    (problem,) = caught.value.problems
    assert f"length {longer} is more than the {most} tokens" in problem
    assert 'leave this length out with too_long = "skip"' in problem


def test_data_without_a_calibration_prompt_is_told_where_a_technique_needs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = "Is it far?", "and on " * 2 * HELD
    rows = [
        {"id": name, "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "No."}]}
        for name, text in (("asked", short), ("kept for calibration", long))
    ]
    write_rows(tmp_path / "sharegpt" / "test.jsonl", rows)
    monkeypatch.setenv("JOULEBENCH_DATA", str(tmp_path))
    workload = [{"name": "sharegpt"}]
    assert len(checked(workload=workload, engine=[DROPLESS]).cells) == 1
    with pytest.raises(PlanError) as caught:
        checked(workload=workload, engine=[DROPLESS, TIERS])
    (problem,) = caught.value.problems
    assert problem.startswith(
        f"workload sharegpt: technique npumoe-t is calibrated, and no item kept for that fits the model's {HELD} "
    )
    assert "take a technique without calibration" in problem


class CountsBuilt(RunParts):
    """A run_parts that tells how many workloads were built."""

    built = 0

    def workload_named(self, label: str, spec: Any) -> Any:
        self.built += label not in self._workloads
        return super().workload_named(label, spec)


@pytest.mark.parametrize("workload", [{"name": "ruler_niah_single_2", "length": 512}, {"name": "boolq"}])
def test_a_thousand_limits_are_checked_by_the_largest(workload: dict[str, Any]) -> None:
    path = f"workload.{workload['name']}.limit"
    draft = draft_plan(raw_plan(workload=[workload], engine=[DROPLESS, TIERS], sweep={path: list(range(1, 1001))}))
    run_parts = CountsBuilt(draft.plan.protocol)
    n_engines = 2
    assert len(preflight(draft, run_parts).cells) == n_engines * 1000
    assert run_parts.built == 1


def test_one_sample_tells_that_a_length_is_too_short_and_by_how_much() -> None:
    """The prompt's own count of tokens is the oracle: the length that the message names is the shortest that runs."""
    workload = {"name": "ruler_niah_single_2", "limit": 100}
    with pytest.raises(PlanError) as caught:
        checked(workload=[workload | {"length": 128}])
    (problem,) = caught.value.problems
    assert "the answer takes 128 of 128 tokens" in problem
    needed = int(problem.partition("raise length to ")[2].split()[0])
    # The shortest of a hundred prompts decides; one token less, and none fits.
    assert checked(workload=[workload | {"length": needed}]).cells
    with pytest.raises(PlanError, match="raise length to"):
        checked(workload=[workload | {"length": needed - 1}])


NOT_PARTS = {name for name, spec in SPEC_OF.items() if not spec.smaller_is_part}


@pytest.mark.parametrize("name", ["boolq", "sharegpt", "mt_bench", "ruler_vt", "ruler_cwe", "fixed_lengths"])
def test_a_smaller_limit_asks_some_of_what_a_larger_asks(name: str) -> None:
    assert name not in NOT_PARTS
    plan = checked(workload=[{"name": name}], sweep={f"workload.{name}.limit": [1, 3]})
    with contextlib.closing(RunParts(plan.protocol)) as run_parts:
        smaller, larger = ({r.sample_id for r in run_parts.requests(cell)} for cell in plan.cells)
    assert smaller < larger


@pytest.mark.parametrize("name", ["hellaswag", "mmlu", "gsm8k"])
def test_values_of_a_sweep_ask_what_each_asks_alone_of_data_that_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_data_folder(tmp_path)
    monkeypatch.setenv("JOULEBENCH_DATA", str(tmp_path))
    cells = [
        draft_plan(raw_plan(workload=[{"name": name, "limit": 2, "seed": seed, "too_long": "skip"}])).plan.cells[0]
        for seed in (1, 2, 3)
    ]
    alone = [RunParts(TrialProtocol()).requests(cell) for cell in cells]
    assert len(set(map(tuple, alone))) > 1
    together, other = RunParts(TrialProtocol()), RunParts(TrialProtocol())
    swept = [replace(cell, cell=cell.cell.model_copy(update={"workload": str(i)})) for i, cell in enumerate(cells)]
    assert together.requests(swept[0]) == alone[0]
    shutil.rmtree(tmp_path / name)
    assert [together.requests(cell) for cell in swept] == alone
    with pytest.raises(WorkloadError, match="no such folder"):
        other.requests(swept[0])
