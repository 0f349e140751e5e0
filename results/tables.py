"""Tables of a run as pandas frames, made from its records and nothing else.

Which n: a trial's value is one number, and `n`, `mean`, `median` and the interval are over the trials that are ok and
unmarked. `p50`, `p90` and `p99` of ttft, tpot, itl, e2e and of waits under load are pooled over all their requests
(itl: gaps), because a tail belongs to requests; a percentile q needs 1 / (1 - q) values, else it is empty. For accuracy
`n` counts samples (and `n_failed` still trials), because the repeats ask the same items again: its interval is Wilson's
where every sample is right or wrong (`results.binary_scores`), else Student's, of the task's standard error.

Accuracy is also over trials that are marked for a busy neighbour alone: it makes an answer late, and changes none.

Every row has one method. A missing figure is an empty cell (NaN) beside its reason, with method "missing".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from results.achieved import ACHIEVED_METRICS, achieved_observations, unseen_achieved
from results.binary_scores import (
    binary_metrics,
    exponential_interval,
    is_share,
    metrics_from_0,
    metrics_within_0_and_1,
    score_interval,
    wilson_interval,
)
from results.cells import (
    answering,
    counted_by,
    data_sources,
    distinct,
    left_out_reason,
    model_name,
    technique_name,
    trials_of,
    usable,
    workload_name,
)
from results.compare import LOGARITHMS
from results.metrics import (
    CHARGE_METRIC,
    ENERGY_METRICS,
    LATENCY_METRICS,
    LOAD_METRICS,
    SIZE_METRICS,
    TECHNIQUE_METRICS,
    Observation,
    accuracy_observations,
    energy_observations,
    latency_observations,
    load_observations,
    size_observations,
    technique_observations,
    unseen,
)
from results.records import Cell, Method
from results.runs import RunData
from results.statistics import Summary, percentile, summarise
from results.trials import Trial

COLUMNS = (
    "run_id", "cell", "device", "engine", "technique", "model", "workload", "phase", "metric", "unit", "method",
    "meter", "n", "n_failed", "mean", "median", "p50", "p90", "p99", "ci_low", "ci_high", "reason",
)  # fmt: skip
_STATISTICS = ("mean", "median", "p50", "p90", "p99", "ci_low", "ci_high")


class _Scores(NamedTuple):
    """Of a workload. binary: those that are 0 or 1 for each sample. within: those that lie there. from_0: those that
    are not below 0."""

    asked: list[str]
    binary: frozenset[str]
    within: frozenset[str]
    from_0: frozenset[str]


def tidy(run: RunData) -> pd.DataFrame:
    """One row per cell, metric, phase, meter and method; columns `COLUMNS`."""
    trials = trials_of(run)
    sources, asked = data_sources(run), _aggregates_by_workload(run)
    found = binary_metrics(run), metrics_within_0_and_1(run), metrics_from_0(run)
    scores = {workload: _Scores(asked[workload], *(metrics[workload] for metrics in found)) for workload in asked}
    rows = chain.from_iterable(
        _as_counted(cell, _rows(identity_of(run, cell, sources), trials[cell.cell_id], scores[cell.workload]))
        for cell in run.cells
    )
    return frame_of(rows, COLUMNS, ("phase", "meter", "reason"), _STATISTICS, ("n", "n_failed"))


def _as_counted(cell: Cell, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Counters of routing that was played are modelled."""
    counters = dict(TECHNIQUE_METRICS)
    for row in rows:
        yield row | {"method": counted_by(cell)} if row["metric"] in counters and row["method"] == "measured" else row


def latency(run: RunData) -> pd.DataFrame:
    return latency_rows(tidy(run))


def energy(run: RunData) -> pd.DataFrame:
    return energy_rows(tidy(run))


def accuracy(run: RunData) -> pd.DataFrame:
    return accuracy_rows(tidy(run))


def latency_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The latency and throughput rows of a tidy frame."""
    own = {metric for metric, _, _ in (*LATENCY_METRICS, *LOAD_METRICS, *ACHIEVED_METRICS)}
    return frame[frame["metric"].isin(own)].reset_index(drop=True)


def energy_rows(frame: pd.DataFrame) -> pd.DataFrame:
    own = {metric for metric, _ in (*ENERGY_METRICS, CHARGE_METRIC)}
    return frame[frame["metric"].isin(own)].reset_index(drop=True)


def accuracy_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of a tidy frame that are no latency, energy, technique or size: the tasks name their own metrics."""
    own = {m for m, _, _ in (*LATENCY_METRICS, *LOAD_METRICS, *ACHIEVED_METRICS)}
    own |= {m for m, _ in (*ENERGY_METRICS, CHARGE_METRIC, *TECHNIQUE_METRICS, *SIZE_METRICS)}
    return frame[~frame["metric"].isin(own)].reset_index(drop=True)


