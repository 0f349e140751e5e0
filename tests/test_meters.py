"""Meters at their real boundaries: a powercap tree, a C library in NVML's place, CSV files, this process's CPU time."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devices.base import DeviceError, Meter, MeterUnavailableError
from devices.clock import MonotonicClock
from devices.meters.modelled import ModelledMeter, WattsSheet, load_watts_sheet
from devices.meters.rapl import RaplMeter
from devices.meters.replay import ReplayMeter
from results.energy import energy_between
from results.records import EnergyReading, PowerTrace
from tests.fakes.nvml import FakeNvml
from tests.fakes.powercap import WRAP_UJ, Powercap

ROOT = Path(__file__).parents[1]
CLOCK = MonotonicClock()


def measure(meter: Meter, work: Callable[[], object]) -> tuple[list[PowerTrace], float, float]:
    """(traces, start, end) of the work, as a session measures it."""
    meter.start()
    start_s = CLOCK.now_s()
    work()
    end_s = CLOCK.now_s()
    return list(meter.stop()), start_s, end_s


def total(traces: list[PowerTrace], start_s: float, end_s: float, component: str = "total") -> EnergyReading:
    return energy_between(traces, [(start_s, end_s)], "all", traces[0].meter, component)


def sleep(seconds: float) -> Callable[[], object]:
    return lambda: time.sleep(seconds)


# --- RAPL ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Powercap]:
    """One package with its parts, its memory, and the platform around it."""
    tree = Powercap(tmp_path / "powercap")
    tree.add("intel-rapl:0", "package-0", 40.0)
    tree.add("intel-rapl:0:0", "core", 30.0)
    tree.add("intel-rapl:0:1", "uncore", 0.0)
    tree.add("intel-rapl:0:2", "dram", 5.0)
    tree.add("intel-rapl:1", "psys", 60.0)
    with tree:
        yield tree


def rapl(tree: Powercap) -> RaplMeter:
    meter = RaplMeter(0.01, CLOCK, tree.root)
    meter.open()
    return meter


def test_rapl_sums_packages_and_memory_but_neither_their_parts_nor_the_platform(laptop: Powercap) -> None:
    meter = rapl(laptop)
    assert {c.component: c.additive for c in meter.channels} == {
        "package-0": True,
        "core of intel-rapl:0": False,
        "uncore of intel-rapl:0": False,
        "dram of intel-rapl:0": True,
        "psys": False,
    }
    traces, start_s, end_s = measure(meter, sleep(0.3))
    reading = total(traces, start_s, end_s)
    # 40 + 5 W; 105 W with the platform, 75 W with the cores.
    assert reading.average_power_w == pytest.approx(45.0, rel=0.05)
    assert reading.method == "counter"
    assert total(traces, start_s, end_s, "psys").average_power_w == pytest.approx(60.0, rel=0.05)


def test_rapl_knows_the_zones_of_two_packages_apart(tmp_path: Path) -> None:
    tree = Powercap(tmp_path / "powercap")
    for i in range(2):
        tree.add(f"intel-rapl:{i}", f"package-{i}", 10.0)
        tree.add(f"intel-rapl:{i}:0", "dram", 2.0)
    with tree:
        meter = rapl(tree)
        traces, start_s, end_s = measure(meter, sleep(0.2))
    assert len({c.component for c in meter.channels}) == 4
    assert total(traces, start_s, end_s).average_power_w == pytest.approx(24.0, rel=0.05)


def test_rapl_counter_wraps_during_a_window(tmp_path: Path) -> None:
    tree = Powercap(tmp_path / "powercap")
    # It reaches its range 0.3 s after the tree starts to count; opening takes 0.05 s of them.
    tree.add("intel-rapl:0", "package-0", 50.0, start_uj=WRAP_UJ - 15e6)
    with tree:
        traces, start_s, end_s = measure(rapl(tree), sleep(0.6))
    assert (np.diff(traces[0].values) < 0).sum() == 1
    assert traces[0].wrap_at_j == pytest.approx(262143.32885)
    assert total(traces, start_s, end_s).average_power_w == pytest.approx(50.0, rel=0.05)


def test_rapl_marks_resolve_phases_shorter_than_the_sampling_interval(tmp_path: Path) -> None:
    tree = Powercap(tmp_path / "powercap")
    tree.add("intel-rapl:0", "package-0", 50.0)
    with tree:
        meter = RaplMeter(1.0, CLOCK, tree.root)
        meter.open()
        meter.start()
        edges_s = []
        for _ in range(5):
            edges_s.append(CLOCK.now_s())
            meter.mark()
            time.sleep(0.03)
        traces = meter.stop()
    phases = [*itertools.pairwise(edges_s)][::2]
    reading = energy_between(traces, phases, "decode", "rapl")
    assert reading.average_power_w == pytest.approx(50.0, rel=0.15)


def test_no_rapl_zone_is_no_meter(tmp_path: Path) -> None:
    with pytest.raises(MeterUnavailableError, match="no intel-rapl zone under"):
        RaplMeter(0.01, CLOCK, tmp_path / "nothing here").open()
    with pytest.raises(MeterUnavailableError, match="no intel-rapl zone under"):
        RaplMeter(0.01, CLOCK, Powercap(tmp_path / "no zones").root).open()


def test_rapl_counter_that_stands_still_is_left_out_and_never_0_joules(tmp_path: Path) -> None:
    tree = Powercap(tmp_path / "powercap")
    tree.add("intel-rapl:0", "package-0", 20.0)
    tree.add("intel-rapl:0:0", "dram", 0.0)
    with tree:
        meter = rapl(tree)
        assert [c.component for c in meter.channels] == ["package-0"]
        traces, start_s, end_s = measure(meter, sleep(0.2))
        assert total(traces, start_s, end_s).average_power_w == pytest.approx(20.0, rel=0.05)
    dead = Powercap(tmp_path / "virtual")
    dead.add("intel-rapl:0", "package-0", 0.0)
    with pytest.raises(MeterUnavailableError, match=r"stand still \(package-0\)"):
        rapl(dead)


@pytest.mark.parametrize("damage", ["directory", "text", "no range"])
def test_rapl_zone_that_cannot_be_read_is_no_meter(tmp_path: Path, damage: str) -> None:
    tree = Powercap(tmp_path / "powercap")
    zone = tree.add("intel-rapl:0", "package-0", 20.0)
    if damage == "no range":
        (zone / "max_energy_range_uj").unlink()
    else:
        (zone / "energy_uj").unlink()
    if damage == "directory":
        (zone / "energy_uj").mkdir()
    elif damage == "text":
        (zone / "energy_uj").write_text("unavailable")
    with pytest.raises(MeterUnavailableError, match="RAPL:"):
        rapl(tree)


def test_rapl_without_permission_says_how_to_get_it() -> None:
    # As any other user: to root everything is readable. pytest's folders are closed to others, hence a folder of /tmp.
    code = """
        import os, sys, tempfile
        from pathlib import Path
        from devices.base import MeterUnavailableError
        from devices.clock import MonotonicClock
        from devices.meters.rapl import RaplMeter
        from tests.fakes.powercap import Powercap
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            zone = Powercap(Path(folder) / "powercap").add("intel-rapl:0", "package-0", 20.0)
            (zone / "energy_uj").chmod(0o400 if os.geteuid() == 0 else 0)
            if os.geteuid() == 0:
                os.seteuid(65534)
            try:
                RaplMeter(0.01, MonotonicClock(), Path(folder) / "powercap").open()
            except MeterUnavailableError as error:
                print(error)
            if os.getuid() == 0:
                os.seteuid(0)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "energy_uj is readable by root only" in ended.stdout
    assert "sudo chmod a+r" in ended.stdout


