"""Problems of a technique's parameters with the devices and the models of a plan."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

from devices.models.sheet import Sheet, available_sheets, load_sheet
from engines.errors import EngineError, NoRoomError
from engines.model.checkpoints import CheckpointFacts
from engines.pricing.costs import costs_of, sizes_of_named
from engines.pricing.room import kept_of_shape, kept_on_gpu, lacks_room
from engines.pricing.shapes import NAMED_SHAPES, ModelShape, own_shape, priced_shape, sizes_of
from engines.sizes import own_sizes
from engines.techniques.choices import Choices
from engines.techniques.context import ModelSizes
from engines.techniques.idle import changed
from engines.techniques.layout.blocks import BlocksParameters
from engines.techniques.layout.tiers import TiersParameters
from engines.techniques.move.fetch import FetchParameters
from engines.techniques.parameters import Composed
from engines.techniques.place.hosts import HottestParameters
from engines.techniques.place.ndp import NdpParameters
from engines.techniques.place.priced import PricedParameters
from engines.techniques.place.residency import ByCostParameters
from engines.techniques.place.units import OneUnitParameters, ShardsParameters
from harness.combinations import mismatch, sheet_of
from harness.device_specs import DeviceSpec
from harness.fitted_sheets import shape_on
from harness.matrix import Part
from harness.model_specs import ModelSpec
from harness.problems import nearest
from harness.schema import EngineSpec
from results.units import format_share, told_apart

PRICED = "a modelled device"
MEASURED = "the host"
READ_BY: tuple[tuple[type, str, str], ...] = (
    (PricedParameters, "costs_of", MEASURED),
    (PricedParameters, "as_shape", MEASURED),
    (ByCostParameters, "overlap", PRICED),
    (OneUnitParameters, "unit", PRICED),
    (OneUnitParameters, "naive_launch", PRICED),
)
"""Of a place, parameters that only one kind of device reads: the host has one unit, a sheet its own prices."""


def choices_of(engine: EngineSpec) -> Choices | None:
    """None of the oracle, which places nothing."""
    return engine.technique.choices if isinstance(engine.technique, Composed) else None


def name_problems(engine: Part[EngineSpec]) -> Iterator[str]:
    """Names that a place by cost asks for prices, and prices that its units lack."""
    choices = choices_of(engine.spec)
    if choices is None or not isinstance(choices.place, PricedParameters):
        return
    if isinstance(choices.place, NdpParameters) and not choices.place.uses_gpu:
        return  # asks no price
    asked = (
        ("costs_of", "sheet", choices.place.costs_of, available_sheets()),
        ("as_shape", "shape", choices.place.as_shape, NAMED_SHAPES),
    )
    for key, what, name, known in asked:
        if name is not None and name not in known:
            yield f"engine {engine.label}: {key}: no {what} {name!r}; {nearest(name, known)}"
    place = choices.place
    if place.costs_of in available_sheets():
        # Whatever the model: a sheet has a unit and a link, or has not.
        costs = costs_of(place.costs_of, sizes_of_named("phi-3.5-moe"))
        if isinstance(place, NdpParameters | HottestParameters):
            n_units = sum(unit.startswith("ndp:") for unit in load_sheet(place.costs_of).units)
            if 0 < n_units < place.ndps:
                yield (
                    f"engine {engine.label}: costs_of: ndps = {place.ndps}, and sheet {place.costs_of} has {n_units}"
                    " NDP units; lower it"
                )
                return
        if (reason := place.problem_with(costs, choices.move.moves_weights)) is not None:
            yield f"engine {engine.label}: costs_of: {reason}"


def unread_problems(engine: Part[EngineSpec], devices: Sequence[Part[DeviceSpec]]) -> Iterator[str]:
    """Parameters that no device reads of those that the engine goes onto: it would run as another under its name."""
    technique, choices = engine.spec.technique, choices_of(engine.spec)
    onto = [device.spec for device in devices if mismatch(engine.spec, device.spec) is None]
    if choices is None or not isinstance(technique, Composed) or not onto:
        return
    readers = {PRICED if device.is_modelled else MEASURED for device in onto}
    given = technique.given("place")
    keys = [(key, by) for kind, key, by in READ_BY if isinstance(choices.place, kind) and key in given]
    if "backbone" in changed(technique):
        keys.append(("backbone", PRICED))
    for key, by in keys:
        if by not in readers:
            (found,) = readers
            yield (
                f"engine {engine.label}: {key} is read by {by} only, and has no effect on {found}; remove it, or give"
                " the engine such a device"
            )


def size_problems(
    engine: Part[EngineSpec], model: ModelSpec, devices: Sequence[Part[DeviceSpec]], facts: CheckpointFacts
) -> Iterator[str]:
    """Of a technique with the sizes of a model."""
    choices, config = choices_of(engine.spec), facts.config
    if choices is None or config.moe is None:
        return
    place = choices.place
    if isinstance(place, ShardsParameters) and (reason := place.too_many(config.hidden, config.moe.expert_width)):
        yield f"engine {engine.label}: {reason}"
    own = own_sizes(config)
    if isinstance(place, HottestParameters) and (reason := place.too_many(config.moe.n_experts)):
        yield f"engine {engine.label}: {reason}"
    if isinstance(choices.move, FetchParameters) and own is not None and (reason := choices.move.too_many(own)):
        yield f"engine {engine.label}: {reason}"
    if isinstance(place, NdpParameters) and (reason := place.too_many(config.moe.expert_width)):
        yield f"engine {engine.label}: {reason}"
    as_shape = place.as_shape if isinstance(place, PricedParameters) and place.as_shape in NAMED_SHAPES else None
    if as_shape is not None:
        try:
            priced_shape(as_shape, config)
        except EngineError as error:
            yield f"engine {engine.label}: as_shape: {error}"
            return
    for device in devices:
        if mismatch(engine.spec, device.spec) is None:
            try:
                sizes = sizes_there(engine.spec, model, facts, device.spec, as_shape)
            except EngineError:
                continue  # told of the device
            if sizes is None or own is None:
                continue
            reasons = [_graph_problem(choices, sizes, device.spec)]
            if device.spec.is_modelled:
                reasons.append(too_many_there(choices, own, sizes, device.spec))
            yield from (f"engine {engine.label}: {reason}" for reason in reasons if reason is not None)


def room_warnings(
    engine: Part[EngineSpec], model: ModelSpec, devices: Sequence[Part[DeviceSpec]], facts: CheckpointFacts
) -> Iterator[str]:
    """Of units that do not hold the experts: the run says "N.S." or "oom" there, as sources do, and goes on."""
    choices = choices_of(engine.spec)
    for device in devices:
        if choices is not None and device.spec.is_modelled and mismatch(engine.spec, device.spec) is None:
            with contextlib.suppress(EngineError):  # a shape that cannot be priced is told of the device
                shape = shape_on(device.spec, engine.spec, model, facts.config)
                found = lacks_room_on(sheet_of(device.spec), shape, engine.spec, own_sizes(facts.config))
                if found is not None:
                    yield f"engine {engine.label}: its cells will say {found}"


def lacks_room_on(sheet: Sheet, shape: ModelShape, engine: EngineSpec, own: ModelSizes | None) -> NoRoomError | None:
    """Why a model that is priced at a shape does not fit, or None. own: of the model that runs; None of a dense one.
    Raises `EngineError` of a memory for experts that holds too few."""
    choices, technique = choices_of(engine), engine.technique
    if choices is None:
        return lacks_room(technique.units, False, sheet, shape, technique.backbone)
    n_held = None if engine.expert_memory is None else int(engine.expert_memory / shape.expert_bytes)
    n_run = None if own is None else own.n_sparse_layers
    n_kept = kept_of_shape(choices.move, technique.units, shape, n_held, n_run)
    fetches = choices.move.moves_weights
    return lacks_room(technique.units, fetches, sheet, shape, technique.backbone, n_kept=n_kept)


def padding_warning(engine: Part[EngineSpec], facts: CheckpointFacts) -> str | None:
    """Of blocks that even a balanced chunk leaves mostly empty: the block's default knows no chunk."""
    choices, moe = choices_of(engine.spec), facts.config.moe
    layout = None if choices is None else choices.layout
    if moe is None or not isinstance(layout, BlocksParameters) or not isinstance(layout.block_size, int):
        return None
    n_pairs = engine.spec.prefill_chunk * moe.top_k
    mean_rows, size = n_pairs / moe.n_experts, layout.block_size
    if size <= 2 * mean_rows:
        return None
    n_blocks = moe.n_experts * math.ceil(mean_rows / size)
    return (
        f"engine {engine.label}: blocks of {size} rows, and an expert gets {mean_rows:.4g} of a chunk of"
        f" {engine.spec.prefill_chunk} tokens: where all {moe.n_experts} get some,"
        f" {format_share(1 - n_pairs / (n_blocks * size), '.1f')} of the rows are padding; lengthen prefill_chunk or"
        " lower block_size"
    )


