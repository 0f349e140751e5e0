"""Finding a phone, and saying why it cannot be used: against a fake adb server at its socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from devices.android.device import lock_of
from devices.android.server import ServerAddress, find_phone, list_phones, server_address
from devices.android.shell import Phone, split_grep
from devices.base import DeviceError, TransientDeviceError
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.phone import FakePhone
from tests.free_ports import free_port


@pytest.fixture
def phone(tmp_path: Path) -> FakePhone:
    return FakePhone(tmp_path / "phone", serial="R58M42ABCDE")


@pytest.fixture
def server(phone: FakePhone) -> Iterator[FakeAdbServer]:
    with FakeAdbServer(phone) as running:
        yield running


def at(server: FakeAdbServer) -> ServerAddress:
    return ServerAddress("127.0.0.1", server.port)


@pytest.fixture
def silent_port() -> int:
    return free_port()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("127.0.0.1", 5037)),
        ({"ANDROID_ADB_SERVER_PORT": "6000"}, ("127.0.0.1", 6000)),
        ({"ANDROID_ADB_SERVER_ADDRESS": "lab", "ANDROID_ADB_SERVER_PORT": "6000"}, ("lab", 6000)),
        ({"ADB_SERVER_SOCKET": "tcp:lab:7000", "ANDROID_ADB_SERVER_PORT": "6000"}, ("lab", 7000)),
        ({"ADB_SERVER_SOCKET": "tcp:7000"}, ("127.0.0.1", 7000)),
    ],
)
def test_server_address_follows_adbs_own_variables(environment: dict[str, str], expected: tuple[str, int]) -> None:
    assert server_address(environment) == expected


@pytest.mark.parametrize(
    "environment", [{"ADB_SERVER_SOCKET": "localfilesystem:/tmp/adb"}, {"ANDROID_ADB_SERVER_PORT": "usual"}]
)
def test_an_address_that_is_not_understood_is_told(environment: dict[str, str]) -> None:
    with pytest.raises(DeviceError, match="unset it"):
        server_address(environment)


def test_no_server_is_told_with_the_remedy_and_none_is_started(
    silent_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    adb = tmp_path / "adb"
    adb.write_text(f"#!/bin/sh\ntouch {started}\n")
    adb.chmod(0o755)
    monkeypatch.setenv("ADBUTILS_ADB_PATH", str(adb))  # what adbutils would start a server with
    with pytest.raises(TransientDeviceError, match=rf"127\.0\.0\.1:{silent_port}.*adb start-server"):
        find_phone("adb:R58M42ABCDE", ServerAddress("127.0.0.1", silent_port))
    assert not started.exists()


def test_the_only_phone_needs_no_name(server: FakeAdbServer) -> None:
    assert find_phone("adb:", at(server)).serial == "R58M42ABCDE"


def test_no_phone_is_told(server: FakeAdbServer, phone: FakePhone) -> None:
    phone.pull_cable()
    with pytest.raises(TransientDeviceError, match="no phone is attached; plug one in"):
        find_phone("adb:", at(server))
    with pytest.raises(TransientDeviceError, match=r"R58M42ABCDE is not attached \(attached: none\)"):
        find_phone("adb:R58M42ABCDE", at(server))


def test_the_only_phone_is_not_exchanged_for_another(server: FakeAdbServer, phone: FakePhone, tmp_path: Path) -> None:
    """A run that begins with one phone ends with it, or fails."""
    link = Phone("adb:", at(server))
    assert link.serial == "R58M42ABCDE"
    phone.pull_cable()
    server.phones.append(FakePhone(tmp_path / "other", serial="emulator-5554"))
    with pytest.raises(TransientDeviceError, match=r"R58M42ABCDE is not attached \(attached: emulator-5554\)"):
        link.reach()


def test_two_phones_and_none_named_is_an_error_that_names_both(server: FakeAdbServer, tmp_path: Path) -> None:
    server.phones.append(FakePhone(tmp_path / "other", serial="emulator-5554"))
    with pytest.raises(DeviceError, match=r"2 devices attached; name one .*\(R58M42ABCDE, emulator-5554\)") as error:
        find_phone("adb:", at(server))
    assert not isinstance(error.value, TransientDeviceError)
    assert find_phone("adb:emulator-5554", at(server)).serial == "emulator-5554"


@pytest.mark.parametrize(
    ("state", "passes", "remedy"),
    [
        ("offline", True, "adb reconnect offline"),
        ("authorizing", True, "unlock"),
        ("unauthorized", False, "accept 'Allow USB debugging'"),
        ("no permissions (user in plugdev group; are your udev rules wrong?)", False, "udev rules"),
        ("bootloader", False, "start Android"),
    ],
)
def test_a_phone_that_is_not_ready_is_told_with_its_remedy(
    server: FakeAdbServer, phone: FakePhone, state: str, passes: bool, remedy: str
) -> None:
    phone.state = state
    with pytest.raises(DeviceError, match=remedy) as error:
        find_phone("adb:R58M42ABCDE", at(server))
    assert isinstance(error.value, TransientDeviceError) == passes
    [listed] = list_phones(at(server))
    assert listed.remedy is not None
    assert remedy in listed.remedy


def test_the_list_has_what_is_ready_too(server: FakeAdbServer) -> None:
    assert [(p.name, p.state, p.remedy) for p in list_phones(at(server))] == [("adb:R58M42ABCDE", "device", None)]


def test_a_phone_on_the_network_is_connected_first(tmp_path: Path) -> None:
    with FakeAdbServer(FakePhone(tmp_path, serial="192.168.1.7:5555")) as server:
        assert find_phone("adb:192.168.1.7:5555", at(server)).serial == "192.168.1.7:5555"
        assert "host:connect:192.168.1.7:5555" in server.requests


def test_a_phone_that_left_the_network_is_told(tmp_path: Path) -> None:
    phone = FakePhone(tmp_path, serial="192.168.1.7:5555")
    phone.reachable = False
    with (
        FakeAdbServer(phone) as server,
        pytest.raises(TransientDeviceError, match=r"Connection refused.*in this network"),
    ):
        find_phone("adb:192.168.1.7:5555", at(server))


def test_an_address_that_leads_to_another_phone_by_now_is_not_believed(tmp_path: Path) -> None:
    """Two phones of one model: a router gives the address of the one that left to the other."""
    address = "192.168.1.7:5555"
    first, other = (FakePhone(tmp_path / name, serial=address) for name in ("first", "other"))
    first.answer("getprop ro.serialno", "R58M42ABCDE\n")
    other.answer("getprop ro.serialno", "R58M42FGHIJ\n")
    with FakeAdbServer(first) as server:
        link = Phone(f"adb:{address}", at(server))
        link.reach()
        first.drop_link()
        server.phones[:] = [other]
        with pytest.raises(DeviceError, match=r"leads to another phone now .*R58M42FGHIJ, it was R58M42ABCDE") as error:
            link.reach()
        assert not isinstance(error.value, TransientDeviceError)
        server.phones[:] = [first]
        link.reach()


@pytest.mark.parametrize(
    ("says", "other_says", "are_one"),
    [
        ("R58M42ABCDE", "R58M42ABCDE", True),
        ("R58M42ABCDE", "R58M42FGHIJ", False),
        ("EMULATOR30X3X5X0", "EMULATOR30X3X5X0", False),
        ("", "", False),
    ],
)
def test_a_phone_by_usb_and_by_the_network_has_one_lock(
    tmp_path: Path, says: str, other_says: str, are_one: bool
) -> None:
    """Also where two servers lead to it."""
    by_usb, by_network = (FakePhone(tmp_path / s.replace(":", "-"), serial=s) for s in ("R58M42ABCDE", "10.0.0.7:5555"))
    by_usb.answer("getprop ro.serialno", f"{says}\n")
    by_network.answer("getprop ro.serialno", f"{other_says}\n")
    with FakeAdbServer(by_usb) as server, FakeAdbServer(by_network) as other:
        paths = set()
        for name, address in (("adb:", at(server)), ("adb:10.0.0.7:5555", at(other))):
            phone = Phone(name, address)
            phone.reach()
            lock = lock_of(phone, tmp_path / "state", address)
            lock.take()
            paths.add(lock.held()[0])
            lock.release()
        assert (len(paths) == 1) == are_one


def test_android_6_is_refused(server: FakeAdbServer, phone: FakePhone) -> None:
    phone.features = ["cmd"]
    with pytest.raises(DeviceError, match="Android 7 is needed"):
        Phone("adb:", at(server)).reach()


def test_a_command_gives_output_errors_and_exit_code(server: FakeAdbServer) -> None:
    result = Phone("adb:", at(server)).run("echo out; echo err >&2; exit 3")
    assert result == ("out\n", "err\n", 3)


def test_a_command_that_does_not_end_meets_its_limit(server: FakeAdbServer) -> None:
    for command in ("sleep 3600", "while :; do echo chatty; sleep 0.01; done"):
        with pytest.raises(TransientDeviceError, match=r"no answer in time|has not ended"):
            Phone("adb:", at(server)).run(command, timeout_s=0.3)


def test_files_come_back_as_they_went(server: FakeAdbServer, tmp_path: Path) -> None:
    sent = bytes(range(256)) * 4096  # 1 MiB: more than a socket takes at once
    (tmp_path / "sent").write_bytes(sent)
    phone = Phone("adb:", at(server))
    phone.push(tmp_path / "sent", "/data/local/tmp/model.bin")
    phone.pull("/data/local/tmp/model.bin", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == sent
    assert phone.run("[ -x /data/local/tmp/model.bin ]").exit_code == 0


def test_a_push_where_the_shell_may_not_write_is_told(server: FakeAdbServer, tmp_path: Path) -> None:
    (tmp_path / "sent").write_bytes(b"1")
    with pytest.raises(DeviceError, match=r"Permission denied.*/data/local/tmp"):
        Phone("adb:", at(server)).push(tmp_path / "sent", "/system/model.bin")


def test_a_pull_of_nothing_is_told(server: FakeAdbServer, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="No such file"):
        Phone("adb:", at(server)).pull("/data/local/tmp/absent", tmp_path / "back")


def test_a_killed_and_restarted_server_is_found_again(server: FakeAdbServer) -> None:
    phone = Phone("adb:R58M42ABCDE", at(server))
    assert phone.run("echo 1").stdout == "1\n"
    server.stop()
    with pytest.raises(TransientDeviceError):
        phone.run("echo 2")
    server.start()
    phone.reach(limit_s=2.0)
    assert phone.run("echo 3").stdout == "3\n"


def test_reading_files_is_one_round_trip_and_leaves_out_the_unreadable(server: FakeAdbServer, phone: FakePhone) -> None:
    for core in range(2):
        phone.file(f"/sys/devices/system/cpu/cpu{core}/cpufreq/related_cpus", "0 1\n")
    reader = Phone("adb:", at(server))
    reader.reach()
    asked = len(server.requests)
    files = reader.read_files(["/sys/devices/system/cpu/cpu*/cpufreq/related_cpus", "/sys/absent"])
    assert files == {f"/sys/devices/system/cpu/cpu{core}/cpufreq/related_cpus": "0 1\n" for core in range(2)}
    assert server.requests[asked:].count("host:tport:serial:R58M42ABCDE") == 1


def test_split_grep_keeps_colons_and_blank_lines_of_a_file() -> None:
    text = "/proc/cpuinfo:processor\t: 0\n/proc/cpuinfo:\n/proc/cpuinfo:processor\t: 1\ngrep: /x: denied\n"
    assert split_grep(text) == {"/proc/cpuinfo": "processor\t: 0\n\nprocessor\t: 1\n"}
