"""Arms that will have no ratio to the baseline, because the plan chose for one of the two how tokens are decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engines.techniques.parameters import Composed
from harness.matrix import CellPlan
from harness.schema import EngineSpec
from results.swept import parts_of


def unlike_decoding(cells: Sequence[CellPlan], baseline: str | None) -> Iterator[str]:
    """A line for each arm. baseline: the plan's own. As in `results.report.standings`, else the reference is it, else
    the first arm. Of models whose layers the kernels do not know nothing is known here."""
    computed = [cell for cell in cells if not cell.is_modelled and cell.device.computes == "cpu"]
    found: dict[tuple[str, str], None] = {}
    for device, workload in dict.fromkeys((one.cell.device, one.cell.workload) for one in computed):
        own = [one for one in computed if (one.cell.device, one.cell.workload) == (device, workload)]
        base = _baseline_of(own, baseline)
        if not isinstance(base.engine, EngineSpec):
            continue
        for one in own:
            # Where the plan chose nothing the roads of the techniques differ, as their page says.
            if (
                isinstance(one.engine, EngineSpec)
                and "plan by plan" in (one.engine.decoding, base.engine.decoding)
                and _waits(one.engine) != _waits(base.engine)
            ):
                chosen, other = (one, base) if one.engine.decoding is not None else (base, one)
                found[chosen.cell.engine, other.cell.engine] = None
    for chosen_arm, other_arm in found:
        yield (
            f'engine {chosen_arm}: decoding = "plan by plan", and {other_arm} is decoded in one call of the kernels'
            " where they know the model's layers: times and joules of the two have no ratio then; give both the same"
            " decoding"
        )


def _baseline_of(cells: Sequence[CellPlan], name: str | None) -> CellPlan:
    named = [one for one in cells if name in (one.cell.engine, parts_of(one.cell.engine).name)]
    by_id = {one.cell.cell_id: one for one in cells}
    references = [by_id[one.cell.reference_id] for one in cells if one.cell.reference_id in by_id]
    return next(iter([*named, *references, *cells]))


def _waits(engine: EngineSpec) -> bool:
    """Whether each layer of a decoded token waits for its plan."""
    technique = engine.technique
    if engine.decoding is not None or not isinstance(technique, Composed):
        return True
    return technique.choices.decides_in_the_step(engine.expert_memory is not None)
