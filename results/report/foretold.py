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
        has_cosines = any(one.profiled_cosine_q is not None or one.profiled_cosine_s is not None for _, one in told)
        header = ("layer", "tokens", "recall %", *(f"rank {k + 1} %" for k in range(n_ranks)))
        header += ("cosine of q", "cosine of s") if has_cosines else ()
        rows = []
        for layer, one in told:
            shares = (one.recall, *one.rank_alignment)
            row = (str(layer), f"{one.tokens:,}", *(f"{100 * share:.1f}" for share in shares))
            cosines = one.profiled_cosine_q, one.profiled_cosine_s
            row += tuple("" if c is None else f"{c:.3f}" for c in cosines) if has_cosines else ()
            rows.append(row)
        found.append(ForetoldTable(arms[cell.cell_id], cell.workload, cell.device, header, tuple(rows)))
    return found
