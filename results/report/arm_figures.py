"""One arm's seconds, joules and score of a group, before anything is compared, with how uncertain each is.

A group is one device, with one workload or with several of them together: the mean request of one pass over all that
was asked, and the share of right answers of all samples that are right or wrong.

The readings of a meter are uncertain in two ways. Its gain error is the same for every arm, so it cancels in a ratio.
What is left (a stretch that was filled in, edges between readings) may be the same in every repeat of an arm, and
another in another arm: repeats do not narrow it. A reading that does not say how much of it is gain has all of it left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd

from results.binary_scores import binary_metrics
from results.cells import answering, left_out_reason, no_room, trials_of, usable
from results.compare import UnlikeError, mean_score, sample_logarithms, sample_of, sample_scores
from results.latencies import n_behind_first
from results.metrics import NO_METER, RELATIVE_UNITS, no_number, time_method
from results.operations import outside_share
from results.packed import column_of
from results.records import NO_MODEL, Cell, Method, Phase
from results.report.arms import Arm
from results.request_columns import are_due, lasting, shared_time, waiting_s
from results.roads import comparable_roads
from results.runs import RunData
from results.sittings import sittings_of
from results.trials import Trial

Quantity = Literal["time", "energy", "accuracy"]
QUANTITIES: tuple[Quantity, ...] = ("time", "energy", "accuracy")
RANDOM_WEIGHTS = "the weights are random: scores say nothing about the method"
NOT_SCORED = "this workload is not scored"
NO_SHARES = "no workload is right or wrong for each sample; their scores stand by workload"


@dataclass(frozen=True)
class ArmFigure:
    """An arm's figure before it is compared.

    value: seconds or joules a request, or the mean score; None with a reason. n: trials, or samples of a score.
    model_error: one relative standard deviation of a model behind the value; None where it is measured, infinite where
    the model states none. stated_error: that of the meter's own readings, whole; unshared_error: without the gain
    error. overlaps: whether requests of it ran at the same time without arriving by themselves, so that each takes
    longer than its part of the window. with_queue: whether seconds count from a request's arrival. window_s: of one
    pass over all that was asked. outside_share: of the seconds of a model, those of launches unlike all that it was
    fitted on. is_priced: whether a sheet gave the seconds, and so the same every time; joules may be modelled from
    seconds that a clock gave, and differ. sums: of each workload, seconds or joules of all requests, by repeat;
    sittings: of the same. scores: by sample; is_log: the value is e to their mean. asked: what two arms must share to
    be paired. roads: of each workload, what computed, where that decides the figure: none behind times that a model
    gives.
    """

    arm: Arm
    value: float | None
    unit: str
    method: Method
    meter: str | None
    n: int
    n_of: str
    model_error: float | None = None
    stated_error: float | None = None
    unshared_error: float = 0.0
    reason: str | None = None
    remark: str | None = None
    """Of how many trials it is, where some that are ok lack it."""
    sums: tuple[Mapping[int, float], ...] = ()
    sittings: tuple[Mapping[int, int], ...] = ()
    scores: Mapping[str, tuple[float, ...]] | None = None
    asked: tuple[object, ...] = ()
    is_share: bool = False
    is_log: bool = False
    rising: bool = False
    roads: tuple[frozenset[str], ...] = ()
    overlaps: bool = False
    with_queue: bool = False
    window_s: float | None = None
    outside_share: float | None = None
    is_priced: bool = False
    result: str | None = None
    """ "N.S." or "oom", where there is no figure because experts fit nowhere."""

    @property
    def way(self) -> tuple[Method, str | None, str]:
        """How it came to be. Figures of two ways are not compared. Seconds that follow from a speed that a program told
        are a clock's too."""
        return "measured" if self.method == "derived" else self.method, self.meter, self.unit

    @property
    def spoken_way(self) -> str:
        return f"{self.method}, {self.meter}" if self.meter else self.method