def test_rapl_zone_that_vanishes_is_an_error_at_stop(laptop: Powercap) -> None:
    meter = rapl(laptop)
    meter.start()
    laptop.unplug("intel-rapl:0:2")
    time.sleep(0.05)
    with pytest.raises(DeviceError, match="a counter vanished or is unreadable"):
        meter.stop()
    with pytest.raises(DeviceError, match="is not running"):
        meter.stop()


def test_meter_of_a_lost_device_can_still_be_closed(laptop: Powercap) -> None:
    meter = rapl(laptop)
    meter.start()
    laptop.unplug("intel-rapl:0")
    meter.close()
    meter.close()


def test_meter_that_failed_to_start_is_not_running(laptop: Powercap) -> None:
    meter = rapl(laptop)
    laptop.unplug("intel-rapl:0")
    for _ in range(2):
        with pytest.raises(DeviceError, match="vanished or is unreadable"):
            meter.start()
    with pytest.raises(DeviceError, match="is not running"):
        meter.stop()


def test_meter_runs_window_after_window_but_not_two_at_once(laptop: Powercap) -> None:
    meter = rapl(laptop)
    first, *_ = measure(meter, sleep(0.05))
    meter.start()
    with pytest.raises(DeviceError, match="already running"):
        meter.start()
    second = meter.stop()
    assert second[0].times_s[0] > first[0].times_s[-1]


