"""The plans of the sources: every bundled plan is sound, and each has what its source compares."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from harness.bundled_plans import bundled_plans
from harness.plan import Plan, read_draft
from harness.preflight import preflight
from harness.run_parts import RunParts
from results.asked_tables import TableSpec

SYSTEMS = {
    "npumoe": {"coreml-cpu", "coreml-naive", "anemll", "npumoe-base", "npumoe-t", "npumoe-tg", "npumoe"},
    "static-shapes": {
        "blockwise", "dropping", "selective", "all-experts", "tensor-parallel", "expert-parallel", "eplb", "custom",
    },
}  # fmt: skip
"""By the names of Table 2 and Fig. 17 of 000, and of the sections of 004."""
NEEDS_NO_DATA = [n for n, path in bundled_plans().items() if "needs JOULEBENCH_DATA" not in path.read_text("utf-8")]


def sound(path: Path, device: str | None = None) -> Plan:
    draft = read_draft(path, (), devices=[device] if device else [])
    parts = RunParts(draft.plan.protocol)
    try:
        return preflight(draft, parts)
    finally:
        parts.close()


@pytest.mark.parametrize("name", NEEDS_NO_DATA)
def test_a_bundled_plan_is_sound_and_leaves_no_cell_out_unsaid(name: str) -> None:
    plan = sound(bundled_plans()[name])
    assert plan.cells
    assert name == plan.name
    assert [warning for warning in plan.warnings if "changes nothing" in warning] == []


@pytest.mark.parametrize(
    ("name", "device", "over"),
    [
        ("demo", "host", []),
        ("demo", "model:m2-ultra", []),
        ("gpu-ndp", "host", ["moe-ondemand", "monde", "monde"]),
        ("gpu-ndp", "model:rtx5080-ndp", ["moe-ondemand", "monde", "monde"]),
        ("npumoe", "host", []),
    ],
)
def test_a_bundled_plan_runs_on_one_of_its_devices(name: str, device: str, over: list[str]) -> None:
    """It was refused: other devices' arms were still its baseline, and keys that other devices read had no effect."""
    plan = sound(bundled_plans()[name], device)
    assert {cell.device.name for cell in plan.cells} == {device}
    assert [table["over"] for table in plan.raw.get("table", [])] == over
    assert "duplex" not in {name for table in plan.raw.get("table", []) for name in table.get("rows", [])}


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_plan_of_a_source_has_its_systems_and_tables_of_arms_that_are_there(name: str) -> None:
    raw = tomllib.loads(bundled_plans()[name].read_text(encoding="utf-8"))
    assert {arm["technique"]["name"] for arm in raw["engine"]} >= SYSTEMS[name]
    arms = {arm["name"] for arm in raw["engine"]}
    for table in [TableSpec.model_validate(table) for table in raw["table"]]:
        assert {table.over, *(table.rows or ())} <= arms
        assert table.over in (table.rows or ())


def test_npumoe_spans_the_grid_of_the_source() -> None:
    """Chunks of 256, 512 and 1024 tokens, prompts of 1024 and 4096, each arm on the machine that it was made for."""
    cells = sound(bundled_plans()["npumoe"]).cells
    grid = {
        (cell.engine.technique.technique, cell.engine.prefill_chunk, cell.cell.workload)
        for cell in cells
        if cell.is_modelled
    }
    assert len(grid) == len(SYSTEMS["npumoe"]) * 3 * 2
    assert {cell.device.priced_as for cell in cells if cell.is_modelled} == {"phi-3.5-moe"}


def test_static_shapes_has_two_processes_and_every_shard() -> None:
    cells = sound(bundled_plans()["static-shapes"]).cells
    assert {cell.engine.ranks for cell in cells} == {None, 2}
    arms = {cell.cell.engine for cell in cells}
    assert {"shard on I", "shard on H", "shard on blocks", "eplb", "blockwise mxfp4"} <= arms
