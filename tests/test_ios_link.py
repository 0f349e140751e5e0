"""Ways to an iPhone: through tunneld and without root, whom a name means, and what is said where there is no way."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("pymobiledevice3", reason="the extra joulebench[ios] is not installed")

from typer.testing import CliRunner

from devices.base import DeviceError, MeterUnavailableError, TransientDeviceError
from devices.ios.phone import Phone
from devices.ios.survey import attached_phones, ready_for_apps
from devices.ios.tunneld import TunneldAddress
from harness.commands import app
from harness.terminal import EXIT_DEVICE_NOT_READY
from tests.fakes.ios_phone import UDID, FakeIphone, ServedIphone
from tests.fakes.ios_tunneld import FakeTunneld
from tests.fakes.ios_usbmuxd import FakeUsbmuxd

pytestmark = pytest.mark.usefixtures("no_usbmuxd")

NOBODY = TunneldAddress("127.0.0.1", 1)
OTHER_UDID = "00008110-000000000000BEEF"


@pytest.fixture
def fake() -> FakeIphone:
    return FakeIphone()


@pytest.mark.parametrize("name", [f"ios:{UDID}", f"ios:{UDID.replace('-', '').lower()}", "ios:"])
def test_a_phone_is_found_through_tunneld(tunneld: FakeTunneld, name: str) -> None:
    phone = Phone(name, tunneld.address)
    facts = phone.facts()
    assert (facts.udid, facts.model, facts.os) == (UDID, "iPhone17,1", "iPhone OS 18.5 (22F76)")
    assert (facts.architecture, facts.n_cores) == ("arm64e", 6)
    assert phone.way == f"tunneld at 127.0.0.1:{tunneld.address.port}"
    phone.close()


def test_a_phone_on_a_cable_is_reached_without_root(
    fake: FakeIphone, served: ServedIphone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through usbmuxd, lockdown, and TCP in IPv6 in the tunnel, to the same services."""
    with FakeUsbmuxd(served) as usbmuxd:
        monkeypatch.setenv("USBMUXD_SOCKET_ADDRESS", usbmuxd.address)
        phone = Phone(f"ios:{UDID}", NOBODY)
        assert phone.facts().n_cores == 6
        assert phone.way == "root-free tunnel"
        battery = phone.battery()
        assert battery is not None
        assert battery.power_w == pytest.approx(0.520 * 4.012)
        assert phone.find_process("com.example.engine") == fake.running["com.example.engine"]
        phone.close()


def test_a_tunnel_without_root_is_built_again_after_the_cable_was_pulled(
    served: ServedIphone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeUsbmuxd(served) as usbmuxd:
        monkeypatch.setenv("USBMUXD_SOCKET_ADDRESS", usbmuxd.address)
        phone = Phone("ios:", NOBODY, answer_timeout_s=3.0)
        assert phone.battery() is not None
        served.pull_cable()
        with pytest.raises(TransientDeviceError):
            phone.battery()
        served.plug_in()
        phone.reach(limit_s=10.0)
        assert phone.battery() is not None
        phone.close()


def test_a_phone_that_does_not_trust_this_computer_says_what_to_tap(
    served: ServedIphone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeUsbmuxd(served, trusted=False) as usbmuxd:
        monkeypatch.setenv("USBMUXD_SOCKET_ADDRESS", usbmuxd.address)
        phone = Phone(f"ios:{UDID}", NOBODY)
        with pytest.raises(DeviceError, match=r"does not trust this computer.*tap Trust"):
            phone.reach()
        phone.close()


def test_without_tunneld_and_usbmuxd_both_are_named_with_their_remedies() -> None:
    phone = Phone("ios:", NOBODY)
    with pytest.raises(TransientDeviceError) as caught:
        phone.reach()
    for words in ("tunneld does not run at 127.0.0.1:1", "sudo python3 -m pymobiledevice3 remote tunneld", "usbmuxd"):
        assert words in str(caught.value)
    phone.close()


def test_a_phone_that_comes_later_is_waited_for(served: ServedIphone, tunneld: FakeTunneld) -> None:
    tunneld.phones.clear()
    phone = Phone("ios:", tunneld.address)
    with pytest.raises(TransientDeviceError, match="no tunnel to a phone"):
        phone.reach()
    with pytest.raises(TransientDeviceError, match="no tunnel to a phone"):
        phone.reach(limit_s=0.2, every_s=0.05)
    tunneld.phones.append(served)
    phone.reach(limit_s=5.0, every_s=0.05)
    assert phone.udid == UDID
    phone.close()


def test_two_phones_and_none_named_lists_both(served: ServedIphone) -> None:
    with ServedIphone(FakeIphone(udid=OTHER_UDID)) as other, FakeTunneld([served, other]) as tunneld:
        phone = Phone("ios:", tunneld.address)
        with pytest.raises(
            DeviceError, match=rf"2 devices are in reach; name one with ios:UDID \({OTHER_UDID}, {UDID}\)"
        ):
            phone.reach()
        phone.close()
        named = Phone(f"ios:{OTHER_UDID}", tunneld.address)
        assert named.facts().udid == OTHER_UDID
        named.close()


def test_a_phone_that_is_not_there_is_told_from_those_that_are(tunneld: FakeTunneld) -> None:
    phone = Phone(f"ios:{OTHER_UDID}", tunneld.address)
    with pytest.raises(TransientDeviceError, match=rf"{OTHER_UDID} is not in reach \(in reach: {UDID}\)"):
        phone.reach()
    phone.close()


def test_a_tunnel_that_died_is_told(served: ServedIphone) -> None:
    served.rsd_port = 1
    with FakeTunneld([served]) as tunneld:
        phone = Phone("ios:", tunneld.address)
        with pytest.raises(TransientDeviceError, match="tunnel that tunneld lists does not answer"):
            phone.reach()
        phone.close()


def test_a_link_that_broke_is_opened_again_by_the_next_question(served: ServedIphone, tunneld: FakeTunneld) -> None:
    phone = Phone("ios:", tunneld.address)
    assert phone.find_process("com.example.engine") is not None
    served.pull_cable()
    with pytest.raises(TransientDeviceError, match="the link broke"):
        phone.find_process("com.example.engine")
    served.plug_in()
    assert phone.find_process("com.example.engine") is not None
    phone.close()


def test_the_only_phone_is_not_exchanged_for_another(served: ServedIphone, tunneld: FakeTunneld) -> None:
    phone = Phone("ios:", tunneld.address)
    assert phone.udid == UDID
    with ServedIphone(FakeIphone(udid=OTHER_UDID)) as other:
        tunneld.phones[:] = [other]
        served.pull_cable()
        with pytest.raises(TransientDeviceError):
            phone.battery()
        with pytest.raises(TransientDeviceError, match=rf"{UDID} is not in reach \(in reach: {OTHER_UDID}\)"):
            phone.battery()
    phone.close()


def test_a_phone_that_does_not_answer_is_given_up_at_the_limit(fake: FakeIphone, tunneld: FakeTunneld) -> None:
    phone = Phone("ios:", tunneld.address, answer_timeout_s=0.3)
    phone.reach()
    fake.delay_s = 3600.0
    with pytest.raises(TransientDeviceError, match=r"battery: no answer in 0\.3 s"):
        phone.battery()
    phone.close()


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"developer_mode": False}, "Developer Mode is off; turn it on in Settings"),
        ({"image_mounted": False}, "no developer image is mounted .*mounter auto-mount"),
    ],
)
def test_what_the_instruments_lack_is_said_with_its_remedy(changes: dict[str, bool], remedy: str) -> None:
    with ServedIphone(FakeIphone(**changes)) as served, FakeTunneld([served]) as tunneld:  # type: ignore[arg-type]
        phone = Phone("ios:", tunneld.address)
        with pytest.raises(DeviceError, match=remedy):
            phone.launch("com.example.engine")
        # The battery needs neither.
        assert phone.battery() is not None
        assert phone.facts().n_cores is None
        phone.close()


