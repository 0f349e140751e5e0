"""Every claim of Speculating Experts (003) that needs no machine: the shapes and sizes of Table 2, Eq. 1, the averages
of Table 1, and the sizes of its estimators."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest

from engines.estimator import estimator_shapes
from engines.model.checkpoints import tensor_shapes
from engines.model.model_config import parse_model_config
from tests.claims import Claim, check
from tests.fakes.published import PUBLISHED

GIB = 2**30


class Printed(NamedTuple):
    """A row of Table 2: layers, experts, H, H_MoE, and the sizes of experts and others in "GB"."""

    first: int
    layers: str
    experts: str
    hidden: str
    width: str
    experts_gb: str


TABLE_2 = {
    "Qwen3-30B-A3B": Printed(94, "48", "128", "2048", "768", "54"),
    "GLM-4.7-Flash": Printed(100, "47", "64", "2048", "1536", "53"),
    "GPT-OSS-120B": Printed(106, "24", "32", "2880", "2880", "213"),
    "Qwen3-235B-A22B": Printed(112, "94", "128", "4096", "1536", "230"),
}
TRUE_SHAPES = {"GPT-OSS-120B": (36, 128), "Qwen3-235B-A22B": (94, 128)}
"""Layers and experts of the published checkpoints whose configs are not among the tests' own."""


def layers_and_experts(name: str) -> tuple[int, int]:
    if name in TRUE_SHAPES:
        return TRUE_SHAPES[name]
    config = parse_model_config(PUBLISHED[name].config, None)
    assert config.moe is not None
    return config.n_layers, config.moe.n_experts


def expert_gib(name: str, layers: int, experts: int) -> float:
    """L * E * three matrices of H by H_MoE, bf16."""
    row = TABLE_2[name]
    return layers * experts * 3 * int(row.hidden) * int(row.width) * 2 / GIB


def table_2() -> list[Claim]:
    found = []
    for name, row in TABLE_2.items():
        layers, experts = layers_and_experts(name)
        is_gpt_oss = name == "GPT-OSS-120B"
        other = "those of GPT-OSS-20B" if is_gpt_oss else ""
        found += [
            Claim(
                f"003-{row.first:03}", "Table 2", f"{name}: layers", (row.layers,), lambda n=layers: [n], "shape",
                instead=(str(layers),) if is_gpt_oss else (), why=other,
            ),
            Claim(
                f"003-{row.first + 1:03}", "Table 2", f"{name}: experts", (row.experts,), lambda n=experts: [n],
                "shape",
                instead=(str(experts),) if is_gpt_oss else (), why=other,
            ),
            Claim(
                f"003-{row.first + 4:03}", "Table 2", f"{name}: its experts in bf16, GiB, of its true shape",
                (row.experts_gb,), lambda own=(name, layers, experts): [expert_gib(*own)], "shape",
                near=0.01 if is_gpt_oss else None,
                instead=("423",) if name == "Qwen3-235B-A22B" else (),
                why="230 is about its size in 8 bits" if name == "Qwen3-235B-A22B" else "",
            ),
        ]  # fmt: skip
        if name in PUBLISHED:
            config = parse_model_config(PUBLISHED[name].config, None)
            assert config.moe is not None
            shape = (config.hidden, config.moe.expert_width)
            for offset, what, printed, ours in zip((2, 3), ("H", "H_MoE"), (row.hidden, row.width), shape, strict=True):
                found.append(
                    Claim(
                        f"003-{row.first + offset:03}", "Table 2", f"{name}: {what}", (printed,),
                        lambda n=ours: [n], "shape",
                    )
                )  # fmt: skip
    return found


def other_gib() -> list[float]:
    config = parse_model_config(PUBLISHED["Qwen3-30B-A3B"].config, None)
    values = sum(map(math.prod, tensor_shapes(config).values()))
    return [values * 2 / GIB - expert_gib("Qwen3-30B-A3B", 48, 128)]


def gpt_oss_as_printed() -> list[float]:
    return [expert_gib("GPT-OSS-120B", 24, 32)]


# --- Eq. 1 -----------------------------------------------------------------------------------------------------------


def speedup(compute_s: float, copy_s: float) -> float:
    """TPOT on demand over TPOT with prefetching, of layers that are alike: (compute + copy) / max of both."""
    return (compute_s + copy_s) / max(compute_s, copy_s)


