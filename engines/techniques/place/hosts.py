"""Experts between a GPU and where they lie: what source 001 compares its scheduling with.

    cheaper   Fiddler: each expert on the CPU or on the GPU, by what it costs there
    hottest   MoNDE and Duplex: the heaviest h of a step on the GPU, the rest on the units that hold them, expert e on
              unit e mod N

A call on the GPU costs what it computes and, where its expert does not lie in the GPU's memory, what fetching it costs.
Whether it lies there says the residency; without one the units share a memory, and nothing is fetched (Duplex's own
device).

Fiddler's code takes the least sum over experts; its comment wants the least max of the two units
(efeslab/fiddler, mixtral.py): `objective` offers both. With "max" the units work side by side, with "sum" one after the
other, as that code does. It counts an expert in the GPU's memory as free; here it costs its call.

MoNDE's h is alpha * active * b / (b + b_ndp), of the link's bandwidth b and that of all N units together, and alpha
from what was measured before; `h = "factor"` takes it, with the bandwidths at which calls of one row are priced. The
default tries all h: the published ratios come out so, and not with the factor. Equal loads: experts in the GPU's
memory first, then the lower number.

Legend: E experts, X experts that have rows, N units that hold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from devices.base import DeviceError, Unit
from engines.calls import Integers
from engines.techniques.base import Layout, Piece, Share, Visited
from engines.techniques.context import NOTHING, BuildContext, Costs, LayerInput
from engines.techniques.place.partition import (
    Booleans,
    Seconds,
    least_max,
    least_split,
    least_splits,
    least_sum,
)
from engines.techniques.place.priced import PricedParameters

GPU: Unit = "gpu"


class HostsParameters(PricedParameters):
    costs_of: str = Field(default="rtx5080-ndp", max_length=100)

    @property
    def units(self) -> tuple[Unit, ...]:
        raise NotImplementedError

    def problem_with(self, costs: Costs, travels: bool) -> str | None:
        """Why these prices do not decide it, or None. travels: whether experts are fetched."""
        try:
            for unit in self.units:
                costs.call_s(unit, 1, 1)
                if travels and unit != GPU:
                    costs.transfer_s(unit, GPU, 1)
        except DeviceError as error:
            return str(error)
        return None


class CheaperParameters(HostsParameters):
    kind: Literal["cheaper"] = "cheaper"
    objective: Literal["sum", "max"] = "sum"
    """Of what the experts of a layer shall cost least: of both units one after the other, or of the slower one."""

    @property
    def units(self) -> tuple[Unit, ...]:
        return (GPU, "cpu")

    def build(self, context: BuildContext, layout: Layout) -> BetweenTwo:
        """Raises `EngineError`, and `DeviceError` where the sheet has not the units."""
        prices = Prices(self, context, self.units[1:])
        choose = least_sum if self.objective == "sum" else least_max

        def on_gpu(gpu_X: Seconds, other_X: Seconds, home_X: Integers) -> Booleans:
            return choose(gpu_X, other_X)

        return BetweenTwo(prices, on_gpu, self.objective == "max", visited(context))


class HottestParameters(HostsParameters):
    kind: Literal["hottest"] = "hottest"
    ndps: int = Field(default=6, ge=1, le=64)
    """Units that hold the experts and compute those that do not run on the GPU."""
    h: Annotated[int, Field(ge=0, le=65536)] | Literal["least", "factor"] = "least"
    """Experts of a step on the GPU: so many, as many as make a layer shortest, or MoNDE's factor of those with rows."""
    alpha: float = Field(default=1.0, gt=0, le=1e6)
    """Of the factor."""

    @property
    def units(self) -> tuple[Unit, ...]:
        return (GPU, *(f"ndp:{i}" for i in range(self.ndps)))

    def too_many(self, n_experts: int) -> str | None:
        """Why it does not fit the model, or None."""
        if isinstance(self.h, int) and self.h > n_experts:
            return f"h = {self.h} experts on the GPU, and a layer has {n_experts}; lower it"
        return None

    def build(self, context: BuildContext, layout: Layout) -> BetweenTwo:
        """Raises `EngineError`, and `DeviceError` where the sheet has not the units."""
        prices, n = Prices(self, context, self.units[1:]), self.ndps
        share = prices.balanced_share() * self.alpha if self.h == "factor" else 0.0

        def on_gpu(gpu_X: Seconds, other_X: Seconds, home_X: Integers) -> Booleans:
            n_experts = gpu_X.shape[-1]
            if self.h != "least":
                h: Integers | int = self.h if isinstance(self.h, int) else math.floor(share * n_experts + 0.5)
            elif gpu_X.ndim > 1:
                h = least_splits(gpu_X, other_X, home_X, n)[:, None]
            else:
                h = least_split(gpu_X, other_X, home_X, n)
            found: Booleans = np.broadcast_to(np.arange(n_experts) < h, gpu_X.shape)
            return found

        return BetweenTwo(prices, on_gpu, True, visited(context))


