"""nvidia-smi beside NVML: a program of that name in the path, and traces with known watts."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from devices.base import Channel
from devices.nvidia_smi import parse_nvidia_smi
from harness.second_opinion import Look, look_with_nvidia_smi, nvidia_smi_checks
from results.records import PowerTrace
from results.report.self_test import check_line
from results.self_tests import Check
from tests.fakes.known_load import Device, Machine, Meter, examined
from tests.fakes.waveforms import trace

GAIN = 0.05 / 3**0.5


def smi_xml(*watts: float) -> str:
    gpus = "".join(
        f"<gpu id='{i}'><gpu_power_readings><power_draw>{w:.2f} W</power_draw></gpu_power_readings></gpu>"
        for i, w in enumerate(watts)
    )
    return f"<nvidia_smi_log><driver_version>1.2</driver_version>{gpus}</nvidia_smi_log>"


def nvml_trace(watts: float, component: str = "gpu0 power") -> PowerTrace:
    at_s = np.arange(0.0, 10.0, 0.05)
    read = trace("power", at_s, np.full(len(at_s), watts), 0.05)
    return replace(read, meter="nvml", component=component, relative_accuracy=GAIN)


def checks(xml: str, *traces: PowerTrace) -> list[Check]:
    return list(nvidia_smi_checks(Look(9.0, 9.3, parse_nvidia_smi(xml)), traces))


@pytest.mark.parametrize(("smi_w", "agrees"), [(700.0, True), (739.0, True), (742.0, False), (0.7, False)])
def test_both_may_differ_by_twice_the_gain_that_nvidia_states(smi_w: float, agrees: bool) -> None:
    """2 x 5 % / sqrt(3) of 700 W is 40.4 W. 0.7 W is a figure in kW."""
    [check] = checks(smi_xml(smi_w), nvml_trace(700.0))
    assert check.ok is agrees
    assert f"{smi_w:.4g} W, and 700 to 700 W" in check.found


def test_only_nvmls_readings_of_that_time_count() -> None:
    """The GPU drew 100 W until a second before, 700 W since."""
    stepped = nvml_trace(700.0)
    stepped = replace(stepped, values=np.where(stepped.times_s < 7.5, 100.0, 700.0))
    assert [c.ok for c in checks(smi_xml(100.0), stepped)] == [False]
    assert [c.ok for c in checks(smi_xml(700.0), stepped)] == [True]


def test_gpus_are_compared_each_with_itself() -> None:
    traces = [nvml_trace(700.0, "gpu0"), nvml_trace(300.0, "gpu1")]
    assert [c.ok for c in checks(smi_xml(700.0, 300.0), *traces)] == [True, True]
    assert [c.ok for c in checks(smi_xml(300.0, 700.0), *traces)] == [False, False]
    [check] = checks(smi_xml(700.0), *traces)
    assert (check.ok, check.found) == (False, "it lists 1 GPUs, NVML 2")


def test_a_gpu_that_tells_no_power_is_not_compared() -> None:
    assert checks("<nvidia_smi_log><gpu id='0'/></nvidia_smi_log>", nvml_trace(700.0)) == []


class Nvml(Meter):
    """NVML's power of one GPU."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine, name="nvml", relative_accuracy=GAIN)
        self.channels = (Channel("gpu0", "power", relative_accuracy=GAIN),)

    def stop(self) -> Sequence[PowerTrace]:
        [read] = super().stop()
        return [replace(read, component="gpu0")]


@pytest.mark.parametrize(("script", "ok"), [("cat <<E\n{xml}\nE", True), ("echo no driver; exit 9", None)])
def test_the_doctor_asks_nvidia_smi_while_the_load_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, ok: bool | None
) -> None:
    """200 W under load, 40 W else."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + script.format(xml=smi_xml(200.0)) + "\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    machine = Machine()
    found = examined(Device(machine, Nvml(machine)))
    [check] = [c for c in found.checks if c.name.startswith("nvidia-smi")]
    assert check.ok is ok
    assert ("200 W" if ok else "nvidia-smi failed (9): no driver") in check_line(check)


def test_without_nvml_nobody_is_asked() -> None:
    machine = Machine()
    assert look_with_nvidia_smi([Meter(machine)], machine) is None
    assert list(nvidia_smi_checks(None, [])) == []
