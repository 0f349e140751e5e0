"""A sweep makes one element per value, and only of what its path names."""

from __future__ import annotations

import time
from typing import Any

import pytest

from harness.plan import Plan, PlanError, build_plan, draft_plan
from tests.plans import BOOLQ, DROPLESS, HOST, MODEL, SHAREGPT, TIERS, raw_plan


def swept(sweep: dict[str, Any], **changes: Any) -> Plan:
    return build_plan(raw_plan(sweep=sweep, **changes))


def test_an_engine_parameter_is_swept_over_every_engine() -> None:
    plan = swept({"engine.prefill_chunk": [64, 128]}, engine=[DROPLESS, TIERS])
    assert [(c.cell.engine, c.engine.prefill_chunk) for c in plan.cells] == [
        ("dropless[prefill_chunk=64]", 64),
        ("dropless[prefill_chunk=128]", 128),
        ("tiers[prefill_chunk=64]", 64),
        ("tiers[prefill_chunk=128]", 128),
    ]


def test_one_engine_is_swept_by_its_name() -> None:
    plan = swept({"engine.tiers.prefill_chunk": [64, 128]}, engine=[DROPLESS, TIERS])
    assert [(c.cell.engine, c.engine.prefill_chunk) for c in plan.cells] == [
        ("dropless", 512),
        ("tiers[prefill_chunk=64]", 64),
        ("tiers[prefill_chunk=128]", 128),
    ]


def test_a_parameter_of_a_technique_is_swept() -> None:
    plan = swept({"engine.tiers.technique.multiples": [[4, 2], [8, 1]]}, engine=[TIERS])
    assert [c.cell.engine for c in plan.cells] == ["tiers[multiples=4/2]", "tiers[multiples=8/1]"]
    assert [c.cell.technique_parameters["multiples"] for c in plan.cells] == [[4.0, 2.0], [8.0, 1.0]]


def test_the_technique_itself_is_swept() -> None:
    values = [{"name": "dropless"}, {"name": "npumoe-t", "align": 8}]
    plan = swept({"engine.technique": values}, engine=[{"name": "arm"}])
    assert [c.cell.engine for c in plan.cells] == ["arm[technique=dropless]", "arm[technique=npumoe-t align=8]"]
    assert [c.cell.technique for c in plan.cells] == ["dropless", "npumoe-t"]


def test_a_workload_parameter_is_swept() -> None:
    ruler = {"name": "ruler_niah_single_2", "limit": 1}
    plan = swept({"workload.length": [512, 1024]}, workload=[ruler])
    assert [(c.cell.workload, c.workload.length) for c in plan.cells] == [
        ("ruler_niah_single_2[length=512]", 512),
        ("ruler_niah_single_2[length=1024]", 1024),
    ]


def test_the_models_type_is_swept_and_told_in_the_label() -> None:
    plan = swept({"model.dtype": ["float32", "bfloat16"]})
    assert [c.cell.model for c in plan.cells] == [f"{MODEL}[dtype=float32]", f"{MODEL}[dtype=bfloat16]"]
    assert [c.cell.engine_parameters["dtype"] for c in plan.cells] == ["float32", "bfloat16"]
    assert len({c.cell.label for c in plan.cells}) == 2


def test_quantisation_is_swept_by_component_or_as_a_whole() -> None:
    plan = swept({"engine.quantise.experts": ["fp32", "int8", "mxfp4"]})
    assert [c.cell.engine for c in plan.cells] == [f"dropless[experts={form}]" for form in ("fp32", "int8", "mxfp4")]
    assert [c.cell.engine_parameters["experts"] for c in plan.cells] == ["fp32", "int8", "mxfp4"]
    plan = swept({"engine.quantise": [{}, {"experts": "int8", "head": "fp8"}]})
    assert [c.engine.quantise.asked for c in plan.cells] == [{}, {"experts": "int8", "head": "fp8"}]
    assert len({c.cell.cell_id for c in plan.cells}) == 2


def test_two_sweeps_multiply() -> None:
    plan = swept({"engine.prefill_chunk": [64, 128], "workload.limit": [1, 2, 3]})
    assert len(plan.cells) == 6
    assert len({c.cell.cell_id for c in plan.cells}) == 6
    assert len({c.cell.label for c in plan.cells}) == 6


def test_two_sweeps_of_one_element_multiply_and_both_name_it() -> None:
    plan = swept({"engine.prefill_chunk": [64, 128], "engine.technique.align": [8, 16]}, engine=[TIERS])
    assert [c.cell.engine for c in plan.cells] == [
        f"tiers[prefill_chunk={chunk},align={align}]" for chunk in (64, 128) for align in (8, 16)
    ]


def test_a_sweep_may_be_written_as_nested_tables() -> None:
    nested = swept({"engine": {"tiers": {"prefill_chunk": [64, 128]}}}, engine=[DROPLESS, TIERS])
    dotted = swept({"engine.tiers.prefill_chunk": [64, 128]}, engine=[DROPLESS, TIERS])
    assert [c.cell for c in nested.cells] == [c.cell for c in dotted.cells]


def test_a_swept_cell_keeps_its_id_when_other_values_join() -> None:
    two = swept({"engine.prefill_chunk": [64, 128]})
    three = swept({"engine.prefill_chunk": [32, 64, 128]})
    assert {c.cell.cell_id for c in two.cells} < {c.cell.cell_id for c in three.cells}


