"""The presets of 000-npumoe, computed by the bundled model and priced as Phi-3.5-MoE on sheet m2-ultra.

Expected values are those that the source's own figures leave (see tests/test_m2_ultra_prefill.py). Tokens are random,
so the routing is one that no arm was fitted on.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from devices.models.sheet import load_sheet
from devices.models.timeline import Timeline
from engines.model.checkpoints import load_checkpoint
from engines.pricing.costs import SheetCosts
from engines.pricing.modelled import ModelledEngine
from engines.pricing.published_shapes import PHI_3_5_MOE
from engines.pricing.shapes import sizes_of
from engines.reference import ReferenceEngine
from engines.techniques.presets import preset_parameters
from results.records import Completion, Request

BASELINES = ("coreml-cpu", "coreml-naive", "anemll")
OURS = ("npumoe-base", "npumoe-t", "npumoe-tg", "npumoe")
N_TOKENS, CHUNK = 1024, 256


@cache
def answered(preset: str) -> tuple[Completion, Timeline]:
    """1024 tokens and three more, after a calibration on other tokens."""
    checkpoint = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)
    generator = torch.Generator().manual_seed(3)
    learnt, asked = torch.randint(16, checkpoint.config.vocabulary_size, (2, N_TOKENS), generator=generator).tolist()
    sheet, sizes = load_sheet("m2-ultra"), sizes_of(PHI_3_5_MOE)
    assert sizes is not None
    parameters = preset_parameters(preset)()
    reference = ReferenceEngine(checkpoint, parameters, CHUNK, sizes=sizes, costs=SheetCosts(sheet, sizes))
    timeline = Timeline(sheet)
    engine = ModelledEngine(reference, timeline, parameters.backbone, PHI_3_5_MOE)
    if engine.needs_calibration:
        engine.calibrate([learnt])
    request = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=tuple(asked), max_new_tokens=3)
    return engine.run(request, lambda event, at_s: None), timeline


def ttft_s(preset: str) -> float:
    completion, _ = answered(preset)
    return completion.prefill_end_s - completion.start_s


def decode_s(preset: str) -> float:
    """Of one token."""
    completion, _ = answered(preset)
    return (completion.end_s - completion.prefill_end_s) / (completion.n_generated - 1)


def joules(preset: str) -> float:
    _, timeline = answered(preset)
    return sum(timeline.energy_j(component) for component in timeline.sheet.components)


def test_times_lie_where_the_sources_own_figures_put_them() -> None:
    """31.0 s are 16 experts in every chunk; here a few have no token in some, and are not called."""
    assert 0.9 * 31.0 <= ttft_s("coreml-cpu") <= 40.9
    assert 17.0 <= ttft_s("npumoe") <= 19.8 * 1.15


@pytest.mark.parametrize("baseline", BASELINES)
def test_npumoe_is_faster_and_needs_less_energy_than_every_baseline(baseline: str) -> None:
    """§5.3, §5.4."""
    assert ttft_s("npumoe") < ttft_s(baseline)
    assert joules("npumoe") < joules(baseline)


def test_the_ablation_is_in_order_and_naive_is_slowest() -> None:
    """§5.8, Fig. 17; residency moves groups that few chunks need."""
    base, tiers, grouped, whole = map(ttft_s, OURS)
    assert base > tiers > grouped >= whole
    assert max(ttft_s(preset) for preset in (*BASELINES, *OURS)) == ttft_s("coreml-naive")


def test_decode_on_the_npu_is_no_multiple_of_the_cpus() -> None:
    """The source's shares leave 0.9 to 2 times; graphs of fewer than 32 rows are cheaper, and outside the fit."""
    assert 0.7 < decode_s("npumoe") / decode_s("coreml-cpu") < 2


def test_the_rows_of_an_moe_block_are_those_of_table_4() -> None:
    """Router, gather, padding, experts, scatter, residual: the CPU pads nothing, NPUMoE's graphs run on the NPU."""
    rows = {"router", "gather", "expert FFN", "scatter", "residual"}
    for preset, unit, padded in (("coreml-cpu", "cpu", set()), ("npumoe-tg", "npu", {"padding"})):
        _, timeline = answered(preset)
        found = timeline.seconds_by_operation()
        outside = {"norm", "attention", "attention residual", "LM head"}
        assert {name for name, _ in found} - outside == rows | padded
        assert {on for name, on in found if name == "expert FFN"} == {unit}
