"""Large spaces: Optuna says which candidates to probe, and the best of them are raced.

    first    half of the probes, or less where Optuna goes on naming the same: one probe a suggestion, by the
             tree-structured Parzen estimator (TPE) over cost and speed
    then     a race of the `FINALISTS` cheapest that may be fast enough, and of the fastest

Optuna starts from a seed and is told the same answers when a session goes on, so it suggests the same again: its memory
is the session's store, and nothing else has to be kept.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from statistics import fmean

from harness.plan import PlanError
from harness.tuning.race import (
    AllFailedError,
    Answer,
    Ask,
    Estimate,
    Failed,
    Judge,
    RaceResult,
    Reading,
    Rules,
    Standing,
    race,
)

SUGGESTED = "suggested"
SMALL_SPACE = 32
"""Candidates that are raced whole."""
FINALISTS = 8
ENOUGH = 4
"""Probes of suggestions, in candidates of the space: a space is not probed many times over before it is raced."""
NEAR_FLOOR = 0.9
"""A share of the floor: one probe says little of who is above it."""


def check_optuna(n: int) -> None:
    """Raises `PlanError` where it is not installed."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise PlanError(
            [f"--space: {n} candidates need Optuna, which is not here: pip install 'joulebench[tune]', or --exhaustive"]
        ) from error


def suggested_race(
    arms: Sequence[str], values: Sequence[int], rules: Rules, judge: Judge[str] | None, seed: int = 0
) -> Generator[Ask[str], Answer, RaceResult[str]]:
    """arms: of all combinations, in their order. values: how many each key has. Raises ValueError as `race`."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    directions = ["maximize"] if judge is None else ["minimize", "maximize"]
    study = optuna.create_study(
        directions=directions, sampler=optuna.samplers.TPESampler(seed=seed), storage=optuna.storages.InMemoryStorage()
    )
    found: dict[str, list[Reading]] = {}
    failed: dict[str, str] = {}
    for n in range(min(max(2, rules.most_probes // 2), ENOUGH * len(arms))):
        trial = study.ask()
        arm = arms[_position([trial.suggest_categorical(str(i), range(size)) for i, size in enumerate(values)], values)]
        if arm in failed:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        answer = yield Ask(arm, n + 1, "suggested", 1)
        if isinstance(answer, Failed):
            failed[arm] = answer.reason
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        found.setdefault(arm, []).append(answer)
        study.tell(trial, _goals(arm, answer, judge))
    finalists = _finalists(found, rules, judge)
    if not finalists:
        raise AllFailedError(failed)
    n_spent = sum(map(len, found.values())) + len(failed)
    left = replace(rules, most_probes=max(rules.most_probes - n_spent, rules.first_rounds * len(finalists)))
    result = yield from race(finalists, left, judge, seed)
    raced = {one.arm for one in result.standings}
    rest = [_not_raced(arm, own, judge) for arm, own in found.items() if arm not in raced]
    rest += [Standing(arm, "failed", 0, reason=why) for arm, why in failed.items() if arm not in raced]
    return replace(result, n_probes=result.n_probes + n_spent, standings=(*result.standings, *rest))


def _not_raced(arm: str, readings: Sequence[Reading], judge: Judge[str] | None) -> Standing[str]:
    """Suggested, and no finalist: means without an interval."""
    speed = fmean(one.speed_tokens_per_s for one in readings)
    cost = None if judge is None else Estimate(fmean(judge(arm, one) for one in readings), None, None)
    return Standing(arm, "not raced", len(readings), Estimate(speed, None, None), cost)


def _position(chosen: Sequence[int], values: Sequence[int]) -> int:
    """Of a combination among all: the last key changes fastest."""
    position = 0
    for i, size in zip(chosen, values, strict=True):
        position = position * size + i
    return position


def _goals(arm: str, reading: Reading, judge: Judge[str] | None) -> list[float]:
    speed = reading.speed_tokens_per_s
    return [speed] if judge is None else [judge(arm, reading), speed]


def _finalists(found: dict[str, list[Reading]], rules: Rules, judge: Judge[str] | None) -> list[str]:
    """The fastest, and the cheapest of those that may be fast enough; by their means."""
    speed = {arm: fmean(one.speed_tokens_per_s for one in own) for arm, own in found.items()}
    by_speed = sorted(speed, key=lambda arm: -speed[arm])
    if judge is None or not found:
        return by_speed[:FINALISTS]
    cost = {arm: fmean(judge(arm, one) for one in own) for arm, own in found.items()}
    floor = 0.0 if rules.objective == "pareto" else NEAR_FLOOR * (1.0 - rules.slowdown) * speed[by_speed[0]]
    cheapest = sorted((arm for arm in found if speed[arm] >= floor), key=lambda arm: cost[arm])
    if rules.objective == "pareto":
        cheapest = [arm for arm in cheapest if not _is_beaten(arm, speed, cost)]
    return list(dict.fromkeys([by_speed[0], *cheapest]))[:FINALISTS]


def _is_beaten(arm: str, speed: dict[str, float], cost: dict[str, float]) -> bool:
    return any(speed[other] > speed[arm] and cost[other] < cost[arm] for other in speed)
