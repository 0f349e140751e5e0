"""What calibration froze for each arm, as it was kept with the run: capacities, graphs, and where experts lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from results.expert_heat import ExpertHeat
from results.records import Cell
from results.report.arms import Arm

MOST_LINES = 12
"""Of one arm: layers that are alike share a line, and deep models have hundreds that are not."""


@dataclass(frozen=True)
class Frozen:
    """layers: ("layers 0 to 3, 5", what was frozen for prefill in each of them, in words). n_more: layers without a
    line. decoding: what decoding takes, in words; empty where a layout of its own decides."""

    arm: Arm
    workload: str
    device: str
    layers: tuple[tuple[str, str], ...]
    n_more: int
    decoding: str


def frozen_of(cells: tuple[Cell, ...], heats: Mapping[str, ExpertHeat], arms: Mapping[str, Arm]) -> list[Frozen]:
    """heats: of `results.heat.heat_of_cells`. Arms of which nothing was frozen are absent."""
    found = []
    for cell in cells:
        heat = heats.get(cell.cell_id)
        if heat is not None and (heat.capacities is not None or heat.hot is not None):
            alike: dict[str, list[int]] = {}
            for row, layer in enumerate(heat.layers):
                alike.setdefault("; ".join(_words(heat, row)), []).append(layer)
            told = tuple((_layers(layers), words) for words, layers in alike.items())
            n_more = sum(map(len, list(alike.values())[MOST_LINES:]))
            decoding = _decoding(cell.technique_parameters)
            found.append(Frozen(arms[cell.cell_id], cell.workload, cell.device, told[:MOST_LINES], n_more, decoding))
    return found


def _layers(layers: Sequence[int]) -> str:
    """ "layers 0 to 3, 5"."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], layer]
        else:
            spans.append([layer])
    told = (str(span[0]) if len(span) == 1 else f"{span[0]} to {span[1]}" for span in spans)
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(told)}"


def _decoding(parameters: Mapping[str, Any]) -> str:
    """parameters: of a technique, flat or of each decision."""
    own = parameters.get("decode") or parameters.get("layout") or parameters
    if not isinstance(own, Mapping) or "decode_graphs" not in own:
        return ""
    return {
        "same": "the same graphs",
        "single": f"a graph of {own.get('decode_rows')} rows for each chosen expert",
        "cpu": "exact rows on the CPU",
    }.get(str(own["decode_graphs"]), "")


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
