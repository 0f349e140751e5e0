"""Power through Perfetto on a fake phone: a program behind the adb protocol, its trace, joules, what may go wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from devices.android import battery as battery_module
from devices.android import perfetto as perfetto_module
from devices.android.battery import BatteryMeter
from devices.android.perfetto import Config
from devices.android.perfetto_rails import RailMeter, rail_channels
from devices.android.perfetto_trace import RailReadings
from devices.android.server import ServerAddress
from devices.android.shell import Phone
from devices.android.survey import attached_phones
from devices.base import Device, DeviceError, MeterUnavailableError, TransientDeviceError
from devices.clock import MonotonicClock
from harness.device_building import build_device, log_waiting
from harness.device_specs import AndroidSpec
from harness.plan import device_problems
from harness.schema import TrialProtocol
from results.records import EnergyReading
from tests.eventually import eventually, running
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.perfetto import FakePerfetto
from tests.fakes.phone import DISCHARGING, FakePhone
from tests.fakes.waveforms import StepPower
from tests.meter_windows import measure, sleep, total

pytestmark = pytest.mark.waits

CLOCK = MonotonicClock()
FAR_S = 1e6


def steady(watts: float) -> StepPower:
    return StepPower(np.array([time.monotonic() - 10.0, FAR_S + time.monotonic()]), np.array([watts]))


def flickering(watts: float) -> StepPower:
    """By 1 mW, every 100 ms for a minute: a gauge that moves."""
    edges_s = time.monotonic() + np.arange(0.0, 60.0, 0.1)
    return StepPower(edges_s, watts + 1e-3 * (np.arange(len(edges_s) - 1) % 2))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto_module, "SETTLE_S", 0.1)
    monkeypatch.setattr(battery_module, "CALIBRATION_S", 0.5)


@pytest.fixture
def perfetto(fake: FakePhone) -> FakePerfetto:
    return FakePerfetto(fake)


@contextmanager
def opened(phone: Phone) -> Iterator[RailMeter]:
    meter = RailMeter(phone, 0.05, CLOCK, reconnect_s=0.0)
    try:
        meter.open()
        yield meter
    finally:
        meter.close()


# --- joules ----------------------------------------------------------------------------------------------------------


def test_rails_give_their_joules_each_and_together(perfetto: FakePerfetto, phone: Phone) -> None:
    """The CPU steps to 5 W within the window: the closed form is the sum of rectangles."""
    begun_s = time.monotonic()
    edges_s = begun_s + np.array([-10.0, 2.2, 2.6, 60.0])
    cpu, gpu = StepPower(edges_s, np.array([1.0, 5.0, 1.0])), steady(0.25)
    perfetto.rail("S2M_VDD_CPUCL2", "CPU(BIG)", cpu)
    perfetto.rail("S2S_VDD_G3D", "GPU", gpu)
    with opened(phone) as meter:
        traces, start_s, end_s = measure(meter, lambda: CLOCK.sleep_until_s(begun_s + 3.2))
    assert start_s < begun_s + 2.2
    for component, power in (("S2M_VDD_CPUCL2", cpu), ("S2S_VDD_G3D", gpu)):
        reading = total(traces, start_s, end_s, component)
        assert reading.energy_j == pytest.approx(power.energy_j(start_s, end_s), rel=0.01)
    whole = total(traces, start_s, end_s)
    true_j = cpu.energy_j(start_s, end_s) + gpu.energy_j(start_s, end_s)
    assert whole.method == "counter"
    assert whole.energy_j is not None
    assert whole.uncertainty_j is not None
    assert abs(whole.energy_j - true_j) < 2 * whole.uncertainty_j < 0.1 * true_j
    assert "CPU(BIG); phone's wall clock, known to" in str(traces[0].note)
    assert "a reading every 100 ms, stamped by its HAL" in str(traces[0].note)


def test_a_rail_that_others_feed_is_shown_and_not_summed(perfetto: FakePerfetto, phone: Phone) -> None:
    """L12M hangs on the regulator S9M_LLDO3, whose joules hold its own."""
    perfetto.rail("S9M_LLDO3", "LDO", steady(1.0))
    perfetto.rail("L12M_VDD_CPUCL0_M", "CPU(LITTLE)", steady(0.5))
    perfetto.rail("VSYS_PWR_DISPLAY", "Display", steady(2.0))
    with opened(phone) as meter:
        traces, start_s, end_s = measure(meter, sleep(1.0))
    assert [t.additive for t in traces] == [True, False, True]
    assert "fed by S9M_LLDO3" in str(traces[1].note)
    seconds = end_s - start_s
    assert total(traces, start_s, end_s, "L12M_VDD_CPUCL0_M").energy_j == pytest.approx(0.5 * seconds, rel=0.01)
    assert total(traces, start_s, end_s).energy_j == pytest.approx(3.0 * seconds, rel=0.01)


def test_without_a_metered_feeder_linear_rails_add_up() -> None:
    """The first eight channels of a Pixel 6, as its driver names them (energy_value of both PMICs)."""
    nothing = np.array([])
    names = ("VSYS_PWR_WLAN_BT", "L2S_VDD_AOC_RET", "S9S_VDD_AOC", "S5S_VDDQ_MEM", "S10S_VDD2L", "S2S_VDD_G3D")
    rails = [RailReadings(name, "", nothing, nothing, True) for name in (*names, "S10M_VDD_TPU", "S2S_VDD_G3D")]
    channels = rail_channels(rails)
    assert all(c.additive for c in channels)
    assert [c.computes for c in channels] == ["cpu"] * 5 + ["gpu", "npu", "gpu"]
    assert [c.component for c in channels[-3:]] == ["S2S_VDD_G3D", "S10M_VDD_TPU", "S2S_VDD_G3D #2"]


def test_a_hal_without_stamps_is_read_by_the_traces(perfetto: FakePerfetto, phone: Phone) -> None:
    perfetto.rail("VDD_CPU", "CPU", steady(2.0), without=["timestamp_ms"])
    with opened(phone) as meter:
        traces, start_s, end_s = measure(meter, sleep(1.2))
    reading = total(traces, start_s, end_s)
    assert reading.energy_j is not None
    assert reading.uncertainty_j is not None
    assert abs(reading.energy_j - 2.0 * reading.duration_s) < 2 * reading.uncertainty_j
    assert "stamped by perfetto" in str(traces[0].note)
    assert traces[0].update_period_s == pytest.approx(0.1, abs=0.03)


def test_the_config_asks_for_no_more_than_perfetto_gives() -> None:
    """100 ms at the fastest; the text was parsed by Perfetto's own protos."""
    assert Config(rails=True, poll_s=0.01, limit_s=60.0).text() == (
        'buffers { size_kb: 32768 fill_policy: DISCARD } data_sources { config { name: "android.power"'
        " android_power_config { battery_poll_ms: 100 collect_power_rails: true } } } duration_ms: 60000"
    )


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_rail_of_cores_that_counted_in_each_window_and_then_in_none_has_stopped(
    perfetto: FakePerfetto, phone: Phone
) -> None:
    """Its joules were taken for 0, those of a part that is switched off: two thirds were missing from all trials that
    followed. A display may be off, and cores that have rested before may rest again."""

    def draw(big_w: float, display_w: float) -> None:
        perfetto.change(rails=[])
        perfetto.rail("S2M_VDD_CPUCL2", "CPU(BIG)", steady(big_w))
        perfetto.rail("S4M_VDD_CPUCL0", "CPU(LITTLE)", steady(1.0))
        perfetto.rail("VSYS_PWR_DISPLAY", "Display", steady(display_w))

    def window(meter: RailMeter) -> EnergyReading:
        return total(*measure(meter, sleep(1.2)))

    draw(4.0, 2.0)
    with opened(phone) as meter:
        assert window(meter).average_power_w == pytest.approx(7.0, rel=0.01)
        draw(4.0, 0.0)
        off = window(meter)
        assert off.average_power_w == pytest.approx(5.0, rel=0.01)
        assert "VSYS_PWR_DISPLAY counts as 0 J" in str(off.remark)
        draw(0.0, 0.0)
        for _ in range(2):
            stopped = window(meter)
            assert stopped.energy_j is None
            assert "rails S2M_VDD_CPUCL2: its counter stands still at" in str(stopped.reason)
            assert "it moved before: it has stopped" in str(stopped.reason)
        draw(4.0, 2.0)
        assert window(meter).average_power_w == pytest.approx(7.0, rel=0.01)
        draw(0.0, 2.0)
        rests = window(meter)
        assert rests.average_power_w == pytest.approx(3.0, rel=0.01)
        assert "S2M_VDD_CPUCL2 counts as 0 J" in str(rests.remark)


