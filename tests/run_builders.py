"""Synthetic runs for the tests of tables and reports: small parts to build one by hand, and one whole example."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from results.counters import EngineCounters
from results.derivation import arithmetic_digest
from results.energy import energy_between
from results.environments import Environment
from results.records import PHASES, Cell, Completion, EnergyReading, Method, Phase, PowerTrace, Request, Score
from results.runs import RunData, RunInfo
from results.trials import Failure, Trial

TABLES = (
    "arms",
    "latency",
    "energy",
    "accuracy",
    "accuracy_energy",
    "experts",
    "overlaps",
    "heat",
    "operations",
    "resources",
    "samples",
    "trials",
    "requests",
    "summary",
)
"""The CSV files of a run, in the order in which they are written and listed."""

HOSTILE = "<script>alert(1)</script> out of memory: 9.1 GiB asked, 7.2 GiB free; lower max_new_tokens </script>"

ENVIRONMENT = Environment(
    os="Linux 6.1",
    machine="x86_64",
    cpu_model="EPYC 7B13",
    n_cores=2,
    n_threads=2,
    memory_bytes=8 * 1024**3,
    python="3.11.2",
    joulebench="0.1.0",
    packages={"torch": "2.13.0", "numpy": "2.3.5", "transformers": "5.23.0"},
)


def cell(cell_id: str = "c1", **changes: Any) -> Cell:
    fields: dict[str, Any] = {
        "cell_id": cell_id,
        "label": f"label of {cell_id}",
        "engine": "reference",
        "technique": "on-demand",
        "technique_parameters": {},
        "placement": "host",
        "model": "tiny-moe",
        "workload": "gsm8k",
        "workload_parameters": {},
        "device": "host",
    }
    return Cell(**(fields | changes))


def generation(name: str, prompt_ids: Sequence[int], n_new: int) -> Request:
    """A request for so many tokens, whatever they are."""
    return Request(
        request_id=name,
        sample_id=name,
        kind="generate",
        prompt_ids=tuple(prompt_ids),
        max_new_tokens=n_new,
        ignore_end_tokens=True,
    )


def completion(
    sample_id: str = "s1", start_s: float = 0.0, n_prompt: int = 4, token_times_s: Sequence[float] = (1.0, 1.5)
) -> Completion:
    """A generation; without token times a log-likelihood of 1 s."""
    times = tuple(token_times_s)
    return Completion(
        request_id=f"{sample_id}-r",
        sample_id=sample_id,
        n_prompt_tokens=n_prompt,
        start_s=start_s,
        prefill_end_s=times[0] if times else start_s + 1.0,
        end_s=times[-1] if times else start_s + 1.0,
        token_ids=tuple(range(len(times))),
        token_times_s=times,
        loglikelihood=None if times else -3.5,
    )


def reading(phase: Phase = "all", energy_j: float | None = 6.0, **changes: Any) -> EnergyReading:
    fields: dict[str, Any] = {
        "phase": phase,
        "meter": "nvml",
        "component": "total",
        "method": "counter",
        "duration_s": 2.0,
        "energy_j": energy_j,
        "uncertainty_j": None if energy_j is None else 0.05 * energy_j,
        "relative_gain_error": None if energy_j is None else 0.05,
    }
    return EnergyReading(**(fields | changes))


def trial(cell_id: str = "c1", repeat: int = 0, **changes: Any) -> Trial:
    """An ok trial; token counts follow from the completions."""
    completions: tuple[Completion, ...] = tuple(changes.pop("completions", (completion(),)))
    fields: dict[str, Any] = {
        "trial_id": f"{cell_id}-t{repeat}",
        "cell_id": cell_id,
        "repeat": repeat,
        "status": "ok",
        "started_at": "2026-11-21T09:00:00Z",
        "window_start_s": completions[0].start_s if completions else None,
        "window_end_s": completions[-1].end_s if completions else None,
        "prefill_tokens": sum(c.n_prompt_tokens for c in completions),
        "decode_tokens": sum(
            c.n_generated - c.token_times_s.count(min(c.token_times_s, default=0.0)) for c in completions
        ),
        "completions": completions,
        "derived_by": arithmetic_digest(),
    }
    return Trial(**(fields | changes))


def failed(cell_id: str = "c1", repeat: int = 0, error: str = HOSTILE, **changes: Any) -> Trial:
    failure = Failure(kind=changes.pop("kind", "stable"), error=error, traceback="Traceback ...\nMemoryError")
    return trial(cell_id, repeat, completions=(), status="failed", failure=failure, **changes)


def run_info(name: str = "example", **changes: Any) -> RunInfo:
    fields: dict[str, Any] = {
        "run_id": "r1",
        "name": name,
        "created_at": "2026-11-21T09:00:00Z",
        "plan": {"name": name},
        "plan_hash": "0",
        "environments": {"host": ENVIRONMENT},
    }
    return RunInfo(**fields | changes)


def run(
    cells: Sequence[Cell], trials: Sequence[Trial], traces: dict[str, tuple[PowerTrace, ...]] | None = None
) -> RunData:
    stored = traces or {}
    info = run_info(
        run_id="20261121-090000-ab12",
        plan={"name": "example", "repeats": 5, "protocol": {"warmup": 1, "limit_w": None}, "arms": [{"engine": "ref"}]},
        plan_hash="5f2c9b",
        environments=dict.fromkeys(dict.fromkeys(c.device for c in cells), ENVIRONMENT),
    )
    return RunData(info, tuple(cells), tuple(trials), lambda trial_id: stored.get(trial_id, ()))


def power_trace(
    end_s: float, watts: float, meter: str, method: Method = "modelled", seed: int = 0, step_s: float = 0.002
) -> PowerTrace:
    """Power about `watts` from 0 to end_s, with a slow swing and noise."""
    rng = np.random.default_rng(seed)
    times_s = np.arange(0.0, end_s + step_s, step_s)
    values = watts * (1 + 0.15 * np.sin(5 * times_s) + 0.04 * rng.standard_normal(len(times_s)))
    return PowerTrace(
        meter=meter,
        component="package",
        kind="power",
        method=method,
        times_s=times_s,
        values=values,
        sample_interval_s=step_s,
        relative_accuracy=0.2 if method == "modelled" else 0.02,
        note="CPU time x 3.2 W a core, from the sheet of this processor" if method == "modelled" else None,
    )


# --- a whole run -----------------------------------------------------------------------------------------------------

ARMS: tuple[tuple[str, dict[str, Any], float, float], ...] = (
    ("on-demand", {}, 1.0, 14.0),
    ("npumoe", {"tiers": 3, "group": 8, "chunk": 512}, 0.62, 11.0),
)
"""Technique, parameters, relative time, watts."""
WORKLOADS = ("gsm8k", "hellaswag", "prompt512_decode64")
DEVICES = ("host", "model:m2-ultra")


def example_run(n_repeats: int = 5, n_copies: int = 1) -> RunData:
    """12 cells (times n_copies): two arms, three workloads, two devices.

    One trial fails with a hostile message, one is marked, one cell has no energy, one modelled cell is all failures.
    """
    cells, trials, traces = [], [], {}
    grid = itertools.product(range(n_copies), DEVICES, WORKLOADS, enumerate(ARMS))
    for i, (copy, device, workload, (arm, (technique, parameters, time, watts))) in enumerate(grid):
        made = cell(
            f"cell{i:03d}",
            label=f"{technique} {workload} {device} {copy}",
            technique=technique,
            technique_parameters=parameters | ({"copy": copy} if copy else {}),
            workload=workload,
            device=device,
            placement="cpu" if device == "host" else "npu+cpu",
            model_note="random weights",
        )
        cells.append(made)
        for repeat in range(n_repeats):
            if (i, repeat) == (3, 1) or i == 9:
                trials.append(failed(made.cell_id, repeat, kind="stable" if i == 3 else "transient"))
                continue
            one, trace = _example_trial(made, arm, repeat, time, watts, seed=1000 * i + repeat)
            if (i, repeat) == (0, 2):
                one = one.model_copy(update={"marks": ("throttled",)})
            if i == 2:
                one = one.model_copy(update={"energy": tuple(_lost(r) for r in one.energy)})
            trials.append(one)
            traces[one.trial_id] = (trace,)
    return run(cells, trials, traces)


def _lost(r: EnergyReading) -> EnergyReading:
    return r.model_copy(
        update={
            "energy_j": None,
            "uncertainty_j": None,
            "reason": "cpu-sheet package: gap of 1.2 s in the readings 0.3 s into the window",
        }
    )


def _example_trial(made: Cell, arm: int, repeat: int, time: float, watts: float, seed: int) -> tuple[Trial, PowerTrace]:
    rng = np.random.default_rng(seed)
    on_host = made.device == "host"
    speed = time * (1.0 if on_host else 0.2) * (1 + 0.02 * rng.standard_normal())
    completions, at_s = [], 0.05
    for n in range(4):
        sample = f"{made.workload}-{n}"
        if made.workload == "hellaswag":
            done = completion(sample, at_s, n_prompt=96, token_times_s=())
            done = done.model_copy(update={"prefill_end_s": at_s + 0.3 * speed, "end_s": at_s + 0.3 * speed})
        else:
            steps_s = speed * np.concatenate([[0.4], 0.02 + 0.002 * rng.random(31)])
            done = completion(sample, at_s, n_prompt=128, token_times_s=[float(t) for t in at_s + np.cumsum(steps_s)])
        completions.append(done)
        at_s = done.end_s + 0.002
    meter = "cpu-sheet" if on_host else "timeline"
    trace = power_trace(at_s + 0.05, watts if on_host else 2.5 * watts, meter, seed=seed)
    spans: dict[Phase, list[tuple[float, float]]] = {
        "prefill": [(c.start_s, c.prefill_end_s) for c in completions],
        "decode": [(c.prefill_end_s, c.end_s) for c in completions if c.token_times_s],
        "all": [(completions[0].start_s, completions[-1].end_s)],
    }
    return (
        trial(
            made.cell_id,
            repeat,
            completions=completions,
            time_method="measured" if on_host else "modelled",
            data_source="generated" if made.workload.startswith("prompt") else "sample",
            energy=tuple(energy_between([trace], spans[phase], phase, meter) for phase in PHASES),
            counters=EngineCounters(
                routed_pairs=4000, dropped_pairs=60 * arm, computed_rows=5000 + 800 * arm, padded_rows=1000 + 900 * arm
            ),
            scores=_example_scores(made.workload, completions, arm),
        ),
        trace,
    )


def _example_scores(workload: str, completions: Sequence[Completion], arm: int) -> tuple[Score, ...]:
    if workload.startswith("prompt"):
        return ()
    metric = "acc" if workload == "hellaswag" else "exact_match"
    values = [float((n + arm) % 2) for n, _ in enumerate(completions)]
    mean = float(np.mean(values))
    stderr = float(np.std(values, ddof=1) / np.sqrt(len(values)))
    singles = (Score(metric=metric, value=v, sample_id=c.sample_id) for v, c in zip(values, completions, strict=True))
    return (*singles, Score(metric=metric, value=mean, stderr=stderr, n=len(values)))
