"""The modelled meter on this process's own CPU time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from devices.base import MeterUnavailableError
from devices.meters.modelled import ModelledMeter, load_watts_sheet
from results.cpu_time import WattsSheet
from tests.meter_windows import CLOCK, measure, total

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


SOUND = {"name": '"mine"', "active_w_per_core": "10.0", "idle_w": "1", "relative_accuracy": "0.3", "origin": '"a wall"'}


def sheet_text(**changes: str) -> str:
    return "\n".join(f"{key} = {value}" for key, value in (SOUND | changes).items())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("idle_w", "true"),
        ("idle_w", "inf"),
        ("idle_w", "nan"),
        ("active_w_per_core", "1e308"),
        ("active_w_per_core", '"10"'),
        ("relative_accuracy", "0"),
        ("relative_accuracy", "1e-320"),
        ("name", '"a\\u001b[2J"'),
        ("name", '"two\\nlines"'),
        ("name", '""'),
        ("origin", f'"{300_000 * "x"}"'),
    ],
)
def test_values_that_no_sheet_can_hold_are_refused_in_one_short_line(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(sheet_text())
    assert load_watts_sheet(str(path)).idle_w == 1.0
    path.write_text(sheet_text(**{key: value}))
    with pytest.raises(MeterUnavailableError) as caught:
        load_watts_sheet(str(path))
    message = str(caught.value)
    assert f"{key}: " in message
    assert "pydantic" not in message
    assert message.isprintable()
    assert len(message.replace(str(path), "")) < 400


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_or_has_no_end_is_not_read_as_a_sheet(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (2 << 20))
    for path in ("/dev/zero", str(pipe), str(tmp_path)):
        with pytest.raises(MeterUnavailableError, match="no regular file"):
            load_watts_sheet(path)
    with pytest.raises(MeterUnavailableError, match="more than 1,048,576 bytes"):
        load_watts_sheet(str(large))


def test_a_byte_order_mark_does_not_spoil_a_sheet(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(sheet_text(), encoding="utf-8-sig")
    assert load_watts_sheet(str(path)).name == "mine"


def test_cpu_time_and_its_sheet_are_kept_beside_the_joules_that_follow_from_them() -> None:
    meter = ModelledMeter(1.0, CLOCK, SHEET)
    meter.open()
    meter.start()
    before_s = time.process_time()
    busy(0.05)
    meter.mark()
    spent_s = time.process_time() - before_s
    (trace,) = meter.stop()
    (raw,) = meter.raw_traces()
    assert (raw.kind, raw.component) == ("raw", "cpu, seconds of CPU time")
    assert WattsSheet.model_validate_json(raw.basis or "") == SHEET
    assert raw.times_s.tolist() == trace.times_s.tolist()
    assert raw.values[-1] - raw.values[0] == pytest.approx(spent_s, abs=0.02)
    for at_s, joules, cpu_s in zip(trace.times_s, trace.values, raw.values, strict=True):
        assert joules == pytest.approx(6.0 * at_s + 40.0 * cpu_s, rel=1e-12)
