"""Power whose readings are known to be means: of a time before each, or since the reading before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from devices.base import MeterUnavailableError
from devices.meters.replay import ReplayMeter
from devices.meters.trace_replay import TraceReplayMeter
from results.derivation import energy_of_spans
from results.energy import energy_between
from results.records import PowerTrace
from results.trace_files import WINDOW, read_traces, write_traces
from tests.benchmarks.power_coverage import Cell, cell, told_means
from tests.fakes.stepped_clock import stepped
from tests.fakes.waveforms import StepPower, trace
from tests.meter_windows import CLOCK, measure, sleep, total

N_WINDOWS = 300


@pytest.fixture(autouse=True)
def by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window is as long as it is meant to be, and nobody waits for it."""
    stepped(monkeypatch.setattr)


def within(trace: PowerTrace, window: tuple[float, float]) -> tuple[float, float]:
    """(joules, their standard uncertainty)."""
    found = energy_between([trace], [window], "all", trace.meter)
    assert found.energy_j is not None, found.reason
    assert found.uncertainty_j is not None
    return found.energy_j, found.uncertainty_j


# --- how far off they are --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "load", "window_s", "widest"),
    [
        # Taken for instants, 0 to 15 % of the windows were within two sigma.
        ("told means of 1 s, read each 100 ms", "one step", 10.5, 4.0),
        ("told means of 1 s, read each 100 ms", "bursts", 10.5, 3.0),
        ("told means of 1 s, read each 100 ms", "noise of 5 ms", 10.5, 5.0),
        ("told means of 1 s, read each 100 ms", "noise of 1 s", 10.5, 5.0),
        # What a steady ramp puts off at one edge it puts back at the other.
        ("told means of 1 s, read each 100 ms", "ramp", 10.5, np.inf),
        ("told means of 1 s, read each 100 ms", "square 0.9 Hz, 0.5", 10.5, 2.0),
        ("told means of 1 s, renewed each 100 ms, read each 20 ms", "bursts", 10.5, 3.0),
        ("told means of 1 s, renewed each 100 ms, read each 100 ms", "one step", 10.5, 4.0),
        # They do not overlap: what varies within each shows in those around it alone.
        ("told means of 1 s, renewed each 1 s, read each 100 ms", "bursts", 10.5, 3.0),
        ("told means of 1 s, renewed each 1 s, read each 100 ms", "noise of 5 ms", 10.5, 3.0),
        ("told means of 1 s, read each 1 s", "bursts", 10.5, 3.0),
        # Three quarters of the time are in no mean.
        ("told means of 25 ms, renewed each 100 ms, read each 50 ms", "bursts", 2.5, 4.0),
        ("told means of 25 ms, renewed each 100 ms, read each 50 ms", "noise of 5 ms", 2.5, 3.0),
        ("stretch means, 1 s", "bursts", 11.0, 4.0),
        ("stretch means, 100 ms", "one step", 2.5, 4.0),
    ],
)
def test_true_joules_are_within_two_sigma_of_means_and_not_far_within(
    kind: str, load: str, window_s: float, widest: float
) -> None:
    found: Cell = cell(kind, load, window_s, N_WINDOWS)
    assert found.n_refused == 0
    assert found.within >= 0.95
    assert found.width < widest


@pytest.mark.parametrize("every_s", [0.1, 0.5, 1.0])
def test_a_window_that_the_load_fills_is_off_by_what_its_edges_blur_at_most(every_s: float) -> None:
    """200 W come exactly at its start and go at its end. One edge: 200 W x (M^2 + s^2) / 8 M, by hand."""
    load, window = StepPower(np.array([-9.0, 0.0, 12.0, 30.0]), np.array([50.0, 250.0, 50.0])), (0.0, 12.0)
    most_j = 2 * 200 * (1 + every_s**2) / 8
    errors_j = []
    for seed in range(50):
        told = told_means(1.0, every_s)(load, 12.0, np.random.default_rng(seed))
        energy_j, sigma_j = within(told, window)
        errors_j.append(abs(energy_j - load.energy_j(*window)))
        assert errors_j[-1] <= 2 * sigma_j
    assert max(errors_j) == pytest.approx(most_j, rel=0.02)


