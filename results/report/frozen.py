"""What calibration froze for each arm, as it was kept with the run: capacities, graphs, and where experts lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from results.expert_heat import ExpertHeat
from results.records import Cell
from results.report.arms import Arm


@dataclass(frozen=True)
class Frozen:
    """layers: (layer, what was frozen for it, in words)."""

    arm: Arm
    workload: str
    device: str
    layers: tuple[tuple[int, str], ...]


def frozen_of(cells: tuple[Cell, ...], heats: Mapping[str, ExpertHeat], arms: Mapping[str, Arm]) -> list[Frozen]:
    """heats: of `results.heat.heat_of_cells`. Arms of which nothing was frozen are absent."""
    found = []
    for cell in cells:
        heat = heats.get(cell.cell_id)
        if heat is not None and (heat.capacities is not None or heat.hot is not None):
            told = tuple((layer, "; ".join(_words(heat, row))) for row, layer in enumerate(heat.layers))
            found.append(Frozen(arms[cell.cell_id], cell.workload, cell.device, told))
    return found


def _words(heat: ExpertHeat, row: int) -> Iterator[str]:
    if heat.capacities is not None:
        yield ", ".join(f"{rows} rows × {_experts(n)}" for rows, n in _counted(heat.capacities[row]))
    if heat.graphs is not None and max(heat.graphs[row]) > 1:
        yield "graphs of " + ", ".join(f"{size} (× {n})" for size, n in _counted(heat.graphs[row]))
    if heat.hot is not None:
        n_hot = len(heat.hot[row])
        yield f"{n_hot} on the NPU, {len(heat.chosen[row]) - n_hot} on the CPU"


def _counted(values: tuple[int, ...]) -> list[tuple[int, int]]:
    """(value, how many), the largest first."""
    return sorted(Counter(values).items(), reverse=True)


def _experts(n: int) -> str:
    return "1 expert" if n == 1 else f"{n} experts"
