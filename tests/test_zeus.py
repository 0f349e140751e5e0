"""Zeus' meter on the libraries that Zeus itself talks to: NVML, amdsmi, Apple's, powercap."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.libraries import open_code, run_python, watts, window_code
from tests.fakes.nvml import STEPPED, FakeNvml, in_step_code
from tests.fakes.powercap import WRAP_UJ

FAKES = Path(__file__).parent / "fakes"
WINDOW = window_code("devices.meters.zeus.ZeusMeter")
OPEN = open_code("devices.meters.zeus.ZeusMeter")


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    return FakeNvml(tmp_path_factory.mktemp("nvml"))


def test_without_any_device_there_is_no_meter_never_0_joules(nvml: FakeNvml) -> None:
    assert nvml.run(OPEN, init=9).startswith("Zeus finds no counter here: ")


# --- NVIDIA ----------------------------------------------------------------------------------------------------------


def test_nvidia_counter_is_the_one_that_nvml_reads(nvml: FakeNvml) -> None:
    state = {"gpus": 2, "watts": 150, "tick_ms": 100}
    theirs, ours = (
        nvml.run(in_step_code(f"devices.meters.{name}", 1.2, **state), **state)
        for name in ("zeus.ZeusMeter", "nvml.NvmlMeter")
    )
    assert watts(theirs) == pytest.approx({"total": 450.0, "gpu0": 150.0, "gpu1": 300.0}, rel=0.02)
    for quantity in ("energy_j", "uncertainty_j"):
        # One hardware, one gain error.
        found_j, expected_j = (answer["readings"]["total"][quantity] for answer in (theirs, ours))
        assert found_j == pytest.approx(expected_j, rel=1e-3)


def test_nvidia_gpu_that_is_lost_is_a_transient_error(nvml: FakeNvml) -> None:
    name, message = nvml.run(window_code("devices.meters.zeus.ZeusMeter", 0.3, meanwhile="set_state(energy=15)"))
    assert name == "TransientDeviceError"
    assert "was the device lost?" in message


def test_nvidia_gpu_without_a_counter_is_read_by_its_power(nvml: FakeNvml) -> None:
    state = {"watts": 70, "energy": 3}
    answer = nvml.run(in_step_code("devices.meters.zeus.ZeusMeter", 1.2, **state), **state)
    assert answer["kinds"] == {"gpu0": "power"}
    assert answer["readings"]["total"]["method"] == "integrated power"
    assert watts(answer)["total"] == pytest.approx(70.0, rel=0.01)


@pytest.mark.parametrize(("instant", "averaged_s"), [(0, None), (3, 1.0)])
def test_nvidias_average_is_one_of_a_second(nvml: FakeNvml, instant: int, averaged_s: float | None) -> None:
    code = """
    from devices.clock import MonotonicClock
    from devices.meters.zeus import ZeusMeter
    meter = ZeusMeter(0.05, MonotonicClock())
    meter.open()
    answer = [(c.component, c.kind, c.averaged_s) for c in meter.channels]
    """
    assert nvml.run(code, energy=3, instant=instant)[0] == ["gpu0", "power", averaged_s]


@pytest.mark.parametrize("names", ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "0,GPU-89", "GPU-8932", "-1"])
def test_gpus_by_name_are_refused_with_the_remedy(nvml: FakeNvml, names: str) -> None:
    code = f"import os; os.environ['CUDA_VISIBLE_DEVICES'] = {names!r}\n"
    answer = nvml.run(code + OPEN)
    assert f"CUDA_VISIBLE_DEVICES={names} names GPUs, and Zeus takes their numbers alone" in answer
    assert "or measure with nvml" in answer


def test_a_gpu_named_twice_is_not_counted_twice(nvml: FakeNvml) -> None:
    answer = nvml.run("import os; os.environ['CUDA_VISIBLE_DEVICES'] = '1, 01'\n" + OPEN, gpus=2)
    assert "CUDA_VISIBLE_DEVICES=1, 01 names a GPU twice" in answer


@pytest.mark.parametrize(
    ("visible", "order", "mixed", "is_refused"),
    [("1", "", 1, True), ("1", "FASTEST_FIRST", 1, True), ("1", "PCI_BUS_ID", 1, False), ("1", "", 0, False),
     ("1,0", "", 1, False)],
)  # fmt: skip
def test_numbers_that_cuda_may_give_to_other_gpus_are_refused(
    nvml: FakeNvml, visible: str, order: str, mixed: int, is_refused: bool
) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": visible} | ({"CUDA_DEVICE_ORDER": order} if order else {})
    answer = nvml.run(f"import os; os.environ.update({environment})\n" + OPEN, gpus=2, mixed=mixed)
    words = "with Fake GPU 0 and Fake GPU 1 here its joules may be of another GPU than the one that computes"
    assert (words in str(answer)) == is_refused
    assert ("Zeus finds no counter" in str(answer)) == is_refused


def test_nvidia_gpu_that_is_lost_is_waited_for_in_the_next_window(nvml: FakeNvml) -> None:
    code = window_code("devices.meters.zeus.ZeusMeter", 0.3, meanwhile="set_state(energy=15)") + (
        "import devices.reconnect as reconnect\n"
        "reconnect.LOOK_EVERY_S = 0.2\n"
        "time_by_steps.later(1.0, set_state, energy=0)\n"
        "meter.start()\n"
        "answer = len(meter.stop()[0].values) >= 2\n"
    )
    assert nvml.run(code) is True


def test_another_gpu_under_the_number_of_one_that_was_lost_is_not_read(nvml: FakeNvml) -> None:
    code = """
