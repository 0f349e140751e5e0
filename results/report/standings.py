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
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pandas as pd

from results.operations import operations_table
from results.ratios import Ratio
from results.records import OF_A_RECORDING, Cell, Method
from results.report.against import (
    MODELLED_ONCE,
    WITHIN_ROUNDING,
    Against,
    against,
    differ,
    other_roads,
    says_otherwise,
    within_rounding,
)
from results.report.arm_figures import QUANTITIES, ArmFigure, ArmFigures, Quantity
from results.report.arms import Arm, arms_of
from results.runs import RunData
from results.swept import parts_of

WITHIN_MODEL = "within the error of the model"
MAYBE_0 = "their difference may be 0"
NO_STATED_ERROR: dict[Quantity, str] = {
    "time": "the sheet states no error of its times, so nothing is certain",
    "energy": "the sheet states no error of its joules, so nothing is certain",
}


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
    result: str | None = None
    """As of `ArmFigure`."""
    model_error: float | None = None
    stated_error: float | None = None
    with_queue: bool = False
    """As of `ArmFigure`."""
    outside_share: float | None = None
    """Of a model's seconds, those of launches unlike all that it was fitted on; None where nothing tells."""
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
    a certain leader is not compared with. why: what holds for all of them. worse_on: of a certain leader over all
    workloads, those where it is behind another arm for certain, with that arm and the ratio to it.
    """

    quantity: Quantity
    leader: Standing | None
    rivals: tuple[Rival, ...]
    is_certain: bool
    why: str = ""
    behind: tuple[tuple[Standing, Ratio | None], ...] = ()
    without: tuple[Standing, ...] = ()
    worse_on: tuple[tuple[str, Standing, Ratio | None], ...] = ()


@dataclass(frozen=True)
class Group:
    """The arms of one device on one workload, or on all (`workload` None). rows: by arm, in the order of the plan.

    asked_baseline: the arm that would be the baseline if it had a figure. A quantity may have another baseline than
    the time's, where only that figure is missing: its standing says so. shared_scores: of all workloads together, those
    that the accuracy is over; other_scores: those that are scored otherwise, with their score: an accuracy is of a part
    then, and no arm is marked.
    """

    device: str
    workload: str | None
    score: str | None
    rising: bool
    baseline: Arm
    asked_baseline: Arm
    rows: tuple[Mapping[Quantity, Standing], ...]
    verdicts: Mapping[Quantity, Verdict]
    shared_scores: tuple[str, ...] = ()
    other_scores: Mapping[str, str] = field(default_factory=dict)

    @property
    def arms(self) -> list[Arm]:
        return [row["time"].arm for row in self.rows]

    def baseline_of(self, quantity: Quantity) -> Arm:
        return next((row[quantity].arm for row in self.rows if row[quantity].is_baseline), self.baseline)


def device_groups(
    run: RunData, frame: pd.DataFrame, baseline: str | None = None, operations: pd.DataFrame | None = None
) -> list[tuple[Group, list[Group]]]:
    """By device: its group of all workloads, and one of each workload; where it has one workload, that alone twice.

    frame: the run's tidy table. operations: of `operations_table`, where the caller has it already. baseline: an
    arm's name; raises `NoArmError` where there is none such.
    """
    named = baseline if baseline is not None else run.info.plan.get("baseline")
    names = list(dict.fromkeys(c.engine for c in run.cells))
    if baseline is not None and not any(baseline in names_of(name) for name in names):
        raise NoArmError(f"no arm of this run is named {baseline!r}; take one of {', '.join(names)}")
    made = _Groups(run, frame, operations_table(run) if operations is None else operations, named)
    found = []
    for device in dict.fromkeys(c.device for c in run.cells):
        workloads = list(dict.fromkeys(c.workload for c in run.cells if c.device == device))
        single = [made.group(device, (workload,)) for workload in workloads]
        whole = single[0] if len(single) == 1 else _with_reversals(made.group(device, workloads), single)
        found.append((whole, single))
    return found


def _with_reversals(whole: Group, single: Sequence[Group]) -> Group:
    """Who leads over all workloads may be behind on one: verdict and standing say so."""
    verdicts, remarks = dict(whole.verdicts), dict[Quantity, str]()
    for quantity, verdict in whole.verdicts.items():
        if verdict.leader is None or not verdict.is_certain:
            continue
        worse = tuple(
            (group.workload or "", first, ratio)
            for group in single
            for standing, ratio in group.verdicts[quantity].behind
            if standing.arm == verdict.leader.arm and (first := group.verdicts[quantity].leader) is not None
        )
        if worse:
            remarks[quantity] = f"behind another arm for certain on {', '.join(w for w, _, _ in worse)}"
            told = "; ".join(filter(None, [verdict.leader.remark, remarks[quantity]]))
            verdicts[quantity] = replace(verdict, worse_on=worse, leader=replace(verdict.leader, remark=told))
    leaders = {q: v.leader for q, v in verdicts.items() if v.worse_on}
    rows = tuple(
        {q: leader if (leader := leaders.get(q)) is not None and leader.arm == s.arm else s for q, s in row.items()}
        for row in whole.rows
    )
    return replace(whole, rows=rows, verdicts=verdicts)


def names_of(engine: str) -> tuple[str, str]:
    """What an arm can be called: its name, and that without the values of a sweep ("int4[prefill_chunk=256]")."""
    return engine, parts_of(engine).name


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
    return frame.astype(dict.fromkeys(("value", "ratio", "ratio_low", "ratio_high", "outside_fit_share"), "float64"))


_COLUMNS = (
    "device", "workload", "arm", "technique", "model", "baseline", "quantity", "score", "with_queue", "value", "unit",
    "method", "meter", "n", "n_of", "ratio", "ratio_low", "ratio_high", "certain_difference", "certainly_best",
    "outside_fit_share", "reason",
)  # fmt: skip


def _table_row(group: Group, standing: Standing) -> dict[str, object]:
    ratio = standing.ratio
    told = (standing.reason, ratio.reason if ratio else None, standing.remark)
    return {
        "device": group.device,
        "workload": group.workload,
        "arm": standing.arm.engine,
        "technique": standing.arm.technique,
        "model": standing.arm.model,
        "baseline": group.baseline_of(standing.quantity).engine,
        "quantity": standing.quantity,
        "score": group.score if standing.quantity == "accuracy" else None,
        "with_queue": standing.with_queue,
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
        "outside_fit_share": standing.outside_share,
        "reason": "; ".join(dict.fromkeys(filter(None, told))) or None,
    }


class _Groups:
    def __init__(self, run: RunData, frame: pd.DataFrame, operations: pd.DataFrame, baseline: str | None) -> None:
        self._run, self._baseline = run, baseline
        self._arms = arms_of(run.cells)
        self._figures = ArmFigures(run, frame, operations)

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
        other_scores = self._figures.other_scores(workloads) if len(workloads) > 1 else {}
        found: dict[Quantity, list[Standing]] = {}
        verdicts: dict[Quantity, Verdict] = {}
        for q, own in figures.items():
            may_mark = q != "accuracy" or not other_scores
            verdicts[q], found[q] = _ranked(own, _with_figure([baseline, *asked], own), q, may_mark)
        rows = tuple({q: found[q][i] for q in QUANTITIES} for i in range(len(by_arm)))
        return Group(
            device=device,
            workload=workloads[0] if len(workloads) == 1 else None,
            score=score,
            rising=rising,
            baseline=baseline,
            asked_baseline=asked[0],
            rows=rows,
            verdicts=verdicts,
            shared_scores=tuple(w for w in self._figures.first_score if w in workloads and w not in other_scores),
            other_scores=other_scores,
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


def _ranked(
    figures: Sequence[ArmFigure], baseline: Arm, quantity: Quantity, may_mark: bool
) -> tuple[Verdict, list[Standing]]:
    base = next(f for f in figures if f.arm == baseline)
    standings = []
    for figure in figures:
        found = Against(None, figure.reason) if figure is base else against(figure, base)
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
                ratio=found.ratio,
                is_baseline=figure is base,
                is_certain=figure is not base and differ(figure, base, found.ratio),
                model_error=figure.model_error,
                stated_error=figure.stated_error,
                with_queue=figure.with_queue,
                outside_share=figure.outside_share,
                reason=found.reason,
                remark="; ".join(filter(None, [figure.remark, found.remark])) or None,
                result=figure.result,
            )
        )
    verdict = _verdict(quantity, figures, standings)
    if may_mark and verdict.is_certain and verdict.leader is not None and not verdict.without:
        best = replace(verdict.leader, is_best=True)
        standings = [best if s is verdict.leader else s for s in standings]
        verdict = replace(verdict, leader=best)
    return verdict, standings


def _verdict(quantity: Quantity, figures: Sequence[ArmFigure], standings: Sequence[Standing]) -> Verdict:
    known = [(f, s) for f, s in zip(figures, standings, strict=True) if f.value is not None]
    without = tuple(s for s in standings if s.value is None)
    if not known:
        return Verdict(quantity, None, (), False, without=without)
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
        found = against(figure, best)
        if differ(figure, best, found.ratio):
            behind.append((standing, found.ratio))
        else:
            rivals.append(Rival(standing, _why_open(quantity, figure, best, found)))
    behind.sort(key=lambda one: _distance(one[1]))
    return Verdict(quantity, leader, tuple(rivals), not rivals, "", tuple(behind), without)


def _why_open(quantity: Quantity, figure: ArmFigure, best: ArmFigure, found: Against) -> str:
    if "replayed" in (figure.method, best.method):
        return OF_A_RECORDING
    if math.inf in (figure.model_error, best.model_error):
        return NO_STATED_ERROR[quantity]
    if best.model_error is not None and found.reason in (None, MODELLED_ONCE):
        return WITHIN_MODEL
    rounding = WITHIN_ROUNDING if within_rounding(found.ratio) else None
    return other_roads(figure, best) or says_otherwise(figure, best, found.ratio) or found.reason or rounding or MAYBE_0


def _distance(ratio: Ratio | None) -> float:
    return abs(math.log(ratio.value)) if ratio is not None and ratio.value else math.inf
