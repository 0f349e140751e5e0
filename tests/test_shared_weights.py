"""Weights are held once: all arms of a run that compute with the same ones share them."""

from __future__ import annotations

from engines.reference import ReferenceEngine
from harness.plan import build_plan
from harness.run_parts import RunParts
from tests.plans import DROPLESS, raw_plan


def test_arms_with_the_same_weights_share_one_model() -> None:
    arms = [
        DROPLESS,
        DROPLESS | {"name": "blocks", "technique": {"name": "blockwise", "block_size": 16}},
        DROPLESS | {"name": "int8", "quantise": {"experts": "int8"}},
    ]
    plan = build_plan(raw_plan(engine=arms))
    bench = RunParts(plan.protocol)
    engines = [bench.arm(cell).engine for cell in plan.cells if not cell.is_modelled]
    models = {}
    for cell, engine in zip([c for c in plan.cells if not c.is_modelled], engines, strict=True):
        assert isinstance(engine, ReferenceEngine)
        models.setdefault(cell.cell.engine, set()).add(id(engine._model))
    bench.close()
    assert models["dropless"] == models["blocks"]
    assert len(models["dropless"]) == 1
    assert models["int8"].isdisjoint(models["dropless"])
