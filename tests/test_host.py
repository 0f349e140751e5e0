"""The host: which meters it takes, and what it says of its own state."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from devices import cpu_seconds
from devices.base import Channel, DeviceError, Meter, MeterUnavailableError
from devices.clock import MonotonicClock
from devices.conditions import cpu_model, cpu_throttle_events, host_conditions, host_environment
from devices.cpu_cycles import CpuCycles
from devices.host import AUTO_ORDER, Host
from devices.meters.modelled import ModelledMeter, load_watts_sheet
from devices.meters.rapl import RaplMeter
from devices.meters.replay import ReplayMeter
from engines.kernels.compile import _processor
from tests.fakes.powercap import Powercap

CLOCK = MonotonicClock()


class AbsentMeter(ModelledMeter):
    """A meter of hardware that is not here."""

    def __init__(self, name: str) -> None:
        super().__init__(0.01, CLOCK, load_watts_sheet("generic"))
        self.name = name

    def open(self) -> None:
        raise MeterUnavailableError(f"no {self.name} here")


class OpenedMeter(ModelledMeter):
    """Remembers whether it was closed."""

    closed = False

    def __init__(self) -> None:
        super().__init__(0.01, CLOCK, load_watts_sheet("generic"))

    def close(self) -> None:
        super().close()
        self.closed = True


def host(powercap: Path, *names: str, **changes: Callable[[], Meter]) -> Host:
    constructors: dict[str, Callable[[], Meter]] = {
        "nvml": lambda: AbsentMeter("nvml"),
        "rapl": lambda: RaplMeter(0.01, CLOCK, powercap),
        "zeus": lambda: AbsentMeter("zeus"),
        "modelled": OpenedMeter,
        "replay": lambda: ReplayMeter(powercap / "absent.csv", CLOCK),
    }
    return Host("host", names, constructors | changes, CLOCK)


def test_auto_falls_through_to_the_modelled_meter_when_nothing_counts(tmp_path: Path) -> None:
    machine = host(tmp_path, "auto")
    machine.open()
    assert [(m.name, m.method) for m in machine.meters] == [("modelled", "modelled")]


def test_auto_takes_rapl_where_the_powercap_tree_is(tmp_path: Path) -> None:
    tree = Powercap(tmp_path / "powercap")
    tree.add("intel-rapl:0", "package-0", 30.0)
    with tree:
        machine = host(tree.root, "auto")
        machine.open()
        assert [(m.name, m.method) for m in machine.meters] == [("rapl", "counter")]
        machine.close()


def test_auto_goes_on_when_a_counter_is_there_but_unreadable(tmp_path: Path) -> None:
    zone = Powercap(tmp_path / "powercap").add("intel-rapl:0", "package-0", 30.0)
    (zone / "energy_uj").unlink()
    (zone / "energy_uj").mkdir()
    machine = host(tmp_path / "powercap", "auto")
    machine.open()
    assert [m.name for m in machine.meters] == ["modelled"]


class GpuMeter(OpenedMeter):
    """Opens, and sees the GPU only."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "nvml"

    def open(self) -> None:
        self.channels = (Channel("gpu0", "counter", computes="gpu"),)


class BrokenMeter(AbsentMeter):
    """A meter whose library fails in a way of its own."""

    def open(self) -> None:
        raise RecursionError("deep in a library")


def test_auto_goes_on_and_a_named_meter_says_so_whatever_a_library_raises(tmp_path: Path) -> None:
    broken = {"nvml": lambda: BrokenMeter("nvml")}
    opened = host(tmp_path, "auto", **broken)
    opened.open()
    assert [m.name for m in opened.meters] == ["modelled"]
    opened.close()
    with pytest.raises(MeterUnavailableError, match=r"nvml: its reader failed \(RecursionError: deep in a library\)"):
        host(tmp_path, "nvml", **broken).open()


def test_auto_passes_over_a_meter_that_does_not_see_the_engines_unit(tmp_path: Path) -> None:
    gpu = GpuMeter()
    machine = host(tmp_path, "auto", nvml=lambda: gpu)
    machine.open()
    assert [m.name for m in machine.meters] == ["modelled"]
    assert gpu.closed


