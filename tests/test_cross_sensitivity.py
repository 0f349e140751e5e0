"""Which constants of a sheet a conclusion of the cross table hangs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product, starmap

import pytest

from devices.base import Unit
from devices.models.sheet import Sheet, parse_sheet
from engines.pricing.model_shape import ModelShape
from harness.conclusions import Effect
from harness.cross.arms import Arm
from harness.cross.sensitivity import effects
from harness.cross.table import Row
from tests.toy_sheet import figure

SMALL = ModelShape("small", 2, 64, 4, 2, 16, 0, 8, 2, 32, 100)
FIGURE = '{{ value = {}, kind = "stated", origin = "a test" }}'
TOY = parse_sheet(
    f"""
    name = "toy"
    description = "a toy"
    source = "a test"
    [units.cpu.roofline]
    bytes_per_s = {FIGURE.format(10e9)}
    flops_per_s = {FIGURE.format(1e15)}
    [units.gpu.roofline]
    bytes_per_s = {FIGURE.format(9e9)}
    flops_per_s = {FIGURE.format(1e15)}
    """,
    "toy",
)


def priced(arm: Arm, sheet: Sheet) -> Row:
    """On the CPU for coreml-cpu, on the GPU for gpu: 9 GB read there; blockwise takes three times the CPU's time."""
    unit = "gpu" if arm.technique == "gpu" else "cpu"
    roofline = sheet.units[unit].roofline
    assert roofline is not None
    seconds = 9e9 / roofline.bytes_per_s.value * (3 if arm.technique == "blockwise" else 1)
    return Row("toy", arm, "ok", None, 1.0, seconds, lost_prefill=0.0, lost_decode=0.0)


def found_effects() -> list[Effect]:
    arms = [Arm("coreml-cpu"), Arm("gpu"), Arm("blockwise")]
    rows = [priced(arm, TOY) for arm in arms]
    return effects(TOY, SMALL, rows, lambda asked: starmap(priced, asked), lambda line: None)


def test_a_lead_below_a_fifth_flips_with_the_constants_that_make_it() -> None:
    """0.9 s against 1.0 s: a CPU a fifth slower takes 1.125 s, a GPU a fifth faster 0.833 s."""
    tpot = {(one.constant, one.factor): one for one in found_effects() if one.metric == "time per token"}
    rate = "units.{}.roofline.bytes_per_s"
    assert tpot[rate.format("cpu"), 0.8].lead == pytest.approx(1.0 / 1.125)
    assert tpot[rate.format("gpu"), 1.2].lead == pytest.approx(1.0 / 1.2 / 0.9)
    flips = {key for key, one in tpot.items() if one.flips}
    assert flips == {(rate.format("cpu"), 0.8), (rate.format("gpu"), 1.2)}
    assert {one.first for one in tpot.values() if one.flips} == {"gpu"}
    assert all(one.lead_before == pytest.approx(1.0 / 0.9) for one in tpot.values())
    assert {name for name, _ in tpot} == {
        f"units.{unit}.roofline.{name}" for unit, name in product(("cpu", "gpu"), ("bytes_per_s", "flops_per_s"))
    }


def test_equal_arms_flip_nothing_and_joules_that_are_missing_are_no_conclusion() -> None:
    found = found_effects()
    assert {one.metric for one in found} == {"time to the first token", "time per token"}
    assert not [one for one in found if one.metric == "time to the first token" and one.flips]


ROOMY = parse_sheet(
    f"""
    name = "roomy"
    description = "a toy with watts, and a GPU of 9 GB"
    source = "a test"
    [units.cpu]
    busy_w = {figure(20)}
    roofline = {{ bytes_per_s = {figure(10e9)}, flops_per_s = {figure(1e15)} }}
    [units.gpu]
    busy_w = {figure(22)}
    roofline = {{ bytes_per_s = {figure(9e9)}, flops_per_s = {figure(1e15)} }}
    [memories]
    gpu = {figure(9e9)}
    """,
    "roomy",
)


