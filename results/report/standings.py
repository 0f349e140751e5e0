"""Which arm to take: of each device, every arm's time, joules and accuracy as times a baseline.

The baseline is the arm that the reader or the plan names, else the reference arm where it ran on the same device, else
the device's first arm; where that one has no figure, the next of these that has one.

An arm is marked as the best only where that is certain: every other arm has a figure, the 95 % interval of its ratio to
each leaves out 1 (of answers, McNemar's exact test agrees), all figures came to be in one way, and where that way is a
model, the ratio is beyond the model's own error. An interval of joules counts what the meter's readings say of
themselves, less the gain error that its arms share. Nothing is corrected for how many arms there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pandas as pd

from results.compare import Difference, compare_scores
from results.ratios import Ratio, ratio_of_means, ratio_of_shares, widened
from results.records import Cell, Method
from results.report.arm_figures import QUANTITIES, ArmFigure, ArmFigures, Quantity
from results.report.arms import Arm, arms_of
from results.runs import RunData
from results.statistics import NORMAL_95

ASKED_OTHERWISE = "the arms were not asked the same requests: nothing can be paired"
MODELLED_ONCE = "modelled once, so without an interval: a model gives the same figure every time"
WITHIN_MODEL = "within the error of the model"
MAYBE_0 = "their difference may be 0"


class NoArmError(Exception):
    """No arm has the name that a reader gave: which there are."""


@dataclass(frozen=True)
class Standing:
    """One arm's figure and how it stands to the baseline.

    value: seconds or joules a request, or the mean score; None with a reason. n: trials, or samples of a score.
    model_error: one relative standard deviation of a model behind the value; None where it is measured, infinite where
    the model states none. stated_error: what the meter's readings say of themselves. ratio: None for the baseline
    itself, and where reason says so; remark: what the ratio leaves out.
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
    stated_error: float | None = None
    reason: str | None = None
    remark: str | None = None


class Rival(NamedTuple):
    """An arm that may be as good as the leader, and why that is not known."""

    standing: Standing
    why: str


@dataclass(frozen=True)
class Verdict:
    """Who is best of a group in one quantity, certain or not. rivals: arms that may be as good as the leader.

    behind: arms that are not, with their ratio to the leader, the closest first. without: arms without a figure, which
    a certain leader is not compared with. why: what holds for all of them.
    """

    quantity: Quantity
    leader: Standing | None
    rivals: tuple[Rival, ...]
    is_certain: bool
    why: str = ""
    behind: tuple[tuple[Standing, Ratio | None], ...] = ()
    without: tuple[Standing, ...] = ()


@dataclass(frozen=True)
class Group:
    """The arms of one device on one workload, or on all (`workload` None). rows: by arm, in the order of the plan.

    asked_baseline: the arm that would be the baseline if it had a figure. A quantity may have another baseline than
    the time's, where only that figure is missing: its standing says so.
    """

    device: str
    workload: str | None
    score: str | None
    rising: bool
    baseline: Arm
    asked_baseline: Arm
    rows: tuple[Mapping[Quantity, Standing], ...]
    verdicts: Mapping[Quantity, Verdict]

    @property
    def arms(self) -> list[Arm]:
        return [row["time"].arm for row in self.rows]

    def baseline_of(self, quantity: Quantity) -> Arm:
        return next((row[quantity].arm for row in self.rows if row[quantity].is_baseline), self.baseline)


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
        "baseline": group.baseline_of(standing.quantity).engine,
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


