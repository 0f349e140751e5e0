"""NVML's meter on a C library in NVML's place."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from devices.gpu_programs import programs_of_others
from tests.fakes.libraries import open_code, watts, window_code
from tests.fakes.nvml import FakeNvml, in_step_code
from tests.fakes.stepped_clock import BEGUN_S

NVML, ZEUS = "devices.meters.nvml.NvmlMeter", "devices.meters.zeus.ZeusMeter"
WINDOW = window_code(NVML)
OPEN = open_code(NVML)


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    return FakeNvml(tmp_path_factory.mktemp("nvml"))


def test_counter_of_two_gpus_in_joules_with_power_beside_each(nvml: FakeNvml) -> None:
    state = {"gpus": 2, "watts": 150, "tick_ms": 100}
    answer = nvml.run_fresh(in_step_code(NVML, 1.2, **state), **state)
    assert answer["kinds"] == {"gpu0": "counter", "gpu0 power": "power", "gpu1": "counter", "gpu1 power": "power"}
    # 150 and 300 W. Within 2 %, although the counter ticks 12 times only: the meter reads past both ends.
    expected_w = {"total": 450.0, "gpu0": 150.0, "gpu1": 300.0, "gpu0 power": 150.0, "gpu1 power": 300.0}
    assert watts(answer) == pytest.approx(expected_w, rel=0.02)
    first = answer["readings"]["total"]
    assert first["method"] == "counter"
    # Each GPU's gain errs for itself, 5 % / sqrt(3) of sqrt(150^2 + 300^2) W. At each end both counters are up
    # to a reading old, 50 ms, and tick at one time here: 450 W for that.
    gain_j = 0.05 / 3**0.5 * (150**2 + 300**2) ** 0.5 * first["duration_s"]
    aged_j = 450 * 0.05 * (2 / 12) ** 0.5
    assert first["uncertainty_j"] == pytest.approx((gain_j**2 + aged_j**2) ** 0.5, rel=0.02)
    assert answer["readings"]["gpu0 power"]["method"] == "integrated power"
    assert answer["notes"]["gpu0"].startswith("not throttled; counter ")
    assert answer["notes"]["gpu0"].endswith("they agree")


def test_power_that_disagrees_with_the_counter_is_said_and_stays_out_of_the_total(nvml: FakeNvml) -> None:
    state = {"watts": 200, "tick_ms": 100, "power_scale": 1.3}
    answer = nvml.run(in_step_code(NVML, 2.0, **state), **state)
    assert watts(answer) == pytest.approx({"total": 200.0, "gpu0": 200.0, "gpu0 power": 260.0}, rel=0.02)
    assert "they DISAGREE" in answer["notes"]["gpu0"]


def test_window_too_short_for_the_check_says_that_it_was_not_made(nvml: FakeNvml) -> None:
    answer = nvml.run(window_code("devices.meters.nvml.NvmlMeter", 0.2), tick_ms=100)
    assert "counter and power samples not compared: nvml gpu0: unresolved" in answer["notes"]["gpu0"]


def test_throttle_reasons_of_the_window_are_noted(nvml: FakeNvml) -> None:
    # 0x44: software power cap and hardware thermal slowdown (nvml.h); set in the second half.
    code = window_code("devices.meters.nvml.NvmlMeter", meanwhile="set_state(reasons=0x44)")
    note = nvml.run(code + "answer['throttled'] = meter.is_throttled()\n", reasons=1)
    counted = re.match(
        r"throttled: hw_thermal_slowdown in (\d+) of (\d+) readings, sw_power_cap in \1 of \2", note["notes"]["gpu0"]
    )
    assert counted is not None, note["notes"]
    assert 0.3 < int(counted[1]) / int(counted[2]) < 0.7
    assert note["throttled"] is True


@pytest.mark.parametrize(
    ("reasons", "throttled"), [(0x1, False), (0x4, False), (0x20, True), (0x8, True), (0x80, True)]
)
def test_heat_and_faults_taint_a_trial_and_a_power_cap_does_not(nvml: FakeNvml, reasons: int, throttled: bool) -> None:
    code = OPEN.replace(
        "NvmlMeter(0.05, MonotonicClock()).open()", "meter = NvmlMeter(0.05, MonotonicClock()); meter.open()"
    )
    assert nvml.run(code + "answer = meter.is_throttled()\n", reasons=reasons) is throttled


def test_driver_before_535_has_the_reasons_under_their_old_name(nvml: FakeNvml) -> None:
    # 13: function not found.
    answer = nvml.run(window_code("devices.meters.nvml.NvmlMeter", 0.2), events=13, reasons=0x40)
    assert answer["notes"]["gpu0"].startswith("throttled: hw_thermal_slowdown in ")
    unknown = nvml.run(window_code("devices.meters.nvml.NvmlMeter", 0.2), events=3, throttle=3)
    assert unknown["notes"]["gpu0"].startswith("clock event reasons cannot be read")


def test_without_the_counter_power_is_integrated_and_says_so(nvml: FakeNvml) -> None:
    state = {"gpus": 2, "watts": 70, "energy": 3}
    answer = nvml.run(in_step_code(NVML, 1.2, **state), **state)
    assert answer["kinds"] == {"gpu0": "power", "gpu1": "power"}
    assert answer["readings"]["total"]["method"] == "integrated power"
    assert watts(answer) == pytest.approx({"total": 210.0, "gpu0": 70.0, "gpu1": 140.0}, rel=1e-6)


def test_counter_without_a_power_sensor_is_read_alone(nvml: FakeNvml) -> None:
    state = {"watts": 70, "tick_ms": 100, "power": 3}
    answer = nvml.run(in_step_code(NVML, 1.2, **state), **state)
    assert answer["kinds"] == {"gpu0": "counter"}
    assert watts(answer)["total"] == pytest.approx(70.0, rel=0.02)


@pytest.mark.parametrize(
    ("state", "period_s", "averaged_s"),
    [
        ({"instant": 0, "architecture": 9}, 0.1, None),
        # The manual of nvmlDeviceGetPowerUsage: Ampere (except GA100) and later average 1 s.
        ({"instant": 3, "architecture": 9}, 0.1, 1.0),
        ({"instant": 3, "architecture": 7, "capability": 86}, 0.1, 1.0),
        ({"instant": 3, "architecture": 7, "capability": 80}, 0.1, None),
        ({"instant": 3, "architecture": 5}, 0.1, None),
        ({"instant": 3, "told": 3}, 1.0, None),
        ({"instant": 3, "architecture": 0xFFFFFFFF}, 1.0, None),
    ],
)
def test_a_power_reading_is_an_instant_or_a_mean_as_its_architecture_has_it(
    nvml: FakeNvml, state: dict[str, float], period_s: float, averaged_s: float | None
) -> None:
    code = OPEN.replace(
        "NvmlMeter(0.05, MonotonicClock()).open()", "meter = NvmlMeter(0.05, MonotonicClock()); meter.open()"
    )
    code += "answer = {c.component: (c.update_period_s, c.averaged_s) for c in meter.channels}\n"
    assert nvml.run(code, **state) == {"gpu0": [0.1, None], "gpu0 power": [period_s, averaged_s]}


def test_steps_of_a_gpu_that_shows_means_of_a_second_are_within_two_sigma(nvml: FakeNvml) -> None:
    """Power that steps from 60 W to 300 W and back, shown as the mean of the last second, renewed every 0.1 s; 200
    windows of 10.5 s, read every 50 ms."""
    code = """
    import numpy as np
    from devices.clock import MonotonicClock
    from devices.meters.nvml import NvmlMeter
    from results.energy import energy_between
    meter = NvmlMeter(0.05, MonotonicClock())
    meter.open()
    rng, within, sigma_j = np.random.default_rng(5), [], []
    for _ in range(200):
        up_s, down_s = np.sort(rng.uniform(1.5, 15.0, 2))
        power_w = lambda t: 60 * t + 240 * (np.clip(t, up_s, down_s) - up_s)  # its integral
        first_s = rng.uniform(0, 0.1)
        t = np.arange(0.0, 18.0, 0.05) + rng.uniform(0, 0.05)
        renewed_s = first_s + 0.1 * np.floor((t - first_s) / 0.1)
        shown_w = power_w(renewed_s) - power_w(renewed_s - 1.0)
        # A sensor that shows one value for seconds hangs.
        shown_w += 0.1 * rng.standard_normal(300)[np.rint(renewed_s * 10).astype(int) + 1]
        rows = np.stack([shown_w, np.full(len(t), np.nan)], axis=1)
        start_s = rng.uniform(1.5, 3.5)
        window = (start_s, start_s + 10.5)
        found = energy_between(meter.traces(t, rows), [window], "all", "nvml")
        assert found.energy_j is not None, found.reason
        error_j = found.energy_j - (power_w(window[1]) - power_w(window[0]))
        # Of the meter's gain nothing: the sensor here has none.
        gain_j = 0.05 / 3**0.5 * found.energy_j
        sigma_j.append(max(found.uncertainty_j**2 - gain_j**2, 0.0) ** 0.5)
        within.append(bool(abs(error_j) <= 2 * sigma_j[-1]))
    answer = [sum(within) / len(within), float(np.median(sigma_j))]
    """
    share, sigma_j = nvml.run(code, energy=3, instant=3, architecture=8)
    assert share >= 0.95
    assert sigma_j < 100


def test_gpu_that_is_lost_is_a_transient_error_not_0_joules(nvml: FakeNvml) -> None:
    lost = window_code("devices.meters.nvml.NvmlMeter", 0.3, meanwhile="set_state(energy=15)")
    name, message = nvml.run(lost)
    assert name == "TransientDeviceError"
    assert "GPU is lost" in message
    assert "was it lost or reset?" in message


@pytest.mark.parametrize(
    ("afterwards", "outcome"),
    [
        ("set_state(gpus=2, energy=0)", "started"),
        # A reset takes seconds.
        ("time_by_steps.later(1.2, set_state, gpus=2, energy=0)", "started"),
        ("time_by_steps.later(1.2, set_state, gpus=2, init=0); set_state(gpus=2, init=9)", "started"),
        ("pass", "MeterUnavailableError NVML: GPU is lost"),
        (
            "set_state(gpus=1)",
            "MeterUnavailableError NVML: gpu0, gpu0 power, gpu1, gpu1 power were measured",
        ),
    ],
)
def test_lost_gpu_is_waited_for_in_the_next_window(nvml: FakeNvml, afterwards: str, outcome: str) -> None:
    limit_s = 4.0 if outcome == "started" else 1.0  # five looks in vain say as much as twenty
    code = window_code("devices.meters.nvml.NvmlMeter", 0.3, meanwhile="set_state(gpus=2, energy=15)") + (
        "import devices.reconnect as reconnect\n"
        f"reconnect.RECONNECT_S, reconnect.LOOK_EVERY_S = {limit_s}, 0.2\n"
        f"{afterwards}\n"
        "try:\n"
        "    meter.start()\n"
        "    answer = 'started' if len(meter.stop()[0].values) >= 2 else 'no readings'\n"
        "except DeviceError as error:\n"
        "    answer = f'{type(error).__name__} {error}'\n"
    )
    assert nvml.run(code, gpus=2).startswith(outcome)


RECORDING = """
import time
from devices.clock import MonotonicClock
from harness.recording import record
from results.energy import energy_between
from tests.fakes.machine import FakeDevice, FakeMachine
from {module} import {name}
device, clock = FakeDevice(FakeMachine(), []), MonotonicClock()
meter = {name}(0.05, clock)
meter.open()
device.meters = [meter]
states = {states!r}
set_s = []
def set_in_time(state):
    before_s = clock.now_s()
    set_state(**state)
    set_s.append((before_s, clock.now_s()))
