"""What an endurance series comes to, in sentences: for the page and the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from results.cells import shared_cpu
from results.clock_limits import changes_of_limits, limit_words
from results.endurance import BROKEN_OFF, Level, Series, Step
from results.units import format_interval, format_number, format_share

SAME = 1e-9
"""Relative width below which an interval is one of rounding alone."""


def sentences_of(series: Series) -> Iterator[str]:
    minutes = format_number(series.duration_s / 60)
    n = len(series.rounds)
    ended = BROKEN_OFF if series.ended_by is None else f"ended by {series.ended_by}"
    yield f"{n} round{'s' if n != 1 else ''} in {minutes} min; {ended}"
    if series.phase is None:
        yield "no round has a speed"
        return
    for number, step in enumerate(series.steps, start=1):
        yield _step_words(step, series.phase, number == len(series.steps))
        yield from _neighbours(series, number - 1)
    if not series.steps and series.level is not None:
        yield f"{series.why_no_step}: {series.phase} {level_words(series.level)} token/s over all rounds"
    yield from _limits(series)
    if series.ended_by is None:
        yield "its rounds are kept, and joined to none after them: the device cooled meanwhile"


def _step_words(step: Step, phase: str, is_last: bool) -> str:
    low, high = step.change_interval or (None, None)
    change = f"{100 * step.change:+.1f} %"
    if low is not None and high is not None and high - low > SAME:
        change += f" {format_interval(100 * low, 100 * high)}"
    at = f"{format_number(step.at_s / 60)} min {format_interval(step.low_s / 60, step.high_s / 60)}"
    watts = ""
    if step.power_before is not None and step.power_after is not None:
        watts = f"; {level_words(step.power_before)} to {level_words(step.power_after)} W {step.power_method}"
    kept = ", the level that it sustains" if is_last else ""
    verb = "falls" if step.change < 0 else "rises"
    return (
        f"at {at} {phase} {verb} from {level_words(step.before)} to {level_words(step.after)} token/s"
        f" ({change}){kept}{watts}"
    )


def _limits(series: Series) -> Iterator[str]:
    """The first change of the clocks' limits in a series, or between two of its rounds, and how many there were."""
    begun_s = series.rounds[0].trial.window_start_s or 0.0
    found = list(changes_of_limits([state for r in series.rounds for state in r.trial.conditions]))
    if found:
        before, after = found[0]
        times = "" if len(found) == 1 else f" {len(found)} times, first"
        minutes = format_number(max(0.0, after.at_s - begun_s) / 60)
        yield f"clock limits changed{times} at {minutes} min: from {limit_words(before)} to {limit_words(after)}"


def _neighbours(series: Series, number: int) -> Iterator[str]:
    """Where most rounds on one side of a step shared the CPU, and most on the other did not."""
    edges_s = [0.0, *(step.at_s for step in series.steps), series.duration_s]
    sides = []
    for from_s, to_s in pairwise(edges_s[number : number + 3]):
        sides.append(shared_cpu(r.trial for r in series.rounds if from_s <= r.middle_s <= to_s))
    before, after = ((0, 1) if side is None else (side.n, side.n_of) for side in sides)
    if (2 * before[0] > before[1]) == (2 * after[0] > after[1]):
        return
    side, when = (sides[1], "after") if 2 * after[0] > after[1] else (sides[0], "before")
    if side is not None:
        yield (
            f"{side.n} of {side.n_of} rounds {when} that step shared the CPU: other processes took up to"
            f" {format_share(side.most)} of it, and may be its cause"
        )


def level_words(level: Level) -> str:
    if level.low is None or level.high is None or level.high - level.low <= SAME * abs(level.mean):
        return format_number(level.mean)
    return f"{format_number(level.mean)} {format_interval(level.low, level.high)}"
