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
from engines.pricing.published_shapes import PHI_3_5_MOE, QWEN3_30B_A3B
from engines.pricing.schedule import operations
from engines.pricing.shapes import ModelShape, sizes_of
from engines.pricing.travels import Travels
from engines.techniques.context import BuildContext, LayerInput, ModelSizes
from engines.techniques.place.balance import Times, balanced, most_on_gpu
from engines.techniques.place.ndp import Schedule
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


@pytest.mark.parametrize("slow", ["ndp:0", "ndp:1"])
def test_of_unlike_units_side_by_side_the_slowest_counts(slow: str) -> None:
    sheet = load_sheet(SHEET)
    roofline = sheet.units[slow].roofline
    assert roofline is not None
    half = roofline.bytes_per_s.model_copy(update={"value": DIMM_BYTES_PER_S / 2})
    unit = sheet.units[slow].model_copy(update={"roofline": roofline.model_copy(update={"bytes_per_s": half})})
    sheet = sheet.model_copy(update={"units": {**sheet.units, slow: unit}})
    found = Schedule(SheetCosts(sheet, ONE_LAYER), ONE_LAYER, ("ndp:0", "ndp:1")).times(1)
    assert found.ndp == pytest.approx(2 * times(2).ndp)


@pytest.mark.parametrize(("name", "columns"), [("ndp-tp", 1067 + 1067), ("ndp-tp-lb", 1067 + 867)])
def test_slices_of_a_model_that_is_priced_as_another_are_of_the_others_columns(name: str, columns: int) -> None:
    """Phi-3.5-MoE has 6400 columns: a sixth is 1067 at most. The model that computes has 128: a sixth is 22, which
    would be 1100. Eq. 1 gives the GPU 0.1845 experts, 24 of 128 columns or 1200 of 6400; a sixth of the rest is 867."""
    shape = replace(PHI_3_5_MOE, n_layers=1)
    priced, sheet = sizes_of(shape), load_sheet(SHEET)
    assert priced is not None
    small = ModelSizes(16, 2, 192, 128, priced.expert_bytes, 1, 1, activation_bytes=2)
    context = BuildContext(1, small, costs=SheetCosts(sheet, priced), priced_sizes=priced)
    technique = preset_parameters(name).model_validate({"ndps": 6}).build(context)
    plan = technique.plan(LayerInput(0, "decode", Routing(torch.tensor([[3, 8]]), torch.ones(1, 2), 16)))
    travels = Travels(sheet, small)
    timeline = Timeline(sheet)
    timeline.run(operations(PricedStep(1, 512), [plan], shape, "gpu", None, travels))
    spent = timeline.seconds_by_operation()
    column_s = 3 * 4096 * 2 / DIMM_BYTES_PER_S
    assert max(s for (_, unit), s in spent.items() if unit.startswith("ndp")) == pytest.approx(columns * column_s)


def test_e_max_on_the_sheet() -> None:
    """T_g 9.83 us, T_n 15.36 us at N = 6, T_a 0.065 us: (8 x 15.36 + 7 x 0.065) / 25.19 = 4.9 of 8."""
    assert most_on_gpu(times(6), 6, 8) == pytest.approx(4.897, abs=0.001)
