"""A race of candidates whose probes fluctuate: rounds of probes until the answer is certain enough, or told not to be.

A search is a generator. It yields an `Ask` and is sent what the probe found, a `Reading` or a `Failed`; what it returns
is the outcome. It draws its random order from a seed and looks at nothing else, so that a session that was killed goes
on by sending the readings of its journal again.

    energy     the least energy of those that are at most `slowdown` slower than the fastest
    latency    the fastest
    pareto     all that no other beats in speed and energy

Each round probes every candidate that is in, in a shuffled order, so that drift hits all alike, and candidates are
compared within rounds (`paired`). Who is in is judged anew after a round (`verdicts`): the leader, and whoever may
still be better by more than the indifference. The race is over when nobody may, or when its probes are spent.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from harness.tuning.rounds import Answer, Arm, Ask, Failed, Judge, Reading, Rounds, measured_j
from harness.tuning.standings import Estimate, RaceResult, Standing, race_result
from harness.tuning.verdicts import Objective, Rules, State, following_look, verdict

__all__ = [
    "AllFailedError",
    "Answer",
    "Ask",
    "Estimate",
    "Failed",
    "Judge",
    "Objective",
    "RaceResult",
    "Reading",
    "Rounds",
    "Rules",
    "Standing",
    "State",
    "drive",
    "measured_j",
    "race",
]
Found = TypeVar("Found")


class AllFailedError(ValueError):
    """There is nothing left to choose from. failed: by candidate, why. what: who failed."""

    def __init__(self, failed: Mapping[Any, str], what: str = "every candidate") -> None:
        self.failed, self.what = dict(failed), what
        super().__init__(self.words({arm: str(arm) for arm in failed}))

    def words(self, names: Mapping[Any, str]) -> str:
        """Candidates that failed alike are told together. names: as people know them."""
        alike: dict[str, list[str]] = {}
        for arm, why in self.failed.items():
            alike.setdefault(why, []).append(names[arm])
        return f"{self.what} failed: " + "; ".join(f"{', '.join(own)}: {why}" for why, own in alike.items())


def race(
    arms: Sequence[Arm],
    rules: Rules,
    judge: Judge[Arm] | None = measured_j,
    seed: int = 0,
    rounds: Rounds[Arm] | None = None,
) -> Generator[Ask[Arm], Answer, RaceResult[Arm]]:
    """Of `arms`, each once. rounds: what was probed before, which counts. judge None: of latency alone.

    Raises ValueError for no arms, for a reading that is none, and where every candidate failed.
    """
    if not arms:
        raise ValueError("there is nothing to race; name at least one candidate")
    rounds = rounds or Rounds(judge, seed)
    inside: tuple[Arm, ...] = tuple(dict.fromkeys(arms))
    n_own, next_look = 0, rules.first_rounds
    is_over = False
    while not is_over and (n_own == 0 or rounds.n_probes + len(inside) <= rules.most_probes):
        n_failed = len(rounds.failed)
        yield from rounds.probed(inside, "candidates")
        n_own += 1
        is_due = n_own >= next_look
        if len(rounds.failed) > n_failed:
            inside = tuple(arm for arm in inside if arm not in rounds.failed)
            is_due = is_due or n_own >= rules.first_rounds or len(inside) < 2
        if not is_due and len(inside) > 1:
            continue
        next_look = following_look(n_own)
        alive = rounds.arms()
        if not alive:
            raise AllFailedError(rounds.failed)
        found = verdict(rounds.compared(alive), rules)
        is_over = found.is_over
        inside = alive if rules.is_even else tuple(alive[k] for k in found.still_in)
    return race_result(rounds, rules, is_over)


def drive(search: Generator[Ask[Arm], Answer, Found], probe: Callable[[Ask[Arm]], Answer]) -> Found:
    """Runs a search to its end. probe: makes it, or reads it from a journal."""
    try:
        ask = next(search)
        while True:
            ask = search.send(probe(ask))
    except StopIteration as end:
        found: Found = end.value
        return found