def tier_warning(engine: Part[EngineSpec], facts: CheckpointFacts) -> str | None:
    """Of a tier with room for more tokens than a chunk has: it is as large as the chunk."""
    choices, moe, chunk = choices_of(engine.spec), facts.config.moe, engine.spec.prefill_chunk
    layout = None if choices is None else choices.layout
    if moe is None or not isinstance(layout, TiersParameters) or layout.multiples is None:
        return None
    base_rows = chunk * (moe.top_k if layout.base == "BK/E" else 1) / moe.n_experts
    if layout.multiples[0] * base_rows <= chunk:
        return None
    return (
        f"engine {engine.label}: multiples begin with {layout.multiples[0]:g}, and so many times the"
        f" {base_rows:.4g} rows of {layout.base} are more than a chunk of {chunk} tokens: that tier has room for all"
        f" of them, and drops none; {chunk / base_rows:.4g} is as much"
    )


def sizes_there(
    engine: EngineSpec, model: ModelSpec, facts: CheckpointFacts, device: DeviceSpec, as_shape: str | None
) -> ModelSizes | None:
    """As the technique is told them there."""
    if device.is_modelled:
        return sizes_of(shape_on(device, engine, model, facts.config))
    return sizes_of(own_shape(facts.source, facts.config) if as_shape is None else priced_shape(as_shape, facts.config))