def on_tick(left_s):
    while states:
        after_s, state = states.pop()
        time_by_steps.later(after_s, set_in_time, state)
found = record(device, clock, {seconds}, on_tick)
meter._sampler = object()  # as if it went on
trouble = meter.tend()
def told(from_s, to_s):
    # From a reading to a reading, where there are some: how late the sampler came to an edge is not asked.
    own_s = [t for t in found.traces[0].times_s.tolist() if from_s <= t <= to_s]
    window = (own_s[0], own_s[-1]) if len(own_s) > 1 else (from_s, to_s)
    return energy_between(found.traces, [window], "all", meter.name).model_dump()
answer = {{
    "before": told(0.0, set_s[0][0]),
    "behind": told(set_s[-1][1], found.window[1]),
    "whole": told(0.0, found.window[1]),
    "n_behind": sum(t > found.window[1] - 1.0 for t in found.traces[0].times_s.tolist()),
    "interrupted": found.interrupted,
    "trouble": trouble,
}}
"""


def recording_code(meter: str, states: list[tuple[float, dict[str, float]]], seconds: float = 5.0) -> str:
    """A recording in which the library's state changes. answer: energy before and behind the middle, and of all."""
    module, _, name = meter.rpartition(".")
    return RECORDING.format(module=module, name=name, states=states, seconds=seconds)


