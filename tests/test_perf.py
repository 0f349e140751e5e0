"""RAPL's energy events of perf, with the system call answered by a machine that has them."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from devices.base import MeterUnavailableError
from devices.meters.perf import PerfMeter, cpus_of
from tests.fakes.libraries import watts, window_code
from tests.fakes.perf import FakePerf
from tests.meter_windows import CLOCK


@pytest.fixture(scope="module")
def perf(tmp_path_factory: pytest.TempPathFactory) -> FakePerf:
    return FakePerf(tmp_path_factory.mktemp("perf"))


def on(sources: Path, code: str, vendor: str = "GenuineIntel", packages: Mapping[int, int] | None = None) -> str:
    """The meter, looking for its events in this folder. packages: of CPUs."""
    cpuinfo = sources / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    for cpu, package in (packages or {}).items():
        topology = sources / "cpus" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True, exist_ok=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
    machine = f"""
from functools import partial
import devices.meters.perf
import devices.rapl_packages
devices.rapl_packages.CPUINFO = Path({str(cpuinfo)!r})
devices.meters.perf.repeated_cpus = partial(devices.rapl_packages.repeated_cpus, folder=Path({str(sources / "cpus")!r}))
"""
    return f"from pathlib import Path\n{machine}{code}".replace(
        "(0.05, clock)", f"(0.05, clock, Path({str(sources)!r}))"
    )


def test_package_and_memory_make_the_total_and_neither_cores_nor_platform(perf: FakePerf) -> None:
    answer = perf.run_stepped(on(perf.sources, window_code("devices.meters.perf.PerfMeter", 0.4)), watts=50)
    assert answer["additive"] == {
        "core of package-0": False,
        "package-0": True,
        "psys": False,
        "dram of package-0": True,
    }
    # Event E has watts * E / 2: cores 1, package 2, memory 3, platform 5 (perf's numbers on Intel).
    expected_w = {"core of package-0": 25.0, "package-0": 50.0, "dram of package-0": 75.0, "psys": 125.0}
    assert watts(answer) == pytest.approx({"total": 125.0, **expected_w}, rel=0.02)
    assert answer["readings"]["total"]["method"] == "counter"


def test_two_packages_have_their_own_counters(perf: FakePerf) -> None:
    answer = on_mask(perf, "0,18", "GenuineIntel", {0: 0, 18: 1})
    assert {"package-0", "package-1"} <= set(answer["kinds"])
    assert watts(answer)["total"] == pytest.approx(250.0, rel=0.03)


@pytest.mark.parametrize(("vendor", "expected_w"), [("AuthenticAMD", 250.0), ("GenuineIntel", 500.0)])
def test_a_package_that_is_listed_for_each_die_is_counted_once_on_amd(
    perf: FakePerf, vendor: str, expected_w: float
) -> None:
    """Two packages of 125 W with two dies each, as Linux 6.9 lists them. Intel's dies have counters of their own."""
    answer = on_mask(perf, "0,8,16,24", vendor, {0: 0, 8: 0, 16: 1, 24: 1})
    assert watts(answer)["total"] == pytest.approx(expected_w, rel=0.03)


def on_mask(perf: FakePerf, cpumask: str, vendor: str, packages: Mapping[int, int]) -> Any:
    (perf.sources / "power" / "cpumask").write_text(f"{cpumask}\n")
    code = on(perf.sources, window_code("devices.meters.perf.PerfMeter", 0.3), vendor, packages)
    try:
        return perf.run_stepped(code, watts=50)
    finally:
        (perf.sources / "power" / "cpumask").write_text("0\n")


OPEN = """
from pathlib import Path
from devices.base import MeterUnavailableError
from devices.clock import MonotonicClock
from devices.meters.perf import PerfMeter
try:
    PerfMeter(0.01, MonotonicClock(), Path({sources!r})).open()
    answer = "opened"
except MeterUnavailableError as error:
    answer = str(error)
"""


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"refuse": errno.EACCES}, "root only (perf_event_paranoid is "),
        ({"refuse": errno.ENOENT}, "no such hardware counter"),
        ({"refuse": errno.ENOSYS}, "has no perf_event_open"),
        ({"refuse": errno.EBUSY}, "perf_event_open failed (Device or resource busy)"),
        ({"watts": 0}, "stand still (package-0, dram of package-0)"),
    ],
)
def test_events_that_cannot_be_had_are_no_meter_with_the_reason(
    perf: FakePerf, state: dict[str, float], message: str
) -> None:
    assert message in perf.run_stepped(OPEN.format(sources=str(perf.sources)), **state)


def test_machine_without_the_pmu_has_no_meter(tmp_path: Path) -> None:
    with pytest.raises(MeterUnavailableError, match="this machine has no energy events"):
        PerfMeter(0.01, CLOCK, tmp_path).open()


def test_event_in_another_unit_is_refused(tmp_path: Path) -> None:
    events = tmp_path / "power" / "events"
    events.mkdir(parents=True)
    for name, text in (("", "event=0x02"), (".scale", "1"), (".unit", "Watts")):
        (events / f"energy-pkg{name}").write_text(text)
    (tmp_path / "power" / "type").write_text("18")
    with pytest.raises(MeterUnavailableError, match="in '1' 'Watts', not a counter of joules"):
        PerfMeter(0.01, CLOCK, tmp_path).open()


def test_list_of_cpus_as_sysfs_writes_it() -> None:
    assert cpus_of("0") == [0]
    assert cpus_of("0,18") == [0, 18]
    assert cpus_of("0-2,7") == [0, 1, 2, 7]
