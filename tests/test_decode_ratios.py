"""Decoding with NDP-DIMMs against what source 001 states: our presets on its sheet, with nothing fitted."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import comb
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from devices.models.operation import operation_seconds
from devices.models.sheet import load_sheet
from devices.models.timeline import Timeline
from engines.dispatch import Routing
from engines.pricing.block import Travels
from engines.pricing.costs import SheetCosts
from engines.pricing.room import lacks_room
from engines.pricing.schedule import PricedStep, operations
from engines.pricing.shapes import NAMED_SHAPES, ModelShape, sizes_of
from engines.residency import Residency
from engines.techniques.context import BuildContext, LayerInput
from engines.techniques.presets import preset_parameters

SHEET = load_sheet("rtx5080-ndp")
MODELS = ("deepseek-moe-16b", "qwen3-30b-a3b", "phi-3.5-moe", "mixtral-8x7b")
N_TOKENS = 100
SMALL = ("deepseek-moe-16b", "qwen3-30b-a3b")
"""Those that two units hold."""
DIMM_BYTES_PER_S, PCIE_BYTES_PER_S, GPU_BYTES_PER_S = 102.4e9, 63e9, 960e9


class Ratios(NamedTuple):
    """Times of MoNDE over those of slices, and of slices with balance."""

    slices: float
    balanced: float


def moe_seconds(preset: str, shape: ModelShape, n: int, chosen: list[np.ndarray]) -> float:
    """Of the expert part of one layer, over the tokens' choices: fetching, activations, experts, results."""
    shape = replace(shape, n_layers=1, n_dense_layers=None, dense_width=0, shared_width=0)
    sizes = sizes_of(shape)
    assert sizes is not None
    moe = SimpleNamespace(sparse_layers=(0,), n_experts=shape.n_experts)
    config: Any = SimpleNamespace(config=SimpleNamespace(moe=moe))
    context = BuildContext(512, sizes, None, SheetCosts(SHEET, sizes), config)
    technique = preset_parameters(preset).model_validate({"ndps": n}).build(context)
    spent_s = 0.0
    for experts in chosen:
        routing = Routing(torch.from_numpy(experts)[None], torch.ones(1, len(experts)), shape.n_experts)
        held = Residency(1, shape.n_experts, shape.expert_width, technique.asks.slots) if technique.asks.slots else None
        plan = technique.plan(LayerInput(0, "decode", routing, residency=held, prefill_left=0))
        listed = operations(PricedStep(1, 1), [plan], shape, "gpu", None, Travels(SHEET))
        timeline = Timeline(SHEET)
        timeline.run(listed)
        others = (one for one in listed if one.unit == "gpu" and one.name != "expert FFN")
        spent_s += timeline.now_s() - sum(operation_seconds(SHEET, one) for one in others)
    return spent_s


@pytest.fixture(scope="module")
def ratios() -> dict[tuple[str, int], Ratios]:
    """Of the configurations that the units can hold."""
    random, found = np.random.default_rng(0), {}
    for model in MODELS:
        shape = NAMED_SHAPES[model]
        for n in (2, 4, 6):
            if lacks_room([f"ndp:{i}" for i in range(n)], True, SHEET, shape):
                continue
            chosen = [random.choice(shape.n_experts, shape.top_k, replace=False) for _ in range(N_TOKENS)]
            monde_s, slices_s, balanced_s = (
                moe_seconds(name, shape, n, chosen) for name in ("monde", "ndp-tp", "ndp-tp-lb")
            )
            found[model, n] = Ratios(monde_s / slices_s, monde_s / balanced_s)
    return found


def test_mean_speed_ups_over_ten_configurations_are_those_stated(ratios: dict[tuple[str, int], Ratios]) -> None:
    """§IV-D: 1.99 and 2.19 on average. A prediction counts within 15 %."""
    assert len(ratios) == 10
    slices, balanced = np.mean(list(ratios.values()), axis=0)
    assert slices == pytest.approx(1.99, rel=0.15)
    assert balanced == pytest.approx(2.19, rel=0.15)