# --- NVML ------------------------------------------------------------------------------------------------------------

NVML_WINDOW = """
    import time
    from devices.base import DeviceError, MeterUnavailableError
    from devices.clock import MonotonicClock
    from devices.meters.nvml import NvmlMeter
    from results.energy import energy_between
    clock = MonotonicClock()
    meter = NvmlMeter(0.01, clock)
    meter.open()
    meter.start()
    start_s = clock.now_s()
    time.sleep(1.2)
    end_s = clock.now_s()
    traces = meter.stop()
    meter.close()
    readings = [energy_between(traces, [(start_s, end_s)], "all", "nvml", c) for c in ("total", "gpu0", "gpu1")]
    answer = {"readings": [r.model_dump() for r in readings], "kinds": [t.kind for t in traces]}
"""

NVML_OPEN = """
    from devices.base import MeterUnavailableError
    from devices.clock import MonotonicClock
    from devices.meters.nvml import NvmlMeter
    try:
        NvmlMeter(0.01, MonotonicClock()).open()
        answer = "opened"
    except MeterUnavailableError as error:
        answer = str(error)
"""


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    return FakeNvml(tmp_path_factory.mktemp("nvml"))


def watts(answer: Any) -> list[float]:
    return [r["energy_j"] / r["duration_s"] for r in answer["readings"]]


def test_nvml_counter_of_two_gpus_in_joules(nvml: FakeNvml) -> None:
    answer = nvml.run(NVML_WINDOW, gpus=2, watts=150, tick_ms=100)
    assert answer["kinds"] == ["counter", "counter"]
    # 150 and 300 W. Within 2 %, although the counter ticks 12 times only: the meter reads past both ends.
    assert watts(answer) == pytest.approx([450.0, 150.0, 300.0], rel=0.02)
    first = answer["readings"][0]
    assert first["method"] == "counter"
    # NVIDIA's 5 % is the larger part: each GPU's gain errs for itself, 5 % / sqrt(3) of sqrt(150^2 + 300^2) W.
    gain_j = 0.05 / 3**0.5 * (150**2 + 300**2) ** 0.5 * first["duration_s"]
    assert gain_j <= first["uncertainty_j"] <= 1.2 * gain_j


def test_nvml_without_the_counter_integrates_power_and_says_so(nvml: FakeNvml) -> None:
    answer = nvml.run(NVML_WINDOW, gpus=2, watts=70, energy=3)
    assert answer["kinds"] == ["power", "power"]
    assert answer["readings"][0]["method"] == "integrated power"
    assert watts(answer) == pytest.approx([210.0, 70.0, 140.0], rel=1e-6)


