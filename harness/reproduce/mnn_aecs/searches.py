"""AECS against exhaustive search on the modelled phones of source 002, with noise on every probe.

Each phone is its sheet's `decode` model. A probe multiplies its speed and its power, each apart, by 1 + noise: normal
with a standard deviation of 5 %, or even between -5 % and +5 % ("as high as 5 %", §3.3). Nothing here was measured: the
source does not state the speed and power of each selection, so whether a search finds the optimum rests on our model of
them. A seed gives the same noise to every search.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from devices.models.core_clusters import CoreCluster, DecodeModel, Selection, decode_model
from devices.models.sheet import load_sheet
from harness.reproduce.mnn_aecs.phone_fit import preset_for
from harness.reproduce.mnn_aecs.places import ANDROID, SHEETS
from harness.tuning.aecs import PRESETS, AecsParameters, Probe, SearchResult, search, search_all
from harness.tuning.power_heuristic import Heuristic
from harness.tuning.race import Reading
from harness.tuning.selections import all_selections, n_selections

NOISE = 0.05
N_SEEDS = 200
NEAR = 0.02
"""Energy above the optimum's that still counts as near."""
Noise = Literal["normal", "even"]
Search = Literal["aecs", "aecs-measured", "aecs-code", "exhaustive"]
SEARCHES: tuple[Search, ...] = ("aecs", "aecs-measured", "aecs-code", "exhaustive")
"""`aecs-measured` is the search without the heuristic: measured energy alone."""


class Truth(NamedTuple):
    """What a phone's model says of every selection, without noise, and which is best within the slowdown."""

    model: DecodeModel
    readings: Mapping[Selection, Reading]
    optimum: Selection
    floor_tokens_per_s: float

    def energy(self, selection: Selection) -> float:
        speed, power = self.readings[selection]
        assert power is not None
        return power / speed


@dataclass(frozen=True)
class Outcome:
    """Of many seeds of one search on one phone. Shares are of the seeds."""

    phone: str
    search: Search
    n_seeds: int
    optimum_share: float
    """That chose the true optimum."""
    same_share: float
    """That chose what the exhaustive search chose under the same noise."""
    near_share: float
    """That chose a selection at most 2 % above the optimum's energy, truly fast enough."""
    slow_share: float
    """That chose one which is truly too slow."""
    mean_regret: float
    """Energy above the optimum's, as a share; below 0 where too slow ones are chosen, which need less."""
    mean_probes: float
    mean_distinct: float
    n_selections: int
    choices: tuple[tuple[Selection, int], ...]
    """What was chosen, and how often, the most frequent first."""


@cache
def phone_model(phone: str) -> DecodeModel:
    """Of its sheet."""
    sheet = load_sheet(SHEETS[phone])
    assert sheet.decode is not None
    return decode_model(sheet.clusters, sheet.decode)


@cache
def truth(phone: str) -> Truth:
    model = phone_model(phone)
    readings = {s: Reading(model.tokens_per_s(s), model.power(s)) for s in all_selections(model.selectable)}
    best = search_all(model.selectable, readings.__getitem__, PRESETS["aecs-measured"])
    return Truth(model, readings, best.chosen, best.floor_tokens_per_s)


def noiseless(phone: str, preset: str = "aecs") -> SearchResult:
    """What the search does where nothing fluctuates."""
    known = truth(phone)
    return search(known.model.selectable, known.readings.__getitem__, preset_for(phone, preset))


def noisy(readings: Mapping[Selection, Reading], noise: Noise, seed: int, repeats: int = 1) -> Probe:
    """Probes one after another, each the mean of `repeats`; a selection that is probed twice reads differently."""
    rng = np.random.default_rng(seed)
    shape = (repeats, 2)

    def probe(selection: Selection) -> Reading:
        speed, power = readings[selection]
        drawn = rng.normal(0.0, NOISE, shape) if noise == "normal" else rng.uniform(-NOISE, NOISE, shape)
        draws = drawn.mean(axis=0)
        assert power is not None
        return Reading(speed * (1.0 + float(draws[0])), power * (1.0 + float(draws[1])))

    return probe


class _Remembered:
    """A heuristic that works each selection out once."""

    def __init__(self, heuristic: Heuristic) -> None:
        self._heuristic, self._known = heuristic, dict[Selection, float]()

    def watts(self, clusters: Sequence[CoreCluster], selection: Selection) -> float:
        if selection not in self._known:
            self._known[selection] = self._heuristic.watts(clusters, selection)
        return self._known[selection]


def _searching(phone: str, name: Search) -> Callable[[Probe], SearchResult]:
    clusters = truth(phone).model.selectable
    if name == "exhaustive":
        return lambda probe: search_all(clusters, probe, PRESETS["aecs-measured"])
    preset: AecsParameters = preset_for(phone, name)
    preset = replace(preset, heuristic=_Remembered(preset.heuristic))
    return lambda probe: search(clusters, probe, preset)


@cache
def outcomes(phone: str, noise: Noise = "normal", repeats: int = 1, n_seeds: int = N_SEEDS) -> Mapping[Search, Outcome]:
    """Every search on a phone. On an iPhone all but the exhaustive one are the same: threads, without a meter."""
    known = truth(phone)
    names: tuple[Search, ...] = SEARCHES if phone in ANDROID else ("aecs", "exhaustive")
    runs = {
        name: [_searching(phone, name)(noisy(known.readings, noise, seed, repeats)) for seed in range(n_seeds)]
        for name in names
    }
    return {name: _outcome(phone, name, known, found, runs["exhaustive"]) for name, found in runs.items()}


def _outcome(
    phone: str, name: Search, known: Truth, found: list[SearchResult], exhaustive: list[SearchResult]
) -> Outcome:
    n, optimum_j = len(found), known.energy(known.optimum)
    regrets = [known.energy(one.chosen) / optimum_j - 1.0 for one in found]
    slow = [known.readings[one.chosen].speed_tokens_per_s < known.floor_tokens_per_s for one in found]
    near = [regret <= NEAR and not is_slow for regret, is_slow in zip(regrets, slow, strict=True)]
    return Outcome(
        phone=phone,
        search=name,
        n_seeds=n,
        optimum_share=sum(one.chosen == known.optimum for one in found) / n,
        same_share=sum(one.chosen == other.chosen for one, other in zip(found, exhaustive, strict=True)) / n,
        near_share=sum(near) / n,
        slow_share=sum(slow) / n,
        mean_regret=statistics.fmean(regrets),
        mean_probes=statistics.fmean(one.n_probes for one in found),
        mean_distinct=statistics.fmean(len(one.distinct) for one in found),
        n_selections=n_selections(known.model.selectable),
        choices=tuple(Counter(one.chosen for one in found).most_common()),
    )