def test_auto_takes_no_cpu_meter_for_an_engine_on_the_gpu(tmp_path: Path) -> None:
    on_gpu = Host("host", ["auto"], {"nvml": GpuMeter} | dict.fromkeys(AUTO_ORDER[1:], OpenedMeter), CLOCK, "gpu")
    on_gpu.open()
    assert [m.name for m in on_gpu.meters] == ["nvml"]
    without = Host("host", ["auto"], dict.fromkeys(AUTO_ORDER, OpenedMeter), CLOCK, "gpu")
    with pytest.raises(DeviceError, match="it sees cpu, and the engine computes on the gpu"):
        without.open()


def test_named_meter_must_open(tmp_path: Path) -> None:
    with pytest.raises(MeterUnavailableError, match="no intel-rapl zone"):
        host(tmp_path, "rapl").open()


def test_failure_of_one_named_meter_closes_those_already_open(tmp_path: Path) -> None:
    first = OpenedMeter()
    machine = host(tmp_path, "modelled", "replay", modelled=lambda: first)
    with pytest.raises(MeterUnavailableError, match="absent"):
        machine.open()
    assert first.closed
    assert machine.meters == []


def test_meter_named_twice_is_read_once(tmp_path: Path) -> None:
    # Two traces of one meter would be added up to twice the joules.
    for names in (("modelled", "auto"), ("auto", "modelled"), ("modelled", "modelled")):
        machine = host(tmp_path, *names)
        machine.open()
        assert [m.name for m in machine.meters] == ["modelled"]
        machine.close()


def test_host_without_any_meter_says_why_for_each(tmp_path: Path) -> None:
    machine = host(tmp_path, "auto", modelled=lambda: AbsentMeter("modelled"))
    with pytest.raises(DeviceError) as caught:
        machine.open()
    for why in ("nvml: no nvml here", "rapl: RAPL: no intel-rapl zone", "zeus: no zeus here", "modelled: no modelled"):
        assert why in str(caught.value)


def test_closed_host_opens_again(tmp_path: Path) -> None:
    machine = host(tmp_path, "modelled")
    for _ in range(2):
        machine.open()
        assert len(machine.meters) == 1
        machine.close()
        assert machine.meters == []


def test_environment_names_the_machine_and_the_packages_that_change_figures() -> None:
    environment = host_environment()
    for package in ("torch", "numpy", "pandas"):
        assert environment.packages[package] == importlib.metadata.version(package)
    assert environment.joulebench == importlib.metadata.version("joulebench")
    assert environment.os.startswith(os.uname().sysname)
    assert environment.machine == os.uname().machine
    assert environment.n_threads == os.cpu_count()
    assert 1 <= environment.n_cores <= environment.n_threads
    assert environment.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert environment.cpu_model


@pytest.mark.parametrize(
    ("cpuinfo", "named"),
    [
        (
            "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\nmodel\t: 9\n",
            "AMD EPYC (family 25, model 17)",
        ),
        ("processor\t: 0\nmodel name\t: A processor\n", "A processor"),
        (
            "processor: 0\nmodel name: Neo\nCPU implementer: 0x41\nCPU part: 0xd40\n",
            "Neo (implementer 0x41, part 0xd40)",
        ),
    ],
)
def test_a_processor_is_told_from_others_of_its_name(tmp_path: Path, cpuinfo: str, named: str) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert cpu_model(tmp_path / "cpuinfo") == named