BASE: dict[str, float] = {"gpus": 2, "watts": 100, "tick_ms": 20}
LOST = BASE | {"energy": 15}


@pytest.mark.parametrize("meter", [NVML, ZEUS])
def test_gpu_that_is_lost_and_comes_back_in_a_recording_is_read_again(nvml: FakeNvml, meter: str) -> None:
    answer = nvml.run(recording_code(meter, [(1.2, LOST), (2.7, BASE)]), **BASE)
    for stretch in ("before", "behind", "whole"):  # the counter went on meanwhile, and knows what was drawn
        reading = answer[stretch]
        assert reading["reason"] is None
        assert reading["energy_j"] / reading["duration_s"] == pytest.approx(300.0, rel=0.05)
    [why] = answer["interrupted"]
    assert "lost" in why


def test_driver_that_is_loaded_again_in_a_recording_counts_from_0_and_is_read_again(nvml: FakeNvml) -> None:
    gone = BASE | {"init": 9, "energy": 15}
    code = recording_code(NVML, [(1.2, LOST), (1.6, gone), (2.7, BASE | {"restart_s": -1.0})])
    answer = nvml.run(code.replace("'restart_s': -1.0", "'restart_s': time.monotonic() + 2.0"), **BASE)
    assert answer["n_behind"] >= 5  # of 20
    assert answer["before"]["energy_j"] / answer["before"]["duration_s"] == pytest.approx(300.0, rel=0.05)
    assert answer["whole"]["energy_j"] is None
    assert "it was reset or the device was lost" in answer["whole"]["reason"]


