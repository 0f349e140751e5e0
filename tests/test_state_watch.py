"""What a change of a device's state makes of a window, and that a state within it is seen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from devices.base import DeviceError, TransientDeviceError
from devices.clock import MonotonicClock
from devices.conditions import host_conditions
from devices.host import Host
from devices.state_watch import changes, state_marks, switched_cores, watched
from harness.recording import record
from harness.schema import TrialProtocol
from harness.session import run_trial
from results.environments import Conditions
from tests.eventually import eventually
from tests.fakes.machine import FakeBench, FakeDevice, FakeMachine, FakeMeter

BARE = TrialProtocol(warmup=0, repeats=1, idle_s=0)


CAPPED = ("cpu 0-3 limited to 1500 of 2000 MHz",)


def states(name: str, *values: object) -> list[Conditions]:
    """Of a machine that says that it is on its battery, where nothing else is said of that."""
    return [Conditions(at_s=10.0 * i, **{"charging": False, name: value}) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("name", "values", "reads_battery", "marks"),
    [
        ("charging", (False, False, False), True, ()),
        ("charging", (True, True, True), True, ("charging",)),
        ("charging", (True, True, True), False, ()),
        ("charging", (False, True, False), True, ("charging",)),
        ("charging", (False, True, False), False, ("power source changed",)),
        ("charging", (False, None, False), True, ("power source unknown",)),
        ("charging", (None, None, None), True, ("power source unknown",)),
        ("charging", (None, None, None), False, ()),
        ("throttled", (False, True, False), False, ("throttled",)),
        ("boot_id", ("a", None, "a"), False, ()),
        ("boot_id", ("a", "a", "b"), False, ("restarted",)),
        ("screen_on", (True, False, True), True, ("screen changed",)),
        ("screen_brightness", (10, 10, 200), True, ("screen changed",)),
        ("airplane_mode", (True, True, False), True, ("radio changed",)),
        ("frequency_caps", (CAPPED, None, CAPPED), True, ()),
        ("frequency_caps", ((), CAPPED, ()), True, ("clock limits changed",)),
        ("cores_online", ("0-3", "0-1", None), True, ()),
        ("cpu_policy", (("governor powersave",), None, ("governor powersave",)), False, ()),
        ("cpu_policy", (("governor powersave",), None, ("governor performance",)), False, ("clock limits changed",)),
        ("gpu_limits", (("gpu0: 300 W",), None, ("gpu0: 300 W",)), False, ()),
        ("gpu_limits", (("gpu0: 300 W",), None, ("gpu0: 200 W",)), False, ("clock limits changed",)),
        ("suspended_s", (5.0, 5.05, 5.02), False, ()),
        ("suspended_s", (5.0, 5.0, 65.0), False, ("suspended",)),
        # 20 s: 3.7 % are the most that a battery can lose.
        ("battery_percent", (80.0, 79.0, 77.0), True, ()),
        ("battery_percent", (80.0, 79.0, 74.0), True, ("battery level jumped",)),
        ("battery_percent", (80.0, 79.0, 80.0), True, ("battery level rose",)),
        ("battery_percent", (80.0, 79.0, 80.0), False, ()),
    ],
)
def test_a_change_of_state_marks_a_window(
    name: str, values: tuple[object, ...], reads_battery: bool, marks: tuple[str, ...]
) -> None:
    assert state_marks(states(name, *values), reads_battery) == marks


def test_a_core_that_goes_off_line_is_told_and_is_no_other_limit() -> None:
    """Of four cores that are limited alike two go off line, then all four: of what has no clock no limit is known."""
    caps = (CAPPED, ("cpu 0-1 limited to 1500 of 2000 MHz",), ())
    seen = [
        Conditions(at_s=10.0 * i, charging=False, frequency_caps=own, cores_online=online)
        for i, (own, online) in enumerate(zip(caps, ("0-7", "0-1,4-7", "4-7"), strict=True))
    ]
    assert state_marks(seen, reads_battery=True) == ()
    assert switched_cores(seen) == ("cores 0-3 were off line at times, in the window or idle",)
    assert switched_cores(seen[:1]) == switched_cores(states("cores_online", None, None)) == ()
    assert changes([*seen, seen[2]]) == (*seen, seen[2]), "the trial keeps which were on line"
    lower = Conditions(
        at_s=30.0, charging=False, frequency_caps=("cpu 0 limited to 900 of 2000 MHz",), cores_online="0,4-7"
    )
    assert state_marks([*seen, lower], reads_battery=True) == ("clock limits changed",)


def test_only_changes_are_kept_between_the_first_state_and_the_last() -> None:
    seen = states("charging", False, False, False, True, True, False, False, False)
    assert [c.at_s for c in changes(seen)] == [0.0, 30.0, 50.0, 70.0]
    assert changes(seen[:1]) == tuple(seen[:1])
    assert changes(seen[:2]) == tuple(seen[:2])


class Laptop(FakeDevice):
    """On a charger between two times of the real clock. `fails`: its state cannot be read within a window."""

    watch_every_s = 0.02

    def __init__(self, meters: Sequence[FakeMeter], fails: bool = False) -> None:
        super().__init__(FakeMachine(), meters)
        self.fails = fails
        self.n_looks = 0

    def watched_state(self) -> Conditions:
        self.n_looks += 1
        if self.fails:
            raise TransientDeviceError("no answer")
        return Conditions(at_s=100.0, charging=1 < self.n_looks < 4)


@pytest.mark.parametrize("fails", [False, True])
def test_a_state_within_a_window_is_seen_by_a_thread_and_a_failed_look_is_none(fails: bool) -> None:
    device = Laptop([], fails)
    device.charging = False
    with watched(device) as seen:
        assert eventually(lambda: device.n_looks >= 6)
    n_looks = device.n_looks
    time.sleep(0.1)
    assert device.n_looks == n_looks
    assert state_marks(seen, reads_battery=False) == (() if fails else ("power source changed",))
    assert (len(seen) == 2) == fails


def test_the_error_of_a_window_comes_out_and_no_other() -> None:
    device = Laptop([])
    device.conditions = iter([Conditions(at_s=1.0)]).__next__  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="lost"), watched(device):
        raise DeviceError("lost")


class SeeingMeter(FakeMeter):
    """Its own readings hold the power source, as an iPhone's battery does."""

    def __init__(self, machine: FakeMachine, *charging: bool | None) -> None:
        super().__init__(machine, method="battery gauge")
        self._charging = charging

    def states(self) -> Sequence[Conditions]:
        return [Conditions(at_s=100.25 + i, charging=c) for i, c in enumerate(self._charging)]