def test_a_phone_without_perfetto_says_so(phone: Phone) -> None:
    with (
        pytest.raises(MeterUnavailableError, match=r"the phone has none, Android 9 and newer do \(.*not found\)"),
        opened(phone),
    ):
        pass


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("sh: perfetto: can't execute: Permission denied", "SELinux refuses it to the shell"),
        ("Failed to connect to the traced socket: Connection refused", "setprop persist.traced.enable 1"),
        ("perfetto_cmd.cc:541 The TraceConfig is invalid", "ended at once .*TraceConfig is invalid"),
    ],
)
def test_a_perfetto_that_refuses_is_told_with_the_remedy(
    perfetto: FakePerfetto, phone: Phone, said: str, told: str
) -> None:
    perfetto.change(refusal=said)
    with pytest.raises(MeterUnavailableError, match=told), opened(phone):
        pass


def test_a_phone_without_rails_says_so(perfetto: FakePerfetto, phone: Phone) -> None:
    perfetto.battery(steady(2.0))
    with pytest.raises(MeterUnavailableError, match=r"shows no power rails.*meters = \[\"battery\"\]"), opened(phone):
        pass


def test_rails_that_are_named_and_never_read_are_no_meter(perfetto: FakePerfetto, phone: Phone) -> None:
    perfetto.rail("VDD_CPU", "CPU", steady(2.0), without=["energy"])
    with (
        pytest.raises(MeterUnavailableError, match=r"1 are named \(VDD_CPU, ...\) and none has a reading"),
        opened(phone),
    ):
        pass


