"""Which arm to take: of each device, every arm's time, joules and accuracy as times a baseline.

The baseline is the arm that the reader or the plan names, else the reference arm where it ran on the same device, else
the device's first arm. A group of arms is one device, with one workload or with all of them together: the mean request
of one pass over all that was asked, and the share of right answers of all samples that are right or wrong.

An arm is marked as the best only where that is certain: the 95 % interval of its ratio to every other arm leaves out 1
(of answers, McNemar's exact test agrees), all figures came to be in one way, and where that way is a model, the ratio
is beyond the model's own error. Nothing is corrected for how many arms there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd

from results.cells import left_out_reason, trials_of, usable
from results.compare import Difference, UnlikeError, compare_scores, mean_score, sample_scores
from results.metrics import NO_METER, RELATIVE_UNITS
from results.ratios import Ratio, ratio_of_means, ratio_of_shares
from results.records import Cell, Method, RunData, Trial
from results.report.arms import Arm, arms_of
from results.statistics import NORMAL_95
from results.zero_one import zero_one_metrics

Quantity = Literal["time", "energy", "accuracy"]
QUANTITIES: tuple[Quantity, ...] = ("time", "energy", "accuracy")
RANDOM_WEIGHTS = "the weights are random: scores say nothing about the method"
NOT_SCORED = "this workload is not scored"
ASKED_OTHERWISE = "the arms were not asked the same requests: nothing can be paired"
MODELLED_ONCE = "modelled once, so without an interval: a model gives the same figure every time"
NO_SHARES = "no workload is right or wrong for each sample; their scores stand by workload"


class NoArmError(Exception):
    """No arm has the name that a reader gave: which there are."""


@dataclass(frozen=True)
class Standing:
    """One arm's figure and how it stands to the baseline.

    value: seconds or joules a request, or the mean score; None with a reason. n: trials, or samples of a score.
    model_error: one relative standard deviation of a model behind the value; None where it is measured, infinite where
    the model states none. ratio: None for the baseline itself, and where reason says so.
    """

    arm: Arm
    quantity: Quantity
    value: float | None
    unit: str
    method: Method
    meter: str | None
    n: int
    n_of: str
    ratio: Ratio | None = None
    is_baseline: bool = False
    is_certain: bool = False
    """Whether it differs from the baseline beyond its interval, and beyond the error of its model."""
    is_best: bool = False
    model_error: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Verdict:
    """Who is best of a group in one quantity, certain or not. rivals: arms that may be as good as the leader.

    behind: arms that are not, with their ratio to the leader.
    """

    quantity: Quantity
    leader: Standing | None
    rivals: tuple[Standing, ...]
    is_certain: bool
    why: str = ""
    behind: tuple[tuple[Standing, Ratio | None], ...] = ()


@dataclass(frozen=True)
class Group:
    """The arms of one device on one workload, or on all (`workload` None). rows: by arm, in the order of the plan."""

    device: str
    workload: str | None
    score: str | None
    rising: bool
    baseline: Arm
    rows: tuple[Mapping[Quantity, Standing], ...]
    verdicts: Mapping[Quantity, Verdict]

    @property
    def arms(self) -> list[Arm]:
        return [row["time"].arm for row in self.rows]


def device_groups(run: RunData, frame: pd.DataFrame, baseline: str | None = None) -> list[tuple[Group, list[Group]]]:
    """By device: its group of all workloads, and one of each workload; where it has one workload, that alone twice.

    frame: the run's tidy table. baseline: an arm's name; raises `NoArmError` where there is none such.
    """
    named = baseline if baseline is not None else run.info.plan.get("baseline")
    names = list(dict.fromkeys(c.engine for c in run.cells))
    if baseline is not None and not any(baseline in names_of(name) for name in names):
        raise NoArmError(f"no arm of this run is named {baseline!r}; take one of {', '.join(names)}")
    made = _Groups(run, frame, named)
    found = []
    for device in dict.fromkeys(c.device for c in run.cells):
        workloads = list(dict.fromkeys(c.workload for c in run.cells if c.device == device))
        single = [made.group(device, (workload,)) for workload in workloads]
        found.append((single[0] if len(single) == 1 else made.group(device, workloads), single))
    return found


def names_of(engine: str) -> tuple[str, str]:
    """What an arm can be called: its name, and that without the values of a sweep ("int4[prefill_chunk=256]")."""
    return engine, engine.partition("[")[0]


def standings_table(groups: Sequence[tuple[Group, Sequence[Group]]]) -> pd.DataFrame:
    """One row per device, workload, arm and quantity, for a file. workload is empty for all together."""
    rows = []
    for whole, single in groups:
        for group in [whole, *single] if len(single) > 1 else single:
            for row in group.rows:
                rows += [_table_row(group, standing) for standing in row.values()]
    frame = pd.DataFrame(rows, columns=list(_COLUMNS))
    for column in ("workload", "score", "meter", "reason"):
        frame[column] = frame[column].astype(object).where(frame[column].notna(), None)
    return frame.astype(dict.fromkeys(("value", "ratio", "ratio_low", "ratio_high"), "float64"))


_COLUMNS = (
    "device", "workload", "arm", "technique", "model", "baseline", "quantity", "score", "value", "unit", "method",
    "meter", "n", "n_of", "ratio", "ratio_low", "ratio_high", "certain_difference", "certainly_best", "reason",
)  # fmt: skip


def _table_row(group: Group, standing: Standing) -> dict[str, object]:
    ratio = standing.ratio
    return {
        "device": group.device,
        "workload": group.workload,
        "arm": standing.arm.engine,
        "technique": standing.arm.technique,
        "model": standing.arm.model,
        "baseline": group.baseline.engine,
        "quantity": standing.quantity,
        "score": group.score if standing.quantity == "accuracy" else None,
        "value": standing.value,
        "unit": standing.unit,
        "method": standing.method,
        "meter": standing.meter,
        "n": standing.n,
        "n_of": standing.n_of,
        "ratio": 1.0 if standing.is_baseline and standing.value is not None else ratio and ratio.value,
        "ratio_low": ratio and ratio.low,
        "ratio_high": ratio and ratio.high,
        "certain_difference": standing.is_certain,
        "certainly_best": standing.is_best,
        "reason": standing.reason or (ratio.reason if ratio else None),
    }


# --- one arm's figures -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Figure:
    """An arm's figure before it is compared. sums: of each workload, seconds or joules of all requests, by repeat.
    scores: by sample. asked: what two arms must share to be paired."""

    arm: Arm
    value: float | None
    unit: str
    method: Method
    meter: str | None
    n: int
    n_of: str
    model_error: float | None
    reason: str | None
    sums: tuple[Mapping[int, float], ...] = ()
    scores: Mapping[str, tuple[float, ...]] | None = None
    asked: tuple[object, ...] = ()
    is_share: bool = False
    rising: bool = False


class _Groups:
    def __init__(self, run: RunData, frame: pd.DataFrame, baseline: str | None) -> None:
        self._run, self._baseline = run, baseline
        self._arms = arms_of(run.cells)
        self._all_trials = trials_of(run)
        self._trials = {cell_id: usable(own) for cell_id, own in self._all_trials.items()}
        self._zero_one = zero_one_metrics(run)
        self._rising = {s.metric: s.higher_is_better for t in run.trials for s in t.scores}
        self._first_score = _first_scores(run)
        self._amounts: dict[tuple[str, Quantity], _Amount] = {}
        errors = frame[(frame["metric"] == "energy_uncertainty") & (frame["phase"] == "all")]
        self._energy_error = dict(zip(errors["cell"], errors["mean"], strict=True))

    def group(self, device: str, workloads: Sequence[str]) -> Group:
        by_arm: dict[Arm, list[Cell]] = {}
        for cell in self._run.cells:
            if cell.device == device and cell.workload in workloads:
                by_arm.setdefault(self._arms[cell.cell_id], []).append(cell)
        baseline = self._baseline_of(device, by_arm)
        found: dict[Quantity, list[Standing]] = {}
        verdicts: dict[Quantity, Verdict] = {}
        score = self._first_score.get(workloads[0]) if len(workloads) == 1 else None
        rising = self._rising.get(score or "", True)
        for quantity in QUANTITIES:
            figures = [self._figure(arm, cells, workloads, quantity) for arm, cells in by_arm.items()]
            verdicts[quantity], found[quantity] = _ranked(figures, baseline, quantity)
        rows = tuple({q: found[q][i] for q in QUANTITIES} for i in range(len(by_arm)))
        return Group(device, workloads[0] if len(workloads) == 1 else None, score, rising, baseline, rows, verdicts)

    def _baseline_of(self, device: str, by_arm: Mapping[Arm, Sequence[Cell]]) -> Arm:
        named = [arm for arm in by_arm if self._baseline in names_of(arm.engine)]
        here = {c.cell_id: arm for arm, cells in by_arm.items() for c in cells}
        references = [here[c.reference_id] for cells in by_arm.values() for c in cells if c.reference_id in here]
        return (*named, *references, *by_arm)[0]

    def _figure(self, arm: Arm, cells: Sequence[Cell], workloads: Sequence[str], quantity: Quantity) -> _Figure:
        by_workload = {c.workload: c for c in cells}
        lacking = [w for w in workloads if w not in by_workload or not self._trials[by_workload[w].cell_id]]
        unit = {"time": "s", "energy": "J", "accuracy": "1"}[quantity]
        n_of = "samples" if quantity == "accuracy" else "trials"
        none = _Figure(arm, None, unit, "missing", None, 0, n_of, None, None)
        if lacking:
            own = by_workload.get(lacking[0])
            why = left_out_reason(self._all_trials[own.cell_id], with_errors=True) if own else "was not asked"
            return replace(none, reason=f"{', '.join(lacking)}: {why or 'no trial was run'}")
        chosen = [by_workload[w] for w in workloads]
        if quantity == "accuracy":
            return self._score(none, chosen)
        trials = [self._trials[c.cell_id] for c in chosen]
        amounts = [{t.repeat: self._amount(t, quantity) for t in own} for own in trials]
        ways = {(a.unit, a.method, a.meter) for own in amounts for a in own.values() if a.value is not None}
        sums = tuple({i: a.value for i, a in own.items() if a.value is not None} for own in amounts)
        if not all(sums):
            return replace(none, reason=next(a.reason for own in amounts for a in own.values() if a.value is None))
        if len(ways) > 1:
            return replace(none, reason="its trials' figures came to be in several ways")
        (unit, method, meter), n_requests = ways.pop(), sum(len(own[0].completions) for own in trials)
        total = math.fsum(math.fsum(own.values()) / len(own) for own in sums)
        return replace(
            none,
            value=total / n_requests,
            unit=unit,
            method=method,
            meter=meter,
            n=min(map(len, sums)),
            model_error=self._model_error(chosen, quantity, method),
            sums=sums,
            asked=tuple({t.requests_sha256 for t in own} | {len(t.completions) for t in own} for own in trials),
        )

    def _amount(self, trial: Trial, quantity: Quantity) -> _Amount:
        """Read once: a trial counts in its workload, and in all of them together."""
        key = (trial.trial_id, quantity)
        if key not in self._amounts:
            self._amounts[key] = _seconds(trial) if quantity == "time" else _joules(trial)
        return self._amounts[key]

    def _model_error(self, cells: Sequence[Cell], quantity: Quantity, method: Method) -> float | None:
        if method != "modelled":
            return None
        if quantity == "time":
            return math.inf
        errors = [self._energy_error.get(c.cell_id, math.nan) / 100 for c in cells]
        return max(errors) if all(e == e for e in errors) else math.inf

    def _score(self, none: _Figure, cells: Sequence[Cell]) -> _Figure:
        if {c.model_note for c in cells} == {"random weights"}:
            return replace(none, reason=RANDOM_WEIGHTS)
        is_whole = len(cells) > 1
        scored = [(c, m) for c in cells if (m := self._first_score.get(c.workload)) is not None]
        shares = [(c, m) for c, m in scored if m in self._zero_one[c.workload]]
        if not scored:
            return replace(none, reason=NOT_SCORED)
        if is_whole and not shares:
            return replace(none, reason=NO_SHARES)
        scores: dict[str, tuple[float, ...]] = {}
        try:
            for cell, metric in shares if is_whole else scored:
                own = sample_scores(self._trials[cell.cell_id], metric)
                scores |= {f"{cell.workload}\0{sample}": values for sample, values in own.items()}
        except UnlikeError as error:
            return replace(none, reason=str(error))
        (cell, metric), *_ = scored
        rising = True if is_whole else self._rising.get(metric, True)
        wholes = [s for t in self._trials[cell.cell_id] for s in t.scores if s.metric == metric and s.sample_id is None]
        aggregate = math.fsum(s.value for s in wholes) / len(wholes) if wholes else None
        is_mean = bool(scores) and (
            is_whole or aggregate is None or math.isclose(mean_score(scores), aggregate, rel_tol=1e-6, abs_tol=1e-12)
        )
        if not is_mean and aggregate is None:
            return replace(none, reason="it has no score")
        return replace(
            none,
            value=mean_score(scores) if is_mean else aggregate,
            method="measured",
            n=len(scores) if is_mean else wholes[0].n,
            scores=scores if is_mean else None,
            is_share=len(shares) > 0 and is_mean,
            rising=rising,
        )


@dataclass(frozen=True)
class _Amount:
    value: float | None
    unit: str
    method: Method
    meter: str | None
    reason: str | None


def _seconds(trial: Trial) -> _Amount:
    """E2E of all requests of a trial."""
    if not trial.completions:
        return _Amount(None, "s", trial.time_method, None, "no request was completed")
    return _Amount(math.fsum(c.e2e_s for c in trial.completions), "s", trial.time_method, None, None)


def _joules(trial: Trial) -> _Amount:
    """Of the window, by the trial's first meter."""
    found = next((r for r in trial.energy if (r.component, r.phase) == ("total", "all")), None)
    if found is None:
        return _Amount(None, "J", "missing", None, NO_METER)
    if found.method == "relative gauge":
        return _Amount(found.gauge_units, RELATIVE_UNITS["J"], found.method, found.meter, found.reason)
    return _Amount(found.energy_j, "J", found.method, found.meter, found.reason or f"{found.meter} gave no energy")


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


