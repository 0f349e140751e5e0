"""Probes of candidates in rounds: what a search asks for, what it is told, and all readings by round."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from harness.tuning.paired import Array
from harness.tuning.verdicts import Compared, compare

Arm = TypeVar("Arm", bound=Hashable)
Stage = Literal["fastest", "suggested", "candidates"]
"""Of a search on clusters: stage 1 finds the fastest, stage 2 races candidates. In a large space Optuna suggests whom
to race. Any other race has the last alone."""


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
        self._rng = np.random.default_rng(seed)
        self._column: dict[Arm, int] = {}
        self._speeds = _Table()
        self._costs = _Table()
        self.failed: dict[Arm, str] = {}
        self.n_probes = 0
        self.n_rounds = 0

    @property
    def has_costs(self) -> bool:
        return self._judge is not None

    def probed(self, arms: Sequence[Arm], stage: Stage) -> Generator[Ask[Arm], Answer, None]:
        """One round. Raises ValueError for a reading that is none."""
        self.n_rounds += 1
        for i in self._rng.permutation(len(arms)):
            arm = arms[i]
            answer = yield Ask(arm, self.n_rounds, stage, len(arms))
            self.n_probes += 1
            if isinstance(answer, Failed):
                self.failed[arm] = answer.reason
                continue
            if not 0 < answer.speed_tokens_per_s < math.inf:
                raise ValueError(f"the probe of {arm} found {answer.speed_tokens_per_s:g} token/s; it must decode")
            place = self.n_rounds - 1, self._column.setdefault(arm, len(self._column))
            self._speeds.put(*place, answer.speed_tokens_per_s)
            if self._judge is not None:
                cost = self._judge(arm, answer)
                if not 0 < cost < math.inf:
                    raise ValueError(f"the probe of {arm} costs {cost:g}; it must cost something")
                self._costs.put(*place, cost)

    def arms(self) -> tuple[Arm, ...]:
        """What can be compared: probed, not failed, and tied by rounds to the first such of the latest round."""
        names = tuple(self._column)
        is_there_RK = ~np.isnan(self._speeds.filled(self.n_rounds, len(names)))
        is_there_RK[:, [arm in self.failed for arm in names]] = False
        rounds = np.flatnonzero(is_there_RK.any(axis=1))
        if not len(rounds):
            return ()
        is_tied_K: NDArray[np.bool_] = np.zeros(len(names), dtype=np.bool_)
        is_tied_K[np.argmax(is_there_RK[rounds[-1]])] = True
        while True:
            more_K: NDArray[np.bool_] = np.asarray(is_there_RK[is_there_RK[:, is_tied_K].any(axis=1)].any(axis=0))
            if np.array_equal(more_K, is_tied_K):
                return tuple(arm for arm, is_tied in zip(names, is_tied_K, strict=True) if is_tied)
            is_tied_K = more_K

    def compared(self, arms: Sequence[Arm]) -> Compared:
        """Of `arms()`, in their order. Raises ValueError as `compare`."""
        return compare(self._of(self._speeds, arms), self._of(self._costs, arms) if self.has_costs else None)

    def counts(self, arms: Sequence[Arm]) -> list[int]:
        """Readings of each."""
        return [int(n) for n in (~np.isnan(self._of(self._speeds, arms))).sum(axis=0)]

    def _of(self, table: _Table, arms: Sequence[Arm]) -> Array:
        """R rounds, K arms; NaN where a round lacks an arm. Rounds of none are left out."""
        own_RK = table.filled(self.n_rounds, len(self._column))[:, [self._column[arm] for arm in arms]]
        kept_RK: Array = own_RK[(~np.isnan(own_RK)).any(axis=1)]
        return kept_RK


class _Table:
    """Figures by round and candidate that grow in both; NaN where there is none."""

    def __init__(self) -> None:
        self._values = np.full((16, 16), np.nan)

    def put(self, row: int, column: int, value: float) -> None:
        rows, columns = self._values.shape
        if row >= rows or column >= columns:
            larger = np.full((2 * rows if row >= rows else rows, 2 * columns if column >= columns else columns), np.nan)
            larger[:rows, :columns] = self._values
            self._values = larger
        self._values[row, column] = value

    def filled(self, n_rows: int, n_columns: int) -> Array:
        """A view where it holds so many, else a copy."""
        rows = len(self._values)
        if n_rows > rows:
            return np.vstack([self._values[:, :n_columns], np.full((n_rows - rows, n_columns), np.nan)])
        return self._values[:n_rows, :n_columns]
