"""Tables name an arm's technique with what the plan changed of it, and with nothing that it is of itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.plan import build_plan
from results.cells import technique_name
from results.records import Cell
from results.report.arms import arms_of
from results.report.standings import names_of
from tests.plans import raw_plan
from tests.run_builders import cell


def cell_of(technique: dict[str, Any]) -> Cell:
    (plan,) = build_plan(raw_plan(engine=[{"name": "arm", "technique": technique}])).cells
    return plan.cell


@pytest.mark.parametrize(
    ("technique", "name"),
    [
        ({"name": "dropless"}, "dropless"),
        ({"name": "oracle"}, "oracle"),
        # Its own values, spelled out.
        ({"name": "dropless", "unit": "cpu", "backbone": "cpu"}, "dropless"),
        ({"name": "npumoe-tg", "align": 8}, "npumoe-tg (align=8)"),
        (
            {"name": "npumoe-t", "multiples": [2, 1, 0.5], "decode_graphs": "same"},
            "npumoe-t (multiples=[2.0, 1.0, 0.5], decode_graphs=same)",
        ),
        ({"name": "custom"}, "custom"),
        (
            {"name": "custom", "layout": {"kind": "blocks", "skip_padding_blocks": False}},
            "custom (layout=blocks, layout.skip_padding_blocks=false)",
        ),
    ],
)
def test_a_technique_is_named_with_what_the_plan_changed(technique: dict[str, Any], name: str) -> None:
    assert technique_name(cell_of(technique)) == name


def test_all_parameters_stay_beside_the_name() -> None:
    cell = cell_of({"name": "npumoe-tg", "align": 8})
    assert {"align": 8, "base": "BK/E", "unit": "npu", "multiples": None}.items() <= cell.technique_parameters.items()


def test_a_cell_of_an_older_run_tells_all_that_it_recorded() -> None:
    stored = json.loads(cell_of({"name": "dropless"}).model_dump_json())
    del stored["technique_changes"]
    assert technique_name(Cell(**stored)) == "dropless (backbone=cpu, unit=cpu, naive_launch=false)"


@pytest.mark.parametrize(
    ("engine", "name", "swept"),
    [
        ("tiers[cores=0,1,prefill_chunk=64]", "tiers", "cores=0,1,prefill_chunk=64"),
        ("[all] tiers[multiples=[2, 1]]", "[all] tiers", "multiples=[2, 1]"),
        ("tiers [cold]", "tiers [cold]", ""),
        ("[cold]", "[cold]", ""),
    ],
)
def test_only_values_of_a_sweep_are_told_apart_from_a_name(engine: str, name: str, swept: str) -> None:
    (arm,) = arms_of([cell("c", engine=engine)]).values()
    assert (arm.base_name.striptags(), arm.swept.striptags()) == (name, swept)
    assert names_of(engine) == (engine, name)