def test_a_ramp_of_means_is_the_ramp_half_of_their_time_before() -> None:
    at_s = np.arange(0.0, 21.0, 0.1)
    told = trace("power", at_s, 100 + 5 * (at_s - 0.5), 0.1, method="replayed", averaged_s=1.0)
    energy_j, _ = within(told, (2.0, 17.0))
    assert energy_j == pytest.approx(100 * 15 + 5 * (17**2 - 2**2) / 2, rel=1e-9)


def test_what_the_last_means_do_not_tell_of_is_uncovered() -> None:
    at_s = np.arange(0.0, 20.05, 0.1)
    told = trace("power", at_s, 100 + 0 * at_s, 0.1, method="replayed", averaged_s=1.0)
    assert within(told, (1.0, 19.5))[0] == pytest.approx(1850)
    late = energy_between([told], [(1.0, 19.7)], "all", "m")
    assert "leave 0.2 s of the window uncovered" in (late.reason or "")


def test_a_window_of_less_than_ten_means_is_unresolved() -> None:
    at_s = np.arange(0.0, 20.05, 0.1)
    told = trace("power", at_s, 100 + 0 * at_s, 0.1, method="replayed", averaged_s=1.0)
    short = energy_between([told], [(2.0, 8.0)], "all", "m")
    assert "6 updates of 1 s; 10 are needed" in (short.reason or "")


# --- what a power CSV tells ------------------------------------------------------------------------------------------


def opened(path: Path, text: str) -> ReplayMeter:
    path.write_text(text)
    meter = ReplayMeter(path, CLOCK)
    meter.open()
    return meter


def csv_of(words: str, rows: list[str], columns: str = "time_s,gpu_w") -> str:
    return "\n".join([*words.splitlines(), columns, *rows]) + "\n"


def ramp(n: int = 400) -> list[str]:
    """Means of the last second of 100 W + 5 W a second, every 100 ms from 50 s on."""
    return [f"{50 + i / 10:.1f},{100 + 5 * (i / 10 - 0.5):.2f}" for i in range(n)]


def test_a_csv_of_means_is_played_as_what_it_says_it_is(tmp_path: Path) -> None:
    words = "# nvidia-smi --loop-ms=100\n#averaged_s=1\n# update_period_s = 0.1\n"
    meter = opened(tmp_path / "power.csv", csv_of(words, ramp()))
    traces, start_s, end_s = measure(meter, sleep(12.0))
    a, b = start_s - traces[0].times_s[0], end_s - traces[0].times_s[0]
    [gpu] = traces
    assert (gpu.averaged_s, gpu.update_period_s, gpu.kind) == (1.0, 0.1, "power")
    # A renewal is half of its period old on average.
    true_j = 100 * (b - a) + 5 * (b * b - a * a) / 2
    reading = total(traces, start_s, end_s)
    assert reading.energy_j == pytest.approx(true_j + 5 * 0.05 * (b - a), rel=1e-6)
    assert abs((reading.energy_j or 0) - true_j) <= 2 * (reading.uncertainty_j or 0)
    told = "replayed from power.csv: each value is the mean of the 1 s before it, values renew every 0.1 s"
    assert gpu.note == told
    assert meter.channels[0].update_period_s == 0.1


def test_rows_of_means_stand_from_row_to_row(tmp_path: Path) -> None:
    """100 W and 300 W in turn, 20 ms each, stamped at their ends: as turbostat writes them."""
    rows = [f"{i / 50:.2f},{300 if i % 2 else 100}" for i in range(61)]
    meter = opened(tmp_path / "power.csv", csv_of("# averaged_s = rows", rows))
    traces, start_s, end_s = measure(meter, sleep(0.4))
    a, b = start_s - traces[0].times_s[0], end_s - traces[0].times_s[0]

    def joules(at_s: float) -> float:
        """The first row's mean is of a time that nobody knows: what follows is row 2's 300 W."""
        turns, rest_s = divmod(at_s, 0.04)
        return turns * 8 + min(rest_s, 0.02) * 300 + max(0.0, rest_s - 0.02) * 100

    assert total(traces, start_s, end_s).energy_j == pytest.approx(joules(b) - joules(a), rel=1e-9)
    assert "each value is the mean since the row before" in (traces[0].note or "")