def test_a_rail_that_lacks_its_key_has_no_energy_nor_has_the_sum(perfetto: FakePerfetto, phone: Phone) -> None:
    perfetto.rail("VDD_CPU", "CPU", steady(2.0))
    perfetto.rail("VDD_GPU", "GPU", steady(1.0), without=["energy"])
    with opened(phone) as meter:
        traces, start_s, end_s = measure(meter, sleep(1.0))
    assert total(traces, start_s, end_s, "VDD_CPU").energy_j == pytest.approx(2.0 * (end_s - start_s), rel=0.01)
    for component in ("VDD_GPU", "total"):
        reading = total(traces, start_s, end_s, component)
        assert reading.energy_j is None
        assert "VDD_GPU: 0 readings, at least 2 are needed" in str(reading.reason)
    assert "readings were incomplete: left out" in str(traces[0].note)


def test_a_first_reading_that_comes_late_leaves_the_window_uncovered(perfetto: FakePerfetto, phone: Phone) -> None:
    perfetto.rail("VDD_CPU", "CPU", steady(2.0))
    with opened(phone) as meter:
        perfetto.change(first_after_s=1.0)
        traces, start_s, end_s = measure(meter, sleep(1.0))
    reading = total(traces, start_s, end_s)
    assert reading.energy_j is None
    assert "of the window uncovered" in str(reading.reason)


def test_a_trace_cut_short_is_worth_a_retry(perfetto: FakePerfetto, phone: Phone) -> None:
    perfetto.rail("VDD_CPU", "CPU", steady(2.0))
    with opened(phone) as meter:
        meter.start()
        perfetto.change(cut_bytes=3)
        with pytest.raises(TransientDeviceError, match="cut short"):
            meter.stop()
        perfetto.change(cut_bytes=0)
        traces, start_s, end_s = measure(meter, sleep(0.5))
        assert total(traces, start_s, end_s).energy_j is not None


def test_a_perfetto_that_dies_in_the_window_is_worth_a_retry(perfetto: FakePerfetto, phone: Phone) -> None:
    perfetto.rail("VDD_CPU", "CPU", steady(2.0))
    with opened(phone) as meter:
        perfetto.change(dies_after=6)
        meter.start()
        time.sleep(0.5)
        with pytest.raises(TransientDeviceError, match=r"killed on the phone: exit code 1, 0 bytes.*traced went away"):
            meter.stop()


def test_a_cable_pulled_in_the_window_is_a_transient_error_and_leaves_no_perfetto(
    fake: FakePhone, perfetto: FakePerfetto, phone: Phone
) -> None:
    perfetto.rail("VDD_CPU", "CPU", steady(2.0))
    with opened(phone) as meter:
        meter.start()
        assert running(f"{fake.root}/perfetto.json")
        fake.pull_cable()
        with pytest.raises(TransientDeviceError, match="link broke"):
            meter.stop()
        assert eventually(lambda: not running(f"{fake.root}/perfetto.json"))
        with pytest.raises(TransientDeviceError, match="is not attached"):
            meter.start()
        fake.plug_in()
        traces, start_s, end_s = measure(meter, sleep(0.5))
        assert total(traces, start_s, end_s).energy_j is not None


