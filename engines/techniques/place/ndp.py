"""Experts in slices on N NDP units, and on the GPU what balances them or lies there already (001, §III-B to D).

Every unit has 1/N of the columns of each expert: gate and up by columns, down by rows, partial sums added on the GPU.

    balanced    E_g experts of a step run on the GPU, so that both sides end together (`place.balance`): the busiest,
                and of the next one a slice of columns
    resident    in decoding, experts that lie in the GPU's memory run there, up to E_max whole ones, the busiest; where
                none of a step does, the step is balanced or all of it is on the NDP units

In a step of several tokens K is the number of experts that have any, and T_g and T_n are of their mean rows. Equal
loads: the lower number first. A slice is rounded to whole columns.

Legend: T tokens, E experts, X experts that have rows, N units, K experts of a token.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from devices.base import DeviceError, Unit
from engines.calls import Integers, Width
from engines.errors import EngineError
from engines.residency import Booleans
from engines.techniques.base import Layout, Piece, Share, Summed
from engines.techniques.context import NOTHING, BuildContext, Costs, LayerInput, ModelSizes
from engines.techniques.place.balance import Balance, Times, balanced, most_on_gpu
from engines.techniques.place.priced import PricedParameters
from engines.techniques.place.units import slices

GPU: Unit = "gpu"
HOST: Unit = "cpu"
"""From whose memory weights come to the GPU: the units are its DIMMs."""
logger = logging.getLogger(__name__)


class NdpParameters(PricedParameters):
    kind: Literal["ndp"] = "ndp"
    ndps: int = Field(default=6, ge=1, le=64)
    """NDP units, each with a slice of every expert."""
    balanced: bool = False
    """Whether the GPU takes experts and a slice, as many as balance both sides."""
    resident: bool = False
    """Whether experts in the GPU's memory run there in decoding."""
    costs_of: str = Field(default="rtx5080-ndp", max_length=100)
    """As of `PricedParameters`; read where the GPU computes."""

    @property
    def uses_gpu(self) -> bool:
        return self.balanced or self.resident

    @property
    def ndp_units(self) -> tuple[Unit, ...]:
        return tuple(f"ndp:{i}" for i in range(self.ndps))

    @property
    def units(self) -> tuple[Unit, ...]:
        return (GPU, *self.ndp_units) if self.uses_gpu else self.ndp_units

    def problem_with(self, costs: Costs, travels: bool) -> str | None:
        try:
            for unit in self.units:
                costs.call_s(unit, 1, 1)
            for unit in self.ndp_units:
                costs.transfer_s(GPU, unit, 1)
            costs.transfer_s(HOST, GPU, 1)
        except DeviceError as error:
            return str(error)
        return None

    def too_many(self, expert_width: int) -> str | None:
        """Why an expert has no slice for each unit, or None."""
        if self.ndps <= expert_width:
            return None
        return f"{self.ndps} NDP units cannot share {expert_width} columns of an expert; give fewer ndps"

    def build(self, context: BuildContext, layout: Layout) -> Ndp:
        """Raises `EngineError`, and `DeviceError` for a sheet that lacks a unit or a link."""
        if context.sizes is None:
            raise EngineError("slices of experts need a model with experts, and this one is dense; use dropless")
        if (reason := self.too_many(context.sizes.expert_width)) is not None:
            raise EngineError(reason)
        schedule = None
        if self.uses_gpu:
            schedule = Schedule(self.costs(context), self.priced_sizes(context), self.ndp_units)
        return Ndp(self, context.sizes, schedule, context.exchanged_sizes)


class Schedule:
    """How much of a step the GPU takes, by the costs of a machine."""

    def __init__(self, costs: Costs, sizes: ModelSizes, ndp_units: Sequence[Unit]) -> None:
        """Asks all of them once, so that a sheet without one is told now."""
        self._costs, self._units = costs, tuple(ndp_units)
        self._fetch_s = costs.transfer_s(HOST, GPU, sizes.expert_bytes)
        row_bytes = sizes.hidden * sizes.activation_bytes
        self._activation_s = max(costs.transfer_s(GPU, unit, row_bytes) for unit in self._units)
        self._of_one_row = self._times(1.0)

    def balanced(self, n_experts: int, n_pairs: int, n_tokens: int) -> Balance:
        return balanced(self.times(n_pairs / n_experts), len(self._units), n_experts, n_tokens)

    def most_on_gpu(self, n_experts: int, n_pairs: int) -> int:
        """Whole experts. Of less than one it is one where none there would end later: max(T_g, T_n (K - 1) + (1 + N)
        T_a) against T_n K + (1 + N) T_a, which is E_max (T_g + T_n)."""
        times = self.times(n_pairs / n_experts)
        most = most_on_gpu(times, len(self._units), n_experts)
        return math.floor(most + 1e-9) or int(times.gpu < most * (times.gpu + times.ndp))

    def times(self, n_rows: float) -> Times:
        """Of an expert with so many rows. Units work side by side: the slowest counts."""
        return self._of_one_row if n_rows == 1 else self._times(n_rows)

    def _times(self, n_rows: float) -> Times:
        call_s, n = self._costs.call_s, len(self._units)
        ndp_s = max(call_s(unit, 1, n_rows, 1 / n) for unit in self._units)
        return Times(self._fetch_s, call_s(GPU, 1, n_rows), ndp_s, self._activation_s)


