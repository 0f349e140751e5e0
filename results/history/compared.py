"""One figure on two sides: by how much it changed, how surely, and the verdict among all figures.

times, joules,   the logarithm of the ratio of means. Of two arms of one run repeat i of both is a pair, for what
memory           drifts in a run drifts for both: paired t. Of two runs each trial is one value, over the same
                 requests: Welch's t. Requests are no values of their own: what disturbs a trial is in all of them
scores           sample by sample (`results.compare`): McNemar's exact test where answers are right or wrong
joules           errors of meters that repeats do not narrow are added to the interval; of two meters, or two
                 machines, with their gain. Nothing within a model's own error is certain
effect size      Hedges' g: the difference over the scatter of a trial. Share of requests that took longer
certain          p below `RATE` once all figures of all cells are looked at together (Benjamini and Hochberg 1995),
                 and an interval that leaves out no change
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from results.compare import Difference, mean_difference
from results.history.points import Figure
from results.records import OF_A_RECORDING
from results.statistics import CONFIDENCE, NORMAL_95

RATE: Final = 1 - CONFIDENCE
Verdict = Literal["worse", "better", "different", "not certain", "refused", "not tested"]
WELCH, STUDENT, PAIRED = "Welch's t", "Student's t", "paired t by repeat"


@dataclass(frozen=True)
class Compared:
    """One figure of one pair of cells. change, low, high: shares (0.02 is 2 % more), of scores differences. effect:
    Hedges' g. longer: share of requests that took longer. said: what is unlike and was allowed."""

    workload: str
    device: str
    arm: str
    first: Figure
    second: Figure | None
    verdict: Verdict
    reason: str = ""
    change: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    adjusted: float | None = None
    test: str | None = None
    effect: float | None = None
    longer: float | None = None
    said: tuple[str, ...] = ()
    model_error: float | None = None

    @property
    def is_score(self) -> bool:
        return self.first.kind == "accuracy"


def of_pairs(row: Compared, logs: Sequence[float], meters: float | None) -> Compared:
    """logs: of the ratio in each repeat. meters: relative error that repeats do not narrow; None where none is stated
    that would be needed."""
    found, scatter = mean_difference(logs), float(np.std(logs, ddof=1))
    if found.low is None and found.n > 1:
        return replace(row, reason=found.reason or "")
    degrees = len(logs) - 1
    # The correction of two pairs is 0, whatever they are.
    effect = None if scatter == 0 or degrees < 2 else found.mean / scatter * _hedges(degrees)
    return _of_logs(replace(row, effect=effect), found.mean, scatter / math.sqrt(found.n), degrees, PAIRED, meters)


def of_groups(row: Compared, other: Figure, meters: float | None) -> Compared:
    groups = [np.log(list(f.values.values())) for f in (row.first, other)]
    n = [len(group) for group in groups]
    if min(n) < 2:
        return replace(row, reason=f"{n[0]} and {n[1]} trials: no interval from one")
    spread = [float(group.var(ddof=1)) for group in groups]
    parts = [v / k for v, k in zip(spread, n, strict=True)]
    size = float(groups[1].mean() - groups[0].mean())
    if sum(parts) <= 1e-24:
        return replace(row, reason="the trials of both sides come out alike: no scatter to judge by")
    degrees = sum(parts) ** 2 / sum(part**2 / (k - 1) for part, k in zip(parts, n, strict=True))
    pooled = math.sqrt(sum(v * (k - 1) for v, k in zip(spread, n, strict=True)) / (sum(n) - 2))
    row = replace(row, effect=size / pooled * _hedges(sum(n) - 2))
    tests = [(math.sqrt(sum(parts)), degrees, WELCH)]
    if n[0] != n[1]:
        tests.append((pooled * math.sqrt(sum(1 / k for k in n)), sum(n) - 2, STUDENT))
    return _of_logs(row, size, *max(tests, key=lambda test: test[0] * _quantile(test[1])), meters=meters)


def _of_logs(row: Compared, size: float, error: float, degrees: float, test: str, meters: float | None) -> Compared:
    from scipy.special import stdtr

    if meters is None:
        return replace(row, reason="the meters state no uncertainty, and are not the same one")
    both = math.hypot(error, meters)
    if both == 0:
        return replace(row, change=0.0, low=0.0, high=0.0, p=1.0, test=test)
    # Welch and Satterthwaite: what repeats do not narrow is known with no end of degrees.
    degrees = degrees * (both / error) ** 4 if error > 0 else math.inf
    quantile = _quantile(degrees)
    p = 2 * float(stdtr(degrees, -abs(size) / both))
    return replace(
        row,
        change=math.expm1(size),
        low=math.expm1(size - quantile * both),
        high=math.expm1(size + quantile * both),
        p=p,
        test=test,
    )


def _quantile(degrees: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + CONFIDENCE / 2)) if math.isfinite(degrees) else NORMAL_95


def with_difference(
    row: Compared, found: Difference, change: float, ends: tuple[float | None, float | None]
) -> Compared:
    return replace(
        row, change=change, low=ends[0], high=ends[1], p=found.p, test=found.test, reason=found.reason or row.reason
    )


def model_error(figure: Figure, other: Figure) -> float:
    """Of the models behind them, infinite where one states none."""
    errors = [math.inf if f.whole_error is None else f.whole_error for f in (figure, other) if f.method == "modelled"]
    return math.hypot(*errors)


def _hedges(degrees: float) -> float:
    """The correction for few values (Hedges 1981)."""
    return 1 - 3 / (4 * degrees - 1)


def controlled(rows: Sequence[Compared], least: float) -> Iterator[Compared]:
    from scipy.stats import false_discovery_control

    ps = [row.p for row in rows if row.p is not None]
    adjusted = iter(false_discovery_control(ps) if ps else ())
    for row in rows:
        yield row if row.p is None else _judged(replace(row, adjusted=float(next(adjusted))), least)


def _judged(row: Compared, least: float) -> Compared:
    change, p = row.change or 0.0, 1.0 if row.adjusted is None else row.adjusted
    is_clear = row.low is not None and row.high is not None and not row.low <= 0 <= row.high
    if p >= RATE or not is_clear:
        return replace(row, verdict="not certain")
    if abs(change) < least * (abs(row.first.mean) if row.is_score and not row.first.is_share else 1.0):
        return replace(row, verdict="not certain", reason="smaller than what counts (--least)")
    if "replayed" in (row.first.method, row.second.method if row.second else None):
        return replace(row, verdict="not certain", reason=OF_A_RECORDING)
    if row.model_error is not None and abs(math.log1p(change)) <= NORMAL_95 * row.model_error:
        stated = "the model states no error" if math.isinf(row.model_error) else "within the model's own error"
        return replace(row, verdict="not certain", reason=stated)
    if row.first.better == "neither":
        return replace(row, verdict="different")
    return replace(row, verdict="worse" if (change > 0) == (row.first.better == "lower") else "better")