def test_a_window_that_nobody_asks_for_leaves_no_perfetto(
    fake: FakePhone, perfetto: FakePerfetto, phone: Phone
) -> None:
    perfetto.rail("VDD_CPU", "CPU", steady(2.0))
    with opened(phone) as meter:
        meter.start()
    assert eventually(lambda: not running(f"{fake.root}/perfetto.json"))


def test_start_and_stop_keep_their_order(perfetto: FakePerfetto, phone: Phone) -> None:
    perfetto.rail("VDD_CPU", "CPU", steady(2.0))
    with pytest.raises(DeviceError, match="not open"):
        RailMeter(phone, 0.05, CLOCK).start()
    with opened(phone) as meter:
        with pytest.raises(DeviceError, match="not running"):
            meter.stop()
        meter.start()
        with pytest.raises(DeviceError, match="already running"):
            meter.start()


# --- the battery through Perfetto ------------------------------------------------------------------------------------


def test_a_battery_that_the_shell_may_not_read_is_read_through_perfetto(perfetto: FakePerfetto, phone: Phone) -> None:
    perfetto.battery(flickering(2.0))
    meter = BatteryMeter(phone, 0.05, CLOCK)
    try:
        meter.open()
        traces, start_s, end_s = measure(meter, sleep(1.2))
    finally:
        meter.close()
    reading = total(traces, start_s, end_s)
    assert reading.energy_j == pytest.approx(2.0 * reading.duration_s, rel=0.01)
    assert reading.method == "battery gauge"
    assert str(traces[0].note).startswith("perfetto android.power: current in uA, negative while discharging")
    current, voltage = meter.raw_traces()
    # 2 W at the 4.012 V of `dumpsys battery`.
    assert np.median(current.values) == pytest.approx(-498_504, abs=300)
    assert set(voltage.values) == {4012.0}


def test_a_battery_hal_that_says_nothing_gives_way_to_the_charge_counter(perfetto: FakePerfetto, phone: Phone) -> None:
    meter = BatteryMeter(phone, 0.05, CLOCK)
    try:
        meter.open()
        assert meter.channels[0].note == "dumpsys battery charge counter"
    finally:
        meter.close()


# --- as a device -----------------------------------------------------------------------------------------------------


def test_a_plan_that_names_rails_alone_may_leave_the_phone_on_its_cable(
    fake: FakePhone, server: FakeAdbServer, perfetto: FakePerfetto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(server.port))
    fake.file("/proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd05\n")
    fake.answer("dumpsys battery", DISCHARGING.replace("status: 3", "status: 2"))
    perfetto.rail("VDD_CPU", "CPU", steady(2.0))
    device = device_of("rails")
    try:
        device.open()
        assert [(m.name, m.method) for m in device.meters] == [("rails", "counter")]
    finally:
        device.close()
    for names in (("battery", "rails"), ("auto",)):
        with pytest.raises(DeviceError, match="the battery is charging"):
            device_of(*names).open()


def device_of(*meters: str) -> Device:
    """As a plan names it."""
    return build_device(AndroidSpec(name="adb:", meters=meters), TrialProtocol(gate_wait_s=0.0), CLOCK, log_waiting)


def test_a_plan_names_the_meters_of_a_phone() -> None:
    assert list(device_problems("device[0]", AndroidSpec(name="adb:", meters=("battery", "rails")))) == []
    [problem] = device_problems("device[0]", AndroidSpec(name="adb:", meters=("nvml",)))
    assert "a phone has no meter 'nvml'; it has auto, battery, rails" in problem


def test_what_is_attached_says_which_rails_there_are(
    fake: FakePhone, server: FakeAdbServer, perfetto: FakePerfetto
) -> None:
    perfetto.rail("VDD_CPU", "CPU", steady(2.0))
    _, rails = attached_phones(ServerAddress("127.0.0.1", server.port))
    assert rails == ("adb:FAKE0001", "rails", "counter", True, "1 rails through Perfetto: VDD_CPU")
    perfetto.change(rails=[])
    _, rails = attached_phones(ServerAddress("127.0.0.1", server.port))
    assert not rails.ready
    assert "shows no power rails" in rails.remark
