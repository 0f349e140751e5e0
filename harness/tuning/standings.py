"""What a race found: the chosen, and every candidate with its figures and their intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, NamedTuple

from harness.tuning.paired import Fit
from harness.tuning.rounds import Arm, Rounds
from harness.tuning.verdicts import Differences, Rules, State, bounds_of, verdict
from results.statistics import CONFIDENCE

MOST_WIDTH = math.log(1000.0)
"""An interval whose ends are further apart says nothing, and is left out."""
LEAST_WIDTH = 1e-9
"""Readings that differ by no more are one reading: prices of a modelled device, which has no interval."""


class Estimate(NamedTuple):
    """Of a figure, with its interval; None where there are too few readings for one."""

    value: float
    low: float | None
    high: float | None


class Step(NamedTuple, Generic[Arm]):
    """How a search came to an arm. parent None: it began there."""

    arm: Arm
    parent: Arm | None
    move: str


class Standing(NamedTuple, Generic[Arm]):
    """A candidate at the end. None: nothing was probed, or there is no energy, or no second.

    Intervals of a figure hold for all candidates at once, at 95 %: the chosen is the least of them, by luck too.
    """

    arm: Arm
    state: State
    n_probes: int
    speed_tokens_per_s: Estimate | None = None
    """In a mean round, as is the cost."""
    cost: Estimate | None = None
    """J of a token, as judged."""
    cost_over_chosen: Estimate | None = None
    """A ratio, paired by rounds. The interval is the race's own, which is wider than one of 95 %; so is the next."""
    speed_over_fastest: Estimate | None = None
    reason: str | None = None
    """Why it could not be probed."""


@dataclass(frozen=True)
class RaceResult(Generic[Arm]):
    """What a race chose."""

    chosen: Arm
    is_separated: bool
    """False: the probes were spent before the answer was certain enough."""
    fastest: Arm
    front: tuple[Arm, ...]
    """What no other beats in both, the cheapest first; of latency alone the chosen."""
    on_edge: tuple[Arm, ...]
    """As fast as the floor, to what could be told; judged by their estimate."""
    standings: tuple[Standing[Arm], ...]
    """Every candidate, the cheapest first, then those that failed."""
    floor_tokens_per_s: float | None
    """None: of latency."""
    speed_noise: float | None
    """Relative standard deviation of a probe within its round; None: too few probes."""
    cost_noise: float | None
    n_probes: int
    n_rounds: int
    drawn_in: int
    """Readings far from the rest, of speed and of cost, that were drawn in."""
    steps: tuple[Step[Arm], ...] = ()
    """Of a search on a tree, parents first; each arm once. Empty where all candidates were given from the start."""


def race_result(rounds: Rounds[Arm], rules: Rules, is_over: bool) -> RaceResult[Arm]:
    """Of all that was probed. Raises ValueError where nothing was."""
    arms = rounds.arms()
    if not arms:
        raise ValueError("nothing was probed, so nothing can be chosen")
    compared = rounds.compared(arms)
    found = verdict(compared, rules, at_end=True)
    counts = rounds.counts(arms)
    speed, cost_bounds = bounds_of(compared, rules)
    standings = [
        Standing(
            arm,
            found.states[k],
            counts[k],
            speed_tokens_per_s=_estimate(compared.speed, k),
            cost=None if compared.cost is None else _estimate(compared.cost, k),
            cost_over_chosen=None if cost_bounds is None else _ratio(cost_bounds, k, found.leader),
            speed_over_fastest=_ratio(speed, k, found.fastest),
        )
        for k, arm in enumerate(arms)
    ]
    fastest = standings[found.fastest].speed_tokens_per_s
    assert fastest is not None
    standings.sort(key=lambda one: one.cost.value if one.cost else -_value(one.speed_tokens_per_s))
    failed = [Standing(arm, "failed", 0, reason=why) for arm, why in rounds.failed.items()]
    cost = compared.cost
    return RaceResult(
        chosen=arms[found.leader],
        is_separated=is_over,
        fastest=arms[found.fastest],
        front=tuple(arms[k] for k in found.front),
        on_edge=tuple(arms[k] for k in found.on_edge),
        standings=(*standings, *failed),
        floor_tokens_per_s=None if rules.objective == "latency" else (1.0 - rules.slowdown) * fastest.value,
        speed_noise=_noise(compared.speed),
        cost_noise=None if cost is None else _noise(cost),
        n_probes=rounds.n_probes,
        n_rounds=rounds.n_rounds,
        drawn_in=compared.speed.drawn_in + (0 if cost is None else cost.drawn_in),
    )


def _estimate(fit: Fit, k: int) -> Estimate:
    from scipy.special import stdtrit

    value = math.exp(float(fit.effect_K[k]) + fit.level)
    error, dof = fit.value_error(k)
    of_all = 1 - (1 - CONFIDENCE) / 2 / len(fit.effect_K)  # Bonferroni
    half = float(stdtrit(dof, of_all)) * error if dof >= 1 and math.isfinite(error) else math.inf
    if not LEAST_WIDTH < 2 * half < MOST_WIDTH:
        return Estimate(value, None, None)
    return Estimate(value, value * math.exp(-half), value * math.exp(half))


def _ratio(between: Differences, k: int, other: int) -> Estimate:
    value, low, high = (float(each[k, other]) for each in (between.value, between.low, between.high))
    is_known = LEAST_WIDTH < high - low < MOST_WIDTH
    return Estimate(math.exp(value), math.exp(low) if is_known else None, math.exp(high) if is_known else None)


def _value(estimate: Estimate | None) -> float:
    return -math.inf if estimate is None else estimate.value


def _noise(fit: Fit) -> float | None:
    return fit.noise if fit.dof > 0 else None