class ArmFigures:
    """first_score: of each workload. rising: whether more is better, by score."""

    def __init__(self, run: RunData, frame: pd.DataFrame, operations: pd.DataFrame) -> None:
        self._operations = operations
        self._all_trials = trials_of(run)
        self._trials = {cell_id: usable(own) for cell_id, own in self._all_trials.items()}
        self._answering = {cell_id: answering(own) for cell_id, own in self._all_trials.items()}
        self._binary = binary_metrics(run)
        self.rising = {s.metric: s.higher_is_better for t in run.trials for s in t.scores}
        self.first_score = _first_scores(run)
        self._amounts: dict[tuple[str, Quantity, Phase], _Amount] = {}
        errors = frame[(frame["metric"] == "energy_uncertainty") & (frame["phase"] == "all") & frame["mean"].notna()]
        self._stated_error: dict[tuple[str, str | None, str], float] = {
            (cell, meter, method): percent / 100
            for cell, meter, method, percent in zip(
                *(errors[c] for c in ("cell", "meter", "method", "mean")), strict=True
            )
        }

    def figure(
        self,
        arm: Arm,
        cells: Sequence[Cell],
        workloads: Sequence[str],
        quantity: Quantity,
        phase: Phase = "all",
    ) -> ArmFigure:
        """phase: of the requests, where the quantity is time."""
        by_workload = {c.workload: c for c in cells}
        is_score = quantity == "accuracy"
        kept = self._answering if is_score else self._trials
        lacking = [w for w in workloads if w not in by_workload or not kept[by_workload[w].cell_id]]
        unit = {"time": "s", "energy": "J", "accuracy": "1"}[quantity]
        n_of = "samples" if quantity == "accuracy" else "trials"
        none = ArmFigure(arm, None, unit, "missing", None, 0, n_of)
        if lacking:
            own = by_workload.get(lacking[0])
            why: str | None = "was not asked"
            if own is not None:
                why = left_out_reason(self._all_trials[own.cell_id], True, answering if is_score else usable)
            rooms = {no_room(self._all_trials[by_workload[w].cell_id]) if w in by_workload else None for w in lacking}
            result = rooms.pop() if len(rooms) == 1 else None
            return replace(none, reason=f"{', '.join(lacking)}: {why or 'no trial was run'}", result=result)
        chosen = [by_workload[w] for w in workloads]
        if is_score:
            return self._score(none, chosen)
        trials = [self._trials[c.cell_id] for c in chosen]
        amounts = [{t.repeat: self._amount(t, quantity, phase) for t in own} for own in trials]
        ways = {(a.unit, a.method, a.meter) for own in amounts for a in own.values() if a.value is not None}
        sums = tuple({i: a.value for i, a in own.items() if a.value is not None} for own in amounts)
        if not all(sums):
            return replace(none, reason=next(a.reason for own in amounts for a in own.values() if a.value is None))
        if len(ways) > 1:
            return replace(none, reason="its trials' figures came to be in several ways")
        (unit, method, meter), n_requests = ways.pop(), sum(len(own[0].completions) for own in trials)
        total = math.fsum(math.fsum(own.values()) / len(own) for own in sums)
        stated = self._stated(chosen, meter, method) if quantity == "energy" else None
        no_model_error = math.inf if quantity == "time" or stated is None else stated
        return replace(
            none,
            value=total / n_requests,
            unit=unit,
            method=method,
            meter=meter,
            n=min(map(len, sums)),
            remark=_of_fewer(workloads, amounts, method),
            model_error=no_model_error if method == "modelled" else None,
            stated_error=stated,
            unshared_error=_unshared(amounts, total),
            sums=sums,
            sittings=tuple(sittings_of(own).get(c.cell_id, {}) for c, own in zip(chosen, trials, strict=True)),
            is_priced=all(t.time_method == "modelled" for own in trials for t in own),
            roads=tuple(comparable_roads(own, phase) for own in trials),
            overlaps=any(a.overlaps for own in amounts for a in own.values()),
            with_queue=any(a.with_queue for own in amounts for a in own.values()),
            window_s=_summed([[a.window_s for a in own.values()] for own in amounts]),
            outside_share=self._outside_share(chosen) if method == "modelled" and phase == "all" else None,
            asked=tuple({t.requests_sha256 for t in own} | {len(t.completions) for t in own} for own in trials),
        )

    def other_scores(self, workloads: Sequence[str]) -> dict[str, str]:
        """Workloads whose score is no share of right answers, with it: no accuracy over all workloads counts them."""
        scores = {w: score for w in workloads if (score := self.first_score.get(w)) is not None}
        return {w: score for w, score in scores.items() if score not in self._binary[w]}

    def _amount(self, trial: Trial, quantity: Quantity, phase: Phase) -> _Amount:
        """Read once: a trial counts in its workload, and in all of them together."""
        key = (trial.trial_id, quantity, phase)
        if key not in self._amounts:
            amount = _seconds(trial, phase) if quantity == "time" else _joules(trial)
            if amount.value is not None and not math.isfinite(amount.value):
                amount = replace(amount, value=None, reason=no_number(quantity, amount.value))
            self._amounts[key] = amount
        return self._amounts[key]

    def _outside_share(self, cells: Sequence[Cell]) -> float | None:
        return outside_share(self._operations, [c.cell_id for c in cells])

    def _stated(self, cells: Sequence[Cell], meter: str | None, method: Method) -> float | None:
        """By the meter that the figure is of: a second meter beside it states its own."""
        errors = [self._stated_error.get((c.cell_id, meter, method)) for c in cells]
        known = [e for e in errors if e is not None]
        return max(known) if len(known) == len(errors) else None

    def _score(self, none: ArmFigure, cells: Sequence[Cell]) -> ArmFigure:
        if {c.model_note for c in cells} == {"random weights"}:
            return replace(none, reason=RANDOM_WEIGHTS)
        if {c.model_note for c in cells} == {NO_MODEL}:
            return replace(none, reason=NO_MODEL)
        is_whole = len(cells) > 1
        scored = [(c, m) for c in cells if (m := self.first_score.get(c.workload)) is not None]
        shares = [(c, m) for c, m in scored if m in self._binary[c.workload]]
        if not scored:
            return replace(none, reason=NOT_SCORED)
        if is_whole and not shares:
            return replace(none, reason=NO_SHARES)
        (cell, metric), *_ = scored
        rising = True if is_whole else self.rising.get(metric, True)
        everything = (s for t in self._answering[cell.cell_id] for s in t.scores)
        wholes = [s for s in everything if s.metric == metric and s.sample_id is None]
        aggregate = math.fsum(s.value for s in wholes) / len(wholes) if wholes else None
        scores: dict[str, tuple[float, ...]] = {}
        logarithms: dict[str, tuple[float, ...]] = {}
        try:
            for own_cell, own_metric in shares if is_whole else scored:
                own = sample_scores(self._answering[own_cell.cell_id], own_metric)
                scores |= {sample_of(own_cell.workload, sample): values for sample, values in own.items()}
            if not scores and aggregate is not None:
                logarithms = sample_logarithms(self._answering[cell.cell_id], metric, aggregate)
        except UnlikeError as error:
            return replace(none, reason=str(error))
        if logarithms and aggregate is not None and math.isfinite(aggregate):
            n = len(logarithms)
            return replace(none, value=aggregate, method="measured", n=n, scores=logarithms, is_log=True, rising=rising)
        is_mean = bool(scores) and (
            is_whole or aggregate is None or math.isclose(mean_score(scores), aggregate, rel_tol=1e-6, abs_tol=1e-12)
        )
        if not is_mean and aggregate is None:
            return replace(none, reason="it has no score")
        value = mean_score(scores) if is_mean else aggregate
        if value is None or not math.isfinite(value):
            return replace(none, reason=no_number(metric, value if value is not None else math.nan))
        return replace(
            none,
            value=value,
            method="measured",
            n=len(scores) if is_mean else wholes[0].n,
            scores=scores if is_mean else None,
            is_share=len(shares) > 0 and is_mean,
            rising=rising,
        )


