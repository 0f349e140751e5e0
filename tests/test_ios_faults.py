"""What an iPhone, its services or tunneld answer wrongly: told in its own row, and never at the cost of the others."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pymobiledevice3", reason="the extra joulebench[ios] is not installed")

from devices.attached_meter import AttachedMeter
from devices.base import DeviceError, MeterUnavailableError, TransientDeviceError
from devices.clock import MonotonicClock
from devices.gates import Gates
from devices.ios import battery as battery_module
from devices.ios.device import IosDevice
from devices.ios.phone import Phone
from devices.ios.state import PhoneFacts
from devices.ios.survey import attached_phones
from results.energy import energy_between
from results.records import EnergyReading
from tests.fakes.ios_phone import BATTERY, UDID, FakeIphone, Plist, ServedIphone
from tests.fakes.ios_tunneld import FakeTunneld

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("clock", "no_usbmuxd")]

CLOCK = MonotonicClock()
OTHER_UDID = "00008110-000000000000BEEF"
UPDATE_S = 0.1


@pytest.fixture
def fake() -> FakeIphone:
    return FakeIphone()


def discharging(**changes: object) -> Plist:
    """2 W: 400 and 600 mA at 4 V, in turns, renewed every `UPDATE_S`."""
    n = int(CLOCK.now_s() / UPDATE_S)
    return BATTERY | {"InstantAmperage": -(400 + 200 * (n % 2)), "Voltage": 4000, "UpdateTime": 10**9 + n} | changes


def rows_of(tunneld: FakeTunneld, udid: str = UDID) -> dict[str, AttachedMeter]:
    return {row.meter: row for row in attached_phones(tunneld.address) if row.device == f"ios:{udid}"}


# --- services --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("lockdown drops", "dropped its lockdown connection"),
        ("diagnostics bad plist", "its answer cannot be understood"),
        ("diagnostics no plist", "its answer cannot be understood"),
        ("diagnostics no dictionary", "pymobiledevice3 failed"),
        ("diagnostics no registry", "it shows no battery"),
        ("diagnostics refuse", "failed the IORegistry query"),
        ("locked", "the phone is locked; unlock it with its passcode"),
    ],
)
def test_a_phone_whose_services_fail_keeps_its_row_and_those_of_the_others(
    fake: FakeIphone, served: ServedIphone, fault: str, said: str
) -> None:
    fake.faults.add(fault)
    with ServedIphone(FakeIphone(udid=OTHER_UDID)) as other, FakeTunneld([served, other]) as tunneld:
        row = rows_of(tunneld)["battery"]
        assert not row.ready
        assert said in row.remark
        assert [r.ready for r in rows_of(tunneld, OTHER_UDID).values()] == [True, True]


@pytest.mark.parametrize("fault", ["instruments garbage", "instruments close"])
def test_broken_instruments_cost_the_energy_gauge_and_not_the_battery(
    fake: FakeIphone, tunneld: FakeTunneld, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(battery_module, "READ_EVERY_S", 0.03)
    monkeypatch.setattr(battery_module, "OBSERVE_S", 0.3)
    fake.faults.add(fault)
    fake.battery = discharging
    rows = rows_of(tunneld)
    assert rows["battery"].ready, rows["battery"].remark
    assert not rows["energy gauge"].ready
    device = IosDevice("ios:", 0.01, CLOCK, Gates(wait_s=0.0), tunneld=tunneld.address)
    device.open()
    assert device.environment().n_cores is None
    device.close()


def test_a_lockdown_that_is_dropped_later_is_told(fake: FakeIphone, tunneld: FakeTunneld) -> None:
    fake.faults.add("lockdown drops later")
    fake.image_mounted = False
    rows = rows_of(tunneld)
    assert rows["battery"].ready
    assert "dropped its lockdown connection" in rows["energy gauge"].remark


def test_what_escapes_in_one_phones_survey_costs_its_row_alone(
    served: ServedIphone, monkeypatch: pytest.MonkeyPatch
) -> None:
    def survey_of(phone: Phone) -> PhoneFacts:
        if phone.udid == UDID:
            raise KeyError("ProductName")
        return facts(phone)

    facts = Phone.facts
    monkeypatch.setattr(Phone, "facts", survey_of)
    with ServedIphone(FakeIphone(udid=OTHER_UDID)) as other, FakeTunneld([served, other]) as tunneld:
        assert "its survey failed (KeyError: 'ProductName')" in rows_of(tunneld)["battery"].remark
        assert [r.ready for r in rows_of(tunneld, OTHER_UDID).values()] == [True, True]


def test_whatever_the_library_raises_is_our_error(tunneld: FakeTunneld) -> None:
    async def bug(link: object) -> None:
        raise RecursionError("deep in the library")

    phone = Phone("ios:", tunneld.address)
    with pytest.raises(TransientDeviceError, match=r"battery: pymobiledevice3 failed \(RecursionError: deep in"):
        phone.ask(bug, "battery")
    assert phone.battery() is not None  # on a new link
    phone.close()


# --- tunneld ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"[1, 2]",
        b'"x"',
        b"3",
        b"null",
        b"[" * 100_000,
        b'{"\\u001b[2Jx": []}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_list_of_tunnels_is_told_with_the_remedy(tunneld: FakeTunneld, body: bytes) -> None:
    tunneld.body = body
    [row] = attached_phones(tunneld.address)
    assert (row.device, row.ready) == ("ios:", False)
    assert f"what listens at 127.0.0.1:{tunneld.address.port} is no tunneld" in row.remark
    assert "remote tunneld" in row.remark


@pytest.mark.parametrize(
    "entries",
    [
        None,
        5,
        "x",
        {},
        [],
        [None],
        [5],
        [{}],
        [{"tunnel-address": "127.0.0.1"}],
        [{"tunnel-address": "127.0.0.1", "tunnel-port": "x"}],
        [{"tunnel-address": "127.0.0.1", "tunnel-port": 10**20}],
        [{"tunnel-address": "no.such.host.example", "tunnel-port": 5}],
    ],
)
def test_an_odd_entry_costs_its_own_phone_only(served: ServedIphone, tunneld: FakeTunneld, entries: object) -> None:
    tunneld.body = json.dumps({OTHER_UDID: entries} | tunneld.tunnels()).encode()
    assert [row.ready for row in rows_of(tunneld).values()] == [True, True]
    assert not rows_of(tunneld, OTHER_UDID)


def test_a_list_without_end_is_not_read_to_its_end(tunneld: FakeTunneld) -> None:
    tunneld.body = b"{" + b" " * (2 << 20)
    [row] = attached_phones(tunneld.address)
    assert "longer than 1048576 bytes" in row.remark


def test_a_tunneld_that_drips_holds_neither_the_answer_nor_the_end_of_the_program(tunneld: FakeTunneld) -> None:
    tunneld.drips = True
    code = f"""
