"""The battery of a fake phone as a power meter: a real shell loop through the adb protocol.

The fake's gauge renews every 100 ms instead of 250, so that a window of ten updates is short.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from devices.android import battery as battery_module
from devices.android.device_clock import UPTIME_RESOLUTION_S, Marker
from devices.android.gauge_loop import GaugeLog, GaugeLoop, loop_script, on_host_clock
from devices.android.raw_gauge import energy_of, raw_traces
from devices.android.shell import Phone
from devices.base import Channel, DeviceError, MeterUnavailableError
from tests.battery_windows import CLOCK, WATTS, energy, opened, window
from tests.fakes.battery import FakeBattery
from tests.fakes.phone import DISCHARGING, FakePhone
from tests.fakes.waveforms import StepPower

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("short_calibration")]

TRUTH_S = 1e-3
"""How well the tests know the true offset: two clocks that nothing sets while they run."""


# --- the loop --------------------------------------------------------------------------------------------------------


def test_samples_come_every_50_ms_with_the_phones_own_stamps(fake: FakePhone, phone: Phone) -> None:
    """What the loop sleeps is drawn by the shell, whose draws begin with a seed here. Load lengthens periods alone."""
    n_drawn = 40
    with FakeBattery(fake, WATTS):
        script = loop_script('c=1; v=2; [ -n "$t" ] && echo $t >>asked', 0.05)
        loop = GaugeLoop(phone, f"RANDOM=1\n{script}", CLOCK)
        loop.start()
        while len(loop.received().wall_s) <= n_drawn:
            time.sleep(0.05)
        log = loop.stop()
    asked_s = np.loadtxt(fake.root / "asked")[:n_drawn] / 1e3
    # Drawn evenly from 25 to 75 ms: a load of 20 Hz is met in any phase.
    assert np.mean(asked_s) == pytest.approx(0.05, abs=0.012)
    assert np.quantile(asked_s, 0.2) < 0.045 < 0.055 < np.quantile(asked_s, 0.8)
    first, last = log.bursts
    # Markers wake the loop early: the periods around them are shorter.
    is_between = (log.wall_s[:n_drawn] > first[-1].wall_s + 0.1) & (log.wall_s[1 : n_drawn + 1] < last[0].wall_s)
    beyond_s = (np.diff(log.wall_s[: n_drawn + 1]) - asked_s)[is_between]
    # Drawn in whole milliseconds, and slept no less; of many sleeps one at least is followed by its sample at once.
    assert -1e-3 < beyond_s.min() < 0.025


def true_offset_s(device_clock: Callable[[], float]) -> float:
    """Of a clock of this machine, which is the fake phone's: by the two looks that lay closest together."""
    looks = [(CLOCK.now_s(), device_clock(), CLOCK.now_s()) for _ in range(100)]
    before_s, device_s, after_s = min(looks, key=lambda look: look[2] - look[0])
    return device_s - (before_s + after_s) / 2


def test_the_clock_is_known_better_than_to_half_a_trip_over_a_link_with_20_ms_jitter(
    fake: FakePhone, phone: Phone
) -> None:
    """5 ms where nothing but the jitter delays a trip."""
    fake.link_jitter_s = 0.02
    loop = GaugeLoop(phone, loop_script("c=1; v=2", 0.05), CLOCK)
    loop.start()
    log = loop.stop()
    truth_s = true_offset_s(time.time)
    host_s, clock, which = on_host_clock(log)
    assert which == "wall clock"
    trips_s = [m.received_s - m.sent_s for burst in log.bursts for m in burst]
    assert clock.uncertainty_s < np.mean(trips_s) / 4
    assert np.abs(clock.offset_s - truth_s).max() <= clock.uncertainty_s + TRUTH_S
    assert np.abs(host_s - (log.wall_s - truth_s)).max() <= clock.uncertainty_s + TRUTH_S


def test_the_loop_ends_with_its_input_and_is_not_left_on_the_phone(fake: FakePhone, phone: Phone) -> None:
    script = loop_script("c=1; v=2", 0.02).replace("echo", ": > alive; echo", 1)
    loop = GaugeLoop(phone, script, CLOCK)
    loop.start()
    loop.cancel()
    alive = fake.root / "alive"
    time.sleep(0.3)
    alive.unlink(missing_ok=True)
    time.sleep(0.3)
    assert not alive.exists()


