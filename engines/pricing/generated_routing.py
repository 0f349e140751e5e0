"""Routing that is drawn: how often each expert is chosen, and how much a token shares with the one before it.

A layer's chances q_e, that a token chooses expert e, add up to K. They come from published counts, or from two figures:

    imbalance   max_e q_e over their mean
    entropy     of q_e / K, in bits: log2 E where all are alike

Of all chances with these two, those are taken whose logarithms fall on a line, cut at the largest: one slope is solved
for. The reuse, the share of a token's experts that the one before it chose too, is met in closed form:

    reuse = s + (1 - s) * sum q_e^2 / K        s: how often a place is kept

A token has K places. Experts lie in a random order on a line of length K, each q_e long, and place k chooses within
[k, k + 1). Of an expert that lies over a border, a before it and b behind it, place k is chosen with b / (1 - a) where
the place before did not choose it, and else not at all: so a token's experts are distinct, and each is chosen as often
as it should be.

Legend: L layers with experts, T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.calls import Integers
from engines.errors import EngineError
from engines.pricing.routing_sources import Purpose, RecordedRouting, sizes_told
from engines.techniques.context import ModelSizes

Floats = NDArray[np.float64]
STEEPEST = 60.0
"""Of the line of logarithms, over all experts: beyond, the least chosen are never chosen."""


class RoutingFigures(NamedTuple):
    """Of one layer."""

    imbalance: float
    entropy_bits: float
    reuse: float


def figures_of(ids_TK: Integers, n_experts: int) -> RoutingFigures:
    """Of tokens that follow each other. reuse: 0 of a single one."""
    counts_E = np.bincount(ids_TK.reshape(-1), minlength=n_experts)
    kept = (ids_TK[1:, :, None] == ids_TK[:-1, None, :]).sum()
    n_pairs = ids_TK[1:].size
    return RoutingFigures(
        float(counts_E.max() / counts_E.mean()), entropy_bits(counts_E), float(kept) / max(n_pairs, 1)
    )


def entropy_bits(chances_E: Floats | Integers) -> float:
    shares = chances_E[chances_E > 0] / chances_E.sum()
    return float(-(shares * np.log2(shares)).sum())


def chances_of(imbalance: float, bits: float | None, n_experts: int, top_k: int) -> Floats:
    """q_E, from the most to the least chosen. bits: None: the most that the imbalance allows.

    Raises `EngineError` for figures that no K of E can have.
    """
    most, mean = imbalance * top_k / n_experts, top_k / n_experts
    if not mean <= most <= 1 + 1e-12:
        raise EngineError(
            f"imbalance = {imbalance:g} of {top_k} of {n_experts} experts must be 1 to {n_experts / top_k:g}"
        )
    if bits is None:
        return _on_a_line(0.0, most, n_experts, top_k)
    highest, lowest = (entropy_bits(_on_a_line(slope, most, n_experts, top_k)) for slope in (0.0, STEEPEST))
    if not lowest - 1e-9 <= bits <= highest + 1e-9:
        raise EngineError(
            f"entropy_bits = {bits:g} with imbalance = {imbalance:g} of {top_k} of {n_experts} experts must be"
            f" {lowest:.4g} to {highest:.4g}"
        )
    low, high = 0.0, STEEPEST
    for _ in range(60):
        middle = (low + high) / 2
        if entropy_bits(_on_a_line(middle, most, n_experts, top_k)) > bits:
            low = middle
        else:
            high = middle
    return _on_a_line((low + high) / 2, most, n_experts, top_k)


def _on_a_line(slope: float, most: float, n_experts: int, top_k: int) -> Floats:
    """The first has `most`, and no other more; they add up to K."""
    falling_E = np.exp(-slope * np.arange(n_experts) / max(n_experts - 1, 1))
    chances_E = np.full(n_experts, most)
    # As many as are cut at the most, and the others share what is left.
    for n_cut in range(1, n_experts):
        left = top_k - n_cut * most
        rest_E = falling_E[n_cut:] * (left / falling_E[n_cut:].sum())
        if rest_E[0] <= most * (1 + 1e-12):
            chances_E[n_cut:] = np.maximum(rest_E, 0.0)
            return chances_E
    return chances_E


@dataclass(frozen=True, eq=False)
class DrawnRouting:
    """A `engines.pricing.routing_sources.RoutingSource`. chances_LE: each row adds up to K. reuse_L: None: a token
    chooses whatever the one before it did."""

    told: str
    chances_LE: Floats
    top_k: int
    reuse_L: Sequence[float] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        sums_L = self.chances_LE.sum(axis=1)
        if (self.chances_LE < 0).any() or (self.chances_LE > 1 + 1e-9).any() or not np.allclose(sums_L, self.top_k):
            raise EngineError(f"chances of {self.told} must be 0 to 1 and add up to {self.top_k} in each layer")
        for layer, reuse in enumerate(self.reuse_L or ()):
            least = self._least_reuse(layer)
            if not least - 1e-9 <= reuse <= 1:
                raise EngineError(
                    f"reuse = {reuse:g} in layer {layer}: tokens that choose apart share {least:.4g}; give that, or"
                    " more up to 1"
                )

    @property
    def name(self) -> str:
        return f"{self.told}, seed {self.seed}"

    def ids_LTK(self, sizes: ModelSizes, n_tokens: int, purpose: Purpose = "run", sequence: int = 0) -> Integers:
        n_layers, n_experts = self.chances_LE.shape
        found, wanted = (n_layers, n_experts, self.top_k), (sizes.n_sparse_layers, sizes.n_experts, sizes.top_k)
        if found != wanted:
            raise EngineError(
                f"the routing ({self.told}) has {sizes_told(found)}, and the model that is priced has"
                f" {sizes_told(wanted)}; give chances of that model"
            )
        order = np.random.default_rng((self.seed, 0x6F72))
        orders = [order.permutation(n_experts) for _ in range(n_layers)]
        # A generator for each layer: without reuse, a longer request begins as a shorter one does.
        numbers = (self.seed, purpose == "calibration", sequence)
        return np.stack(
            [
                self._drawn(layer, orders[layer], n_tokens, np.random.default_rng((*numbers, layer)))
                for layer in range(n_layers)
            ]
        )

    def kept(self, layer: int) -> float:
        """s: how often a place is kept."""
        if self.reuse_L is None:
            return 0.0
        least = self._least_reuse(layer)
        return max((self.reuse_L[layer] - least) / (1 - least), 0.0) if least < 1 else 1.0

    def _least_reuse(self, layer: int) -> float:
        return float((self.chances_LE[layer] ** 2).sum() / self.top_k)

    def _drawn(self, layer: int, order_E: Integers, n_tokens: int, random: np.random.Generator) -> Integers:
        """ids_TK of one layer."""
        own_E = self.chances_LE[layer][order_E]
        ends_E = np.cumsum(own_E)
        at_TK = random.random((n_tokens, self.top_k))
        kept = self.kept(layer)
        if kept:
            is_new_TK = random.random(at_TK.shape) >= kept
            is_new_TK[0] = True
            last_TK = np.maximum.accumulate(np.where(is_new_TK, np.arange(n_tokens)[:, None], 0), axis=0)
            at_TK = np.take_along_axis(at_TK, last_TK, axis=0)
        places_TK = np.empty(at_TK.shape, dtype=np.int64)
        before_T = np.full(n_tokens, -1)
        for k in range(self.top_k):
            border = min(int(np.searchsorted(ends_E, k, side="right")), len(ends_E) - 1)
            behind = min(float(ends_E[border]) - k, 1.0)
            before = max(float(own_E[border]) - behind, 0.0)
            at_T = at_TK[:, k]
            if before > 1e-12 and behind < 1:
                chance_T = np.where(before_T == border, 0.0, behind / (1 - before))
                beside_T = behind + (at_T - chance_T) / np.maximum(1 - chance_T, 1e-300) * (1 - behind)
                at_T = np.where(at_T < chance_T, at_T * behind, beside_T)
            found_T = np.searchsorted(ends_E, k + at_T, side="right")
            before_T = places_TK[:, k] = np.minimum(found_T, len(ends_E) - 1)
        ids_TK: Integers = order_E[places_TK]
        return ids_TK


def generated(
    sizes: ModelSizes,
    imbalance: float = 1.0,
    entropy_bits: float | None = None,
    reuse: float | None = None,
    seed: int = 0,
) -> DrawnRouting:
    """All layers alike. Raises `EngineError` for figures that no such routing has."""
    chances_E = chances_of(imbalance, entropy_bits, sizes.n_experts, sizes.top_k)
    told = f"generated, imbalance {imbalance:g}"
    told += "" if entropy_bits is None else f", entropy {entropy_bits:g} bits"
    told += "" if reuse is None else f", reuse {reuse:g}"
    n = sizes.n_sparse_layers
    return DrawnRouting(told, np.tile(chances_E, (n, 1)), sizes.top_k, None if reuse is None else (reuse,) * n, seed)


def fitted_to(trace: RecordedRouting, seed: int = 0) -> DrawnRouting:
    """With the imbalance, entropy and reuse of each layer of a trace; of a figure that no such chances have, the
    nearest. `residuals` tells how near what is drawn then comes."""
    found = [_chances_like(one, trace) for one in layer_figures(trace)]
    chances_LE = np.stack(found)
    least_L = (chances_LE**2).sum(axis=1) / trace.top_k
    reuse_L = tuple(max(one.reuse, float(least)) for one, least in zip(layer_figures(trace), least_L, strict=True))
    told = f"generated with imbalance, entropy and reuse of each layer of {trace.model}'s trace"
    return DrawnRouting(told, chances_LE, trace.top_k, reuse_L, seed)


def _chances_like(figures: RoutingFigures, trace: RecordedRouting) -> Floats:
    n, k = trace.n_experts, trace.top_k
    imbalance = min(max(figures.imbalance, 1.0), n / k)
    most = imbalance * k / n
    highest, lowest = (entropy_bits(_on_a_line(slope, most, n, k)) for slope in (0.0, STEEPEST))
    return chances_of(imbalance, min(max(figures.entropy_bits, lowest), highest), n, k)


def layer_figures(trace: RecordedRouting) -> list[RoutingFigures]:
    every_TLK = np.concatenate(trace.sequences)
    return [figures_of(every_TLK[:, layer], trace.n_experts) for layer in range(trace.n_layers)]


class Residual(NamedTuple):
    """Of one layer: the trace's figures, and those of tokens that were drawn."""

    trace: RoutingFigures
    drawn: RoutingFigures


def residuals(trace: RecordedRouting, source: DrawnRouting, sizes: ModelSizes, n_tokens: int) -> list[Residual]:
    ids_LTK = source.ids_LTK(sizes, n_tokens)
    drawn = [figures_of(ids_TK, trace.n_experts) for ids_TK in ids_LTK]
    return [Residual(*both) for both in zip(layer_figures(trace), drawn, strict=True)]
