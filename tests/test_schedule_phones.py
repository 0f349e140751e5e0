"""A phone before and after a scheduled run, behind a fake adb server: charged, cool, off its charger, on it again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from devices.base import DeviceError
from harness.schedule import phones
from harness.schedule.due import NotNowError
from harness.schedule.entries import Book, Charging, Entry
from harness.schedule.times import Every, Rhythm
from harness.schedule.world import RealWorld
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.phone import DISCHARGING, FakePhone
from tests.plans import PHONE, raw_plan, write_plan

pytestmark = pytest.mark.waits

CHARGES = DISCHARGING.replace("USB powered: false", "USB powered: true").replace("status: 3", "status: 2")
NAME = "adb:FAKE0001"


@pytest.fixture
def port(fake: FakePhone, tmp_path: Path) -> Path:
    """A hub: `port on adb:...` makes the phone charge, and `port off` ends it."""
    program = tmp_path / "port"
    answer = fake.root / "answers" / "dumpsys battery"
    (tmp_path / "on").write_text(CHARGES)
    (tmp_path / "off").write_text(DISCHARGING)
    program.write_text(
        f'#!/bin/sh\necho "$@" >>"{tmp_path}/switched"\n'
        f'level=$(sed -n "s/^  level: //p" "{answer}")\n'
        f'sed "s/level: 82/level: $level/" "{tmp_path}/$1" >"{answer}.new" && mv "{answer}.new" "{answer}"\n'
    )
    program.chmod(0o755)
    return program


@pytest.fixture
def world(server: FakeAdbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RealWorld:
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(server.port))
    monkeypatch.setattr(phones, "SEEN_CHARGING_S", 0.5)
    monkeypatch.setattr(phones, "LOOK_EVERY_S", 0.1)
    state = tmp_path / "state"
    return RealWorld(state, Book(state), lambda text: None)


def entry(tmp_path: Path, charging: Charging | None = None) -> Entry:
    plan = write_plan(tmp_path / "plan.toml", raw_plan(device=[PHONE]))
    return Entry(
        name="phone", plan=str(plan), plan_sha256="", devices=(NAME,), folder=str(tmp_path), out=str(tmp_path / "runs"),
        carried=(), environment={},
        rhythm=Rhythm(every=Every(n=1, unit="d"), first="2026-01-01T02:30", zone="UTC"), charging=charging,
    )  # fmt: skip


def hub(port: Path, to_percent: float = 80.0) -> Charging:
    return Charging(to_percent=to_percent, on=(str(port), "on", "{device}"), off=(str(port), "off", "{device}"))


def at(fake: FakePhone, level: int, tenths_c: int = 312, text: str = DISCHARGING) -> None:
    text = text.replace("level: 82", f"level: {level}").replace("temperature: 312", f"temperature: {tenths_c}")
    fake.answer("dumpsys battery", text)


def switched(tmp_path: Path) -> list[str]:
    path = tmp_path / "switched"
    return path.read_text().splitlines() if path.exists() else []


def test_a_phone_below_its_floor_is_charged_and_its_run_waits(
    world: RealWorld, fake: FakePhone, port: Path, tmp_path: Path
) -> None:
    at(fake, 43)
    with (
        pytest.raises(NotNowError, match=r"at 43 %, charges to 80 % first") as caught,
        world.devices(entry(tmp_path, hub(port))),
    ):
        pass
    assert not caught.value.is_fault
    assert switched(tmp_path) == [f"on {NAME}"]
    # Charged: off for the run, on again after it.
    at(fake, 80, text=CHARGES)
    with world.devices(entry(tmp_path, hub(port))):
        assert switched(tmp_path) == [f"on {NAME}", f"off {NAME}"]
    assert switched(tmp_path) == [f"on {NAME}", f"off {NAME}", f"on {NAME}"]


def test_it_is_charged_again_after_a_run_that_breaks(
    world: RealWorld, fake: FakePhone, port: Path, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError), world.devices(entry(tmp_path, hub(port))):
        raise RuntimeError
    assert switched(tmp_path) == [f"off {NAME}", f"on {NAME}"]


def test_a_port_that_charges_nothing_is_a_fault(world: RealWorld, fake: FakePhone, tmp_path: Path) -> None:
    at(fake, 43)
    charging = Charging(to_percent=80, on=("/bin/true",), off=("/bin/true",))
    with (
        pytest.raises(NotNowError, match="its port was switched on, and it does not charge") as caught,
        world.devices(entry(tmp_path, charging)),
    ):
        pass
    assert caught.value.is_fault


@pytest.mark.parametrize(
    ("level", "tenths_c", "text", "charging", "expected", "is_fault"),
    [
        (82, 431, DISCHARGING, None, "the battery is at 43.1 degC, 40 is the limit; let it cool", False),
        (43, 312, DISCHARGING, None, "the battery is at 43 %, 50 % is the limit; charge it, then unplug it", True),
        (43, 312, CHARGES, None, "the battery is at 43 %, 50 % is the limit; charge it", False),
        (70, 312, CHARGES, Charging(to_percent=80), "the battery is at 70 %, 80 % is the limit; charge it", False),
    ],
)
def test_a_phone_that_is_not_ready_leaves_its_run_due(
    world: RealWorld, fake: FakePhone, tmp_path: Path, level: int, tenths_c: int, text: str,
    charging: Charging | None, expected: str, is_fault: bool,
) -> None:  # fmt: skip
    at(fake, level, tenths_c, text)
    with pytest.raises(NotNowError) as caught, world.devices(entry(tmp_path, charging)):
        pass
    assert str(caught.value) == f"{NAME}: {expected}"
    assert caught.value.is_fault == is_fault


def test_a_phone_at_its_floor_is_ready(world: RealWorld, fake: FakePhone, tmp_path: Path) -> None:
    at(fake, 80)
    with world.devices(entry(tmp_path, Charging(to_percent=80))):
        pass


def test_a_phone_that_is_not_there_is_a_fault(world: RealWorld, fake: FakePhone, tmp_path: Path) -> None:
    fake.pull_cable()
    with pytest.raises(NotNowError, match=r"is not attached") as caught, world.devices(entry(tmp_path)):
        pass
    assert caught.value.is_fault


def test_a_phone_that_another_joulebench_has_is_waited_for(
    world: RealWorld, server: FakeAdbServer, tmp_path: Path
) -> None:
    """The lock is that of every other command."""
    taking = (
        "import sys; from pathlib import Path; from devices.device_lock import DeviceLock\n"
        "DeviceLock(Path(sys.argv[1]), *sys.argv[2:]).take(); print(flush=True); input()"
    )
    words = [sys.executable, "-c", taking, str(tmp_path / "state"), NAME, f"{NAME} 127.0.0.1:{server.port}"]
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    other.stdout.readline()
    with pytest.raises(NotNowError, match=f"is used by process {other.pid}") as caught, world.devices(entry(tmp_path)):
        pass
    assert not caught.value.is_fault
    other.communicate("\n")
    with world.devices(entry(tmp_path)):
        pass


def test_a_program_that_fails_is_told_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"adb:X: /bin/sh ended with code 3 \(no such hub\)"):
        phones.switch("adb:X", ("/bin/sh", "-c", "echo no such hub >&2; exit 3"))
    assert phones.run_program(("/no/such",)) is not None
