"""When a cell has been repeated often enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol as TypingProtocol

from harness.schema import EnduranceSpec, StopSpec, TrialProtocol
from results.cells import usable
from results.statistics import relative_width, summarise
from results.stop_reached import trial_value
from results.trials import Trial

PHONE_LIMIT_C = 45.0
"""Of a phone's battery, where a plan says nothing."""
CRITICAL = 4
"""Android's thermal status."""


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


class Endurance:
    """Until one series of rounds came to its end: how many there will be, nobody knows."""

    max_repeats = 0
    """Known beforehand."""

    def __init__(self, spec: EnduranceSpec) -> None:
        self._spec = spec

    def enough(self, trials: Sequence[Trial]) -> bool:
        return any(t.endurance is not None and t.endurance.ended_by is not None for t in trials)

    def why_ended(self, trial: Trial, begun_s: float, is_phone: bool) -> str | None:
        """After a round; None where the next one follows. begun_s: of the first window, on the same clock."""
        if trial.status != "ok":
            return "a trial failed"
        state = trial.conditions[-1] if trial.conditions else None
        limit_c = self._spec.until_temperature_c
        if limit_c is None and is_phone:
            limit_c = PHONE_LIMIT_C
        if state is not None:
            if limit_c is not None and state.temperature_c is not None and state.temperature_c >= limit_c:
                return f"heat: {state.temperature_c:.1f} degC, {limit_c:g} is the limit"
            if state.thermal_status is not None and state.thermal_status >= CRITICAL:
                return f"heat: the phone calls its state critical (thermal status {state.thermal_status})"
            percent = state.battery_percent
            if percent is not None and not state.charging and percent <= self._spec.until_charge_percent:
                return f"battery: {percent:.0f} %, {self._spec.until_charge_percent:g} % is the limit"
        if trial.window_end_s is not None and trial.window_end_s - begun_s >= 60 * self._spec.minutes:
            return f"time: {self._spec.minutes:g} minutes"
        return None


def standing(trials: Sequence[Trial]) -> list[Trial]:
    """Those that no lost device took."""
    return [trial for trial in trials if not trial.is_lost]


def lost_and_needed(rule: StoppingRule, trials: Sequence[Trial]) -> int:
    """How many of a cell's trials a resume measures again: those that a lost device took, and none where the others
    suffice."""
    return 0 if rule.enough(standing(trials)) else sum(trial.is_lost for trial in trials)


def stopping_rule(protocol: TrialProtocol) -> StoppingRule:
    if isinstance(protocol.stop, EnduranceSpec):
        return Endurance(protocol.stop)
    return IntervalWidth(protocol.stop) if protocol.stop else FixedRepeats(protocol.repeats)


def rule_of_cell(protocol: TrialProtocol, is_modelled: bool) -> StoppingRule:
    """A modelled device gives the same figures every time: one trial says all, and repeats would feign precision."""
    return stopping_rule(protocol.for_modelled() if is_modelled else protocol)
