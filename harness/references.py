"""Which arm the others are compared with: the same model asked the same, with nothing left out and nothing narrowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engines.model.quantised import AS_THE_MODEL
from harness.matrix import CellPlan
from harness.schema import TECHNIQUE, EngineSpec

WIDEST_FIRST = ("float32", "bfloat16", "float16")


def with_references(cells: Sequence[CellPlan]) -> list[CellPlan]:
    """The cells, each naming the one that its answers are compared with (`Cell.reference_id`).

    The oracle where the plan has one, else the first lossless arm; of several the widest, and on the same device before
    another (what a modelled device answers is computed on the host).
    """
    best: dict[tuple[str, ...], CellPlan] = {}
    for plan in filter(is_lossless, cells):
        for alike in (_asked(plan), (*_asked(plan), plan.cell.device)):
            if alike not in best or _rank(plan) < _rank(best[alike]):
                best[alike] = plan
    found = []
    for own in cells:
        reference = best.get((*_asked(own), own.cell.device)) or best.get(_asked(own))
        reference_id = None if reference is None else reference.cell.cell_id
        cell = own.cell.model_copy(update={"reference_id": reference_id})
        found.append(replace(own, cell=cell, reference=reference))
    return found


def _asked(plan: CellPlan) -> tuple[str, ...]:
    return plan.cell.workload, plan.model.source


def _rank(plan: CellPlan) -> tuple[bool, bool, int]:
    """The least is the best to compare with."""
    return plan.is_modelled, plan.cell.technique != "oracle", WIDEST_FIRST.index(plan.model.dtype)


def is_lossless(plan: CellPlan) -> bool:
    """Whether technique and weights leave the model's answers as they are: no matrix in another form than fp32's."""
    if not isinstance(plan.engine, EngineSpec):
        return False
    quantise = plan.engine.quantise
    return set(quantise.asked.values()) <= {"fp32"} and not quantise.rounds and plan.engine.technique.lossless


def as_lossless(plan: CellPlan) -> CellPlan:
    """The cell as it would be without its technique and its narrow weights, for a plan that has no such arm."""
    dropless = TECHNIQUE.read({"name": "dropless"})
    if isinstance(plan.engine, EngineSpec):
        engine = plan.engine.model_copy(update={"technique": dropless, "quantise": AS_THE_MODEL})
    else:
        engine = EngineSpec(name=plan.engine.name, technique=dropless)
    cell = plan.cell.model_copy(update={"cell_id": f"{plan.model.source}, {plan.model.dtype}, lossless"})
    return replace(plan, engine=engine, cell=cell)