class _Groups:
    def __init__(self, run: RunData, frame: pd.DataFrame, baseline: str | None) -> None:
        self._run, self._baseline = run, baseline
        self._arms = arms_of(run.cells)
        self._figures = ArmFigures(run, frame)

    def group(self, device: str, workloads: Sequence[str]) -> Group:
        by_arm: dict[Arm, list[Cell]] = {}
        for cell in self._run.cells:
            if cell.device == device and cell.workload in workloads:
                by_arm.setdefault(self._arms[cell.cell_id], []).append(cell)
        asked = self._asked_baselines(by_arm)
        score = self._figures.first_score.get(workloads[0]) if len(workloads) == 1 else None
        rising = self._figures.rising.get(score or "", True)
        figures = {
            q: [self._figures.figure(arm, cells, workloads, q) for arm, cells in by_arm.items()] for q in QUANTITIES
        }
        baseline = _with_figure(asked, figures["time"])
        found: dict[Quantity, list[Standing]] = {}
        verdicts: dict[Quantity, Verdict] = {}
        for q, own in figures.items():
            verdicts[q], found[q] = _ranked(own, _with_figure([baseline, *asked], own), q)
        rows = tuple({q: found[q][i] for q in QUANTITIES} for i in range(len(by_arm)))
        return Group(
            device, workloads[0] if len(workloads) == 1 else None, score, rising, baseline, asked[0], rows, verdicts
        )

    def _asked_baselines(self, by_arm: Mapping[Arm, Sequence[Cell]]) -> list[Arm]:
        """The first that has a figure is taken."""
        named = [arm for arm in by_arm if self._baseline in names_of(arm.engine)]
        here = {c.cell_id: arm for arm, cells in by_arm.items() for c in cells}
        references = [here[c.reference_id] for cells in by_arm.values() for c in cells if c.reference_id in here]
        return [*named, *references, *by_arm]


def _with_figure(arms: Sequence[Arm], figures: Sequence[ArmFigure]) -> Arm:
    known = {f.arm for f in figures if f.value is not None}
    return next((arm for arm in arms if arm in known), arms[0])


# --- against the baseline, and against each other --------------------------------------------------------------------


def _ranked(figures: Sequence[ArmFigure], baseline: Arm, quantity: Quantity) -> tuple[Verdict, list[Standing]]:
    base = next(f for f in figures if f.arm == baseline)
    standings = []
    for figure in figures:
        against = _Against(None, figure.reason) if figure is base else _against(figure, base)
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
                ratio=against.ratio,
                is_baseline=figure is base,
                is_certain=figure is not base and _differ(figure, base, against.ratio),
                model_error=figure.model_error,
                stated_error=figure.stated_error,
                reason=against.reason,
                remark=against.remark,
            )
        )
    verdict = _verdict(quantity, figures, standings)
    if verdict.is_certain and verdict.leader is not None and not verdict.without:
        best = replace(verdict.leader, is_best=True)
        standings = [best if s is verdict.leader else s for s in standings]
        verdict = replace(verdict, leader=best)
    return verdict, standings


class _Against(NamedTuple):
    """reason: why there is no ratio, or none with an interval. remark: what the ratio leaves out."""

    ratio: Ratio | None
    reason: str | None = None
    remark: str | None = None


def _against(figure: ArmFigure, base: ArmFigure) -> _Against:
    name = base.arm.name
    if figure.value is None:
        return _Against(None, figure.reason)
    if base.value is None:
        return _Against(None, f"{name} has no figure: {base.reason}")
    if figure.way != base.way:
        ways = [f.spoken_way if figure.unit == base.unit else f"{f.spoken_way}, in {f.unit}" for f in (figure, base)]
        return _Against(None, f"not compared: {figure.arm.name} is {ways[0]}; {name} is {ways[1]}")
    if base.value == 0:
        return _Against(None, f"{name} has 0, and nothing is a multiple of 0")
    if figure.scores is not None and base.scores is not None:
        return _of_scores(figure, base)
    if not figure.sums:
        return _untested(figure, base, "this score is no mean over samples, so nothing tests it")
    if figure.asked != base.asked:
        return _untested(figure, base, ASKED_OTHERWISE)
    return _of_pairs(figure, base)


def _untested(figure: ArmFigure, base: ArmFigure, why: str) -> _Against:
    return _Against(Ratio((figure.value or 0.0) / (base.value or math.nan), reason=why), why)


