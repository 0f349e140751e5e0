"""Which arm of a plan the others' answers are compared with."""

from __future__ import annotations

from typing import Any

import pytest

from harness.plan import Plan, build_plan
from tests.plans import BOOLQ, DROPLESS, HERE, HOST, M2_ULTRA, NPUMOE, TIERS, raw_plan

ORACLE = {"name": "oracle", "technique": {"name": "oracle"}}
INT8 = DROPLESS | {"name": "int8", "quantise": {"experts": "int8"}}


def references(plan: Plan) -> dict[str, str | None]:
    """Label of each cell: label of its reference."""
    labels: dict[str | None, str] = {c.cell.cell_id: c.cell.label for c in plan.cells}
    return {c.cell.label: labels.get(c.cell.reference_id) for c in plan.cells}


def on_host(*engines: dict[str, Any], **changes: Any) -> dict[str, str | None]:
    return references(build_plan(raw_plan(engine=list(engines), device=[HOST], **changes)))


def test_the_oracle_is_the_reference_wherever_it_stands() -> None:
    found = on_host(TIERS, DROPLESS, ORACLE)
    assert set(found.values()) == {"oracle · boolq · host"}
    assert len(found) == 3


def test_without_an_oracle_the_first_lossless_arm_in_full_precision_is() -> None:
    again = DROPLESS | {"name": "again", "prefill_chunk": 64}
    assert set(on_host(INT8, TIERS, DROPLESS, again).values()) == {"dropless · boolq · host"}


def test_of_two_dtypes_the_wider_is() -> None:
    model = {"source": "bundled:tiny-qwen3-moe"}
    found = on_host(DROPLESS, model=model, sweep={"model.dtype": ["bfloat16", "float32"]})
    assert set(found.values()) == {"dropless · dtype=float32 · boolq · host"}


def test_without_a_lossless_arm_there_is_none() -> None:
    assert set(on_host(INT8, TIERS).values()) == {None}


def test_an_arm_whose_attention_rounds_is_not_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.kernels.compile.lacking", lambda needs: [])
    for asked in ({"attention_arithmetic": "bf16"}, {"attention_arithmetic": "int8"}, {"cache": "fp16"}):
        assert set(on_host(DROPLESS | {"quantise": asked}, TIERS).values()) == {None}


def test_each_workload_and_each_model_has_its_own() -> None:
    found = on_host(DROPLESS, TIERS, workload=[BOOLQ, BOOLQ | {"label": "other"}])
    assert {label.split(" · ")[1] == str(of).split(" · ")[1] for label, of in found.items()} == {True}
    two = on_host(
        DROPLESS, TIERS, model={"dtype": "float32"}, sweep={"model.source": ["bundled:tiny-qwen3-moe", "/models/other"]}
    )
    assert two["tiers · source=/models/other · boolq · host"] == "dropless · source=/models/other · boolq · host"
    assert len(set(two.values())) == 2


def test_a_modelled_device_falls_back_to_the_host_that_computes_its_answers() -> None:
    found = references(build_plan(raw_plan(engine=[DROPLESS | HERE, NPUMOE], device=[HOST, M2_ULTRA])))
    assert found["npumoe · boolq · model:m2-ultra"] == "dropless · boolq · host"