@dataclass(frozen=True)
class _Amount:
    """unshared: standard uncertainty that other arms of the same meter do not share. overlaps, with_queue, window_s: of
    seconds, as in `ArmFigure`."""

    value: float | None
    unit: str
    method: Method
    meter: str | None
    reason: str | None
    unshared: float = 0.0
    overlaps: bool = False
    with_queue: bool = False
    window_s: float | None = None


def _seconds(trial: Trial, phase: Phase) -> _Amount:
    """Of all requests of a trial, the whole or one phase of each. The whole of one that arrives by itself begins with
    its arrival: an engine that takes several together is busy with each for longer, and keeps none waiting for it."""
    if not trial.completions:
        return _Amount(None, "s", trial.time_method, None, "no request was completed")
    if phase == "decode" and not any(map(n_behind_first, column_of(trial.completions, "token_times_s"))):
        return _Amount(None, "s", trial.time_method, None, "no request decoded a token after its first")
    arrive = are_due(trial.completions)
    with_queue = arrive and phase == "all"
    waited_s = waiting_s(trial.completions) if with_queue else []
    total_s = math.fsum([*lasting(trial.completions, phase), *waited_s])
    began_s, ended_s = trial.window_start_s, trial.window_end_s
    return _Amount(
        total_s,
        "s",
        time_method(trial.time_method, trial.completions, phase),
        None,
        None,
        overlaps=not arrive and bool(shared_time(trial.completions)),
        with_queue=with_queue,
        window_s=None if began_s is None or ended_s is None else ended_s - began_s,
    )


