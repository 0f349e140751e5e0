"""CPU cycles of programs on a phone: counted from reading to reading, or a reason that a user understands."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

import pytest

from devices.android import simpleperf as simpleperf_module
from devices.android.device import AndroidDevice
from devices.android.server import ServerAddress
from devices.android.shell import Phone
from devices.android.simpleperf import LATE, NO_PMU, NO_PROGRAM, PhoneCycles, parse_stat
from devices.base import TransientDeviceError
from devices.clock import MonotonicClock
from devices.cpu_cycles import USER_MODE_ONLY, CpuCycles
from devices.gates import Gates
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.phone import FakePhone
from tests.fakes.simpleperf import FakeSimpleperf

pytestmark = pytest.mark.waits

HARDENED = (
    "simpleperf E environment.cpp:394] perf_event_paranoid is 3, set security.perf_harden to 0 to allow profiling"
)


@pytest.fixture
def cycles(phone: Phone) -> Iterator[PhoneCycles]:
    counter = PhoneCycles(phone)
    yield counter
    counter.close()


def test_a_window_has_the_cycles_between_its_two_readings(fake: FakePhone, cycles: PhoneCycles) -> None:
    tool = FakeSimpleperf(fake)
    tool.use(1_000)
    before = cycles.read([7, 8])
    assert tool.asked == "stat --csv -e cpu-cycles -p 7,8"
    tool.use(4_501_000)
    after = cycles.read([7])
    assert before.cycles is not None
    assert after.cycles is not None
    assert after.cycles - before.cycles == 4_500_000
    assert after.remark is None
    # The next window counts on from there.
    tool.use(4_501_007)
    assert cycles.read([7]) == CpuCycles(4_500_007)


def test_without_a_program_there_are_no_cycles_to_count(fake: FakePhone, cycles: PhoneCycles) -> None:
    FakeSimpleperf(fake)
    assert cycles.read([]) == CpuCycles(None, NO_PROGRAM)


def test_a_phone_without_a_tool_says_what_to_push(cycles: PhoneCycles, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine may have a perf of its own, which the fake phone's shell would find."""
    monkeypatch.setattr(simpleperf_module, "TOOLS", ("simpleperf", "/data/local/tmp/simpleperf"))
    reading = cycles.read([1])
    assert reading.cycles is None
    assert "push the NDK's simpleperf to /data/local/tmp" in str(reading.remark)


def test_a_tool_in_the_work_folder_is_found(fake: FakePhone, cycles: PhoneCycles) -> None:
    FakeSimpleperf(fake)
    shutil.move(fake.root / "bin" / "simpleperf", fake.local("/data/local/tmp/simpleperf"))
    assert cycles.read([1]).cycles == 0


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (HARDENED, r"refused to the shell \(security.perf_harden is 1; .*\); adb shell setprop security.perf_harden 0"),
        ("Event type 'cpu-cycles' is not supported on the device", "no hardware counter"),
        ("failed to open perf event file: No such process", "ended at once .*No such process"),
    ],
)
def test_a_tool_that_refuses_is_told_with_the_remedy(
    fake: FakePhone, cycles: PhoneCycles, says: str, told: str
) -> None:
    fake.answer("getprop security.perf_harden", "1\n")
    FakeSimpleperf(fake, says=says)
    reading = cycles.read([1])
    assert reading.cycles is None
    assert reading.remark is not None
    assert re.search(told, reading.remark)


def test_a_phone_that_never_counts_is_asked_once(fake: FakePhone, cycles: PhoneCycles) -> None:
    FakeSimpleperf(fake, says=HARDENED)
    first = cycles.read([1])
    FakeSimpleperf(fake)
    assert cycles.read([1]) == first


def test_a_counter_that_missed_a_part_gives_no_number(fake: FakePhone, cycles: PhoneCycles) -> None:
    """Of a program that ran on two kinds of cores."""
    FakeSimpleperf(fake, row="{},cpu-cycles,1.9,GHz,(37%),")
    cycles.read([1])
    reading = cycles.read([1])
    assert reading.cycles is None
    assert "on the hardware for 37 % of the time" in str(reading.remark)
    assert "bind the program to one cluster" in str(reading.remark)


def test_a_tool_that_loads_slowly_has_no_count_of_a_part_and_ends(
    fake: FakePhone, cycles: PhoneCycles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """perf read from a busy disk took seconds: the interrupt came before its handler, and it never ended."""
    monkeypatch.setattr(simpleperf_module, "_SCRIPT", simpleperf_module._SCRIPT.replace("-lt 100", "-lt 2"))
    FakeSimpleperf(fake, loads_s=1.5)
    cycles.read([1])
    assert cycles.read([1]) == CpuCycles(None, LATE)


def test_a_cable_pulled_while_counting_is_transient(fake: FakePhone, cycles: PhoneCycles) -> None:
    FakeSimpleperf(fake)
    cycles.read([1])
    fake.pull_cable()
    with pytest.raises(TransientDeviceError):
        cycles.read([1])


def test_a_device_counts_the_programs_that_run_on_it(fake: FakePhone, server: FakeAdbServer) -> None:
    tool = FakeSimpleperf(fake)
    device = AndroidDevice(
        "adb:", 0.05, MonotonicClock(), Gates(wait_s=0.0), address=ServerAddress("127.0.0.1", server.port)
    )
    assert device.cpu_cycles() == CpuCycles(None, NO_PROGRAM)
    program = device.start_program(["sleep", "60"])
    before = device.cpu_cycles()
    assert tool.asked.endswith(f"-p {program.pid}")
    tool.use(123)
    after = device.cpu_cycles()
    program.kill()
    device.close()
    assert (before.cycles, after.cycles) == (0, 123)


@pytest.mark.skipif(shutil.which("perf") is None, reason="needs the perf tool of this machine")
def test_the_perf_of_this_machine_counts_or_says_why_not(cycles: PhoneCycles) -> None:
    first, second = cycles.read([os.getpid()]), cycles.read([os.getpid()])
    if second.cycles is None:
        assert second.remark in (NO_PMU, LATE) or "refused" in str(second.remark)
    else:
        assert second.cycles > (first.cycles or 0)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        # As an Android benchmark runner quotes simpleperf, and as perf 6 prints.
        (
            "Performance counter statistics,\n6595722690,cpu-cycles,4.511040,GHz,(100%),\n0,major-faults,0.000,/sec,"
            "(100%),\nTotal test time,1.462129,seconds,\n",
            CpuCycles(6595722690),
        ),
        ("12345,cpu-cycles:u,1.1,GHz,(100%),\n", CpuCycles(12345, USER_MODE_ONLY)),
        ("987654321,,cpu-cycles,1000123,100.00,,\n", CpuCycles(987654321)),
        ("<not supported>,,cpu-cycles,0,100.00,,\n", CpuCycles(None, NO_PMU)),
    ],
)
def test_tables_of_both_tools_are_read(table: str, expected: CpuCycles) -> None:
    assert parse_stat(table) == expected


@pytest.mark.parametrize(
    "table",
    ["", "Performance counter statistics,\n", "<not counted>,,cpu-cycles,0,0.00,,\n", "5,,cpu-cycles,1,42.00,,\n"],
)
def test_a_table_without_a_whole_count_is_none_with_a_reason(table: str) -> None:
    reading = parse_stat(table)
    assert reading.cycles is None
    assert str(reading.remark).startswith("CPU cycles: the count")