def test_a_home_that_cannot_be_written_is_no_broken_link(tunneld: FakeTunneld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pymobiledevice3.common._HOMEFOLDER", Path("/dev/null/pymobiledevice3"))
    with pytest.raises(DeviceError, match=r"cannot use /dev/null.*set HOME to a folder that can be written") as raised:
        Phone("ios:", tunneld.address).reach()
    assert not isinstance(raised.value, TransientDeviceError)


def test_without_the_library_its_install_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymobiledevice3", None)
    with pytest.raises(MeterUnavailableError, match=r"pip install 'joulebench\[ios\]'"):
        Phone("ios:").reach()
    [row] = attached_phones(NOBODY)
    assert (row.ready, row.device) == (False, "ios:")
    assert "pip install" in row.remark


def test_the_doctor_of_engines_says_whether_an_app_could_be_started(
    fake: FakeIphone, tunneld: FakeTunneld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("devices.ios.survey.TUNNELD", tunneld.address)
    done = CliRunner().invoke(app, ["engines", "doctor", "--device", "ios:"])
    assert done.exit_code == 0
    assert done.stderr == f"ios: there and ready ({UDID}, iPhone17,1, iPhone OS 18.5 (22F76))\n"
    fake.developer_mode = False
    why = "no app can be started on it: .*Developer Mode is off; turn it on in Settings"
    with pytest.raises(DeviceError, match=why):
        ready_for_apps(f"ios:{UDID}", tunneld.address)
    monkeypatch.setattr("devices.ios.survey.TUNNELD", NOBODY)
    done = CliRunner().invoke(app, ["engines", "doctor", "--device", "ios:00008110-000E"])
    assert done.exit_code == EXIT_DEVICE_NOT_READY
    assert "mnn-app" in done.stdout
    assert done.stderr.startswith("ios:00008110-000E: not there or not ready: ")


# --- joulebench devices ----------------------------------------------------------------------------------------------


def test_the_survey_says_what_each_phone_is_ready_for(fake: FakeIphone, tunneld: FakeTunneld) -> None:
    battery, gauge = attached_phones(tunneld.address)
    assert battery[:4] == (f"ios:{UDID}", "battery", "battery gauge", True)
    assert gauge[:4] == (f"ios:{UDID}", "energy gauge", "relative gauge", True)
    assert "no joules" in gauge.remark
    fake.developer_mode = False
    fake.battery = lambda: {"Voltage": 4300, "InstantAmperage": 900, "ExternalConnected": True}
    battery, gauge = attached_phones(tunneld.address)
    assert (battery.ready, gauge.ready) == (False, False)
    assert "take it off every cable" in battery.remark
    assert "Developer Mode is off" in gauge.remark


def test_the_survey_of_nothing_says_why() -> None:
    [row] = attached_phones(NOBODY)
    assert not row.ready
    assert "tunneld does not run" in row.remark


def test_a_usbmuxd_that_never_says_anything_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("USBMUXD_SOCKET_ADDRESS", f"127.0.0.1:{silent.getsockname()[1]}")
        [row] = attached_phones(NOBODY)
    assert "usbmuxd does not answer" in row.remark