from devices.base import MeterUnavailableError
from devices.clock import MonotonicClock
from devices.meters.zeus import ZeusMeter
meter = ZeusMeter(0.05, MonotonicClock())
meter.open()
meter.reopen()
set_state(gpus=2, swapped=1)
try:
    meter.reopen()
    answer = "read"
except MeterUnavailableError as error:
    answer = str(error)
"""
    assert nvml.run(code, gpus=2) == (
        "Zeus: gpu0 was GPU-fake-0 and is now GPU-fake-1; totals would not be of the same GPUs"
    )


def test_nvidia_counter_that_freezes_in_a_window_leaves_no_energy(nvml: FakeNvml) -> None:
    """After one of two seconds: 100 of 200 J are not in it."""
    freezes = "set_state(watts=100, tick_ms=100, freeze_s=time.monotonic())"
    answer = nvml.run(window_code("devices.meters.zeus.ZeusMeter", 2.0, meanwhile=freezes), watts=100, tick_ms=100)
    assert answer["readings"]["total"]["energy_j"] is None
    assert "zeus gpu0: its counter stood still for" in answer["readings"]["total"]["reason"]


# --- AMD -------------------------------------------------------------------------------------------------------------


def on_amd(code: str, nvml: FakeNvml, counter: str) -> Any:
    """amdsmi in place of AMD's; NVML without a driver, as on a machine without NVIDIA."""
    library = (
        f"import os, sys; sys.path.insert(0, {str(FAKES / 'amd')!r}); os.environ['FAKE_AMD_COUNTER'] = {counter!r}\n"
    )
    return nvml.run(library + code, init=9)


def test_amd_counters_in_joules(nvml: FakeNvml) -> None:
    answer = on_amd(WINDOW, nvml, "good")
    assert answer["kinds"] == {"gpu0": "counter", "gpu1": "counter"}
    assert watts(answer) == pytest.approx({"total": 370.0, "gpu0": 120.0, "gpu1": 250.0}, rel=0.02)
    assert "states no gain error" in answer["notes"]["gpu0"]


def test_amd_counter_that_zeus_does_not_trust_gives_way_to_power(nvml: FakeNvml) -> None:
    answer = on_amd(in_step_code("devices.meters.zeus.ZeusMeter", 1.2, init=9), nvml, "tenfold")
    assert answer["kinds"] == {"gpu0": "power", "gpu1": "power"}
    assert answer["readings"]["total"]["method"] == "integrated power"
    assert watts(answer)["total"] == pytest.approx(370.0, rel=0.001)


def test_amd_gpu_that_is_lost_is_a_transient_error(nvml: FakeNvml) -> None:
    lost = window_code("devices.meters.zeus.ZeusMeter", 0.3, meanwhile="import amdsmi; amdsmi.is_lost = True")
    name, message = on_amd(lost, nvml, "good")
    assert name == "TransientDeviceError"
    assert "was the device lost?" in message


# --- Apple Silicon ---------------------------------------------------------------------------------------------------


def on_mac(code: str, folder: Path) -> Any:
    """Zeus' Apple library in place of the real one; `uname -p` says arm, as on a Mac."""
    uname = folder / "uname"
    uname.write_text('#!/bin/sh\n[ "$1" = -p ] && echo arm || exec /usr/bin/uname "$@"\n')
    uname.chmod(0o755)
    library = f"import os, sys; sys.path.insert(0, {str(FAKES / 'apple')!r})\n"
    return run_python(STEPPED + library + code, {"PATH": f"{folder}:/usr/bin:/bin"})


def test_apple_parts_stand_apart_and_add_up(tmp_path: Path) -> None:
    answer = on_mac(WINDOW, tmp_path)
    parts_w = {"cpu": 9.0, "dram": 1.5, "gpu": 20.0, "ane": 4.0}
    assert answer["kinds"] == dict.fromkeys(parts_w, "counter")
    assert watts(answer) == pytest.approx({"total": 34.5, **parts_w}, rel=0.02)


