"""One row per trial, and one row per request; `cell` and `repeat` join them.

A run of 20,000 trials has hundreds of thousands of requests: their table comes in parts, and is never held as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Any, TypeAlias

import pandas as pd

from results.cells import NO_ERROR, data_sources, trials_of
from results.cpu_time import cores_used
from results.derivation import RequestEnergies
from results.graph_placement import ane_operations_share
from results.metrics import time_method, time_words
from results.operations import operations_table, outside_share
from results.packed import column_of
from results.records import Completion, EnergyReading
from results.request_columns import RequestColumns, are_due, n_generated, scores_told, shared_time
from results.roads import road_words
from results.runs import RunData
from results.tables import frame_of, identity_of
from results.trial_traces import traces_of
from results.trials import Trial

TRIALS_A_PART = 1000

_TRIAL_COLUMNS = (
    "run_id", "cell", "label", "device", "engine", "technique", "model", "workload", "trial", "repeat", "sitting",
    "attempts", "status", "started_at", "time_method", "requests", "marks", "failure", "replaces", "cpu_use",
    "foreign_cpu_share", "contention_repeats", "cpu_cycles", "cpu_cycles_remark", "requests_sha256", "road",
    "ane_operations_share", "outside_fit_share", "derived", "derived_by",
)  # fmt: skip
_REQUEST_COLUMNS = (
    "cell", "device", "repeat", "time_method", "sample_id", "request_id", "prompt_tokens", "cached_tokens",
    "generated_tokens", "ttft_s",
    "tpot_s", "e2e_s", "energy_j", "energy_uncertainty_j", "energy_method", "energy_meter", "energy_reason",
    "arrival_s", "queueing_s", "ttft_from_arrival_s", "e2e_from_arrival_s", "edges_uncertainty_s",
)  # fmt: skip
_PLACEMENT_COLUMNS = (
    "cell", "repeat", "package", "function", "role", "predictions", "unit", "n_operations", "ane_share",
    "ane_cost_share", "operations", "reason",
)  # fmt: skip


def trials(run: RunData, operations: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row per trial, failed ones too. Those that were replaced are told in the row of the one that stands there.

    operations: of `operations_table`, where the caller has it already; outside_fit_share is that of the trial whose
    window it has.
    """
    sources = data_sources(run)
    identities = {cell.cell_id: identity_of(run, cell, sources) | {"label": cell.label} for cell in run.cells}
    operations = operations_table(run) if operations is None else operations
    windows = dict(zip(operations["cell"], operations["trial"], strict=True))
    shares = {trial_id: outside_share(operations, [cell]) for cell, trial_id in windows.items()}
    replaced = _replaced(run)
    told = (
        identities[trial.cell_id]
        | _trial_cells(trial)
        | {"replaces": replaced.get((trial.cell_id, trial.repeat))}
        | {"outside_fit_share": shares.get(trial.trial_id), "derived": _derived(run, trial)}
        for trial in _in_order(run)
    )
    # A tuple takes a fifth of a dict, and all trials stand in this table.
    rows = (tuple(row[column] for column in _TRIAL_COLUMNS) for row in told)
    text = ("marks", "failure", "replaces", "cpu_cycles_remark", "requests_sha256", "road", "derived", "derived_by")
    counts = ("repeat", "sitting", "attempts", "requests", "contention_repeats", "cpu_cycles")
    return frame_of(
        rows,
        _TRIAL_COLUMNS,
        text,
        ("cpu_use", "foreign_cpu_share", "ane_operations_share", "outside_fit_share"),
        counts,
    )


def request_frames(run: RunData) -> Iterator[pd.DataFrame]:
    """One row per request, with its sample's scores in columns `score_METRIC`; all parts have the same columns.

    A request's energy is that of the trial's first meter between the request's start and end, from the raw traces; one
    during which others ran has none of its own. Arrivals count from the window's start.
    """
    metrics = dict.fromkeys(m for t in run.trials for i, m, _ in scores_told(t.scores) if i is not None)
    scores = [f"score_{metric}" for metric in metrics]
    text = ("energy_meter", "energy_reason")
    numbers = ("ttft_s", "tpot_s", "e2e_s", "energy_j", "energy_uncertainty_j", "arrival_s", "queueing_s",
               "ttft_from_arrival_s", "e2e_from_arrival_s", "edges_uncertainty_s", *scores)  # fmt: skip
    counts = ("repeat", "prompt_tokens", "cached_tokens", "generated_tokens")
    device_of = {cell.cell_id: cell.device for cell in run.cells}
    rest = _in_order(run)
    part = list(islice(rest, TRIALS_A_PART))
    while True:
        rows = chain.from_iterable(_request_rows(run, t, device_of[t.cell_id], metrics) for t in part)
        yield frame_of(rows, (*_REQUEST_COLUMNS, *scores), text, numbers, counts)
        part = list(islice(rest, TRIALS_A_PART))
        if not part:
            return


def _in_order(run: RunData) -> Iterator[Trial]:
    by_cell = trials_of(run)
    return (trial for cell in run.cells for trial in by_cell[cell.cell_id])


def _replaced(run: RunData) -> dict[tuple[str, int], str]:
    """By cell and repeat, the failed trials in whose place another one stands, and why they failed."""
    found: dict[tuple[str, int], str] = {}
    for trial in run.replaced:
        place = trial.cell_id, trial.repeat
        told = f"{trial.trial_id}: {trial.failure.error if trial.failure else NO_ERROR}"
        found[place] = f"{found[place]}; {told}" if place in found else told
    return found


