"""The modelled device as the harness sees it: its traces give the joules of the closed form, and say what they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from devices.base import Device, DeviceError
from devices.models.device import ModelDevice, available_sheets, load_model_device
from devices.models.figures import SheetFigure
from devices.models.operation import Operation
from results.energy import energy_between
from results.environments import Environment
from tests.toy_sheet import toy_sheet

CPU_WORK = Operation("expert FFN", "cpu", "expert_ffn", flops=1000)  # 2 s: 16 J on cpu, 2 J on comm
NPU_WORK = Operation("expert FFN", "npu", "expert_ffn", flops=1000, weight_bytes=200)  # 0.8 s: 1.4 J, 0.8 J


def host() -> Environment:
    return Environment(
        os="test", machine="x", cpu_model="x", n_cores=1, n_threads=1, memory_bytes=1, python="3", joulebench="0",
        packages={},
    )  # fmt: skip


def test_the_joules_of_a_phase_are_those_of_its_operations() -> None:
    device = ModelDevice(toy_sheet(), host)
    device.timeline.run([CPU_WORK])
    (meter,) = device.meters
    meter.open()
    meter.start()
    prefill_s = device.timeline.now_s()
    device.timeline.run([CPU_WORK, NPU_WORK])
    decode_s = device.timeline.now_s()
    device.timeline.run([NPU_WORK])
    traces = meter.stop()
    end_s = device.timeline.now_s()

    prefill = energy_between(traces, [(prefill_s, decode_s)], "prefill", "timeline")
    decode = energy_between(traces, [(decode_s, end_s)], "decode", "timeline")
    assert prefill.energy_j == pytest.approx(16 + 2 + 1.4 + 0.8)
    assert decode.energy_j == pytest.approx(1.4 + 0.8)
    assert {prefill.method, decode.method} == {"modelled"}
    assert (prefill.uncertainty_j, decode.uncertainty_j) == (None, None), "what its fit left over is not their error"


def test_traces_are_modelled_counters_of_cpu_npu_and_communication() -> None:
    device = ModelDevice(toy_sheet(), host)
    (meter,) = device.meters
    meter.start()
    device.timeline.run([CPU_WORK])
    traces = meter.stop()
    assert [t.component for t in traces] == ["cpu", "npu", "comm"]
    assert {(t.kind, t.method, t.additive) for t in traces} == {("counter", "modelled", True)}
    assert [t.relative_accuracy for t in traces] == [None, None, None]
    assert all(t.note is not None and "idle counted as 0 W: the sheet states none" in t.note for t in traces)


@pytest.mark.parametrize(
    ("of_cpu", "of_npu", "of_all", "told"),
    [
        (5, 0.25, None, "idle 5 W of cpu, 0.25 W of npu;"),
        (5, None, None, "idle 5 W of cpu; 0 W of npu: the sheet states none;"),
        (None, None, 38, "idle 38 W of the machine between requests;"),
        (None, 0.25, 38, "idle 38 W of the machine between requests, 0.25 W of npu;"),
    ],
)
def test_the_note_says_which_idle_power_is_counted(
    of_cpu: float | None, of_npu: float | None, of_all: float | None, told: str
) -> None:
    sheet = toy_sheet()
    cpu, npu, machine = (
        None if watts is None else SheetFigure(value=watts, kind="assumed", origin="test")
        for watts in (of_cpu, of_npu, of_all)
    )
    units = {
        name: unit.model_copy(update={"idle_w": watts})
        for (name, unit), watts in zip(sheet.units.items(), (cpu, npu), strict=True)
    }
    sheet = sheet.model_copy(update={"units": units, "idle_w": machine})
    (meter,) = ModelDevice(sheet, host).meters
    assert {told in str(channel.note) for channel in meter.channels} == {True}


def test_a_modelled_burst_is_no_jump_of_a_counter() -> None:
    """100 launches far apart, two of them in a row: their sum, and no step of it is doubted."""
    apart = replace(CPU_WORK, flops=100_000)  # 200 s
    device = ModelDevice(toy_sheet(), host)
    (meter,) = device.meters
    meter.start()
    device.timeline.run([*[NPU_WORK, apart] * 50, NPU_WORK, *[NPU_WORK, apart] * 49])
    found = energy_between(meter.stop()[1:2], [(0.0, device.timeline.now_s())], "all", "timeline")
    assert found.energy_j == pytest.approx(100 * 1.4)
    assert (found.reason, found.remark) == (None, None)


def test_a_second_window_starts_where_it_was_started() -> None:
    device = ModelDevice(toy_sheet(), host)
    (meter,) = device.meters
    meter.start()
    device.timeline.run([CPU_WORK])
    meter.stop()
    meter.start()
    device.timeline.run([NPU_WORK])
    assert list(meter.stop()[0].times_s) == pytest.approx([2.0, 2.8])


def test_stop_without_start_is_an_error() -> None:
    with pytest.raises(DeviceError, match="stop without start"):
        ModelDevice(toy_sheet(), host).meters[0].stop()


def test_the_device_is_named_after_its_sheet_and_reports_the_computing_host() -> None:
    device: Device = load_model_device("m2-ultra", host)
    device.open()
    assert device.name == "model:m2-ultra"
    assert device.environment() == host()
    assert device.conditions().at_s == 0
    assert device.conditions().temperature_c is None
    assert device.cpu_seconds() is None


def test_an_unknown_device_names_those_there_are() -> None:
    with pytest.raises(
        DeviceError, match=f"sheet m9: no hardware sheet has this name; available: {', '.join(available_sheets())}"
    ):
        load_model_device("m9", host)
