"""Every claim of NPUMoE (000) that needs no machine: sizes, worked examples, and ratios of its printed tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

import pytest
import torch

from devices.models.operation import Operation, operation_joules, operation_seconds
from devices.models.sheet import load_sheet
from engines.dispatch import Routing
from engines.model.checkpoints import tensor_shapes
from engines.model.model_config import parse_model_config
from engines.pricing.published_shapes import PHI_3_5_MOE
from engines.pricing.shapes import NAMED_SHAPES, sizes_of
from engines.profile import Profile
from engines.techniques.context import LayerInput
from engines.techniques.layout.tiers import expected_load
from tests.benchmarks import m2_ultra_arms as arms
from tests.benchmarks.m2_ultra_fits import TABLE_4
from tests.claims import PAGE, Claim, check, page, sources
from tests.fakes.published import PUBLISHED
from tests.techniques import built

PUBLISHED_AS = {
    "phi-3.5-moe": "Phi-3.5-MoE-instruct",
    "phi-tiny-moe": "Phi-tiny-MoE-instruct",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
}
GIB = 2**30

# --- the source's tables ---------------------------------------------------------------------------------------------

# Table 3: accuracy in FP16 and ours, %.
TABLE_3 = {"000-092": (86.00, 86.00), "000-097": (88.57, 87.62), "000-102": (95.50, 95.00), "000-107": (96.00, 96.00)}
# Table 4, last row: Core ML CPU, Core ML naive, ANEMLL, ours.
TABLE_4_TOTAL = (2315.83, 4706.42, 2330.87, 2165.46)
CPU, NAIVE, ANEMLL, OURS = range(4)
# Table 5: latency (ms) and energy (mJ) per token in parallel, then in series.
TABLE_5 = {
    (1, 32): (0.13, 0.99, 0.31, 1.43), (1, 64): (0.08, 0.62, 0.23, 1.17), (1, 128): (0.07, 1.66, 0.16, 0.89),
    (4, 32): (0.14, 1.00, 0.27, 1.22), (4, 64): (0.10, 0.94, 0.19, 0.98), (8, 32): (0.15, 0.97, 0.26, 1.16),
    (8, 64): (0.11, 0.79, 0.18, 0.93), (8, 96): (0.10, 0.85, 0.15, 0.88), (8, 128): (0.10, 0.74, 0.14, 0.96),
    (8, 192): (0.15, 0.96, 0.15, 0.92), (8, 256): (0.16, 0.98, 0.16, 0.99),
}  # fmt: skip
# Tables 8 and 9: GPU, NPU.
TABLE_8 = {"time": (7.09, 38.27), "energy": (515.60, 275.70), "power": (66.80, 7.10)}
TABLE_9 = {"time": (0.99, 1.26), "energy": (54.72, 12.21), "power": (54.29, 9.61)}

# --- sizes -----------------------------------------------------------------------------------------------------------


@cache
def checkpoint_values(name: str) -> int:
    """All values of the published checkpoint, norms and biases too."""
    shapes = tensor_shapes(parse_model_config(PUBLISHED[PUBLISHED_AS[name]].config, None))
    return sum(map(math.prod, shapes.values()))


def active_b(name: str) -> tuple[float, float, float]:
    """As the makers count, with the embedding, of which a token reads one row; without it; without the head too."""
    shape = NAMED_SHAPES[name]
    met, table = shape.parameters.active, shape.vocabulary * shape.hidden
    return (met + table) / 1e9, met / 1e9, (met - table) / 1e9


def size_claims() -> list[Claim]:
    found = []
    # Of each model the ids of layers, total, active, experts, sparsity.
    for name, first, layers, total, active, experts, sparsity in (
        ("phi-3.5-moe", 22, "32", "42.6", "6.6", ("16", "2"), "8"),
        ("phi-tiny-moe", 27, "32", "3.8", "1.1", ("16", "2"), "8"),
        ("qwen3-30b-a3b", 32, "48", "30.5", "3.3", ("128", "8"), "16"),
    ):
        shape, row = NAMED_SHAPES[name], "Table 1"
        is_phi, is_tiny = name == "phi-3.5-moe", name == "phi-tiny-moe"
        found += [
            Claim(f"000-{first:03}", row, f"{name}: layers", (layers,), lambda s=shape: [s.n_layers], "shape"),
            Claim(
                f"000-{first + 1:03}", row, f"{name}: parameters, 1e9", (total,),
                lambda s=shape: [s.parameters.total / 1e9], "shape",
                instead=("41.9",) if is_phi else (),
                why="83.75 GB in FP16 (000-037) are 41.9e9" if is_phi else "",
            ),
            Claim(
                f"000-{first + 2:03}", row, f"{name}: active parameters, 1e9", (active,),
                lambda n=name, counts=1 if is_phi else 3: active_b(n)[:counts], "shape",
                instead=() if is_phi else ("1.29", "1.16", "1.03") if is_tiny else ("3.35", "3.04", "2.73"),
                why="" if is_phi else "with embedding and head, with the head, with neither: none rounds to it",
            ),
            Claim(
                f"000-{first + 3:03}", row, f"{name}: experts, all and a token's", experts,
                lambda s=shape: [s.n_experts, s.top_k], "shape",
            ),
            Claim(
                f"000-{first + 4:03}", row, f"{name}: E / K", (sparsity,), lambda s=shape: [s.n_experts / s.top_k],
                "shape",
            ),
        ]  # fmt: skip
    return [
        *found,
        Claim(
            "000-021", "§5.1", "an expert of Phi-3.5-MoE, MiB in FP16", ("150",),
            lambda: [PHI_3_5_MOE.expert_weights * 2 / 2**20], "shape",
        ),
        Claim(
            "000-037", "§5.1", "Phi-3.5-MoE in FP16, GB", ("83.75",),
            lambda: [checkpoint_values("phi-3.5-moe") * 2 / 1e9], "shape",
        ),
        Claim(
            "000-038", "§5.1", "Phi-tiny-MoE in FP16, GB", ("7.51",),
            lambda: [checkpoint_values("phi-tiny-moe") * 2 / 1e9], "shape",
        ),
        Claim(
            "000-039", "§5.1", "Qwen3-30B-A3B in FP16, GB", ("28.64",),
            lambda: [checkpoint_values("qwen3-30b-a3b") * 2 / 1e9, checkpoint_values("qwen3-30b-a3b") / GIB], "shape",
            instead=("61.06", "28.44"), why="61.06 GB in FP16, 28.44 GiB in 8 bit",
        ),
    ]  # fmt: skip


# --- worked examples -------------------------------------------------------------------------------------------------


def routing(loads: Sequence[int]) -> Routing:
    experts = torch.tensor([expert for expert, load in enumerate(loads) for _ in range(load)])[:, None]
    return Routing(experts, torch.ones(experts.shape), len(loads))


def busiest_expert() -> list[float]:
    """The source's formula has no K."""
    relative_load = [Fraction(load) for load in (2, 2, 2, 2, 0, 0, 0, 0)]
    return [float(max(expected_load(relative_load, chunk=256, top_k=1)))]


