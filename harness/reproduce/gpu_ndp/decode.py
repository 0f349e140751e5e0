"""Decoding of one token at a time: seconds of the experts of a layer, by arm, model, units and hits (001, Fig. 8, 11).

Routing is uniform, as nobody publishes that of its runs. Slices take the same whatever a token chooses, so they and the
balanced arms are priced once. MoNDE hangs on where the chosen experts lie: with two units over every way in which they
can, else over draws, with their standard error. The arms that fetch ahead hang on how many of a token's experts lie on
the GPU: each of the x fetched is chosen with probability q, the utilisation of Fig. 6, apart from the others.

Legend: T tokens, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise, product
from math import comb
from typing import NamedTuple

import numpy as np

from devices.models.sheet import Sheet
from harness.reproduce.gpu_ndp.configurations import MODELS, PRINTED_UNITS, Asked, no_room, uniform_choices
from harness.reproduce.gpu_ndp.stage import FULL, MONDE, TP, TP_LB, TP_PRE, Arm, Spread, Stage, spread

UTILISATIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
N_DRAWS = 400
SEED = 0


class Configuration(NamedTuple):
    model: str
    n_units: int


def chances(n: int, probability: float) -> list[float]:
    """Of 0 .. n of so many, each apart."""
    return [comb(n, k) * probability**k * (1 - probability) ** (n - k) for k in range(n + 1)]


class Decoding:
    """Seconds of a layer for one model and so many units. Raises what the sheet refuses."""

    def __init__(self, asked: Asked, n_units: int, sheet: Sheet) -> None:
        self.asked, self.n_units, self._sheet = asked, n_units, sheet
        self._by_hits: dict[str, list[float]] = {}

    def _stage(self, name: str, parameters: Mapping[str, object] = {}) -> Stage:
        arm = Arm(name, self.n_units, tuple(parameters.items()))
        return Stage(arm, self.asked.shape, self._sheet, self.asked.prefetched + self.asked.n_always)

    def of_any_choice(self, name: str) -> float:
        """Of an arm that takes the same whatever a token chooses: the units have slices, or nothing is on them."""
        return self._stage(name).seconds(np.arange(self.asked.shape.top_k)[None])

    def monde(self, n_draws: int = N_DRAWS, seed: int = SEED) -> Spread:
        """Of uniform choices; exact for two units."""
        stage = self._stage(MONDE)
        if self.n_units == 1:
            return Spread(stage.seconds(np.arange(self.asked.shape.top_k)[None]), 0.0)
        if self.n_units == 2:
            return Spread(self._monde_of_two(stage), 0.0)
        random = np.random.default_rng([seed, self.n_units, self.asked.shape.n_experts])
        chosen_TK = uniform_choices(self.asked, n_draws, random)
        known: dict[tuple[int, ...], float] = {}
        found = []
        for ids_K in chosen_TK:  # in the order of their numbers, dealt to the units in turn: only where they lie counts
            units = tuple((ids_K % self.n_units).tolist())
            if units not in known:
                known[units] = stage.seconds(ids_K[None])
            found.append(known[units])
        return spread(found)

    def _monde_of_two(self, stage: Stage) -> float:
        """Over all ways in which the chosen experts, in the order of their numbers, lie on two units, each as often as
        uniform choices have it."""
        shape, n_always = self.asked.shape, self.asked.n_always
        n_chosen, half = shape.top_k - n_always, (shape.n_experts - n_always) // 2
        mean_s = 0.0
        for units in product((0, 1), repeat=n_chosen):
            ones = sum(units)
            often = comb(half, ones) * comb(half, n_chosen - ones) / comb(2 * half, n_chosen) / comb(n_chosen, ones)
            routed = [2 * i + unit for i, unit in enumerate(units)]
            always = list(range(shape.n_experts - n_always, shape.n_experts))
            mean_s += often * stage.seconds(np.array([[*routed, *always]]))
        return mean_s

    def by_hits(self, name: str) -> list[float]:
        """Of an arm that fetches ahead: seconds where 0 .. x of a token's routed experts lie on the GPU. What every
        token chooses lies there too."""
        if name not in self._by_hits:
            asked, stage = self.asked, self._stage(name)
            n_routed, top_k = asked.shape.n_experts - asked.n_always, asked.shape.top_k - asked.n_always
            always = list(range(n_routed, asked.shape.n_experts))
            held = [*range(asked.prefetched), *always]
            found = []
            for hits in range(min(asked.prefetched, top_k) + 1):
                others = range(asked.prefetched, asked.prefetched + top_k - hits)
                found.append(stage.seconds(np.array([[*range(hits), *others, *always]]), held=held))
            self._by_hits[name] = found
        return self._by_hits[name]

    def fetched_ahead(self, name: str, utilisation: float) -> float:
        """Mean seconds, each of the x fetched experts being chosen with that probability."""
        seconds = self.by_hits(name)
        return sum(p * s for p, s in zip(chances(len(seconds) - 1, utilisation), seconds, strict=True))


class SpeedUps(NamedTuple):
    """Seconds of MoNDE over those of each arm. Of the arms that fetch ahead: by utilisation."""

    monde_s: Spread
    tp: float
    tp_lb: float
    tp_pre: Mapping[float, float]
    full: Mapping[float, float]


def speed_ups(decoding: Decoding, n_draws: int = N_DRAWS) -> SpeedUps:
    monde_s = decoding.monde(n_draws)
    pre, full = ({q: monde_s.mean / decoding.fetched_ahead(name, q) for q in UTILISATIONS} for name in (TP_PRE, FULL))
    tp, tp_lb = (monde_s.mean / decoding.of_any_choice(name) for name in (TP, TP_LB))
    return SpeedUps(monde_s, tp, tp_lb, pre, full)


def supported(
    sheet: Sheet, models: Mapping[str, Asked] = MODELS, units: tuple[int, ...] = PRINTED_UNITS
) -> list[Configuration]:
    """Those whose DIMMs hold their model."""
    return [Configuration(name, n) for name in models for n in units if no_room(models[name], n, sheet) is None]


def all_speed_ups(
    sheet: Sheet,
    models: Mapping[str, Asked] = MODELS,
    units: tuple[int, ...] = PRINTED_UNITS,
    n_draws: int = N_DRAWS,
) -> dict[Configuration, SpeedUps]:
    return {
        one: speed_ups(Decoding(models[one.model], one.n_units, sheet), n_draws)
        for one in supported(sheet, models, units)
    }


def wanted_utilisation(stated: float, by_utilisation: Mapping[float, float]) -> float | None:
    """Where the line through these points has the stated value; None where it never does."""
    points = sorted(by_utilisation.items())
    for (low, at_low), (high, at_high) in pairwise(points):
        if min(at_low, at_high) <= stated <= max(at_low, at_high):
            return low + (high - low) * (stated - at_low) / (at_high - at_low) if at_high != at_low else low
    return None
