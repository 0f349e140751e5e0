"""A whole request: 512 tokens read, 512 answered, batch 1 (001, §IV-A and Fig. 9).

Experts of every layer by `stage` and `decode`, the rest (attention, norms, head) by a priced cell. Of arms that fetch
ahead the fetching of x experts of every layer stands once between the two.

The source states no time of the rest, and its GPU simulator is not public; a roofline is the least it can be. So every
ratio is given twice: with the rest by the sheet's roofline, where nothing is fitted; and with the rest as a multiple r
of what the experts take in slices over six units, r fitted on one row (calibration.toml), which makes the others of its
kind "consistent" at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from devices.models.sheet import Sheet
from engines.pricing.cells import Cell, parameters, price_cell
from engines.pricing.routing_sources import UniformRouting
from engines.pricing.shapes import ModelShape
from harness.reproduce.gpu_ndp.configurations import MODELS, PRINTED_UNITS, Asked, uniform_choices
from harness.reproduce.gpu_ndp.decode import Configuration, Decoding
from harness.reproduce.gpu_ndp.prefill import PROMPT_TOKENS, SEED
from harness.reproduce.gpu_ndp.stage import (
    ARMS,
    FULL,
    GPU,
    MONDE,
    ON_DEMAND,
    TP,
    TP_LB,
    TP_PRE,
    Arm,
    Stage,
)  # fmt: skip

ANSWER_TOKENS = 512
"""The prompt gives the first."""
MOST_UNITS = max(PRINTED_UNITS)


class Rest(NamedTuple):
    """Seconds of all that is no expert: of the prompt, and of a decoded token."""

    prefill_s: float
    decode_s: float


def rest_of(shape: ModelShape, sheet: Sheet) -> Rest:
    """By the roofline of the GPU. A decoded token attends to 768 others on average, and its seconds are linear in
    them."""
    spent_s = []
    for n_prompt, n_decoded in ((PROMPT_TOKENS, 0), (PROMPT_TOKENS + ANSWER_TOKENS // 2 - 1, 1)):
        cell = Cell(
            sheet, shape, parameters(TP, ndps=MOST_UNITS), UniformRouting(SEED), n_prompt, n_decoded, chunk=n_prompt
        )
        priced = price_cell(cell)
        phase = priced.decode if n_decoded else priced.prefill
        assert phase is not None  # six units hold every model of the source
        spent_s.append(sum(s for (name, unit), s in phase.spent.items() if unit == GPU and name != "expert FFN"))
    return Rest(*spent_s)


class Experts(NamedTuple):
    """Seconds of the experts of all layers. decode_s: of a token. fetch_s: once, between the two."""

    prefill_s: float
    decode_s: float
    fetch_s: float = 0.0


class Request:
    """One model on so many units."""

    def __init__(self, asked: Asked, n_units: int, sheet: Sheet, monde_s: float) -> None:
        """monde_s: of MoNDE's experts of a layer and a decoded token."""
        self._asked, self._n_units, self._sheet, self._monde_s = asked, n_units, sheet, monde_s
        self._decoding = Decoding(asked, n_units, sheet)
        self._n_layers = asked.shape.n_sparse_layers
        random = np.random.default_rng([SEED, asked.shape.n_experts])
        self._prompt_TK = uniform_choices(asked, PROMPT_TOKENS, random)
        self._prefill_s: dict[str, float] = {}

    def prefill_s(self, name: str) -> float:
        """Of the experts of all layers. What is fetched ahead is of no use to a prompt."""
        name = {TP_PRE: TP, FULL: TP_LB}.get(name, name)
        if name not in self._prefill_s:
            stage = Stage(Arm(name, self._n_units), self._asked.shape, self._sheet)
            self._prefill_s[name] = self._n_layers * stage.seconds(self._prompt_TK, "prefill")
        return self._prefill_s[name]

    def experts(self, name: str, utilisation: float = 0.0) -> Experts:
        """utilisation: of what is fetched ahead."""
        prefill_s = self.prefill_s(name)
        if name == MONDE:
            return Experts(prefill_s, self._n_layers * self._monde_s)
        if name not in AHEAD:
            return Experts(prefill_s, self._n_layers * self._decoding.of_any_choice(name))
        decode_s = self._n_layers * self._decoding.fetched_ahead(name, utilisation)
        link = self._sheet.link_of(self._sheet.resource_between("cpu", GPU) or "")
        assert link is not None
        n_fetched = self._n_layers * (self._asked.prefetched + self._asked.n_always)
        return Experts(prefill_s, decode_s, link.seconds(n_fetched, n_fetched * self._asked.shape.expert_bytes))


def whole_s(experts: Experts, rest: Rest) -> float:
    n_decoded = ANSWER_TOKENS - 1
    return experts.prefill_s + rest.prefill_s + experts.fetch_s + n_decoded * (experts.decode_s + rest.decode_s)


UTILISATIONS = (0.0, 0.1, 0.2, 0.4, 0.7, 1.0)
AHEAD = (TP_PRE, FULL)


class Requests:
    """All configurations that hold their model, and what they take with one rest or another."""

    def __init__(self, sheet: Sheet, monde_s: Mapping[Configuration, float]) -> None:
        """monde_s: as of `Request`, of each configuration that is asked."""
        self.configurations = list(monde_s)
        self._experts: dict[tuple[Configuration, str, float], Experts] = {}
        self._slices_s: dict[str, float] = {}
        self.roofline = {name: rest_of(asked.shape, sheet) for name, asked in MODELS.items()}
        for one in self.configurations:
            request = Request(MODELS[one.model], one.n_units, sheet, monde_s[one])
            for name in ARMS:
                for utilisation in UTILISATIONS if name in AHEAD else (0.0,):
                    self._experts[one, name, utilisation] = request.experts(name, utilisation)
        for name, asked in MODELS.items():
            decoding = Decoding(asked, MOST_UNITS, sheet)
            self._slices_s[name] = asked.shape.n_sparse_layers * decoding.of_any_choice(TP)

    def rest(self, model: str, multiple: float | None) -> Rest:
        """multiple: of what the experts of a token take in slices over six units; None: the roofline's."""
        if multiple is None:
            return self.roofline[model]
        return Rest(self.roofline[model].prefill_s, multiple * self._slices_s[model])

    def prefill_s(self, one: Configuration, name: str) -> float:
        """Of the experts of all layers."""
        return self._experts[one, name, 0.0].prefill_s

    def seconds(self, one: Configuration, name: str, multiple: float | None, utilisation: float = 0.0) -> float:
        return whole_s(self._experts[one, name, utilisation], self.rest(one.model, multiple))

    def times_faster(
        self, baseline: str, multiple: float | None, utilisation: float = 0.0, ours: str = FULL
    ) -> dict[Configuration, float]:
        """Of our arm over the baseline, by those configurations that the source has."""
        return {
            one: self.seconds(one, baseline, multiple)
            / self.seconds(one, ours, multiple, utilisation if ours in AHEAD else 0.0)
            for one in self.configurations
            if one.n_units in PRINTED_UNITS
        }

    def fitted_multiple(self, stated: float) -> float:
        """r at which the largest ratio to MoE-OnDemand is the stated one; it falls as r rises. Of the balanced arm
        without hits, as hit rates are not known."""
        low, high = 0.0, 10.0
        for _ in range(60):
            middle = (low + high) / 2
            found = max(self.times_faster(ON_DEMAND, middle, ours=TP_LB).values())
            low, high = (middle, high) if found > stated else (low, middle)
        return (low + high) / 2


def mean(ratios: Mapping[Configuration, float]) -> float:
    return float(np.mean(list(ratios.values())))