def largest_graph_gib() -> list[float]:
    """Groups of 16 are asked for; the experts of Phi-3.5-MoE go into one graph as far as its weights allow."""
    profile = Profile({0: (1,) * 16}, 2, 1)
    technique = built("npumoe-tg", 256, profile, sizes_of(PHI_3_5_MOE), group_size=16)
    plan = technique.plan(LayerInput(0, "prefill", routing([2] * 16), torch.ones(32)))
    n_experts = max(len(call.experts) for call in plan.calls)
    assert n_experts == 8, "16 x 128 falls back to the CPU (§4.2)"
    return [n_experts * PHI_3_5_MOE.expert_weights * 2 / GIB]


def packing() -> list[float]:
    """Tokens of each of four experts in one graph of C = 64, its slots, and the padded ones in percent."""
    technique = built("npumoe-tg", 128, Profile({0: (1,) * 4}, 1, 1), sizes_of(PHI_3_5_MOE), multiples=(2,), align=1)
    plan = technique.plan(LayerInput(0, "prefill", routing([64, 32, 32, 0]), torch.ones(128)))
    (call,) = plan.calls
    counters = plan.counters()
    return [*call.valid_per_expert, call.rows_per_expert[0], 100 * counters.padded_rows / counters.computed_rows]


EXAMPLES = [
    Claim("000-019", "§4.1", "tokens of the busiest expert, B = 256, E = 8, r = 2", ("64",), busiest_expert, "plan",
          why="as printed; its formula has no K, and with K = 2 it is 128"),
    Claim(
        "000-020", "§4.2", "largest graph that the NPU takes, GiB: 8 experts of 150 MiB", ("1.2",), largest_graph_gib,
        "plan",
    ),
    Claim(
        "000-286", "§4.2", "tokens of four experts, their capacity, padding in %", ("64", "32", "32", "0", "64", "50"),
        packing, "plan",
    ),
]  # fmt: skip

# --- Tables 3 and 4 --------------------------------------------------------------------------------------------------


def less(ours: float, theirs: float) -> float:
    """Percent."""
    return 100 * (1 - ours / theirs)


