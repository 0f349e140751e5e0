"""Which arm goes onto which device of a plan, and why another does not."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache

from pydantic import ValidationError

from devices.base import Unit
from devices.models.sheet import Kernel, Sheet, load_sheet
from engines.dispatch import FILE, way_to
from engines.kernels.compile import lacks_for
from engines.model.quantised import FORMS
from engines.pricing.schedule import unit_of_rest
from engines.techniques.context import ChunkPhase
from engines.techniques.parameters import Composed
from engines.techniques.place.hosts import GPU, HostsParameters
from engines.techniques.place.priced import PricedParameters
from engines.techniques.place.residency import ByCostParameters
from harness.device_specs import DeviceSpec, ModelledSpec
from harness.external.base import ExternalSpec
from harness.plan_values import shown
from harness.problems import nearest
from harness.schema import AnyEngineSpec, EngineSpec, TechniqueSpec

AS_PLANNED = "the plan puts it on other devices"
"""No surprise to whoever wrote the plan."""
PHASES: tuple[ChunkPhase, ChunkPhase] = ("prefill", "decode")
UNITS: tuple[Unit, ...] = ("gpu", "npu", "cpu")


def mismatch(engine: AnyEngineSpec, device: DeviceSpec, plays: bool = False) -> str | None:
    """Why an engine does not go onto a device, or None. A modelled device has a sheet. plays: no model runs, so that
    weights of any width can be priced."""
    if engine.devices is not None and device.name not in engine.devices:
        return AS_PLANNED
    if isinstance(engine, ExternalSpec):
        return _why_not_there(engine, device)
    if device.is_phone:
        return "joulebench's own engine computes on this host"
    keys = [f"quantise.{key}" for key in engine.quantise.rounding]
    told, leave = f"{' and '.join(keys)} {'are' if len(keys) > 1 else 'is'}", "them" if len(keys) > 1 else "it"
    if device.computes != "cpu" and keys:
        return f"{told} for this host's CPU; leave {leave} out"
    if not device.is_modelled:
        lacking = lacks_for(engine.quantise)
        if lacking is None:
            return None
        needing, reason = lacking
        return f"{reason}; leave {' and '.join(f'quantise.{key}' for key in needing)} out"
    if keys:
        return f"a modelled device prices arithmetic of two bytes a value, so {told} for the host"
    if engine.quantise.asked and not (plays or prices_as_held(device)):
        return "a modelled device prices weights of two bytes, so quantise is for the host"
    if engine.max_batch > 1:
        return "a modelled device prices one request at a time, so max_batch is for the host"
    if engine.cores is not None:
        return "cores are of this host, and a modelled device prices none of its time"
    return unpriced(engine.technique, sheet_of(device))


def _why_not_there(engine: ExternalSpec, device: DeviceSpec) -> str | None:
    """Of an engine that is not ours."""
    if device.is_modelled:
        return f"a sheet prices joulebench's own plans, and {engine.runs} computes in its own way"
    if device.tag not in engine.abilities.devices:
        return f"{engine.runs} goes onto {' and '.join(engine.abilities.devices)} only"
    if device.computes != "cpu":
        return f"{engine.runs} is asked on CPUs only"
    return None


def devices_problems(path: str, engine: AnyEngineSpec, names: Collection[str]) -> Iterator[str]:
    """names: of the plan's devices."""
    own = engine.devices or ()
    for name in dict.fromkeys(own):
        if name not in names:
            yield f"{path}.devices: the plan has no device {shown(name)}; {nearest(name, names)}"
        if own.count(name) > 1:
            yield f"{path}.devices: {shown(name)} is named {own.count(name)} times; name it once, it is measured once"


def placement(engine: EngineSpec) -> str:
    """Where a technique puts what, on a machine that has several units.

    "npu or cpu": prices and calibration decide, and may leave one of them idle.
    """
    technique = engine.technique
    if not isinstance(technique, Composed):
        return f"attention {technique.backbone}, experts {' and '.join(technique.units)}"
    joined = " or " if isinstance(technique.choices.place, PricedParameters) else " and "
    prefill, decode = (joined.join(technique.choices.units(phase)) for phase in PHASES)
    experts = prefill if prefill == decode else f"{prefill}, in decoding {decode}"
    return f"attention {technique.backbone}, experts {experts}"