@pytest.mark.parametrize("back", [{"swapped": 1}, {"gpus": 1}], ids=["numbers swapped", "one of them only"])
def test_other_gpus_that_come_back_are_not_read_in_their_place(nvml: FakeNvml, back: dict[str, float]) -> None:
    answer = nvml.run(recording_code(NVML, [(1.2, LOST), (1.5, BASE | back)]), **BASE)
    assert answer["before"]["energy_j"] / answer["before"]["duration_s"] == pytest.approx(300.0, rel=0.05)
    assert answer["behind"]["energy_j"] is None
    assert "totals would not be of the same GPUs" in answer["trouble"]


def test_gpu_that_was_waited_for_in_vain_is_looked_at_once_from_then_on(nvml: FakeNvml) -> None:
    code = window_code("devices.meters.nvml.NvmlMeter", 0.3, meanwhile="set_state(energy=15)") + (
        "import devices.reconnect as reconnect\n"
        "reconnect.RECONNECT_S, reconnect.LOOK_EVERY_S = 2.0, 0.1\n"
        "answer, looks, reopen = [], [], meter.reopen\n"
        "meter.reopen = lambda: (looks.append(1), reopen())\n"
        "for _ in range(2):\n"
        "    looks.clear()\n"
        "    try:\n"
        "        meter.start()\n"
        "    except DeviceError:\n"
        "        answer.append(len(looks))\n"
    )
    first, second = nvml.run(code)
    assert first > 1
    assert second == 1


def test_a_board_draws_no_more_than_three_times_its_highest_limit(nvml: FakeNvml) -> None:
    code = """
from devices.clock import MonotonicClock
from devices.meters.nvml import NvmlMeter
meter = NvmlMeter(0.05, MonotonicClock())
meter.open()
answer = [channel.max_power_w for channel in meter.channels]
"""
    assert nvml.run(code, limit_w=80) == [240.0, 240.0]
    assert nvml.run(code) == [4000.0, 4000.0]