def test_columns_of_two_meters_each_say_what_their_values_are(tmp_path: Path) -> None:
    """A GPU's ramp in means of the last second, a CPU's as rows, a disk's as instants, read every 100 ms."""
    rows = [f"{row},{100 + 5 * (i / 10 - 0.05):.3f},{100 + i / 2:.1f}" for i, row in enumerate(ramp())]
    words = "# gpu_w averaged_s = 1\n# cpu_w averaged_s = rows"
    meter = opened(tmp_path / "power.csv", csv_of(words, rows, "time_s,gpu_w,cpu_w,disk_w"))
    traces, start_s, end_s = measure(meter, sleep(12.0))
    a, b = start_s - traces[0].times_s[0], end_s - traces[0].times_s[0]
    true_j = 100 * (b - a) + 5 * (b * b - a * a) / 2
    told = [(t.component, t.averaged_s, t.kind) for t in traces]
    assert told == [("gpu", 1.0, "power"), ("cpu", None, "held"), ("disk", None, "power")]
    for part in traces:
        reading = energy_of_spans(traces, [(start_s, end_s)], part.meter, part.component)
        assert reading.energy_j == pytest.approx(true_j, rel=1e-4)
    notes = [(t.note or "").removeprefix("replayed from power.csv") for t in traces]
    assert notes == [
        ": each value is the mean of the 1 s before it",
        ": each value is the mean since the row before",
        "",
    ]


def test_what_a_column_says_of_itself_holds_beside_what_all_are_told_to_be(tmp_path: Path) -> None:
    """A GPU's ramp in means of the last second that renew every 100 ms, as the page has it; a CPU's as rows, and a
    disk's as instants."""
    rows = [f"{row},{100 + 5 * (i / 10 - 0.05):.3f},{100 + i / 2:.1f}" for i, row in enumerate(ramp())]
    words = "# averaged_s = 1\n# update_period_s = 0.1\n# cpu_w averaged_s = rows\n# disk_w averaged_s = 0\n"
    words += "# disk_w update_period_s = 0"
    meter = opened(tmp_path / "power.csv", csv_of(words, rows, "time_s,gpu_w,cpu_w,disk_w"))
    traces, start_s, end_s = measure(meter, sleep(12.0))
    a, b = start_s - traces[0].times_s[0], end_s - traces[0].times_s[0]
    true_j = 100 * (b - a) + 5 * (b * b - a * a) / 2
    told = [(t.component, t.averaged_s, t.update_period_s, t.kind) for t in traces]
    assert told == [("gpu", 1.0, 0.1, "power"), ("cpu", None, 0.0, "held"), ("disk", None, 0.0, "power")]
    # A renewal is half of its period old on average.
    for part, late_s in zip(traces, (0.05, 0.0, 0.0), strict=True):
        reading = energy_of_spans(traces, [(start_s, end_s)], part.meter, part.component)
        assert reading.energy_j == pytest.approx(true_j + 5 * late_s * (b - a), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "of_cpu"),
    [
        ("# cpu_w averaged_s = 2", (2.0, 0.1, "power")),
        ("# cpu_w averaged_s = 0", (None, 0.1, "power")),
        ("# cpu_w update_period_s = 0.5", (1.0, 0.5, "power")),
        ("# cpu_w update_period_s = 0", (1.0, 0.0, "power")),
        ("# cpu_w averaged_s = rows", (None, 0.0, "held")),
        ("# cpu_w averaged_s = rows\n# cpu_w update_period_s = 0", (None, 0.0, "held")),
    ],
)
def test_a_column_says_otherwise_than_the_whole_file(
    tmp_path: Path, words: str, of_cpu: tuple[float | None, float, str]
) -> None:
    rows = [f"{row},7" for row in ramp()]
    words = f"# averaged_s = 1\n{words}\n# update_period_s = 0.1"
    channels = opened(tmp_path / "power.csv", csv_of(words, rows, "time_s,gpu_w,cpu_w")).channels
    assert [(c.averaged_s, c.update_period_s, c.kind) for c in channels] == [(1.0, 0.1, "power"), of_cpu]


