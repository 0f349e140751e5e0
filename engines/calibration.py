"""What a technique may learn before the first request: how often each expert of each layer is chosen.

Source: §3.3 and §4.1 of NPUMoE (000). Legend: E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from engines.dispatch import DispatchPlan


@dataclass(frozen=True)
class Calibration:
    """Expert choices counted over calibration prompts. Immutable: the shapes derived from it are frozen."""

    tokens_per_expert: Mapping[int, tuple[int, ...]]
    """Layer -> n_{l,e} for e = 0 .. E-1; only sparse layers have an entry."""
    top_k: int
    n_prompts: int

    def __post_init__(self) -> None:
        frozen = MappingProxyType({layer: tuple(counts) for layer, counts in self.tokens_per_expert.items()})
        object.__setattr__(self, "tokens_per_expert", frozen)

    def relative_load(self, layer: int) -> tuple[float, ...]:
        """n_{l,e} / mean_e n_{l,e}: 1 for every expert under perfect balance."""
        counts = self.tokens_per_expert[layer]
        mean = sum(counts) / len(counts)
        return tuple(count / mean for count in counts)

    def imbalance(self, layer: int) -> float:
        """r_l = max_e n_{l,e} / mean_e n_{l,e} (§4.1)."""
        return max(self.relative_load(layer))

    def popularity(self, layer: int) -> tuple[int, ...]:
        """Experts from the most to the least chosen; the lower index first where counts are equal (§4.3)."""
        counts = self.tokens_per_expert[layer]
        return tuple(sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert)))


def count_choices(
    steps: Iterable[Sequence[DispatchPlan | None]], n_experts: int, top_k: int, n_prompts: int
) -> Calibration:
    """Counts the valid rows of plans that drop nothing. Each step holds one plan per layer, None for dense ones."""
    counts: dict[int, list[int]] = {}
    for plans in steps:
        for layer, plan in enumerate(plans):
            if plan is None:
                continue
            of_layer = counts.setdefault(layer, [0] * n_experts)
            for call in plan.calls:
                for expert, n_valid in zip(call.experts, call.valid_per_expert, strict=True):
                    of_layer[expert] += n_valid
    return Calibration({layer: tuple(row) for layer, row in counts.items()}, top_k, n_prompts)