def visited(context: BuildContext) -> Visited | None:
    """Who has the tokens that these units compute; None where all of them find them in one memory."""
    sizes = context.exchanged_sizes
    return None if context.apart_from is None or sizes is None else Visited(context.apart_from, sizes.hidden)


class Prices:
    """Seconds of calls of one expert, each asked once. The others are alike: calls cost what they cost on the first."""

    def __init__(self, parameters: PricedParameters, context: BuildContext, others: Sequence[Unit]) -> None:
        self.others = tuple(others)
        self._costs = parameters.costs(context)
        self._expert_bytes = parameters.priced_sizes(context).expert_bytes
        self._known = {unit: _ByRows(unit, self._costs) for unit in (GPU, *others)}
        self._fetch_N: Seconds | None = None
        for unit in (GPU, *others):
            self.call_s(unit, 1)  # a sheet without the unit is told now

    @property
    def fetch_N(self) -> Seconds:
        """Of an expert from each of the others to the GPU; asked where experts travel."""
        if self._fetch_N is None:
            self._fetch_N = np.array([self._costs.transfer_s(u, GPU, self._expert_bytes) for u in self.others])
        return self._fetch_N

    def calls_X(self, unit: Unit, load_X: Integers) -> Seconds:
        return np.array(list(map(self._known[unit].__getitem__, load_X.tolist())))

    def balanced_share(self) -> float:
        """Of experts with one row: those that the link brings while the others compute the rest."""
        call_s = self.call_s(self.others[0], 1) / len(self.others)
        return call_s / (float(self.fetch_N.mean()) + call_s)

    def call_s(self, unit: Unit, n_rows: int) -> float:
        return self._known[unit][n_rows]


class _ByRows(dict[int, float]):
    """Seconds of a call of one expert by its rows; asked when they are first wanted."""

    def __init__(self, unit: Unit, costs: Costs) -> None:
        self._unit, self._costs = unit, costs

    def __missing__(self, n_rows: int) -> float:
        found = self[n_rows] = self._costs.call_s(self._unit, 1, n_rows)
        return found


