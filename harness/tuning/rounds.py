"""Probes of candidates in rounds: what a search asks for, what it is told, and all readings by round."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np

from harness.tuning.paired import Array
from harness.tuning.verdicts import Compared, compare

Arm = TypeVar("Arm", bound=Hashable)
Stage = Literal["fastest", "candidates"]
"""Of a search on clusters: stage 1 finds the fastest, stage 2 races candidates. Any other race has the second alone."""


class Reading(NamedTuple):
    """What one probe found. power_w None: no meter, as on iOS."""

    speed_tokens_per_s: float
    power_w: float | None


class Failed(NamedTuple):
    """A candidate that cannot be probed (out of memory, not supported): it leaves the race, and the reason is kept.

    A probe that was disturbed is no such thing: make it again, and send what it found then.
    """

    reason: str


class Ask(NamedTuple, Generic[Arm]):
    """The next probe to make."""

    arm: Arm
    round: int
    """From 1. Probes of a round belong together: little time should pass between them."""
    stage: Stage
    n_in: int
    """Candidates of this round."""


Answer = Reading | Failed
Judge = Callable[[Arm, Reading], float]
"""What a reading costs: joules of a token, or whatever is to be least. Raises ValueError where it cannot be told."""


def measured_j(arm: Hashable, reading: Reading) -> float:
    """J of a token, as measured. Raises ValueError without a power."""
    if reading.power_w is None:
        raise ValueError(f"the probe of {arm} has no power; judge energy by a heuristic, or tune for latency")
    return reading.power_w / reading.speed_tokens_per_s


class Rounds(Generic[Arm]):
    """All readings, by round, and how the next ones are asked for."""

    def __init__(self, judge: Judge[Arm] | None, seed: int) -> None:
        self._judge = judge
        self.judges = judge is not None
        self._rng = np.random.default_rng(seed)
        self.speeds: list[dict[Arm, float]] = []
        self.costs: list[dict[Arm, float]] = []
        self.failed: dict[Arm, str] = {}
        self.n_probes = 0

    def probed(self, arms: Sequence[Arm], stage: Stage) -> Generator[Ask[Arm], Answer, None]:
        """One round. Raises ValueError for a reading that is none."""
        speeds: dict[Arm, float] = {}
        costs: dict[Arm, float] = {}
        n_round = len(self.speeds) + 1
        for i in self._rng.permutation(len(arms)):
            arm = arms[i]
            answer = yield Ask(arm, n_round, stage, len(arms))
            self.n_probes += 1
            if isinstance(answer, Failed):
                self.failed[arm] = answer.reason
                continue
            if not 0 < answer.speed_tokens_per_s < math.inf:
                raise ValueError(f"the probe of {arm} found {answer.speed_tokens_per_s:g} token/s; it must decode")
            speeds[arm] = answer.speed_tokens_per_s
            if self._judge is not None:
                costs[arm] = self._judge(arm, answer)
                if not 0 < costs[arm] < math.inf:
                    raise ValueError(f"the probe of {arm} costs {costs[arm]:g}; it must cost something")
        self.speeds.append(speeds)
        self.costs.append(costs)

    def compared(self, arms: Sequence[Arm]) -> Compared:
        """Of `arms()`, in their order. Raises ValueError as `fit_rounds`."""
        return compare(self.table(self.speeds, arms), self.table(self.costs, arms) if self.judges else None)

    def arms(self) -> tuple[Arm, ...]:
        """What can be compared: probed, not failed, and tied by rounds to the first such of the latest round."""
        rounds = [[arm for arm in each if arm not in self.failed] for each in self.speeds]
        found: dict[Arm, None] = {}
        fresh = set(next((each[:1] for each in reversed(rounds) if each), ()))
        while fresh:
            found |= dict.fromkeys(fresh)
            fresh = {arm for each in rounds if fresh.intersection(each) for arm in each} - found.keys()
        return tuple(dict.fromkeys(arm for each in rounds for arm in each if arm in found))

    def table(self, rounds: Sequence[dict[Arm, float]], arms: Sequence[Arm]) -> Array:
        """R rounds, K arms; NaN where a round lacks an arm. Rounds of none are left out."""
        column = {arm: k for k, arm in enumerate(arms)}
        table_RK = np.full((len(rounds), len(arms)), np.nan)
        for r, each in enumerate(rounds):
            for arm, value in each.items():
                if arm in column:
                    table_RK[r, column[arm]] = value
        kept_RK: Array = table_RK[(~np.isnan(table_RK)).any(axis=1)]
        return kept_RK

    def counts(self) -> dict[Arm, int]:
        """Readings of each arm."""
        found: dict[Arm, int] = {}
        for each in self.speeds:
            for arm in each:
                found[arm] = found.get(arm, 0) + 1
        return found
