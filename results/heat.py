"""Expert heat of a run: how unevenly routers chose, layer by layer, and whether one text tells what another chooses.

Legend: E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

import pandas as pd

from results.cells import counted_by, trials_of
from results.expert_heat import Counts, ExpertHeat, LayerForetold
from results.popularity import imbalance, overlap_at_k
from results.records import PHASES, PRICED_AS, Cell, Phase
from results.runs import RunData

MOST_CHOSEN = (4, 8)
"""K of Overlap@K, where nobody says others: those of §5.8 of NPUMoE (000)."""
Foretold = tuple[LayerForetold | None, ...] | None
_FORETOLD_COLUMNS = (
    *("predicted_tokens", "recall", "rank_alignment"),
    *("cosine", "cosine_tokens", "profiled_cosine_q", "profiled_cosine_s"),
)
MOST_TEXTS = 40
"""Of a model, that are compared with each other: pairs are their square."""
_LAYER_COLUMNS = (
    "cell", "label", "device", "engine", "technique", "model", "workload", "layer", "windows", "chosen",
    "imbalance", "never_chosen", "profiled_imbalance", *_FORETOLD_COLUMNS, "method",
)  # fmt: skip
_EXPERT_COLUMNS = (
    "cell", "device", "engine", "technique", "model", "workload", "layer", "expert", "windows", "chosen", "decoded",
    "share", "profiled", "method",
)  # fmt: skip
_OVERLAP_COLUMNS = (
    "model",
    "chosen_first_in",
    "by",
    "then_in",
    "phase",
    "k",
    "chance",
    "overlap",
    "least",
    "most",
    "layers",
    "method",
    "reason",
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
    heats: of `heat_of_cells`. profiled_imbalance is missing for arms that were not calibrated. predicted_tokens,
    recall, rank_alignment (of each rank, the heaviest first) are of layers that were predicted. cosine: of what
    predictions were made from with the router's true input, mean of cosine_tokens; the other cosines are of the
    profile, and missing without one.
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
            **_foretold(heat, row),
            "method": counted_by(cell),
        }
        for cell in run.cells
        if (heat := heats.get(cell.cell_id)) is not None
        for row, layer in enumerate(heat.layers)
    ]
    return pd.DataFrame(rows, columns=list(_LAYER_COLUMNS)).astype(
        {"predicted_tokens": "Int64", "cosine_tokens": "Int64"}
    )


def experts_of(run: RunData, heats: Mapping[str, ExpertHeat]) -> pd.DataFrame:
    """One row for each cell, layer and expert: how often it was chosen, and its share of the layer's choices.

    chosen is added up over so many windows; decoded is its part in decoding, missing where that was not kept.
    heats: of `heat_of_cells`. profiled is missing for arms that were not calibrated.
    """
    rows = [
        (
            cell.cell_id, cell.device, cell.engine, cell.technique, cell.model, cell.workload, layer, expert,
            heat.windows, n, None if heat.decoded is None else heat.decoded[row][expert],
            n / (sum(heat.chosen[row]) or 1),
            None if heat.profiled is None else heat.profiled[row][expert], counted_by(cell),
        )
        for cell in run.cells
        if (heat := heats.get(cell.cell_id)) is not None
        for row, layer in enumerate(heat.layers)
        for expert, n in enumerate(heat.chosen[row])
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=list(_EXPERT_COLUMNS)).astype({"decoded": "Int64", "profiled": "Int64"})


class _Text(NamedTuple):
    """What was chosen in one text. by: in a window, or in the prompts of a calibration."""

    name: str
    by: Literal["window", "profile"]
    layers: tuple[int, ...]
    counts: Mapping[Phase, Counts]
    """By phase; of a profile its prompts, whichever phase they are compared with."""


def overlaps(run: RunData, heats: Mapping[str, ExpertHeat], most_chosen: Sequence[int] = MOST_CHOSEN) -> pd.DataFrame:
    """Overlap@K of what was chosen first with what was chosen then: median, least and most over the layers.

    First is a profile (of a workload's own calibration prompts, or the one that the plan names) or another workload's
    window; then is the window of each workload. So a profile's row of its own workload is the overlap within a data
    set, and the others are those across. phase: of the windows, each apart; "all" together in runs that did not keep
    them apart. A workload that decodes nothing has no row of decoding. most_chosen: each K. chance: K / E, what texts
    that share nothing have on average. Layers in which fewer than K experts were chosen in either text have no K
    most chosen, and are left out. overlap, least and most are missing where a layer has no more than K experts, so that
    all are the same for certain, and where no layer is left; reason says so.

    Of each workload the reference arm speaks, else the first that tells. A sweep over more than `MOST_TEXTS` workloads
    or profiles is told of the first ones.
    """
    rows: list[dict[str, Any]] = []
    for model in dict.fromkeys(routed_model(cell) for cell in run.cells):
        own = sorted((c for c in run.cells if routed_model(c) == model and c.cell_id in heats), key=_is_no_reference)
        windows: dict[str, _Text] = {}
        profiles: dict[str, _Text] = {}
        for cell in own:
            heat = heats[cell.cell_id]
            windows.setdefault(cell.workload, _Text(cell.workload, "window", heat.layers, _by_phase(heat)))
            if heat.profiled is not None:
                name = str(cell.engine_parameters.get("profile", cell.workload))
                prompts = dict.fromkeys(PHASES, heat.profiled)
                profiles.setdefault(name, _Text(name, "profile", heat.layers, prompts))
        seen = list(windows.values())[:MOST_TEXTS]
        for first in (*list(profiles.values())[:MOST_TEXTS], *seen):
            rows += [
                {"model": model} | _overlap(first, then, phase, k)
                for then in seen
                if first is not then and first.layers == then.layers
                for phase in then.counts
                if phase in first.counts
                for k in most_chosen
            ]
    return pd.DataFrame(rows, columns=list(_OVERLAP_COLUMNS))


def _by_phase(heat: ExpertHeat) -> dict[Phase, Counts]:
    """Of those in which any was chosen; all together where they were not kept apart."""
    if heat.decoded is None:
        return {"all": heat.chosen}
    found = {phase: heat.of(phase) for phase in PHASES if phase != "all"}
    return {phase: counts for phase, counts in found.items() if counts is not None and any(map(any, counts))}


def routed_model(cell: Cell) -> str:
    """Whose router chose: what a cell is priced as changes no choice."""
    return cell.model.partition(PRICED_AS)[0]


def _is_no_reference(cell: Cell) -> bool:
    return cell.reference_id != cell.cell_id


def _overlap(first: _Text, then: _Text, phase: Phase, k: int) -> dict[str, Any]:
    layers = list(zip(first.counts[phase], then.counts[phase], strict=True))
    n_experts = len(layers[0][0])
    found = [overlap_at_k(a_E, b_E, k) for a_E, b_E in layers if min(_n_chosen(a_E), _n_chosen(b_E)) >= k]
    reason = None
    if n_experts <= k:
        found, reason = [], f"a layer has {n_experts} experts, so all are among the {k} most chosen"
    elif not found:
        reason = f"in each layer fewer than {k} experts were chosen in one of the two"
    return {
        "chosen_first_in": first.name,
        "by": first.by,
        "then_in": then.name,
        "phase": phase,
        "k": k,
        "chance": min(k / n_experts, 1.0),
        "overlap": median(found) if found else None,
        "least": min(found, default=None),
        "most": max(found, default=None),
        "layers": len(found),
        "method": "derived" if found else "missing",
        "reason": reason,
    }


def _n_chosen(counts_E: Sequence[int]) -> int:
    return sum(n > 0 for n in counts_E)


def _added(a: ExpertHeat, b: ExpertHeat) -> ExpertHeat:
    chosen = _sums(a.chosen, b.chosen)
    decoded = None if a.decoded is None or b.decoded is None else _sums(a.decoded, b.decoded)
    both = {"chosen": chosen, "decoded": decoded, "foretold": _both(a.foretold, b.foretold)}
    return a.model_copy(update=both | {"windows": a.windows + b.windows})


def _both(a: Foretold, b: Foretold) -> Foretold:
    if a is None or b is None:
        return b if a is None else a
    return tuple(y if x is None else x if y is None else x.plus(y) for x, y in zip(a, b, strict=True))


def _foretold(heat: ExpertHeat, row: int) -> dict[str, Any]:
    told = None if heat.foretold is None else heat.foretold[row]
    if told is None:
        return dict.fromkeys(_FORETOLD_COLUMNS)
    shares = " ".join(f"{share:.4f}" for share in told.rank_alignment)
    profiled = told.profiled_cosine_q, told.profiled_cosine_s
    values = told.tokens, told.recall, shares, told.cosine, told.cosine_tokens, *profiled
    return dict(zip(_FORETOLD_COLUMNS, values, strict=True))


def _sums(a: Counts, b: Counts) -> Counts:
    return tuple(tuple(map(sum, zip(x_E, y_E, strict=True))) for x_E, y_E in zip(a, b, strict=True))
