"""Xcode's energy gauge: what its samples mean, what is no value, and that its units never become joules."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from threading import Timer
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pymobiledevice3", reason="the extra joulebench[ios] is not installed")

from devices.base import DeviceError, MeterUnavailableError, TransientDeviceError
from devices.clock import MonotonicClock
from devices.ios import energy_gauge
from devices.ios.energy_gauge import COMPONENTS, KEYS, PARTS, EnergyGaugeMeter, adds_up, parse_sample
from devices.ios.phone import Phone
from results.energy import NO_JOULES, energy_between
from tests.eventually import eventually
from tests.fakes.ios_phone import ENGINE_PID, FakeIphone, ServedIphone, gauge_sample
from tests.fakes.ios_tunneld import FakeTunneld

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("clock")]

APP = "com.example.engine"
CLOCK = MonotonicClock()
UPDATE_S = 0.1

PUBLISHED = [
    # pymobiledevice3 issue 792
    {"energy.overhead": -10.0, "energy.gpu.cost": 0, "energy.cpu.cost": 0, "energy.networkning.overhead": 0,
     "energy.appstate.cost": 8, "energy.networking.cost": 0, "energy.cost": 331.15294117647056,
     "energy.display.cost": 341.15294117647056, "energy.location.cost": 0},
    # py-ios-device issue 106
    {"energy.overhead": 490.0, "energy.gpu.cost": 0, "energy.cpu.cost": 0.016101402630249513,
     "energy.networkning.overhead": 500, "energy.appstate.cost": 8, "energy.networking.cost": 1000.0,
     "energy.cost": 990.0161014026303, "energy.location.cost": 0},
    # tidevice, its README
    {"energy.overhead": 490.0, "energy.gpu.cost": 0, "energy.cpu.cost": 62.15080582703523,
     "energy.networkning.overhead": 500, "energy.appstate.cost": 8, "energy.networking.cost": 501.341030606293,
     "energy.cost": 767.8212481980341, "energy.display.cost": 214.3294117647059, "energy.location.cost": 0},
    # HydraLab, IOSEnergyGaugeInfo
    {"energy.overhead": 490, "energy.gpu.cost": 0, "energy.cpu.cost": 13.612496010497445,
     "energy.networkning.overhead": 500, "energy.appstate.cost": 8, "energy.networking.cost": 958.6126949224124,
     "energy.cost": 962.2251909329099, "energy.location.cost": 0},
]  # fmt: skip
"""Samples of real phones, as their users published them."""


# --- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", PUBLISHED)
def test_in_real_samples_the_parts_sum_to_the_cost_and_ten(sample: dict[str, float]) -> None:
    """Why the parts are added, and not what is called the cost: an idle process would give energy back."""
    values = parse_sample({7: sample}, 7)
    assert values is not None
    by_name = dict(zip(COMPONENTS, values, strict=True))
    assert np.nansum([by_name[part] for part in PARTS]) == pytest.approx(by_name["gauge total"] + 10)
    assert by_name["overhead"] == sample["energy.networkning.overhead"] - 10


def test_a_key_that_is_missing_is_unknown_and_not_zero() -> None:
    values = parse_sample({7: PUBLISHED[1]}, 7)
    assert values is not None
    assert math.isnan(values[KEYS.index("energy.display.cost")])


@pytest.mark.parametrize("reply", [{}, {8: gauge_sample()}, {7: {}}, None, "not started"])
def test_a_process_that_is_not_traced_has_no_sample(reply: Any) -> None:
    assert parse_sample(reply, 7) is None


@pytest.mark.parametrize("odd", [math.nan, math.inf, 1e300, 10**400, True, "40", None])
def test_a_cost_that_is_none_is_not_taken_for_one(odd: object) -> None:
    values = parse_sample({7: gauge_sample() | {"energy.gpu.cost": odd}}, 7)
    assert values is not None
    assert math.isnan(values[KEYS.index("energy.gpu.cost")])
    assert values[KEYS.index("energy.cpu.cost")] == 40.0


def test_an_answer_by_odd_keys_is_no_traceback() -> None:
    assert parse_sample({"seven": gauge_sample(), None: gauge_sample()}, 7) is None
    assert parse_sample({"7": gauge_sample()}, 7) is not None


@pytest.mark.parametrize(
    "sample",
    [
        {"energy.version": 1},
        {"energy.cpu.cost": 0.1},
        gauge_sample(age=0),
        dict.fromkeys(KEYS, 0) | {"kIDEGaugeSecondsSinceInitialQueryKey": 9},
    ],
)
def test_a_sample_that_says_nothing_of_the_time_since_the_last_has_no_values(sample: dict[str, float]) -> None:
    values = parse_sample({7: sample}, 7)
    assert values is not None
    assert all(math.isnan(v) for v in values)


# --- windows ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def quick(no_usbmuxd: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy_gauge, "READ_EVERY_S", 0.03)
    monkeypatch.setattr(energy_gauge, "FIRST_VALUE_TIMEOUT_S", 0.5)


@pytest.fixture
def fake() -> FakeIphone:
    return FakeIphone()


@pytest.fixture
def phone(tunneld: FakeTunneld) -> Iterator[Phone]:
    one = Phone("ios:", tunneld.address)
    yield one
    one.close()


@pytest.fixture
def meter(phone: Phone) -> EnergyGaugeMeter:
    return EnergyGaugeMeter(phone, APP, 0.01, CLOCK)


def every_update(sample: Callable[[int], dict[str, Any]]) -> Callable[[float], dict[str, Any]]:
    """A gauge that renews its sample every `UPDATE_S`, and repeats it meanwhile."""
    return lambda tracing_s: sample(int(tracing_s / UPDATE_S))


def test_units_of_a_window_are_rates_times_seconds_and_no_joules(fake: FakeIphone, meter: EnergyGaugeMeter) -> None:
    """CPU alternates between 40 and 60 from one update to the next, GPU is 25: 75 a second on average."""
    fake.gauge = every_update(lambda n: gauge_sample(cpu=40.0 + 20.0 * (n % 2), gpu=25.0))
    meter.open()
    meter.start()
    start_s = CLOCK.now_s()
    CLOCK.sleep_until_s(start_s + 2.0)
    end_s = CLOCK.now_s()
    traces = meter.stop()
    whole = energy_between(traces, [(start_s, end_s)], "all", "energy gauge")
    assert (whole.method, whole.energy_j, whole.reason) == ("relative gauge", None, NO_JOULES)
    assert whole.gauge_units is not None
    assert whole.gauge_units_uncertainty is not None
    assert whole.gauge_units == pytest.approx(75.0 * whole.duration_s, rel=0.05)
    assert abs(whole.gauge_units - 75.0 * whole.duration_s) < 4 * whole.gauge_units_uncertainty
    gpu = energy_between(traces, [(start_s, end_s)], "all", "energy gauge", component="gpu")
    assert gpu.gauge_units == pytest.approx(25.0 * gpu.duration_s)
    assert all(t.update_period_s == pytest.approx(UPDATE_S, abs=0.04) for t in traces)
    assert all("no joules" in str(t.note) for t in traces)
    assert eventually(lambda: fake.log[-1] == ("untrace", ENGINE_PID))


def test_early_samples_without_keys_are_waited_out(fake: FakeIphone, meter: EnergyGaugeMeter) -> None:
    """A window opens when there is a value: what lacked keys is not in it, and not zero."""
    whole = every_update(lambda n: gauge_sample(cpu=40.0 + n % 2))
    fake.gauge = lambda tracing_s: {"energy.version": 1} if tracing_s < 0.3 else whole(tracing_s)
    meter.open()
    begun_s = CLOCK.now_s()
    meter.start()
    assert CLOCK.now_s() - begun_s > 0.25
    time.sleep(0.5)
    cpu = next(t for t in meter.stop() if t.component == "cpu")
    assert cpu.values.min() >= 40.0


def test_zeros_between_samples_are_no_values(fake: FakeIphone, meter: EnergyGaugeMeter) -> None:
    zeros = dict.fromkeys(KEYS, 0)
    fake.gauge = every_update(lambda n: zeros if n % 2 else gauge_sample(cpu=40.0 + n))
    meter.open()
    meter.start()
    time.sleep(1.0)
    cpu = next(t for t in meter.stop() if t.component == "cpu")
    assert cpu.values.min() >= 40.0
    assert "samples had no value" in str(cpu.note)


@pytest.mark.parametrize(
    "fault",
    [{"energy.cpu.cost": 0}, {"energy.cpu.cost": 40_000.0, "energy.gpu.cost": 25_000.0, "energy.cost": 55_000.0}],
    ids=["a part fails", "the unit changes"],
)
def test_samples_whose_parts_do_not_sum_to_their_cost_are_no_values(
    fake: FakeIphone, meter: EnergyGaugeMeter, fault: dict[str, float]
) -> None:
    """Of 330 units 252 were told, or 129 000, without a word."""
    assert adds_up(np.array([parse_sample({7: sample}, 7) for sample in PUBLISHED])).all()
    fake.gauge = every_update(lambda n: gauge_sample(cpu=40.0 + n % 2) | (fault if 15 < n < 22 else {}))
    meter.open()
    meter.start()
    start_s = CLOCK.now_s()
    CLOCK.sleep_until_s(start_s + 3.0)
    end_s = CLOCK.now_s()
    whole = energy_between(meter.stop(), [(start_s, end_s)], "all", "energy gauge")
    assert whole.gauge_units is None
    assert "gap of" in str(whole.reason)
    assert "samples had parts that do not sum to their cost" in str(whole.reason)


def test_a_gauge_that_repeats_itself_for_ever_resolves_nothing(fake: FakeIphone, meter: EnergyGaugeMeter) -> None:
    fake.gauge = lambda tracing_s: gauge_sample()
    meter.open()
    meter.start()
    start_s = CLOCK.now_s()
    time.sleep(0.5)
    reading = energy_between(meter.stop(), [(start_s, CLOCK.now_s() - 0.05)], "all", "energy gauge")
    assert (reading.gauge_units, reading.energy_j) == (None, None)
    assert reading.reason is not None


@pytest.mark.parametrize(
    ("sample", "words"), [({}, "answers nothing for process"), ({"energy.version": 1}, "gives no cost for process")]
)
def test_an_empty_gauge_is_an_error_and_not_zero(
    fake: FakeIphone, meter: EnergyGaugeMeter, sample: dict[str, Any], words: str
) -> None:
    fake.gauge = lambda tracing_s: sample
    with pytest.raises(MeterUnavailableError, match=rf"{words} {ENGINE_PID} .*not 0, but unknown; .*iOS 18\.0"):
        meter.open()


def test_an_app_that_does_not_run_is_told(fake: FakeIphone, meter: EnergyGaugeMeter) -> None:
    fake.running.clear()
    with pytest.raises(DeviceError, match=rf"{APP} does not run on .*; start it first"):
        meter.open()


def test_an_app_that_ends_in_the_window_is_worth_a_retry(fake: FakeIphone, meter: EnergyGaugeMeter) -> None:
    meter.open()
    meter.start()
    fake.running.clear()
    time.sleep(0.3)
    with pytest.raises(TransientDeviceError, match=rf"process {ENGINE_PID} \({APP}\) is not traced any more"):
        meter.stop()
    fake.running[APP] = ENGINE_PID + 1
    meter.start()
    time.sleep(0.3)
    assert f"process {ENGINE_PID + 1}" in str(meter.stop()[0].note)


def test_a_cable_pulled_in_the_window_is_worth_a_retry(served: ServedIphone, meter: EnergyGaugeMeter) -> None:
    meter.open()
    meter.start()
    Timer(0.2, served.pull_cable).start()
    time.sleep(0.5)
    with pytest.raises(TransientDeviceError, match="the link broke"):
        meter.stop()
    served.plug_in()
    meter.start()
    time.sleep(0.3)
    assert len(meter.stop()) > 0


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [({"developer_mode": False}, "Developer Mode is off"), ({"image_mounted": False}, "no developer image is mounted")],
)
def test_a_phone_without_its_prerequisites_says_which(
    fake: FakeIphone, meter: EnergyGaugeMeter, changes: dict[str, bool], remedy: str
) -> None:
    for name, value in changes.items():
        setattr(fake, name, value)
    with pytest.raises(DeviceError, match=remedy):
        meter.open()


@pytest.mark.parametrize(
    ("image_mounted", "said"), [(False, "no developer image is mounted"), (True, f"{APP} does not run on")]
)
def test_what_a_restart_took_from_the_gauge_is_measured_again_another_day(
    fake: FakeIphone, served: ServedIphone, meter: EnergyGaugeMeter, image_mounted: bool, said: str
) -> None:
    """Each trial behind it failed for good: `--resume` measured none of them again."""
    meter.open()
    served.pull_cable()
    fake.running.clear()
    fake.image_mounted = image_mounted
    served.plug_in()
    with pytest.raises(DeviceError, match=said) as caught:
        meter.start()
    assert caught.value.is_lost