def test_what_apples_library_raises_is_our_error(tmp_path: Path) -> None:
    fails = "os.environ['FAKE_APPLE_FAILS'] = 'IOReport: subscription failed'"
    at_once = on_mac(f"{fails}\n{OPEN}", tmp_path)
    assert "SoC: its library failed (RuntimeError: IOReport: subscription failed)" in at_once
    name, message = on_mac(window_code("devices.meters.zeus.ZeusMeter", 0.3, meanwhile=fails), tmp_path)
    assert name == "TransientDeviceError"
    assert "RuntimeError: IOReport: subscription failed" in message


def test_parts_of_a_chip_are_summed_once() -> None:
    from zeus.device.soc.apple import AppleSiliconMeasurement
    from zeus.device.soc.jetson import JetsonMeasurement

    from devices.meters.zeus import soc_channels

    apple = AppleSiliconMeasurement(
        cpu_total_mj=900,
        efficiency_cores_mj=[1, 2],
        performance_cores_mj=[3, 4],
        efficiency_core_manager_mj=5,
        performance_core_manager_mj=6,
        dram_mj=70,
        gpu_mj=800,
        gpu_sram_mj=9,
        ane_mj=None,
    )
    assert {c.component: c.additive for c in soc_channels(asdict(apple)).values()} == {
        "cpu": True,
        "efficiency_core_manager": False,
        "performance_core_manager": False,
        "dram": True,
        "gpu": True,
        "gpu_sram": False,
    }
    board = soc_channels(asdict(JetsonMeasurement(cpu_energy_mj=1.0, gpu_energy_mj=2.0, total_energy_mj=5.0)))
    assert {c.component: c.additive for c in board.values()} == {"cpu": False, "gpu": False, "total_energy": True}
    no_total = soc_channels(asdict(JetsonMeasurement(cpu_energy_mj=1.0, gpu_energy_mj=2.0)))
    assert [c.additive for c in no_total.values()] == [True, True]


# --- RAPL ------------------------------------------------------------------------------------------------------------


def test_platform_zone_is_not_added_to_the_packages_inside_it(nvml: FakeNvml, tmp_path: Path) -> None:
    for i, name in enumerate(["package-0", "psys"]):
        zone = tmp_path / f"intel-rapl:{i}"
        zone.mkdir()
        for file, text in (("name", name), ("energy_uj", "123456"), ("max_energy_range_uj", str(WRAP_UJ))):
            (zone / file).write_text(f"{text}\n")
    (tmp_path / "intel-rapl:0" / "constraint_1_power_limit_uw").write_text("60000000\n")
    code = f"""
import zeus.device.cpu.rapl
zeus.device.cpu.rapl.RAPL_DIR = {str(tmp_path)!r}
from devices.clock import MonotonicClock
from devices.meters.zeus import ZeusMeter
meter = ZeusMeter(0.01, MonotonicClock())
meter.open()
answer = [[c.component, c.note, c.additive, c.max_power_w] for c in meter.channels], list(meter.read())
"""
    channels, values_j = nvml.run(code, init=9)
    no_gain = "its maker states no gain error, and the uncertainty holds none"
    assert channels == [
        ["cpu0", f"package-0; {no_gain}", True, 180.0],
        ["cpu1", f"psys; {no_gain}", False, 2000.0],
    ]
    assert values_j == pytest.approx([0.123456, 0.123456])


@pytest.mark.parametrize(
    ("vendor", "expected"), [("AuthenticAMD", ["cpu0", "cpu2"]), ("GenuineIntel", ["cpu0", "cpu1", "cpu2"])]
)
def test_a_package_that_is_listed_for_each_die_is_counted_once_on_amd(
    nvml: FakeNvml, tmp_path: Path, vendor: str, expected: list[str]
) -> None:
    for i, name in enumerate(["package-0-die-0", "package-0-die-1", "package-1-die-2"]):
        zone = tmp_path / f"intel-rapl:{i}"
        zone.mkdir()
        for file, text in (("name", name), ("energy_uj", "123456"), ("max_energy_range_uj", str(WRAP_UJ))):
            (zone / file).write_text(f"{text}\n")
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n")
    code = f"""
from pathlib import Path
import zeus.device.cpu.rapl
import devices.rapl_packages
zeus.device.cpu.rapl.RAPL_DIR = {str(tmp_path)!r}
devices.rapl_packages.CPUINFO = Path({str(tmp_path / "cpuinfo")!r})
from devices.clock import MonotonicClock
from devices.meters.zeus import ZeusMeter
meter = ZeusMeter(0.01, MonotonicClock())
meter.open()
answer = [c.component for c in meter.channels if c.additive]
"""
    assert nvml.run(code, init=9) == expected