# --- one row per cell and metric -------------------------------------------------------------------------------------


def identity_of(run: RunData, cell: Cell, sources: dict[str, str | None]) -> dict[str, Any]:
    return {
        "run_id": run.info.run_id,
        "cell": cell.cell_id,
        "device": cell.device,
        "engine": cell.engine,
        "technique": technique_name(cell),
        "model": model_name(cell),
        "workload": workload_name(cell.workload, sources[cell.workload]),
    }


def _rows(identity: dict[str, Any], trials: list[Trial], scores: _Scores) -> Iterator[dict[str, Any]]:
    yield from _cost_rows(identity, trials)
    yield from _score_rows(identity, trials, scores)


def _cost_rows(identity: dict[str, Any], trials: list[Trial]) -> Iterator[dict[str, Any]]:
    """Of everything but scores."""
    good, n_failed = usable(trials), sum(t.has_failed for t in trials)
    left_out = left_out_reason(trials, with_errors=not good)
    why = left_out or NO_TRIAL
    grouped = _grouped(good, _COST_READERS) if good else [[o] for o in (*unseen(why), *unseen_achieved(why))]
    for group in grouped:
        for row, no_interval, reason in _described(identity, group, n_failed, len(good)):
            yield row | {"reason": joined_reasons([no_interval, reason, left_out] if good else [reason])}


def _score_rows(identity: dict[str, Any], trials: list[Trial], scores: _Scores) -> Iterator[dict[str, Any]]:
    good, n_failed = answering(trials), sum(t.has_failed for t in trials)
    left_out = left_out_reason(trials, not good, answering)
    if not good:
        for observation in (Observation(m, None, "1", "missing", None, left_out or NO_TRIAL) for m in scores.asked):
            for row, _, reason in _described(identity, [observation], n_failed, 0):
                yield row | {"reason": reason}
        return
    grouped = _grouped(good, (accuracy_observations,))
    samples = _sample_counts(good)
    wholes = [s for t in good for s in t.scores if s.sample_id is None]
    shares = samples.keys() - {s.metric for s in wholes if not is_share(s, scores.binary)}
    stderrs = {g[0].metric: _mean(g) for g in grouped if g[0].metric.endswith("_stderr")}
    for group in grouped:
        metric = group[0].metric
        for row, _, reason in _described(identity, group, n_failed, len(good)):
            row |= {"reason": joined_reasons([reason, left_out])}
            n_samples = samples[metric.removesuffix("_stderr")]
            row |= {"n": n_samples, "p50": None, "p90": None, "p99": None, "ci_low": None, "ci_high": None}
            mean, stderr = row["mean"], stderrs.get(f"{metric}_stderr")
            # Over items, not over repeats of the same items; a standard error has none.
            if mean is not None and metric in shares:
                row["ci_low"], row["ci_high"] = wilson_interval(mean, n_samples)
            elif mean is not None and stderr is not None and n_samples > 1:
                own = metric.partition("/")[0]
                if own in LOGARITHMS and mean > 0:
                    row["ci_low"], row["ci_high"] = exponential_interval(mean, stderr, n_samples)
                else:
                    row["ci_low"], row["ci_high"] = score_interval(
                        mean, stderr, n_samples, own in scores.within, own in scores.from_0
                    )
            yield row


def _described(
    identity: dict[str, Any], group: Sequence[Observation], n_failed: int, n_good: int
) -> Iterator[tuple[dict[str, Any], str | None, str | None]]:
    """(a row for each method, why it has no interval, what else there is to say)."""
    first = group[0]
    for method, summary, reason in _summaries(group, n_good, n_failed):
        row = summary.model_dump() | identity
        row |= {"phase": first.phase, "metric": first.metric, "unit": first.unit, "meter": first.meter}
        yield row | {"method": method}, summary.reason, reason


