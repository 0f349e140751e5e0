"""Speed and watts over time, of rounds that follow each other without a pause, and the steps in the speed.

A round is a trial: one pass over the workload. Its speed is that of decoding, or of prefill where nothing is decoded. A
step is a change point of the series of speeds (`results.history.changes`). Between steps a device keeps a level, and
the last level is the one that it sustains. Times count from the start of the series' first window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from results.cells import STOPPED, data_sources, mark_words, trials_of
from results.clock_limits import limit_words
from results.history.changes import find_levels
from results.metrics import energy_observations, latency_observations
from results.records import Cell, Phase
from results.runs import RunData
from results.statistics import NORMAL_95, summarise
from results.tables import frame_of, identity_of
from results.trials import Trial

FEWEST_ROUNDS = 10
"""Below that no step of a size that matters could be told from chance."""
LEAST_CHANGE = 0.02
"""Of the speed. Smaller steps are not told: neighbours and clocks make them."""
MOST_VALUES = 200
"""In which steps are looked for: means of rounds that follow each other, where there are more."""
NO_STEP = f"no step of {100 * LEAST_CHANGE:g} % or more is certain"
TWICE_LOG_LIKELIHOOD = NORMAL_95**2
"""How much less likely the ends of a step's interval are, in a model of two levels with even noise."""


class Round(NamedTuple):
    """Missing figures are None; times are seconds of the series."""

    trial: Trial
    from_s: float
    to_s: float
    decode_per_s: float | None
    prefill_per_s: float | None
    power_w: float | None
    power_reason: str | None
    power_method: str
    temperature_c: float | None
    battery_percent: float | None
    throttled: bool | None
    clock_limits: str | None

    @property
    def middle_s(self) -> float:
        return (self.from_s + self.to_s) / 2


class Level(NamedTuple):
    """A mean over rounds, with its 95 % interval."""

    n: int
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Step:
    """From one level to another, between two rounds. power: of the rounds that have watts."""

    at_s: float
    low_s: float
    high_s: float
    before: Level
    after: Level
    power_before: Level | None
    power_after: Level | None
    power_method: str
    """Of all rounds that have watts; "missing" where none has."""

    @property
    def change(self) -> float:
        return self.after.mean / self.before.mean - 1

    @property
    def change_interval(self) -> tuple[float, float] | None:
        """Of the ratio of two means: relative half widths in quadrature."""
        halves = [_relative_half(self.before), _relative_half(self.after)]
        if None in halves:
            return None
        half = (1 + self.change) * math.hypot(*(h for h in halves if h is not None))
        return self.change - half, self.change + half


@dataclass(frozen=True)
class Series:
    """The rounds of a cell that follow each other."""

    cell: Cell
    number: int
    rounds: tuple[Round, ...]
    ended_by: str | None
    """None: it was broken off."""
    phase: Phase | None
    """Whose speed is told; None where no round has one."""
    steps: tuple[Step, ...]
    level: Level | None
    """Of all rounds, where there is no step."""
    why_no_step: str | None

    @property
    def speeds(self) -> list[tuple[Round, float]]:
        found = [(r, r.decode_per_s if self.phase == "decode" else r.prefill_per_s) for r in self.rounds]
        return [(r, speed) for r, speed in found if speed is not None]

    @property
    def duration_s(self) -> float:
        return self.rounds[-1].to_s


def endurance_of(run: RunData) -> list[Series]:
    """Of each cell that was run so; none in other runs."""
    found = []
    by_cell = trials_of(run)
    for cell in run.cells:
        own: dict[int, list[Trial]] = {}
        for trial in by_cell[cell.cell_id]:
            if trial.endurance is not None:
                own.setdefault(trial.endurance.series, []).append(trial)
        found += [one for number, trials in own.items() if (one := series_of(cell, number, trials)) is not None]
    return found


def series_of(cell: Cell, number: int, trials: Sequence[Trial]) -> Series | None:
    """None where no round was finished."""
    measured = [t for t in trials if t.status == "ok" and t.window_start_s is not None and t.window_end_s is not None]
    if not measured:
        return None
    begun_s = measured[0].window_start_s or 0.0
    rounds = tuple(_round(trial, begun_s) for trial in measured)
    phase: Phase | None = None
    if any(r.decode_per_s is not None for r in rounds):
        phase = "decode"
    elif any(r.prefill_per_s is not None for r in rounds):
        phase = "prefill"
    last = trials[-1].endurance
    series = Series(cell, number, rounds, last.ended_by if last else None, phase, (), None, None)
    steps, why = _steps(series.speeds)
    level = _level([speed for _, speed in series.speeds])
    return Series(cell, number, rounds, series.ended_by, phase, tuple(steps), level if not steps else None, why)