def best_speedup() -> list[float]:
    """Of ratios of copy to compute from 1/100 to 100, the largest; at equal times."""
    ratios = [10 ** (i / 100) for i in range(-200, 201)]
    best = max(ratios, key=lambda ratio: speedup(1.0, ratio))
    assert best == pytest.approx(1.0)
    return [speedup(1.0, best)]


# --- Table 1 ---------------------------------------------------------------------------------------------------------

# HumanEval, MBPP+, GSM8k, AIME24, AIME25, StrategyQA; then the printed average, by the first of the claim's seven rows.
TABLE_1 = {
    10: ("Qwen3-30B-A3B", (0.939, 0.762, 0.950, 0.800, 0.733, 0.719), "0.817"),
    17: ("Qwen3-30B-A3B + Router-PF", (0.860, 0.659, 0.576, 0.467, 0.600, 0.683), "0.641"),
    24: ("Qwen3-30B-A3B + Est-PF", (0.915, 0.741, 0.918, 0.667, 0.567, 0.691), "0.750"),
    31: ("Qwen3-30B-A3B + Hybrid-PF", (0.909, 0.762, 0.946, 0.700, 0.600, 0.681), "0.766"),
}


def averages() -> list[Claim]:
    return [
        Claim(
            f"003-{first + 6:03}", "Table 1", f"{name}: average of six", (average,),
            lambda own=own: [sum(own) / len(own)],
        )
        for first, (name, own, average) in TABLE_1.items()
    ]  # fmt: skip


def recovered() -> list[float]:
    """Of the gap on GSM8k that Router-PF leaves to the true router, what Hybrid-PF makes good, %."""
    truth, router, hybrid = (TABLE_1[row][1][2] for row in (10, 17, 31))
    return [100 * (hybrid - router) / (truth - router)]


# --- estimators ------------------------------------------------------------------------------------------------------


def estimator_millions(name: str, width: int, expansion: int) -> list[float]:
    config = parse_model_config(PUBLISHED[name].config, None)
    assert config.moe is not None
    shapes = estimator_shapes(config.n_layers - 1, config.hidden, config.moe.n_experts, width, expansion)
    return [sum(map(math.prod, shapes.values())) / 1e6]


CLAIMS = sorted(
    [
        Claim("003-009", "§5.1", "largest gain of prefetching, at equal times of both", ("2",), best_speedup),
        Claim(
            "003-099", "Table 2", "Qwen3-30B-A3B: all but its experts in bf16, GiB", ("3",), other_gib, "shape",
        ),
        *averages(),
        *table_2(),
        Claim(
            "003-110", "Table 2", "GPT-OSS-120B: experts of the shape printed, GiB", ("213",), gpt_oss_as_printed,
            "shape", instead=("35.6",), why="shape and size exclude each other",
        ),
        Claim(
            "003-127", "§6.1", "parameters of the estimator of GPT-OSS-20B, 1e6", ("4",),
            lambda: estimator_millions("gpt-oss-20b", 720, 2), "shape", why="width 720, expansion 2: chosen by us",
        ),
        Claim(
            "003-129", "§6.1", "parameters of the estimator of Qwen3-30B-A3B, 1e6", ("17",),
            lambda: estimator_millions("Qwen3-30B-A3B", 1024, 7), "shape", why="width 1024, expansion 7: chosen by us",
        ),
        Claim(
            "003-130", "§6.3", "of the gap on GSM8k, made good by Hybrid-PF, %", ("37",), recovered,
            instead=("98.9",), why="37 are points of accuracy",
        ),
    ],
    key=lambda claim: claim.id,
)  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.case)
def test_claim(claim: Claim) -> None:
    check(claim)


def test_prefetching_saves_the_smaller_of_copy_and_compute() -> None:
    """Eq. 1: the difference of both TPOTs is the sum of the minima, layer by layer."""
    layers = [(0.2, 1.0), (1.0, 0.2), (0.5, 0.5), (0.0, 0.7)]
    on_demand, ahead = sum(map(sum, layers)), sum(map(max, layers))
    assert on_demand - ahead == pytest.approx(0.2 + 0.2 + 0.5 + 0.0)
