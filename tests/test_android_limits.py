"""What a phone or a server may send: limits of time and size for whole answers, and answers that make no sense."""

from __future__ import annotations

import itertools
import resource
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.android import server as server_module
from devices.android import shell as shell_module
from devices.android.gates import why_not_ready
from devices.android.gauge_loop import GaugeLoop, loop_script
from devices.android.processes import parse_process_cpu_s, split_account
from devices.android.server import ServerAddress, find_phone, list_phones
from devices.android.shell import EXIT, Phone
from devices.android.state import parse_facts, parse_properties, parse_state, read_facts, read_state, split_sections
from devices.android.topology import MAX_CORES, parse_core_list, parse_cpuinfo
from devices.base import DeviceError, TransientDeviceError
from devices.clock import MonotonicClock
from devices.gates import Gates
from tests.fakes.adb_server import FakeAdbServer, okay
from tests.fakes.phone import DISCHARGING, STDOUT, THERMAL, FakePhone

ODD = ("9" * 5000, "\u00b2", "-", "\0", "0x", "1e300", "nan", "\u0663", "0-4000000000", "0-99", "\n", ":", "zz", ")")
BYTE_EVERY_S = 0.05
LIMIT_S = 0.4
OR_LATE = "no answer in time"
"""Where the machine stood still while a packet was waited for: the limit is met there, and none without it."""


@pytest.fixture
def phone(server: FakeAdbServer) -> Phone:
    found = Phone("adb:", ServerAddress("127.0.0.1", server.port))
    found.reach()
    return found


def dripping(first: bytes, again: bytes = b"x") -> Callable[[socket.socket], None]:
    """A byte now and then, and no end: who comes back at all has a limit for the whole of it."""

    def speak(link: socket.socket) -> None:
        with suppress(OSError):
            for byte in itertools.chain(first, itertools.cycle(again)):
                link.sendall(bytes([byte]))
                time.sleep(BYTE_EVERY_S)

    return speak


class Endless:
    """Sends as fast as somebody takes it. n_sent: bytes so far."""

    def __init__(self, first: bytes) -> None:
        self._first, self.n_sent = first, 0

    def __call__(self, link: socket.socket) -> None:
        with suppress(OSError):
            link.sendall(self._first)
            while True:
                self.n_sent += link.send(bytes(1 << 16))


def packet(packet_id: int, payload: bytes) -> bytes:
    return struct.pack("<BI", packet_id, len(payload)) + payload


def test_a_byte_now_and_then_meets_the_limit_of_the_whole_command(fake: FakePhone, phone: Phone) -> None:
    fake.speaks = dripping(packet(STDOUT, b"x" * 1_000_000))
    begun_s = time.monotonic()
    with pytest.raises(TransientDeviceError, match="no answer in time"):
        phone.run("true", timeout_s=LIMIT_S)
    assert time.monotonic() - begun_s >= LIMIT_S


def test_a_server_that_drips_meets_the_limit_of_an_answer(
    server: FakeAdbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "ANSWER_TIMEOUT_S", LIMIT_S)
    server.speaks = dripping(b"OKAYffff")  # 65,535 bytes, which take an hour
    begun_s = time.monotonic()
    with pytest.raises(TransientDeviceError, match="no answer in time"):
        list_phones(ServerAddress("127.0.0.1", server.port))
    assert time.monotonic() - begun_s >= LIMIT_S