_COST_READERS = (
    latency_observations,
    achieved_observations,
    load_observations,
    energy_observations,
    technique_observations,
    size_observations,
)
NO_TRIAL = "no trial was run"
_MAY_BE_NEGATIVE = {metric for metric, _ in ENERGY_METRICS if metric.startswith("net_")}
"""Above idle: what is taken away is measured too."""
_SHARES = {metric for metric, *_, unit in (*LOAD_METRICS, *TECHNIQUE_METRICS) if unit == "%"}
"""Of a whole, which they cannot exceed."""


def _grouped(
    trials: Sequence[Trial], readers: Sequence[Callable[[Trial], list[Observation]]]
) -> list[list[Observation]]:
    """Observations of the same metric, phase and meter over the trials, in the order in which they first appear."""
    groups: dict[tuple[str | None, ...], list[Observation]] = {}
    for read in readers:
        for observation in chain.from_iterable(read(trial) for trial in trials):
            key = (observation.metric, observation.phase, observation.meter)
            groups.setdefault(key, []).append(observation)
    # A trial without any meter makes rows without a meter; they only matter where no other trial had one.
    metered = {(metric, phase) for metric, phase, meter in groups if meter is not None}
    return [g for (metric, phase, meter), g in groups.items() if meter is not None or (metric, phase) not in metered]


def _summaries(
    group: Sequence[Observation], n_good: int, n_failed: int
) -> Iterator[tuple[Method, Summary, str | None]]:
    """One summary per method: figures obtained in two ways never share a row."""
    reasons = joined_reasons(distinct(o.reason for o in group))
    methods = list(dict.fromkeys(o.method for o in group if o.value is not None))
    if not methods:
        yield "missing", Summary(n=0, n_failed=n_failed), reasons
    for method in methods:
        values = [o.value for o in group if o.value is not None and o.method == method]
        summary = summarise(values, n_failed)
        if summary.ci_low is not None and group[0].metric not in _MAY_BE_NEGATIVE and min(values) >= 0:
            # Few repeats that scatter much: the part of Student's interval below 0 holds no possible mean.
            summary = summary.model_copy(update={"ci_low": max(summary.ci_low, 0.0)})
        if summary.ci_high is not None and group[0].metric in _SHARES and max(values) <= 100:
            summary = summary.model_copy(update={"ci_high": min(summary.ci_high, 100.0)})
        pooled = np.array([p for o in group if o.method == method for p in o.pooled])
        if pooled.size:
            summary = summary.model_copy(
                update={
                    "p50": percentile(pooled, 0.50),
                    "p90": percentile(pooled, 0.90),
                    "p99": percentile(pooled, 0.99),
                }
            )
        n_without = n_good - len(values)
        without = f"{n_without} of {n_good} trials without a {method} figure" if n_without else None
        yield method, summary, ": ".join(filter(None, [without, reasons])) or None


def _aggregates_by_workload(run: RunData) -> dict[str, list[str]]:
    """Names of the scores each workload gives in this run, so that a cell that failed shows them as missing."""
    workload_of = {cell.cell_id: cell.workload for cell in run.cells}
    found: dict[str, dict[str, None]] = {cell.workload: {} for cell in run.cells}
    for trial in run.trials:
        names = (s.metric for s in trial.scores if s.sample_id is None)
        found[workload_of[trial.cell_id]] |= dict.fromkeys(names)
    return {workload: list(names) for workload, names in found.items()}


def _sample_counts(trials: Sequence[Trial]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for score in (s for t in trials for s in t.scores if s.sample_id is None):
        counts[score.metric] = min(score.n, counts.get(score.metric, score.n))
    return counts


# --- frames ----------------------------------------------------------------------------------------------------------


def frame_of(
    rows: Iterable[dict[str, Any] | tuple[Any, ...]],
    columns: Sequence[str],
    text: Sequence[str],
    numbers: Sequence[str],
    counts: Sequence[str],
) -> pd.DataFrame:
    """A frame in which missing text is None and a missing number NaN, whatever else is in the column.

    rows: by column, or in the order of the columns.
    """
    frame = pd.DataFrame(list(rows), columns=list(columns))
    for column in text:
        frame[column] = frame[column].astype(object).where(frame[column].notna(), None)
    return frame.astype(dict.fromkeys(numbers, "float64") | dict.fromkeys(counts, "Int64"))


def _mean(group: Sequence[Observation]) -> float | None:
    values = [o.value for o in group if o.value is not None]
    return sum(values) / len(values) if values else None


def joined_reasons(parts: Iterable[str | None]) -> str | None:
    return "; ".join(part for part in parts if part) or None