def _round(trial: Trial, begun_s: float) -> Round:
    # A round in which we were stopped has its place in time, and says nothing of the device.
    is_whole = STOPPED not in trial.marks
    speeds = {o.phase: o.value for o in latency_observations(trial) if o.metric == "throughput" and is_whole}
    watts = next(
        (o for o in energy_observations(trial) if o.metric == "average_power" and o.phase == "all" and o.unit == "W"),
        None,
    )
    state = trial.conditions[-1] if trial.conditions else None
    throttled = [c.throttled for c in trial.conditions if c.throttled is not None]
    return Round(
        trial,
        (trial.window_start_s or 0.0) - begun_s,
        (trial.window_end_s or 0.0) - begun_s,
        speeds.get("decode"),
        speeds.get("prefill"),
        watts.value if watts and is_whole else None,
        (watts.reason if watts else "no meter was read in watts") if is_whole else "joulebench was stopped meanwhile",
        watts.method if watts and watts.value is not None and is_whole else "missing",
        state.temperature_c if state else None,
        state.battery_percent if state else None,
        any(throttled) if throttled else None,
        limit_words(state) if state else None,
    )


# --- steps -----------------------------------------------------------------------------------------------------------


def _steps(speeds: Sequence[tuple[Round, float]]) -> tuple[list[Step], str | None]:
    """(the steps, why there is none)."""
    if len(speeds) < FEWEST_ROUNDS:
        told = "1 round is" if len(speeds) == 1 else f"{len(speeds)} rounds are"
        return [], f"{told} too few to tell a step ({FEWEST_ROUNDS} at least): make them shorter, or run longer"
    values = np.array([speed for _, speed in speeds])
    width = math.ceil(len(values) / MOST_VALUES)
    means = [float(values[k : k + width].mean()) for k in range(0, len(values), width)]
    edges = _of_a_size(values, [0, *(width * at for at in changes_of(means)), len(values)])
    for i in range(1, len(edges) - 1):
        edges[i] = _sharpened(values, edges[i - 1], edges[i], edges[i + 1], width)
    if len(edges) == 2:
        return [], NO_STEP
    return [_step(speeds, *edges[i : i + 3]) for i in range(len(edges) - 2)], None


def changes_of(speeds: Sequence[float]) -> list[int]:
    """Numbers of the values with which a new level begins. A step of a speed is a ratio: logarithms."""
    return [change.at for change in find_levels(np.log(speeds), np.zeros(len(speeds))).changes]


def _of_a_size(values: Any, edges: list[int]) -> list[int]:
    """Without the steps that are too small to matter, the smallest first."""
    while len(edges) > 2:
        means = [float(values[a:b].mean()) for a, b in pairwise(edges)]
        changes = [abs(after / before - 1) for before, after in pairwise(means)]
        least = int(np.argmin(changes))
        if changes[least] >= LEAST_CHANGE:
            break
        del edges[least + 1]
    return edges


def _sharpened(values: Any, start: int, at: int, end: int, width: int) -> int:
    """A step found in means of so many rounds, to the round: where two levels leave the least squares."""
    near = range(max(start + 1, at - width + 1), min(end, at + width))
    return min(near, key=lambda k: _squares(values[start:k]) + _squares(values[k:end]))


def _step(speeds: Sequence[tuple[Round, float]], start: int, at: int, end: int) -> Step:
    rounds, values = [r for r, _ in speeds], [v for _, v in speeds]
    low, high = _place(np.array(values[start:end]), at - start)
    before, after = _level(values[start:at]), _level(values[at:end])
    assert before is not None
    assert after is not None
    return Step(
        (rounds[at - 1].to_s + rounds[at].from_s) / 2,
        rounds[start + low - 1].middle_s,
        rounds[start + high].middle_s,
        before,
        after,
        _level([r.power_w for r in rounds[start:at] if r.power_w is not None]),
        _level([r.power_w for r in rounds[at:end] if r.power_w is not None]),
        power_method_of(rounds[start:end]),
    )


def power_method_of(rounds: Sequence[Round]) -> str:
    methods = dict.fromkeys(r.power_method for r in rounds if r.power_w is not None)
    return " and ".join(methods) or "missing"


def _place(values: Any, at: int) -> tuple[int, int]:
    """The first and the last number of rounds before the step that the values leave open, at 95 %."""
    n = len(values)
    residues = np.array([_squares(values[:k]) + _squares(values[k:]) for k in range(1, n)])
    least = residues[at - 1]
    if least <= 0:
        return at, at
    with np.errstate(divide="ignore"):  # two levels without noise
        open_ = np.flatnonzero(n * np.log(residues / least) <= TWICE_LOG_LIKELIHOOD) + 1
    return min(at, int(open_.min())), max(at, int(open_.max()))


