"""Which technique goes onto which machine, and why another does not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from devices.base import Unit
from devices.models.sheet import Sheet
from engines.errors import EngineError
from engines.pricing.room import lacks_room
from engines.pricing.shapes import ModelShape
from engines.techniques.move.fetch import FetchParameters
from engines.techniques.parameters import Composed, CustomParameters
from engines.techniques.place.units import OneUnitParameters
from engines.techniques.presets import PRESETS, preset_parameters
from harness.combinations import unpriced

COMPUTING = ("gpu", "npu", "cpu")
"""Units that a technique which names its unit can be put on."""
SAME_AS = {("dropless", "gpu"): "gpu", ("dropless", "cpu"): "coreml-cpu"}
"""(technique, unit) that another name stands for."""
ON_GPU = "moe-ondemand"
"""Loads experts from a file into the memory of a CPU; where a machine has a GPU and a link, from host memory into the
GPU's, as source 001 has it."""
FILLED = 0.9
"""Of the memory of a GPU, after attention, head and what all tokens pass: what experts that stay there may take. Room
for activations and keys is left beside them."""


@dataclass(frozen=True)
class Arm:
    """A technique on a machine, or why it is not there. changed: parameters that are not the technique's own."""

    technique: str
    changed: tuple[tuple[str, str | int], ...] = ()
    parameters: Composed | None = None
    why_not: str | None = None
    ranks: int = 1
    backbone: Unit | None = None
    """None: the technique's."""
    expert_slots: int | None = None
    """As of `Cell`."""

    @property
    def name(self) -> str:
        told = [f"{key}={value}" for key, value in self.changed]
        return f"{self.technique} ({', '.join(told)})" if told else self.technique


def arms_on(
    sheet: Sheet, shape: ModelShape, techniques: tuple[str, ...] = tuple(PRESETS), cached_tokens: int = 0
) -> list[Arm]:
    """In the order of the list of techniques. A technique that names its unit stands on each unit that can take it; one
    that the machine cannot take at all stands there once, with the reason. cached_tokens: whose keys and values lie in
    a GPU beside the experts."""
    found: list[Arm] = []
    for name in techniques:
        own = list(_arms_of(name, sheet, shape, cached_tokens))
        fits = [arm for arm in own if arm.why_not is None]
        found += fits or [_with_other_name(own[0], sheet)]
    return found


def _with_other_name(arm: Arm, sheet: Sheet) -> Arm:
    """Told as which technique it stands on another unit: here nobody can set its unit."""
    others = SAME_AS.items() if arm.parameters is not None else ()
    for (name, unit), other in others:
        if name == arm.technique and unit in sheet.units and _named(other, {}, sheet).why_not is None:
            return replace(arm, why_not=f"{arm.why_not}; on its {unit} it is the technique {other}")
    return arm