def test_a_column_whose_rows_repeat_is_not_of_the_rows_of_all(tmp_path: Path) -> None:
    rows = [f"{row},7" for row in ramp()]
    words = "# averaged_s = rows\n# cpu_w update_period_s = 0.5"
    with pytest.raises(
        MeterUnavailableError, match=r"line 2: rows of cpu_w repeat values, .* say what cpu_w has: cpu_w"
    ):
        opened(tmp_path / "power.csv", csv_of(words, rows, "time_s,gpu_w,cpu_w"))
    for told, averaged_s in ((0, None), (2, 2.0)):
        more = f"{words}\n# cpu_w averaged_s = {told}"
        channels = opened(tmp_path / "power.csv", csv_of(more, rows, "time_s,gpu_w,cpu_w")).channels
        assert [(c.kind, c.averaged_s, c.update_period_s) for c in channels] == [
            ("held", None, 0.0),
            ("power", averaged_s, 0.5),
        ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("# cpu_w averaged_s = 1", r"line 1: no column of watts is called 'cpu_w' \(gpu_w\)"),
        ("# gpu_w averaged_s = 1\n# gpu_w averaged_s = 1", "line 2: gpu_w averaged_s is told twice"),
        (
            "# averaged_s = 1\n# gpu_w averaged_s = rows\n# gpu_w update_period_s = 1",
            "line 3: gpu_w averaged_s = rows says that each row has a value of its own, and gpu_w update_period_s that",
        ),
        ("# averaged_s = -1", "line 1: averaged_s is '-1'; write seconds, 0 or more, or rows"),
        ("# gpu_w averaged_s = -1", "line 1: gpu_w averaged_s is '-1'; write seconds, 0 or more, or rows"),
        ("# averaged_s = nan", "averaged_s is 'nan'; write seconds"),
        ("# averaged_s = inf", "averaged_s is 'inf'; write seconds"),
        ("# averaged_s = one", "averaged_s is 'one'; write seconds"),
        ("# averaged_s =", "averaged_s is ''; write seconds"),
        ("# a remark\n# update_period_s = rows", "line 2: update_period_s is 'rows'; write seconds, 0 or more$"),
        ("# averaged_s = 1\n# averaged_s = 2", "line 2: averaged_s is told twice"),
        ("# average_s = 1", "line 1: '# average_s = 1' tells nothing that is known; write averaged_s = SECONDS"),
        ("# averaged_s: 1", "line 1: '# averaged_s: 1' tells nothing that is known"),
        (
            "# averaged_s = rows\n# update_period_s = 1",
            "line 2: averaged_s = rows says that each row has a value of its own",
        ),
        ("# averaged_s = 100", "gpu_w averaged_s = 100, and the whole recording lasts 39.9 s; is it in seconds"),
        ("# update_period_s = 100", "gpu_w update_period_s = 100, and the whole recording lasts 39.9 s"),
        ("# update_period_s = 1", "gpu_w update_period_s = 1, and it changes every 0.1 s; a mean of longer"),
    ],
)
def test_words_that_cannot_be_are_refused(tmp_path: Path, words: str, message: str) -> None:
    with pytest.raises(MeterUnavailableError, match=message) as refused:
        opened(tmp_path / "power.csv", csv_of(words, ramp()))
    assert "power.csv" in str(refused.value)


@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        ("time_s,gpu_w", ["0,1", "1,high"], "line 4: gpu_w is 'high', and that is no number"),
        ("time_s,gpu_w,gpu_w", ["0,1,1", "1,1,1"], "line 2: the column gpu_w is there twice"),
        ("time_s,gpu_mw", ["0,1", "1,1"], "has the columns time_s, gpu_mw; it needs"),
    ],
)
def test_lines_are_those_of_the_file_behind_a_comment_too(
    tmp_path: Path, columns: str, rows: list[str], message: str
) -> None:
    with pytest.raises(MeterUnavailableError, match=message):
        opened(tmp_path / "power.csv", csv_of("# read by hand", rows, columns))


# --- what a trace file tells -----------------------------------------------------------------------------------------


def test_a_recording_keeps_what_its_values_are_and_is_played_as_that(tmp_path: Path) -> None:
    load = StepPower(np.array([-9.0, 3.0, 30.0]), np.array([50.0, 250.0]))
    told = told_means(1.0, 0.1, 0.1)(load, 20.0, np.random.default_rng(0))
    path = tmp_path / "recorded.parquet"
    write_traces(path, {WINDOW: [replace(told, method="integrated power")]}, (0.0, 20.0))
    [kept] = read_traces(path)
    assert kept.averaged_s == 1.0
    meter = TraceReplayMeter(path, CLOCK)
    meter.open()
    assert meter.channels[0].averaged_s == 1.0
    traces, start_s, end_s = measure(meter, sleep(12.0))
    reading = total(traces, start_s, end_s)
    played_s = traces[0].times_s[0] - told.times_s[0]
    assert reading.energy_j == pytest.approx(within(told, (start_s - played_s, end_s - played_s))[0], rel=1e-9)
