"""A phone as a device of the harness, and programs on it. The fake phone's programs run on this machine, for real."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from devices.android import battery as battery_module
from devices.android import state
from devices.android.device import AndroidDevice
from devices.android.processes import (
    FewerCoresError,
    affinity_mask,
    online_of,
    parse_process_cpu_s,
    split_account,
    split_cores,
)
from devices.android.server import ServerAddress
from devices.android.survey import attached_phones
from devices.android.topology import ONLINE
from devices.base import DeviceError, TransientDeviceError
from devices.clock import MonotonicClock
from devices.gates import Gates
from devices.state_watch import state_marks
from results.energy import energy_between
from tests.data_folder import data_folder
from tests.eventually import eventually, gone, is_alive
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.battery import FakeBattery
from tests.fakes.phone import DISCHARGING, PROPERTIES, THERMAL, FakePhone

pytestmark = pytest.mark.waits

CLOCK = MonotonicClock()
CPUINFO = "".join(
    f"processor\t: {core}\nCPU implementer\t: 0x41\nCPU variant\t: 0x0\nCPU part\t: {part}\n\n"
    for core, part in enumerate(["0xd80", "0xd80", "0xd82"])
)
AT_ONCE = Gates(wait_s=0.0)


@pytest.fixture(autouse=True)
def short_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(battery_module, "CALIBRATION_S", 0.4)


@pytest.fixture
def fake(tmp_path: Path) -> FakePhone:
    phone = FakePhone(tmp_path / "phone")
    phone.file("/proc/cpuinfo", CPUINFO)
    phone.file("/proc/meminfo", "MemTotal:       8000000 kB\n")
    phone.file("/proc/stat", "cpu  1000 0 500 8000 500 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n")
    phone.file("/sys/devices/system/cpu/online", "0-2\n")
    return phone


@pytest.fixture
def server(fake: FakePhone) -> Iterator[FakeAdbServer]:
    with FakeAdbServer(fake) as running, FakeBattery(fake, 2.0):
        yield running


def device_at(server: FakeAdbServer, gates: Gates = AT_ONCE) -> AndroidDevice:
    return AndroidDevice("adb:FAKE0001", 0.05, CLOCK, gates, address=ServerAddress("127.0.0.1", server.port))


@pytest.fixture
def device(server: FakeAdbServer) -> Iterator[AndroidDevice]:
    opened = device_at(server)
    opened.open()
    yield opened
    opened.close()


def test_the_environment_is_the_phones(device: AndroidDevice) -> None:
    environment = device.environment()
    assert environment.os.startswith("Android 15 (SDK 35), build AP4A.250105.002 12701944, Linux ")
    assert environment.machine == "arm64-v8a"
    assert environment.cpu_model == "Example Phone One, SM8650: 2x Cortex-A520 + 1x Cortex-X4"
    assert (environment.n_cores, environment.memory_bytes) == (3, 8_000_000 * 1024)


def test_two_phones_of_one_model_are_told_apart(fake: FakePhone, server: FakeAdbServer) -> None:
    """`printf R58M42ABCDE | sha256sum`, and so on: the serial number itself stays out of a run's records."""
    seen = []
    for serial in ("R58M42ABCDE", "R58M42FGHIJ"):
        told = PROPERTIES | {"ro.serialno": serial}
        fake.answer("getprop", "".join(f"[{k}]: [{v}]\n" for k, v in told.items()))
        device = device_at(server)
        device.open()
        seen.append(device.environment())
        device.close()
    assert [e.unit for e in seen] == ["80f113ee4930", "20f9307d463b"]
    assert seen[0].model_copy(update={"unit": None}) == seen[1].model_copy(update={"unit": None})


def test_a_trial_does_not_begin_on_another_phone_that_has_the_address_by_now(fake: FakePhone) -> None:
    fake.serial = "192.168.1.7:5555"
    fake.answer("getprop ro.serialno", "R58M42ABCDE\n")
    with FakeAdbServer(fake) as server, FakeBattery(fake, 2.0):
        address = ServerAddress("127.0.0.1", server.port)
        device = AndroidDevice("adb:192.168.1.7:5555", 0.05, CLOCK, AT_ONCE, address=address)
        device.open()
        device.wait_until_ready()
        fake.answer("getprop ro.serialno", "R58M42FGHIJ\n")
        with pytest.raises(DeviceError, match="leads to another phone now"):
            device.wait_until_ready()
        device.close()