def _of_scores(figure: ArmFigure, base: ArmFigure) -> _Against:
    own, other = figure.scores or {}, base.scores or {}
    if own.keys() != other.keys():
        return _Against(None, f"not the same samples as those of {base.arm.name}")
    samples = sorted(other)
    if figure.is_share:
        ratio = ratio_of_shares(own, other)
        n_repeats = [max(map(len, scores.values())) for scores in (own, other)]
        remark = None
        if n_repeats[0] != n_repeats[1]:
            remark = f"as times {base.arm.name}: of the first {min(n_repeats)} repeats that count of either"
        return _Against(ratio if ratio.value is not None else None, ratio.reason, remark)
    means = [[math.fsum(scores[s]) / len(scores[s]) for s in samples] for scores in (own, other)]
    ratio = ratio_of_means([(means[0], means[1])])
    return _Against(ratio if ratio.value is not None else None, ratio.reason)


def _of_pairs(figure: ArmFigure, base: ArmFigure) -> _Against:
    pairs = []
    for own, other in zip(figure.sums, base.sums, strict=True):
        both = sorted(own.keys() & other.keys())
        if not both:
            return _Against(None, f"no repeat has a figure of {figure.arm.name} and of {base.arm.name}")
        pairs.append(([own[i] for i in both], [other[i] for i in both]))
    ratio = ratio_of_means(pairs)
    if figure.model_error is not None and ratio.n == 1:
        ratio = replace(ratio, reason=MODELLED_ONCE)
    elif figure.model_error is None and base.model_error is None:
        ratio = widened(ratio, math.hypot(figure.unshared_error, base.unshared_error))
    remark = None
    if any(own.keys() != other.keys() for own, other in zip(figure.sums, base.sums, strict=True)):
        counts = ", ".join(dict.fromkeys(str(len(own)) for own, _ in pairs))
        remark = (
            f"as times {base.arm.name}: over the {counts} repeats that both have; the figure below the interval is over"
            f" all repeats of its arm"
        )
    return _Against(ratio if ratio.value is not None else None, ratio.reason, remark)


def _differ(figure: ArmFigure, other: ArmFigure, ratio: Ratio | None) -> bool:
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


def _tested(figure: ArmFigure, other: ArmFigure) -> Difference:
    return compare_scores(other.scores or {}, figure.scores or {}, is_zero_one=True)


def _verdict(quantity: Quantity, figures: Sequence[ArmFigure], standings: Sequence[Standing]) -> Verdict:
    known = [(f, s) for f, s in zip(figures, standings, strict=True) if f.value is not None]
    without = tuple(s for s in standings if s.value is None)
    if not known:
        reasons = dict.fromkeys(s.reason for s in standings if s.reason)
        return Verdict(quantity, None, (), False, next(iter(reasons), "no arm has a figure"))
    rising = quantity == "accuracy" and known[0][0].rising
    best, leader = (max if rising else min)(known, key=lambda pair: pair[0].value or 0.0)
    others = [(f, s) for f, s in known if f is not best]
    if not others:
        return Verdict(quantity, leader, (), False, "only this arm has a figure", (), without)
    if len({f.way for f, _ in known}) > 1:
        ways = "; ".join(f"{f.arm.name} {f.spoken_way}" for f, _ in known)
        told = f"their figures came to be in several ways: {ways}"
        return Verdict(quantity, leader, tuple(Rival(s, "") for _, s in others), False, told, (), without)
    rivals, behind = [], []
    for figure, standing in others:
        against = _against(figure, best)
        if _differ(figure, best, against.ratio):
            behind.append((standing, against.ratio))
        else:
            is_inside = best.model_error is not None and against.reason in (None, MODELLED_ONCE)
            rivals.append(Rival(standing, WITHIN_MODEL if is_inside else against.reason or MAYBE_0))
    behind.sort(key=lambda one: _distance(one[1]))
    return Verdict(quantity, leader, tuple(rivals), not rivals, "", tuple(behind), without)


def _distance(ratio: Ratio | None) -> float:
    return abs(math.log(ratio.value)) if ratio is not None and ratio.value else math.inf