@pytest.mark.parametrize(
    ("charging", "marks"),
    [((False, False), ()), ((False, True, False), ("charging",)), ((False, None), ("power source unknown",))],
)
def test_what_a_meter_sees_beside_its_readings_marks_trials_and_recordings(
    charging: tuple[bool | None, ...], marks: tuple[str, ...]
) -> None:
    bench = FakeBench()
    bench.fake_device.meters = [SeeingMeter(bench.machine, *charging)]
    bench.fake_device.charging = False
    trial, _ = run_trial(bench.arm_of("c"), BARE, repeat=0)
    assert trial.marks == marks
    assert record(bench.fake_device, bench.machine, 3.0, lambda left_s: None).marks == marks


def test_a_charger_within_the_idle_stretch_alone_marks_the_trial() -> None:
    """Net energy is what lies above the idle power: where that is disturbed, it is wrong."""
    bench = FakeBench()
    charging = iter([False, True])
    told = bench.fake_device.conditions
    bench.fake_device.conditions = lambda: told().model_copy(update={"charging": next(charging, False)})  # type: ignore[method-assign]
    trial, _ = run_trial(bench.arm_of("c"), BARE.model_copy(update={"idle_s": 2.0}), repeat=0)
    assert trial.marks == ("power source changed",)


# --- this machine ----------------------------------------------------------------------------------------------------


@pytest.fixture
def power_supply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What psutil reads instead of the machine's own."""
    folder = tmp_path / "power_supply"
    linux = pytest.importorskip("psutil._pslinux")
    monkeypatch.setattr(linux, "POWER_SUPPLY_PATH", str(folder))
    return folder


def laptop_files(folder: Path, on_line: str) -> None:
    battery, mains = folder / "BAT0", folder / "AC0"
    for part in (battery, mains):
        part.mkdir(parents=True, exist_ok=True)
    told = {"energy_now": "40000000", "energy_full": "50000000", "power_now": "9000000", "status": "Discharging"}
    for name, text in told.items():
        (battery / name).write_text(f"{text}\n")
    (mains / "online").write_text(f"{on_line}\n")


def test_a_kernel_without_power_supplies_is_a_machine_without_a_battery(power_supply: Path) -> None:
    state = host_conditions(1.0)
    assert (state.charging, state.battery_percent) == (None, None)
    assert state.load_average_1m is not None


def test_a_battery_whose_files_hold_no_numbers_costs_no_trial(power_supply: Path) -> None:
    laptop_files(power_supply, "0")
    (power_supply / "BAT0" / "energy_now").write_text("unknown\n")
    assert host_conditions(1.0).battery_percent is None


def test_a_laptop_whose_power_source_changes_within_a_window_is_seen(power_supply: Path) -> None:
    laptop_files(power_supply, "0")
    host = Host("host", (), {}, MonotonicClock())
    host.open()
    assert host.watch_every_s == 1.0
    with watched(host) as seen:
        laptop_files(power_supply, "1")
        seen.append(host.watched_state())
        laptop_files(power_supply, "0")
    host.close()
    assert [(c.charging, c.battery_percent) for c in seen] == [(False, 80.0), (True, 80.0), (False, 80.0)]
    assert state_marks(seen, reads_battery=False) == ("power source changed",)


def test_a_machine_without_a_battery_is_not_disturbed_within_its_windows(power_supply: Path) -> None:
    power_supply.mkdir()
    host = Host("host", (), {}, MonotonicClock())
    host.open()
    assert host.watch_every_s is None
    host.close()


def test_time_asleep_is_the_distance_of_two_clocks() -> None:
    before, after = host_conditions(1.0), host_conditions(2.0)
    assert before.suspended_s is not None
    assert after.suspended_s == pytest.approx(before.suspended_s, abs=0.1)


def test_a_mac_that_slept_in_a_window_marks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks of macOS (clock_gettime(3)): CLOCK_UPTIME_RAW is as CLOCK_MONOTONIC_RAW, and stands while it sleeps."""
    raw, uptime = 4, 8
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    monkeypatch.setattr(time, "CLOCK_MONOTONIC_RAW", raw, raising=False)
    monkeypatch.setattr(time, "CLOCK_UPTIME_RAW", uptime, raising=False)
    shows_s = {raw: 1000.0, uptime: 940.0}
    monkeypatch.setattr(time, "clock_gettime", lambda clock: shows_s[clock])
    seen = [host_conditions(1.0)]
    shows_s |= {raw: 1030.0, uptime: 960.0}
    seen.append(host_conditions(2.0))
    assert [c.suspended_s for c in seen] == [60.0, 70.0]
    assert state_marks(seen, reads_battery=False) == ("suspended",)
