"""A run of many trials, made up, and what a report of it costs: CPU time, peak memory, bytes of CSV.

python -m tests.benchmarks.large_run FOLDER     what a report of the run in FOLDER costs, as JSON
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from results.collection import no_collection
from results.counters import EngineCounters
from results.database import transaction
from results.derivation import arithmetic_digest
from results.records import Completion, EnergyReading, Score
from results.report.csv import write_csv
from results.report.html import write_html
from results.run_frames import RunFrames
from results.sealed_rows import insert
from results.store import Store
from results.stored_run import NO_TRACE_FILE, PACKED_FROM
from results.trials import Trial
from tests.run_builders import cell, run_info

N_CELLS, N_REQUESTS, N_TOKENS = 20, 8, 16


class Cost(NamedTuple):
    cpu_s: float
    peak_bytes: int
    csv_bytes: int


def write_large_run(folder: Path, n_trials: int) -> None:
    """20 cells; each trial has 8 requests of 16 tokens, a score each, and energy without a trace."""
    technique = {"technique": "npumoe-t", "technique_parameters": {"multiples": [4, 2, 1], "group": 8}}
    cells = [
        cell(f"cell{i:08d}", label=f"arm {i} · hellaswag · host", engine=f"arm {i}", workload="hellaswag", **technique)
        for i in range(N_CELLS)
    ]
    info = run_info("large", run_id="large-1234abcd")
    rng = np.random.default_rng(0)
    with Store.create(folder, info, cells) as store, transaction(store._connection) as db:
        for i in range(n_trials):
            one = _trial(rng, cells[i % N_CELLS].cell_id, i)
            # All in one transaction: a commit a trial would take minutes.
            named = (one.trial_id, one.cell_id, one.repeat, one.status)
            insert(db, "trial", (*named, one.model_dump_json(), i + 1, NO_TRACE_FILE))


def _trial(rng: np.random.Generator, cell_id: str, number: int) -> Trial:
    at_s = start_s = 100.0 * number
    completions = []
    for n in range(N_REQUESTS):
        times_s = at_s + np.cumsum(0.01 + 0.001 * rng.random(N_TOKENS))
        completions.append(
            Completion(
                request_id=f"hellaswag/{n}#0",
                sample_id=f"hellaswag/{n}",
                n_prompt_tokens=96,
                start_s=at_s,
                prefill_end_s=float(times_s[0]),
                end_s=float(times_s[-1]),
                token_ids=tuple(int(t) for t in rng.integers(0, 4096, N_TOKENS)),
                token_times_s=tuple(float(t) for t in times_s),
                text="some words of an answer",
            )
        )
        at_s = float(times_s[-1]) + 1e-4
    right = [float(v) for v in rng.integers(0, 2, N_REQUESTS)]
    joules = float(5 + rng.random())
    return Trial(
        trial_id=f"{number:032x}",
        cell_id=cell_id,
        repeat=number // N_CELLS,
        status="ok",
        started_at="2026-11-22T07:00:00.000Z",
        data_source="generated",
        requests_sha256="a" * 64,
        window_start_s=start_s,
        window_end_s=at_s,
        prefill_tokens=96 * N_REQUESTS,
        decode_tokens=(N_TOKENS - 1) * N_REQUESTS,
        completions=tuple(completions),
        energy=tuple(
            EnergyReading(
                phase=phase,
                meter="nvml",
                component="total",
                method="counter",
                duration_s=at_s - start_s,
                energy_j=joules,
                uncertainty_j=0.1,
            )
            for phase in ("prefill", "decode", "all")
        ),
        derived_by=arithmetic_digest(),
        counters=EngineCounters(routed_pairs=1000, computed_rows=1200, padded_rows=200),
        scores=(
            *(Score(metric="acc", value=v, sample_id=c.sample_id) for v, c in zip(right, completions, strict=True)),
            Score(metric="acc", value=float(np.mean(right)), stderr=0.1, n=N_REQUESTS),
        ),
        foreign_cpu_share=float(rng.random() / 100),
        cpu_cycles=123_456_789,
    )


def cost_of_a_report(folder: Path) -> Cost:
    """In a process of its own: its peak memory is that of the report."""
    command = [sys.executable, "-m", "tests.benchmarks.large_run", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Cost(*json.loads(done.stdout))


def _report(folder: Path) -> Cost:
    """As the command line does it."""
    with Store.view(folder) as store, no_collection():
        derived = RunFrames(store.data(PACKED_FROM))
        files = write_csv(derived.run, folder, derived)
        write_html(derived.run, folder / "report.html", derived)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Cost(time.process_time(), peak_bytes, sum(p.stat().st_size for p in files))


if __name__ == "__main__":
    print(json.dumps(_report(Path(sys.argv[1]))))