# --- against the baseline, and against each other --------------------------------------------------------------------


def _ranked(figures: Sequence[_Figure], baseline: Arm, quantity: Quantity) -> tuple[Verdict, list[Standing]]:
    base = next(f for f in figures if f.arm == baseline)
    standings = []
    for figure in figures:
        ratio, reason = (None, figure.reason) if figure is base else _against(figure, base)
        standings.append(
            Standing(
                arm=figure.arm,
                quantity=quantity,
                value=figure.value,
                unit=figure.unit,
                method=figure.method,
                meter=figure.meter,
                n=figure.n,
                n_of=figure.n_of,
                ratio=ratio,
                is_baseline=figure is base,
                is_certain=figure is not base and _differ(figure, base, ratio),
                model_error=figure.model_error,
                reason=reason,
            )
        )
    verdict = _verdict(quantity, figures, standings)
    if verdict.is_certain and verdict.leader is not None:
        best = replace(verdict.leader, is_best=True)
        standings = [best if s is verdict.leader else s for s in standings]
        verdict = replace(verdict, leader=best)
    return verdict, standings


def _against(figure: _Figure, base: _Figure) -> tuple[Ratio | None, str | None]:
    """(ratio, why there is none)."""
    if figure.value is None:
        return None, figure.reason
    if base.value is None:
        return None, f"the baseline has no figure: {base.reason}"
    if (figure.method, figure.meter, figure.unit) != (base.method, base.meter, base.unit):
        return None, f"the baseline's figure came to be in another way ({base.method}, {base.meter or 'no meter'})"
    if figure.scores is not None and base.scores is not None:
        if figure.scores.keys() != base.scores.keys():
            return None, "not the same samples as the baseline's"
        if figure.is_share:
            return ratio_of_shares(figure.scores, base.scores), None
        samples = sorted(base.scores)
        pairs = [[math.fsum(f.scores[s]) / len(f.scores[s]) for s in samples] for f in (figure, base) if f.scores]
        return ratio_of_means([(pairs[0], pairs[1])]), None
    if not figure.sums:
        if base.value == 0:
            return None, "the baseline's score is 0"
        return Ratio(figure.value / base.value, reason="this score is no mean over samples, so nothing tests it"), None
    if figure.asked != base.asked:
        return Ratio(figure.value / base.value if base.value else None, reason=ASKED_OTHERWISE), None
    return _paired_ratio(figure, base)