def unpriced(technique: TechniqueSpec, sheet: Sheet, backbone: Unit | None = None) -> str | None:
    """Why a sheet cannot price a technique, or None. backbone: in the place of the technique's own."""
    if isinstance(technique, Composed) and (reason := _memories_apart(technique, sheet)) is not None:
        return reason
    if sheet.why_unpriced is not None:
        return f"its sheet {sheet.why_unpriced}"
    wanted: list[tuple[str, Kernel, Unit]] = [("attention", "attention", backbone or technique.backbone)]
    wanted += [("experts", "expert_ffn", unit) for unit in technique.units]
    if isinstance(technique, Composed) and technique.choices.move.moves_weights and not sheet.links:
        one_memory = "one memory for all units and " if sheet.memory is not None else ""
        return f"its weights travel, and its sheet has {one_memory}no links"
    for what, kernel, asked in wanted:
        unit = sheet.computing(asked)
        if unit not in sheet.units:
            return f"{what} would be on {unit}, and its sheet has {', '.join(sheet.units)}"
        if sheet.units[unit].price(kernel) is None:
            remedy = "" if backbone is not None else _to_priced_unit(technique, sheet)
            return f"{what} would be on {unit}, where its sheet prices no {what}{remedy}"
        if (why := sheet.units[unit].only_ratios) is not None:
            return f"{what} would be on {unit}, where its sheet prices no model, only ratios of operations: {why}"
    return _no_watts(technique, sheet) or _unreached(technique, sheet) or _unjoined(technique, sheet, backbone)


def _to_priced_unit(technique: TechniqueSpec, sheet: Sheet) -> str:
    """What to set so that the sheet prices all of it; nothing where no such keys are free."""
    for unit in UNITS:
        keys = [key for key in ("backbone", "unit") if getattr(technique, key, unit) != unit]
        try:
            moved = type(technique).model_validate(technique.model_dump() | dict.fromkeys(keys, unit))
        except ValidationError:
            continue
        if unpriced(moved, sheet, moved.backbone) is None:
            return "; set " + " and ".join(f'{key} = "{unit}"' for key in keys)
    return ""


def _no_watts(technique: TechniqueSpec, sheet: Sheet) -> str | None:
    """Why graphs cannot be placed by joules, or None. The sheet has the units."""
    place = technique.choices.place if isinstance(technique, Composed) else None
    if not isinstance(place, ByCostParameters) or place.objective != "joules":
        return None
    lacking = [unit for unit in map(sheet.computing, place.units) if sheet.units[unit].busy_w is None]
    return f"its experts are placed by joules, and its sheet states no power of {lacking[0]}" if lacking else None


def _unjoined(technique: TechniqueSpec, sheet: Sheet, backbone: Unit | None) -> str | None:
    """Why rows do not reach a unit or come back, or None. Units of one memory need no link."""
    if not isinstance(technique, Composed) or sheet.memory is not None:
        return None
    rest = unit_of_rest(sheet, backbone or technique.backbone)
    for unit in dict.fromkeys(map(sheet.computing, technique.units)):
        for source, target in ((rest, unit), (unit, rest)):
            if source != target and sheet.resource_between(source, target) is None:
                what = "rows" if source == rest else "results"
                return f"{what} of experts travel from {source} to {target}, and its sheet has no link between them"
    return None


def _unreached(technique: TechniqueSpec, sheet: Sheet) -> str | None:
    """Why weights do not reach a unit of which every layer is fetched, or None. Of others prices say what travels."""
    if not isinstance(technique, Composed) or not technique.choices.move.moves_all:
        return None
    for unit in technique.units:
        source, target = map(sheet.computing, way_to(unit))
        if source == target or sheet.resource_between(source, target) is not None:
            continue
        if source == FILE:
            return "its weights come from a file, and its sheet prices no disk"
        return f"its weights come from the memory of {source}, and its sheet has no link from there to {target}"
    return None


def _memories_apart(technique: Composed, sheet: Sheet) -> str | None:
    """Why units that compute each other's experts cannot on a sheet whose memories are apart, or None."""
    choices = technique.choices
    if not isinstance(choices.place, HostsParameters) or choices.move.moves_weights:
        return None
    for unit in choices.place.units[1:]:
        if (link := sheet.resource_between(unit, GPU)) is not None:
            return (
                f"{technique.technique} takes the gpu and {unit} to share a memory, and its sheet has link {link}"
                " between them; use monde, or fiddler, which fetch"
            )
    return None


def prices_as_held(device: DeviceSpec) -> bool:
    """Whether a device prices the weights of a model that runs as wide as the engine holds them: where its sheet was
    fitted here with weights of some form. On others they count two bytes a value, as in the sources of sheets; so they
    do where a GPU was fitted too, which held two bytes whatever the form was."""
    if not isinstance(device, ModelledSpec):
        return False
    sheet = sheet_of(device)
    return sheet.fitted_weights in FORMS and "gpu" not in sheet.fit_misses


def sheet_of(device: DeviceSpec) -> Sheet:
    """Of a modelled device. Raises `DeviceError`."""
    assert isinstance(device, ModelledSpec)
    return _sheet(device.sheet_ref)


_sheet = cache(load_sheet)
