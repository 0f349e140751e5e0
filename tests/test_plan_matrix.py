"""What cells a plan expands to, and what makes two of them the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.model.quantised import Quantisation
from harness.plan import PlanError, build_plan
from tests.plans import (
    BOOLQ,
    DROPLESS,
    FAST,
    HERE,
    HOST,
    M2_ULTRA,
    MODEL,
    NPUMOE,
    PHONE,
    SHAREGPT,
    TIERS,
    raw_plan,
)

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


def test_our_own_engine_goes_onto_no_phone() -> None:
    plan = build_plan(raw_plan(engine=[DROPLESS | {"devices": [PHONE["name"]]}, NPUMOE], device=[PHONE, M2_ULTRA]))
    assert [(c.cell.engine, c.cell.device) for c in plan.cells] == [("npumoe", "model:m2-ultra")]
    assert plan.skipped[:2] == (
        "adb:R58M42ABCDE: dropless: joulebench's own engine computes on this host",
        "adb:R58M42ABCDE: npumoe: the plan puts it on other devices",
    )


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


def test_arithmetic_is_a_choice_of_the_plan_that_makes_another_cell() -> None:
    narrow = DROPLESS | {"quantise": {"experts": "int8"}}
    rounding = DROPLESS | {"name": "rounding", "quantise": {"experts": "int8", "arithmetic": "int8"}}
    plain, rounded = build_plan(raw_plan(engine=[narrow, rounding])).cells
    assert "arithmetic" not in plain.cell.engine_parameters
    assert rounded.cell.engine_parameters == plain.cell.engine_parameters | {"arithmetic": "int8"}
    assert plain.cell.cell_id != rounded.cell.cell_id


def test_arithmetic_of_attention_and_the_form_of_its_cache_make_another_cell_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engines.kernels.compile.lacking", lambda needs: [])
    narrow = DROPLESS | {"quantise": {"experts": "int8", "arithmetic": "int8"}}
    for asked in ({"attention_arithmetic": "bf16"}, {"attention_arithmetic": "int8"}, {"cache": "fp16"}):
        rounding = {"name": "rounding", "quantise": narrow["quantise"] | asked}
        plain, rounded = build_plan(raw_plan(engine=[narrow, DROPLESS | rounding])).cells
        assert rounded.cell.engine_parameters == plain.cell.engine_parameters | asked
        assert plain.cell.cell_id != rounded.cell.cell_id


@pytest.mark.parametrize("asked", [{"attention_arithmetic": "fp32"}, {"cache": "fp32"}])
def test_what_is_so_anyway_may_be_said_and_makes_no_other_cell(asked: dict[str, str]) -> None:
    """In a sweep one value says it."""
    plan = build_plan(raw_plan(engine=[DROPLESS, DROPLESS | {"name": "again", "quantise": asked}]))
    plain, again = plan.cells
    assert plain.cell.engine_parameters == again.cell.engine_parameters


@pytest.mark.parametrize(("has_bf16", "planned"), [(True, {"plain", "rounding"}), (False, {"plain"})])
@pytest.mark.parametrize(
    "quantise", [{"experts": "bf16", "arithmetic": "bf16"}, *({"attention_arithmetic": to} for to in ("bf16", "int8"))]
)
def test_arithmetic_is_skipped_where_the_processor_has_none(
    quantise: dict[str, str], has_bf16: bool, planned: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.kernels.compile.lacking", lambda needs: [] if has_bf16 else list(needs))
    arm = DROPLESS | {"name": "rounding", "quantise": quantise}
    plan = build_plan(raw_plan(engine=[DROPLESS | {"name": "plain"}, arm]))
    assert {c.cell.engine for c in plan.cells} == planned
    needs = "VNNI" if "int8" in quantise.values() else "BF16"
    told = f"lacks AVX-512 {needs}; leave quantise." + next(key for key in quantise if "arithmetic" in key)
    assert [told in line for line in plan.skipped] == ([] if has_bf16 else [True])


@pytest.mark.parametrize(
    "quantise", [{"experts": "int8", "arithmetic": "int8"}, {"attention_arithmetic": "bf16"}, {"cache": "bf16"}]
)
def test_rounded_arithmetic_stays_on_the_cpu_of_this_host(quantise: dict[str, str]) -> None:
    arm = DROPLESS | {"quantise": quantise}
    on_gpu = {"name": "host", "computes": "cuda"}
    plan = build_plan(raw_plan(engine=[DROPLESS | {"name": "plain"}, arm], device=[on_gpu, M2_ULTRA]))
    assert {c.cell.engine for c in plan.cells} == {"plain"}
    told = [line for line in plan.skipped if f": {arm['name']}: " in line]
    assert len(told) == 2
    assert all(f"quantise.{[*quantise][-1]}" in line for line in told)


@pytest.mark.parametrize(
    ("quantise", "told"),
    [
        ({"experts": "int8", "arithmetic": "int4"}, "quantise.arithmetic"),
        ({"experts": "bf16", "arithmetic": "int8"}, 'arithmetic "int8" multiplies weights of int8'),
        ({"attention_arithmetic": "int4"}, "quantise.attention_arithmetic"),
        ({"cache": "int8"}, "quantise.cache"),
    ],
)
def test_arithmetic_that_is_unknown_or_has_no_weights_is_refused_in_a_line(quantise: dict[str, str], told: str) -> None:
    with pytest.raises(PlanError) as refused:
        build_plan(raw_plan(engine=[DROPLESS | {"quantise": quantise}]))
    assert told in str(refused.value)


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