def test_nvml_gpu_that_is_lost_is_an_error_not_0_joules(nvml: FakeNvml) -> None:
    code = NVML_WINDOW.replace("time.sleep(1.2)", "set_state(energy=15); time.sleep(0.1)").replace(
        "traces = meter.stop()",
        """
    try:
        meter.stop()
        answer = "stopped"
    except DeviceError as error:
        answer = [type(error).__name__, str(error)]
    meter.close()
    print(json.dumps(answer))
    raise SystemExit
    """,
    )
    name, message = nvml.run(code)
    assert name == "DeviceError"
    assert "GPU is lost" in message
    assert "was it lost or reset?" in message


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"init": 9}, "Driver Not Loaded; is an NVIDIA GPU with its driver here?"),
        ({"gpus": 0}, "the driver is loaded but lists no GPU"),
        ({"energy": 3, "power": 3}, "Not Supported.*Jetson"),
        ({"energy": 15}, "GPU is lost"),
    ],
)
def test_nvml_that_cannot_measure_is_no_meter(nvml: FakeNvml, state: dict[str, float], message: str) -> None:
    assert re.search(message, nvml.run(NVML_OPEN, **state))


def test_machine_without_the_library_has_no_nvml_meter(tmp_path: Path) -> None:
    # A file that is no library, found first: the loader fails as it does where there is none.
    empty = FakeNvml(tmp_path)
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    assert "Library Not Found; is an NVIDIA GPU" in empty.run(NVML_OPEN)


def test_zeus_reads_the_same_counter_in_joules(nvml: FakeNvml) -> None:
    code = NVML_WINDOW.replace("devices.meters.nvml import NvmlMeter", "devices.meters.zeus import ZeusMeter")
    code = code.replace("NvmlMeter(", "ZeusMeter(").replace('"nvml"', '"zeus"')
    answer = nvml.run(code, gpus=2, watts=150, tick_ms=100)
    assert watts(answer) == pytest.approx([450.0, 150.0, 300.0], rel=0.02)


def test_zeus_without_any_device_is_no_meter_never_0_joules(nvml: FakeNvml) -> None:
    code = NVML_OPEN.replace("devices.meters.nvml import NvmlMeter", "devices.meters.zeus import ZeusMeter")
    answer = nvml.run(code.replace("NvmlMeter(", "ZeusMeter("), init=9)
    assert answer.startswith("Zeus finds no counter here: ")


def test_zeus_platform_zone_is_not_added_to_the_packages_inside_it(nvml: FakeNvml, tmp_path: Path) -> None:
    for i, name in enumerate(["package-0", "psys"]):
        zone = tmp_path / f"intel-rapl:{i}"
        zone.mkdir()
        for file, text in (("name", name), ("energy_uj", "123456"), ("max_energy_range_uj", str(WRAP_UJ))):
            (zone / file).write_text(f"{text}\n")
    code = f"""
        import zeus.device.cpu.rapl
        zeus.device.cpu.rapl.RAPL_DIR = {str(tmp_path)!r}
        from devices.clock import MonotonicClock
        from devices.meters.zeus import ZeusMeter
        meter = ZeusMeter(0.01, MonotonicClock())
        meter.open()
        answer = [[c.component, c.note, c.additive] for c in meter.channels], list(meter.read())
    """
    channels, values_j = nvml.run(code, init=9)
    assert channels == [["cpu0", "package-0", True], ["cpu1", "psys", False]]
    assert values_j == pytest.approx([0.123456, 0.123456])