def beside(reference: float, ours: float) -> float:
    """Percent."""
    return 100 * (ours / reference - 1)


def rows_sum(arm: int) -> float:
    return sum(times[arm] for times in TABLE_4.values())


@cache
def layer_s(arm: arms.Arm) -> dict[str, float]:
    """Of the rows of Table 4, on the sheet that has its write-back."""
    line = arms.prefill(arm, arms.chunk_counts("skewed", 1024, 256), 256, arms.AS_TABLE_4)
    return {operation: arms.seconds_of(line, operation) for operation in TABLE_4}


def block_less(theirs: arms.Arm) -> float:
    return less(sum(layer_s(arms.TWO_GROUPS).values()), sum(layer_s(theirs).values()))


def operation_less(operation: str, *theirs: arms.Arm) -> list[float]:
    return [less(layer_s(arms.TWO_GROUPS)[operation], layer_s(arm)[operation]) for arm in theirs]


ACCURACIES = [
    Claim(row, "Table 3", "accuracy against FP16, %", (printed,), lambda row=row: [beside(*TABLE_3[row])])
    for row, printed in zip(TABLE_3, ("0.0", "-1.07", "-0.52", "0.0"), strict=True)
]
FFN, SCATTER = TABLE_4["expert FFN"], TABLE_4["scatter"]
LAYER = [
    Claim(
        "000-140", "§5.7", "expert FFN takes less time than Core ML CPU's and ANEMLL's, %", ("40", "50"),
        lambda: [less(FFN[OURS], FFN[CPU]), less(FFN[OURS], FFN[ANEMLL])], is_range=True,
    ),
    Claim(
        "000-140", "§5.7", "the same, modelled", ("40", "50"),
        lambda: operation_less("expert FFN", arms.CPU, arms.ANEMLL), "sheet", is_range=True,
    ),
    Claim(
        "000-141", "§5.7", "scatter takes less time than the baselines', %", ("10", "15"),
        lambda: [less(SCATTER[OURS], SCATTER[arm]) for arm in (CPU, NAIVE, ANEMLL)], is_range=True,
    ),
    Claim(
        "000-142", "§5.7", "an MoE block takes less than Core ML CPU's and ANEMLL's, %, of the printed totals",
        ("5", "10"), lambda: [less(TABLE_4_TOTAL[OURS], TABLE_4_TOTAL[arm]) for arm in (CPU, ANEMLL)], is_range=True,
    ),
    Claim(
        "000-142", "§5.7", "the same, of the sums of the rows", ("5", "10"),
        lambda: [less(rows_sum(OURS), rows_sum(arm)) for arm in (CPU, ANEMLL)],
        is_range=True, instead=("26.3", "26.7"), why="its rows add up to 1707.38 ms, printed 2165.46",
    ),
    Claim(
        "000-142", "§5.7", "the same, modelled", ("5", "10"), lambda: [block_less(arms.CPU), block_less(arms.ANEMLL)],
        "sheet", is_range=True, instead=("26.0", "26.0"), why="the sheet is fitted on the rows",
    ),
    Claim(
        "000-143", "§5.7", "an MoE block takes less than Core ML naive's, %, of the printed totals", ("54",),
        lambda: [less(TABLE_4_TOTAL[OURS], TABLE_4_TOTAL[NAIVE])],
    ),
    Claim(
        "000-143", "§5.7", "the same, of the sums of the rows", ("54",),
        lambda: [less(rows_sum(OURS), rows_sum(NAIVE))], instead=("63.7",),
        why="its rows add up to 1707.38 ms, printed 2165.46",
    ),
]  # fmt: skip

# --- Table 5 ---------------------------------------------------------------------------------------------------------

Config = tuple[int, int]
SERIAL_MS, SERIAL_MJ = 2, 3


@cache
def modelled(config: Config) -> dict[int, float]:
    """ms and mJ per row of a launch of G experts with C rows each."""
    sheet, (group, capacity) = load_sheet("m2-ultra"), config
    weights = PHI_3_5_MOE.expert_weights
    launch = Operation(
        "expert FFN", "npu", "expert_ffn", flops=2.0 * weights * group * capacity, weight_bytes=2.0 * weights * group
    )
    seconds = operation_seconds(sheet, launch)
    joules = sum(operation_joules(sheet, launch, seconds).values())
    return {SERIAL_MS: seconds * 1e3 / (group * capacity), SERIAL_MJ: joules * 1e3 / (group * capacity)}


def gains(slow: Config, *fast: Config, column: int) -> tuple[list[float], list[float]]:
    """Of the printed cells, and of the sheet."""
    return (
        [TABLE_5[slow][column] / TABLE_5[one][column] for one in fast],
        [modelled(slow)[column] / modelled(one)[column] for one in fast],
    )


