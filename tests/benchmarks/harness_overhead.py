"""What the harness itself costs: start-up, a mark at a phase edge, a trial around its window, a report.

python -m tests.benchmarks.harness_overhead [large | largest]     the report of 20,000 trials only; of 100,000
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from devices.clock import MonotonicClock
from devices.meters.modelled import ModelledMeter, load_watts_sheet
from results.report.csv import write_csv
from results.report.html import write_html
from results.run_frames import RunFrames
from tests.benchmarks.large_run import Cost, cost_of_a_report, write_large_run
from tests.benchmarks.measurement import Measurement, measured, merged, read_json, write_page
from tests.run_builders import example_run

N_STARTS = 10
N_MARKS = 2000
N_LARGE = 20_000
BEFORE = Cost(cpu_s=35.29, peak_bytes=1_626_898_432, csv_bytes=74_261_111)
"""The better of two runs of the commit 12146ac, on an AMD EPYC of 2 threads. The target is half of each."""
N_LARGEST = 100_000
LARGEST_S, LARGEST_GB, LARGEST_PAGE_MB = 60.0, 1.0, 8.0
"""What the largest report may take."""
BEFORE_NAME = "commit 12146ac, on the machine of 2026-11-22"


def seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def help_start_up() -> Measurement:
    command = [str(Path(sys.executable).with_name("joulebench")), "--help"]
    times_s = [seconds(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(N_STARTS)]
    return measured(
        "joulebench --help", statistics.median(times_s), "s", f"median of {N_STARTS} starts, warm disk", target=0.3
    )


def cost_of_a_mark() -> Measurement:
    """A reading at a phase edge lies inside the window, three a request."""
    meter = ModelledMeter(0.05, MonotonicClock(), load_watts_sheet("generic"))
    meter.open()
    meter.start()
    each_s = seconds(lambda: [meter.mark() for _ in range(N_MARKS)]) / N_MARKS
    meter.stop()
    return measured("mark at a phase edge", each_s * 1e6, "µs", f"modelled meter, mean of {N_MARKS}")


def report_of_a_large_run() -> list[Measurement]:
    run = example_run(n_repeats=10, n_copies=9)
    size = f"{len(run.cells)} cells, {len(run.trials)} trials"
    with tempfile.TemporaryDirectory() as folder:
        # As the command line does it: what tables and page both need is derived once, with the tables.
        derived = RunFrames(run)
        csv_s = seconds(lambda: write_csv(run, Path(folder), derived))
        html_s = seconds(lambda: write_html(run, Path(folder) / "report.html", derived))
        size_mb = (Path(folder) / "report.html").stat().st_size / 1e6
    return [
        measured("CSV tables", csv_s, "s", size, target=10.0),
        measured("report.html", html_s, "s", f"{size}, {size_mb:.1f} MB", target=10.0),
    ]


def report_of_20_000_trials() -> list[Measurement]:
    """Peers: the same run, reported before requests had a table of their own and intervals a closed form."""
    with tempfile.TemporaryDirectory() as folder:
        write_large_run(Path(folder) / "run", N_LARGE)
        cost = cost_of_a_report(Path(folder) / "run")
    size = f"{N_LARGE} trials of 8 requests, 20 cells"
    return [
        measured(f"report, {what}", ours, unit, size, before, BEFORE_NAME, target=before / 2)
        for what, unit, ours, before in (
            ("CPU time", "s", cost.cpu_s, BEFORE.cpu_s),
            ("peak memory", "GB", cost.peak_bytes / 1e9, BEFORE.peak_bytes / 1e9),
            ("CSV files", "MB", cost.csv_bytes / 1e6, BEFORE.csv_bytes / 1e6),
        )
    ]


def report_of_100_000_trials() -> list[Measurement]:
    with tempfile.TemporaryDirectory() as folder:
        write_large_run(Path(folder) / "run", N_LARGEST)
        cost = cost_of_a_report(Path(folder) / "run")
        page_mb = (Path(folder) / "run" / "report.html").stat().st_size / 1e6
    size = f"{N_LARGEST} trials of 8 requests, 20 cells"
    return [
        measured("largest report, CPU time", cost.cpu_s, "s", size, target=LARGEST_S),
        measured("largest report, peak memory", cost.peak_bytes / 1e9, "GB", size, target=LARGEST_GB),
        measured("largest report, page", page_mb, "MB", size, target=LARGEST_PAGE_MB),
    ]


def demo() -> Measurement:
    command = [str(Path(sys.executable).with_name("joulebench")), "run", "plans/demo.toml", "--out"]
    with tempfile.TemporaryDirectory() as folder:
        run_s = seconds(lambda: subprocess.run([*command, folder], check=True, capture_output=True))
    return measured("joulebench run plans/demo.toml", run_s, "s", "tables and report included", target=180.0)


if __name__ == "__main__":
    only = sys.argv[1:2]
    large = [] if only == ["largest"] else report_of_20_000_trials()
    if only != ["large"]:
        large += report_of_100_000_trials()
    others = [] if only else [help_start_up(), cost_of_a_mark(), *report_of_a_large_run(), demo()]
    write_page(
        "harness-overhead",
        "What the harness costs",
        merged(read_json("harness-overhead"), [*others, *large]),
        "Lower is better everywhere; the target is an upper bound. No peer but what it cost before: nothing else does"
        " this job.",
    )
