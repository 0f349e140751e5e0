"""When a cell has been repeated often enough."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Protocol as TypingProtocol

from harness.schema import StopSpec, TrialProtocol
from results.cells import usable
from results.statistics import relative_width, summarise
from results.trials import Trial


class StoppingRule(TypingProtocol):
    max_repeats: int

    def enough(self, trials: Sequence[Trial]) -> bool:
        """Whether the trials of one cell so far suffice."""
        ...


class FixedRepeats:
    """As many as the plan says."""

    def __init__(self, repeats: int) -> None:
        self.max_repeats = repeats

    def enough(self, trials: Sequence[Trial]) -> bool:
        return len(trials) >= self.max_repeats


class IntervalWidth:
    """Until half the 95 % interval of a metric is below a share of its mean. Failed and marked trials do not count."""

    def __init__(self, spec: StopSpec) -> None:
        self.max_repeats = spec.max_repeats
        self._spec = spec

    def enough(self, trials: Sequence[Trial]) -> bool:
        if len(trials) >= self.max_repeats:
            return True
        found = [trial_value(t, self._spec.metric) for t in usable(trials)]
        values = [v for v in found if v is not None]
        if len(values) < self._spec.min_repeats:
            return False
        width = relative_width(summarise(values))
        return width is not None and width <= self._spec.relative_width


def stopping_rule(protocol: TrialProtocol) -> StoppingRule:
    return IntervalWidth(protocol.stop) if protocol.stop else FixedRepeats(protocol.repeats)


def trial_value(trial: Trial, metric: str) -> float | None:
    """A trial's value of a stopping metric: the mean over its requests, or the window's energy."""
    if metric == "energy_j":
        return next((r.energy_j for r in trial.energy if r.phase == "all" and r.component == "total"), None)
    values = [v for c in trial.completions if (v := getattr(c, metric)) is not None]
    return statistics.fmean(values) if values else None