def _joules(trial: Trial) -> _Amount:
    """Of the window, by the trial's first meter."""
    found = next((r for r in trial.energy if (r.component, r.phase) == ("total", "all")), None)
    if found is None:
        return _Amount(None, "J", "missing", None, NO_METER)
    relative = found.method == "relative gauge"
    unshared = found.unshared_uncertainty
    if relative:
        unit, reason = RELATIVE_UNITS["J"], found.reason
        return _Amount(found.gauge_units, unit, found.method, found.meter, reason, unshared)
    reason = found.reason or f"{found.meter} gave no energy"
    return _Amount(found.energy_j, "J", found.method, found.meter, reason, unshared)


def _summed(windows: Sequence[Sequence[float | None]]) -> float | None:
    """One pass: of each workload the mean over repeats. None where one is not known."""
    known = [[s for s in own if s is not None] for own in windows]
    if any(len(own) != len(kept) or not kept for own, kept in zip(windows, known, strict=True)):
        return None
    return math.fsum(math.fsum(own) / len(own) for own in known)


def _of_fewer(workloads: Sequence[str], amounts: Sequence[Mapping[int, _Amount]], method: Method) -> str | None:
    """As the tidy table says it, with the workload where there are several."""
    said = []
    for workload, own in zip(workloads, amounts, strict=True):
        without = [a.reason for a in own.values() if a.value is None]
        if without:
            where = f"{workload}: " if len(workloads) > 1 else ""
            reasons = ", ".join(dict.fromkeys(filter(None, without)))
            said.append(f"{where}{len(without)} of {len(own)} trials without a {method} figure: {reasons}")
    return "; ".join(said) or None


def _unshared(amounts: Sequence[Mapping[int, _Amount]], total: float) -> float:
    """Relative to the total: of each workload the mean over repeats, as if it were the same in all of them."""
    known = [[a.unshared for a in own.values() if a.value is not None] for own in amounts]
    return math.fsum(math.fsum(own) / len(own) for own in known) / abs(total) if total else 0.0


def _first_scores(run: RunData) -> dict[str, str]:
    """By workload: the first of its scores, as lm-eval orders them."""
    workload_of = {cell.cell_id: cell.workload for cell in run.cells}
    found: dict[str, str] = {}
    for whole in (True, False):
        for trial in run.trials:
            for score in trial.scores:
                if (score.sample_id is None) is whole:
                    found.setdefault(workload_of[trial.cell_id], score.metric)
                    break
    return found
