"""Virtual time and energy: closed forms on a sheet of round numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.base import DeviceError
from devices.models.operation import Operation, operation_seconds
from devices.models.sheet import SheetFigure, parse_sheet
from devices.models.timeline import Timeline
from tests.toy_sheet import TOY_TOML, figure, toy_sheet

CPU_EXPERT = Operation("expert FFN", "cpu", "expert_ffn", flops=1000)
NPU_EXPERT = Operation("expert FFN", "npu", "expert_ffn", flops=1000, weight_bytes=200)


def test_a_cpu_operation_costs_its_seconds_on_cpu_and_communication() -> None:
    timeline = Timeline(toy_sheet())
    timeline.run([CPU_EXPERT])
    assert timeline.now_s() == pytest.approx(2.0)  # 1000 FLOP x 2 ms
    assert timeline.energy_j("cpu") == pytest.approx(16.0)  # 8 W
    assert timeline.energy_j("npu") == 0
    assert timeline.energy_j("comm") == pytest.approx(2.0)  # 1 W


def test_an_npu_operation_pays_launch_weights_and_dynamic_energy() -> None:
    timeline = Timeline(toy_sheet())
    timeline.run([NPU_EXPERT])
    assert timeline.now_s() == pytest.approx(0.5 + 0.2 + 0.1)
    assert timeline.energy_j("cpu") == 0
    assert timeline.energy_j("npu") == pytest.approx(0.5 * 0.8 + 1e-3 * 1000)
    assert timeline.energy_j("comm") == pytest.approx(0.8)


def test_every_unit_of_the_sheet_counts_its_own_joules() -> None:
    sheet = parse_sheet(TOY_TOML.replace("units.npu", 'units."ndp:1"'), "toy")
    timeline = Timeline(sheet)
    timeline.run([replace(NPU_EXPERT, unit="ndp:1"), CPU_EXPERT])
    assert sheet.components == ("cpu", "ndp:1", "comm")
    assert [timeline.energy_j(c) for c in sheet.components] == pytest.approx([16.0, 1.4, 2.8])


def test_a_launch_that_the_framework_dispatched_pays_for_it_too() -> None:
    """0.8 s as any launch of this work, and 3 s for each of two launches; at the unit's 0.5 W."""
    sheet = parse_sheet(TOY_TOML.replace("[units.npu]", f"[units.npu]\ns_per_naive_launch = {figure(3.0)}"), "toy")
    timeline = Timeline(sheet)
    timeline.run([replace(NPU_EXPERT, launches=2, naive_launch=True)])
    assert timeline.now_s() == pytest.approx(1.3 + 6.0)
    assert timeline.energy_j("npu") == pytest.approx(0.5 * 7.3 + 1.0)
    assert operation_seconds(sheet, NPU_EXPERT) == pytest.approx(0.8)


def test_a_naive_launch_without_a_price_is_an_error() -> None:
    with pytest.raises(DeviceError, match=r"no price for a naive launch on 'npu'; add s_per_naive_launch to \[units"):
        operation_seconds(toy_sheet(), replace(NPU_EXPERT, naive_launch=True))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 10_000)), max_size=30))
def test_units_never_overlap_and_energy_is_power_times_time_plus_flops(work: list[tuple[bool, int]]) -> None:
    timeline = Timeline(toy_sheet())
    timeline.run(
        Operation("attention", "npu" if on_npu else "cpu", "attention", flops=float(flops)) for on_npu, flops in work
    )
    cpu_s = math.fsum(1e-3 * flops for on_npu, flops in work if not on_npu)
    npu_flops = math.fsum(flops for on_npu, flops in work if on_npu)
    npu_s = 0.25 * sum(on_npu for on_npu, _ in work) + 1e-4 * npu_flops
    assert timeline.now_s() == pytest.approx(cpu_s + npu_s)
    assert timeline.energy_j("cpu") == pytest.approx(8.0 * cpu_s)
    assert timeline.energy_j("npu") == pytest.approx(0.5 * npu_s + 1e-3 * npu_flops)
    assert timeline.energy_j("comm") == pytest.approx(cpu_s + npu_s)
    assert sum(timeline.seconds_by_operation().values()) == pytest.approx(timeline.now_s())


