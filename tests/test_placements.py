"""Placements: Table 2 of NPUMoE, and which techniques each one takes."""

from __future__ import annotations

import pytest

from engines.errors import EngineError
from engines.pricing.placements import PLACEMENTS, check, find_placement


def test_placements_are_those_of_table_2() -> None:
    """Attention, expert FFN: Core ML (CPU only), ANEMLL, Ours."""
    units = {name: (p.attention, p.experts) for name, p in PLACEMENTS.items() if name != "host"}
    assert units == {"coreml-cpu": ("cpu", "cpu"), "anemll": ("npu", "cpu"), "npumoe": ("npu", "npu")}


def test_experts_on_the_npu_need_static_shapes() -> None:
    reason = check(find_placement("npumoe"), technique_static_shapes=False)
    assert reason is not None
    assert "capacity_tiers" in reason
    assert check(find_placement("npumoe"), technique_static_shapes=True) is None


@pytest.mark.parametrize("name", ["host", "coreml-cpu", "anemll"])
@pytest.mark.parametrize("static", [True, False])
def test_experts_on_the_cpu_take_any_shapes(name: str, static: bool) -> None:
    assert check(find_placement(name), static) is None


def test_an_unknown_placement_names_those_there_are() -> None:
    with pytest.raises(EngineError, match="no placement 'gpu'; available: host, coreml-cpu, anemll, npumoe"):
        find_placement("gpu")
