"""Which experts are chosen most, how unevenly, and whether what one text chooses tells of another.

Source: §4.1 (imbalance), §4.3 (popularity) and §5.1 (Overlap@K) of NPUMoE (000). Legend: E experts.
"""

from __future__ import annotations

from collections.abc import Sequence


def popularity(counts_E: Sequence[int]) -> tuple[int, ...]:
    """Experts from the most to the least chosen; the lower index first where counts are equal (§4.3)."""
    return tuple(sorted(range(len(counts_E)), key=lambda expert: (-counts_E[expert], expert)))


def imbalance(counts_E: Sequence[int]) -> float | None:
    """max_e n_e / mean_e n_e: 1 under perfect balance. None where nothing was chosen."""
    total = sum(counts_E)
    return max(counts_E) * len(counts_E) / total if total else None


def overlap_at_k(first_E: Sequence[int], then_E: Sequence[int], k: int) -> float:
    """Share of the k experts most chosen in one text that are among the k of another."""
    return len({*popularity(first_E)[:k]} & {*popularity(then_E)[:k]}) / k