def _arms_of(name: str, sheet: Sheet, shape: ModelShape, cached_tokens: int) -> Iterator[Arm]:
    if sheet.only_for is not None:
        yield Arm(name, why_not=f"its sheet is good for {sheet.only_for} alone")
        return
    fields = preset_parameters(name).model_fields
    has_link = "gpu" in sheet.units and sheet.resource_between("cpu", "gpu") is not None
    keeps = PRESETS[name].choices.move.loads_from_file
    n_experts = shape.n_sparse_layers * shape.n_experts
    if keeps and has_link and 0 < n_experts == _gpu_slots(sheet, shape, cached_tokens):
        yield Arm(name, why_not="all experts fit in the memory of its GPU, so nothing is left to load")
        return
    if name == ON_GPU and has_link:
        n = _gpu_slots(sheet, shape, cached_tokens)
        fetch = FetchParameters(gpu_slots=n, stay="first") if n else FetchParameters()
        custom = CustomParameters(backbone="gpu", place=OneUnitParameters(unit="gpu"), move=fetch)
        yield _arm(name, {"unit": "gpu", "gpu_slots": n}, custom, sheet)
        return
    given: dict[str, str | int] = {}
    n_ndps = sum(unit.startswith("ndp:") for unit in sheet.units)
    if "ndps" in fields and name != "duplex" and n_ndps not in (0, fields["ndps"].default):
        given["ndps"] = n_ndps
    if "gpu_slots" in fields and has_link and (slots := _gpu_slots(sheet, shape, cached_tokens)):
        given["gpu_slots"] = slots
    slots = min(_gpu_slots(sheet, shape, cached_tokens) // max(shape.n_sparse_layers, 1), shape.n_experts)
    if keeps and shape.n_experts:
        if has_link and slots:
            yield _named(name, {"unit": "gpu", "backbone": "gpu", "slots": slots}, sheet)
        given["slots"] = max(shape.n_experts // 2, 1)
    elif "slots" in fields and n_ndps and sheet.capacity_bytes("gpu") is not None and shape.n_sparse_layers:
        arm = _named(name, {**given, "slots": max(slots, 1)}, sheet)
        if not slots and arm.parameters is not None and lacks_room(arm.parameters.units, True, sheet, shape) is None:
            arm = replace(arm, why_not="the memory of its GPU does not hold one expert of each layer")
        yield arm
        return
    arm = _named(name, given, sheet)
    if has_link and PRESETS[name].choices.move.kind == "two_buffers":
        arm = _with_buffers(arm, shape, _gpu_slots(sheet, shape, cached_tokens))
    yield arm
    if "slots" in given:
        return
    if "unit" not in fields or "backbone" not in fields:
        return
    for unit in COMPUTING:
        if unit in sheet.units and unit != fields["unit"].default and (name, unit) not in SAME_AS:
            yield _named(name, {**given, "unit": unit, "backbone": unit}, sheet)


def _named(name: str, given: Mapping[str, str | int], sheet: Sheet) -> Arm:
    try:
        parameters = preset_parameters(name).model_validate(given)
    except ValueError as error:
        return Arm(name, _told(given), why_not=_first_words(error))
    return _arm(name, given, parameters, sheet)


def _with_buffers(arm: Arm, shape: ModelShape, n_fit: int) -> Arm:
    """With as many experts as fit beside what stays, where two layers of them do not."""
    if not 2 * shape.top_k <= n_fit < 2 * shape.n_experts:
        return arm
    told = ("expert_memory", math.ceil(n_fit * shape.expert_bytes))
    return replace(arm, changed=(*arm.changed, told), expert_slots=n_fit)


def _arm(name: str, given: Mapping[str, Any], parameters: Composed, sheet: Sheet) -> Arm:
    takes_ranks = any(unit.startswith("rank:") for unit in parameters.units)
    ranks = sum(unit.startswith("rank:") for unit in sheet.units) if takes_ranks else 1
    # What every token passes through lies on each rank; it is priced on the first.
    backbone = "rank:0" if takes_ranks and ranks else None
    why_not = _absent(parameters, sheet, backbone) or unpriced(parameters, sheet, backbone or parameters.backbone)
    return Arm(name, _told(given), parameters, why_not, max(ranks, 1), backbone)


def _absent(parameters: Composed, sheet: Sheet, backbone: Unit | None) -> str | None:
    """Which unit the machine lacks; None where it has all. One that stands in computes plans that are made for another
    machine: as an arm of this one it would cost no copies, and tell of a unit that nobody has."""
    for unit in (backbone or parameters.backbone, *parameters.units):
        if unit in sheet.stands_in:
            return f"it is made for {unit}, and this machine has {', '.join(sheet.units)}"
    return None


def _told(given: Mapping[str, str | int]) -> tuple[tuple[str, str | int], ...]:
    return tuple((key, value) for key, value in given.items() if key != "backbone")


def _first_words(error: ValueError) -> str:
    errors = getattr(error, "errors", None)
    return str(errors()[0]["msg"]) if errors is not None else str(error)


def _gpu_slots(sheet: Sheet, shape: ModelShape, cached_tokens: int) -> int:
    """Experts that fit in the GPU's memory beside what every token needs; 0 where nobody states that memory, and no
    more than there are. Fewer where the tenth that is left free does not hold keys and values, and one token's experts,
    for which a cache may have slots that all layers share."""
    capacity_bytes = sheet.capacity_bytes("gpu")
    if capacity_bytes is None or shape.n_experts == 0:
        return 0
    try:
        n_layers, routed_bytes = shape.n_sparse_layers, shape.routed_bytes
    except EngineError:
        return 0
    n_all, n_dense = n_layers * shape.n_experts, shape.n_layers - n_layers
    every_token_bytes = (
        shape.n_layers * shape.attention_bytes
        + n_layers * shape.dense_bytes(shape.shared_width)
        + n_dense * shape.dense_bytes(shape.dense_width)
        + shape.head_bytes * (1 if shape.ties_embedding else 2)
    )
    expert_bytes = routed_bytes / n_all
    cached_bytes = cached_tokens * shape.n_layers * shape.cached_values * shape.bytes_per_value
    beside_cache = capacity_bytes - shape.others_bytes - cached_bytes - shape.top_k * expert_bytes
    n_fit = int(min(FILLED * capacity_bytes - every_token_bytes, beside_cache) // expert_bytes)
    return min(max(n_fit, 0), n_all)