def _derived(run: RunData, trial: Trial) -> str | None:
    """When its joules were; None where it has none."""
    if trial.trial_id in run.derived_again:
        return "again"
    return "when it ran" if trial.energy else None


def _trial_cells(trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.trial_id,
        "repeat": trial.repeat,
        "sitting": trial.sitting,
        "attempts": trial.attempts,
        "status": trial.status,
        "started_at": trial.started_at,
        "time_method": _time_words(trial, trial.completions),
        "requests": len(trial.completions),
        "marks": ", ".join(trial.marks),
        "failure": trial.failure.error if trial.failure else None,
        "cpu_use": _cpu_use(trial),
        "foreign_cpu_share": trial.foreign_cpu_share,
        "contention_repeats": len(trial.contention_shares),
        "cpu_cycles": trial.cpu_cycles,
        "cpu_cycles_remark": trial.cpu_cycles_remark,
        "requests_sha256": trial.requests_sha256,
        "road": road_words(trial.road) if trial.road is not None else None,
        "ane_operations_share": ane_operations_share(trial.placement),
        "derived_by": trial.derived_by,
    }


def _cpu_use(trial: Trial) -> float | None:
    if trial.window_start_s is None or trial.window_end_s is None:
        return None
    return cores_used(trial.cpu_before, trial.cpu_after, trial.window_end_s - trial.window_start_s)


def _time_words(trial: Trial, completions: Sequence[Completion]) -> str:
    whole = time_method(trial.time_method, completions, "all")
    return time_words(whole, time_method(trial.time_method, completions, "prefill", of_first_token=True))


def _request_rows(run: RunData, trial: Trial, device: str, metrics: Iterable[str]) -> Iterable[tuple[Any, ...]]:
    """In the order of `_REQUEST_COLUMNS`, then the scores. metrics: of all samples of the run."""
    done = trial.completions
    if not done:
        return ()
    n, columns = len(done), RequestColumns(done)
    arrivals_s, window_start_s = column_of(done, "arrival_s"), trial.window_start_s
    of_load = (
        [(c.queueing_s, c.ttft_from_arrival_s, c.e2e_from_arrival_s) for c in done]
        if are_due(done)
        else [(None, None, None)] * n
    )
    sample_ids = column_of(done, "sample_id")
    scores = {(sample_id, metric): value for sample_id, metric, value in scores_told(trial.scores)}
    return zip(
        repeat(trial.cell_id),
        repeat(device),
        repeat(trial.repeat),
        _time_words_each(trial),
        sample_ids,
        column_of(done, "request_id"),
        column_of(done, "n_prompt_tokens"),
        column_of(done, "n_cached_tokens"),
        n_generated(done),
        columns.ttft_s,
        columns.tpot_s,
        columns.e2e_s,
        *zip(*_request_energies(run, trial), strict=True),
        [None if at_s is None or window_start_s is None else at_s - window_start_s for at_s in arrivals_s],
        *zip(*of_load, strict=True),
        column_of(done, "edges_uncertainty_s"),
        *([scores.get((i, metric)) for i in sample_ids] for metric in metrics),
        strict=False,
    )


def _time_words_each(trial: Trial) -> Iterable[str]:
    if not any(column_of(trial.completions, "derived")):
        return repeat(_time_words(trial, trial.completions))
    return [_time_words(trial, [completion]) for completion in trial.completions]


_Energy: TypeAlias = "tuple[float | None, float | None, str, str | None, str | None]"
"""Of a request: joules, their uncertainty, method, meter, reason."""


def _request_energies(run: RunData, trial: Trial) -> Iterable[_Energy]:
    own, done = traces_of(run, trial), trial.completions
    meter = own.meter
    if meter is None:
        return repeat((None, None, "missing", None, "no meter was read in this trial"), len(done))
    shared = shared_time(done)
    if own.lost:
        return [(None, None, "missing", meter, shared.get(i) or own.lost) for i in column_of(done, "request_id")]
    energies = RequestEnergies(own.traces, meter, done, own.rests)
    return [
        (None, None, "missing", meter, shared[c.request_id])
        if c.request_id in shared
        else _request_energy(energies.of([c]), meter)
        for c in done
    ]


def _request_energy(reading: EnergyReading, meter: str) -> _Energy:
    method = "missing" if reading.energy_j is None else reading.method
    return reading.energy_j, reading.uncertainty_j, method, meter, reading.reason or reading.remark


def placement_rows(run: RunData) -> pd.DataFrame:
    """One row per trial, graph and unit, of trials whose graphs Core ML ran; a graph of which nothing is told is a row
    with its reason."""
    rows = []
    for trial in _in_order(run):
        for graph in trial.placement:
            own = {
                "cell": trial.cell_id,
                "repeat": trial.repeat,
                "package": graph.package,
                "function": graph.function,
                "role": graph.role,
                "predictions": graph.predictions,
                "ane_share": graph.ane_share,
                "ane_cost_share": graph.cost_on_ane,
                "reason": graph.reason,
            }
            units: list[tuple[str | None, tuple[str, ...]]] = [*graph.operations.items()] or [(None, ())]
            rows += [
                own | {"unit": unit, "n_operations": len(names) or None, "operations": "; ".join(names) or None}
                for unit, names in units
            ]
    text = ("package", "function", "role", "unit", "operations", "reason")
    return frame_of(
        rows, _PLACEMENT_COLUMNS, text, ("ane_share", "ane_cost_share"), ("repeat", "predictions", "n_operations")
    )