def test_conditions_say_heat_charge_and_throttling(fake: FakePhone, device: AndroidDevice) -> None:
    conditions = device.conditions()
    assert (conditions.temperature_c, conditions.battery_percent) == (31.2, 82.0)
    assert (conditions.charging, conditions.throttled) == (False, False)
    fake.answer("dumpsys battery", DISCHARGING.replace("status: 3", "status: 2"))
    fake.answer("dumpsys thermalservice", THERMAL.replace("Thermal Status: 0", "Thermal Status: 2"))
    conditions = device.conditions()
    assert (conditions.charging, conditions.throttled, conditions.thermal_status) == (True, True, 2)


def test_conditions_say_what_draws_or_slows_beside_the_engine(fake: FakePhone, device: AndroidDevice) -> None:
    hidden = device.conditions()
    assert (hidden.frequency_caps, hidden.screen_brightness, hidden.airplane_mode) == (None, None, None)
    fake.answer("settings get system screen_brightness", "60\n")
    fake.answer("settings get global airplane_mode_on", "0\n")
    for name, khz in (("cpuinfo_max_freq", 2_000_000), ("scaling_max_freq", 1_500_000)):
        fake.file(f"/sys/devices/system/cpu/cpu0/cpufreq/{name}", f"{khz}\n")
    shown = device.conditions()
    assert shown.cores_online == "0-2"
    assert (shown.screen_brightness, shown.airplane_mode) == (60, False)
    # Core 0 of three, which are 2x Cortex-A520 and a Cortex-X4: without a policy the limit is its own.
    assert shown.frequency_caps is not None
    assert "limited to 1500 of 2000 MHz" in shown.frequency_caps[0]


def test_a_phone_that_lowers_its_clocks_in_a_window_marks_it(fake: FakePhone, device: AndroidDevice) -> None:
    """Android 9 and older have no thermal status: what the heat does to them shows in the limits of their clocks."""
    fake.answer("dumpsys thermalservice", "Can't find service: thermalservice\n")
    clocks = "/sys/devices/system/cpu/cpu0/cpufreq"
    fake.file(f"{clocks}/cpuinfo_max_freq", "2000000\n")
    seen = []
    for khz in (2_000_000, 1_500_000, 2_000_000):
        fake.file(f"{clocks}/scaling_max_freq", f"{khz}\n")
        seen.append(device.watched_state())
    assert [s.throttled for s in seen] == [None] * 3
    assert state_marks(seen, reads_battery=True) == ("clock limits changed",)


def test_joules_of_a_device_that_was_opened(device: AndroidDevice) -> None:
    [meter] = device.meters
    meter.start()
    start_s = CLOCK.now_s()
    time.sleep(1.5)
    end_s = CLOCK.now_s()
    reading = energy_between(meter.stop(), [(start_s, end_s)], "all", "battery")
    assert reading.energy_j == pytest.approx(2.0 * (end_s - start_s), rel=0.01)


SLEEPER = """#!/bin/bash
[ "$1" = power ] || exec "$PHONE/answering/dumpsys" "$@"
read -r up x </proc/uptime; read -r slept_ms <"$PHONE/slept_ms"
echo "  mWakefulness=Asleep"; echo "  mLastWakeTime=7 ($((10#${up/./}*10 - slept_ms - 7)) ms ago)"
"""


