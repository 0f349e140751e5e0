"""Eq. 1 to 3 of GPU-NDP (001) on our plans, and what a plan says of a model that N DIMMs do not hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from devices.models.sheet import load_sheet
from devices.models.timeline import Timeline
from engines.dispatch import Routing
from engines.pricing.costs import SheetCosts
from engines.pricing.priced_step import PricedStep
from engines.pricing.published_shapes import QWEN3_30B_A3B
from engines.pricing.schedule import operations
from engines.pricing.shapes import ModelShape, sizes_of
from engines.pricing.travels import Travels
from engines.techniques.context import BuildContext, LayerInput
from engines.techniques.place.balance import Times, balanced, most_on_gpu
from engines.techniques.presets import preset_parameters
from tests.test_preflight import checked

SHEET = "rtx5080-ndp"


@pytest.mark.parametrize(("ndps", "fits"), [(2, False), (3, True)])
@pytest.mark.parametrize("name", ["ndp-tp", "ndp", "monde"])
def test_a_plan_of_what_does_not_fit_says_that_its_cells_are_not_supported(name: str, ndps: int, fits: bool) -> None:
    """The bundled model's routing priced as Phi-3.5-MoE: its experts take 80.5 GB, and a DIMM holds 34.4."""
    engine = {"name": "a", "technique": {"name": name, "ndps": ndps}, "devices": [f"model:{SHEET}"]}
    device = {"name": f"model:{SHEET}", "priced_as": "phi-3.5-moe"}
    plan = checked(engine=[engine], device=[device])
    assert len(plan.cells) == 1
    if fits:
        assert plan.warnings == ()
        return
    (line,) = plan.warnings
    assert "75.0 GiB of experts of phi-3.5-moe, and ndp:0, ndp:1 of sheet rtx5080-ndp hold 64.0 GiB" in line
    assert "its cells will say N.S.: " in line


# --- Eq. 1 to 3 on the sheet -----------------------------------------------------------------------------------------

ONE_LAYER = sizes_of(replace(QWEN3_30B_A3B, n_layers=1))
"""Activations in two bytes."""
EXPERT_BYTES, DIMM_BYTES_PER_S, PCIE_BYTES_PER_S = 3 * 2048 * 768 * 2, 102.4e9, 63e9


def times(n_units: int) -> Times:
    """Memory-bound, as one row is."""
    ndp_s, gpu_s = EXPERT_BYTES / n_units / DIMM_BYTES_PER_S, EXPERT_BYTES / 960e9
    return Times(EXPERT_BYTES / PCIE_BYTES_PER_S, gpu_s, ndp_s, 2048 * 2 / PCIE_BYTES_PER_S)


def experts_s(name: str, n_units: int) -> float:
    """Seconds that the experts of a layer take for one token: what the sheet says of our plan, without what the GPU
    does before and after them."""
    sheet = load_sheet(SHEET)
    shape = ModelShape("m", 1, 2048, 32, 4, 128, 0, 128, 8, 768, 1000)
    context = BuildContext(1, ONE_LAYER, costs=SheetCosts(sheet, ONE_LAYER))
    technique = preset_parameters(name).model_validate({"ndps": n_units}).build(context)
    plan = technique.plan(LayerInput(0, "decode", Routing(torch.arange(8)[None], torch.ones(1, 8), 128)))
    timeline = Timeline(sheet)
    timeline.run(operations(PricedStep(1, 512), [plan], shape, "gpu", None, Travels(sheet)))
    spent = timeline.seconds_by_operation()
    return timeline.now_s() - sum(s for (what, unit), s in spent.items() if unit == "gpu" and what != "expert FFN")


@pytest.mark.parametrize("n_units", [1, 2, 3, 4, 6])
def test_slices_take_the_right_side_of_eq_1(n_units: int) -> None:
    """With all K experts on the units: (N + 1) T_a + T_n K."""
    own = times(n_units)
    assert experts_s("ndp-tp", n_units) == pytest.approx((n_units + 1) * own.activation + 8 * own.ndp, rel=1e-9)


@pytest.mark.parametrize("n_units", [1, 2, 3, 4, 6])
def test_balance_ends_where_eq_1_says(n_units: int) -> None:
    """Both sides end there but for what the equation hides: of computing on the GPU it counts the N-th part of a
    fraction. So it is at most an expert's computing later, and below slices alone."""
    own = times(n_units)
    both_s = (n_units + 1) * own.activation + own.ndp * (8 - balanced(own, n_units, 8).on_gpu)
    found = experts_s("ndp-tp-lb", n_units)
    assert both_s * 0.995 < found < both_s + own.gpu
    assert found < experts_s("ndp-tp", n_units)


def test_e_max_on_the_sheet() -> None:
    """T_g 9.83 us, T_n 15.36 us at N = 6, T_a 0.065 us: (8 x 15.36 + 7 x 0.065) / 25.19 = 4.9 of 8."""
    assert most_on_gpu(times(6), 6, 8) == pytest.approx(4.897, abs=0.001)