def test_a_gauge_that_drips_ends_its_window(fake: FakePhone, phone: Phone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devices.android.gauge_loop.SILENCE_S", LIMIT_S)
    fake.speaks = dripping(packet(STDOUT, b"S,1,1,1,1\n" * 50_000))
    loop = GaugeLoop(phone, loop_script("c=1; v=1", 0.05), MonotonicClock())
    with pytest.raises(TransientDeviceError, match="no answer in time"):
        loop.start()


def flooding(content: bytes) -> Callable[[socket.socket], None]:
    def speak(link: socket.socket) -> None:
        with suppress(OSError):
            while True:
                link.sendall(content * 1000)

    return speak


@pytest.mark.parametrize("content", [packet(STDOUT, b""), packet(9, b"x")])
def test_packets_without_a_line_meet_the_limit_of_a_line(fake: FakePhone, phone: Phone, content: bytes) -> None:
    fake.speaks = flooding(content)
    stream = phone.stream("true")
    with pytest.raises(TransientDeviceError, match=rf"has not written a line after 0\.4 s|{OR_LATE}"):
        stream.await_line(STDOUT, LIMIT_S)
    stream.close()


@pytest.mark.parametrize("content", [packet(STDOUT, b""), packet(STDOUT, b"M,1,1,99\n"), packet(9, b"x")])
def test_packets_without_a_sample_are_silence(
    fake: FakePhone, phone: Phone, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr("devices.android.gauge_loop.SILENCE_S", LIMIT_S)
    fake.speaks = flooding(content)
    loop = GaugeLoop(phone, loop_script("c=1; v=1", 0.05), MonotonicClock())
    with pytest.raises(TransientDeviceError, match=rf"has not sent a sample for 0\.4 s|{OR_LATE}"):
        loop.start()


def test_readings_farther_apart_than_silence_are_none(phone: Phone, monkeypatch: pytest.MonkeyPatch) -> None:
    """`record --interval 10`."""
    monkeypatch.setattr("devices.android.gauge_loop.SILENCE_S", LIMIT_S)
    period_s = 2 * LIMIT_S
    loop = GaugeLoop(phone, loop_script("c=1; v=1", period_s), MonotonicClock(), period_s)
    loop.start()
    time.sleep(2.5 * period_s)
    assert len(loop.stop().current) >= 3


def test_the_longest_distance_of_two_readings_is_no_silence() -> None:
    """It is drawn up to one and a half periods: 15,000 s here, and silence begins behind it."""
    limits_s: list[float] = []

    class Stream:
        def receive(self, left_s: float) -> tuple[int, bytes]:
            limits_s.append(left_s)
            return (STDOUT, b"S,1,1,1,1\n") if len(limits_s) == 1 else (EXIT, b"\0")

        def close(self) -> None:
            """Nothing is open."""

        def send(self, text: str) -> None:
            """Nobody answers."""

    class Streaming:
        def stream(self, script: str) -> Stream:
            return Stream()

    loop = GaugeLoop(Streaming(), "", MonotonicClock(), 10_000.0)  # type: ignore[arg-type]
    with pytest.raises(TransientDeviceError, match="the battery loop ended on the phone"):
        loop.start()
    assert limits_s[1] > 14_000


def test_four_gigabytes_in_one_packet_are_refused_at_its_head(fake: FakePhone, phone: Phone) -> None:
    fake.speaks = flood = Endless(struct.pack("<BI", STDOUT, 0xFFFFFFFF))
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TransientDeviceError, match="a packet of 4294967295 bytes"):
        phone.run("true")
    assert flood.n_sent < 64 << 20, "buffers of the sockets, not the packet"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 64 * 1024


def test_a_command_that_writes_without_end_is_ended(phone: Phone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_module.ShellStream.finish, "__defaults__", (10_000,))
    with pytest.raises(DeviceError, match=r"has written 1\d{4} bytes, 10000 are the most"):
        phone.run("yes")  # a packet a line


@pytest.mark.parametrize(
    ("content", "said"), [(b"S,1,1,1,1\n" * 100_000, "none slept"), (b"S" * 5000, "a line of 5000 characters")]
)
def test_a_loop_that_does_not_sleep_or_writes_no_lines_ends(
    fake: FakePhone, phone: Phone, monkeypatch: pytest.MonkeyPatch, content: bytes, said: str
) -> None:
    def speak(link: socket.socket) -> None:
        with suppress(OSError):
            link.sendall(packet(STDOUT, content))
            time.sleep(2.0)

    fake.speaks = speak
    loop = GaugeLoop(phone, loop_script("c=1; v=1", 0.05), MonotonicClock())
    with pytest.raises(TransientDeviceError, match=said):
        loop.start()


def test_readings_beyond_every_arithmetic_are_none(fake: FakePhone, phone: Phone) -> None:
    loop = GaugeLoop(phone, loop_script(f"c=1e300; v={'9' * 80}", 0.01), MonotonicClock())
    loop.start()
    readings = loop.stop()
    assert len(readings.current) > 0
    assert (readings.current != readings.current).all()
    assert (readings.voltage != readings.voltage).all()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"OKAYzzzz", "makes no sense"),
        (b"OKAY\xff\xfe\0\0", "makes no sense"),
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            r"makes no sense \(Unknown data: .*is it an adb server that listens there\?",
        ),
        (bytes(64), r"makes no sense \(Unknown data: .*Restart it: adb kill-server"),
        (b"FAIL0005\xffugly", "adb refused"),
        (b"OKAY0010only a part", "no answer in time|the link broke|makes no sense"),
        (b"", "adb refused|the link broke|makes no sense"),
    ],
)
def test_what_is_no_adb_server_is_told(
    server: FakeAdbServer, monkeypatch: pytest.MonkeyPatch, content: bytes, said: str
) -> None:
    monkeypatch.setattr(server_module, "ANSWER_TIMEOUT_S", LIMIT_S)
    server.speaks = lambda link: link.sendall(content)
    address = ServerAddress("127.0.0.1", server.port)
    with pytest.raises(DeviceError, match=said):
        list_phones(address)
    with pytest.raises(DeviceError):
        find_phone("adb:", address)


def test_lines_that_are_no_phone_and_its_state_are_left_out(server: FakeAdbServer) -> None:
    lines = "no tab here\nA\t\n\tdevice\nB 1\tdevice\textra\nC\tno permissions; see [the manual]\n"
    server.speaks = lambda link: okay(link, lines)
    found = list_phones(ServerAddress("127.0.0.1", server.port))
    assert [(p.serial, p.state) for p in found] == [("B 1", "device"), ("C", "no")]
    assert "udev" in str(found[1].remedy)