def test_a_phone_that_slept_in_a_window_marks_it(
    fake: FakePhone, device: AndroidDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its uptime is this machine's, and it slept for as long as the test says."""
    monkeypatch.setattr(state, "LONGEST_DUMP_S", 60.0)  # a busy machine takes long for a dump
    (fake.root / "answering").mkdir()
    (fake.root / "bin" / "dumpsys").rename(fake.root / "answering" / "dumpsys")  # it answers by its name
    fake.file("/bin/dumpsys", SLEEPER).chmod(0o755)
    seen = []
    for slept_ms in (5_000, 305_000):
        fake.file("/slept_ms", f"{slept_ms}\n")
        seen.append(device.watched_state())
    assert [s.suspended_s for s in seen] == [pytest.approx(5.0, abs=30.0), pytest.approx(305.0, abs=30.0)]
    assert state_marks(seen, reads_battery=True) == ("suspended",)


def test_a_phone_that_charges_is_refused(fake: FakePhone, server: FakeAdbServer) -> None:
    fake.answer("dumpsys battery", DISCHARGING.replace("status: 3", "status: 2"))
    with pytest.raises(DeviceError, match=r"adb:FAKE0001 is not ready: the battery is charging.*unplug it"):
        device_at(server).open()


def test_a_phone_that_is_too_hot_is_waited_for_and_then_given_up(fake: FakePhone, server: FakeAdbServer) -> None:
    fake.answer("dumpsys battery", DISCHARGING.replace("temperature: 312", "temperature: 455"))
    begun_s = CLOCK.now_s()
    with pytest.raises(DeviceError, match=r"not after 0\.5 s of waiting: the battery is at 45\.5 degC"):
        device_at(server, Gates(wait_s=0.5, look_every_s=0.1)).open()
    assert 0.5 < CLOCK.now_s() - begun_s < 3.0


def test_a_device_that_is_not_open_says_so(server: FakeAdbServer) -> None:
    with pytest.raises(DeviceError, match="not open"):
        device_at(server).environment()


# --- programs --------------------------------------------------------------------------------------------------------


def test_a_program_gives_output_errors_and_exit_code(device: AndroidDevice) -> None:
    result = device.run_program(["sh", "-c", "echo 'out; out'; echo err >&2; exit 7"], timeout_s=60.0)
    assert (result.stdout, result.stderr, result.exit_code) == ("out; out\n", "err\n", 7)


def test_a_program_gets_its_folder_and_environment(fake: FakePhone, device: AndroidDevice) -> None:
    fake.file("/data/local/tmp/engine/weights", "7\n")
    process = device.start_program(
        ["sh", "-c", "cat weights; echo $LD_LIBRARY_PATH"],
        folder="/data/local/tmp/engine",
        environment={"LD_LIBRARY_PATH": "lib with blanks"},
    )
    assert process.wait(60.0).stdout == "7\nlib with blanks\n"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to tell one from the other")
def test_a_program_runs_on_its_cores_only(device: AndroidDevice) -> None:
    for core in sorted(os.sched_getaffinity(0))[:2]:
        result = device.run_program(["grep", "Cpus_allowed_list", "/proc/self/status"], timeout_s=60.0, cores=[core])
        assert result.stdout.split() == ["Cpus_allowed_list:", str(core)]


def test_a_program_that_did_not_get_all_its_cores_is_told(device: AndroidDevice) -> None:
    """`taskset` takes any mask that has one core of this machine, as on a phone whose core is off line."""
    core, absent = min(os.sched_getaffinity(0)), (os.cpu_count() or 1) + 8
    with pytest.raises(DeviceError, match=rf"cores {core},{absent} were asked for, and the program had {core} alone"):
        device.run_program(["true"], 60.0, cores=[core, absent])
    # What the program says of itself comes first.
    failed = device.run_program(["sh", "-c", "echo err >&2; exit 3"], 60.0, cores=[core, absent])
    assert (failed.stderr, failed.exit_code) == ("err\n", 3)


def test_a_program_whose_core_went_off_line_before_its_end_is_told(device: AndroidDevice, fake: FakePhone) -> None:
    core = min(os.sched_getaffinity(0))
    fake.file(ONLINE, f"{core}-{core + 1}\n")
    switches_off = ["sh", "-c", f"echo {core + 1} >{ONLINE}"]
    with pytest.raises(FewerCoresError, match=rf"cores {core} were asked for, and {core} went off line while"):
        device.run_program(switches_off, 60.0, cores=[core])
    # It was off already when this one began, which had it nevertheless: such a list says nothing.
    assert device.run_program(["true"], 60.0, cores=[core]).exit_code == 0
    fake.file(ONLINE, f"{core}-{core + 1}\n")
    assert device.run_program(switches_off, 60.0).exit_code == 0, "it asked for none"


def test_a_core_that_was_off_line_for_a_while_is_told_where_somebody_looked(
    device: AndroidDevice, fake: FakePhone
) -> None:
    core = min(os.sched_getaffinity(0))
    waits = ["sh", "-c", "while [ ! -e /data/local/tmp/go ]; do sleep 0.01; done"]
    for seen, is_told in ((f"{core}", False), (f"{core + 1}", True)):
        fake.local("/data/local/tmp/go").unlink(missing_ok=True)
        fake.file(ONLINE, f"{core}-{core + 1}\n")
        process = device.start_program(waits, cores=[core])
        fake.file(ONLINE, f"{seen}\n")
        device.watched_state()
        fake.file(ONLINE, f"{core}-{core + 1}\n")
        device.watched_state()
        fake.file("/data/local/tmp/go", "")
        with pytest.raises(FewerCoresError, match="went off line") if is_told else nullcontext():
            process.wait(60.0)


def test_cpu_time_of_a_program_is_its_own(device: AndroidDevice) -> None:
    """A loop that says in the end what it has used by its own account, and one that sleeps."""
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(time.process_time())"
    result = device.run_program(["python3", "-c", busy], timeout_s=60.0)
    # Its start before Python's clock, its end behind it, and ticks of 10 ms.
    assert result.cpu_s == pytest.approx(float(result.stdout), abs=0.1)
    assert result.wall_s is not None
    assert result.wall_s > 0.25
    asleep = device.run_program(["sleep", "0.3"], timeout_s=60.0)
    assert asleep.cpu_s is not None
    assert asleep.cpu_s < 0.05


def test_cpu_time_of_a_running_program_grows(device: AndroidDevice) -> None:
    process = device.start_program(["sh", "-c", "while :; do :; done"])
    before_s = process.cpu_s()
    assert before_s is not None
    assert eventually(lambda: (process.cpu_s() or 0.0) > before_s + 0.05)
    process.kill()


def test_a_program_that_does_not_end_is_killed_at_its_limit(device: AndroidDevice) -> None:
    process = device.start_program(["sleep", "3600"])
    with pytest.raises(TransientDeviceError, match=r"no answer in time|has not ended"):
        process.wait(timeout_s=0.3)
    assert gone([process.pid])


def test_a_program_is_not_left_on_a_phone_whose_cable_was_pulled(fake: FakePhone, device: AndroidDevice) -> None:
    process = device.start_program(["sleep", "3600"])
    assert is_alive(process.pid)
    fake.pull_cable()
    with pytest.raises(TransientDeviceError):
        process.wait(timeout_s=5.0)
    assert gone([process.pid])


def test_a_link_that_goes_as_soon_as_a_program_runs_leaves_none(fake: FakePhone, device: AndroidDevice) -> None:
    for _ in range(12):
        process = device.start_program(["sleep", "3600"])
        fake.pull_cable()
        assert gone([process.pid])
        fake.plug_in()


def test_a_program_that_is_not_there_has_the_shells_exit_code(device: AndroidDevice) -> None:
    assert device.run_program(["./absent"], timeout_s=60.0).exit_code == 127
    with pytest.raises(DeviceError, match="did not start in /data/absent"):
        device.run_program(["true"], timeout_s=60.0, folder="/data/absent")


def test_cpu_seconds_of_the_phone_and_of_our_programs(fake: FakePhone, device: AndroidDevice) -> None:
    """1000 user + 500 system of 10000 ticks: 15 s busy of 100 s."""
    seconds = device.cpu_seconds()
    assert seconds is not None
    assert (seconds.busy_s, seconds.ours_s, seconds.available_s) == (15.0, 0.0, 100.0)
    result = device.run_program(["python3", "-c", "import time\nwhile time.process_time() < 0.2: pass"], timeout_s=60.0)
    seconds = device.cpu_seconds()
    assert seconds is not None
    assert seconds.ours_s == result.cpu_s
    fake.local("/proc/stat").unlink()
    assert device.cpu_seconds() is None


def test_affinity_masks() -> None:
    assert f"{affinity_mask([4, 5, 6, 7]):x}" == "f0"
    assert affinity_mask([0]) == 1
    with pytest.raises(ValueError, match="at least one core"):
        affinity_mask([])


def test_cores_of_a_kernel_with_more_than_32() -> None:
    assert split_cores("@cores 00000001,80000003\nerr\n") == ("err\n", frozenset({0, 1, 31, 32}))
    assert split_cores("err\n") == ("err\n", None)


def test_process_times_are_read_behind_any_name() -> None:
    """utime 120, stime 30, cutime 7, cstime 3 ticks of 10 ms."""
    stat = "42 (a) b (c)) S 1 42 42 0 -1 4194304 99 0 0 0 120 30 7 3 20 0 1 0 555 0 0\n"
    assert parse_process_cpu_s(stat) == pytest.approx(1.6)


def test_an_account_that_is_missing_is_none() -> None:
    assert split_account("killed\n") == ("killed\n", None, None)
    account = "oops\n\n@account 100.25 102.75\n0m0.01s 0m0.02s\n1m2.50s 0m0.25s\n"
    assert split_account(account) == ("oops\n", 62.75, 2.5)
    with_cores = account.replace("102.75", "102.75 0-3,6 0,2")
    assert split_account(with_cores) == ("oops\n", 62.75, 2.5)
    assert online_of(with_cores) == ({0, 1, 2, 3, 6}, {0, 2})
    assert online_of(account) is online_of("killed\n") is online_of(account.replace("102.75", "102.75  ")) is None


# --- what is attached ------------------------------------------------------------------------------------------------


def test_what_is_attached_says_how_it_would_be_read(server: FakeAdbServer) -> None:
    battery, rails = attached_phones(ServerAddress("127.0.0.1", server.port))
    assert battery == (
        "adb:FAKE0001",
        "battery",
        "battery gauge",
        True,
        "Example Phone One, Android 15 (SDK 35); /sys/class/power_supply/battery/current_now",
    )
    assert (rails.meter, rails.ready) == ("rails", False)
    assert "the phone has none, Android 9 and newer do" in rails.remark


def test_what_is_attached_and_not_ready_says_why(fake: FakePhone, server: FakeAdbServer) -> None:
    address = ServerAddress("127.0.0.1", server.port)
    fake.answer("dumpsys battery", DISCHARGING.replace("status: 3", "status: 5"))
    row, _ = attached_phones(address)
    assert not row.ready
    assert "the battery is full" in row.remark
    fake.state = "unauthorized"
    [row] = attached_phones(address)
    assert "accept 'Allow USB debugging'" in row.remark
    server.stop()
    [row] = attached_phones(address)
    assert "adb start-server" in row.remark


def test_a_frequency_cap_is_warned_of(fake: FakePhone, server: FakeAdbServer, caplog: pytest.LogCaptureFixture) -> None:
    folder = "/sys/devices/system/cpu/cpu0/cpufreq"
    fake.file(f"{folder}/related_cpus", "0 1 2\n")
    fake.file(f"{folder}/cpuinfo_max_freq", "2000000\n")
    fake.file(f"{folder}/scaling_max_freq", "1500000\n")
    for core in (1, 2):
        fake.file(f"/sys/devices/system/cpu/cpu{core}/cpufreq/related_cpus", "0 1 2\n")
    device = device_at(server)
    device.open()
    device.close()
    assert "adb:FAKE0001: cpu 0-2 limited to 1500 of 2000 MHz" in caplog.text


def test_a_real_phones_tree_is_read_through_the_shell(
    fake: FakePhone, server: FakeAdbServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The Galaxy S9's own files, laid out in the fake phone."""
    with gzip.open(data_folder() / "traces" / "phones" / "sysfs" / "galaxy-s9-us.json.gz", "rt") as dump:
        for path, text in json.load(dump)["files"].items():
            fake.file(path, text)
    device = device_at(server)
    with caplog.at_level("WARNING"):
        device.open()
    device.close()
    assert "limited" not in caplog.text
    assert str(device.topology) == "4x Kryo 3xx Silver 1766 MHz + 4x Kryo 3xx Gold 2803 MHz"
