"""The routing that NPUMoE (000) states, as far as it states one: it publishes no counts and no traces.

    imbalance    the busiest expert has r = 2 times the mean load (the example of §4.1)
    who is hot   the top quartile, which gets 4 times the base capacity B/E, at K = 2 twice the mean (§1, §3.2); so all
                 of it has load r here, and all others share the rest alike. Table 3 agrees: 1.25 slots a routed pair
    calibration  86 % of the four experts that are busiest at run time were so in calibration (§5.8): that share of the
                 hot experts is the same, the others change places with cold ones

Legend: L layers, T tokens, E experts, K experts per token, H hot experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.calls import Integers
from engines.errors import EngineError
from engines.pricing.routing_sources import Purpose
from engines.techniques.context import ModelSizes
from harness.reproduce.ledger import ledger

HOT_SHARE = 0.25
STATED_IMBALANCE = 2.0
STATED_OVERLAP = ledger().calibration("000-227") / 100


@dataclass(frozen=True)
class QuartileRouting:
    """An `engines.pricing.routing_sources.RoutingSource`. Each expert's share of the tokens is exact on average.

    Experts lie on a circle, with arcs as long as their shares; a token takes K points at equal distances from a random
    start. Its experts are distinct, and each is chosen as often as its arc is long.
    """

    imbalance: float = STATED_IMBALANCE
    overlap: float = STATED_OVERLAP
    seed: int = 0

    @property
    def name(self) -> str:
        return (
            f"generated, a quarter of the experts {self.imbalance:g} times as busy as the mean,"
            f" {self.overlap:.0%} of them known from calibration, seed {self.seed}"
        )

    def ids_LTK(self, sizes: ModelSizes, n_tokens: int, purpose: Purpose = "run", sequence: int = 0) -> Integers:
        n_hot = round(HOT_SHARE * sizes.n_experts)
        highest = sizes.n_experts / max(n_hot, sizes.top_k)
        if not 1 <= self.imbalance <= highest:
            raise EngineError(
                f"imbalance {self.imbalance:g}: {n_hot} of {sizes.n_experts} experts, {sizes.top_k} a token, can be 1"
                f" to {highest:g} times as busy as the mean"
            )
        of_layers = np.random.default_rng((self.seed, 1))
        found = np.empty((sizes.n_sparse_layers, n_tokens, sizes.top_k), dtype=np.int64)
        for layer in range(sizes.n_sparse_layers):
            order_E = self._order(of_layers, sizes.n_experts, n_hot, purpose)
            # A generator for each layer: a longer request begins as a shorter one does.
            of_tokens = np.random.default_rng((self.seed, 2, purpose == "calibration", sequence, layer))
            found[layer] = _drawn(of_tokens, order_E, self._share_E(sizes, n_hot), n_tokens, sizes.top_k)
        return found

    def _order(self, random: np.random.Generator, n_experts: int, n_hot: int, purpose: Purpose) -> Integers:
        """Experts of a layer, the hot ones first: those of calibration, or with some of them exchanged."""
        order_E = random.permutation(n_experts)
        is_changed_H = random.random(n_hot) >= self.overlap
        if purpose == "run":
            changed = np.flatnonzero(is_changed_H)
            order_E[changed], order_E[n_hot + changed] = order_E[n_hot + changed], order_E[changed].copy()
        return order_E

    def _share_E(self, sizes: ModelSizes, n_hot: int) -> NDArray[np.float64]:
        """How many of a token's K choices fall on each expert, the hot ones first; the sum is K."""
        mean = sizes.top_k / sizes.n_experts
        n_cold = sizes.n_experts - n_hot
        cold = (sizes.top_k - n_hot * self.imbalance * mean) / n_cold
        return np.repeat([self.imbalance * mean, cold], [n_hot, n_cold])


def _drawn(
    random: np.random.Generator, order_E: Integers, share_E: NDArray[np.float64], n_tokens: int, top_k: int
) -> Integers:
    """The experts of tokens of one layer."""
    mixed_E = random.permutation(len(order_E))  # else hot experts would lie beside each other, and never meet
    ends_E = np.cumsum(share_E[mixed_E])
    points_TK = random.random((n_tokens, 1)) + np.arange(top_k)
    places_TK = np.minimum(np.searchsorted(ends_E, points_TK, side="right"), len(order_E) - 1)
    chosen_TK: Integers = order_E[mixed_E][places_TK]
    return chosen_TK
