"""What one run says of each of its cells, in as little as a history and a comparison need.

A figure is one number a trial (`results.metrics`); of scores one a task. Here are the ones that a reader follows over
time: of the others the run's own tables tell.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from pydantic import Field

from results.cells import answering, model_name, shared_by, trials_of, usable
from results.environments import Environment
from results.history.rests import rests_of
from results.history.settings import ArmSettings, Settings, arm_settings, settings_of
from results.metrics import (
    FROM_ARRIVAL,
    energy_observations,
    latency_observations,
    load_observations,
    size_observations,
)
from results.records import Cell, Method, Phase, Record
from results.roads import comparable_roads
from results.runs import OWN_CODE, RunData
from results.share_metrics import is_share_metric
from results.sittings import sittings_of
from results.statistics import mean_interval
from results.trials import Trial

Kind = Literal["time", "energy", "memory", "accuracy"]
Better = Literal["lower", "higher", "neither"]

METRICS: dict[tuple[str, Phase | None], tuple[Kind, Better]] = {
    ("e2e", "all"): ("time", "lower"),
    ("ttft", "prefill"): ("time", "lower"),
    ("tpot", "decode"): ("time", "lower"),
    ("throughput", "prefill"): ("time", "higher"),
    ("throughput", "decode"): ("time", "higher"),
    ("ttft_from_arrival", "prefill"): ("time", "lower"),
    ("e2e_from_arrival", "all"): ("time", "lower"),
    ("energy_per_response", "all"): ("energy", "lower"),
    ("energy_per_token", "all"): ("energy", "lower"),
    ("energy_per_token", "prefill"): ("energy", "lower"),
    ("energy_per_token", "decode"): ("energy", "lower"),
    ("average_power", "all"): ("energy", "neither"),
    ("peak_memory", None): ("memory", "lower"),
}
"""What is followed besides scores, and which way is better."""
WORDS: dict[str, str] = {
    "e2e": "time of a request",
    "ttft": "time to first token",
    "tpot": "time per output token",
    "throughput": "tokens a second",
    "ttft_from_arrival": "time to first token, with the queue",
    "e2e_from_arrival": "time of a request, with the queue",
    "energy_per_response": "energy of a request",
    "energy_per_token": "energy of a token",
    "average_power": "mean power",
    "peak_memory": "peak memory",
}
PHASES_TOLD = {"throughput", "energy_per_token"}
"""Metrics of several phases, which their words alone do not tell."""


class Figure(Record):
    """One metric of one cell of one run. values: by repeat, of the trials that count. meter_error: relative standard
    uncertainty that repeats do not narrow; whole_error: with what the meter shares over all its windows, None where it
    states none. n_samples: of a score."""

    metric: str
    phase: Phase | None
    unit: str
    kind: Kind
    better: Better
    method: Method
    meter: str | None = None
    values: dict[int, float]
    meter_error: float = 0.0
    whole_error: float | None = None
    n_samples: int | None = None

    @property
    def name(self) -> str:
        """ "energy of a token, decode"."""
        words = WORDS.get(self.metric, self.metric)
        return f"{words}, {self.phase}" if self.metric in PHASES_TOLD and self.phase != "all" else words

    @property
    def key(self) -> tuple[str, Phase | None]:
        return self.metric, self.phase

    @cached_property
    def mean(self) -> float:
        return math.fsum(self.values.values()) / len(self.values)

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def is_share(self) -> bool:
        """Of right answers, or as they are: told in %, and its changes in points."""
        return self.kind == "accuracy" and self.unit == "1"

    @cached_property
    def standard_error(self) -> float | None:
        """Of the mean, from repeats; None of one."""
        if self.n < 2:
            return None
        return float(np.std(list(self.values.values()), ddof=1)) / math.sqrt(self.n)

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """95 %, of the repeats, as in a run's tables. Below 0 lies no possible mean of what is never below."""
        if self.n < 2:
            return None
        low, high = mean_interval(np.array(list(self.values.values())))
        return max(low, 0.0) if min(self.values.values()) >= 0 else low, high


