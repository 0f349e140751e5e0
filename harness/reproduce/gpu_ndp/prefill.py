"""Reading a prompt of 512 tokens at once: seconds of the experts of a layer under each reading of 001's Fig. 8 and 10.

Three things are not stated that decide it: the clock of the multipliers, which of MoNDE's splits was run, and the
routing. So ratios are given over all of them. An expert with n rows costs a unit max(bytes / 102.4 GB/s, FLOP / (128
FLOP x clock)): at 0.8 GHz one row balances the two, so that every further row costs as much again.

    h = least     the split of the least max(GPU, busiest unit); what decoding is compared with
    h = factor    MoNDE's own, h ~ active * b / (b + b_ndp) (alpha 1)
    h = 0         no expert on the GPU: experts dealt to the units alone

Legend: T tokens, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from devices.models.sheet import Sheet
from harness.reproduce.gpu_ndp.configurations import MODELS, PRINTED_UNITS, Asked, uniform_choices
from harness.reproduce.gpu_ndp.decode import Configuration, supported
from harness.reproduce.gpu_ndp.stage import MONDE, TP, TP_LB, Arm, Stage, with_ndp_clock

PROMPT_TOKENS = 512
SEED = 0
CLOCKS_HZ = (0.2e9, 0.4e9, 0.8e9, 1.6e9, 2.3e9, 4e9, 8e9, 16e9, 32e9, 64e9, 128e9)
"""2.3 GHz is that of the GPU (Table I)."""
SKEWS = (0.0, 0.5, 1.0)
"""Experts are chosen with the weight rank ** -skew."""
SPLITS: Mapping[str, tuple[tuple[str, Any], ...]] = {"least": (), "factor": (("h", "factor"),), "0": (("h", 0),)}


class Reading(NamedTuple):
    """clock_hz: of the multipliers. split: MoNDE's h."""

    clock_hz: float
    split: str
    skew: float


class PrefillSeconds(NamedTuple):
    """Of the experts of one layer. monde: by split."""

    monde: Mapping[str, float]
    tp: float
    tp_lb: float


def prefill_seconds(asked: Asked, n_units: int, sheet: Sheet, skew: float, seed: int = SEED) -> PrefillSeconds:
    random = np.random.default_rng([seed, asked.shape.n_experts])
    ids_TK = uniform_choices(asked, PROMPT_TOKENS, random, skew)

    def seconds(name: str, parameters: tuple[tuple[str, Any], ...] = ()) -> float:
        return Stage(Arm(name, n_units, parameters), asked.shape, sheet).seconds(ids_TK, "prefill")

    return PrefillSeconds({split: seconds(MONDE, own) for split, own in SPLITS.items()}, seconds(TP), seconds(TP_LB))


class PrefillRatios(NamedTuple):
    """Seconds of MoNDE over those of slices, and of slices with balance."""

    tp: float
    tp_lb: float


def readings(
    sheet: Sheet, models: Mapping[str, Asked] = MODELS, clocks_hz: Sequence[float] = CLOCKS_HZ,
    units: tuple[int, ...] = PRINTED_UNITS, skews: Sequence[float] = SKEWS,
) -> dict[Reading, dict[Configuration, PrefillRatios]]:  # fmt: skip
    """Of every configuration that holds its model."""
    found: dict[Reading, dict[Configuration, PrefillRatios]] = {}
    for clock_hz in clocks_hz:
        clocked = with_ndp_clock(sheet, clock_hz)
        for skew in skews:
            for one in supported(sheet, models, units):
                own = prefill_seconds(models[one.model], one.n_units, clocked, skew)
                for split, monde_s in own.monde.items():
                    ratios = PrefillRatios(monde_s / own.tp, monde_s / own.tp_lb)
                    found.setdefault(Reading(clock_hz, split, skew), {})[one] = ratios
    return found


def mean_ratios(of: Mapping[Configuration, PrefillRatios], model: str | None = None) -> PrefillRatios:
    """Over the configurations, of one model or all."""
    own = [ratios for one, ratios in of.items() if model in (None, one.model)]
    tp, tp_lb = np.mean(own, axis=0)
    return PrefillRatios(float(tp), float(tp_lb))
