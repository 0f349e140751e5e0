"""RAPL's energy events of perf, with the system call answered by a machine that has them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from devices.base import MeterUnavailableError
from devices.meters.perf import PerfMeter, cpus_of
from tests.fakes.libraries import watts, window_code
from tests.fakes.perf import FakePerf
from tests.meter_windows import CLOCK


@pytest.fixture(scope="module")
def perf(tmp_path_factory: pytest.TempPathFactory) -> FakePerf:
    return FakePerf(tmp_path_factory.mktemp("perf"))


def on(sources: Path, code: str) -> str:
    """The meter, looking for its events in this folder."""
    return f"from pathlib import Path\n{code}".replace("(0.05, clock)", f"(0.05, clock, Path({str(sources)!r}))")


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
    (perf.sources / "power" / "cpumask").write_text("0,18\n")
    try:
        answer = perf.run_stepped(on(perf.sources, window_code("devices.meters.perf.PerfMeter", 0.3)), watts=50)
    finally:
        (perf.sources / "power" / "cpumask").write_text("0\n")
    assert {"package-0", "package-1"} <= set(answer["kinds"])
    assert watts(answer)["total"] == pytest.approx(250.0, rel=0.03)


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
