"""The sampler on its thread; on a stepped clock where readings are counted, which a busy machine would be late for."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

import devices.sampler
from devices.base import Channel, DeviceError, TransientDeviceError
from devices.clock import MonotonicClock
from devices.meters.polled import PolledMeter
from devices.sampler import AT_RANDOM, Sampler, find_gaps, next_deadline_s
from harness.recording import record
from results.records import Method, TraceKind
from tests.fakes.machine import FakeDevice, FakeMachine
from tests.fakes.stepped_clock import SteppedClock, SteppedSampler, stepped

CLOCK = MonotonicClock()


@pytest.fixture
def by_steps(monkeypatch: pytest.MonkeyPatch) -> SteppedClock:
    return stepped(monkeypatch.setattr)


def count_reads() -> tuple[Sampler, list[float]]:
    """A sampler of a counter of its own reads, and their times."""
    reads: list[float] = []

    def read() -> Sequence[float]:
        reads.append(time.monotonic())
        return [float(len(reads)), -1.0]

    return Sampler(read, 0.01, CLOCK), reads


def share_on_grid(begun_s: Sequence[float], first_s: float) -> float:
    """Of readings 10 ms apart, up to 0.5 ms off a grid from the first; a tenth where they begin anywhere."""
    return float(np.mean((np.array(begun_s) - first_s + 0.0005) % 0.01 < 0.001))


def test_a_reading_is_there_before_start_returns() -> None:
    sampler, reads = count_reads()
    sampler.start()
    returned_s = CLOCK.now_s()
    times_s, values = sampler.stop()
    assert len(reads) >= 1
    assert times_s[0] <= returned_s
    assert values.shape == (len(times_s), 2)
    assert values[:, 0].tolist() == list(range(1, len(times_s) + 1))


def test_last_reading_is_taken_by_stop() -> None:
    sampler = Sampler(lambda: [0.0], 10.0, CLOCK)
    sampler.start()
    time.sleep(0.05)
    asked_s = CLOCK.now_s()
    times_s, _ = sampler.stop()
    assert len(times_s) == 2
    assert asked_s <= times_s[1] <= CLOCK.now_s()


def test_after_a_transient_error_it_goes_on_and_what_was_received_can_be_had(by_steps: SteppedClock) -> None:
    calls = itertools.count()

    def lost_for_a_while() -> Sequence[float]:
        if 5 <= (n := next(calls)) < 25:
            raise TransientDeviceError(f"the link broke at reading {n}")
        return [float(n)]

    sampler = SteppedSampler(by_steps, lost_for_a_while, 0.01, CLOCK)
    sampler.start()
    time.sleep(0.6)
    with pytest.raises(TransientDeviceError, match="at reading 5"):
        sampler.stop()
    times_s, values = sampler.received()
    assert values[:5, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert values[5, 0] == 25.0
    [gap_s] = find_gaps(times_s, 0.01)
    assert gap_s == (times_s[4], times_s[5])


def test_readings_lie_on_a_grid_although_each_takes_its_time(by_steps: SteppedClock) -> None:
    begun_s = []

    def slow_read() -> Sequence[float]:
        begun_s.append(time.monotonic())
        time.sleep(0.003)
        return [0.0]

    sampler = SteppedSampler(by_steps, slow_read, 0.01, CLOCK)
    sampler.start()
    time.sleep(0.6)
    times_s, _ = sampler.stop()
    # An interval that starts after each reading would drift by 3 ms a reading and give 46 of them, all over the grid.
    assert share_on_grid(begun_s[1:-1], times_s[0]) == 1.0
    assert len(times_s) <= 63


@pytest.mark.parametrize("spread", [0.0, AT_RANDOM])
def test_readings_come_as_often_at_random_as_on_a_grid(spread: float) -> None:
    """Distances drawn evenly from 0.5 to 1.5 intervals scatter by one over root 12; a phase is never met twice."""
    draw, deadlines_s = random.Random(1), [0.0]
    for _ in range(2000):
        # Each reading is taken at its deadline, and takes a quarter of an interval.
        deadlines_s.append(next_deadline_s(deadlines_s[-1], deadlines_s[-1] + 0.005, 0.02, spread, draw))
    waits = np.diff(deadlines_s) / 0.02
    # Within five standard errors, of 2000 draws.
    assert np.mean(waits) == pytest.approx(1.0, abs=5 / (12 * 2000) ** 0.5 * 2 * spread + 1e-9)
    assert np.std(waits) == pytest.approx(2 * spread / 12**0.5, abs=0.02)
    assert np.ptp(waits) <= 2 * spread + 1e-9


def test_deadlines_that_passed_are_skipped_and_the_grid_is_kept() -> None:
    assert next_deadline_s(1.0, 1.25, 0.02, 0.0, random.Random(1)) == pytest.approx(1.26)
    assert next_deadline_s(1.0, 0.5, 0.02, 0.0, random.Random(1)) == 1.0


@pytest.mark.parametrize(("kind", "is_at_random"), [("power", True), ("held", True), ("counter", False)])
@pytest.mark.usefixtures("by_steps")
def test_power_is_read_at_random_and_a_counter_on_a_grid(kind: TraceKind, is_at_random: bool) -> None:
    meter = OddMeter(10**6)
    meter.channels = (Channel("part", kind),)
    meter.start()
    time.sleep(1.0)
    [found] = meter.stop()
    share = share_on_grid(meter.begun_s[1:-1], found.times_s[0])
    assert share < 0.4 if is_at_random else share == 1.0


def test_reading_that_blocks_leaves_a_gap_and_no_burst_after_it(by_steps: SteppedClock) -> None:
    calls = itertools.count()

    def stuck_once() -> Sequence[float]:
        if next(calls) == 10:
            time.sleep(0.2)
        return [0.0]

    sampler = SteppedSampler(by_steps, stuck_once, 0.01, CLOCK)
    sampler.start()
    time.sleep(0.5)
    times_s, _ = sampler.stop()
    gaps_s = find_gaps(times_s, 0.01)
    # A reading is stamped in the middle of its call: the stuck one splits its 0.2 s into two gaps of half of it.
    assert sum(end - start for start, end in gaps_s) >= 0.18
    assert np.diff(times_s).min() > 0
    deadlines_missed = 20
    assert len(times_s) <= 53 - deadlines_missed + 2


def test_marks_between_readings_keep_order() -> None:
    sampler, _ = count_reads()
    sampler.start()
    marked_s = []
    for _ in range(50):
        before_s = CLOCK.now_s()
        sampler.mark()
        marked_s.append((before_s, CLOCK.now_s()))
        time.sleep(0.0007)
    times_s, values = sampler.stop()
    assert np.all(np.diff(times_s) > 0)
    assert np.all(np.diff(values[:, 0]) > 0)
    for before_s, after_s in marked_s:
        assert ((times_s >= before_s) & (times_s <= after_s)).any()


def test_error_of_a_reading_surfaces_at_stop(by_steps: SteppedClock) -> None:
    calls = itertools.count()

    def lost() -> Sequence[float]:
        if next(calls) == 3:
            raise DeviceError("the GPU fell off the bus")
        return [0.0]

    sampler = SteppedSampler(by_steps, lost, 0.005, CLOCK)
    sampler.start()
    time.sleep(0.1)
    with pytest.raises(DeviceError, match="fell off the bus"):
        sampler.stop()


def test_error_of_the_first_reading_surfaces_at_start() -> None:
    def broken() -> Sequence[float]:
        raise DeviceError("no such counter")

    with pytest.raises(DeviceError, match="no such counter"):
        Sampler(broken, 0.01, CLOCK).start()


@pytest.mark.parametrize("hangs_at", [0, 1])
def test_reading_that_never_comes_back_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch, hangs_at: int) -> None:
    """The first of all, and one of the window."""
    calls, is_hung, release = itertools.count(), threading.Event(), threading.Event()

    def hung() -> Sequence[float]:
        if next(calls) == hangs_at:
            is_hung.set()
            release.wait()  # for ever, but for the end of this test
        return [0.0]

    sampler = Sampler(hung, 0.005, CLOCK)
    try:
        if hangs_at == 0:
            monkeypatch.setattr(devices.sampler, "HUNG_S", 0.1)
            with pytest.raises(DeviceError, match=r"has not come back for 0\.1 s; is the device's driver hung"):
                sampler.start()
        else:
            sampler.start()
            assert is_hung.wait(60)
            monkeypatch.setattr(devices.sampler, "HUNG_S", 0.1)
            for call in (sampler.mark, sampler.stop):
                with pytest.raises(DeviceError, match=r"has not come back for 0\.1 s"):
                    call()
    finally:
        release.set()


def test_a_driver_that_hangs_for_ever_does_not_keep_the_program_from_ending() -> None:
    program = """
