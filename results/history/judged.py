"""What is said of each figure of a baseline, and of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from results.history.changes import Levels
from results.history.points import Figure, RunPoint
from results.history.series import Series

Verdict = Literal["PASS", "REGRESSION", "IMPROVED", "UNRELIABLE"]


@dataclass(frozen=True)
class Judged:
    """change, low, high: of the last level against the baseline's, as x of the series. noise: of one run. floor: None
    where too little is known. since: the first run of the last level that differs. reason: in words.
    settings_changed: where the arm was set otherwise since the baseline. behind: why newer runs than its last are not
    in the series. remarks: of runs that have the cell, and are half ones or lost trials."""

    device: str
    arm: str
    model: str
    workload: str
    figure: Figure
    series: Series
    levels: Levels | None
    verdict: Verdict
    reason: str
    base: float | None = None
    last: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    noise: float | None = None
    floor: float | None = None
    since: RunPoint | None = None
    left_out: tuple[str, ...] = ()
    settings_changed: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    behind: str | None = None
    is_anchor: bool = False

    @property
    def is_worse(self) -> bool:
        return self.change is not None and (self.change > 0) == (self.figure.better == "lower")


class Judgement(NamedTuple):
    """judged: a row each. baseline: its runs. n_runs: that have one of its cells."""

    baseline: tuple[RunPoint, ...]
    judged: tuple[Judged, ...]
    n_runs: int
    notes: tuple[str, ...]

    @property
    def counted(self) -> list[Judged]:
        return [one for one in self.judged if not one.is_anchor]

    @property
    def has_regressed(self) -> bool:
        return any(one.verdict == "REGRESSION" for one in self.counted)
