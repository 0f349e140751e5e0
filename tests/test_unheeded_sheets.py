"""Keys of a sheet that change nothing in it are told, and each that is told changes no figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from devices.models.sheet import Sheet, available_sheets, load_sheet
from engines.pricing.cells import Cell, PricedCell, parameters, price_cell
from engines.pricing.routing_sources import UniformRouting
from engines.pricing.shapes import NAMED_SHAPES
from harness.plan import read_draft
from harness.preflight import preflight
from harness.run_parts import RunParts
from harness.unheeded_sheets import unheeded_of_sheet
from tests.command import joulebench
from tests.plans import FAST, raw_plan, write_plan

FIGURE = 'kind = "assumed", origin = "a guess"'
GPU = f"""
[units.gpu]
busy_w = {{ value = 300, {FIGURE} }}
roofline = {{ bytes_per_s = {{ value = 1e12, {FIGURE} }}, flops_per_s = {{ value = 8e13, {FIGURE} }} }}
[links.pcie]
source = "cpu"
target = "gpu"
kind = "shared"
bytes_per_s = {{ value = 3e10, {FIGURE} }}
"""
PRICED_CPU = f"""
[units.cpu]
roofline = {{ bytes_per_s = {{ value = 1e11, {FIGURE} }}, flops_per_s = {{ value = 2e12, {FIGURE} }} }}
"""


def sheet_of(folder: Path, *lines: str) -> Sheet:
    (folder / "mine.toml").write_text("\n".join(('name = "mine"', 'description = "d"', 'source = "s"', *lines)))
    return load_sheet(folder / "mine.toml")


def given(key: str, value: float = 8) -> str:
    return f"{key} = {{ value = {value}, {FIGURE} }}"


def priced(sheet: Sheet, technique: str) -> PricedCell:
    return price_cell(Cell(sheet, NAMED_SHAPES["olmoe-1b-7b"], parameters(technique), UniformRouting(), 64, 4))


@pytest.mark.parametrize(
    ("key", "before", "after", "why"),
    [
        ("waiting_w", PRICED_CPU, "", "without busy_w the unit has no joules"),
        ("idle_w", PRICED_CPU, "", "without busy_w the unit has no joules"),
        ("j_per_flop", PRICED_CPU, "", "without busy_w the unit has no joules"),
        ("waiting_w", PRICED_CPU + given("busy_w", 90), "", "waits while another unit or a link works"),
        ("query_tile", PRICED_CPU, "", "the unit has no kernels.scores"),
        ("row_tile", "[units.cpu]", GPU, "the unit has no prices, and computes nothing"),
        ("query_tile", "[units.cpu]", GPU, "the unit has no prices, and computes nothing"),
    ],
)
def test_a_key_that_changes_nothing_is_told_and_changes_nothing(
    tmp_path: Path, key: str, before: str, after: str, why: str
) -> None:
    technique = "gpu" if after else "coreml-cpu"
    without = sheet_of(tmp_path, before, after)
    assert list(unheeded_of_sheet(without)) == []
    beside = sheet_of(tmp_path, before, given(key), after)
    (told,) = unheeded_of_sheet(beside)
    assert told.startswith(f"units.cpu.{key} changes nothing: ")
    assert why in told
    ours, theirs = priced(beside, technique), priced(without, technique)
    assert [(phase.seconds, phase.joules) for phase in ours.phases] == [
        (phase.seconds, phase.joules) for phase in theirs.phases
    ]


def test_a_limit_of_graphs_is_told_where_no_npu_is(tmp_path: Path) -> None:
    (told,) = unheeded_of_sheet(sheet_of(tmp_path, given("graph_bytes_limit", 1e6), PRICED_CPU))
    assert told.startswith("graph_bytes_limit changes nothing: it is of an NPU's graphs")
    npu = PRICED_CPU.replace("cpu", "npu")
    assert list(unheeded_of_sheet(sheet_of(tmp_path, given("graph_bytes_limit", 1e6), PRICED_CPU, npu))) == []


def test_watts_and_tiles_that_are_read_are_not_told(tmp_path: Path) -> None:
    own = (given("busy_w", 90), given("waiting_w"), given("idle_w"), given("j_per_flop", 1e-12), given("row_tile"))
    assert list(unheeded_of_sheet(sheet_of(tmp_path, PRICED_CPU, *own, GPU))) == []


@pytest.mark.parametrize("name", available_sheets())
def test_sheets_of_joulebench_have_no_such_key(name: str) -> None:
    assert list(unheeded_of_sheet(load_sheet(name))) == []


def test_the_check_of_a_plan_and_the_command_tell_it(tmp_path: Path) -> None:
    sheet_of(tmp_path, PRICED_CPU, given("waiting_w"))
    plan = write_plan(
        tmp_path / "plan.toml",
        raw_plan(
            engine=[{"name": "cpu", "technique": {"name": "coreml-cpu"}}],
            workload=[{"name": "fixed_lengths", "prompt_tokens": 16, "new_tokens": 3, "limit": 1}],
            device=[{"sheet": "mine.toml"}],
            protocol=FAST,
        ),
    )
    words = "units.cpu.waiting_w changes nothing: without busy_w the unit has no joules; remove it"
    draft = read_draft(plan)
    assert f"device model:mine: {words}" in preflight(draft, RunParts(draft.plan.protocol)).warnings
    done = joulebench("sheets", str(tmp_path / "mine.toml"))
    assert (done.code, done.problems) == (0, [words])
