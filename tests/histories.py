"""Folders of runs that were never run: figures of given levels, as a generator knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from results.database import transaction
from results.environments import Environment
from results.history.index import open_history
from results.history.judged import Judged
from results.history.marks import mark
from results.history.regress import Asked, regress
from results.records import Cell, Score
from results.runs import Input
from results.sealed_rows import insert
from results.store import Store
from results.stored_run import NO_TRACE_FILE
from results.trials import Trial
from tests.run_builders import ENVIRONMENT, cell, completion, reading, run_info, trial

START = datetime(2026, 1, 1, 3, 0, tzinfo=UTC)
ASKED = "5" * 64


def made_trial(
    cell_id: str, repeat: int, e2e_s: float, energy_j: float | None = None, right: Sequence[float] = (), **changes: Any
) -> Trial:
    """One request of so many seconds and joules; right: the score of each sample."""
    scores = [Score(metric="acc", value=value, sample_id=f"s{i}") for i, value in enumerate(right)]
    if right:
        scores.append(Score(metric="acc", value=float(np.mean(right)), stderr=0.01, n=len(right)))
    fields: dict[str, Any] = {
        "completions": [completion("s1", 0.0, token_times_s=(e2e_s / 2, e2e_s))],
        "requests_sha256": ASKED,
        "scores": tuple(scores),
        "energy": () if energy_j is None else (reading("all", energy_j),),
    }
    return trial(cell_id, repeat, **(fields | changes))


def write_run(
    folder: Path,
    cells: Sequence[Cell],
    trials: Sequence[Trial],
    day: int = 0,
    environment: Environment = ENVIRONMENT,
    name: str = "nightly",
    inputs: Mapping[str, str] | None = None,
    protocol: Mapping[str, Any] | None = None,
) -> Path:
    devices = dict.fromkeys(one.device for one in cells)
    info = run_info(
        name,
        run_id=f"{folder.name}-id",
        created_at=(START + timedelta(days=day)).isoformat(),
        plan={"name": name} | ({"protocol": dict(protocol)} if protocol else {}),
        environments=dict.fromkeys(devices, environment),
        inputs=tuple(Input(name=key, value=value) for key, value in (inputs or {}).items()),
    )
    with Store.create(folder, info, cells) as store, transaction(store._connection) as db:
        for i, one in enumerate(trials):
            # All in one transaction: a commit a trial would take minutes.
            named = (one.trial_id, one.cell_id, one.repeat, one.status)
            insert(db, "trial", (*named, one.model_dump_json(), i + 1, NO_TRACE_FILE))
    return folder


def write_history(
    directory: Path,
    n_runs: int,
    level: Callable[[int, str], float],
    noise: float = 0.003,
    arms: Sequence[str] = ("dropless",),
    n_repeats: int = 3,
    seed: int = 0,
    within: float = 0.001,
    machine: Callable[[int], float] = lambda day: 1.0,
    environments: Mapping[int, Environment] | None = None,
    settings: Callable[[int, str], dict[str, Any]] = lambda day, arm: {},
    inputs: Callable[[int], dict[str, str]] = lambda day: {},
    model: Callable[[str], str] = lambda arm: "tiny-moe",
) -> list[Path]:
    """level: seconds of a request by run and arm. noise: relative, of a run. within: of a repeat. machine: what all
    arms of a run share. settings: of the plan, by run and arm. inputs: what a run rests on. model: by arm."""
    rng = np.random.default_rng(seed)
    folders = []
    for day in range(n_runs):
        cells = [
            cell(f"cell{i:04d}", engine=arm, label=arm, engine_parameters=settings(day, arm), model=model(arm))
            for i, arm in enumerate(arms)
        ]
        trials = []
        for one in cells:
            mean_s = level(day, one.engine) * machine(day) * (1 + noise * rng.standard_normal())
            for repeat in range(n_repeats):
                e2e_s = mean_s * (1 + within * rng.standard_normal())
                trials.append(made_trial(one.cell_id, repeat, e2e_s, energy_j=4 * e2e_s))
        environment = (environments or {}).get(day, ENVIRONMENT)
        folders.append(write_run(directory / f"run{day:03d}", cells, trials, day, environment, inputs=inputs(day)))
    return folders


def judged(directory: Path, metric: str = "e2e", baseline: int = 3, **asked: object) -> dict[str, Judged]:
    """By arm. The baseline is of the first runs."""
    with open_history(directory) as found:
        mark(found, "good", [f"run{day:03d}" for day in range(baseline)], add=False)
        result = regress(found, "good", Asked(metrics=(metric,), **asked))  # type: ignore[arg-type]
    return {one.arm: one for one in result.judged}


def slower(percent: float, since: int) -> object:
    return lambda day, arm: 1.0 + (percent / 100 if arm == "b" and day >= since else 0.0)
