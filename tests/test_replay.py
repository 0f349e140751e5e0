"""A recorded power CSV, played back."""

from __future__ import annotations

from pathlib import Path

import pytest

from devices.base import DeviceError, MeterUnavailableError
from devices.meters.replay import ReplayMeter
from tests.fakes.stepped_clock import stepped
from tests.meter_windows import CLOCK, measure, sleep, total


@pytest.fixture(autouse=True)
def by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window is as long as it is meant to be, and nobody waits for it."""
    stepped(monkeypatch.setattr)


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
        ("", "has the columns none; it needs time_s"),
        ("time_s,gpu_w\n", "0 rows of numbers; at least two rows"),
        ("time_s,gpu_w\n0,1\n", "1 row of numbers; at least two rows"),
        ("t,gpu_w\n0,1\n1,1\n", "has the columns t, gpu_w; it needs time_s"),
        ("time_s,gpu\n0,1\n1,1\n", "at least one that ends in _w"),
        ("time_s;gpu_w\n0;1\n1;1\n", "write commas between columns"),
        ("time_s,gpu_w,gpu_w\n0,1,1\n1,1,1\n", "line 1: the column gpu_w is there twice"),
        ("time_s,gpu_w\n0,1\n1,high\n", "line 3: gpu_w is 'high', and that is no number"),
        ("time_s,gpu_w\n0,1\n1,\n2,1\n", "line 3: gpu_w is empty; delete the row"),
        ("time_s,gpu_w\n0,1\n1,nan\n2,1\n", "line 3: gpu_w is 'nan', no finite number; delete the row"),
        ("time_s,gpu_w\n0,1\n1,inf\n", "line 3: gpu_w is 'inf', no finite number"),
        ("time_s,gpu_w\n0,1\n1,1e300\n", "line 3: gpu_w is '1e300', beyond 1e.06 W"),
        ("time_s,gpu_w\n0,1\n1,1e9999\n", "line 3: gpu_w is '1e9999', no finite number"),
        ("time_s,gpu_w\n0,1\n1e300,1\n", "line 3: time_s is '1e300', beyond 1e.11 s"),
        ("time_s,gpu_w\n0,1\n1,-1\n", "line 3: gpu_w is '-1', and power that is drawn is not negative; turn the sign"),
        ('time_s,gpu_w\n0,1\n1,"3,5"\n', "line 3: gpu_w is '3,5', a decimal comma; write a point"),
        ("time_s,gpu_w\n0,0,1,5\n0,1,1,5\n", "line 2: 4 fields under 2 names; are its decimals commas"),
        ("time_s,gpu_w\n0,1\n2,1\n1,1\n", "line 4: time_s is 1 after 2; it must increase"),
        ("time_s,gpu_w\n0,1\n\n0,1\n", "line 4: time_s is 0 after 0; it must increase"),
        ("time_s,gpu_w\n0,1,9\n1,1,9\n", "line 2: 3 fields under 2 names"),
        ("time_s,gpu_w\n0,1\n1,1,9\n", "line 3: 3 fields under 2 names"),
        ("time_s,gpu_w\n0,1\n1\n", "line 3: 1 fields under 2 names; was the recording cut off here"),
        ("time_s,gpu_w\n0,1\n1,\0\n", "line 3: gpu_w is '.', and that is no number"),
        ("\x00\x01\xff", "replay: "),
        # A high column excuses no other.
        ("time_s,gpu_w,battery_w\n0,100,-0.9\n1,100,-0.9\n", "line 2: battery_w is '-0.9', and power that is drawn"),
        ("time_s,gpu_w\n0,True\n1,True\n", "line 2: gpu_w is 'True', and that is no number"),
        ("time_s,gpu_w\n0,1\n" + "".join(f"{i},-0.01\n" for i in range(1, 200)), "less than 0 W on average"),
        ("time_s,_w\n0,1\n1,2\n", "line 1: a column is called _w; write its part"),
    ],
)
def test_bad_recording_is_refused_when_it_is_opened(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(MeterUnavailableError, match=message) as caught:
        ReplayMeter(path, CLOCK).open()
    assert "bad.csv" in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "rows", "watts"),
    [
        ("cpu_w,total_w", "3,10", 10.0),
        ("total_w,gpu_w,cpu_w", "10,2,3", 10.0),
        ("cpu_w,VDD_IN_w", "3,10", 10.0),
        ("cpu_w,gpu_w", "3,10", 13.0),
        ("package_w,core0_w,core1_w,dram_w", "10,4,5,2", 12.0),
        # No name tells it; the numbers do.
        ("a_w,b_w,c_w", "3,10,7", 10.0),
        ("part_a_w,part_b_w,part_c_w", "3,9,7", 19.0),
        # Rounded to one digit, 4.34 is not 1.04 + 3.25.
        ("cpu_w,gpu_w,soc_w", "1.0,3.3,4.4", 4.4),
        ("gpu0_w,gpu1_w,cpu_power_w", "3,9,7", 19.0),
        ("cpu_w,core0_w,core1_w,dram_w", "9,4,5,2", 11.0),
        ("package_w,cpu_w,gpu_w", "30,10,200", 230.0),
        ("package_w,igpu_w", "33,20", 33.0),
        ("package_w,dgpu_w", "33,20", 53.0),
        ("cpu_w,gpu_w,nothing_known_w,total_w", "1,2,3,10", 10.0),
        ("remark,cpu_w ,  gpu_w", "0,1,2", 3.0),
        ("cpu_w,GPU_W", "30,200", 230.0),
        ("igpu_w,dgpu_w,dram_w", "1,2,3", 6.0),
        ("part_memory_w,part_dram_w", "1,2", 3.0),
        # Neither is read, and neither is named as what was drawn.
        ("cpu_w,gpu_power_limit,power_mode", "30,300,1", 30.0),
    ],
)
def test_the_whole_is_not_added_to_its_parts(tmp_path: Path, columns: str, rows: str, watts: float) -> None:
    text = "\n".join([f"time_s,{columns}", *(f"{i / 100},{rows}" for i in range(101))])
    meter = replay(tmp_path / "power.csv", text)
    assert total(*measure(meter, sleep(0.3))).average_power_w == pytest.approx(watts)


WHOLES = (
    "total total_power power_total system_total board_total node server chassis psu input battery dc_in ac mains plug"
    " device phone computer host power module wall_power"
)


@pytest.mark.parametrize("whole", [*WHOLES.split(), "wall power"])
def test_a_name_of_the_whole_is_known_wherever_it_stands(tmp_path: Path, whole: str) -> None:
    """33 W in total, of which 3 W are of nobody: no sum shows it."""
    rows = "\n".join(f"{i / 100},10,20,33" for i in range(101))
    meter = replay(tmp_path / "power.csv", f"time_s,cpu_w,gpu_w,{whole}_w\n{rows}")
    assert total(*measure(meter, sleep(0.3))).average_power_w == pytest.approx(33)


OTHERWISE_NAMED = ("gpu_mw", "gpu_kw", "gpu_watts", "gpu_power", "gpu [W]", "GPU Power (mW)", "gpu.power.draw", "gpu W")
ONE_PART = (
    ("gpu", "hbm"), ("gpu", "vram"), ("gpu", "dgpu"), ("memory", "dram"), ("ram", "dram"), ("pkg", "package"),
    ("core", "cluster"), ("npu", "ane"), ("disk", "ssd"), ("display", "backlight"), ("wifi", "network"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "row", "message"),
    [
        ("cpu_w,gpu_w,soc_w", "10,20,33", "nothing says whether soc_w is a part .* call it part_soc_w"),
        ("a_w,b_w,c_w", "3,9,7", "nothing says whether a_w"),
        ("cpu_w,rest_w,rest2_w", "3,9,7", "nothing says whether rest_w"),
        ("cpu_w,cpu_total_w,gpu_w", "3,9,7", "cpu_w and cpu_total_w may hold the same cpu"),
        ("gpu_w,gpu0_w", "3,3", "gpu_w and gpu0_w may hold the same gpu"),
        ("vdd_cpu_gpu_w,gpu_w", "9,3", "may hold the same gpu"),
        ("package_w,gpu_w", "33,20", "nothing says whether the package holds gpu_w; call it igpu_w .* dgpu_w"),
        *((f"cpu_w,{name}", "30,200", "is named as a power, and only columns in watts") for name in OTHERWISE_NAMED),
        *(
            (f"cpu_w,{name}_w", "30,300", f"{name}_w is named as a limit")
            for name in ("gpu_limit", "disk_tdp", "GPU_peak")
        ),
        ("gpu_max_w", "300", "gpu_max_w is named as a limit"),
        *((f"{one}_w,{other}_w", "9,9", f"{one}_w and {other}_w may hold the same") for one, other in ONE_PART),
        ("gpu_w,battery_w", "100,0.9", "battery_w is named as the whole and has 0.9 W on average, less than gpu_w"),
    ],
)
def test_columns_that_may_hold_each_other_are_refused(tmp_path: Path, columns: str, row: str, message: str) -> None:
    text = "\n".join([f"time_s,{columns}", *(f"{i},{row}" for i in range(3))])
    with pytest.raises(MeterUnavailableError, match=message):
        replay(tmp_path / "power.csv", text)


def test_two_columns_that_are_each_the_whole_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MeterUnavailableError, match="total_w and wall_w are each the whole; keep one of them"):
        replay(tmp_path / "power.csv", "time_s,total_w,wall_w\n0,1,2\n1,1,2\n")


def test_noise_about_zero_is_no_negative_power(tmp_path: Path) -> None:
    replay(tmp_path / "power.csv", "time_s,gpu_w\n0,-0.05\n1,10\n")


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


def test_powermetrics_text_gives_the_energy_of_its_means(tmp_path: Path) -> None:
    # 1 W and 3 W in turn for 20 ms each: 80 mJ every 40 ms; the package holds the CPU and is not added to it.
    samples = [
        f"*** Sampled system activity (now) (20.00ms elapsed) ***\nCPU Power: {1000 + 2000 * (i % 2)} mW\n"
        "GPU Power: 500 mW\nPackage Power: 5000 mW\n"
        for i in range(60)
    ]
    meter = replay(tmp_path / "mac.txt", "Machine model: Mac16,6\n" + "".join(samples))
    traces, start_s, end_s = measure(meter, sleep(0.4))
    a, b = start_s - traces[0].times_s[0], end_s - traces[0].times_s[0]

    def cpu_j(at_s: float) -> float:
        turns, rest_s = divmod(at_s, 0.04)
        return turns * 0.08 + min(rest_s, 0.02) * 1 + max(0.0, rest_s - 0.02) * 3

    cpu = total(traces, start_s, end_s, "cpu")
    assert cpu.energy_j == pytest.approx(cpu_j(b) - cpu_j(a), rel=1e-9)
    assert cpu.method == "replayed"
    assert total(traces, start_s, end_s).energy_j == pytest.approx((cpu.energy_j or 0) + 0.5 * (b - a), rel=1e-9)
    assert "Mac16,6: means of about 0.02 s" in (traces[0].note or "")


SAMPLE = "*** Sampled system activity (now) (20.00ms elapsed) ***\nCPU Power: 1000 mW\nGPU Power: 500 mW\n"


def test_log_that_was_cut_off_in_its_last_sample_loses_that_sample_and_no_part(tmp_path: Path) -> None:
    # 1.5 W in all whole samples; the last line is lost, as where powermetrics was ended while it wrote.
    text = SAMPLE * 60 + SAMPLE.rpartition("GPU")[0]
    meter = replay(tmp_path / "mac.txt", text)
    assert [channel.component for channel in meter.channels] == ["cpu", "gpu"]
    traces, start_s, end_s = measure(meter, sleep(0.4))
    assert total(traces, start_s, end_s).energy_j == pytest.approx(1.5 * (end_s - start_s), rel=1e-9)


@pytest.mark.parametrize("where", [0, 30, 59])
def test_log_whose_samples_tell_unlike_parts_is_refused(tmp_path: Path, where: int) -> None:
    samples = [SAMPLE] * 60
    samples[where] = SAMPLE.replace("GPU Power: 500 mW\n", "" if where < 59 else "GPU Power: 500 mW\nANE Power: 9 mW\n")
    with pytest.raises(MeterUnavailableError, match="do not tell the same parts") as refused:
        replay(tmp_path / "mac.txt", "".join(samples))
    assert f"1 and {where + 1 if where else 2} " in str(refused.value)


def test_log_of_a_mac_that_slept_between_two_samples_is_refused(tmp_path: Path) -> None:
    """Samples of 20 ms, 25 within a second; then the date is an hour later."""
    log = [SAMPLE.replace("(now)", f"(Sat Nov  8 15:54:{21 + i // 25} 2025 +0900)") for i in range(60)]
    assert replay(tmp_path / "whole.txt", "".join(log)).channels
    later = [sample.replace(" 15:", " 16:") for sample in log]
    for broken, told in (
        ([*log[:50], *later[50:]], r" 36\d\d s lie between samples 50 and 51"),
        ([*later[:50], *log[50:]], r" sample 51 began 35\d\d s before sample 50 had ended \(was the clock set back"),
    ):
        with pytest.raises(MeterUnavailableError, match=told):
            replay(tmp_path / "broken.txt", "".join(broken))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("powermetrics must be invoked as the superuser", "was it called with root"),
        ("*** Sampled system activity (now) (20.00ms elapsed) ***\nno power\n", "tells no power"),
        ("*** Sampled system activity (now) (20.0.0ms elapsed) ***\nCPU Power: 5 mW\n", "20.0.0"),
        ("*** Sampled system activity (now) (20.00ms elapsed) ***\nCPU Power: 1" + 300 * "0" + " mW\n", "e.297 W"),
        ("*** Sampled system activity (now) (0.00ms elapsed) ***\nCPU Power: 5 mW\n", "0 ms long"),
    ],
)
def test_text_of_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(MeterUnavailableError, match=message):
        replay(tmp_path / "mac.txt", text)