class CellPoint(Record):
    """One cell of one run. asked: digests of its requests. roads: what computed, by phase, where that decides times.
    left_out: trials that are ok, and in no mean. shares_of_others: of the CPU, in each trial that counts. n_doubted: of
    these trials, those in which two readings of the same joules disagree."""

    cell_id: str
    label: str
    engine: str
    model: str
    workload: str
    device: str
    n_ok: int
    n_failed: int
    n_left_out: int
    settings: Settings
    asked: tuple[str, ...] = ()
    sittings: dict[int, int] = Field(default_factory=dict)
    """Of repeats that are of a later sitting than the first."""
    roads: dict[Phase, tuple[str, ...]] = Field(default_factory=dict)
    figures: tuple[Figure, ...] = ()
    shares_of_others: tuple[float, ...] = ()
    n_doubted: int = 0

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What makes it the same cell in another run."""
        return self.device, self.engine, self.model, self.workload

    @cached_property
    def by_key(self) -> dict[tuple[str, Phase | None], list[Figure]]:
        found: dict[tuple[str, Phase | None], list[Figure]] = {}
        for figure in self.figures:
            found.setdefault(figure.key, []).append(figure)
        return found


class RunPoint(Record):
    """One run, without its cells. folder: below the history's. seen: of the files that it was read from."""

    folder: str
    run_id: str
    plan: str
    created_at: str
    devices: tuple[str, ...]
    arms: tuple[str, ...]
    n_cells: int
    n_ok: int
    n_failed: int
    n_left_out: int
    environments: dict[str, Environment]
    ranges: tuple[tuple[str, str, str, str, float, float], ...] = ()
    """(device, metric, unit, method, lowest, highest) over the cells of a device, of the key figures; of a score over
    those of all devices, and its device is empty."""
    settings: tuple[ArmSettings, ...] = ()
    rests: dict[str, str] = Field(default_factory=dict)
    """`results.history.rests`."""
    code: str | None = None
    """Digest of joulebench's own. None of runs from before it was kept."""
    remarks: tuple[str, ...] = ()
    """That it has not come to its end, that rows of it are gone, or that others had a part of the CPU."""
    is_unfinished: bool = False

    @property
    def told(self) -> list[str]:
        """Its remarks, with its name."""
        return [f"{self.folder}: {remark}" for remark in self.remarks]


KEY_METRICS: tuple[tuple[str, Phase | None], ...] = (
    ("e2e", "all"),
    ("e2e_from_arrival", "all"),
    ("energy_per_response", "all"),
)
"""Of requests that arrive by themselves the second counts, and the first does not."""


def run_point(run: RunData, folder: str, cells: Sequence[CellPoint]) -> RunPoint:
    return RunPoint(
        folder=folder,
        run_id=run.info.run_id,
        plan=run.info.name,
        created_at=run.info.created_at,
        devices=tuple(dict.fromkeys(cell.device for cell in run.cells)),
        arms=tuple(dict.fromkeys(cell.engine for cell in run.cells)),
        n_cells=len(run.cells),
        n_ok=sum(cell.n_ok for cell in cells),
        n_failed=sum(cell.n_failed for cell in cells),
        n_left_out=sum(cell.n_left_out for cell in cells),
        environments=run.info.environments,
        ranges=tuple(_ranges(cells)),
        settings=arm_settings(run.cells),
        rests=rests_of(run),
        code=next((one.value for one in run.info.inputs if one.name == OWN_CODE), None),
        remarks=(*run.remarks, *trials_told(cells)),
        is_unfinished=run.is_unfinished,
    )


def _ranges(cells: Sequence[CellPoint]) -> Iterator[tuple[str, str, str, str, float, float]]:
    """Of key figures and of the first score of each cell; what came to be in several ways stands apart, and so do times
    and joules of several devices."""
    means: dict[tuple[str, str, str, str], list[float]] = {}
    for cell in cells:
        metrics = {figure.metric for figure in cell.figures}
        for figure in cell.figures:
            if figure.key in KEY_METRICS and FROM_ARRIVAL.get(figure.metric) not in metrics:
                means.setdefault((cell.device, figure.metric, figure.unit, figure.method), []).append(figure.mean)
    for cell in cells:
        for figure in [f for f in cell.figures if f.kind == "accuracy"][:1]:
            means.setdefault(("", figure.metric, figure.unit, figure.method), []).append(figure.mean)
    for (device, metric, unit, method), own in means.items():
        yield device, metric, unit, method, min(own), max(own)


def cell_points(run: RunData) -> list[CellPoint]:
    return [cell_point(cell, trials) for cell, trials in _with_trials(run)]


def _with_trials(run: RunData) -> Iterator[tuple[Cell, list[Trial]]]:
    found = trials_of(run)
    for cell in run.cells:
        yield cell, found[cell.cell_id]