def test_zeus_parts_of_a_chip_are_summed_once() -> None:
    from dataclasses import asdict

    from zeus.device.soc.apple import AppleSiliconMeasurement
    from zeus.device.soc.jetson import JetsonMeasurement

    from devices.meters.zeus import soc_channels

    apple = AppleSiliconMeasurement(
        cpu_total_mj=900,
        efficiency_cores_mj=[1, 2],
        performance_cores_mj=[3, 4],
        efficiency_core_manager_mj=5,
        performance_core_manager_mj=6,
        dram_mj=70,
        gpu_mj=800,
        gpu_sram_mj=9,
        ane_mj=None,
    )
    assert {c.component: c.additive for c in soc_channels(asdict(apple)).values()} == {
        "cpu": True,
        "efficiency_core_manager": False,
        "performance_core_manager": False,
        "dram": True,
        "gpu": True,
        "gpu_sram": False,
    }
    board = soc_channels(asdict(JetsonMeasurement(cpu_energy_mj=1.0, gpu_energy_mj=2.0, total_energy_mj=5.0)))
    assert {c.component: c.additive for c in board.values()} == {"cpu": False, "gpu": False, "total_energy": True}
    no_total = soc_channels(asdict(JetsonMeasurement(cpu_energy_mj=1.0, gpu_energy_mj=2.0)))
    assert [c.additive for c in no_total.values()] == [True, True]


# --- modelled --------------------------------------------------------------------------------------------------------

SHEET = WattsSheet(name="test", active_w_per_core=40.0, idle_w=6.0, relative_accuracy=0.25, origin="a test")


def busy(cpu_s: float) -> None:
    until_s = time.process_time() + cpu_s
    while time.process_time() < until_s:
        pass


def test_modelled_energy_is_cpu_time_and_idle_time_by_their_watts() -> None:
    meter = ModelledMeter(0.02, CLOCK, SHEET)
    meter.open()
    cpu_s: list[float] = []

    def work() -> None:
        before_s = time.process_time()
        busy(0.3)
        time.sleep(0.2)
        cpu_s.append(time.process_time() - before_s)

    traces, start_s, end_s = measure(meter, work)
    reading = total(traces, start_s, end_s)
    assert reading.energy_j == pytest.approx(40.0 * cpu_s[0] + 6.0 * (end_s - start_s), rel=0.02)
    assert reading.energy_j is not None
    assert reading.energy_j >= 40.0 * 0.3 + 6.0 * 0.5
    assert reading.method == "modelled"
    assert reading.uncertainty_j == pytest.approx(0.25 * reading.energy_j, rel=0.05)
    assert traces[0].note == "CPU time x 40 W per busy core + 6 W; sheet test (a test)"


def test_modelled_marks_separate_a_busy_phase_from_an_idle_one() -> None:
    meter = ModelledMeter(1.0, CLOCK, SHEET)
    meter.open()
    meter.start()
    edges_s = [CLOCK.now_s()]
    busy(0.1)
    edges_s.append(CLOCK.now_s())
    meter.mark()
    time.sleep(0.1)
    edges_s.append(CLOCK.now_s())
    meter.mark()
    traces = list(meter.stop())
    assert (total(traces, edges_s[0], edges_s[1]).energy_j or 0) >= 40.0 * 0.09
    assert total(traces, edges_s[1], edges_s[2]).average_power_w == pytest.approx(6.0, abs=3.0)


def test_bundled_watts_sheet_admits_that_it_is_a_guess() -> None:
    sheet = load_watts_sheet("generic")
    assert sheet.relative_accuracy >= 0.5
    assert sheet.origin.startswith("assumed")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "Invalid value"),
        ('name = "x"\nactive_w_per_core = 10.0\nidle_w = 1.0\nrelative_accuracy = 0.5', "origin"),
        (
            'name = "x"\nactive_w_per_core = -1\nidle_w = 1.0\nrelative_accuracy = 0.5\norigin = "o"',
            "active_w_per_core",
        ),
        ('name = "x"\nactive_w_per_core = 1\nidle_w = 1\nrelative_accuracy = 0.5\norigin = "o"\ncores = 4', "cores"),
    ],
)
def test_bad_watts_sheet_is_refused_and_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(MeterUnavailableError, match=rf"mine\.toml is not valid[\s\S]*{message}"):
        load_watts_sheet(str(path))


def test_missing_watts_sheet_names_those_that_are_there() -> None:
    with pytest.raises(MeterUnavailableError, match=r"'genric' cannot be read \(No such file.*name one of generic"):
        load_watts_sheet("genric")