def test_units_that_work_alongside_take_the_longer_time_and_communication_counts_once() -> None:
    """CPU: 2 s and 16 J. NPU: two launches of 0.8 s and 1.4 J. What follows waits for both: 2 s more."""
    timeline = Timeline(toy_sheet())
    npu, cpu = replace(NPU_EXPERT, alongside=True), replace(CPU_EXPERT, alongside=True)
    timeline.run([npu, npu, cpu, CPU_EXPERT])
    assert timeline.now_s() == pytest.approx(2.0 + 2.0)
    assert [timeline.energy_j(c) for c in ("cpu", "npu", "comm")] == pytest.approx([32.0, 2.8, 4.0])
    starts_s, places, listed = timeline.operations(0)
    began = [(at_s, listed[place][0].unit) for at_s, place in zip(starts_s, places, strict=True)]
    assert began == [(0.0, "npu"), (0.0, "cpu"), (pytest.approx(0.8), "npu"), (pytest.approx(2.0), "cpu")]
    times_s, values_j = timeline.readings("npu", 0.0)
    assert times_s == pytest.approx([0, 0.8, 1.6, 2.0, 4.0])
    assert values_j == pytest.approx([0, 1.4, 2.8, 2.8, 2.8])
    assert timeline.readings("cpu", 0.0)[1] == pytest.approx([0, 6.4, 12.8, 16.0, 32.0])


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 1000)), max_size=30))
def test_alongside_only_units_are_waited_for(work: list[tuple[bool, bool, int]]) -> None:
    """Read slowly: a unit is free when its last operation ends; one that is not alongside waits for both units."""
    operations = [
        Operation("x", "npu" if on_npu else "cpu", "attention", flops=float(flops), alongside=alongside)
        for on_npu, alongside, flops in work
    ]
    timeline = Timeline(toy_sheet())
    timeline.run(operations)
    free_s, busy_s = {"npu": 0.0, "cpu": 0.0}, {"npu": 0.0, "cpu": 0.0}
    for on_npu, alongside, flops in work:
        unit = "npu" if on_npu else "cpu"
        seconds = 0.25 + 1e-4 * flops if on_npu else 1e-3 * flops
        if not alongside:
            free_s = dict.fromkeys(free_s, max(free_s.values()))
        free_s[unit] += seconds
        busy_s[unit] += seconds
        if not alongside:
            free_s = dict.fromkeys(free_s, max(free_s.values()))
    assert timeline.now_s() == pytest.approx(max(free_s.values()))
    npu_flops = math.fsum(flops for on_npu, _, flops in work if on_npu)
    assert timeline.energy_j("cpu") == pytest.approx(8.0 * busy_s["cpu"])
    assert timeline.energy_j("npu") == pytest.approx(0.5 * busy_s["npu"] + 1e-3 * npu_flops)
    assert timeline.energy_j("comm") == pytest.approx(timeline.now_s()), "some unit works all the time"
    starts_s, _, _ = timeline.operations(0)
    assert len(starts_s) == len(work)
    assert (np.diff(starts_s) >= 0).all()


def test_weight_reads_cannot_beat_the_memory() -> None:
    sheet = parse_sheet(TOY_TOML, "toy")
    bandwidth = SheetFigure(value=100.0, kind="assumed", origin="test")
    bounded = sheet.model_copy(update={"memory": sheet.memory.model_copy(update={"bytes_per_s": bandwidth})})
    streaming = Operation("LM head", "cpu", "lm_head", flops=1000, weight_bytes=5000)
    assert operation_seconds(sheet, streaming) == pytest.approx(1.0)
    assert operation_seconds(bounded, streaming) == pytest.approx(50.0)
    on_npu = replace(streaming, unit="npu", kernel="expert_ffn")
    assert operation_seconds(sheet, on_npu) == pytest.approx(0.5 + 5.0 + 0.1)
    assert operation_seconds(bounded, on_npu) == pytest.approx(50.0), "one memory for all units"


def test_breakdown_tells_units_apart() -> None:
    timeline = Timeline(toy_sheet())
    timeline.run([CPU_EXPERT, NPU_EXPERT, CPU_EXPERT])
    assert timeline.seconds_by_operation() == pytest.approx({("expert FFN", "cpu"): 4.0, ("expert FFN", "npu"): 0.8})


def test_sleeping_takes_time_and_no_energy_where_idle_power_is_unknown() -> None:
    timeline = Timeline(toy_sheet())
    timeline.sleep_until_s(3.0)
    assert timeline.now_s() == 3.0
    assert timeline.energy_j("cpu") == 0
    timeline.sleep_until_s(1.0)
    assert timeline.now_s() == 3.0, "a clock never steps back"


def test_sleeping_costs_the_stated_idle_power() -> None:
    idle = SheetFigure(value=4.0, kind="assumed", origin="test")
    timeline = Timeline(toy_sheet().model_copy(update={"idle_w": idle}))
    for n_done in (1, 2, 3):
        timeline.run([CPU_EXPERT])
        timeline.sleep_until_s(5.0 * n_done)
        assert timeline.energy_j("cpu") == pytest.approx(n_done * (16.0 + 4.0 * 3.0))
        timeline.settle()


def test_readings_stand_at_every_operation_boundary_from_the_start() -> None:
    timeline = Timeline(toy_sheet())
    timeline.run([CPU_EXPERT])
    start_s = timeline.now_s()
    timeline.run([NPU_EXPERT, CPU_EXPERT])
    times_s, joules = timeline.readings("comm", start_s)
    np.testing.assert_allclose(times_s, [2.0, 2.8, 4.8])
    np.testing.assert_allclose(joules, [2.0, 2.8, 4.8])


def test_work_of_size_zero_leaves_no_reading() -> None:
    timeline = Timeline(toy_sheet())
    timeline.run([Operation("padding", "cpu", "padding")])
    assert len(timeline.readings("cpu", 0.0)[0]) == 1


def test_an_operation_without_a_price_is_an_error() -> None:
    with pytest.raises(DeviceError, match=r"no price for 'scatter' on 'npu'; add \[units\.npu\.kernels\.scatter\]"):
        Timeline(toy_sheet()).run([Operation("scatter", "npu", "scatter", moved_bytes=1)])


def test_an_absent_unit_is_an_error() -> None:
    sheet = toy_sheet()
    without_npu = sheet.model_copy(update={"units": {"cpu": sheet.units["cpu"]}})
    with pytest.raises(DeviceError, match=r"no unit 'npu' for 'expert FFN'; it has \['cpu'\]"):
        Timeline(without_npu).run([NPU_EXPERT])
