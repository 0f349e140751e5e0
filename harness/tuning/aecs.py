"""Adaptive energy-centric core selection: the search of source 002, without the phone.

    min E(I) subject to speed(I) >= (1 - slowdown) * speed of the fastest

Stage 1 finds the fastest selection by adding cores from big to middle. Stage 2 probes a tree of fewer and smaller
cores below it (`selections.candidates`), and takes, of those that are fast enough, the least

    E_h(I) = (1 - alpha) E(I) + alpha h(I) t(I)        E = P t, t = 1 / speed, h: `power_heuristic`

Line 8 of Algorithm 1 is printed inverted (it throws out what is fast enough); here the slow ones go. Each candidate is
probed once, as the source does it; `core_race` probes until noise is out of the way. A search is a generator, as a
`race` is one; `search` runs it with a function from a selection to its speed and power.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from devices.models.core_clusters import CoreCluster, Selection
from harness.tuning.power_heuristic import Heuristic, PowerHeuristic, ThreadHeuristic
from harness.tuning.race import AllFailedError, Answer, Ask, Failed, Reading, drive
from harness.tuning.selections import Tree, all_selections, candidates, growing

PROBE_TOKENS = 50
"""Decoded in a probe, so that it outlasts the battery's period of 250 ms (§4.2)."""


Probe = Callable[[Selection], Reading]


class Probed(NamedTuple):
    """A selection with what its probe found, and the energy that it is judged by."""

    selection: Selection
    reading: Reading
    energy_j: float
    """E_h of one token."""


@dataclass(frozen=True)
class AecsParameters:
    """A version of the search. The defaults are the source's, with what it leaves open from the authors' fork."""

    tree: Tree = "depth2"
    slowdown: float = 0.08
    alpha: float = 0.25
    """Weight of the heuristic energy: 0 is measured energy alone, 1 needs no meter."""
    heuristic: Heuristic = field(default_factory=PowerHeuristic)
    first_cores: int = 1
    """Where stage 1 begins."""
    least_gain: float = 0.01
    """Stage 1 ends when one more core adds less, as a share of the speed."""
    most_first_probes: int | None = None
    """Probes of stage 1; None: until it ends."""
    most_candidates: int | None = None
    """Nodes of the tree that are kept; None: all."""
    order: Literal["tree", "estimated power"] = "tree"
    """In which the candidates are probed."""
    ends_at: float | None = None
    """Stage 2 ends at a candidate of at least this share of stage 1's speed; None: all are probed."""
    floor_from: Literal["stage 1", "stage 1 and last"] = "stage 1"
    """What "as fast as the fastest" means: stage 1's speed, or its mean with the speed of the last probe."""

    def __post_init__(self) -> None:
        """Raises ValueError with every problem."""
        shares = {"slowdown": self.slowdown, "least_gain": self.least_gain, "alpha": self.alpha}
        problems = [
            f"{name} is {value:g}, not between 0 and 1" for name, value in shares.items() if not 0 <= value <= 1
        ]
        counts = {
            "first_cores": self.first_cores,
            "most_first_probes": self.most_first_probes,
            "most_candidates": self.most_candidates,
        }
        problems += [f"{name} is {n}, and must be 1 or more" for name, n in counts.items() if n is not None and n < 1]
        if problems:
            raise ValueError("; ".join(problems))


AECS = AecsParameters()
PRESETS: dict[str, AecsParameters] = {
    "aecs": AECS,
    "aecs-code": replace(
        AECS,
        first_cores=2,
        most_first_probes=7,
        most_candidates=13,
        order="estimated power",
        ends_at=0.99,
        floor_from="stage 1 and last",
    ),
    "aecs-measured": replace(AECS, alpha=0.0),
    "ios": replace(AECS, tree="threads", alpha=1.0, heuristic=ThreadHeuristic()),
}
"""`aecs`: as printed, line 8 corrected. `aecs-code`: as the authors' public engine fork does otherwise.
`aecs-measured`: as the revision that their testbed pins, measured energy alone. `ios`: threads, without a meter. The
fork also ends stage 2 by an estimate that its text does not make plain: that is left out."""


@dataclass(frozen=True)
class SearchResult:
    """What a search chose, and all that it probed."""

    chosen: Selection
    fastest: Selection
    """Stage 1's, or where it failed in stage 2 the fastest candidate; of an exhaustive search the fastest of all."""
    root: Selection
    """Of the candidates: stage 1's fastest, though it failed later."""
    first_probes: tuple[tuple[Selection, Reading], ...]
    probed: tuple[Probed, ...]
    """Stage 2's candidates."""
    floor_tokens_per_s: float
    is_fallback: bool = False
    """No candidate was fast enough when it was probed, so the fastest was taken."""

    @property
    def n_probes(self) -> int:
        return len(self.first_probes) + len(self.probed)

    @property
    def distinct(self) -> frozenset[Selection]:
        """Selections that were probed at all."""
        return frozenset(one for one, _ in self.first_probes) | {each.selection for each in self.probed}

    @property
    def allowed(self) -> tuple[Probed, ...]:
        return tuple(each for each in self.probed if each.reading.speed_tokens_per_s >= self.floor_tokens_per_s)


