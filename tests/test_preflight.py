"""What a plan names is looked at before anything runs: data, sheets, checkpoints, lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.plan import Plan, PlanError, build_plan
from harness.preflight import preflight
from harness.workbench import Workbench
from tests.fakes.random_models import write_random_model
from tests.plans import BOOLQ, HOST, M2_ULTRA, NPUMOE, TIERS, raw_plan


def checked(**changes: Any) -> Plan:
    plan = build_plan(raw_plan(**changes))
    return preflight(plan, Workbench(plan.protocol))


def problems(**changes: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        checked(**changes)
    return list(caught.value.problems)


def test_random_weights_are_noted_on_every_cell() -> None:
    plan = checked(engine=[TIERS, NPUMOE], device=[HOST, M2_ULTRA])
    assert [c.cell.model_note for c in plan.cells] == ["random weights"] * 2


def test_a_note_does_not_change_what_a_cell_is() -> None:
    raw = raw_plan()
    assert checked().plan_hash == build_plan(raw).plan_hash


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"device": [{"name": "host", "meters": ["replay"], "replay_csv": "/no/power.csv"}]},
            ["device host: replay_csv", "/no/power.csv"],
        ),
        ({"device": [HOST | {"watts_sheet": "/no/sheet.toml"}]}, ["device host: watts_sheet", "/no/sheet.toml"]),
        (
            {"workload": [{"name": "ruler_niah_single_2", "length": 10**6, "limit": 1}]},
            ["workload ruler_niah_single_2", "1000000", "lower"],
        ),
        ({"workload": [BOOLQ | {"data": "folder"}]}, ["workload boolq", "no data folder was given"]),
    ],
)
def test_what_is_not_there_is_one_line(changes: dict[str, Any], expected: list[str]) -> None:
    (line,) = problems(**changes)
    for part in expected:
        assert part in line


def test_a_dense_model_has_no_experts_to_place(tmp_path: Path) -> None:
    write_random_model(tmp_path / "dense", "qwen2")
    (line,) = problems(model={"source": str(tmp_path / "dense")}, engine=[TIERS])
    assert "engine tiers" in line
    assert "capacity_tiers places experts" in line
    assert "use dropless" in line


def test_problems_of_several_parts_are_told_together() -> None:
    found = problems(
        workload=[BOOLQ, {"name": "ruler_niah_single_2", "length": 10**6, "limit": 1}],
        device=[HOST | {"watts_sheet": "/no/sheet.toml"}],
        engine=[TIERS, TIERS | {"name": "again"}],
    )
    assert [line.split(":")[0] for line in found] == ["device host", "workload ruler_niah_single_2"]
