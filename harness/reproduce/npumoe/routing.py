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
from engines.pricing.generated_routing import DrawnRouting
from engines.pricing.routing_sources import Purpose
from engines.techniques.context import ModelSizes
from harness.reproduce.ledger import ledger
from results.units import format_share

HOT_SHARE = 0.25
STATED_IMBALANCE = 2.0
STATED_OVERLAP = ledger().calibration("000-227") / 100


@dataclass(frozen=True)
class QuartileRouting:
    """An `engines.pricing.routing_sources.RoutingSource`."""

    imbalance: float = STATED_IMBALANCE
    overlap: float = STATED_OVERLAP
    seed: int = 0

    @property
    def name(self) -> str:
        return (
            f"generated, a quarter of the experts {self.imbalance:g} times as busy as the mean,"
            f" {format_share(self.overlap)} of them known from calibration, seed {self.seed}"
        )

    def ids_LTK(self, sizes: ModelSizes, n_tokens: int, purpose: Purpose = "run", sequence: int = 0) -> Integers:
        chances_LE = np.tile(self._chances_E(sizes), (sizes.n_sparse_layers, 1))
        if purpose == "run":
            n_hot = _n_hot(sizes)
            shape = len(chances_LE), n_hot
            n_changed = round((1 - self.overlap) * shape[0] * n_hot)
            is_changed_LH = np.random.default_rng(self.seed).permutation(shape[0] * n_hot).reshape(shape) < n_changed
            hot_LH, cold_LH = chances_LE[:, :n_hot].copy(), chances_LE[:, n_hot : 2 * n_hot].copy()
            chances_LE[:, :n_hot] = np.where(is_changed_LH, cold_LH, hot_LH)
            chances_LE[:, n_hot : 2 * n_hot] = np.where(is_changed_LH, hot_LH, cold_LH)
        return DrawnRouting(self.name, chances_LE, sizes.top_k, seed=self.seed).ids_LTK(
            sizes, n_tokens, purpose, sequence
        )

    def _chances_E(self, sizes: ModelSizes) -> NDArray[np.float64]:
        """The hot experts first; the sum is K."""
        n_hot, mean = _n_hot(sizes), sizes.top_k / sizes.n_experts
        highest = sizes.n_experts / max(n_hot, sizes.top_k)
        if not 1 <= self.imbalance <= highest:
            raise EngineError(
                f"imbalance {self.imbalance:g}: {n_hot} of {sizes.n_experts} experts, {sizes.top_k} a token, can be 1"
                f" to {highest:g} times as busy as the mean"
            )
        n_cold = sizes.n_experts - n_hot
        cold = (sizes.top_k - n_hot * self.imbalance * mean) / n_cold
        return np.repeat([self.imbalance * mean, cold], [n_hot, n_cold])


def _n_hot(sizes: ModelSizes) -> int:
    return round(HOT_SHARE * sizes.n_experts)