def _paired_ratio(figure: _Figure, base: _Figure) -> tuple[Ratio | None, str | None]:
    pairs = []
    for own, other in zip(figure.sums, base.sums, strict=True):
        both = sorted(own.keys() & other.keys())
        if not both:
            return None, "no repeat has a figure of both arms"
        pairs.append(([own[i] for i in both], [other[i] for i in both]))
    ratio = ratio_of_means(pairs)
    if figure.model_error is not None and ratio.n == 1:
        ratio = replace(ratio, reason=MODELLED_ONCE)
    return (None, ratio.reason) if ratio.value is None else (ratio, None)


def _differ(figure: _Figure, other: _Figure, ratio: Ratio | None) -> bool:
    """Whether two figures differ for certain: beyond the interval of their pairs, and beyond the error of a model."""
    if ratio is None or ratio.value is None or ratio.value <= 0:
        return False
    if figure.model_error is not None or other.model_error is not None:
        error = math.hypot(figure.model_error or 0.0, other.model_error or 0.0)
        beyond = abs(math.log(ratio.value)) > NORMAL_95 * error
        return beyond and (ratio.is_clear or ratio.low is None)
    if figure.is_share and figure.scores is not None and other.scores is not None:
        return ratio.is_clear and _tested(figure, other).is_clear
    return ratio.is_clear