def test_whatever_the_binding_raises_is_our_error(nvml: FakeNvml) -> None:
    """A call of NVML's that this binding and this driver understand differently."""
    broken = (
        "import pynvml\n"
        "def odd(*_): raise UnicodeDecodeError('utf-8', b'\\xff', 0, 1, 'from the driver')\n"
        "pynvml.nvmlDeviceGetCount = odd\n"
    )
    assert "pynvml failed (UnicodeDecodeError" in nvml.run(broken + OPEN)


def test_counter_that_steps_back_has_no_energy_and_power_beside_it_has(nvml: FakeNvml) -> None:
    code = in_step_code(NVML, 2.0, watts=100, restart_s=BEGUN_S + 1.7)
    readings = nvml.run(code, watts=100)["readings"]
    assert readings["gpu0"]["energy_j"] is None
    assert "counter stepped back" in readings["gpu0"]["reason"]
    assert "it was reset or the device was lost" in readings["gpu0"]["reason"]
    assert readings["gpu0 power"]["energy_j"] == pytest.approx(100 * readings["gpu0 power"]["duration_s"], rel=0.01)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"init": 9}, "Driver Not Loaded; is an NVIDIA GPU with its driver here?"),
        ({"gpus": 0}, "the driver is loaded but lists no GPU"),
        ({"energy": 3, "power": 3}, "Not Supported.*Jetson"),
        ({"energy": 15}, "GPU is lost"),
        ({"mig": 1, "gpus": 2}, r"GPU 0, 1 is split by MIG.*of all instances together.*nvidia-smi -i 0 -mig 0"),
    ],
)
def test_nvml_that_cannot_measure_is_no_meter(nvml: FakeNvml, state: dict[str, float], message: str) -> None:
    assert re.search(message, nvml.run(OPEN, **state))


def test_gpu_without_mig_is_none_that_is_split(nvml: FakeNvml) -> None:
    assert nvml.run(OPEN, mig=3) == "opened"


def test_machine_without_the_library_has_no_nvml_meter(tmp_path: Path) -> None:
    # A file that is no library, found first: the loader fails as it does where there is none.
    empty = FakeNvml(tmp_path)
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    assert "Library Not Found; is an NVIDIA GPU" in empty.run_fresh(OPEN)


FREEZES = "set_state(watts=100, tick_ms=100, freeze_s=time.monotonic(){})"
ON_TIME = """
import numpy as np
from devices.clock import MonotonicClock
from devices.meters.nvml import NvmlMeter
from results.energy import energy_between
meter = NvmlMeter(0.05, MonotonicClock())
meter.open()
rows = []
for at_s in (times_s := np.concatenate([np.arange(99.25, 99.85, 0.01), np.arange(99.85, 102.2, 0.05)])):
    set_state(watts=100, tick_ms=100, freeze_s=101.0, frozen_for_s={}, now_s=at_s)
    rows.append(meter.read())
answer = energy_between(meter.traces(times_s, np.asarray(rows)), [(100.0, 102.0)], "all", "nvml").model_dump()
"""
"""Readings as the meter takes them, at times of which the library is told: a busy machine is not late for any."""


@pytest.mark.parametrize("frozen_for_s", [0.5, 1e9])
def test_counter_that_freezes_is_bounded_by_the_power_beside_it(nvml: FakeNvml, frozen_for_s: float) -> None:
    """Half a second or all of the rest of two is not in the counter; the samples beside it say what flowed."""
    reading = nvml.run(ON_TIME.format(frozen_for_s), watts=100, tick_ms=100, now_s=99.0)
    assert abs(reading["energy_j"] - 200.0) <= 2 * reading["uncertainty_j"] <= 18.0
    assert "nvml gpu0: its counter stood still for" in reading["remark"]


def test_counter_that_freezes_without_power_beside_it_leaves_no_energy(nvml: FakeNvml) -> None:
    code = window_code("devices.meters.nvml.NvmlMeter", 2.0, meanwhile=FREEZES.format(", power=3, instant=3"))
    reading = nvml.run(code, watts=100, tick_ms=100, power=3, instant=3)["readings"]["total"]
    assert reading["energy_j"] is None
    assert "nvml gpu0: its counter stood still for" in reading["reason"]