def priced_with_room(n_bytes: float) -> Callable[[Arm, Sheet], Row]:
    """A GPU that reads 7.2 GB, and must hold so many; a CPU that reads 9 GB. Joules are of the decoded token alone."""

    def row(arm: Arm, sheet: Sheet) -> Row:
        unit: Unit = "gpu" if arm.technique == "gpu" else "cpu"
        capacity, roofline, watts = sheet.capacity_bytes(unit), sheet.units[unit].roofline, sheet.units[unit].busy_w
        assert roofline is not None
        if capacity is not None and capacity < n_bytes:
            return Row("toy", arm, "oom", "too little memory")
        seconds = (7.2e9 if unit == "gpu" else 9e9) / roofline.bytes_per_s.value
        joules = None if watts is None else watts.value * seconds
        return Row("toy", arm, "ok", None, 1.0, seconds, j_per_token=joules, lost_prefill=0.0, lost_decode=0.0)

    return row


def effects_of(row: Callable[[Arm, Sheet], Row], sheet: Sheet) -> dict[tuple[str, str, float], Effect]:
    rows = [row(arm, sheet) for arm in (Arm("coreml-cpu"), Arm("gpu"))]
    found = effects(sheet, SMALL, rows, lambda asked: starmap(row, asked), lambda line: None)
    return {(one.metric, one.constant, one.factor): one for one in found}


def test_an_arm_that_did_not_fit_is_asked_where_a_memory_is_larger() -> None:
    """A GPU of 9 GB that needs 10 has 10.8 with a fifth more, and takes 0.8 s where the CPU takes 0.9."""
    found = effects_of(priced_with_room(10e9), ROOMY)
    tpot = {(constant, factor): one for (metric, constant, factor), one in found.items() if metric == "time per token"}
    assert {one.before for one in tpot.values()} == {"coreml-cpu"}
    larger = tpot["memories.gpu", 1.2]
    assert (larger.lead_before, larger.first) == (None, "gpu")
    assert larger.lead == pytest.approx(0.8 / 0.9)
    # A faster GPU has no more room.
    assert all((one.first, one.lead) == ("coreml-cpu", None) for one in tpot.values() if one is not larger)


def test_an_arm_that_fits_no_more_leaves_the_first_place_to_another() -> None:
    found = effects_of(priced_with_room(8e9), ROOMY)
    smaller = found["time per token", "memories.gpu", 0.8]
    assert (smaller.before, smaller.first, smaller.lead) == ("gpu", "coreml-cpu", None)
    assert found["time per token", "memories.gpu", 1.2].first == "gpu"


def test_watts_change_joules_alone_and_are_not_asked_where_no_joules_are_known() -> None:
    """18 J on the CPU and 17.6 on the GPU; a fifth more there is 21.12, and a fifth less here 14.4."""
    found = effects_of(priced_with_room(8e9), ROOMY)
    watts = {key: one for key, one in found.items() if key[1].endswith("busy_w")}
    assert {metric for metric, _, _ in watts} == {"joules per decoded token"}
    more = watts["joules per decoded token", "units.gpu.busy_w", 1.2]
    assert (more.before, more.first, more.lead) == ("gpu", "coreml-cpu", pytest.approx(18 / 21.12))
    less = watts["joules per decoded token", "units.cpu.busy_w", 0.8]
    assert (less.first, less.lead) == ("coreml-cpu", pytest.approx(14.4 / 17.6))
    asked: list[str] = []
    rows = [replace(priced_with_room(8e9)(Arm(name), ROOMY), j_per_token=None) for name in ("coreml-cpu", "gpu")]
    effects(ROOMY, SMALL, rows, lambda asked: starmap(priced_with_room(8e9), asked), asked.append)
    assert asked
    assert not [line for line in asked if "busy_w" in line]
