"""Expert heat of a run: how unevenly routers chose, layer by layer, and whether one text tells what another chooses.

Legend: E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any, Literal, NamedTuple

import pandas as pd

from results.cells import trials_of
from results.popularity import imbalance, overlap_at_k
from results.records import PRICED_AS, Cell, ExpertHeat, Method
from results.runs import RunData

COUNTED: Method = "measured"
"""Choices are those of the model that ran on the host, also where a sheet priced what followed from them."""
MOST_CHOSEN = 4
"""K of Overlap@K, where nobody says another."""
MOST_TEXTS = 40
"""Of a model, that are compared with each other: pairs are their square."""
_LAYER_COLUMNS = (
    "cell", "label", "device", "engine", "technique", "model", "workload", "layer", "windows", "chosen",
    "imbalance", "never_chosen", "profiled_imbalance", "method",
)  # fmt: skip
_EXPERT_COLUMNS = (
    "cell", "device", "engine", "technique", "model", "workload", "layer", "expert", "windows", "chosen", "share",
    "profiled", "method",
)  # fmt: skip
_OVERLAP_COLUMNS = (
    "model",
    "chosen_first_in",
    "by",
    "then_in",
    "k",
    "chance",
    "overlap",
    "least",
    "most",
    "layers",
    "method",
)


def heat_of_cells(run: RunData) -> dict[str, ExpertHeat]:
    """Choices of all trials of a cell, added up; cells of which none was kept are absent.

    Marked ones too: what disturbs times and joules makes no router choose otherwise.
    """
    found: dict[str, ExpertHeat] = {}
    for cell_id, trials in trials_of(run).items():
        for trial in trials:
            heat = run.load_heat(trial.trial_id)
            if heat is not None:
                found[cell_id] = _added(found[cell_id], heat) if cell_id in found else heat
    return found


def layers_of(run: RunData, heats: Mapping[str, ExpertHeat]) -> pd.DataFrame:
    """One row for each cell and layer of experts: how unevenly its router chose, and did on the prompts before.

    chosen is added up over so many windows: every repeat asks the same.
    heats: of `heat_of_cells`. profiled_imbalance is missing for arms that were not calibrated.
    """
    rows = [
        {
            "cell": cell.cell_id,
            "label": cell.label,
            "device": cell.device,
            "engine": cell.engine,
            "technique": cell.technique,
            "model": cell.model,
            "workload": cell.workload,
            "layer": layer,
            "windows": heat.windows,
            "chosen": sum(heat.chosen[row]),
            "imbalance": imbalance(heat.chosen[row]),
            "never_chosen": heat.chosen[row].count(0),
            "profiled_imbalance": None if heat.profiled is None else imbalance(heat.profiled[row]),
            "method": COUNTED,
        }
        for cell in run.cells
        if (heat := heats.get(cell.cell_id)) is not None
        for row, layer in enumerate(heat.layers)
    ]
    return pd.DataFrame(rows, columns=list(_LAYER_COLUMNS))


def experts_of(run: RunData, heats: Mapping[str, ExpertHeat]) -> pd.DataFrame:
    """One row for each cell, layer and expert: how often it was chosen, and its share of the layer's choices.

    chosen is added up over so many windows.
    heats: of `heat_of_cells`. profiled is missing for arms that were not calibrated.
    """
    rows = [
        (
            cell.cell_id, cell.device, cell.engine, cell.technique, cell.model, cell.workload, layer, expert,
            heat.windows, n, n / (sum(heat.chosen[row]) or 1),
            None if heat.profiled is None else heat.profiled[row][expert], COUNTED,
        )
        for cell in run.cells
        if (heat := heats.get(cell.cell_id)) is not None
        for row, layer in enumerate(heat.layers)
        for expert, n in enumerate(heat.chosen[row])
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=list(_EXPERT_COLUMNS)).astype({"profiled": "Int64"})


class _Text(NamedTuple):
    """What was chosen in one text. by: in a window, or in the prompts of a calibration."""

    name: str
    by: Literal["window", "profile"]
    layers: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]


def overlaps(run: RunData, heats: Mapping[str, ExpertHeat], k: int = MOST_CHOSEN) -> pd.DataFrame:
    """Overlap@K of what was chosen first with what was chosen then: median, least and most over the layers.

    First is a profile (of a workload's own calibration prompts, or the one that the plan names) or another workload's
    window; then is the window of each workload. chance: K / E, what texts that share nothing have on average: 1
    where a layer has no more than K experts, so that the overlap tells nothing. So a profile's row of its own
    workload is the overlap within a data set, and the others are those across. Of each workload the reference arm
    speaks, else the first that tells. A sweep over more than `MOST_TEXTS` workloads or profiles is told of the
    first ones.
    """
    rows: list[dict[str, Any]] = []
    for model in dict.fromkeys(routed_model(cell) for cell in run.cells):
        own = sorted((c for c in run.cells if routed_model(c) == model and c.cell_id in heats), key=_is_no_reference)
        windows: dict[str, _Text] = {}
        profiles: dict[str, _Text] = {}
        for cell in own:
            heat = heats[cell.cell_id]
            windows.setdefault(cell.workload, _Text(cell.workload, "window", heat.layers, heat.chosen))
            if heat.profiled is not None:
                name = str(cell.engine_parameters.get("profile", cell.workload))
                profiles.setdefault(name, _Text(name, "profile", heat.layers, heat.profiled))
        seen = list(windows.values())[:MOST_TEXTS]
        for first in (*list(profiles.values())[:MOST_TEXTS], *seen):
            rows += [
                {"model": model} | _overlap(first, then, k)
                for then in seen
                if first is not then and first.layers == then.layers
            ]
    return pd.DataFrame(rows, columns=list(_OVERLAP_COLUMNS))


def routed_model(cell: Cell) -> str:
    """Whose router chose: what a cell is priced as changes no choice."""
    return cell.model.partition(PRICED_AS)[0]


def _is_no_reference(cell: Cell) -> bool:
    return cell.reference_id != cell.cell_id


def _overlap(first: _Text, then: _Text, k: int) -> dict[str, Any]:
    k = min(k, len(then.counts[0]))
    found = [overlap_at_k(a_E, b_E, k) for a_E, b_E in zip(first.counts, then.counts, strict=True)]
    return {
        "chosen_first_in": first.name,
        "by": first.by,
        "then_in": then.name,
        "k": k,
        "chance": k / len(then.counts[0]),
        "overlap": median(found),
        "least": min(found),
        "most": max(found),
        "layers": len(found),
        "method": "derived",
    }


def _added(a: ExpertHeat, b: ExpertHeat) -> ExpertHeat:
    chosen = tuple(tuple(map(sum, zip(x_E, y_E, strict=True))) for x_E, y_E in zip(a.chosen, b.chosen, strict=True))
    return a.model_copy(update={"chosen": chosen, "windows": a.windows + b.windows})