def test_power_of_0_watts_without_a_counter_is_missing(nvml: FakeNvml) -> None:
    reading = nvml.run(window_code("devices.meters.nvml.NvmlMeter", 1.2), energy=3, watts=0)["readings"]["total"]
    assert (reading["energy_j"], reading["uncertainty_j"]) == (None, None)
    assert "it shows 0 W" in reading["reason"]


HOST = """
import os, subprocess, sys
from devices.clock import MonotonicClock
from devices.host import Host
from devices.meters.nvml import NvmlMeter
clock = MonotonicClock()
host = Host("host", ["nvml"], {"nvml": lambda: NvmlMeter(0.05, clock)}, clock)
host.open()
"""


def test_a_power_limit_that_is_changed_marks_the_window_and_one_that_cannot_be_read_does_not(nvml: FakeNvml) -> None:
    code = HOST + (
        "from devices.state_watch import state_marks\n"
        "seen = [host.conditions()]\n"
        "MEANWHILE\n"
        "seen.append(host.conditions())\n"
        "answer = [list(state_marks(seen, False)), [c.gpu_limits for c in seen]]\n"
    )
    both = ["gpu0: 300 W", "gpu1: 300 W"]
    changed = code.replace("MEANWHILE", "set_state(gpus=2, set_limit_w=250)")
    assert nvml.run(changed, gpus=2, set_limit_w=300) == [
        ["clock limits changed"],
        [both, ["gpu0: 250 W", "gpu1: 250 W"]],
    ]
    assert nvml.run(code.replace("MEANWHILE", "pass"), gpus=2, set_limit_w=300) == [[], [both, both]]
    assert nvml.run(code.replace("MEANWHILE", "set_state(gpus=2)"), gpus=2, set_limit_w=300) == [[], [both, None]]


def test_a_host_says_which_gpus_it_has_and_their_driver_where_a_meter_sees_them(nvml: FakeNvml) -> None:
    """Else a run on another card, or with another driver, would be the same machine and the same software."""
    code = HOST + "found = host.environment()\nanswer = [found.gpus, found.gpu_driver]\n"
    assert nvml.run(code, gpus=2, mixed=1, driver=570) == [["Fake GPU 0", "Fake GPU 1"], "570.65.06"]
    blind = code.replace('["nvml"], {"nvml": lambda: NvmlMeter(0.05, clock)}, clock', "[], {}, clock")
    assert nvml.run(blind, gpus=2) == [None, None]
    computing = blind.replace("[], {}, clock", '[], {}, clock, "gpu"')
    assert nvml.run(computing, gpus=1) == [["Fake GPU"], "580.65.06"]
    assert nvml.run(computing, init=9) == [None, None]


def test_programs_of_others_on_a_gpu_are_told_and_our_own_are_not(nvml: FakeNvml) -> None:
    code = HOST + "set_state(gpus=2, others=MEANWHILE)\nanswer = [host.conditions().gpu_others, os.getppid()]\n"
    seen, parent = nvml.run(code.replace("MEANWHILE", "os.getppid()"), gpus=2)
    assert len(seen) == 1
    assert re.fullmatch(rf"gpu0: \S.* \(pid {parent}\)", seen[0])
    child = "subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE).pid"
    for ours in ("0", "os.getpid()", child):
        assert nvml.run(code.replace("MEANWHILE", ours), gpus=2)[0] == []


def test_a_container_that_sees_ids_of_the_machine_does_not_take_itself_for_another(tmp_path: Path) -> None:
    own, other = os.getpid(), os.getppid()
    # Any file's inode but that of the machine's own namespace is that of a container.
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").touch()
    assert programs_of_others({0: [other]}, tmp_path) is None
    # The driver translates ids where it lists us among them.
    translated = programs_of_others({0: [own], 1: [other]}, tmp_path)
    assert translated is not None
    assert [words.endswith(f"(pid {other})") for words in translated] == [True]
    assert programs_of_others({0: []}, tmp_path) == ()
