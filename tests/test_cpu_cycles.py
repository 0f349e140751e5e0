"""CPU cycles: the real kernel counts CPU time here the same way (a software event), a fake one counts cycles."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from devices.base import MeterUnavailableError
from devices.cpu_cycles import CpuCycles, CycleCounter, cycle_events, cycles_between
from devices.perf_event import HW_CPU_CYCLES, TYPE_HARDWARE, Event
from tests.fakes.perf import FakePerf
from tests.fakes.strangers import busy_stranger

CPU_TIME = [Event(1, 1)]
"""PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK (perf_event_open(2)): CPU time of a task in ns, counted by the kernel,
so it is there where the hardware's counters are not."""


@pytest.fixture
def cpu_time() -> CycleCounter:
    """The kernel's own count of CPU time in ns: opened, read and summed as cycles are."""
    counter = CycleCounter(CPU_TIME)
    try:
        counter.open()
    except MeterUnavailableError as error:
        pytest.skip(f"perf events are closed to this user: {error}")
    return counter


def busy(cpu_s: float) -> None:
    until_s = time.thread_time() + cpu_s
    while time.thread_time() < until_s:
        pass


def counted_s(counter: CycleCounter) -> float:
    count = counter.read().cycles
    assert count is not None
    return count * 1e-9


def test_threads_and_children_that_start_later_are_counted(cpu_time: CycleCounter) -> None:
    before_s, clock_s = counted_s(cpu_time), time.process_time()
    thread = threading.Thread(target=busy, args=(0.1,))
    thread.start()
    busy(0.1)
    thread.join()
    own_s = time.process_time() - clock_s
    assert counted_s(cpu_time) - before_s == pytest.approx(own_s, abs=0.02)
    child = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", child], check=True)
    assert counted_s(cpu_time) - before_s >= own_s + 0.2
    cpu_time.close()


def test_threads_that_were_there_before_are_counted() -> None:
    go, gone = threading.Event(), threading.Event()

    def wait_and_work() -> None:
        go.wait(60)
        busy(0.1)
        gone.set()

    thread = threading.Thread(target=wait_and_work)
    thread.start()
    counter = CycleCounter(CPU_TIME)
    try:
        counter.open()
    except MeterUnavailableError as error:
        go.set()
        pytest.skip(f"perf events are closed to this user: {error}")
    before_s = counted_s(counter)
    go.set()
    gone.wait(60)
    thread.join()
    assert counted_s(counter) - before_s >= 0.1
    counter.close()


def test_another_process_is_not_counted() -> None:
    with busy_stranger(1.0):
        counter = CycleCounter(CPU_TIME)
        try:
            counter.open()
        except MeterUnavailableError as error:
            pytest.skip(f"perf events are closed to this user: {error}")
        before_s = counted_s(counter)
        time.sleep(0.3)
        assert counted_s(counter) - before_s < 0.05
    counter.close()


# --- a machine with hardware counters, and those without --------------------------------------------------------------

COUNT = """
import time
from devices.base import MeterUnavailableError
from devices.cpu_cycles import CycleCounter, cycles_between
counter = CycleCounter()
try:
    counter.open()
    before_s = time.monotonic()
    before = counter.read()
    start_s = time.monotonic()
    time.sleep(0.3)
    inner_s = time.monotonic() - start_s
    passed = cycles_between(before, counter.read())
    answer = [passed.cycles, passed.remark, inner_s, time.monotonic() - before_s]
except MeterUnavailableError as error:
    answer = str(error)
"""


@pytest.fixture(scope="module")
def perf(tmp_path_factory: pytest.TempPathFactory) -> FakePerf:
    return FakePerf(tmp_path_factory.mktemp("perf"))


def is_of_3_ghz(count: float, inner_s: float, outer_s: float) -> bool:
    """The window is longer than what lay between its two looks, and shorter than what lay around them."""
    return 3e9 * inner_s * 0.999 <= count <= 3e9 * outer_s * 1.001


def test_cycles_of_a_window(perf: FakePerf) -> None:
    count, remark, *seconds = perf.run(COUNT, cycles_ghz=3)
    assert is_of_3_ghz(count, *seconds)
    assert remark is None


def test_counter_that_took_turns_is_scaled(perf: FakePerf) -> None:
    count, _, *seconds = perf.run(COUNT, cycles_ghz=3, on_hardware=0.25)
    assert is_of_3_ghz(count, *seconds)


def test_counter_that_never_got_its_turn_has_no_count(perf: FakePerf) -> None:
    count, remark, *_ = perf.run(COUNT, on_hardware=0)
    assert count is None
    assert "other programs hold all hardware counters" in remark


def test_user_without_the_right_to_kernel_cycles_gets_those_of_user_mode_and_is_told(perf: FakePerf) -> None:
    count, remark, *seconds = perf.run(COUNT, cycles_ghz=3, refuse_kernel=errno.EACCES)
    assert is_of_3_ghz(count, *seconds)
    assert remark.startswith("user mode only")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.EACCES, "perf_event_paranoid is "),
        (errno.ENOENT, "no such hardware counter (virtual machines usually do not)"),
        (errno.ENOSYS, "no perf_event_open"),
    ],
)
def test_machine_that_counts_no_cycles_says_why(perf: FakePerf, code: int, message: str) -> None:
    answer = perf.run(COUNT, refuse=code)
    assert answer.startswith("CPU cycles: ")
    assert message in answer


def test_system_without_linux_threads_has_no_cycles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("devices.cpu_cycles._TASKS", tmp_path / "absent")
    with pytest.raises(MeterUnavailableError, match="counted on Linux only"):
        CycleCounter(CPU_TIME).open()


def test_processor_whose_system_call_is_not_known_has_no_perf_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "vax")
    with pytest.raises(MeterUnavailableError, match="linux on vax has none that is known here"):
        CycleCounter(CPU_TIME).open()


def test_mixed_cores_are_counted_by_an_event_of_each_kind(tmp_path: Path) -> None:
    assert cycle_events(tmp_path) == (Event(TYPE_HARDWARE, HW_CPU_CYCLES),)
    for name, number in (("cpu_atom", 10), ("cpu_core", 4)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpus").write_text("0-3\n")
        (tmp_path / name / "type").write_text(f"{number}\n")
    # PERF_TYPE_HARDWARE with the PMU's type in the upper half of the configuration (perf_event_open(2)).
    assert cycle_events(tmp_path) == (Event(TYPE_HARDWARE, 10 << 32), Event(TYPE_HARDWARE, 4 << 32))


def test_window_with_an_unknown_end_has_no_cycles() -> None:
    known, unknown = CpuCycles(100), CpuCycles(None, "no PMU")
    assert cycles_between(known, CpuCycles(175)) == CpuCycles(75)
    assert cycles_between(unknown, known) == CpuCycles(None, "no PMU")
    assert cycles_between(known, unknown) == CpuCycles(None, "no PMU")