def test_with_two_dimms_slices_are_as_fast_as_monde_for_the_small_models(
    ratios: dict[tuple[str, int], Ratios],
) -> None:
    """§IV-D says slightly worse; here they are within 10 % of it, on either side."""
    for model in SMALL:
        assert ratios[model, 2].slices == pytest.approx(1.0, abs=0.1)


def test_balance_gains_less_with_more_dimms(ratios: dict[tuple[str, int], Ratios]) -> None:
    """§IV-D: the benefit over slices alone decreases."""
    for model in MODELS:
        gains = [of.balanced / of.slices for (name, _), of in sorted(ratios.items()) if name == model]
        assert gains == sorted(gains, reverse=True)
        assert min(gains) > 1


# --- two units, by hand: docs/decisions/0026 -------------------------------------------------------------------------


def monde_s(experts: np.ndarray, expert_bytes: float) -> float:
    """Of one token: h of the least max(h (T_w + T_g), busiest unit), those of the lower numbers on the GPU, and then
    max(h T_w + T_g, busiest unit), as fetching hides all computing there but the last."""
    fetch_s, gpu_s, ndp_s = (expert_bytes / rate for rate in (PCIE_BYTES_PER_S, GPU_BYTES_PER_S, DIMM_BYTES_PER_S))
    numbers = np.sort(experts)
    busiest_s = [ndp_s * np.bincount(numbers[h:] % 2, minlength=2).max() for h in range(len(numbers) + 1)]
    h = int(np.argmin([max(h * (fetch_s + gpu_s), rest_s) for h, rest_s in enumerate(busiest_s)]))
    return max(h * fetch_s + gpu_s if h else 0.0, busiest_s[h])


@pytest.mark.parametrize("model", SMALL)
def test_two_units_take_what_the_formulas_say(model: str) -> None:
    """Token by token; MoNDE's formula leaves out activations, at most 4 T_a."""
    shape = NAMED_SHAPES[model]
    random, expert_bytes = np.random.default_rng(1), 2.0 * shape.expert_weights
    activation_s = 2 * shape.hidden / PCIE_BYTES_PER_S
    for _ in range(25):
        experts = random.choice(shape.n_experts, shape.top_k, replace=False)
        slices_s = shape.top_k / 2 * expert_bytes / DIMM_BYTES_PER_S + 3 * activation_s
        assert moe_seconds("ndp-tp", shape, 2, [experts]) == pytest.approx(slices_s, rel=1e-9)
        by_hand_s = monde_s(experts, expert_bytes)
        assert moe_seconds("monde", shape, 2, [experts]) == pytest.approx(by_hand_s, abs=4 * activation_s)


def ratio_over_all_choices(shape: ModelShape, always: tuple[int, ...] = ()) -> float:
    """MoNDE over slices on two units: all ways in which the chosen experts, in order, lie on them, each as often as
    uniform choices have it."""
    n_chosen, half = shape.top_k - len(always), (shape.n_experts - len(always)) // 2
    mean_s, slices_s = 0.0, 0.0
    for units in product((0, 1), repeat=n_chosen):
        k = sum(units)
        often = comb(half, k) * comb(half, n_chosen - k) / comb(2 * half, n_chosen) / comb(n_chosen, k)
        experts = np.array([*(10 * i + unit for i, unit in enumerate(units)), *always])
        mean_s += often * moe_seconds("monde", shape, 2, [experts])
        slices_s = slices_s or moe_seconds("ndp-tp", shape, 2, [experts])
    return mean_s / slices_s


def test_over_all_choices_slices_are_even_for_qwen3_and_faster_for_deepseek_without_its_shared_experts() -> None:
    """1.000 and 1.066 by the formulas alone. With the two shared experts, 64 and 65 here, on a unit each: 0.966, which
    is §IV-D's "slightly worse"."""
    deepseek = NAMED_SHAPES["deepseek-moe-16b"]
    assert ratio_over_all_choices(NAMED_SHAPES["qwen3-30b-a3b"]) == pytest.approx(1.000, abs=1e-3)
    assert ratio_over_all_choices(deepseek) == pytest.approx(1.066, abs=1e-3)
    with_shared = replace(deepseek, name="with-shared", n_experts=66, top_k=8)
    assert ratio_over_all_choices(with_shared, (64, 65)) == pytest.approx(0.966, abs=1e-3)
