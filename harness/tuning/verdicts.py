"""Who is still in a race, by what was probed so far, and whether it is over.

Differences of logarithms, each with a bound that holds at every look at once. For a standard error s and an
indifference d it is

    t(z) s      z = min(c max(1, (s' c / d) ^ 1/2), z_m)      c^2 = z_a^2 + 1.2      a = (1 - confidence) / comparisons

the boundary of Wang and Tsiatis with shape 1/4: wide at first, so that looking often costs little, and near the bound
of a single look when s is small enough to tell d. Then the bound is no wider than d, and every question has an answer.
1.2 pays for the looks. No look is held to more than z_m, which a normal value exceeds with a chance of a / 500: at a
noise of 60 % the boundary alone would ask for 15 standard errors, and tell nothing apart. t(z) is Student's t that is
as rare as z of a normal, for the noise is estimated, from all candidates together. s' is the standard error that the
readings do not exclude at 5 %: where the noise is underestimated by luck, a race must not think itself near its end.
A test simulates all of it. Comparisons: one of speed and one of energy for each candidate but one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harness.tuning.paired import Array, Fit, fit_rounds, spread

Objective = Literal["energy", "latency", "pareto"]
State = Literal[
    "chosen", "as good", "on the front", "costlier", "slower", "too slow", "beaten", "undecided", "not raced", "failed"
]
LOOKS = 1.2
"""What looking often adds to the square of a bound. Found by simulation, for looks as `following_look` has them."""
LOOK_GROWTH = 1.1
RAREST = 1 / 500
"""Of the chance to err: no look is held to a rarer bound. Sixty such looks add a tenth to the chance at most."""
UNDERESTIMATED = 0.05
"""The chance that the noise is larger than the width of the boundary takes it to be."""


@dataclass(frozen=True)
class Rules:
    """What is asked of a race, and when it may end."""

    objective: Objective = "energy"
    slowdown: float = 0.08
    """Of energy: how much slower than the fastest the chosen may be."""
    indifference: float = 0.02
    """Two candidates so far apart in energy are as good as each other; of latency and of a front in speed too."""
    edge: float = 0.01
    """So near to the floor, as a share of the speed, an estimate decides whether a candidate is fast enough."""
    confidence: float = 0.95
    """That the answer is right, as far as indifference and edge ask for it."""
    first_rounds: int = 3
    """Before the first verdict."""
    most_probes: int = 600
    """One round of all candidates is made in any case."""
    is_even: bool = False
    """Every candidate in every round, to the end: the yardstick."""

    def __post_init__(self) -> None:
        """Raises ValueError with every problem."""
        shares = {"indifference": self.indifference, "edge": self.edge, "confidence": self.confidence}
        problems = [
            f"{name} is {value:g}; it lies between 0 and 1, neither included"
            for name, value in shares.items()
            if not 0 < value < 1
        ]
        if not 0 <= self.slowdown < 1:
            problems.append(f"slowdown is {self.slowdown:g}; it is 0 or more, and below 1")
        if self.first_rounds < 2:
            problems.append(f"first_rounds is {self.first_rounds}; noise shows from 2 rounds on")
        if self.most_probes < 1:
            problems.append(f"most_probes is {self.most_probes}; allow at least one")
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True)
class Compared:
    """Fits of the same candidates. cost None: of latency alone."""

    speed: Fit
    cost: Fit | None


def compare(speed_RK: Array, cost_RK: Array | None) -> Compared:
    """Of tables of rounds and candidates, NaN where a round lacks one, in both. Raises ValueError as `spread`."""
    spread_KK = spread(speed_RK)
    return Compared(fit_rounds(speed_RK, spread_KK), None if cost_RK is None else fit_rounds(cost_RK, spread_KK))


@dataclass(frozen=True)
class Verdict:
    """By number of the candidate in its `Compared`."""

    leader: int
    fastest: int
    is_over: bool
    still_in: tuple[int, ...]
    states: tuple[State, ...]
    on_edge: tuple[int, ...]
    front: tuple[int, ...]


@dataclass(frozen=True)
class Differences:
    """value[i, j]: the logarithm of i over j. low and high bound it at every look at once."""

    value: Array
    low: Array
    high: Array


def differences(fit: Fit, indifference: float, alpha: float) -> Differences:
    """indifference: a share, of the quantity. alpha: the chance of one bound to be wrong, on one side."""
    value = fit.effect_K[:, None] - fit.effect_K[None, :]
    half = bound(fit.standard_errors_KK(), math.log1p(indifference), alpha, fit.dof)
    return Differences(value, value - half, value + half)


def bound(standard_error: Array, indifference: float, alpha: float, dof: int) -> Array:
    """The half-width of the module's text; infinite without degrees of freedom."""
    from scipy.special import chdtri, ndtri

    if dof < 1:
        return np.where(standard_error == 0.0, 0.0, np.inf)
    # Candidates of the same rounds have the same standard error, so that few are worked out.
    errors, places = np.unique(np.round(standard_error, 12), return_inverse=True)
    c = math.sqrt(float(ndtri(alpha)) ** 2 + LOOKS)
    wider = math.sqrt(dof / float(chdtri(dof, 1.0 - UNDERESTIMATED)))
    z = c * np.sqrt(np.maximum(1.0, errors * wider * c / indifference))
    z = np.minimum(z, max(c, -float(ndtri(alpha * RAREST))))
    half: Array = np.where(errors == 0.0, 0.0, as_student(z, dof) * errors)[places].reshape(standard_error.shape)
    return half