def test_macs_are_told_from_each_other_by_their_chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what macOS's sysctl says: an M1 and an M4 were "arm", one machine to a history and to the kernels' cache."""
    sysctl, nowhere = tmp_path / "sysctl", tmp_path / "cpuinfo"
    monkeypatch.setattr("engines.kernels.compile._cpuinfo", list)
    keys = set()
    for chip in ("Apple M1", "Apple M4 Max"):
        sysctl.write_text(f'#!/bin/sh\n[ "$*" = "-n machdep.cpu.brand_string" ] && echo "{chip}"\n')
        sysctl.chmod(0o755)
        assert cpu_model(nowhere, sysctl) == chip
        monkeypatch.setattr("devices.conditions.cpu_model", lambda: cpu_model(nowhere, sysctl))
        keys.add(_processor.__wrapped__())
    assert len(keys) == 2
    python_says = platform.processor() or platform.machine()
    sysctl.write_text("#!/bin/sh\necho unknown oid >&2\nexit 1\n")
    assert (cpu_model(nowhere, sysctl), cpu_model(nowhere, nowhere)) == (python_says, python_says)


class HotMeter(OpenedMeter):
    """Knows whether its chip was slowed down."""

    def __init__(self, throttled: bool | None) -> None:
        super().__init__()
        self._throttled = throttled

    def is_throttled(self) -> bool | None:
        return self._throttled


@pytest.mark.parametrize("throttled", [True, False])
def test_a_meter_that_sees_throttling_tells_the_conditions(tmp_path: Path, throttled: bool) -> None:
    machine = host(tmp_path, "modelled", modelled=lambda: HotMeter(throttled))
    machine.open()
    assert machine.conditions().throttled is throttled
    machine.close()


def test_a_meter_that_cannot_tell_leaves_throttling_unknown(tmp_path: Path) -> None:
    machine = host(tmp_path, "modelled", modelled=lambda: HotMeter(None))
    machine.open()
    if cpu_throttle_events() is None:
        assert machine.conditions().throttled is None
    machine.close()


def test_throttle_events_are_those_of_all_cores_and_packages(tmp_path: Path) -> None:
    assert cpu_throttle_events(tmp_path) is None
    for cpu, (core, package) in enumerate([(3, 10), (4, 10)]):
        folder = tmp_path / f"cpu{cpu}" / "thermal_throttle"
        folder.mkdir(parents=True)
        (folder / "core_throttle_count").write_text(f"{core}\n")
        (folder / "package_throttle_count").write_text(f"{package}\n")
        (folder / "core_throttle_total_time_ms").write_text("999\n")
    assert cpu_throttle_events(tmp_path) == 27


def test_cycles_of_an_opened_host_are_a_number_or_a_reason(tmp_path: Path) -> None:
    machine = host(tmp_path, "modelled")
    assert machine.cpu_cycles() == CpuCycles(None, "CPU cycles: the host is not open")
    machine.open()
    before = machine.cpu_cycles()
    until_s = time.process_time() + 0.05
    while time.process_time() < until_s:
        pass
    after = machine.cpu_cycles()
    machine.close()
    if before.cycles is None or after.cycles is None:
        assert str(after.remark).startswith("CPU cycles: ")
    else:
        # 50 ms on any core that runs this: from 0.2 to 8 GHz.
        assert 1e7 <= after.cycles - before.cycles <= 4e8 * 2


def test_conditions_hold_what_can_be_read_and_none_for_the_rest() -> None:
    conditions = host_conditions(12.5)
    assert conditions.at_s == 12.5
    assert conditions.load_average_1m is not None
    assert conditions.throttled is None
    for figure in (conditions.cpu_frequency_mhz, conditions.temperature_c):
        assert figure is None or figure > 0


def test_beside_a_counter_of_the_package_all_cpus_count_and_beside_a_model_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  80 0 0 120 0 0 0 0\ncpu0 5 0 0 95 0 0 0 0\ncpu1 75 0 0 25 0 0 0 0\n")
    monkeypatch.setattr(cpu_seconds, "PROC_STAT", stat)
    monkeypatch.setattr("devices.host.usable_cpus", lambda: frozenset({0}))
    tree = Powercap(tmp_path / "powercap")
    tree.add("intel-rapl:0", "package-0", 30.0)
    with tree:
        found = {}
        for meter in ("rapl", "modelled"):
            machine = host(tree.root, meter)
            machine.open()
            found[meter] = machine.cpu_seconds()
            machine.close()
    told = {name: one and (one.busy_s, one.machine_busy_s, one.machine_available_s) for name, one in found.items()}
    assert told == {"rapl": (0.05, 0.8, 2.0), "modelled": (0.05, None, None)}
