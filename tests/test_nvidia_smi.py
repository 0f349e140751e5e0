"""`nvidia-smi -q -x` of twelve real machines. Values in this file were read off the dumps; lines are of their files."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from devices.base import DeviceError
from devices.nvidia_smi import GpuReport, parse_nvidia_smi, read_nvidia_smi
from devices.nvidia_throttle import REASONS
from tests.data_folder import data_folder

DUMPS = Path("traces") / "gpu" / "nvidia_smi_xml"
MIB = 2**20


def dump(name: str) -> str:
    return (data_folder() / DUMPS / f"{name}.xml").read_text(encoding="utf-8")


def gpu(name: str) -> GpuReport:
    [only] = parse_nvidia_smi(dump(name)).gpus
    return only


def test_every_dump_parses_to_one_gpu_with_a_name_and_a_temperature() -> None:
    paths = sorted((data_folder() / DUMPS).glob("*.xml"))
    assert len(paths) == 12
    for path in paths:
        report = gpu(path.stem)
        assert report.product != "unknown", path.name
        assert report.temperature_c is not None, path.name
        assert report.event_reasons <= set(REASONS.values()), path.name


def test_a100_in_mig_mode() -> None:
    report = parse_nvidia_smi(dump("a100-sxm4-v12"))
    assert report.driver == "535.54.03"  # line 5
    [a100] = report.gpus
    assert a100.product == "NVIDIA A100-SXM4-80GB"  # line 9
    assert a100.is_split  # line 17: <current_mig>Enabled
    assert a100.power_w == 67.03  # line 310, in <gpu_power_readings>; line 319 is of the module: N/A
    assert a100.power_limit_w == 500.0  # line 311
    assert a100.temperature_c == 27  # line 295
    assert a100.memory_bytes == 81920 * MIB  # line 229, not one of the instances' 19968
    assert a100.event_reasons == frozenset()  # all nine Not Active


def test_t4_of_an_older_driver() -> None:
    t4 = gpu("tesla-t4")
    assert t4.power_w == 26.78  # line 170: <power_readings><power_draw>
    assert t4.power_limit_w == 70.0  # line 174: <enforced_power_limit>
    assert t4.temperature_c == 40  # line 155
    assert t4.memory_bytes == 15360 * MIB  # line 94
    assert not t4.is_split  # line 16: N/A


def test_3080_of_a_new_driver_tells_the_instant_beside_the_average() -> None:
    rtx = gpu("rtx-3080-v13")
    assert rtx.power_w == 142.33  # line 228: instant; line 227 has the average, 139.62
    assert rtx.power_limit_w == 320.0  # line 229
    assert rtx.temperature_c == 27  # line 212
    assert rtx.event_reasons == frozenset()  # lines 110 to 118
    assert rtx.memory_bytes == 10240 * MIB  # line 129


def test_4000_ada_is_idle() -> None:
    ada = gpu("rtx-4000-sff-ada-v13")
    assert ada.power_w == 8.44  # line 242
    assert ada.power_limit_w == 70.0  # line 243
    assert ada.event_reasons == {"gpu_idle"}  # line 110


def test_a10g_names_its_throttle_reasons_the_old_way() -> None:
    a10g = gpu("a10g")
    assert a10g.event_reasons == {"gpu_idle"}  # line 83: <clocks_throttle_reason_gpu_idle>Active
    assert a10g.power_w == 25.58  # line 180


def test_3090_runs_below_its_default_limit() -> None:
    assert gpu("rtx-3090-v12").power_limit_w == 200.0  # line 178: enforced; 350 W is the default


@pytest.mark.parametrize("name", ["gtx-1070-ti", "quadro-p400"])
def test_gpu_that_does_not_tell_its_power_has_none_not_0(name: str) -> None:
    assert gpu(name).power_w is None  # <power_draw>N/A


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "no XML"),
        ("<log/>", "<log> is not a report"),
    ],
)
def test_what_is_no_report_is_an_error(text: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        parse_nvidia_smi(text)


def program(folder: Path, script: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_program_is_asked_for_xml(tmp_path: Path) -> None:
    report = '<nvidia_smi_log><driver_version>1.2</driver_version><gpu id="0:1:2"/></nvidia_smi_log>'
    asked = program(tmp_path, f"[ \"$*\" = '-q -x' ] && echo '{report}'")
    assert read_nvidia_smi(asked).driver == "1.2"


def test_program_that_fails_or_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"failed \(9\): No devices were found"):
        read_nvidia_smi(program(tmp_path, "echo No devices were found; exit 9"))
    with pytest.raises(DeviceError, match="is NVIDIA's driver installed"):
        read_nvidia_smi(str(tmp_path / "absent"))


def test_a_name_that_is_no_utf_8_is_no_traceback(tmp_path: Path) -> None:
    report = "<nvidia_smi_log><gpu><product_name>\\377</product_name></gpu></nvidia_smi_log>"
    [gpu] = read_nvidia_smi(program(tmp_path, f"printf '{report}'")).gpus
    assert gpu.product == "\N{REPLACEMENT CHARACTER}"