def test_a_sweep_does_not_change_the_plan_as_it_was_written() -> None:
    raw = raw_plan(sweep={"engine.technique.align": [8, 16]}, engine=[TIERS])
    before = str(raw)
    build_plan(raw)
    assert str(raw) == before


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ({"protocol.repeats": [1, 2]}, ["sweep.protocol.repeats", "'protocol'", "only model, engine"]),
        ({"engine.prefill_chunk": 64}, ["sweep.engine.prefill_chunk", "64", "list"]),
        ({"engine.prefill_chunk": []}, ["sweep.engine.prefill_chunk", "[]", "list"]),
        ({"engine.prefill_chunk": [64, 64]}, ["sweep.engine.prefill_chunk", "64 twice", "once"]),
        ({"engine": [64]}, ["sweep.engine", "names no key", "engine.KEY"]),
        ({"engine.nope.prefill_chunk": [64]}, ["sweep.engine.nope.prefill_chunk", "'nope'", "dropless, tiers"]),
        ({"engine.prefil_chunk": [64]}, ["sweep.engine.prefil_chunk: unknown key", "mean prefill_chunk"]),
        ({"workload.boolq.limit": ["many"]}, ["sweep.workload.boolq.limit", "'many'", "a whole number"]),
        ({"device.host.shoot.x": ["a"]}, ["sweep.device.host.shoot: unknown key"]),
        ({"device.host.sheet.x": ["a"]}, ["sweep.device.host.sheet: only for modelled devices"]),
    ],
)
def test_a_wrong_sweep_is_told(sweep: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        swept(sweep, engine=[DROPLESS, TIERS], workload=[BOOLQ, SHAREGPT], device=[HOST])
    for part in expected:
        assert part in caught.value.problems[0]


# --- many cells -------------------------------------------------------------------------------------------------------


def test_cells_are_counted_before_any_is_built_and_other_problems_are_told_beside() -> None:
    thousand = list(range(1, 1001))
    sweep = {"engine.prefill_chunk": thousand, "engine.max_batch": thousand, "workload.limit": thousand}
    draft = draft_plan(raw_plan(sweep=sweep, engine=[DROPLESS, TIERS], protocol={"repeats": 0}))
    too_many, other = draft.problems
    assert too_many == (
        "sweep: makes 2,000,000,000 cells, and a plan may have 10,000;"
        " take fewer values, or allow more with --max-cells"
    )
    assert other.startswith("protocol.repeats: ")
    assert len(draft.parts.engines) == 2
    assert draft.plan.cells == ()


@pytest.mark.slow
def test_more_digits_than_python_prints_are_many_cells_too() -> None:
    sweep = {f"engine.key{i}": [1, 2] for i in range(16_000)}
    (line,) = (p for p in draft_plan(raw_plan(sweep=sweep)).problems if p.startswith("sweep: "))
    assert "more than 10^18 cells" in line


def test_a_plan_without_a_sweep_has_the_same_limit() -> None:
    engines = [DROPLESS | {"name": f"arm {i}"} for i in range(120)]
    workloads = [BOOLQ | {"label": f"task {i}"} for i in range(100)]
    (line,) = draft_plan(raw_plan(engine=engines, workload=workloads)).problems
    assert "12,000 cells" in line
    assert len(draft_plan(raw_plan(engine=engines, workload=workloads), max_cells=12_000).plan.cells) == 12_000


def test_the_cost_of_a_sweep_grows_with_its_cells() -> None:
    def seconds(n: int) -> float:
        started_s = time.process_time()
        assert len(swept({"engine.prefill_chunk": list(range(1, n + 1))}).cells) == n
        return time.process_time() - started_s

    small_s, large_s = min(seconds(500) for _ in range(3)), seconds(8000)
    assert large_s / small_s < 80  # 16 if it is linear, 256 if every cell looks at all others


def test_values_that_are_equal_are_named_once_and_true_is_not_one() -> None:
    with pytest.raises(PlanError, match=r"holds 64.0 twice"):
        swept({"engine.prefill_chunk": [64, 64.0]})
    with pytest.raises(PlanError, match=r"holds \{'experts': 'int8'\} twice"):
        swept({"engine.quantise": [{"experts": "int8"}, {"experts": "int8"}]})
    with pytest.raises(PlanError, match=r"prefill_chunk: must be a whole number, found true"):
        swept({"engine.prefill_chunk": [1, True]})


def test_two_paths_to_one_key_are_told() -> None:
    with pytest.raises(PlanError, match=r"sweep.engine.tiers.prefill_chunk: another path .* sets the same key"):
        swept({"engine.prefill_chunk": [64, 128], "engine.tiers.prefill_chunk": [32]}, engine=[DROPLESS, TIERS])


def test_a_key_of_a_swept_table_may_be_swept_too() -> None:
    tiers = [{"name": "npumoe-t", "multiples": [4, 1]}, {"name": "npumoe-t", "multiples": [8]}]
    plan = swept({"engine.technique": tiers, "engine.technique.align": [8, 16]}, engine=[{"name": "arm"}])
    assert [c.cell.technique_parameters["align"] for c in plan.cells] == [8, 16, 8, 16]
    with pytest.raises(PlanError, match=r"sweep.engine.technique.align: technique is a value, not a table"):
        swept({"engine.technique": [tiers[0], 5], "engine.technique.align": [8]}, engine=[{"name": "arm"}])