import devices.sampler, itertools, threading
from devices.base import Channel, DeviceError, TransientDeviceError
from devices.clock import MonotonicClock
calls = itertools.count()
sampler = devices.sampler.Sampler(
    lambda: [0.0] if next(calls) < 1 else threading.Event().wait(), 0.01, MonotonicClock()
)
sampler.start()
devices.sampler.HUNG_S = 0.2
try:
    sampler.stop()
except DeviceError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "driver hung" in ended.stdout


def test_gaps_are_stretches_of_more_than_five_intervals() -> None:
    times_s = np.array([0.0, 0.1, 0.6, 1.2, 1.3, 3.0])
    assert find_gaps(times_s, 0.1) == ((0.6, 1.2), (1.3, 3.0))
    assert find_gaps(times_s[:1], 0.1) == ()


def test_clock_sleeps_until_a_time_and_not_for_one_that_has_passed() -> None:
    started_s = CLOCK.now_s()
    CLOCK.sleep_until_s(started_s - 5)
    assert CLOCK.now_s() - started_s < 1
    CLOCK.sleep_until_s(started_s + 0.05)
    assert CLOCK.now_s() >= started_s + 0.05


class OddMeter(PolledMeter):
    """A library behind it that fails in a way of its own, at the reading that is told."""

    name = "odd"
    method: Method = "integrated power"

    def __init__(self, fails_at: int) -> None:
        super().__init__(0.01, CLOCK)
        self.channels = (Channel("part", "power"),)
        self._fails_at = fails_at
        self._calls = itertools.count()
        self.begun_s: list[float] = []

    def open(self) -> None:
        """Nothing to acquire."""

    def read(self) -> Sequence[float]:
        self.begun_s.append(time.monotonic())
        if next(self._calls) >= self._fails_at:
            raise KeyError("watts")
        return [1.0]


@pytest.mark.parametrize("fails_at", [0, 3])
@pytest.mark.usefixtures("by_steps")
def test_whatever_a_meters_library_raises_in_a_window_is_our_error(fails_at: int) -> None:
    def window() -> None:
        meter = OddMeter(fails_at)
        meter.start()
        time.sleep(0.1)
        meter.stop()

    with pytest.raises(DeviceError, match=r"odd: its reader failed \(KeyError: 'watts'\)") as caught:
        window()
    assert caught.value.is_lost, "it was opened, so that another day it may answer"


@pytest.mark.usefixtures("by_steps")
def test_what_was_received_before_a_meter_is_lost_is_kept_in_a_recording() -> None:
    machine = FakeMachine()
    device = FakeDevice(machine, [OddMeter(30)])  # type: ignore[list-item]
    recording = record(device, CLOCK, 0.6, lambda left_s: None)
    [trace] = recording.traces
    assert len(trace.times_s) == 30
    [why] = recording.interrupted
    assert "odd: its reader failed" in why
    [total] = recording.readings()
    assert total.energy_j is None
    assert "uncovered" in str(total.reason)
