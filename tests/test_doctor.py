"""The doctor: its figures against closed forms on virtual time; all of it on this host and on a fake phone."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import get_args

import numpy as np
import pytest

from devices.android import battery as battery_module
from devices.base import DeviceError
from harness.device_specs import AndroidSpec
from harness.doctor import examine
from harness.examination import examine_device
from harness.loads import matrix_products, no_load
from harness.state import last_self_test
from results.energy import energy_between
from results.environments import Conditions
from results.records import PowerTrace
from results.report.self_test import check_line, meter_line
from results.self_tests import Check, SelfTest, Verdict
from tests.command import EXECUTABLE, environment, joulebench
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.battery import FakeBattery
from tests.fakes.known_load import IDLE_W, INTERVAL_S, LOAD_W, SECONDS, Device, Machine, Meter, examined
from tests.fakes.phone import DISCHARGING, FakePhone
from tests.fakes.waveforms import StepPower, counter_trace


def check(found: SelfTest, name: str) -> Check:
    return next(c for c in found.checks if c.name == name)


# --- figures ---------------------------------------------------------------------------------------------------------


def test_a_power_meter_is_known_by_its_idle_its_load_and_its_shortest_windows() -> None:
    machine = Machine()
    found = examined(Device(machine, Meter(machine)))
    (meter,) = found.meters
    assert found.verdict == "ready"
    assert found.load == "a load of 160 W"
    assert meter.idle_w == pytest.approx(IDLE_W)
    assert meter.load_w == pytest.approx(LOAD_W, rel=0.01)
    assert meter.noise_w == pytest.approx(0.0, abs=1e-9)
    assert meter.sees_load is True
    # A step of 160 W hides between two readings at either end: 160 W x 50 ms / sqrt(12) each, in the same direction.
    hidden_j = 2 * (LOAD_W - IDLE_W) * INTERVAL_S / 12**0.5
    assert meter.shortest_1_percent_s == pytest.approx(hidden_j / (0.01 * LOAD_W), rel=0.02)
    assert meter.shortest_5_percent_s == pytest.approx(hidden_j / (0.05 * LOAD_W), rel=0.02)


def test_a_counter_is_seen_to_tick_and_its_windows_are_ten_ticks_at_least() -> None:
    machine = Machine()
    (meter,) = examined(Device(machine, Meter(machine, "counter", update_s=0.2))).meters
    assert meter.seen_update_s == pytest.approx(0.2)
    assert meter.stated_update_s == 0.2
    assert meter.idle_w == pytest.approx(IDLE_W, rel=0.02)
    assert meter.load_w == pytest.approx(LOAD_W, rel=0.02)
    assert meter.shortest_5_percent_s is not None
    assert meter.shortest_1_percent_s is not None
    # Ten ticks are 2 s.
    assert meter.shortest_5_percent_s == pytest.approx(2.0)
    # Windows of that length over a load of their own: about right to 1 %. The ticks may meet the load's edges anywhere,
    # and the doctor saw one case of it: between a half and twice.
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(300):
        end_s = meter.shortest_1_percent_s
        power = StepPower(np.array([-5.0, 0.0, end_s, end_s + 5.0]), np.array([IDLE_W, LOAD_W, IDLE_W]))
        at_s = np.arange(-0.3 - rng.uniform(0.0, INTERVAL_S), end_s + 0.6, INTERVAL_S)
        counted = counter_trace(power, at_s, 0.2, rng.uniform(0.0, 0.2), sample_interval_s=INTERVAL_S)
        reading = energy_between([counted], [(0.0, end_s)], "all", "m")
        assert reading.energy_j is not None
        errors.append(reading.energy_j / (LOAD_W * end_s) - 1)
    assert 0.005 < float(np.sqrt(np.mean(np.square(errors)))) < 0.02


def test_noise_is_the_scatter_of_short_idle_windows() -> None:
    machine = Machine()
    (meter,) = examined(Device(machine, Meter(machine, swing_w=1.0))).meters
    # 20 windows of 41 and 39 W in turns: sqrt(20 / 19) W.
    assert meter.noise_w == pytest.approx((20 / 19) ** 0.5, rel=0.12)


def test_the_gain_is_told_apart_and_makes_no_window_longer() -> None:
    machine = Machine()
    found = examined(Device(machine, Meter(machine, relative_accuracy=0.03), Meter(machine, name="exact")))
    gained, exact = found.meters
    assert gained.relative_accuracy == 0.03
    assert gained.shortest_1_percent_s == exact.shortest_1_percent_s
    assert "gain ± 3 %" in meter_line(gained)


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meter", [{"gain": 0.0, "offset_w": 40.0}, {"gain": -1.0, "offset_w": 300.0}])
def test_a_meter_that_does_not_rise_with_the_load_does_not_see_it(meter: dict[str, float]) -> None:
    machine = Machine()
    found = examined(Device(machine, Meter(machine, **meter)))  # type: ignore[arg-type]
    assert found.meters[0].sees_load is False
    assert found.meters[0].shortest_1_percent_s is None
    assert found.verdict == "to be fixed"
    failed = check(found, "meter sees the load")
    assert failed.ok is False
    assert "its sign" in str(failed.remedy)
    assert "does NOT see the load" in meter_line(found.meters[0])


def test_a_device_on_which_no_load_runs_is_untested() -> None:
    machine = Machine()
    device = Device(machine, Meter(machine))
    found = examine(device, machine, no_load, SECONDS, {}, INTERVAL_S, lambda stage: None)
    assert found.verdict == "untested"
    assert found.meters[0].sees_load is None
    assert check(found, "meter sees the load").found == "nothing that it sees was put under load"


def test_a_meter_of_what_was_not_loaded_is_not_judged() -> None:
    machine = Machine()
    found = examined(
        Device(machine, Meter(machine), Meter(machine, name="gpu", gain=0.0, offset_w=70.0, computes="gpu"))
    )
    assert found.meters[1].sees_load is None
    assert found.meters[1].idle_w == pytest.approx(70.0)
    assert check(found, "gpu sees the load").ok is None
    assert found.verdict == "ready"


@pytest.mark.parametrize(("gain", "agrees"), [(1.01, True), (1.2, False)])
def test_two_meters_of_one_unit_must_agree_within_two_uncertainties(gain: float, agrees: bool) -> None:
    machine = Machine()
    meters = [
        Meter(machine, name="a", relative_accuracy=0.02),
        Meter(machine, name="b", gain=gain, relative_accuracy=0.02),
    ]
    found = examined(Device(machine, *meters))
    (agreement,) = found.agreements
    mean = (1 + gain) / 2
    assert agreement.difference == pytest.approx((gain - 1) / mean, rel=0.02)
    # Gains dominate: 2 % each.
    assert agreement.allowed == pytest.approx(2 * 0.02 * (1 + gain**2) ** 0.5 / mean, rel=0.05)
    assert agreement.agrees is agrees
    assert found.verdict == ("ready" if agrees else "to be fixed")


def test_a_busy_neighbour_and_a_costly_reading_are_told() -> None:
    machine = Machine()
    device = Device(machine, Meter(machine))
    device.busy_cores, device.own_cores = 0.5, 0.03
    found = examined(device)
    assert check(found, "other processes").found == "they take 25 % of the CPU"
    assert check(found, "cost of reading").found == "3 % of a core"
    assert found.verdict == "to be fixed"
    assert {c.name for c in found.checks if c.ok is False} == {"other processes", "cost of reading"}
    assert all(c.remedy for c in found.checks if c.ok is False)


def test_heat_throttling_and_a_charger_are_told() -> None:
    machine = Machine()
    gauge = Meter(machine)
    gauge.method = "battery gauge"
    device = Device(machine, gauge)
    device.charging, device.throttled, device.temperature_c = True, True, 91.0
    found = examined(device)
    assert {c.name for c in found.checks if c.ok is False} == {"power source", "throttling", "temperature"}
    # A counter does not mind the charger.
    beside = Device(machine, Meter(machine))
    beside.charging = True
    assert check(examined(beside), "power source").ok is True


def test_what_slows_a_phone_or_draws_beside_the_engine_is_told() -> None:
    machine = Machine()
    device = Device(machine, Meter(machine))
    quiet = {"frequency_caps": (), "screen_brightness": 60, "airplane_mode": True, "thermal_status": 0}
    device.more_conditions = quiet
    found = examined(device)
    assert (check(found, "frequency caps").ok, check(found, "frequency caps").found) == (True, "none")
    assert (check(found, "screen and radio").ok, check(found, "screen and radio").found) == (
        True,
        "screen at 60 of 255",
    )
    device.throttled = True
    device.more_conditions = quiet | {
        "thermal_status": 3,
        "frequency_caps": ("cpu 4-7 limited to 1500 of 2800 MHz",),
        "airplane_mode": False,
    }
    found = examined(device)
    assert check(found, "throttling").found == "throttled (thermal status 3 of 6)"
    assert check(found, "frequency caps").found == "cpu 4-7 limited to 1500 of 2800 MHz"
    assert "airplane mode off" in check(found, "screen and radio").found
    assert "airplane mode with Wi-Fi on" in check_line(check(found, "screen and radio"))
    # A host tells none of them.
    assert not {"frequency caps", "screen and radio"} & {c.name for c in examined(Device(machine)).checks}


def test_the_rules_of_a_hosts_clocks_are_told_and_a_change_is_a_fault() -> None:
    machine = Machine()
    device = Device(machine, Meter(machine))
    device.more_conditions = {"cpu_policy": ("governor powersave, 800 to 3600 MHz", "turbo on")}
    limits = check(examined(device), "clock limits")
    assert (limits.ok, limits.found) == (True, "governor powersave, 800 to 3600 MHz; turbo on")
    policies = iter((("governor powersave",), ("governor performance",)))
    device.conditions = lambda: Conditions(at_s=machine.time_s, cpu_policy=next(policies))  # type: ignore[method-assign]
    limits = check(examined(device), "clock limits")
    assert (limits.ok, limits.found) == (False, "governor powersave then governor performance")
    assert "clock limits" not in {c.name for c in examined(Device(machine)).checks}


def test_power_limits_of_gpus_are_told_and_a_change_or_other_programs_are_a_fault() -> None:
    machine = Machine()
    device = Device(machine, Meter(machine))
    device.more_conditions = {"gpu_limits": ("gpu0: 300 W", "gpu1: 250 W"), "gpu_others": ()}
    found = examined(device)
    limits, others = check(found, "GPU power limits"), check(found, "others on the GPU")
    assert (limits.ok, limits.found) == (True, "gpu0: 300 W; gpu1: 250 W")
    assert (others.ok, others.found) == (True, "none")
    device.more_conditions = {"gpu_others": ("gpu0: trainer (pid 7)",)}
    others = check(examined(device), "others on the GPU")
    assert (others.ok, others.found) == (False, "gpu0: trainer (pid 7)")
    limits_w = iter((("gpu0: 300 W",), ("gpu0: 200 W",)))
    device.conditions = lambda: Conditions(at_s=machine.time_s, gpu_limits=next(limits_w))  # type: ignore[method-assign]
    limits = check(examined(device), "GPU power limits")
    assert (limits.ok, limits.found) == (False, "gpu0: 300 W then gpu0: 200 W")
    names = {c.name for c in examined(Device(machine)).checks}
    assert not names & {"GPU power limits", "others on the GPU"}


def test_without_a_meter_each_says_why_it_is_none() -> None:
    machine = Machine()
    modelled = Meter(machine)
    modelled.method = "modelled"
    found = examined(Device(machine, modelled), {"rapl": "readable by root only; run as root"})
    assert found.verdict == "modelled only"
    assert check(found, "meters").ok is False
    assert check_line(check(found, "no rapl")) == "no rapl: readable by root only; run as root"


def test_readings_that_come_late_are_told() -> None:
    machine = Machine()

    class Late(Meter):
        def stop(self) -> Sequence[PowerTrace]:
            [found] = super().stop()
            late_s = np.where(np.arange(len(found.times_s)) % 10 == 0, 0.02, 0.0)
            return [replace(found, times_s=found.times_s + late_s)]

    late = check(examined(Device(machine, Late(machine))), "readings of meter")
    assert late.ok is False
    assert late.found == "every 50 ms; off by 0.0 ms (median), 20.0 ms (99 %)"


# --- the real thing --------------------------------------------------------------------------------------------------


def test_matrix_products_keep_the_cpu_busy_until_they_are_stopped() -> None:
    with matrix_products(["cpu"]) as running:
        before_s, give_up_s = time.process_time(), time.monotonic() + 30
        # Others may need the cores too: it is the CPU time that counts, not how long it took to get it.
        while (spent_s := time.process_time() - before_s) < 0.3 and time.monotonic() < give_up_s:
            time.sleep(0.05)
    assert running.units == ("cpu",)
    assert "CPU threads" in running.words
    assert spent_s >= 0.3
    after_s = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - after_s < 0.1


def test_a_load_that_breaks_off_ends_no_self_test_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(device: object, begun: Event, stop: Event) -> None:
        begun.set()
        raise RuntimeError("out of memory")

    monkeypatch.setattr("harness.loads._multiply", breaks)
    with pytest.raises(RuntimeError, match="out of memory"), matrix_products(["cpu"]):
        pass


def test_the_doctor_examines_this_host(tmp_path: Path) -> None:
    done = subprocess.run(
        [EXECUTABLE, "doctor", "--seconds", "1", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment() | {"JOULEBENCH_STATE": str(tmp_path)},
        check=False,
    )
    told = json.loads(done.stdout)
    assert done.returncode == {"ready": 0, "modelled only": 3}.get(told["verdict"], 5), done.stderr
    modelled = next(m for m in told["meters"] if m["meter"] == "modelled")
    assert modelled["sees_load"] is True
    assert Path(told["file"]) == tmp_path / "doctor" / "host.json"
    kept = SelfTest.model_validate_json(Path(told["file"]).read_text(encoding="utf-8"))
    assert kept.environment is not None
    assert last_self_test("host", kept.environment, tmp_path) == kept


def test_a_verdict_that_cannot_be_kept_is_told_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "file"))
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", "1")
    shown = joulebench("doctor", "--device", "adb:X", "--wait", "0")
    assert shown.code == 7
    assert "not ready" in shown.stdout
    assert "kept in" not in shown.stdout
    assert shown.problems[0].startswith("error: the verdict cannot be kept (")
    told = json.loads(joulebench("doctor", "--device", "adb:X", "--wait", "0", "--json").stdout)
    assert (told["verdict"], told["file"]) == ("not ready", None)


@pytest.fixture
def phone(tmp_path: Path) -> FakePhone:
    fake = FakePhone(tmp_path / "phone")
    fake.file("/proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd05\n")
    fake.file("/proc/meminfo", "MemTotal:        7654321 kB\n")
    return fake


def spinning(phone: FakePhone) -> int:
    return sum("do :; done" in str(process.args) for process in list(phone._processes))


def test_the_doctor_examines_a_phone_by_its_own_busy_loops(phone: FakePhone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(battery_module, "CALIBRATION_S", 0.8)
    with FakeAdbServer(phone) as server, FakeBattery(phone, 1.5) as gauge:
        phone.on_processes = lambda: gauge.draw(1.5 + 2.5 * spinning(phone))
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(server.port))
        found = examine_device(AndroidSpec(name="adb:FAKE0001"), 1.5, lambda stage: None, lambda *waiting: None)
        assert spinning(phone) == 0
    assert found.verdict != "not ready", found.checks
    (meter,) = found.meters
    assert meter.idle_w == pytest.approx(1.5, rel=0.05)
    assert meter.load_w == pytest.approx(4.0, rel=0.1)
    assert meter.seen_update_s == pytest.approx(0.1, abs=0.03)
    assert meter.sees_load is True
    assert "current in uA, negative while discharging" in str(meter.note)
    assert check(found, "power source").found == "on battery"


def test_a_phone_on_a_charger_is_not_ready_and_says_why(phone: FakePhone, monkeypatch: pytest.MonkeyPatch) -> None:
    phone.answer("dumpsys battery", DISCHARGING.replace("status: 3", "status: 2"))
    waits: list[str] = []

    def give_up(device: str, reason: str, left_s: float) -> None:
        waits.append(f"{device}: {reason}")
        raise DeviceError("nobody wants to wait")

    with FakeAdbServer(phone) as server:
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(server.port))
        found = examine_device(AndroidSpec(name="adb:FAKE0001"), 1.0, lambda stage: None, give_up)
    assert found.verdict == "not ready"
    assert len(waits) == 1
    assert waits[0].startswith("adb:FAKE0001: the battery is charging")
    assert "unplug it" in waits[0]


def test_without_an_adb_server_the_doctor_says_how_to_start_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [EXECUTABLE, "doctor", "--device", "adb:X"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment() | {"JOULEBENCH_STATE": str(tmp_path), "ANDROID_ADB_SERVER_PORT": "1"},
        check=False,
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert "adb start-server" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_page_has_each_verdict() -> None:
    page = (Path(__file__).parents[1] / "docs" / "doctor.md").read_text("utf-8")
    told = re.findall(r"^\| ([a-z ]+) \| .* \| (\d) \|$", page, re.MULTILINE)
    assert [verdict for verdict, _ in told] == list(get_args(Verdict))
    assert dict(told) == {
        "ready": "0", "to be fixed": "5", "untested": "5", "modelled only": "3", "not ready": "4"
    }  # fmt: skip