class BetweenTwo:
    """Each expert of a step on the GPU or on the unit that holds it."""

    asks = NOTHING

    def __init__(
        self,
        prices: Prices,
        on_gpu: Callable[[Seconds, Seconds, Integers], Booleans],
        overlaps: bool,
        visited: Visited | None,
    ) -> None:
        """on_gpu: of experts, the heaviest first: seconds on the GPU and elsewhere, and which of the others. With
        several others it is asked for many tokens at once, too: [N, X]."""
        self._prices = prices
        self._on_gpu = on_gpu
        self.overlaps = overlaps
        self.others, self.n_others = prices.others, len(prices.others)
        pieces = tuple(Piece(unit, overlaps=overlaps) for unit in (GPU, *prices.others))
        self._whole = Share(pieces, exact=True, visited=visited)
        self._of_token: dict[tuple[int, int, bool], Booleans] = {}

    @property
    def whole(self) -> Share:
        """All experts: pieces of the GPU and of the units that hold them."""
        return self._whole

    def shares(self, seen: LayerInput, load_E: Integers) -> Sequence[Share]:
        expert_X = load_E.nonzero()[0]
        load_X = load_E[expert_X]
        lies_X = self._lies_X(seen, expert_X)
        held = lies_X is not None
        if lies_X is None:
            lies_X = np.ones(len(expert_X), dtype=np.bool_)
        order_X = np.lexsort((expert_X, ~lies_X, -load_X))
        expert_X, load_X, lies_X = expert_X[order_X], load_X[order_X], lies_X[order_X]
        home_X = self.home_of(expert_X)
        gpu_X = self._prices.calls_X(GPU, load_X)
        if held:
            gpu_X = gpu_X + np.where(lies_X, 0.0, self._prices.fetch_N[home_X])
        other_X = self._prices.calls_X(self._prices.others[0], load_X)
        piece_E = self.home_of(np.arange(len(load_E))) + 1
        piece_E[expert_X[self._on_gpu(gpu_X, other_X, home_X)]] = 0
        return (replace(self._whole, piece_E=piece_E),)

    def pieces_of_token(self, seen: LayerInput, expert_X: Integers) -> Integers:
        """The same of the experts of one token, by number: the piece of each."""
        lies_X, n = self._lies_X(seen, expert_X), len(expert_X)
        home_X = self.home_of(expert_X)
        n_lie, order_X = n, None
        if lies_X is not None:
            n_lie = int(np.count_nonzero(lies_X))
            if 0 < n_lie < n:
                order_X = (~lies_X).argsort(kind="stable")
        is_on_gpu_X = self._chosen(home_X if order_X is None else home_X[order_X], n_lie, lies_X is not None)
        piece_X: Integers = home_X + 1
        piece_X[is_on_gpu_X if order_X is None else order_X[is_on_gpu_X]] = 0
        return piece_X

    def pieces_of_tokens(self, expert_NX: Integers, lies_NX: Booleans | None) -> Integers:
        """The same of many tokens at once, which all have as many experts. lies_NX: whether each lies in the GPU's
        memory; None where the units share one."""
        home_NX = self.home_of(expert_NX)
        order_NX = np.zeros_like(home_NX) if lies_NX is None else (~lies_NX).astype(np.int64)
        order_NX = order_NX.argsort(axis=1, kind="stable")
        ordered_NX = np.take_along_axis(home_NX, order_NX, axis=1)
        gpu_NX = np.full(home_NX.shape, self._prices.call_s(GPU, 1))
        if lies_NX is not None:
            comes_NX = ~np.take_along_axis(lies_NX, order_NX, axis=1)
            gpu_NX[comes_NX] += self._prices.fetch_N[ordered_NX[comes_NX]]
        other_NX = np.full(home_NX.shape, self._prices.call_s(self._prices.others[0], 1))
        piece_NX = np.where(self._on_gpu(gpu_NX, other_NX, ordered_NX), 0, ordered_NX + 1)
        found_NX = np.empty_like(piece_NX)
        np.put_along_axis(found_NX, order_NX, piece_NX, axis=1)
        return found_NX

    def home_of(self, expert_X: Integers) -> Integers:
        """Which of the other units holds each."""
        found: Integers = expert_X % self.n_others
        return found

    def _chosen(self, home_X: Integers, n_lie: int, held: bool) -> Booleans:
        """Which of a token's experts run on the GPU; the first of them lie there."""
        key = len(home_X), n_lie, held
        if self.n_others == 1 and key in self._of_token:
            return self._of_token[key]
        gpu_X = np.full(len(home_X), self._prices.call_s(GPU, 1))
        if held:
            gpu_X[n_lie:] += self._prices.fetch_N[home_X[n_lie:]]
        other_X = np.full(len(home_X), self._prices.call_s(self._prices.others[0], 1))
        found = self._on_gpu(gpu_X, other_X, home_X)
        if self.n_others == 1:
            self._of_token[key] = found
        return found

    def _lies_X(self, seen: LayerInput, expert_X: Integers) -> Booleans | None:
        """Whether each lies in the GPU's memory; None where the units share one."""
        if seen.residency is None or GPU not in seen.residency.slots:
            return None
        found: Booleans = seen.residency.holds_E(GPU, seen.layer)[expert_X]
        return found

    def decode_shares(self, layer: int) -> Sequence[Share] | None:
        return None
