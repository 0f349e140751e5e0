"""The search of source 002 with probes that are repeated: both stages, until noise is out of the way.

Stage 1 walks as the source does, and asks at each step whether one more core adds more than the noise: the best so far
and the next are probed in pairs until that is plain, `most_pairs` times at most. Every step that is not plainly slower
than the best is a root, so that a wrong turn of stage 1 costs probes and not the answer. Stage 2 races the candidates
of all roots (`race`), with all readings of stage 1.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from devices.models.core_clusters import CoreCluster, Selection
from harness.tuning.aecs import AecsParameters, heuristic_energy_j
from harness.tuning.race import AllFailedError, Answer, Ask, Judge, RaceResult, Rounds, Rules, measured_j, race
from harness.tuning.selections import Tree, all_selections, candidates, descent, growing
from harness.tuning.standings import Step
from harness.tuning.verdicts import as_student

Racing = Generator[Ask[Selection], Answer, RaceResult[Selection]]
PLAIN = 2.0
"""Standard errors beyond which a step of stage 1 is plain."""
PLAINLY_SLOWER = 3.0
"""Standard errors beyond which a step is no root any more. More, for its tree would be lost."""


def core_race(
    clusters: Sequence[CoreCluster],
    rules: Rules,
    judge: Judge[Selection] | None = measured_j,
    tree: Tree = "depth2",
    least_gain: float = 0.01,
    most_pairs: int = 4,
    seed: int = 0,
) -> Racing:
    """Both stages, as an `asking`. least_gain: stage 1 ends where one more core adds less, as a share of the speed.

    Raises ValueError as `race`.
    """
    rounds: Rounds[Selection] = Rounds(judge, seed)
    walked, roots = yield from _find_roots(clusters, rounds, least_gain, most_pairs, rules.most_probes)
    nodes = dict.fromkeys(node for root in roots for node in candidates(clusters, root, tree))
    result = yield from race([node for node in nodes if node not in rounds.failed], rules, rounds=rounds)
    return replace(result, steps=steps_of(clusters, walked, roots, tree))


def steps_of(
    clusters: Sequence[CoreCluster], walked: Sequence[Selection], roots: Iterable[Selection], tree: Tree
) -> tuple[Step[Selection], ...]:
    """How a search came to each selection: stage 1's walk, then the trees below its roots."""
    found = {walked[0]: Step[Selection](walked[0], None, "stage 1 begins")}
    for before, one in pairwise(walked):
        found[one] = Step(one, before, "one more core")
    for link in (link for root in roots for link in descent(clusters, root, tree)):
        found.setdefault(link.selection, Step(*link))
    return tuple(found.values())


def exhaustive_race(
    clusters: Sequence[CoreCluster], rules: Rules, judge: Judge[Selection] | None = measured_j, seed: int = 0
) -> Racing:
    """Of every selection: the yardstick. Raises ValueError as `race`."""
    return race(tuple(all_selections(clusters)), rules, judge, seed)


def judged_by(clusters: Sequence[CoreCluster], parameters: AecsParameters) -> Judge[Selection]:
    """E_h of source 002, with its alpha and heuristic: what a race makes least where no meter is (alpha 1)."""
    return lambda selection, reading: heuristic_energy_j(clusters, selection, reading, parameters)


def _find_roots(
    clusters: Sequence[CoreCluster], rounds: Rounds[Selection], least_gain: float, most_pairs: int, most_probes: int
) -> Generator[Ask[Selection], Answer, tuple[tuple[Selection, ...], tuple[Selection, ...]]]:
    """Stage 1: (its walk, every selection of it that may be the fastest). One that cannot be probed ends the walk."""
    path = list(growing(clusters))
    best, walked = path[0], [path[0]]
    for following in path[1:]:
        if rounds.n_probes + 2 > most_probes:
            break
        walked.append(following)
        for _ in range(most_pairs):
            if rounds.n_probes + 2 > most_probes:
                break
            yield from rounds.probed((best, following), "fastest")
            if rounds.failed:
                break
            gain, half = _gain(rounds, following, best, PLAIN)
            if gain > half or gain + half < math.log1p(least_gain):
                break
        if rounds.failed:
            break
        if gain < math.log1p(least_gain):
            break
        best = following
    whole = tuple(walked)
    walked = [one for one in walked if one not in rounds.failed]
    if not walked:
        raise AllFailedError(rounds.failed, "every one of the first selections")
    if len(walked) == 1:
        return whole, tuple(walked)
    best = best if best in walked else walked[-1]
    return whole, tuple(one for one in walked if one == best or _may_be_faster(rounds, one, best))


def _may_be_faster(rounds: Rounds[Selection], one: Selection, best: Selection) -> bool:
    if not {one, best} <= set(rounds.arms()):
        return True  # what stood between them failed
    gain, half = _gain(rounds, one, best, PLAINLY_SLOWER)
    return gain + half > 0


def _gain(rounds: Rounds[Selection], one: Selection, other: Selection, z: float) -> tuple[float, float]:
    """(the logarithm of how much faster, what it may be off by at z standard errors of a normal)."""
    arms = rounds.arms()
    fit = rounds.compared(arms).speed
    i, j = arms.index(one), arms.index(other)
    gain = float(fit.effect_K[i] - fit.effect_K[j])
    if fit.dof < 1:
        return gain, math.inf
    t = float(as_student(np.array([z]), fit.dof)[0])
    return gain, t * float(fit.standard_errors_KK()[i, j])