def grouping_claims() -> list[Claim]:
    found = []
    for id_, what, printed, slow, fast, column, near in (
        ("000-204", "time 1x32 over 1x128", ("1.94",), (1, 32), [(1, 128)], SERIAL_MS, 0.13),
        ("000-205", "energy 1x32 over 1x64 and 1x128", ("1.22", "1.61"), (1, 32), [(1, 64), (1, 128)], SERIAL_MJ, 0.1),
        ("000-206", "time 8x32 over 8x64", ("1.44",), (8, 32), [(8, 64)], SERIAL_MS, 0.13),
        ("000-207", "time 8x32 over 8x96", ("1.73",), (8, 32), [(8, 96)], SERIAL_MS, 0.13),
        ("000-208", "energy 8x32 over 8x64 and 8x96", ("1.25", "1.32"), (8, 32), [(8, 64), (8, 96)], SERIAL_MJ, 0.1),
        ("000-210", "time 1x32 over 4x32", ("1.15",), (1, 32), [(4, 32)], SERIAL_MS, 0.13),
        ("000-211", "time 1x32 over 8x32", ("1.19",), (1, 32), [(8, 32)], SERIAL_MS, 0.13),
        ("000-212", "time 1x64 over 4x64", ("1.21",), (1, 64), [(4, 64)], SERIAL_MS, 0.13),
        ("000-213", "time 1x64 over 8x64", ("1.28",), (1, 64), [(8, 64)], SERIAL_MS, 0.13),
    ):
        for by, i in (("its own figures", 0), ("sheet", 1)):
            found.append(
                Claim(
                    id_, "Table 5", what, printed,
                    lambda s=slow, f=fast, c=column, i=i: gains(s, *f, column=c)[i],
                    by, near=near if by == "sheet" else None,
                )
            )  # fmt: skip
    return found


def in_series() -> list[float]:
    """The least and the most, of all but 8x192 and 8x256."""
    slower = [row[2] / row[0] for config, row in TABLE_5.items() if config not in ((8, 192), (8, 256))]
    return [min(slower), max(slower)]


SERIES = Claim("000-209", "Table 5", "time in series over in parallel, least and most", ("1.4", "2.9"), in_series)

# --- Tables 8 and 9 --------------------------------------------------------------------------------------------------


def gpu_beside_npu(metric: str) -> tuple[float, float]:
    """The GPU is faster and takes more: both ratios above 1. Table 9's, Table 8's."""
    (gpu_8, npu_8), (gpu_9, npu_9) = TABLE_8[metric], TABLE_9[metric]
    if metric == "time":
        return npu_9 / gpu_9, npu_8 / gpu_8
    return gpu_9 / npu_9, gpu_8 / npu_8


def gpu_claims() -> list[Claim]:
    found = []
    # 1.26 / 0.99 is 1.27, printed 1.26: two digits may lie between 1.261 and 1.284.
    for metric, whole, of_8, of_9, printed, in_8, in_9, near in (
        ("time", "000-231", "000-263", "000-272", ("1.26", "5.4"), "5.40", "1.26", 0.02),
        ("energy", "000-232", "000-266", "000-275", ("1.87", "4.48"), "1.87", "4.48", None),
        ("power", "000-233", "000-269", "000-278", ("5.65", "9.41"), "9.41", "5.65", None),
    ):
        found += [
            Claim(
                whole, "§5.8", f"{metric}: GPU and NPU, the smaller and the larger ratio", printed,
                lambda m=metric: sorted(gpu_beside_npu(m)), near=near,
            ),
            Claim(
                of_8, "Table 8", f"{metric}: ratio, dense attention", (in_8,), lambda m=metric: gpu_beside_npu(m)[1:]
            ),
            Claim(
                of_9, "Table 9", f"{metric}: ratio, attention and MoE", (in_9,), lambda m=metric: gpu_beside_npu(m)[:1],
                near=near,
            ),
        ]  # fmt: skip
    return found


CLAIMS = sorted(
    [*EXAMPLES, *size_claims(), *ACCURACIES, *LAYER, *grouping_claims(), SERIES, *gpu_claims()], key=lambda c: c.id
)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.case)
def test_claim(claim: Claim) -> None:
    check(claim)


def test_two_configurations_are_as_fast_in_series_as_in_parallel() -> None:
    """000-209: all but 8x192 and 8x256."""
    assert [config for config, row in TABLE_5.items() if row[0] == row[2]] == [(8, 192), (8, 256)]


def test_the_page_is_what_the_claims_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(sources()), "python -m tests.claims writes it"