def cell_point(cell: Cell, trials: Sequence[Trial]) -> CellPoint:
    good = usable(trials)
    return CellPoint(
        cell_id=cell.cell_id,
        label=cell.label,
        engine=cell.engine,
        model=model_name(cell),
        workload=cell.workload,
        device=cell.device,
        n_ok=sum(t.status == "ok" for t in trials),
        n_failed=sum(t.has_failed for t in trials),
        n_left_out=sum(t.status == "ok" for t in trials) - len(good),
        settings=settings_of(cell),
        asked=tuple(sorted({t.requests_sha256 for t in trials if t.requests_sha256 is not None})),
        sittings={i: one for i, one in sittings_of(trials).get(cell.cell_id, {}).items() if one},
        roads=_roads(good),
        figures=(*cost_figures(good), *score_figures(answering(trials))),
        shares_of_others=tuple(t.foreign_cpu_share for t in good if t.foreign_cpu_share is not None),
        n_doubted=sum(bool(t.disagreements) for t in good),
    )


def trials_told(cells: Collection[CellPoint]) -> Iterator[str]:
    """Where a plan lets trials count beside other processes: a neighbour that goes looks like a faster arm. And where
    nobody knows which of two readings of their joules is right."""
    shared = shared_by([share for cell in cells for share in cell.shares_of_others])
    if shared is not None:
        yield f"{shared.words('trials that count')}."
    if n := sum(cell.n_doubted for cell in cells):
        n_of = sum(cell.n_ok - cell.n_left_out for cell in cells)
        yield f"in {n} of {n_of} trials that count two readings of the same joules disagree: trust neither."


def _roads(trials: Sequence[Trial]) -> dict[Phase, tuple[str, ...]]:
    phases: tuple[Phase, ...] = ("all", "prefill", "decode")
    return {phase: own for phase in phases if (own := tuple(sorted(comparable_roads(trials, phase))))}


def cost_figures(trials: Sequence[Trial]) -> list[Figure]:
    """Times, joules and memory: of each metric, phase, method and meter its values by repeat. What is no number
    in a run of others is no figure, as of scores: a history is of the other runs too."""
    found: dict[tuple[Any, ...], dict[int, float]] = {}
    for trial in trials:
        for read in (latency_observations, load_observations, energy_observations, size_observations):
            for o in read(trial):
                if o.value is not None and math.isfinite(o.value) and (o.metric, o.phase) in METRICS:
                    found.setdefault((o.metric, o.phase, o.unit, o.method, o.meter), {})[trial.repeat] = o.value
    errors = _meter_errors(trials) if any(key[4] for key in found) else {}
    metrics = {metric for metric, *_ in found}
    made = []
    for (metric, phase, unit, method, meter), values in found.items():
        kind, better = METRICS[metric, phase]
        if FROM_ARRIVAL.get(metric) in metrics:
            better = "neither"  # the time with the queue is judged in its place
        unshared, whole = errors.get((meter, phase), (0.0, None)) if meter is not None else (0.0, None)
        made.append(
            Figure(
                metric=metric,
                phase=phase,
                unit=unit,
                kind=kind,
                better=better,
                method=method,
                meter=meter,
                values=values,
                meter_error=unshared,
                whole_error=whole,
            )
        )
    return made


def _meter_errors(trials: Iterable[Trial]) -> dict[tuple[str, Phase], tuple[float, float | None]]:
    """By meter and phase: (without its gain error, whole), relative, the means over trials."""
    found: dict[tuple[str, Phase], list[tuple[float, float | None]]] = {}
    for trial in trials:
        for reading in trial.energy:
            relative = reading.method == "relative gauge"
            amount = reading.gauge_units if relative else reading.energy_j
            if reading.component == "total" and amount and math.isfinite(amount):
                stated = reading.gauge_units_uncertainty if relative else reading.uncertainty_j
                whole = None if stated is None else stated / abs(amount)
                found.setdefault((reading.meter, reading.phase), []).append(
                    (reading.unshared_uncertainty / abs(amount), whole)
                )
    means = {}
    for key, own in found.items():
        wholes = [whole for _, whole in own if whole is not None]
        whole = math.fsum(wholes) / len(wholes) if len(wholes) == len(own) else None
        means[key] = math.fsum(unshared for unshared, _ in own) / len(own), whole
    return means


def score_figures(trials: Sequence[Trial]) -> list[Figure]:
    """The task's own aggregates. Of those that are no shares, as perplexities and nats, the unit is empty."""
    found: dict[str, dict[int, float]] = {}
    known: dict[str, tuple[bool, int]] = {}
    for trial in trials:
        for score in trial.scores:
            if score.sample_id is None and math.isfinite(score.value):
                found.setdefault(score.metric, {})[trial.repeat] = score.value
                known.setdefault(score.metric, (score.higher_is_better, score.n))
    return [
        Figure(
            metric=metric,
            phase=None,
            unit="1" if known[metric][0] and is_share_metric(metric) else "",
            kind="accuracy",
            better="higher" if known[metric][0] else "lower",
            method="measured",
            values=values,
            n_samples=known[metric][1],
        )
        for metric, values in found.items()
    ]
