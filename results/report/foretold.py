"""How well each layer's experts were predicted in each arm, for the page: a table an arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from results.expert_heat import ExpertHeat
from results.records import Cell
from results.report.arms import Arm


@dataclass(frozen=True)
class ForetoldTable:
    """header, rows: cells as text. A layer that is never predicted has no row."""

    arm: Arm
    workload: str
    device: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def foretold_of(
    cells: tuple[Cell, ...], heats: Mapping[str, ExpertHeat], arms: Mapping[str, Arm]
) -> list[ForetoldTable]:
    """heats: of `results.heat.heat_of_cells`. Arms in which nothing was predicted are absent."""
    found = []
    for cell in cells:
        heat = heats.get(cell.cell_id)
        if heat is None or heat.foretold is None:
            continue
        told = [(layer, one) for layer, one in zip(heat.layers, heat.foretold, strict=True) if one is not None]
        n_ranks = max((len(one.aligned) for _, one in told), default=0)
        is_compared = any(one.cosine is not None for _, one in told)
        has_profiled = any(one.profiled_cosine_q is not None or one.profiled_cosine_s is not None for _, one in told)
        header = ("layer", "tokens", "recall %", *(f"rank {k + 1} %" for k in range(n_ranks)))
        header += (f"cosine, of {max(one.cosine_tokens for _, one in told):,} tokens",) if is_compared else ()
        header += ("profile: cosine of q", "profile: cosine of s") if has_profiled else ()
        rows = []
        for layer, one in told:
            shares = (one.recall, *one.rank_alignment)
            row = (str(layer), f"{one.tokens:,}", *(f"{100 * share:.1f}" for share in shares))
            row += (_cosine(one.cosine),) if is_compared else ()
            row += (_cosine(one.profiled_cosine_q), _cosine(one.profiled_cosine_s)) if has_profiled else ()
            rows.append(row)
        found.append(ForetoldTable(arms[cell.cell_id], cell.workload, cell.device, header, tuple(rows)))
    return found


def _cosine(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