def following_look(n_rounds: int) -> int:
    """After how many rounds the next verdict is made: each look has its chance to err."""
    return max(n_rounds + 1, math.ceil(n_rounds * LOOK_GROWTH))


def as_student(z: Array, dof: int) -> Array:
    """Student's t that is as rare as z of a normal."""
    from scipy.special import ndtr, stdtrit

    # Beyond 37 a normal's tail is no number any more.
    t: Array = -stdtrit(dof, ndtr(-np.minimum(z, 37.0)))
    return t


def bounds_of(compared: Compared, rules: Rules) -> tuple[Differences, Differences | None]:
    """(of speed, of cost), as the verdict has them."""
    alpha = (1.0 - rules.confidence) / max(1, len(compared.speed.effect_K) - 1)
    if rules.objective == "latency" or compared.cost is None:
        return differences(compared.speed, rules.indifference, alpha), None
    within = rules.edge if rules.objective == "energy" else rules.indifference
    return (
        differences(compared.speed, within, alpha / 2),
        differences(compared.cost, rules.indifference, alpha / 2),
    )


def verdict(compared: Compared, rules: Rules, at_end: bool = False) -> Verdict:
    """Of one candidate or more. at_end: no more is probed, so that estimates decide where nothing is certain.

    Raises ValueError where energy is asked for and nothing has a cost.
    """
    if rules.objective != "latency" and compared.cost is None:
        raise ValueError(f"the objective is {rules.objective}, and no probe has a cost")
    speed, cost = bounds_of(compared, rules)
    if cost is None:
        return _latency(speed, rules)
    return _energy(speed, cost, rules, at_end) if rules.objective == "energy" else _pareto(speed, cost, rules)


def _energy(speed: Differences, cost: Differences, rules: Rules, at_end: bool) -> Verdict:
    floor, edge, tie = math.log1p(-rules.slowdown), math.log1p(rules.edge), math.log1p(rules.indifference)
    fastest = int(np.argmax(speed.value.sum(axis=1)))
    behind_K = speed.value[:, fastest]
    at_least_K, at_most_K = speed.low.min(axis=1), speed.high.min(axis=1)
    is_fast_K = behind_K >= floor
    is_allowed_K = is_fast_K & (at_least_K >= floor - edge)
    is_slow_K = ~is_fast_K & (at_most_K <= floor + edge)
    # The fastest by estimate is never slower than the floor, but early its bound may say nothing: then nobody is sure.
    sure = np.flatnonzero(is_allowed_K if is_allowed_K.any() else is_fast_K)
    leader = int(sure[np.argmin(cost.value[sure].sum(axis=1))])
    is_open_K = ~is_slow_K & (cost.low[:, leader] < -tie)
    is_open_K[leader] = not is_allowed_K[leader]
    is_over = not is_open_K.any()
    if at_end and not is_over:
        sure = np.flatnonzero(is_fast_K)
        leader = int(sure[np.argmin(cost.value[sure].sum(axis=1))])
    inside_K = is_open_K.copy()
    if not is_over:
        inside_K[leader] = True
        # Who is open because of the floor is told by the fastest, and by whoever might be faster still.
        doubtful = np.flatnonzero(is_open_K & ~is_allowed_K)
        if doubtful.size:
            inside_K[fastest] = True
            inside_K[np.argmin(speed.low[doubtful], axis=1)] = True
    near_K = (at_least_K < floor) & (at_most_K > floor)
    # Only those that would be taken if they were fast enough.
    near_K &= cost.value[:, leader] <= tie
    states = [
        _energy_state(k, leader, is_over, bool(is_fast_K[k]), bool(is_open_K[k]), float(cost.value[k, leader]), tie)
        for k in range(len(behind_K))
    ]
    return Verdict(leader, fastest, is_over, _numbers(inside_K), tuple(states), _numbers(near_K), _front(speed, cost))