def _squares(values: Any) -> float:
    return float(np.square(values - values.mean()).sum())


def _level(values: Sequence[float]) -> Level | None:
    if not values:
        return None
    found = summarise(values)
    assert found.mean is not None
    return Level(found.n, found.mean, found.ci_low, found.ci_high)


def _relative_half(level: Level) -> float | None:
    if level.low is None or level.high is None or not level.mean:
        return None
    return (level.high - level.low) / 2 / abs(level.mean)


# --- tables ----------------------------------------------------------------------------------------------------------

_IDENTITY = ("run_id", "cell", "device", "engine", "technique", "model", "workload", "series")
_ROUND_COLUMNS = (
    *_IDENTITY, "round", "repeat", "from_s", "to_s", "time_method", "decode_token_per_s", "prefill_token_per_s",
    "power_w", "power_method", "power_reason", "temperature_c", "battery_percent", "throttled", "clock_limits",
    "left_out", "ended_by",
)  # fmt: skip
_STEP_COLUMNS = (
    *_IDENTITY, "rounds", "duration_s", "ended_by", "phase", "step", "step_at_s", "step_low_s", "step_high_s",
    *(f"{side}_{end}" for side in ("before", "after") for end in ("token_per_s", "low", "high", "rounds", "power_w")),
    "power_method", "change_percent", "change_low_percent", "change_high_percent", "reason",
)  # fmt: skip
BROKEN_OFF = "broken off"


def round_rows(run: RunData, found: Sequence[Series]) -> pd.DataFrame:
    """One row a round."""
    sources = data_sources(run)
    rows = [
        identity_of(run, one.cell, sources)
        | {
            "series": one.number,
            "round": number,
            "repeat": r.trial.repeat,
            "from_s": r.from_s,
            "to_s": r.to_s,
            "time_method": r.trial.time_method,
            "decode_token_per_s": r.decode_per_s,
            "prefill_token_per_s": r.prefill_per_s,
            "power_w": r.power_w,
            "power_method": r.power_method,
            "power_reason": r.power_reason,
            "temperature_c": r.temperature_c,
            "battery_percent": r.battery_percent,
            "throttled": None if r.throttled is None else "yes" if r.throttled else "no",
            "clock_limits": r.clock_limits,
            "left_out": mark_words(r.trial) if r.trial.marks else None,
            "ended_by": r.trial.endurance.ended_by if r.trial.endurance else None,
        }
        for one in found
        for number, r in enumerate(one.rounds, start=1)
    ]
    text = ("power_reason", "throttled", "clock_limits", "left_out", "ended_by")
    numbers = ("from_s", "to_s", "decode_token_per_s", "prefill_token_per_s", "power_w", "temperature_c",
               "battery_percent")  # fmt: skip
    return frame_of(rows, _ROUND_COLUMNS, text, numbers, ("series", "round", "repeat"))


def step_rows(run: RunData, found: Sequence[Series]) -> pd.DataFrame:
    """One row a step; of a series without one a row that says why."""
    sources = data_sources(run)
    rows = []
    for one in found:
        head = identity_of(run, one.cell, sources) | {
            "series": one.number,
            "rounds": len(one.rounds),
            "duration_s": one.duration_s,
            "ended_by": one.ended_by or BROKEN_OFF,
            "phase": one.phase,
            "power_method": power_method_of(one.rounds),
        }
        if not one.steps:
            rows.append(head | _side("before", one.level, None) | {"reason": one.why_no_step})
        rows += [head | {"step": number} | _step_cells(step) for number, step in enumerate(one.steps, start=1)]
    text = ("phase", "power_method", "reason", "ended_by")
    counts = ("series", "rounds", "step", "before_rounds", "after_rounds")
    other = {*_IDENTITY, *text, *counts}
    return frame_of(rows, _STEP_COLUMNS, text, [c for c in _STEP_COLUMNS if c not in other], counts)


def _step_cells(step: Step) -> dict[str, Any]:
    low, high = step.change_interval or (None, None)
    return {
        "step_at_s": step.at_s,
        "step_low_s": step.low_s,
        "step_high_s": step.high_s,
        **_side("before", step.before, step.power_before),
        **_side("after", step.after, step.power_after),
        "power_method": step.power_method,
        "change_percent": 100 * step.change,
        "change_low_percent": None if low is None else 100 * low,
        "change_high_percent": None if high is None else 100 * high,
    }


def _side(side: str, level: Level | None, power: Level | None) -> dict[str, Any]:
    return {
        f"{side}_token_per_s": None if level is None else level.mean,
        f"{side}_low": None if level is None else level.low,
        f"{side}_high": None if level is None else level.high,
        f"{side}_rounds": None if level is None else level.n,
        f"{side}_power_w": None if power is None else power.mean,
    }