class Division(NamedTuple):
    """Of experts in an order: the first n_whole run on the GPU, and so many columns of the next."""

    n_whole: int
    columns: int = 0


NONE_ON_GPU = Division(0)


class Ndp:
    """An `engines.techniques.base.Place`."""

    asks = NOTHING  # the move sizes the memory of the GPU

    def __init__(
        self,
        parameters: NdpParameters,
        sizes: ModelSizes,
        schedule: Schedule | None,
        exchanged: ModelSizes | None = None,
    ) -> None:
        """schedule: None where the GPU computes nothing. exchanged: as of `BuildContext`; None: sizes."""
        self._units, self._width = parameters.ndp_units, sizes.expert_width
        self._schedule, self._balances, self._resident = schedule, parameters.balanced, parameters.resident
        self._summed = Summed("reduce", (exchanged or sizes).hidden, "token", on=GPU)
        self._on_gpu = Share((Piece(GPU, overlaps=True),), exact=True)
        self._in_slices = Share(self._pieces(Width(0, self._width), once=False), exact=True, summed=self._summed)
        if schedule is not None and self._balances:
            found = schedule.balanced(sizes.top_k, sizes.top_k, 1)
            also = f"; so are {', '.join(f'{one:.3g}' for one in found.others)}" if found.others else ""
            logger.info("balanced: %.3g of a token's %d experts on the GPU%s", found.on_gpu, sizes.top_k, also)

    def shares(self, seen: LayerInput, load_E: Integers) -> Sequence[Share]:
        if self._schedule is None:
            return (self._in_slices,)
        expert_X = load_E.nonzero()[0]
        load_X = load_E[expert_X]
        hit_X = self.hits(seen)[expert_X] if self.looks_for_hits(seen) else np.zeros(len(expert_X), dtype=np.bool_)
        n_tokens = len(seen.routing.expert_ids_TK)
        division = self.divided(len(expert_X), int(load_X.sum()), n_tokens, int(hit_X.sum()))
        ordered_X = expert_X[np.lexsort((expert_X, -load_X, ~hit_X))]
        return self.shares_of(ordered_X, division, len(load_E))

    def decode_shares(self, layer: int) -> Sequence[Share] | None:
        return (self._in_slices,) if self._schedule is None else None

    def looks_for_hits(self, seen: LayerInput) -> bool:
        return self._resident and seen.phase == "decode"

    def hits(self, seen: LayerInput) -> Booleans:
        """Of all experts, those that lie in the GPU's memory."""
        assert seen.residency is not None  # the move asks for slots there
        return seen.residency.holds_E(GPU, seen.layer)

    def divided(self, n_experts: int, n_pairs: int, n_tokens: int, n_hits: int) -> Division:
        """Of a step's experts, those that lie on the GPU first, and of these the busiest."""
        if self._schedule is None:
            return NONE_ON_GPU
        if n_hits:
            return Division(min(n_hits, self._schedule.most_on_gpu(n_experts, n_pairs)))
        if not self._balances:
            return NONE_ON_GPU
        on_gpu = self._schedule.balanced(n_experts, n_pairs, n_tokens).on_gpu
        n_whole = math.floor(on_gpu)
        columns = round((on_gpu - n_whole) * self._width)
        return Division(n_whole + 1) if columns == self._width else Division(n_whole, columns)

    def shares_of(self, ordered_X: Integers, division: Division, n_experts: int) -> Sequence[Share]:
        """ordered_X: the experts that have rows."""
        n_whole, columns = division
        found: list[Share] = []
        if n_whole:
            found.append(replace(self._on_gpu, experts_E=_among(ordered_X[:n_whole], n_experts)))
        if columns:
            gpu = Piece(GPU, Width(0, columns), overlaps=True, once=True)
            pieces = (gpu, *self._pieces(Width(columns, self._width), once=True))
            own_E = _among(ordered_X[n_whole : n_whole + 1], n_experts)
            n_whole += 1
            # What a unit computed of a token is added up there: one result travels, whatever it is made of.
            summed = self._summed if n_whole == len(ordered_X) else None
            found.append(Share(pieces, own_E, exact=True, summed=summed))
        if n_whole < len(ordered_X):
            found.append(replace(self._in_slices, experts_E=_among(ordered_X[n_whole:], n_experts)))
        return tuple(found)

    def _pieces(self, columns: Width, once: bool) -> tuple[Piece, ...]:
        """Even slices of so many columns; a unit that there is no column for has none."""
        parts = [
            Width(columns.first + first, columns.first + end)
            for first, end in slices(columns.end - columns.first, len(self._units))
        ]
        return tuple(
            Piece(unit, part, overlaps=True, once=once)
            for unit, part in zip(self._units, parts, strict=True)
            if part.end > part.first
        )


def _among(expert_X: Integers, n_experts: int) -> Booleans:
    own_E = np.zeros(n_experts, dtype=np.bool_)
    own_E[expert_X] = True
    return own_E
