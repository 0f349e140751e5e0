"""Checks of a plan against what it names: checkpoints, tokenizers, data, sheets. Nothing is run and nothing written."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from devices.base import DeviceError
from devices.clock import MonotonicClock
from engines.errors import EngineError, lines_of
from engines.model.accelerator import find_backend
from engines.model.checkpoints import CheckpointFacts
from engines.pricing.shapes import NAMED_SHAPES, priced_shape
from engines.profile_files import DIGITS, digest_of_profile, profile_folder
from harness.catalog import METERS
from harness.combinations import mismatch
from harness.context_checks import context_warnings
from harness.decoding_warnings import unlike_decoding
from harness.device_problems import blind_warning
from harness.device_specs import DeviceSpec, HostSpec
from harness.engine_problems import (
    calibrated,
    engine_problems,
    engine_problems_with_model,
    graph_problems,
    hybrid_warning,
    last_layer_problems,
    other_core_problems,
)
from harness.external.base import ExternalSpec
from harness.external.catalog import EXTERNAL
from harness.external.coreml import CoremlSpec
from harness.external_parts import external_problems, noted
from harness.fitted_sheets import fit_warning_with_model
from harness.matrix import CellPlan, Part, external_engines, own_engines
from harness.memory_checks import (
    kept_problems,
    moving_problems,
    rate_warning,
    slot_problems,
    together_warning,
    unlimited_warning,
    untried_warning,
    weights_warning,
)
from harness.model_specs import ModelSpec, PlayedModelSpec
from harness.plan import Draft, Plan, PlanError
from harness.plan_values import with_short_values
from harness.played_checks import played_problems
from harness.rank_problems import (
    crowded_warning,
    launch_problems,
    rank_problems,
    rank_warning,
)
from harness.references import with_references
from harness.run_parts import RunParts
from harness.schema import TrialProtocol
from harness.technique_problems import (
    name_problems,
    padding_warning,
    room_warnings,
    size_problems,
    tier_warning,
    unread_problems,
)
from harness.unheeded import (
    sample_warnings,
    unheeded_attention,
    unheeded_decoding,
    unheeded_forms,
    unheeded_of_engine,
    unheeded_of_protocol,
    unheeded_threads,
    warmup_warnings,
)
from harness.unheeded_sheets import unheeded_of_device
from harness.workload_problems import all_workload_problems
from results.records import NO_MODEL

NO_ENGINE_ON_PHONES = (
    "no engine of the plan goes onto it, and joulebench's own computes on this host; name one that does, such as"
    ' runs = "{runs}" (`joulebench list engines` has all), or take the device out, and measure what runs there by'
    " itself with `joulebench record --device {device}`"
)


def preflight(draft: Draft, run_parts: RunParts) -> Plan:
    """The plan with what only its checkpoints know (notes for the tables).

    Each part is looked at once, in however many cells it stands, and beside problems of other parts. Raises `PlanError`
    with all problems, those of the draft first.
    """
    problems = list(draft.problems)
    warnings: list[str | None] = [*draft.plan.warnings]
    named, facts = draft.named, {}
    computed = [model.spec for model in named.models if isinstance(model.spec, ModelSpec)]
    for source in dict.fromkeys(model.source for model in computed):
        try:
            facts[source] = run_parts.facts(source)
        except EngineError as error:
            problems += [f"model.source: {problem}" for problem in lines_of(error)]
    devices = list(dict.fromkeys(device.spec for device in named.devices))
    engines, others = own_engines(named.engines), external_engines(named.engines)
    warnings += unheeded_of_protocol(draft.plan.protocol, devices)
    for device in devices:
        problems += _device_problems(device, others, _runs_unread(draft, others))
        warnings += [*unheeded_of_device(device), blind_warning(device, engines, others)]
    for other in others:
        problems += [*external_problems(other), *other_core_problems(other, devices)]
        warnings.append(crowded_warning(other, devices))
    for engine in engines:
        problems += [*engine_problems(engine, bool(computed)), *name_problems(engine)]
        if not draft.is_part:
            problems += unread_problems(engine, named.devices)
        problems += moving_problems(engine, devices, bool(computed))
        problems += [*rank_problems(engine, devices), *last_layer_problems(engine, devices)]
        crowded = [rank_warning(engine), crowded_warning(engine, devices)] if computed else []
        warnings += [*crowded, untried_warning(engine, devices), unheeded_decoding(engine, devices)]
        warnings += [unheeded_threads(engine, devices) if computed else None, unheeded_forms(engine, computed)]
    if run_parts.meeting is not None:
        problems += launch_problems(engines, run_parts.meeting.n_ranks)
    empty: dict[tuple[str, str], tuple[str, ...]] = {}
    for found in facts.values():
        for engine in engines:
            problems += engine_problems_with_model(engine, found, run_parts)
            warnings += [padding_warning(engine, found), tier_warning(engine, found), unheeded_of_engine(engine, found)]
            warnings.append(hybrid_warning(engine, found, run_parts))
            for model in computed:
                if model.source == found.source:
                    problems += size_problems(engine, model, named.devices, found)
                    problems += kept_problems(engine, model, named.devices, found)
                    warnings += room_warnings(engine, model, named.devices, found)
                    warnings += [fit_warning_with_model(device, engine.spec, model, found) for device in devices]
                    warnings.append(unheeded_attention(engine, model))
                    problems += slot_problems(engine, model, devices, found)
                    warnings += [rate_warning(engine, model, found), unlimited_warning(engine, model, found)]
                    warnings.append(weights_warning(engine, model, devices, found))
        warnings += [together_warning(engines, m, devices, found) for m in computed if m.source == found.source]
        for device in devices:
            problems += _pricing_problems(device, found)
        for other in others:
            if isinstance(other.spec, CoremlSpec):
                problems += graph_problems(other.label, other.spec, found, run_parts)
        techniques = calibrated(engines)
        problems += all_workload_problems(named.workloads, found, techniques, run_parts, empty)
        warnings += context_warnings(devices, named.workloads, found, run_parts)
        warnings += warmup_warnings(draft.plan.protocol, named.workloads, found, run_parts)
        warnings += sample_warnings(named.workloads, found, run_parts)
    found_of_played = played_problems(named, run_parts)
    problems += found_of_played.problems
    warnings += found_of_played.warnings
    empty |= found_of_played.empty
    if problems:
        raise PlanError([with_short_values(problem, draft.plan.raw) for problem in dict.fromkeys(problems)])
    plan = draft.sound()
    left_out = tuple(dict.fromkeys(itertools.chain.from_iterable(empty.values())))
    asking = [c for c in plan.cells if (c.cell.workload, c.model.source) not in empty]
    cells = with_references([_noted(c, facts, run_parts) for c in asking])
    if not cells:
        raise PlanError([f"the plan has no cell to run: {'; '.join(left_out)}"])
    warnings += unlike_decoding(cells, plan.raw.get("baseline"))
    told = dict.fromkeys(warning for warning in warnings if warning is not None)
    return replace(plan, cells=tuple(cells), left_out=left_out, warnings=tuple(told))


def _noted(cell_plan: CellPlan, all_facts: dict[str, CheckpointFacts], run_parts: RunParts) -> CellPlan:
    """With what only files say: the model's note, that it has LongRoPE, whose factors the engine chooses, and the
    digest of the profile, which makes it another cell."""
    from engines.model.rope_config import LongScaling

    if isinstance(cell_plan.model, PlayedModelSpec):
        model = run_parts.played(cell_plan.model).named(cell_plan.cell.model)
        return replace(cell_plan, cell=cell_plan.cell.model_copy(update={"model": model, "model_note": NO_MODEL}))
    facts, said = all_facts[cell_plan.model.source], dict(cell_plan.cell.engine_parameters)
    if isinstance(cell_plan.engine, ExternalSpec):
        told = {"model_note": facts.note, **noted(cell_plan, cell_plan.engine)}
        return replace(cell_plan, cell=cell_plan.cell.model_copy(update=told))
    if isinstance(facts.config.rope.scaling, LongScaling):
        said["long_rope"] = cell_plan.engine.long_rope
    cell_id = cell_plan.cell.cell_id
    if cell_plan.engine.profile is not None:
        digest = digest_of_profile(profile_folder(cell_plan.engine.profile))
        said["profile"] = f"{cell_plan.engine.profile} (sha256 {digest[:DIGITS]})"
        cell_id = hashlib.sha256(f"{cell_id} {digest}".encode()).hexdigest()[: len(cell_id)]
    known = {"cell_id": cell_id, "model_note": facts.note, "engine_parameters": said}
    return replace(cell_plan, cell=cell_plan.cell.model_copy(update=known))


def _backend_problems(device: HostSpec) -> Iterator[str]:
    try:
        find_backend(device.computes, None)
    except EngineError as error:
        yield f"device {device.name}: computes: {error}"


def _runs_unread(draft: Draft, others: Sequence[Part[ExternalSpec]]) -> list[type[ExternalSpec]]:
    """Kinds of other engines that the plan names, and that could not be read, which is told by itself."""
    entries = draft.plan.raw.get("engine")
    named = {str(one.get("runs")) for one in entries if isinstance(one, dict)} if isinstance(entries, list) else set()
    return [EXTERNAL[runs] for runs in sorted(named & EXTERNAL.keys() - {other.spec.tag for other in others})]


def _device_problems(
    device: DeviceSpec, others: Sequence[Part[ExternalSpec]], unread: Sequence[type[ExternalSpec]]
) -> Iterator[str]:
    """others: engines that are not ours; some run on phones. unread: kinds of more of them."""
    fits = any(device.tag in kind.abilities.devices for kind in unread)
    if device.is_phone and not fits and all(mismatch(other.spec, device) is not None for other in others):
        runs = next(name for name, spec in EXTERNAL.items() if device.tag in spec.abilities.devices)
        yield f"device {device.name}: {NO_ENGINE_ON_PHONES.format(device=device.name, runs=runs)}"
    if not isinstance(device, HostSpec) or device.name != "host":
        return
    if device.computes != "cpu":
        yield from _backend_problems(device)
    if device.recording is not None:
        yield from _recording_problems(device, device.recording)
    try:
        from devices.meters.modelled import load_watts_sheet

        load_watts_sheet(device.watts_sheet)
    except DeviceError as error:
        yield f"device {device.name}: watts_sheet: {error}"


def _recording_problems(device: HostSpec, recording: str) -> Iterator[str]:
    """Reads it as the run will."""
    try:
        is_there = Path(recording).is_file()
    except OSError as error:  # a name that is too long, a folder that may not be read
        yield f"device {device.name}: recording: {recording} cannot be read ({error.strerror})"
        return
    if not is_there:
        yield f"device {device.name}: recording: no file {recording}; paths start where joulebench is called"
        return
    meter = METERS["replay"].build(TrialProtocol().sample_interval_s, MonotonicClock(), device)
    try:
        meter.open()
    except DeviceError as error:
        yield f"device {device.name}: recording: {error}"
    finally:
        meter.close()


def _pricing_problems(device: DeviceSpec, facts: CheckpointFacts) -> Iterator[str]:
    if device.priced_as in NAMED_SHAPES:
        try:
            priced_shape(device.priced_as, facts.config)
        except EngineError as error:
            yield f"device {device.name}: priced_as: {error}"