def too_many_there(choices: Choices, own: ModelSizes, sizes: ModelSizes, device: DeviceSpec) -> str | None:
    """Why experts that stay do not fit in the GPU's memory, or None. own: of the model that runs; the layers of the
    one that is priced take its plans in turn, and so do the experts that lie there."""
    held = sheet_of(device).capacity_bytes("gpu")
    if not isinstance(choices.move, FetchParameters) or held is None:
        return None
    n = kept_on_gpu(choices.move, choices.place.units, sizes, None, own.n_sparse_layers)
    if n * sizes.expert_bytes <= held:
        return None
    given, (are, holds) = f"gpu_slots = {choices.move.gpu_slots}", told_apart(n * sizes.expert_bytes, held)
    if own.n_sparse_layers == sizes.n_sparse_layers:
        told = f"{given} experts are {are}"
    else:
        told = f"{given} of {own.n_sparse_layers} layers are {n:.0f} of {sizes.n_sparse_layers}, {are}"
    return f"{told}, and the GPU of {device.name} holds {holds}; lower it"


def _graph_problem(choices: Choices, sizes: ModelSizes, device: DeviceSpec) -> str | None:
    """Why graphs of the technique are none, or do not run where it says."""
    tiers = [layout for layout in choices.layouts if isinstance(layout, TiersParameters)]
    for layout in tiers:
        if (reason := layout.too_small(sizes.expert_bytes)) is not None:
            return reason
    limit = sheet_of(device).graph_bytes_limit if device.is_modelled else None
    if limit is None or "npu" not in choices.place.units or isinstance(choices.place, ByCostParameters):
        return None  # a place by cost leaves on the CPU what the NPU does not take
    if sizes.expert_bytes > limit.value:
        return (
            f"{device.name} takes graphs of {limit.value:.0f} bytes on its NPU, and an expert has {sizes.expert_bytes};"
            " it would run on the CPU; use unit cpu"
        )
    for layout in tiers:
        most = min(layout.group_size, sizes.n_experts) if layout.grouped else 1
        if min(layout.graph_bytes // sizes.expert_bytes, most) * sizes.expert_bytes > limit.value:
            return (
                f"graph_bytes = {layout.graph_bytes} with group_size = {layout.group_size} makes graphs above the"
                f" {limit.value:.0f} bytes that {device.name} takes on its NPU; they would run on the CPU; lower one"
            )
    return None
