"""Every claim of GPU-NDP (001) that needs no machine: sizes, what fits in N DIMMs; and Eq. 1 to 3 on our plans."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from devices.models.sheet import load_sheet
from devices.models.timeline import Timeline
from engines.dispatch import Routing
from engines.model.model_config import ModelConfig, parse_model_config
from engines.pricing.block import Travels
from engines.pricing.costs import SheetCosts
from engines.pricing.schedule import PricedStep, operations
from engines.pricing.shapes import ModelShape
from engines.sizes import own_sizes
from engines.techniques.context import BuildContext, LayerInput, ModelSizes
from engines.techniques.place.balance import Times, balanced, most_on_gpu
from engines.techniques.presets import preset_parameters
from tests.claims import Claim, check
from tests.fakes.published import PUBLISHED
from tests.test_preflight import checked

SHEET = "rtx5080-ndp"
DEEPSEEK, QWEN3, PHI, MIXTRAL = "DeepSeek-MoE", "Qwen3-30B-A3B", "Phi-3.5-MoE", "Mixtral-8x7B"
PUBLISHED_AS = {
    DEEPSEEK: "deepseek-moe-16b-base",
    QWEN3: "Qwen3-30B-A3B",
    PHI: "Phi-3.5-MoE-instruct",
    MIXTRAL: "Mixtral-8x7B-v0.1",
}
# Table II: expert parameters (1e9), experts, TopK, hidden, intermediate, layers; the id of its first row.
TABLE_2: dict[str, tuple[int, tuple[str, ...]]] = {
    DEEPSEEK: (38, ("15.4", "64", "6", "2048", "1408", "27")),
    QWEN3: (44, ("29.0", "128", "8", "2048", "768", "48")),
    PHI: (50, ("40.3", "16", "2", "6400", "4096", "32")),
    MIXTRAL: (56, ("42.0", "8", "2", "4096", "14336", "32")),
}
WHAT = (
    "expert parameters, 1e9",
    "experts",
    "experts of a token",
    "hidden width",
    "expert width",
    "layers with experts",
)
UNLIKE = {
    53: (("4096",), "the two columns are swapped"),
    54: (("6400",), "the two columns are swapped"),
    56: (("45.1",), "42.0 is 45.1e9 / 2**30"),
}
"""By claim: what ours is, and why."""
ALSO = {38: "with the two shared experts of each layer", 40: "and 2 shared", 43: "of 28"}
DIMMS = (2, 4, 6)


def config_of(model: str) -> ModelConfig:
    return parse_model_config(PUBLISHED[PUBLISHED_AS[model]].config, None)


def sizes_of(model: str) -> ModelSizes:
    found = own_sizes(config_of(model))
    assert found is not None
    return found


def row_of_table_2(model: str) -> tuple[float, ...]:
    sizes, moe = sizes_of(model), config_of(model).moe
    assert moe is not None
    width = sizes.n_experts * sizes.expert_width + (moe.shared.width if moe.shared is not None else 0)
    parameters = sizes.n_sparse_layers * 3 * sizes.hidden * width
    others = sizes.n_experts, sizes.top_k, sizes.hidden, sizes.expert_width, sizes.n_sparse_layers
    return (parameters / 1e9, *others)


def routed_bytes(model: str) -> int:
    sizes = sizes_of(model)
    return sizes.n_sparse_layers * sizes.n_experts * sizes.expert_bytes


def not_supported() -> list[tuple[str, int]]:
    """Models and DIMMs that cannot hold them."""
    dimm = load_sheet(SHEET).capacity_bytes("ndp:0")
    assert dimm is not None
    return [(model, n) for model in TABLE_2 for n in DIMMS if routed_bytes(model) > n * dimm]


def all_parameters(model: str) -> float:
    """Published, 1e9."""
    return float(PUBLISHED[PUBLISHED_AS[model]].parameters_b)


def table_2_claims() -> list[Claim]:
    found = []
    for model, (first, printed) in TABLE_2.items():
        for column, (what, figure) in enumerate(zip(WHAT, printed, strict=True)):
            number = first + column
            instead, why = UNLIKE.get(number, ((), ALSO.get(number, "")))
            ours = partial(lambda model, column: [row_of_table_2(model)[column]], model, column)
            told = f"001-{number:03}", "Table II", f"{model}: {what}"
            found.append(Claim(*told, (figure,), ours, "shape", instead=instead, why=why))
    return found


CLAIMS = [
    Claim(
        "001-018", "Fig. 9 to 11", "configurations that do not fit, of 4 models on 2, 4 and 6 DIMMs", ("2",),
        lambda: [len(not_supported())], "sheet", why="Phi and Mixtral on 2 DIMMs, where it prints N.S.",
    ),
    Claim(
        "001-020", "§I", "Qwen3-30B-A3B in BF16, GB, above", ("60", "inf"), lambda: [2 * all_parameters(QWEN3)],
        "shape", is_range=True,
    ),
    Claim(
        "001-021", "§II-B", "Mixtral: experts that a token activates in a layer, MiB in FP16", ("672",),
        lambda: [sizes_of(MIXTRAL).top_k * sizes_of(MIXTRAL).expert_bytes / 2**20], "shape", why="MiB, printed as MB",
    ),
    Claim(
        "001-022", "§II-B", "Mixtral: its activations, MiB in FP16", ("0.0078",),
        lambda: [2 * sizes_of(MIXTRAL).hidden / 2**20], "shape", why="MiB, printed as MB",
    ),
    *table_2_claims(),
]  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.case)
def test_claim(claim: Claim) -> None:
    check(claim)


def test_not_supported_are_phi_and_mixtral_on_two_dimms() -> None:
    """80.5 and 90.2 GB in 68.7; Qwen3's 58.0 and DeepSeek's 29.9 fit."""
    assert not_supported() == [(PHI, 2), (MIXTRAL, 2)]


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
    assert "the experts of phi-3.5-moe take 80.5 GB, and 2 NDP units of model:rtx5080-ndp hold 68.7" in line
    assert line.endswith("its cells will say N.S.")


# --- Eq. 1 to 3 on the sheet -----------------------------------------------------------------------------------------

ONE_LAYER = sizes_of(QWEN3)._replace(n_layers=1, n_sparse_layers=1, activation_bytes=2)
"""Of Qwen3-30B-A3B, activations in two bytes."""
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