def _energy_state(k: int, leader: int, is_over: bool, is_fast: bool, is_open: bool, over: float, tie: float) -> State:
    if k == leader:
        return "chosen"
    if is_open and not is_over:
        return "undecided"
    if not is_fast:
        return "too slow"
    return "as good" if over <= tie else "costlier"


def _latency(speed: Differences, rules: Rules) -> Verdict:
    tie = math.log1p(rules.indifference)
    leader = int(np.argmax(speed.value.sum(axis=1)))
    is_open_K = speed.high[:, leader] > tie
    is_open_K[leader] = False
    is_over = not is_open_K.any()
    inside_K = is_open_K.copy()
    inside_K[leader] = not is_over
    states: list[State] = []
    for k, behind in enumerate(speed.value[:, leader]):
        if k == leader:
            states.append("chosen")
        elif is_open_K[k]:
            states.append("undecided")
        else:
            states.append("as good" if behind >= -tie else "slower")
    return Verdict(leader, leader, is_over, _numbers(inside_K), tuple(states), (), (leader,))


def _pareto(speed: Differences, cost: Differences, rules: Rules) -> Verdict:
    """Out: whom another certainly beats in one, without being certainly worse than indifferent in the other."""
    tie, floor = math.log1p(rules.indifference), math.log1p(-rules.slowdown)
    order = np.argsort(cost.value.sum(axis=1))
    left: list[int] = [int(k) for k in order]
    for k in reversed(order):
        others = [j for j in left if j != k]
        no_worse = (speed.low[others, k] >= -tie) & (cost.low[k, others] >= -tie)
        better = (speed.low[others, k] > 0) | (cost.low[k, others] > 0)
        if (no_worse & better).any():
            left.remove(int(k))
    open_pairs = [
        (i, j)
        for i in left
        for j in left
        # j may be no worse than i in either, and better by more than is indifferent in one.
        if i != j and speed.high[j, i] > 0 and cost.high[i, j] > 0
        if speed.high[j, i] > tie or cost.high[i, j] > tie
    ]
    inside = sorted({k for pair in open_pairs for k in pair})
    fastest = int(np.argmax(speed.value.sum(axis=1)))
    allowed = [k for k in left if speed.value[k, fastest] >= floor]
    leader = min(allowed or [fastest], key=lambda k: int(np.flatnonzero(order == k)[0]))
    states: list[State] = []
    for k in range(len(order)):
        if k == leader:
            states.append("chosen")
        elif k not in left:
            states.append("beaten")
        else:
            states.append("undecided" if k in inside else "on the front")
    return Verdict(leader, fastest, not inside, tuple(inside), tuple(states), (), tuple(left))


def _front(speed: Differences, cost: Differences) -> tuple[int, ...]:
    """By the estimates: who is not beaten in both, the cheapest first."""
    found: list[int] = []
    for k in np.argsort(cost.value.sum(axis=1), kind="stable"):
        if all(speed.value[k, j] > 0 for j in found):
            found.append(int(k))
    return tuple(found)


def _numbers(is_K: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(k) for k in np.flatnonzero(is_K))