Asking = Generator[Ask[Selection], Answer, SearchResult]


def search(clusters: Sequence[CoreCluster], probe: Probe, parameters: AecsParameters = AECS) -> SearchResult:
    """Both stages. Raises ValueError as `asking`."""
    return drive(asking(clusters, parameters), lambda ask: probe(ask.arm))


def asking(clusters: Sequence[CoreCluster], parameters: AecsParameters = AECS) -> Asking:
    """Both stages. A candidate of stage 2 that cannot be probed is left out. Where it is stage 1's fastest, "as fast as
    the fastest" means the fastest of those that can.

    Raises ValueError where energy is to be measured and a probe has none, where a clock is not known, and where nothing
    can be probed.
    """
    root, first = yield from _find_fastest(clusters, parameters)
    best = dict(first)[root].speed_tokens_per_s
    nodes = list(candidates(clusters, root, parameters.tree))[: parameters.most_candidates]
    if parameters.order == "estimated power":
        nodes.sort(key=lambda node: parameters.heuristic.watts(clusters, node))
    probed: list[Probed] = []
    failed: dict[Selection, str] = {}
    for node in nodes:
        answer = yield Ask(node, 1, "candidates", len(nodes))
        if isinstance(answer, Failed):
            failed[node] = answer.reason
            continue
        probed.append(_judged(clusters, node, answer, parameters))
        if parameters.ends_at is not None and answer.speed_tokens_per_s >= parameters.ends_at * best:
            break
    if not probed:
        raise AllFailedError(failed)
    fastest = root
    if root in failed:
        fastest, best = _fastest(probed)
    if parameters.floor_from == "stage 1 and last":
        best = statistics.fmean((best, probed[-1].reading.speed_tokens_per_s))
    return _choice(fastest, root, tuple(first), tuple(probed), (1.0 - parameters.slowdown) * best)


def _fastest(probed: Sequence[Probed]) -> tuple[Selection, float]:
    """With its speed."""
    found = max(probed, key=lambda each: each.reading.speed_tokens_per_s)
    return found.selection, found.reading.speed_tokens_per_s


def _find_fastest(
    clusters: Sequence[CoreCluster], parameters: AecsParameters
) -> Generator[Ask[Selection], Answer, tuple[Selection, list[tuple[Selection, Reading]]]]:
    """Stage 1: (the fastest selection, all that was probed in order). One that cannot be probed ends it."""
    probed: list[tuple[Selection, Reading]] = []
    for selection in growing(clusters, parameters.first_cores):
        if len(probed) == parameters.most_first_probes:
            break
        answer = yield Ask(selection, 1, "fastest", 1)
        if isinstance(answer, Failed):
            if not probed:
                raise ValueError(f"the first probe failed: {answer.reason}")
            break
        probed.append((selection, answer))
        if len(probed) > 1:
            before = probed[-2][1].speed_tokens_per_s
            if answer.speed_tokens_per_s < before * (1.0 + parameters.least_gain):
                return probed[-2][0], probed
    return probed[-1][0], probed


def search_all(clusters: Sequence[CoreCluster], probe: Probe, parameters: AecsParameters = AECS) -> SearchResult:
    """Every selection probed once, the yardstick: the least energy of those within the slowdown of the fastest."""
    probed = tuple(_judged(clusters, one, probe(one), parameters) for one in all_selections(clusters))
    fastest, speed = _fastest(probed)
    return _choice(fastest, fastest, (), probed, (1.0 - parameters.slowdown) * speed)


def heuristic_energy_j(
    clusters: Sequence[CoreCluster], selection: Selection, reading: Reading, parameters: AecsParameters
) -> float:
    """E_h of one token. Raises ValueError as `search`."""
    if not 0 < reading.speed_tokens_per_s < math.inf:
        raise ValueError(f"the probe of {selection} found {reading.speed_tokens_per_s:g} token/s; it must decode")
    token_s = 1.0 / reading.speed_tokens_per_s
    alpha = parameters.alpha
    total = 0.0
    if alpha < 1.0:
        if reading.power_w is None:
            raise ValueError(
                f"alpha is {alpha:g}, and the probe of {selection} has no power; use alpha 1 without a meter"
            )
        total += (1.0 - alpha) * reading.power_w * token_s
    if alpha > 0.0:
        total += alpha * parameters.heuristic.watts(clusters, selection) * token_s
    return total


def _judged(
    clusters: Sequence[CoreCluster], selection: Selection, reading: Reading, parameters: AecsParameters
) -> Probed:
    return Probed(selection, reading, heuristic_energy_j(clusters, selection, reading, parameters))


def _choice(
    fastest: Selection,
    root: Selection,
    first: tuple[tuple[Selection, Reading], ...],
    probed: tuple[Probed, ...],
    floor_tokens_per_s: float,
) -> SearchResult:
    allowed = [each for each in probed if each.reading.speed_tokens_per_s >= floor_tokens_per_s]
    chosen = min(allowed, key=lambda each: each.energy_j).selection if allowed else fastest
    return SearchResult(chosen, fastest, root, first, probed, floor_tokens_per_s, not allowed)
