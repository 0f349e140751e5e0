"""Checks of a plan against what it names: checkpoints, tokenizers, data, sheets. Nothing is run and nothing written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from devices.base import DeviceError
from engines.accelerator import find_backend
from engines.checkpoints import CheckpointFacts
from engines.errors import EngineError
from engines.placements import check as check_placement
from engines.placements import find_placement
from engines.schedule import priced_shape
from engines.weights import check_quantisation
from harness.plan import CellPlan, Plan, PlanError
from harness.schema import DeviceSpec
from harness.workbench import Workbench, technique_spec
from workloads.base import WorkloadError

NO_ENGINE_ON_PHONES = (
    "no engine of joulebench computes on a phone yet, and the reference engine computes on this host; take the device"
    " out of the plan, and measure what runs on the phone by itself with `joulebench record --device {device}`"
)


def preflight(plan: Plan, workbench: Workbench) -> Plan:
    """The plan with what only its checkpoints know (notes for the tables). Raises `PlanError` with all problems."""
    problems: list[str] = []
    facts: dict[str, CheckpointFacts | None] = {}
    for source in dict.fromkeys(c.model.source for c in plan.cells):
        try:
            facts[source] = workbench.facts(source)
        except EngineError as error:
            problems.append(f"model.source: {error}")
            facts[source] = None
    for device in dict.fromkeys(c.device for c in plan.cells):
        problems += _device_problems(device)
    empty: dict[str, list[str]] = {}
    for cell_plan in plan.cells:
        found = facts[cell_plan.model.source]
        problems += _engine_problems(cell_plan, found)
        if found is not None:
            problems += _workload_problems(cell_plan, found, workbench, empty)
    left_out = tuple(dict.fromkeys(reason for reasons in empty.values() for reason in reasons))
    if len(empty) == len(plan.cells) and not problems:
        problems = [f"the plan has no cell to run: {'; '.join(left_out)}"]
    if problems:
        raise PlanError(list(dict.fromkeys(problems)))
    cells = tuple(_noted(c, facts[c.model.source]) for c in plan.cells if c.cell.cell_id not in empty)
    return replace(plan, cells=cells, left_out=left_out)


def _noted(cell_plan: CellPlan, facts: CheckpointFacts | None) -> CellPlan:
    note = facts.note if facts else None
    return replace(cell_plan, cell=cell_plan.cell.model_copy(update={"model_note": note}))


def _backend_problems(device: DeviceSpec) -> Iterator[str]:
    if device.name != "host":
        yield f"device {device.name}: computes = {device.computes!r} is for the host; remove it"
        return
    try:
        find_backend(device.computes, None)
    except EngineError as error:
        yield f"device {device.name}: computes: {error}"


def _device_problems(device: DeviceSpec) -> Iterator[str]:
    if device.is_phone:
        yield f"device {device.name}: {NO_ENGINE_ON_PHONES.format(device=device.name)}"
    if device.computes != "cpu":
        yield from _backend_problems(device)
    if device.name != "host":
        return
    if device.recording is not None and not Path(device.recording).is_file():
        yield f"device {device.name}: recording: no file {device.recording}; paths start where joulebench is called"
    try:
        from devices.meters.modelled import load_watts_sheet

        load_watts_sheet(device.watts_sheet)
    except DeviceError as error:
        yield f"device {device.name}: watts_sheet: {error}"


def _engine_problems(cell_plan: CellPlan, facts: CheckpointFacts | None) -> Iterator[str]:
    where = f"engine {cell_plan.cell.engine}"
    technique = technique_spec(cell_plan.engine)
    reason = check_placement(find_placement(cell_plan.engine.placement), technique.static_shapes)
    if reason:
        yield f"{where}: {reason}"
    if facts is None:
        return
    if facts.config.moe is None and technique.calibration_prompts:
        yield f"{where}: technique {technique.technique} places experts, and {facts.source} is dense; use dropless"
    if cell_plan.engine.quantise.asked:
        try:
            check_quantisation(facts.config, cell_plan.engine.quantise)
        except EngineError as error:
            yield f"{where}: {error}"
    if cell_plan.device.priced_as:
        try:
            priced_shape(cell_plan.device.priced_as, facts.config)
        except EngineError as error:
            yield f"device {cell_plan.device.name}: priced_as: {error}"


def _workload_problems(
    cell_plan: CellPlan, facts: CheckpointFacts, workbench: Workbench, empty: dict[str, list[str]]
) -> Iterator[str]:
    """Builds the requests, which finds absent data, other schemas, and prompts that are too long; they are kept.

    empty: takes the cell and its workload's reasons where it has nothing to ask of this model.
    """
    technique = technique_spec(cell_plan.engine)
    wanted = technique.calibration_prompts
    max_length = facts.config.max_length
    try:
        workload = workbench.workload(cell_plan)
        if not workload.requests(facts.tokenizer, max_length):
            reasons = workload.notes or (f"no request fits the model's {max_length} tokens",)
            empty[cell_plan.cell.cell_id] = [f"{cell_plan.cell.workload}: {reason}" for reason in reasons]
        elif wanted and not workload.calibration_prompts(facts.tokenizer, max_length, wanted):
            yield (
                f"workload {cell_plan.cell.workload}: technique {technique.technique} is calibrated, and no item kept "
                f"for that fits the model's {max_length} tokens; give the data shorter items, lower max_new_tokens, or "
                "take a technique without calibration"
            )
    except WorkloadError as error:
        yield f"workload {cell_plan.cell.workload}: {error}"
