"""A plan is checked as a whole, and what is wrong is said with its place, its value and a remedy."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from typer.testing import CliRunner

from engines.model.quantised import Quantisation
from harness.catalog import TECHNIQUES
from harness.commands import app
from harness.plan import Plan, PlanError, build_plan, load_plan
from harness.schema import DeviceSpec, EngineSpec, ModelSpec, PlanFile, StopSpec, TrialProtocol
from harness.workload_specs import SPEC_OF
from tests.plans import (
    BOOLQ,
    DROPLESS,
    FAST,
    HERE,
    HOST,
    IPHONE,
    M2_ULTRA,
    MODEL,
    NPUMOE,
    PHONE,
    SHAREGPT,
    TIERS,
    raw_plan,
    write_plan,
)

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "plans" / "demo.toml"
FIRST = ROOT / "plans" / "first.toml"


def problems(raw: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        build_plan(raw)
    return list(caught.value.problems)


# --- what is wrong, in words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # unknown keys, at every depth
        ({"modle": 3}, ["modle: unknown key", "model"]),
        ({"model": {"source": MODEL, "dtyp": "float32"}}, ["model.dtyp: unknown key", "'float32'", "dtype"]),
        ({"engine": [DROPLESS | {"prefil_chunk": 64}]}, ["engine[0].prefil_chunk", "64", "mean prefill_chunk"]),
        (
            {"engine": [DROPLESS, {"name": "b", "technique": {"name": "npumoe-t", "multiple": [1]}}]},
            ["engine[1].technique.multiple: unknown key", "[1]", "mean multiples"],
        ),
        ({"workload": [BOOLQ | {"limt": 2}]}, ["workload[0].limt: unknown key", "2", "mean limit"]),
        ({"device": [HOST | {"meter": "rapl"}]}, ["device[0].meter: unknown key", "'rapl'", "mean meters"]),
        ({"protocol": {"repeat": 3}}, ["protocol.repeat: unknown key", "3", "mean repeats"]),
        ({"protocol": {"stop": {"min_repeat": 3}}}, ["protocol.stop.min_repeat", "3", "mean min_repeats"]),
        ({"protocol": {"zzz": 3}}, ["protocol.zzz: unknown key", "known: contention_retries, cooldown_s"]),
        # unknown names
        (
            {"engine": [{"name": "a", "technique": {"name": "npumoe-tt"}}]},
            ["engine[0].technique.name", "'npumoe-tt'", "mean npumoe-t"],
        ),
        ({"workload": [{"name": "bolq"}]}, ["workload[0].name", "'bolq'", "mean boolq"]),
        (
            {"engine": [DROPLESS, TIERS | {"devices": ["host", "hots"]}]},
            ["engine[1].devices: the plan has no device", "'hots'", "mean host"],
        ),
        ({"engine": [NPUMOE]}, ["engine[0].devices: the plan has no device", "'model:m2-ultra'", "known: host"]),
        ({"device": [{"name": "host", "meters": ["rpal"]}]}, ["device[0].meters", "'rpal'", "mean rapl"]),
        ({"device": [{"name": "hots"}]}, ["device[0].name", "'hots'", "mean host"]),
        ({"device": [{"name": "model:m2-ulra"}]}, ["device[0].name", "'m2-ulra'", "mean m2-ultra"]),
        ({"device": [M2_ULTRA | {"priced_as": "phi"}]}, ["device[0].priced_as", "'phi'", "phi-3.5-moe"]),
        # wrong values
        ({"protocol": {"repeats": -1}}, ["protocol.repeats", "-1", "greater than or equal to 1"]),
        ({"protocol": {"idle_s": float("inf")}}, ["protocol.idle_s", "inf", "finite"]),
        ({"protocol": {"cooldown_s": float("nan")}}, ["protocol.cooldown_s", "nan", "finite"]),
        ({"protocol": {"order": "random"}}, ["protocol.order", "'random'", "'interleaved', 'sequential' or"]),
        ({"protocol": {"stop": {"min_repeats": 9, "max_repeats": 3}}}, ["protocol.stop", "9", "max_repeats 3"]),
        ({"model": {"source": MODEL, "dtype": "int4"}}, ["model.dtype", "'int4'", "'float32', 'bfloat16' or"]),
        (
            {"engine": [{"name": "a", "technique": {"name": "npumoe-t", "multiples": [1, 2]}}]},
            ["engine[0].technique.multiples", "(1.0, 2.0)", "descend, such as (2, 1, 0.5)"],
        ),
        (
            {"engine": [DROPLESS | {"quantise": {"experts": "int3"}}]},
            ["engine[0].quantise.experts", "'int3'", "'int8', 'int4-g32'"],
        ),
        (
            {"engine": [DROPLESS | {"quantise": {"embedding": "int8"}}]},
            ["engine[0].quantise.embedding: unknown key", "known: attention, dense, experts, head"],
        ),
        ({"engine": [DROPLESS | {"quantise": "int8"}]}, ["engine[0].quantise", "'int8'", "table"]),
        ({"schema": 9}, ["schema", "9", "reads schema 1"]),
        ({"name": "../x"}, ["name", "'../x'", "slash"]),
        ({"name": ""}, ["name", "''", "not empty"]),
        # wrong types: TOML has types, so nothing is converted
        ({"protocol": {"repeats": "3"}}, ["protocol.repeats", "'3'", "integer"]),
        ({"protocol": {"warmup": True}}, ["protocol.warmup", "True", "integer"]),
        ({"protocol": {"repeats": 2.0}}, ["protocol.repeats", "2.0", "integer"]),
        ({"engine": [{"name": "a", "technique": "dropless"}]}, ["engine[0].technique", "'dropless'", "{ name ="]),
        ({"engine": [{"name": 5, "technique": {"name": "dropless"}}]}, ["engine[0].name", "5", "string"]),
        ({"device": [{"name": "host", "meters": "auto"}]}, ["device[0].meters", "'auto'", "list"]),
        ({"name": 7}, ["name", "7", "text"]),
        ({"protocol": 5}, ["protocol", "5", "table [protocol]"]),
        ({"model": "x"}, ["model", "'x'", "table [model]"]),
        ({"engine": DROPLESS}, ["engine", "[[engine]] tables"]),
        ({"sweep": 3}, ["sweep", "3", "table of paths"]),
        # nothing where something must be
        ({"engine": []}, ["engine", "[[engine]] tables", "[]"]),
        ({"device": [{"name": "host", "meters": []}]}, ["device[0].meters", "[]", "at least 1"]),
        ({"engine": [{"name": "a"}]}, ["engine[0].technique: missing", "add technique"]),
        ({"engine": [{"name": "a", "technique": {}}]}, ["engine[0].technique", "{}", "add name"]),
        ({"workload": [{"limit": 2}]}, ["workload[0]", "{'limit': 2}", "add name"]),
        ({"model": {}}, ["model.source: missing", "add source"]),
        # names given twice
        ({"engine": [DROPLESS, DROPLESS]}, ["engine", "'dropless' stands 2 times", "each its own"]),
        ({"device": [HOST, HOST]}, ["device", "'host' stands 2 times"]),
        # settings that would do nothing, or count twice
        ({"device": [{"name": "host", "meters": ["modelled", "modelled"]}]}, ["device[0].meters", "2 times", "once"]),
        ({"device": [{"name": "host", "meters": ["auto", "modelled"]}]}, ["device[0].meters", "a second time"]),
        (
            {"device": [{"name": "host", "meters": ["rapl", "perf"]}]},
            ["device[0].meters", "'rapl' and 'perf' both read RAPL's counters", 'cross_check = ["perf"]'],
        ),
        (
            {"device": [{"name": "host", "meters": ["zeus", "nvml"]}]},
            ["device[0].meters", "'zeus' and 'nvml' both read NVIDIA's counters", 'cross_check = ["nvml"]'],
        ),
        (
            {"device": [{"name": "host", "meters": ["rapl"], "cross_check": ["nvml"]}]},
            ["device[0].cross_check", "'nvml' reads nothing that one of rapl reads", "under meters"],
        ),
        (
            {"device": [{"name": "host", "meters": ["rapl"], "cross_check": ["pref"]}]},
            ["device[0].cross_check", "unknown meter 'pref'", "mean perf"],
        ),
        (
            {"device": [{"name": "host", "meters": ["rapl"], "cross_check": ["perf", "perf"]}]},
            ["device[0].cross_check", "'perf' stands 2 times", "once"],
        ),
        ({"device": [PHONE | {"cross_check": ["perf"]}]}, ["device[0].cross_check", "no effect on a phone", "remove"]),
        ({"device": [M2_ULTRA | {"cross_check": ["perf"]}]}, ["device[0].cross_check", "its own meter", "remove"]),
        ({"device": [{"name": "host", "meters": ["replay"]}]}, ["device[0].recording: missing", "trace.parquet"]),
        ({"device": [{"name": "host", "recording": "p.csv"}]}, ["device[0].recording: has no effect", '"replay"']),
        (
            {"device": [{"name": "host", "meters": ["rapl"], "watts_sheet": "x.toml"}]},
            ["device[0].watts_sheet: has no effect", '"modelled"'],
        ),
        ({"device": [HOST | {"priced_as": "phi-3.5-moe"}]}, ["device[0].priced_as", "remove"]),
        ({"device": [M2_ULTRA | {"meters": ["rapl"]}]}, ["device[0].meters", "its own meter", "remove"]),
        (
            {"device": [PHONE | {"meters": ["rapl"]}]},
            ["device[0].meters", "'rapl'", "it has auto"],
        ),
        ({"device": [PHONE | {"recording": "x.parquet"}]}, ["device[0].recording", "no effect on a phone", "remove"]),
        (
            {"device": [IPHONE | {"meters": ["rapl"]}]},
            ["device[0].meters", "'rapl'", "it has auto, battery, energy gauge"],
        ),
        (
            {"device": [IPHONE | {"meters": ["energy gauge"]}]},
            ["device[0].app", "follows one app", "None", "both or neither"],
        ),
        ({"device": [HOST | {"app": "org.example"}]}, ["device[0].app", "energy gauge of an iPhone", "remove"]),
        ({"device": [{"name": "R58M"}]}, ["device[0].name", "'R58M'", "adb:SERIAL"]),
        (
            {"protocol": {"max_foreign_cpu_share": 1.5}},
            ["protocol.max_foreign_cpu_share", "1.5", "less than or equal to 1"],
        ),
        ({"protocol": {"contention_retries": -1}}, ["protocol.contention_retries", "-1", "greater than or equal to 0"]),
        ({"protocol": {"gate_wait_s": -1.0}}, ["protocol.gate_wait_s", "-1", "greater than or equal to 0"]),
    ],
)
def test_a_problem_is_one_line_with_place_value_and_remedy(changes: dict[str, Any], expected: list[str]) -> None:
    found = problems(raw_plan(**changes))
    (line,) = found
    assert "\n" not in line
    assert line.startswith(expected[0].split(":")[0])
    for part in expected:
        assert part in line


def test_all_problems_are_told_at_once() -> None:
    found = problems(
        {
            "modle": 1,
            "engine": [{"name": "a", "technique": {"name": "nope"}}, DROPLESS | {"x": 1}],
            "workload": [{"name": "nope"}],
            "device": [{"name": "host", "meters": ["nope"]}, {"name": "model:nope"}],
            "protocol": {"repeats": 0, "retries": -1},
            "sweep": {"protocol.repeats": [1], "workload.limit": []},
        }
    )  # fmt: skip
    places = [line.split(":")[0] for line in found]
    assert sorted(places) == sorted(
        [
            "modle", "name", "model", "engine[0].technique.name", "engine[1].x", "workload[0].name", "device[0].meters",
            "device[1].name", "protocol.repeats", "protocol.retries", "sweep.protocol.repeats", "sweep.workload.limit",
        ]
    )  # fmt: skip


def test_an_empty_plan_is_told_what_to_add() -> None:
    assert [p.split(":")[0] for p in problems({})] == ["name", "model", "engine", "workload", "device"]


def test_a_plan_whose_combinations_make_no_sense_has_no_cell() -> None:
    (line,) = problems(raw_plan(engine=[NPUMOE | {"max_batch": 2}], device=[M2_ULTRA]))
    assert "no cell to run" in line
    assert "max_batch is for the host" in line


@pytest.mark.parametrize(
    ("technique", "expected"),
    [
        ({"name": "dropless", "unit": "npu"}, "layout exact follows the routing, and an NPU takes frozen shapes only"),
        ({"name": "custom", "place": {"kind": "one_unit", "unit": "npu"}}, "layout exact follows the routing"),
        (
            {"name": "custom", "place": {"kind": "one_unit", "unit": "npu"}, "layout": {"kind": "tiers"},
             "decode": {"kind": "selective"}},
            "layout selective follows the routing",
        ),
        (
            {"name": "custom", "place": {"kind": "by_cost"}, "layout": {"kind": "blocks"}},
            "place by_cost places graphs of tiers, and layout blocks has none; use layout tiers",
        ),
        (
            {"name": "custom", "place": {"kind": "one_unit", "naive_launch": True}},
            "naive_launch is Core ML's, which launches on an npu; found unit cpu",
        ),
        ({"name": "dropping", "overflow": "none"}, 'technique: overflow = "none" needs rows = "max"'),
        (
            {"name": "custom", "place": {"kind": "by_cost"}, "layout": {"kind": "exact"}},
            "place by_cost places graphs of tiers, and layout exact has none; use layout tiers",
        ),
        (
            {"name": "custom", "place": {"kind": "one_unit", "unit": "npu"},
             "layout": {"kind": "capacity", "rows": "max", "overflow": "none"}},
            'rows = "max" follows the busiest expert of a step, and an NPU takes frozen shapes only',
        ),
        ({"name": "npumoe-base", "rows": "max"}, 'rows = "max" follows the busiest'),
        (
            {"name": "custom", "place": {"kind": "by_cost"}, "layout": {"kind": "tiers"},
             "decode": {"kind": "blocks", "skip_padding_blocks": False}},
            "skip_padding_blocks = false provisions blocks for all experts",
        ),
        ({"name": "custom", "layout": {"kind": "tiers", "group_size": 8}}, "group_size needs grouped = true"),
        ({"name": "npumoe", "grouped": False, "graph_bytes": 10}, "graph_bytes needs grouped = true"),
        ({"name": "npumoe-t", "decode_graphs": "cpu", "decode_rows": 8}, 'decode_rows needs decode_graphs = "single"'),
        ({"name": "blockwise", "flop_per_byte": 400}, 'flop_per_byte needs block_size = "intensity"'),
        ({"name": "blockwise", "block_count": "tight"}, 'block_count needs block_size = "intensity" or'),
        ({"name": "dropping", "rows": 64, "factor": 2.0}, "factor needs a capacity without rows"),
        ({"name": "npumoe-base", "rows": 64, "of": "tokens"}, "of needs a capacity without rows"),
        ({"name": "coreml-naive", "renormalise_survivors": True}, 'renormalise_survivors needs overflow = "order"'),
        (
            {"name": "custom", "layout": {"kind": "selective", "switch_alpha": 0.8}, "decode": {"kind": "exact"}},
            "switch_alpha needs no decode layout beside it",
        ),
        (
            {"name": "custom", "decode": {"kind": "tiers", "align": 32}},
            'align needs decode_graphs = "same" in a layout of decoding',
        ),
        ({"name": "custom", "decode": {"kind": "capacity", "launch": "active"}}, "launch needs prefill"),
        ({"name": "custom", "calibration_prompts": 3}, "calibration_prompts needs a layout that learns"),
        (
            {"name": "custom", "place": {"kind": "by_cost"}, "layout": {"kind": "tiers", "decode_graphs": "same"},
             "decode": {"kind": "all_experts"}},
            "decode_graphs needs no decode layout beside it",
        ),
        ({"name": "coreml-cpu", "unit": "gpu"}, "unit: unknown key"),
        ({"name": "coreml-cpu", "backbone": "gpu"}, "backbone"),
        ({"name": "anemll", "backbone": "cpu"}, "backbone"),
        ({"name": "gpu", "unit": "cpu"}, "unit: unknown key"),
        ({"name": "coreml-naive", "backbone": "npu"}, "backbone"),
        ({"name": "npumoe-t", "grouped": True}, "grouped: unknown key"),
        ({"name": "npumoe-t", "group_size": 8}, "group_size: unknown key"),
        ({"name": "npumoe-tg", "grouped": False}, "grouped: unknown key"),
    ],
)  # fmt: skip
def test_choices_that_do_not_go_together_are_refused_by_name(technique: dict[str, Any], expected: str) -> None:
    (line,) = problems(raw_plan(engine=[{"name": "a", "technique": technique}]))
    assert line.startswith(("engine[0].technique: ", "engine[0].technique."))
    assert expected in line


@pytest.mark.parametrize(
    "technique",
    [
        {"name": "npumoe-base", "rows": 64},
        {"name": "coreml-naive", "rows": 64, "overflow": "order", "renormalise_survivors": True},
        {"name": "npumoe", "group_size": 8, "decode_rows": 16},
        {"name": "blockwise", "block_size": "intensity", "flop_per_byte": 400, "block_count": "tight"},
        {"name": "blockwise", "switch_alpha": 0.8},
        {"name": "custom", "layout": {"kind": "tiers", "group_size": 4, "decode_graphs": "cpu", "decode_rows": 32}},
    ],
)
def test_parameters_that_have_an_effect_or_are_the_defaults_are_taken(technique: dict[str, Any]) -> None:
    (cell,) = build_plan(raw_plan(engine=[{"name": "a", "technique": technique}])).cells
    assert cell.engine.technique.technique == technique["name"]


def test_choices_that_go_together_are_spelled_out_or_stand_beside_a_preset() -> None:
    place = {"kind": "one_unit", "unit": "npu"}
    spelled = {"name": "custom", "place": place, "layout": {"kind": "tiers", "grouped": True}, "backbone": "npu"}
    named = {"name": "npumoe-tg"}
    cells = build_plan(raw_plan(engine=[{"name": t["name"], "technique": t} for t in (spelled, named)])).cells
    first, second = (cell.engine.technique for cell in cells)
    assert first.choices == second.choices
    assert (first.units, first.backbone, first.wanted_prompts) == (("npu",), "npu", 8)


ONLY_RATIOS = (
    "would be on gpu, where its sheet prices no model, only ratios of operations:"
    " Table 8 has one kernel of one size, and no price of a launch or of weights"
)


@pytest.mark.parametrize(
    ("technique", "expected"),
    [
        (
            {"name": "custom", "place": {"kind": "shards"}},
            "model:m2-ultra: sharded: experts would be on core:0, and its sheet has cpu, npu, gpu",
        ),
        ({"name": "dropless", "unit": "gpu"}, f"model:m2-ultra: sharded: experts {ONLY_RATIOS}"),
        ({"name": "gpu"}, f"model:m2-ultra: sharded: attention {ONLY_RATIOS}"),
        ({"name": "coreml-cpu"}, None),
    ],
)
def test_an_arm_goes_onto_no_sheet_that_does_not_price_its_units(
    technique: dict[str, Any], expected: str | None
) -> None:
    plan = build_plan(raw_plan(engine=[{"name": "sharded", "technique": technique}], device=[HOST, M2_ULTRA]))
    assert plan.skipped == (() if expected is None else (expected,))
    assert len(plan.cells) == (2 if expected is None else 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
SECTIONS = st.sampled_from(["schema", "name", "model", "engine", "workload", "device", "protocol", "sweep"])


@given(st.dictionaries(SECTIONS, JSON, min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_any_content_is_a_plan_or_problems_but_never_a_crash(changes: dict[str, Any]) -> None:
    raw = raw_plan() | changes
    found: tuple[str, ...] = ()
    try:
        cells = build_plan(raw).cells
    except PlanError as error:
        cells, found = (), error.problems
    assert bool(cells) != bool(found)
    assert all(line.strip() for line in found)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"name = \n", "not TOML"),
        (b"\xff\xfe", "cannot be read as text"),
        (None, "no such file"),
    ],
)
def test_a_file_that_is_no_plan_is_named(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "plan.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    (line,) = caught.value.problems
    assert line.startswith(f"{path}: {expected}")


def test_a_folder_is_not_a_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is a folder; give the path of a plan file"):
        load_plan(tmp_path)


# --- --set -----------------------------------------------------------------------------------------------------------


def loaded(tmp_path: Path, *assignments: str, **changes: Any) -> Plan:
    return load_plan(write_plan(tmp_path / "plan.toml", raw_plan(**changes)), assignments)


def test_set_reads_values_with_their_toml_types(tmp_path: Path) -> None:
    plan = loaded(
        tmp_path,
        "protocol.repeats=7",
        "protocol.idle_s=0.25",
        "protocol.order=shuffled",
        'name="quoted name"',
        "workload.boolq.limit=5",
        "engine.prefill_chunk = 64",
        'device.host.meters=["modelled"]',
        'protocol.stop={ metric = "ttft_s", max_repeats = 4 }',
    )
    assert (plan.protocol.repeats, plan.protocol.idle_s, plan.protocol.order) == (7, 0.25, "shuffled")
    assert plan.protocol.stop == StopSpec(metric="ttft_s", max_repeats=4)
    assert plan.name == "quoted name"
    (cell_plan,) = plan.cells
    assert cell_plan.workload.limit == 5
    assert cell_plan.engine.prefill_chunk == 64
    assert cell_plan.device.meters == ("modelled",)


def test_set_keeps_an_equals_sign_of_the_value(tmp_path: Path) -> None:
    assert loaded(tmp_path, 'name="a=b"').name == "a=b"


def test_set_of_a_list_reaches_every_element_or_the_named_one(tmp_path: Path) -> None:
    all_of_them = loaded(tmp_path, "engine.prefill_chunk=64", engine=[DROPLESS, TIERS])
    assert [c.engine.prefill_chunk for c in all_of_them.cells] == [64, 64]
    one = loaded(tmp_path, "engine.tiers.prefill_chunk=64", engine=[DROPLESS, TIERS])
    assert [c.engine.prefill_chunk for c in one.cells] == [512, 64]
    second = loaded(tmp_path, "engine.1.prefill_chunk=64", engine=[DROPLESS, TIERS])
    assert [c.engine.prefill_chunk for c in second.cells] == [512, 64]


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("protocol.repeats", ["no '='", "protocol.repeats=5"]),
        ("foo.bar=1", ["foo: unknown key"]),
        ("protocol.repeat=1", ["protocol.repeat: unknown key", "mean repeats"]),
        ("protocol.repeats.x=1", ["repeats is a value"]),
        ("engine.nope.prefill_chunk=1", ["'nope'", "dropless"]),
        ("engine=1", ["names no key"]),
        ("protocol.repeats=many", ["protocol.repeats", "'many'", "integer"]),
    ],
)
def test_a_wrong_set_is_told(tmp_path: Path, assignment: str, expected: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        loaded(tmp_path, assignment)
    (line,) = caught.value.problems
    for part in expected:
        assert part in line


# --- the matrix ------------------------------------------------------------------------------------------------------


def test_the_matrix_is_the_product_without_what_makes_no_sense() -> None:
    plan = build_plan(
        raw_plan(engine=[DROPLESS | HERE, TIERS | HERE, NPUMOE], workload=[BOOLQ, SHAREGPT], device=[HOST, M2_ULTRA])
    )
    assert [(c.cell.engine, c.cell.workload, c.cell.device) for c in plan.cells] == [
        ("dropless", "boolq", "host"),
        ("tiers", "boolq", "host"),
        ("dropless", "sharegpt", "host"),
        ("tiers", "sharegpt", "host"),
        ("npumoe", "boolq", "model:m2-ultra"),
        ("npumoe", "sharegpt", "model:m2-ultra"),
    ]
    assert len(plan.skipped) == 2
    assert "npumoe" in plan.skipped[0]
    assert "dropless, tiers" in plan.skipped[1]


def test_a_phone_is_measured_and_no_model() -> None:
    plan = build_plan(raw_plan(engine=[DROPLESS | {"devices": [PHONE["name"]]}, NPUMOE], device=[PHONE, M2_ULTRA]))
    assert [(c.cell.engine, c.cell.device, c.is_modelled) for c in plan.cells] == [
        ("dropless", "adb:R58M42ABCDE", False),
        ("npumoe", "model:m2-ultra", True),
    ]
    assert plan.skipped[0] == "adb:R58M42ABCDE: npumoe: the plan puts it on other devices"


def test_the_same_plan_has_the_same_ids_and_hash() -> None:
    first, second = build_plan(raw_plan(engine=[DROPLESS, TIERS])), build_plan(raw_plan(engine=[DROPLESS, TIERS]))
    assert [c.cell.cell_id for c in first.cells] == [c.cell.cell_id for c in second.cells]
    assert first.plan_hash == second.plan_hash


def test_an_id_does_not_depend_on_the_other_cells() -> None:
    alone = build_plan(raw_plan()).cells[0].cell.cell_id
    assert build_plan(raw_plan(engine=[TIERS, DROPLESS])).cells[1].cell.cell_id == alone


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"source": MODEL, "dtype": "bfloat16"}},
        {"engine": [DROPLESS | {"prefill_chunk": 64}]},
        {"engine": [DROPLESS | {"reuse_prefix": True}]},
        {"engine": [DROPLESS | {"quantise": {"experts": "int8"}}]},
        {"engine": [{"name": "dropless", "technique": {"name": "npumoe-t"}}]},
        {"workload": [BOOLQ | {"limit": 3}]},
        {"device": [HOST | {"watts_sheet": "other"}]},
    ],
)
def test_another_value_is_another_cell_and_another_hash(changes: dict[str, Any]) -> None:
    before, after = build_plan(raw_plan()), build_plan(raw_plan(**changes))
    assert before.cells[0].cell.cell_id != after.cells[0].cell.cell_id
    assert before.plan_hash != after.plan_hash


def test_the_protocol_and_the_data_folder_change_the_hash(tmp_path: Path) -> None:
    plan = build_plan(raw_plan())
    assert build_plan(raw_plan(protocol=FAST | {"repeats": 2})).plan_hash != plan.plan_hash
    assert build_plan(raw_plan(), tmp_path).plan_hash != plan.plan_hash
    assert build_plan(raw_plan(), tmp_path).cells[0].cell.cell_id != plan.cells[0].cell.cell_id


def test_prefix_reuse_is_a_choice_of_the_plan_that_the_cell_records() -> None:
    silent, told = build_plan(raw_plan(engine=[DROPLESS, DROPLESS | {"name": "reusing", "reuse_prefix": True}])).cells
    assert (silent.engine.reuse_prefix, "reuse_prefix" in silent.cell.engine_parameters) == (False, False)
    assert (told.engine.reuse_prefix, told.cell.engine_parameters["reuse_prefix"]) == (True, True)


def test_quantisation_is_a_choice_of_the_plan_that_the_cell_records() -> None:
    quantise = {"experts": "int4-g64", "head": "fp8"}
    silent, told = build_plan(raw_plan(engine=[DROPLESS, DROPLESS | {"name": "narrow", "quantise": quantise}])).cells
    assert silent.cell.engine_parameters == {"prefill_chunk": 512, "dtype": "float32"}
    assert told.cell.engine_parameters == {"prefill_chunk": 512, "dtype": "float32", **quantise}
    assert told.engine.quantise == Quantisation(experts="int4-g64", head="fp8")


def test_quantised_arms_do_not_go_onto_modelled_devices_which_price_two_bytes() -> None:
    narrow = NPUMOE | {"name": "narrow", "quantise": {"experts": "int8"}}
    plan = build_plan(raw_plan(engine=[NPUMOE, narrow], device=[M2_ULTRA]))
    assert [c.cell.engine for c in plan.cells] == ["npumoe"]
    assert plan.skipped == (
        "model:m2-ultra: narrow: a modelled device prices weights of two bytes, so quantise is for the host",
    )


def test_defaults_written_out_are_the_same_cell() -> None:
    written = build_plan(raw_plan(engine=[DROPLESS | {"prefill_chunk": 512, "max_batch": 1}]))
    assert written.plan_hash == build_plan(raw_plan()).plan_hash


def test_workloads_of_one_name_are_told_apart() -> None:
    plan = build_plan(raw_plan(workload=[BOOLQ, BOOLQ | {"limit": 3}, SHAREGPT, BOOLQ | {"label": "mine"}]))
    assert [c.cell.workload for c in plan.cells] == ["boolq#1", "boolq#2", "sharegpt", "mine"]
    assert len({c.cell.cell_id for c in plan.cells}) == 4


# --- the schema ------------------------------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """As the command prints it."""
    printed: dict[str, Any] = json.loads(CliRunner().invoke(app, ["plan", "schema"]).stdout)
    return printed


def test_the_schema_is_a_json_schema_that_the_demo_meets() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(tomllib.loads(DEMO.read_text(encoding="utf-8")), schema())


@pytest.mark.parametrize(
    "changes",
    [
        {"modle": 3},
        {"engine": [DROPLESS | {"prefil_chunk": 64}]},
        {"engine": [{"name": "a", "technique": {"name": "npumoe-t", "multiple": [1]}}]},
        {"workload": [{"name": "nope"}]},
        {"protocol": {"repeats": "3"}},
        {"engine": []},
    ],
)
def test_schema_and_loader_refuse_the_same(changes: dict[str, Any]) -> None:
    raw = raw_plan(**changes)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(raw, schema())
    problems(raw)


@pytest.mark.parametrize("path", sorted(DEMO.parent.glob("*.toml")), ids=lambda path: path.stem)
def test_plans_that_come_with_joulebench_are_valid(path: Path) -> None:
    assert load_plan(path).cells


KEY_LINE = re.compile(r"^(# )?(\w+) = (.*?) +# \S.*$")


def explained_keys(path: Path) -> dict[str, dict[str, Any]]:
    """Section to its keys with their values, those of comments too. Every line with a key must explain it."""
    found: dict[str, dict[str, Any]] = {"": {}}
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if header := re.fullmatch(r"\[+(\w+)\]+", line):
            section = header[1]
        elif line.startswith("# [sweep]"):
            break
        elif line and (not line.startswith("# ") or re.match(r"# \w+ = ", line)):
            key = KEY_LINE.match(line)
            assert key, f"no explanation: {line}"
            found.setdefault(section, {})[key[2]] = tomllib.loads(f"{key[2]} = {key[3]}")[key[2]]
    return found


def test_the_first_plan_explains_every_key_that_there_is() -> None:
    explained = explained_keys(FIRST)
    for section, record in (
        ("model", ModelSpec),
        ("engine", EngineSpec),
        ("device", DeviceSpec),
        ("protocol", TrialProtocol),
    ):
        assert set(explained[section]) == set(record.model_fields)
    assert {*explained[""], *(s for s in explained if s), "sweep"} == set(schema()["properties"])
    assert explained["protocol"]["stop"] == StopSpec().model_dump()


def test_the_first_plan_tells_defaults_as_they_are() -> None:
    commented = re.findall(r"^# (\w+) = (.*?) +# ", FIRST.read_text(encoding="utf-8"), re.MULTILINE)
    defaults = {
        n: f.default for r in (ModelSpec, EngineSpec, DeviceSpec, TrialProtocol) for n, f in r.model_fields.items()
    }
    told = {key: tomllib.loads(f"v = {value}")["v"] for key, value in commented}
    # What has no default, or one that nobody would write, shows an example.
    examples = {
        "baseline", "devices", "profile", "threads", "cores", "ranks", "label", "cross_check", "recording", "app",
        "priced_as", "stop",
    }  # fmt: skip
    assert {k: v for k, v in told.items() if k not in examples} == {
        k: list(defaults[k]) if k == "meters" else defaults[k] for k in told if k not in examples
    }


@pytest.mark.parametrize("page", ["README.md", "docs/plans.md"])
def test_plans_of_the_pages_are_valid(page: str) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert build_plan(tomllib.loads(example)).cells


# --- no dead options -------------------------------------------------------------------------------------------------

SECTIONS_OF_A_PLAN: list[tuple[type[BaseModel], tuple[str, ...]]] = [
    (PlanFile, ("harness",)),
    (ModelSpec, ("harness",)),
    (EngineSpec, ("harness",)),
    (Quantisation, ("engines",)),
    (DeviceSpec, ("harness",)),
    (TrialProtocol, ("harness",)),
    (StopSpec, ("harness",)),
    *((entry.parameters, ("engines",)) for entry in TECHNIQUES.values()),
    *((spec, ("harness", "workloads")) for spec in dict.fromkeys(SPEC_OF.values())),
]


def names_read(packages: tuple[str, ...]) -> set[str]:
    """Attributes that are loaded anywhere in the packages, and keys looked up in dicts by a literal."""
    read: set[str] = set()
    for path in (p for package in packages for p in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                read.add(str(node.slice.value))
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get" and node.args:
                read.add(str(getattr(node.args[0], "value", "")))
    return read


@pytest.mark.parametrize(("record", "packages"), SECTIONS_OF_A_PLAN, ids=lambda value: getattr(value, "__name__", ""))
def test_every_field_of_a_plan_is_read(record: type[BaseModel], packages: tuple[str, ...]) -> None:
    fields = {field.alias or name for name, field in record.model_fields.items()}
    assert fields - names_read(packages) == set()


def test_a_baseline_that_is_no_arm_is_told_with_the_nearest() -> None:
    assert problems(raw_plan(baseline="droples")) == ["baseline: no arm has this name; did you mean dropless?"]
    assert problems(raw_plan(baseline=3)) == ["baseline: must be the name of an arm, found 3"]
    assert build_plan(raw_plan(baseline="dropless")).raw["baseline"] == "dropless"
