"""What a history costs, and what its changes are worth: series whose steps the generator knows, beside apache-otava.

python -m tests.benchmarks.history [listed] [compared] [steps] [--otava PYTHON]

--otava: the interpreter of an environment that has apache-otava (it pins numpy, so not this one); without it that part
is left out. A step counts as found where a change is within 2 runs of it. A false alarm is a steady series with any.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from results.history.changes import find_levels
from results.history.places import LEAST_SEGMENT
from tests.benchmarks.measurement import Measurement, measured, merged, read_json, write_page
from tests.command import EXECUTABLE
from tests.histories import made_trial, write_run
from tests.run_builders import cell

N_RUNS, N_CELLS, N_TRIALS = 1000, 100, 100_000
N_SEEDS, N_POINTS, STEP, NOISE, NEAR = 200, 60, 0.01, 0.003, 2
N_STEADY = 2000
OTAVA = """
import json, sys
from otava.series import Series, Metric, AnalysisOptions
asked = json.load(sys.stdin)
options = AnalysisOptions()
options.max_pvalue, options.min_magnitude = asked["max_pvalue"], 0.0
found = []
for values in asked["series"]:
    n = len(values)
    series = Series("t", None, list(range(n)), {"x": Metric(1, 1.0)}, {"x": values}, {})
    changes = series.analyze(options).change_points.get("x", [])
    found.append([int(change.index) for change in changes])
json.dump(found, sys.stdout)
"""


def timed(*arguments: str) -> float:
    """Seconds of the whole command, with the start of Python."""
    began_s = time.perf_counter()
    subprocess.run([str(EXECUTABLE), *arguments], stdout=subprocess.DEVNULL, check=False)
    return time.perf_counter() - began_s


def listed() -> Iterator[Measurement]:
    cells = [cell(f"cell{i:04d}", engine=f"arm {i % 10}", workload=f"workload {i // 10}") for i in range(N_CELLS)]
    told = f"{N_RUNS} runs of {N_CELLS} cells, a trial each, 22 figures a cell at most"
    with tempfile.TemporaryDirectory() as folder:
        trials = [made_trial(one.cell_id, 0, 1.0 + i / 100, energy_j=4.0) for i, one in enumerate(cells)]
        for day in range(N_RUNS):
            write_run(Path(folder) / f"run{day:04d}", cells, trials, day)
        yield measured("listed at first: every run is read", timed("history", folder), "s", told)
        yield measured("listed again", min(timed("history", folder) for _ in range(3)), "s", told, target=1.0)


def compared() -> Iterator[Measurement]:
    told = f"2 runs of {N_TRIALS} trials, 20 cells, a request a trial"
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "a", Path(folder) / "b"
        for seed, path in enumerate((first, second)):
            rng = np.random.default_rng(seed)
            cells = [cell(f"cell{i:04d}", engine=f"arm {i}") for i in range(20)]
            times_s = 1 + 0.01 * rng.standard_normal(N_TRIALS)
            trials = [
                made_trial(cells[i % 20].cell_id, i // 20, float(times_s[i]), energy_j=4.0 * float(times_s[i]))
                for i in range(N_TRIALS)
            ]
            write_run(path, cells, trials, seed)
        yield measured("compared", timed("compare", str(first), str(second)), "s", told, target=10.0)


def stepped(seed: int) -> tuple[np.ndarray, int]:
    """A series of logarithms and where its step is."""
    rng = np.random.default_rng([1, seed])
    at = int(rng.integers(2 * LEAST_SEGMENT, N_POINTS - 2 * LEAST_SEGMENT))
    return NOISE * rng.standard_normal(N_POINTS) + STEP * (np.arange(N_POINTS) >= at), at


def steady(seed: int) -> np.ndarray:
    return NOISE * np.random.default_rng([2, seed]).standard_normal(N_POINTS)


def ours(series: np.ndarray) -> list[int]:
    return [change.at for change in find_levels(series, np.zeros(len(series))).changes]


def otava(python: str, series: Sequence[np.ndarray]) -> list[list[int]]:
    asked = {"max_pvalue": 0.001, "series": [np.exp(x).tolist() for x in series]}
    done = subprocess.run([python, "-c", OTAVA], input=json.dumps(asked), capture_output=True, text=True, check=True)
    found: list[list[int]] = json.loads(done.stdout)
    return found


def found_percent(changes: Sequence[Sequence[int]], ats: Sequence[int]) -> float:
    hits = [any(abs(change - at) <= NEAR for change in own) for own, at in zip(changes, ats, strict=True)]
    return 100 * sum(hits) / len(hits)


def false_percent(changes: Sequence[Sequence[int]]) -> float:
    return 100 * sum(bool(own) for own in changes) / len(changes)


def steps(python: str | None) -> Iterator[Measurement]:
    told = f"{N_POINTS} runs, steps of 1 % at 0.3 % noise, 8 runs or more on either side"
    even = f"{N_POINTS} runs of one level, 0.3 % noise"
    with_steps, ats = zip(*(stepped(seed) for seed in range(N_SEEDS)), strict=True)
    without, many = [steady(seed) for seed in range(N_SEEDS)], [steady(seed) for seed in range(N_STEADY)]
    found, alarms = [ours(x) for x in with_steps], [ours(x) for x in without]
    peers: dict[str, float | None] = {"found": None, "false": None, "more": None}
    note = None
    if python is None:
        note = "apache-otava: not asked, --otava names no interpreter"
    else:
        theirs = otava(python, with_steps)
        peers = {
            "found": found_percent(theirs, ats),
            "false": false_percent(otava(python, without)),
            "more": 100 * sum(len(own) > 1 for own in theirs) / N_SEEDS,
        }
    name = "apache-otava 0.8, p < 0.001, no least size" if python else None
    more = 100 * sum(len(own) > 1 for own in found) / N_SEEDS
    yield measured(
        "steps found", found_percent(found, ats), "%", f"{N_SEEDS} seeds: {told}", peers["found"], name, 95.0, note
    )
    yield measured(
        "of them with a change too many", more, "%", f"{N_SEEDS} seeds: {told}", peers["more"], name, None, note
    )
    yield measured(
        "false alarms", false_percent(alarms), "%", f"{N_SEEDS} seeds: {even}", peers["false"], name, 1.0, note
    )
    yield measured("false alarms", false_percent([ours(x) for x in many]), "%", f"{N_STEADY} seeds: {even}", target=1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", choices=["listed", "compared", "steps"], default=[])
    parser.add_argument("--otava", metavar="PYTHON")
    asked = parser.parse_args()
    # Where that environment lies is of no matter to a reader.
    sys.argv = [one if one != asked.otava else "PYTHON" for one in sys.argv]
    parts = {"listed": listed, "compared": compared, "steps": lambda: steps(asked.otava)}
    found = [one for name in asked.parts or parts for one in parts[name]()]
    write_page(
        "history",
        "What a history costs, and what its changes are worth",
        merged(read_json("history"), found),
        "Runs are made, not run; where their steps are is known from the generator. A step is found where a change is"
        f" within {NEAR} runs of it. A false alarm is a series of one level in which a change is found. The list's"
        " target is for an index that is there: at first every run is read. Targets of seconds and false alarms are"
        " upper bounds, that of steps found a lower one. The peer, where there is one, got the same series.",
    )


if __name__ == "__main__":
    main()