@pytest.mark.parametrize(
    "content",
    [
        b"DATA" + struct.pack("<I", 0xFFFFFFFF),
        b"DATA" + struct.pack("<I", 100_000) + bytes(100_000),
        b"NEWS" + struct.pack("<I", 4) + b"abcd",
        b"DA",
    ],
)
def test_a_pull_takes_pieces_of_a_file_and_nothing_else(
    fake: FakePhone, phone: Phone, tmp_path: Path, content: bytes
) -> None:
    fake.speaks = lambda link: link.sendall(content)
    with pytest.raises(DeviceError):
        phone.pull("/data/local/tmp/file", tmp_path / "file")


def test_a_reason_of_four_gigabytes_is_cut(fake: FakePhone, phone: Phone, tmp_path: Path) -> None:
    fake.speaks = Endless(b"FAIL" + struct.pack("<I", 0xFFFFFFFF))
    with pytest.raises(DeviceError) as caught:
        phone.pull("/data/local/tmp/file", tmp_path / "file")
    assert len(str(caught.value)) < 10_000


def test_random_bytes_in_place_of_a_shell_are_our_error_or_an_answer(fake: FakePhone, phone: Phone) -> None:
    """Seeded: packets of every id and length, cut anywhere."""
    import random

    draw = random.Random(7)
    for k in itertools.count():
        if k == 60:
            return
        content = b"".join(
            struct.pack("<BI", draw.choice((0, 1, 2, 3, 4, 200)), draw.choice((0, 1, 5, 70_000, 1 << 31)))
            + draw.randbytes(draw.randrange(12))
            for _ in range(draw.randrange(4))
        )
        fake.speaks = lambda link, content=content: link.sendall(content)  # type: ignore[misc]
        with suppress(DeviceError):
            phone.run("true", timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("written", "status", "percent"),
    [
        (DISCHARGING.replace("\n", "\r\n"), 3, 82.0),
        (DISCHARGING.replace("level: 82", "level: 82\0"), 3, None),
        (DISCHARGING.replace("health: 2", "health: \udcff\udcfe"), 3, 82.0),
        (DISCHARGING.replace("level: 82", "level: " + "9" * 80), 3, None),
        (DISCHARGING.replace("level: 82", "level: \u0668\u0662"), 3, None),
        (DISCHARGING.replace("status: 3", "Status: 3"), 3, 82.0),
        (DISCHARGING.replace("status: 3", "\u72b6\u6001: 3"), None, 82.0),
        (DISCHARGING.replace("level: 82", "level: NaN"), 3, None),
    ],
)
def test_odd_text_of_the_battery_is_read_or_missing(
    fake: FakePhone, phone: Phone, written: str, status: int | None, percent: float | None
) -> None:
    (fake.root / "answers" / "dumpsys battery").write_bytes(written.encode(errors="surrogateescape"))
    battery = read_state(phone).battery
    assert battery is not None
    assert (battery.status, battery.percent) == (status, percent)
    if status is None:
        assert "unplug" in str(why_not_ready(battery, Gates()))


PROCESS = "1 (a) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"
ACCOUNT = "err\n@account 1.0 2.5\n0m0.01s 0m0.02s\n0m1.01s 0m0.02s\n"
CORES = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd05\nprocessor\t: 1\nCPU part\t: 0xd0b\n"


@given(
    st.sampled_from([DISCHARGING, THERMAL, PROCESS, ACCOUNT, CORES, "0-3,6 7", "MemTotal:       8000000 kB\n"]),
    st.lists(st.tuples(st.integers(0, 500), st.sampled_from(ODD)), min_size=1, max_size=3),
)
def test_no_text_of_a_phone_ends_in_an_error_or_in_memory_without_end(
    base: str, changes: list[tuple[int, str]]
) -> None:
    """Words and digits that belong nowhere, put anywhere."""
    text = base
    for at, odd in changes:
        text = text[: at % len(text)] + odd + text[at % len(text) :]
    sections = split_sections(f"@@ battery\n{text}@@ thermal\n{text}@@ load\n{text}@@ caps\n/sys/a/online:{text}")
    parse_state(sections)
    parse_facts(parse_properties(text), text, text)
    split_account(text)
    parse_process_cpu_s(text)
    parse_cpuinfo(text)
    assert len(parse_core_list(text)) < 10 * MAX_CORES


def test_lines_that_end_as_a_terminals_are_lines(fake: FakePhone, phone: Phone) -> None:
    fake.answer("getprop", "[ro.product.model]: [Pixel 9]\r\n[ro.build.version.release]: [16]\r\n")
    assert (read_facts(phone).model, read_facts(phone).android) == ("Pixel 9", "16 (SDK unknown)")