def _tested(figure: _Figure, other: _Figure) -> Difference:
    return compare_scores(other.scores or {}, figure.scores or {}, is_zero_one=True)


def _verdict(quantity: Quantity, figures: Sequence[_Figure], standings: Sequence[Standing]) -> Verdict:
    known = [(f, s) for f, s in zip(figures, standings, strict=True) if f.value is not None]
    if not known:
        reasons = dict.fromkeys(s.reason for s in standings if s.reason)
        return Verdict(quantity, None, (), False, next(iter(reasons), "no arm has a figure"))
    rising = quantity == "accuracy" and known[0][0].rising
    best, leader = (max if rising else min)(known, key=lambda pair: pair[0].value or 0.0)
    others = [(f, s) for f, s in known if f is not best]
    if not others:
        return Verdict(quantity, leader, (), False, "only this arm has a figure")
    ways = {(f.method, f.meter, f.unit) for f, _ in known}
    if len(ways) > 1:
        return Verdict(quantity, leader, tuple(s for _, s in others), False, "their figures came to be in several ways")
    ratios = [_against(f, best)[0] for f, _ in others]
    told = [(s, ratio, _differ(f, best, ratio)) for (f, s), ratio in zip(others, ratios, strict=True)]
    rivals = tuple(s for s, _, differs in told if not differs)
    behind = tuple((s, ratio) for s, ratio, differs in told if differs)
    why = ""
    if rivals:
        modelled = best.model_error is not None
        without = next((r.reason for r in ratios if r is not None and r.low is None), None)
        why = "within the error of the model" if modelled else without or "their difference may be 0"
    return Verdict(quantity, leader, rivals, not rivals, why, behind)