from devices.ios import tunneld
from devices.ios.state import PhoneFacts
from devices.ios.survey import attached_phones
print(attached_phones(tunneld.TunneldAddress("127.0.0.1", {tunneld.address.port})))
"""
    # It drips until this test is over: the library's own client waited for ever, and so did the end of the program.
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True
    )
    assert "has not answered in 4 s" in ended.stdout


def test_a_tunnel_that_leads_to_another_phone_is_not_believed(
    fake: FakeIphone, served: ServedIphone, tunneld: FakeTunneld
) -> None:
    fake.answers_as = OTHER_UDID
    phone = Phone(f"ios:{UDID}", tunneld.address)
    with pytest.raises(TransientDeviceError, match=rf"leads to another phone \({OTHER_UDID}\).*restart tunneld"):
        phone.reach()
    phone.close()
    assert not any(row.ready for row in attached_phones(tunneld.address))


# --- what the battery says -------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(battery_module, "READ_EVERY_S", 0.03)
    monkeypatch.setattr(battery_module, "OBSERVE_S", 0.5)


def opened(tunneld: FakeTunneld) -> IosDevice:
    device = IosDevice(f"ios:{UDID}", 0.01, CLOCK, Gates(wait_s=0.0), tunneld=tunneld.address)
    device.open()
    return device


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"Voltage": 4}, "tells -500 mA at 0.004 V.*not in the unit"),
        ({"Voltage": 4_000_000}, "tells -500 mA at 4000 V.*not in the unit"),
        ({"InstantAmperage": True}, "tells no current of its battery"),
        ({"InstantAmperage": "500"}, "tells no current of its battery"),
        ({"Voltage": math.nan}, "tells -500 mA at nan V"),
    ],
)
def test_a_current_or_voltage_that_is_no_phones_is_refused_when_it_is_opened(
    fake: FakeIphone, tunneld: FakeTunneld, changes: Plist, said: str
) -> None:
    fake.battery = lambda: discharging(**({"InstantAmperage": -500} | changes))
    device = IosDevice(f"ios:{UDID}", 0.01, CLOCK, Gates(wait_s=0.0), tunneld=tunneld.address)
    with pytest.raises(MeterUnavailableError, match=said):
        device.open()
    device.close()


def window(device: IosDevice, fake: FakeIphone, changes: Plist, seconds: float = 0.6) -> EnergyReading:
    """A window in whose middle the battery says something else."""
    [meter] = device.meters
    meter.start()
    start_s = CLOCK.now_s()
    CLOCK.sleep_until_s(start_s + seconds)
    fake.battery = lambda: discharging(**changes)
    CLOCK.sleep_until_s(start_s + 2 * seconds)
    fake.battery = discharging
    CLOCK.sleep_until_s(start_s + 3 * seconds)
    end_s = CLOCK.now_s()
    traces = meter.stop()
    return energy_between(traces, [(start_s, end_s)], "all", meter.name)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "changes", [{"InstantAmperage": 0}, {"InstantAmperage": 700}, {"Voltage": 4}, {"InstantAmperage": "x"}]
)
def test_a_stretch_of_readings_that_are_no_phones_is_a_gap_and_no_joules(
    fake: FakeIphone, tunneld: FakeTunneld, changes: Plist
) -> None:
    fake.battery = discharging
    device = opened(tunneld)
    reading = window(device, fake, changes)
    assert reading.energy_j is None
    assert "gap of" in str(reading.reason)
    device.close()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("changes", [{"UpdateTime": math.nan}, {"UpdateTime": math.inf}])
def test_a_time_of_renewal_that_is_no_time_costs_nothing(
    fake: FakeIphone, tunneld: FakeTunneld, changes: Plist
) -> None:
    fake.battery = discharging
    device = opened(tunneld)
    reading = window(device, fake, changes)
    assert reading.energy_j == pytest.approx(2.0 * reading.duration_s, rel=0.1)
    device.close()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "vanished", [{"ExternalConnected": "", "IsCharging": ""}, {"ExternalConnected": ""}], ids=["both", "the cable's"]
)
def test_charging_keys_that_vanish_in_a_window_are_not_taken_for_no_charger(
    fake: FakeIphone, tunneld: FakeTunneld, vanished: Plist
) -> None:
    fake.battery = discharging
    device = opened(tunneld)
    with pytest.raises(TransientDeviceError, match="did not say whether it charges in"):
        window(device, fake, vanished, 0.2)
    device.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"Temperature": math.nan}, "tells nan degC, which no battery has"),
        ({"Temperature": -math.inf}, "tells -inf degC, which no battery has"),
        ({"CurrentCapacity": math.nan}, "tells a level of nan %"),
        ({"MaxCapacity": math.nan}, "tells a level of nan %"),
        ({"CurrentCapacity": 8200}, "tells a level of 8200 %"),
        ({"ExternalConnected": None}, "does not say whether it charges"),
        ({"InstantAmperage": 0}, r"tells \+0 mA, not a negative one"),
        ({"InstantAmperage": 520}, r"tells \+520 mA.*charging pad or battery case"),
    ],
)
def test_a_figure_that_is_none_opens_no_gate(fake: FakeIphone, tunneld: FakeTunneld, changes: Plist, said: str) -> None:
    fake.battery = lambda: {k: v for k, v in discharging(**changes).items() if v is not None}
    device = IosDevice(f"ios:{UDID}", 0.01, CLOCK, Gates(wait_s=0.0), tunneld=tunneld.address)
    with pytest.raises(DeviceError, match=said):
        device.open()
    device.close()
