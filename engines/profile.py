"""What a technique may learn before the first request: how often each expert of each layer is chosen.

Source: §3.3 and §4.1 of NPUMoE (000). Legend: E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from torch import Tensor

from engines.observers import SparseLayerStep


@dataclass(frozen=True)
class Profile:
    """Expert choices counted over calibration prompts. Immutable: the shapes derived from it are frozen."""

    tokens_per_expert: Mapping[int, tuple[int, ...]]
    """Layer -> n_{l,e} for e = 0 .. E-1; only sparse layers have an entry."""
    top_k: int
    n_prompts: int

    def __post_init__(self) -> None:
        frozen = MappingProxyType({layer: tuple(counts) for layer, counts in self.tokens_per_expert.items()})
        object.__setattr__(self, "tokens_per_expert", frozen)

    def relative_load(self, layer: int) -> tuple[Fraction, ...]:
        """n_{l,e} / mean_e n_{l,e}: 1 for every expert under perfect balance. Exact, for shapes are cut from it."""
        counts = self.tokens_per_expert[layer]
        return tuple(Fraction(count * len(counts), sum(counts)) for count in counts)

    def imbalance(self, layer: int) -> float:
        """r_l = max_e n_{l,e} / mean_e n_{l,e} (§4.1)."""
        return float(max(self.relative_load(layer)))

    def popularity(self, layer: int) -> tuple[int, ...]:
        """Experts from the most to the least chosen; the lower index first where counts are equal (§4.3)."""
        counts = self.tokens_per_expert[layer]
        return tuple(sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert)))


def overlap_at_k(profiled: Profile, seen: Profile, layer: int, k: int) -> float:
    """Overlap@K: share of the K experts most chosen in one text that are among the K of another (000, §5.1)."""
    return len({*profiled.popularity(layer)[:k]} & {*seen.popularity(layer)[:k]}) / k


class ChoiceCounts:
    """A layer observer that counts how often each expert is chosen."""

    def __init__(self) -> None:
        self._counts: dict[int, Tensor] = {}

    def layer(self, seen: SparseLayerStep) -> None:
        counts_E = seen.routing.tokens_per_expert_E()
        self._counts[seen.layer] = self._counts.get(seen.layer, 0) + counts_E

    def profile(self, top_k: int, n_prompts: int) -> Profile:
        return Profile({layer: tuple(n_E.tolist()) for layer, n_E in self._counts.items()}, top_k, n_prompts)
