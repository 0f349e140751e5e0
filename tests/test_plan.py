"""A plan is checked as a whole, and what is wrong is said with its place, its value and a remedy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.techniques.parameters import Composed
from harness.plan import PlanError, build_plan, draft_plan
from harness.schema import EngineSpec
from tests.plans import (
    BOOLQ,
    DROPLESS,
    HOST,
    IPHONE,
    M2_ULTRA,
    MODEL,
    NPUMOE,
    PHONE,
    TIERS,
    problems,
    raw_plan,
)

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
        (
            {"engine": [DROPLESS, TIERS | {"devices": ["host", "host"]}]},
            ["engine[1].devices: 'host' is named 2 times; name it once"],
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
            ["engine[0].technique.multiples: must be finite", "descend, such as [2, 1, 0.5] (found (1.0, 2.0))"],
        ),
        (
            {"engine": [DROPLESS | {"quantise": {"experts": "int3"}}]},
            ["engine[0].quantise.experts", "'int3'", "'int8', 'int4-g32'"],
        ),
        (
            {"engine": [DROPLESS | {"quantise": {"embedding": "int8"}}]},
            [
                "engine[0].quantise.embedding: unknown key",
                "known: arithmetic, attention, attention_arithmetic, cache, dense, experts, head",
            ],
        ),
        ({"engine": [DROPLESS | {"quantise": "int8"}]}, ["engine[0].quantise", "'int8'", "table"]),
        ({"schema": 9}, ["schema", "9", "reads schema 1"]),
        ({"name": "../x"}, ["name", "'../x'", "slash"]),
        ({"name": ""}, ["name", "''", "not empty"]),
        # wrong types: TOML has types, so nothing is converted
        ({"protocol": {"repeats": "3"}}, ["protocol.repeats", "'3'", "a whole number"]),
        ({"protocol": {"warmup": True}}, ["protocol.warmup", "found true", "a whole number"]),
        ({"protocol": {"repeats": 2.0}}, ["protocol.repeats", "2.0", "a whole number"]),
        ({"engine": [{"name": "a", "technique": "dropless"}]}, ["engine[0].technique", "'dropless'", "{ name ="]),
        ({"engine": [{"name": 5, "technique": {"name": "dropless"}}]}, ["engine[0].name", "5", "a text"]),
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
        ({"engine": [DROPLESS, DROPLESS]}, ["engine", "'dropless' is used 2 times", "each its own"]),
        ({"device": [HOST, HOST]}, ["device", "'host' is used 2 times"]),
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
            ["device[0].cross_check", "'perf' is named 2 times", "once"],
        ),
        ({"device": [PHONE | {"cross_check": ["perf"]}]}, ["device[0].cross_check", "no effect on a phone", "remove"]),
        ({"device": [PHONE | {"computes": "cuda"}]}, ["device[0].computes", "no effect on a phone", "remove"]),
        ({"device": [PHONE | {"app": "org.example"}]}, ["device[0].app", "energy gauge of an iPhone", "remove"]),
        ({"device": [PHONE | {"metres": ["rails"]}]}, ["device[0].metres: unknown key", "mean meters"]),
        ({"device": [M2_ULTRA | {"computes": "cuda"}]}, ["device[0].computes", "is for the host", "remove"]),
        ({"device": [M2_ULTRA | {"price_as": "phi-3.5-moe"}]}, ["device[0].price_as: unknown key", "mean priced_as"]),
        ({"device": [{"meters": ["rapl"]}]}, ["device[0].name: missing", "add name"]),
        ({"device": [{"name": 7}]}, ["device[0].name", "a text", "7"]),
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
        ({"device": [{"name": "192.168.0.1:5555"}]}, ["device[0].name", "named 'adb:192.168.0.1:5555'", "connect"]),
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
        ({"name": "coreml-naive", "rows": 64}, 'may be too small; say which pairs go, with overflow = "order"'),
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
        ({"name": "coreml-naive", "renormalise_survivors": True}, "renormalise_survivors needs a capacity other"),
        ({"name": "dropping", "rows": "max", "overflow": "saliency"}, "overflow needs a capacity other than"),
        ({"name": "dropping", "rows": "max", "renormalise_survivors": False}, "renormalise_survivors needs a capacity"),
        (
            {"name": "custom", "layout": {"kind": "selective", "switch_alpha": 0.8}, "decode": {"kind": "exact"}},
            "switch_alpha needs no decode layout beside it",
        ),
        (
            {"name": "custom", "decode": {"kind": "tiers", "align": 32}},
            'align needs decode_graphs = "same" in a layout of decoding',
        ),
        ({"name": "custom", "decode": {"kind": "capacity", "launch": "active"}}, "launch needs prefill"),
        ({"name": "custom", "calibration_prompts": 3}, "calibration_prompts needs a choice that learns"),
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
    assert isinstance(cell.engine, EngineSpec)
    assert cell.engine.technique.technique == technique["name"]


def test_choices_that_go_together_are_spelled_out_or_stand_beside_a_preset() -> None:
    place = {"kind": "one_unit", "unit": "npu"}
    spelled = {"name": "custom", "place": place, "layout": {"kind": "tiers", "grouped": True}, "backbone": "npu"}
    named = {"name": "npumoe-tg"}
    cells = build_plan(raw_plan(engine=[{"name": t["name"], "technique": t} for t in (spelled, named)])).cells
    first, second = (cell.engine.technique for cell in cells if isinstance(cell.engine, EngineSpec))
    assert isinstance(first, Composed)
    assert isinstance(second, Composed)
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


@pytest.mark.parametrize(
    ("technique", "remedy"),
    [
        ({"name": "blockwise"}, '; set backbone = "gpu" and unit = "gpu"'),
        ({"name": "blockwise", "unit": "gpu"}, '; set backbone = "gpu"'),
        ({"name": "coreml-cpu"}, ""),  # which is what its place makes it
        ({"name": "oracle"}, ""),  # has no keys
        ({"name": "tensor-parallel"}, ""),  # its backbone is on every rank
        ({"name": "lru"}, ""),  # its weights would have no link to a GPU
        ({"name": "moe-ondemand"}, ""),  # its experts stay on the CPU
    ],
)
def test_an_arm_is_told_on_which_unit_a_sheet_prices_it(technique: dict[str, Any], remedy: str) -> None:
    device = {"name": "model:trn2"}
    draft = draft_plan(raw_plan(engine=[{"name": "a", "technique": technique}], device=[HOST, device]))
    assert draft.plan.skipped == (
        f"model:trn2: a: attention would be on cpu, where its sheet prices no attention{remedy}",
    )
    if remedy:
        on_gpu = technique | {"backbone": "gpu", "unit": "gpu"}
        assert not draft_plan(raw_plan(engine=[{"name": "a", "technique": on_gpu}], device=[device])).plan.skipped


@pytest.mark.parametrize("name", ["dropless", "npumoe"])
def test_an_arm_onto_a_phone_s_sheet_is_told_what_that_sheet_is_for(name: str) -> None:
    # Source 002 tells of phones the speed of whole models on choices of cores, and of no operation.
    phone = {"name": "model:iphone-15"}
    plan = build_plan(raw_plan(engine=[{"name": "a", "technique": {"name": name}}], device=[HOST, phone]))
    assert plan.skipped == (
        "model:iphone-15: a: its sheet has the speeds of choices of cores, for `joulebench reproduce`, and prices no"
        " technique",
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


SECTIONS = st.sampled_from(["schema", "name", "model", "engine", "workload", "device", "protocol", "sweep"])


@given(st.dictionaries(SECTIONS, JSON, min_size=1, max_size=3))
@settings(max_examples=150)
def test_any_content_is_a_plan_or_problems_but_never_a_crash(changes: dict[str, Any]) -> None:
    raw = raw_plan() | changes
    found: tuple[str, ...] = ()
    try:
        cells = build_plan(raw).cells
    except PlanError as error:
        cells, found = (), error.problems
    assert bool(cells) != bool(found)
    assert all(line.strip() for line in found)


# --- no dead options -------------------------------------------------------------------------------------------------


def test_a_baseline_that_is_no_arm_is_told_with_the_nearest() -> None:
    assert problems(raw_plan(baseline="droples")) == ["baseline: no arm has the name 'droples'; did you mean dropless?"]
    assert problems(raw_plan(baseline=3)) == ["baseline: must be the name of an arm, found 3"]
    assert build_plan(raw_plan(baseline="dropless")).raw["baseline"] == "dropless"