# --- replay ----------------------------------------------------------------------------------------------------------


def replay(path: Path, text: str) -> ReplayMeter:
    path.write_text(text)
    meter = ReplayMeter(path, CLOCK)
    meter.open()
    return meter


def waveform(n: int = 101) -> str:
    """Every 10 ms from 50 s on: GPU 20 W + 10 W per second, CPU 3 W."""
    rows = [f"{50 + i / 100:.2f},{20 + i / 10:.1f},x,3" for i in range(n)]
    return "\n".join(["time_s,gpu_w,remark,cpu_w", *rows])


def test_replayed_waveform_gives_its_known_energy_in_every_window(tmp_path: Path) -> None:
    meter = replay(tmp_path / "power.csv", waveform())
    for _ in range(2):
        traces, start_s, end_s = measure(meter, sleep(0.3))
        # A window replays from its beginning, which is `start` and not exactly the window's start.
        a, b = start_s - traces[0].times_s[0], end_s - traces[0].times_s[0]
        assert 0 <= a < 0.1
        expected_j = 20 * (b - a) + 10 * (b * b - a * a) / 2
        gpu = total(traces, start_s, end_s, "gpu")
        assert gpu.energy_j == pytest.approx(expected_j, rel=1e-9)
        assert gpu.method == "replayed"
        assert total(traces, start_s, end_s).energy_j == pytest.approx(expected_j + 3 * (b - a), rel=1e-9)
        assert "replayed from power.csv" in (traces[0].note or "")


def test_window_longer_than_the_recording_has_no_energy_but_a_reason(tmp_path: Path) -> None:
    meter = replay(tmp_path / "power.csv", waveform(21))
    reading = total(*measure(meter, sleep(0.3)))
    assert reading.energy_j is None
    assert "the readings (0.2 s) leave 0.1" in (reading.reason or "")


def test_gap_in_the_recording_is_a_gap(tmp_path: Path) -> None:
    rows = waveform().splitlines()
    meter = replay(tmp_path / "power.csv", "\n".join(rows[:10] + rows[20:]))
    assert "gap of 0.11 s" in (total(*measure(meter, sleep(0.3))).reason or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("time_s,gpu_w\n", "at least two rows"),
        ("time_s,gpu_w\n0,1\n", "at least two rows"),
        ("t,gpu_w\n0,1\n1,1\n", "has the columns t, gpu_w; it needs time_s"),
        ("time_s,gpu\n0,1\n1,1\n", "at least one that ends in _w"),
        ("time_s,gpu_w\n0,1\n1,high\n", "something other than numbers"),
        ("time_s,gpu_w\n0,1\n1,\n", "finite numbers"),
        ("time_s,gpu_w\n0,1\n1,inf\n", "finite numbers"),
        ("time_s,gpu_w\n0,1\n2,1\n1,1\n", "increasing time_s"),
        ("time_s,gpu_w\n0,1\n0,1\n", "increasing time_s"),
        ("time_s,gpu_w\n0,1,9\n1,1,9\n", "more fields than its header"),
        ("time_s,gpu_w\n0,1\n1,1,9\n", "cannot be read"),
        ("\x00\x01\xff", "replay: "),
    ],
)
def test_bad_recording_is_refused_when_it_is_opened(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(MeterUnavailableError, match=message) as caught:
        ReplayMeter(path, CLOCK).open()
    assert "bad.csv" in str(caught.value)


def test_missing_recording_is_no_meter(tmp_path: Path) -> None:
    with pytest.raises(MeterUnavailableError, match=r"absent\.csv cannot be read"):
        ReplayMeter(tmp_path / "absent.csv", CLOCK).open()


def test_replay_runs_one_window_at_a_time(tmp_path: Path) -> None:
    meter = replay(tmp_path / "power.csv", waveform())
    with pytest.raises(DeviceError, match="not running"):
        meter.stop()
    meter.start()
    with pytest.raises(DeviceError, match="already running"):
        meter.start()
    meter.close()
    meter.start()