def test_a_shell_without_a_fine_clock_is_good_to_10_ms(phone: Phone) -> None:
    """The uptime of the fake phone is this machine's: the true offset is known."""
    loop = GaugeLoop(phone, loop_script("c=1; v=2", 0.02).replace("$EPOCHREALTIME", ""), CLOCK)
    loop.start()
    log = loop.stop()
    host_s, clock, which = on_host_clock(log)
    assert which == "uptime (its shell has no EPOCHREALTIME)"
    truth_s = true_offset_s(lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
    assert np.abs(clock.offset_s - truth_s).max() <= clock.uncertainty_s + TRUTH_S
    # Each sample's own stamp is cut to 10 ms as well.
    stamped_s = log.uptime_s + UPTIME_RESOLUTION_S / 2
    assert np.abs(host_s - (stamped_s - truth_s)).max() <= clock.uncertainty_s + TRUTH_S


def test_a_marker_that_a_busy_shell_garbles_is_sent_again(fake: FakePhone, phone: Phone) -> None:
    fake.input_to_cut = 3
    loop = GaugeLoop(phone, loop_script("c=1; v=2", 0.05), CLOCK)
    loop.start()
    log = loop.stop()
    assert [len(burst) for burst in log.bursts] == [12, 12]
    clock = on_host_clock(log)[1]
    assert np.abs(clock.offset_s - true_offset_s(time.time)).max() <= clock.uncertainty_s + TRUTH_S


def test_bursts_go_on_in_a_long_window(phone: Phone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devices.android.gauge_loop.BURST_EVERY_S", 0.2)
    loop = GaugeLoop(phone, loop_script("c=1; v=2", 0.02), CLOCK)
    loop.start()
    time.sleep(1.2)
    log = loop.stop()
    assert len(log.bursts) >= 4
    middles_s = [np.mean([m.sent_s for m in burst]) for burst in log.bursts]
    assert all(a < b for a, b in pairwise(middles_s))


# --- joules ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("sign", "per_ampere"), [(-1, 1e6), (1, 1e6), (-1, 1e3), (1, 1e3)])
def test_constant_power_gives_its_joules_in_every_sign_and_unit(
    fake: FakePhone, phone: Phone, sign: int, per_ampere: float
) -> None:
    with FakeBattery(fake, WATTS, sign=sign, per_ampere=per_ampere), opened(phone) as meter:
        [trace], reading = window(meter, 1.5)
    assert reading.energy_j == pytest.approx(2.0 * reading.duration_s, rel=0.01)
    assert reading.method == "battery gauge"
    assert trace.note is not None
    assert f"current in {'uA' if per_ampere == 1e6 else 'mA'}" in trace.note
    assert ("positive" if sign > 0 else "negative") in trace.note


@pytest.mark.usefixtures("clock")
def test_steps_of_power_are_within_the_stated_uncertainty(fake: FakePhone, phone: Phone) -> None:
    """1 W, and 5 W for two stretches of 0.5 s: the closed form is the sum of rectangles."""
    power = StepPower(np.array([-1e9, 0.6, 1.1, 1.6, 2.1, 1e9]), np.array([1.0, 5.0, 1.0, 5.0, 1.0]))
    with FakeBattery(fake, 1.0) as gauge, opened(phone) as meter:
        meter.start()
        start_s = CLOCK.now_s()
        gauge.follow(power, start_s)
        CLOCK.sleep_until_s(start_s + 2.6)
        end_s = CLOCK.now_s()
        traces = meter.stop()
    reading = energy(traces, start_s, end_s)
    assert reading.energy_j is not None
    assert reading.uncertainty_j is not None
    assert abs(reading.energy_j - power.energy_j(0.0, end_s - start_s)) < 3 * reading.uncertainty_j
    assert reading.uncertainty_j < 0.2 * reading.energy_j


@pytest.mark.usefixtures("clock")
def test_the_update_period_is_observed_and_raw_readings_are_kept(fake: FakePhone, phone: Phone) -> None:
    with FakeBattery(fake, WATTS, update_s=0.15), opened(phone) as meter:
        [trace], _ = window(meter, 1.5)
        assert trace.update_period_s == pytest.approx(0.15, abs=0.04)
        current, voltage = meter.raw_traces()
        # 2 W at 4 V: 0.5 A, in uA and with this phone's sign.
        assert np.median(current.values) == pytest.approx(-500_000, abs=5)
        assert np.median(voltage.values) == 4_000_000
        assert (current.kind, voltage.kind) == ("raw", "raw")


@pytest.mark.usefixtures("clock")
def test_repeated_windows_of_one_meter_are_apart(fake: FakePhone, phone: Phone) -> None:
    with FakeBattery(fake, WATTS), opened(phone) as meter:
        [first], _ = window(meter, 0.2)
        [second], _ = window(meter, 0.2)
    assert first.times_s[-1] < second.times_s[0]


# --- sources ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("clock")
def test_a_denied_sysfs_falls_back_to_the_service(
    fake: FakePhone, phone: Phone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(battery_module, "SERVICE_PERIOD_S", 0.05)
    with FakeBattery(fake, WATTS) as gauge:
        gauge.deny_sysfs()
        fake.answer("dumpsys battery", DISCHARGING.replace("voltage: 4012", "voltage: 4000"))
        with opened(phone) as meter:
            [trace], reading = window(meter, 1.5)
    assert trace.note is not None
    assert trace.note.startswith("cmd battery current_now: current in uA")
    assert reading.energy_j == pytest.approx(2.0 * reading.duration_s, rel=0.01)


@pytest.mark.usefixtures("clock")
def test_without_any_current_the_charge_counter_is_the_last_source(fake: FakePhone, phone: Phone) -> None:
    with opened(phone) as meter:
        [channel] = meter.channels
        assert (channel.kind, channel.note) == ("counter", "dumpsys battery charge counter")
        _, reading = window(meter, 1.5)
    assert reading.energy_j is None  # it has not moved
    assert "stood still" in str(reading.reason) or "unresolved" in str(reading.reason)


def test_the_charge_counter_gives_its_joules() -> None:
    """A counter that loses 1 mAh (3.6 C) every 5 s at 4 V, read every second for ten minutes: 2.88 W."""
    at_s = np.arange(601, dtype=np.float64)
    markers = tuple(Marker(t, t, np.nan, t) for t in (0.0, 600.0))
    log = GaugeLog(
        at_s, at_s, 3_456_000 - np.floor(at_s / 5.0) * 1000, np.full(601, 4000.0), (markers[:1], markers[1:])
    )
    trace = energy_of(raw_traces(log, "charge", 1.0), Channel("battery", "counter"))
    assert trace.update_period_s == 5.0
    assert trace.resolution == pytest.approx(14.4)
    reading = energy([trace], 50.0, 550.0)
    assert reading.energy_j == pytest.approx(2.88 * 500.0, rel=0.01)
    # Phones that tell volts or microvolts.
    for unit in (1e-3, 1e3):
        others = replace(log, voltage=log.voltage * unit)
        found = energy_of(raw_traces(others, "charge", 1.0), Channel("battery", "counter"))
        assert found.values == pytest.approx(trace.values)
    with pytest.raises(DeviceError, match="a voltage of 40 is no battery's in uV, mV or V"):
        energy_of(raw_traces(replace(log, voltage=log.voltage / 100), "charge", 1.0), Channel("battery", "counter"))
    # A `dumpsys` that failed: the next one counts what was taken meanwhile.
    for column, at in ((log.current, 103), (log.voltage, 207)):
        column[at] = np.nan
    reading = energy([energy_of(raw_traces(log, "charge", 1.0), Channel("battery", "counter"))], 50.0, 550.0)
    assert reading.energy_j == pytest.approx(2.88 * 500.0, rel=0.01)
    log.voltage[:] = np.nan
    assert len(energy_of(raw_traces(log, "charge", 1.0), Channel("battery", "counter")).values) == 0


def test_a_phone_that_tells_nothing_is_refused_with_the_remedy(fake: FakePhone, phone: Phone) -> None:
    fake.answer("dumpsys battery", None)
    with (
        pytest.raises(MeterUnavailableError, match=r"may read nothing under /sys/class/power_supply.*Android 15"),
        opened(phone),
    ):
        pass


@pytest.mark.usefixtures("clock")
def test_a_current_that_rests_is_still_preferred_to_the_charge_counter_and_the_warning_names_the_phone(
    fake: FakePhone, phone: Phone, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeBattery(fake, WATTS) as gauge:
        gauge.change(stuck_at=-500_000)
        with opened(phone) as meter:
            assert meter.channels[0].kind == "held"
    [warned] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned.startswith("adb:FAKE0001: battery: ")
    assert "has not been seen to update" in warned


@pytest.mark.usefixtures("clock")
def test_a_node_that_is_no_battery_is_not_taken(fake: FakePhone, phone: Phone) -> None:
    """A charger's node beside it, and a `bms` node that disagrees in sign: the one called battery counts."""
    with (
        FakeBattery(fake, WATTS, folder="/sys/class/power_supply/usb"),
        FakeBattery(fake, 9.0, sign=1, folder="/sys/class/power_supply/bms"),
        FakeBattery(fake, WATTS),
        opened(phone) as meter,
    ):
        fake.file("/sys/class/power_supply/usb/type", "USB\n")
        assert meter.channels[0].note == (
            "/sys/class/power_supply/battery/current_now: current in uA, negative while discharging"
        )


@pytest.mark.usefixtures("clock")
def test_a_source_that_stands_still_gives_way_to_one_that_moves(fake: FakePhone, phone: Phone) -> None:
    with (
        FakeBattery(fake, WATTS) as stuck,
        FakeBattery(fake, WATTS, folder="/sys/class/power_supply/bms"),
    ):
        stuck.change(stuck_at=-500_000)
        with opened(phone) as meter:
            assert "bms" in str(meter.channels[0].note)
