"""What a device says reaches no terminal as it is: escape codes, controls, turned lines, megabytes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.base import Channel, DeviceError, MeterUnavailableError
from devices.models.sheet import load_sheet
from engines.pricing.routing_sources import UniformRouting
from engines.pricing.shapes import NAMED_SHAPES
from harness.cross.pages import write_page
from harness.cross.table import Question
from harness.terminal import PrintableLog
from results.printable import n_digits, on_page, printable
from tests.command import joulebench
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.machine import FakeDevice, FakeMachine
from tests.fakes.phone import DISCHARGING, PROPERTIES, FakePhone

CLEARS, TITLE, TURNED = "\x1b[2J", "\x1b]0;owned\x07", "\u202egnp.exe"
HOSTILE = f"Phone{CLEARS}{TITLE}{TURNED}\r\nERROR root: forged\x00\x9b31m\x7f"


def controls(text: str) -> set[str]:
    return {c for c in text if not c.isprintable() and c != "\n"}


def test_what_a_terminal_would_obey_is_shown_and_the_rest_stays() -> None:
    assert printable("Pixel 9 Pro, Galaxy S24 Ultra, 小米 14, Télé") == "Pixel 9 Pro, Galaxy S24 Ultra, 小米 14, Télé"
    assert printable("a\x1b[31mb\tc\r\nd\x9b\u202e\ud800") == r"a\x1b[31mb c  d\x9b\u202e\ud800"


def test_what_turns_lines_on_a_page_is_shown_and_the_rest_stays() -> None:
    assert on_page("Télé 小米\u00a014 µJ, two\nlines\tand soft\u00adhyphens") == (
        "Télé 小米\u00a014 µJ, two\nlines\tand soft\u00adhyphens"
    )
    assert on_page("a\x1b[31mb\x9b\u202ec\u2067d\x00") == r"a\x1b[31mb\x9b\u202ec\u2067d\x00"
    assert on_page(3.5) == 3.5
    assert on_page(None) is None


def test_a_sheet_cannot_turn_the_lines_of_a_page(tmp_path: Path) -> None:
    """Escaped HTML alone lets a direction of writing through, and all that follows reads backwards."""
    sheet = load_sheet("a6000").model_copy(update={"description": f"<b>{HOSTILE}</b>"})
    question = Question(NAMED_SHAPES["qwen3-30b-a3b"], UniformRouting(), 16, 1, 16)
    page = write_page(question, [sheet], [], None, tmp_path).read_text(encoding="utf-8")
    assert "&lt;b&gt;Phone" in page
    assert r"\u202egnp.exe" in page
    assert not controls(page) & controls(HOSTILE) - {"\r"}


def test_a_message_of_megabytes_keeps_its_ends() -> None:
    assert len(printable("\0" * 4000)) <= 4000
    found = printable("start " + "x" * 5_000_000 + " end")
    assert len(found) <= 4000
    assert found.startswith("start x")
    assert found.endswith("x end")
    assert "characters left out" in found


@given(st.text())
def test_the_result_is_printable_and_printing_it_again_changes_nothing(text: str) -> None:
    found = printable(text)
    assert not controls(found)
    assert "\n" not in found
    assert printable(found) == found


@pytest.mark.parametrize("error", [DeviceError, MeterUnavailableError])
def test_errors_and_channels_of_devices_are_printable(error: type[DeviceError]) -> None:
    assert not controls(str(error(HOSTILE)))
    channel = Channel(HOSTILE, "power", note=HOSTILE)
    assert not controls(channel.component)
    assert not controls(str(channel.note))
    environment = FakeDevice(FakeMachine(), []).environment().model_dump() | {"os": HOSTILE, "cpu_model": HOSTILE}
    told = type(FakeDevice(FakeMachine(), []).environment())(**environment)
    assert not controls(told.os + told.cpu_model)


def test_the_log_is_printable_and_keeps_the_lines_of_a_traceback() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        record = logging.LogRecord("devices", logging.INFO, __file__, 1, "%s", (HOSTILE,), None)
        record.exc_info = (type(error), error, error.__traceback__)
    found = PrintableLog("%(levelname)s %(message)s").format(record)
    assert not controls(found)
    assert found.splitlines()[0].startswith("INFO Phone\\x1b[2J")
    assert found.splitlines()[1] == "Traceback (most recent call last):"


@pytest.fixture
def hostile_phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePhone]:
    phone = FakePhone(tmp_path / "phone", serial=f"FAKE{CLEARS}")
    named = PROPERTIES | dict.fromkeys(("ro.product.model", "ro.build.version.release", "ro.soc.model"), HOSTILE[:30])
    phone.answer("getprop", "".join(f"[{k}]: [{v}]\n" for k, v in named.items()))
    phone.answer("dumpsys battery", DISCHARGING.replace("status: 3", "status: 2"))
    with FakeAdbServer(phone) as server:
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(server.port))
        yield phone


@pytest.mark.parametrize(
    "arguments", [("devices",), ("-v", "devices"), ("-v", "doctor", "--device", f"adb:FAKE{CLEARS}", "--seconds", "1")]
)
def test_no_control_character_of_a_phone_reaches_the_terminal(
    hostile_phone: FakePhone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    hostile_phone.answer("dumpsys battery", DISCHARGING.replace("temperature: 312", "temperature: 312\x1b[2J"))
    hostile_phone.state = "device" if arguments[-1] == "devices" else f"strange{TITLE}"
    done = joulebench(*arguments)
    assert "FAKE" in done.stdout + done.stderr
    assert not controls(done.stdout + done.stderr)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 308, 309, 4300, 5000])
def test_digits_of_a_number_beside_a_power_of_ten(n: int) -> None:
    """10^n - 1 is n nines, and 10^n a one and n noughts."""
    power = 10**n
    assert [n_digits(one) for one in (power - 1, power, power + 1, 1 - power)] == [n, n + 1, n + 1, n]


WORKER = """
import logging, sys
from harness.fleet import dask_worker

async def work(asked):
    logging.getLogger("devices.android").warning("Phone%s", asked.device)
    logging.getLogger("zeus.device.gpu.amd").warning("a vendor's library is not here")
    return 0

class Side:
    def close(self, is_over): pass

dask_worker.work = work
dask_worker.main(Side())
"""


def test_a_worker_of_a_fleet_logs_as_every_command_does(tmp_path: Path) -> None:
    """It set up its log by itself: what a phone said went to the terminal as it was, and Zeus told of vendors."""
    asked = json.dumps({"address": "tcp://127.0.0.1:1", "device": HOSTILE, "wait_s": 1.0, "folder": str(tmp_path)})
    command = [sys.executable, "-c", WORKER, asked]
    # A worker ends with its parent, that is as soon as its input ends.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.wait(60) == 0
        assert worker.stderr is not None
        (line,) = worker.stderr
    assert line.startswith("Phone")
    assert r"\x1b[2J" in line
    assert not controls(line)
