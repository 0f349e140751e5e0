"""Checks of engines that load experts from the checkpoint file: before anything runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from devices.memory import usable_memory
from engines.errors import EngineError, FewSlotsError
from engines.expert_memory import ExpertMemory, fills_buffers
from engines.model.checkpoints import CheckpointFacts
from engines.pricing.room import kept_on_gpu
from engines.pricing.shapes import own_shape, quantised
from engines.sizes import own_sizes
from engines.techniques.context import ModelSizes
from engines.techniques.move.caches import CacheParameters
from engines.techniques.move.slices import SlicesParameters
from engines.techniques.move.two_buffers import TwoBuffersParameters, buffer_size
from engines.techniques.parameters import Composed
from harness.combinations import mismatch, sheet_of
from harness.device_specs import DeviceSpec
from harness.matrix import Part
from harness.model_specs import ModelSpec
from harness.run_parts import expert_memory
from harness.schema import EngineSpec
from harness.technique_problems import sizes_there
from results.units import format_long_duration, told_apart, with_prefix


def moving_problems(engine: Part[EngineSpec], devices: Sequence[DeviceSpec], computes: bool) -> Iterator[str]:
    """Of a technique on the devices that its engine goes onto. computes: whether a model runs, whose experts could be
    copied."""
    spec, name = engine.spec, engine.spec.technique.technique
    if not ExpertMemory(spec.expert_memory).loads(spec.technique):
        if spec.expert_memory is not None and _cache_on_gpu(spec) is not None:
            yield (
                f"engine {engine.label}: {name} in a GPU's memory takes slots in the place of expert_memory; write"
                " technique.slots, the experts of each layer"
            )
        elif spec.expert_memory is not None and _prefetching(spec) is None:
            yield (
                f"engine {engine.label}: expert_memory limits the experts that a technique loads, and {name} loads"
                " none; use lru, lfu, static, moe-ondemand, ndp, ndp-tp-pre, or one that fills two buffers"
                " (on-demand, router-pf), or remove it"
            )
        if spec.copy_bytes_per_s is not None:
            told = " without expert_memory: they are counted" if fills_buffers(spec.technique) else ""
            yield f"engine {engine.label}: copy_bytes_per_s limits how experts are copied, and {name} copies none{told}"
        return
    for device in devices:
        if spec.devices is not None and device.name not in spec.devices:
            continue
        if device.computes == "mps":
            yield (
                f"engine {engine.label}: technique {name} loads experts for the CPU or for cuda, and {device.name}"
                " computes on mps; leave computes out"
            )
        if device.computes == "cuda":
            yield from (f"engine {engine.label}: {problem}" for problem in _problems_on_cuda(spec, device))
        if device.is_modelled and computes and fills_buffers(spec.technique):
            yield (
                f"engine {engine.label}: with expert_memory {name} copies experts, but {device.name} only prices"
                " copies; name other devices in the engine, or leave expert_memory out"
            )


def _problems_on_cuda(spec: EngineSpec, device: DeviceSpec) -> Iterator[str]:
    name = spec.technique.technique
    if spec.copy_bytes_per_s is not None:
        yield f"copy_bytes_per_s does not limit copies to the GPU of {device.name}; leave it out"
    if spec.quantise.experts is not None:
        yield f"{name} copies experts to the GPU of {device.name} as it computes with them; leave quantise.experts out"
    if spec.technique.wanted_prompts and spec.profile is None:
        yield (
            f"{name} copies experts to the GPU of {device.name} and cannot be calibrated there; give it a profile"
            " (`joulebench calibrate`)"
        )


def untried_warning(engine: Part[EngineSpec], devices: Sequence[DeviceSpec]) -> str | None:
    """Of what was written without a GPU at hand, and tested without one."""
    spec = engine.spec
    on_cuda = [d for d in devices if d.computes == "cuda" and (spec.devices is None or d.name in spec.devices)]
    copies = ExpertMemory(spec.expert_memory).loads(spec.technique)
    if not on_cuda or not (copies or (spec.ranks or 1) > 1):
        return None
    what = "copies of experts to a GPU were" if copies else "ranks on GPUs were"
    return (
        f"engine {engine.label}: {what} written and tested without one, and not yet run on a GPU; compare the answers"
        ' with those of computes = "cpu" first'
    )


SLOW_COPY_S = 10.0
"""Of one expert. A decoded token asks for several in each layer."""


def rate_warning(engine: Part[EngineSpec], model: ModelSpec, facts: CheckpointFacts) -> str | None:
    """Where experts are copied so slowly that a token takes minutes."""
    spec, sizes, moe = engine.spec, own_sizes(facts.config), facts.config.moe
    rate = spec.copy_bytes_per_s
    if rate is None or sizes is None or not {"copy_bytes_per_s", "expert_memory"}.isdisjoint(engine.wrong):
        return None
    memory = expert_memory(spec, model)
    n_bytes = memory.slot_bytes(sizes, moe is not None and moe.expert_bias)
    expert_s = n_bytes / rate
    if expert_s < SLOW_COPY_S or not memory.loads(spec.technique):
        return None
    in_token = sizes.top_k * sizes.n_sparse_layers
    return (
        f"engine {engine.label}: at copy_bytes_per_s = {rate} an expert of {n_bytes} bytes takes"
        f" {format_long_duration(expert_s)}, and a token calls {in_token} of them; is a unit missing?"
    )


class _Loading(NamedTuple):
    """Of an engine that loads experts: how it moves them, what it may hold of them, and of which they are."""

    move: CacheParameters | TwoBuffersParameters
    memory: ExpertMemory
    sizes: ModelSizes
    biased: bool

    @property
    def n_held(self) -> int:
        """Experts that its slots or buffers hold. Raises `EngineError` where they are too few."""
        n_slots = self.memory.n_slots(self.sizes, self.biased)
        if isinstance(self.move, CacheParameters):
            return self.move.slots_of_model(self.sizes, n_slots)
        return 2 * buffer_size(self.sizes, n_slots)

    @property
    def slot_bytes(self) -> int:
        return self.memory.slot_bytes(self.sizes, self.biased)

    @property
    def is_given_twice(self) -> bool:
        return (
            isinstance(self.move, CacheParameters) and self.move.slots is not None and self.memory.n_bytes is not None
        )


def _loading(engine: Part[EngineSpec], model: ModelSpec, facts: CheckpointFacts) -> _Loading | None:
    """None where it loads none, or where what it is given is wrong by itself."""
    technique, sizes, moe = engine.spec.technique, own_sizes(facts.config), facts.config.moe
    if "expert_memory" in engine.wrong or sizes is None:
        return None
    memory = expert_memory(engine.spec, model)
    move = technique.choices.move if isinstance(technique, Composed) else None
    if not isinstance(move, CacheParameters | TwoBuffersParameters) or not memory.loads(technique):
        return None
    return _Loading(move, memory, sizes, moe is not None and moe.expert_bias)


def slot_problems(
    engine: Part[EngineSpec], model: ModelSpec, devices: Sequence[DeviceSpec], facts: CheckpointFacts
) -> Iterator[str]:
    """Of the budget, for one model; nothing where it is wrong by itself."""
    technique = engine.spec.technique
    if "expert_memory" in engine.wrong:
        return
    if own_sizes(facts.config) is None and expert_memory(engine.spec, model).loads(technique):
        yield f"engine {engine.label}: technique {technique.technique} loads experts, and {facts.source} is dense"
    loading = _loading(engine, model, facts)
    if loading is None:
        return
    memory, move = loading.memory, loading.move
    if loading.is_given_twice:
        assert isinstance(move, CacheParameters)
        yield (
            f"engine {engine.label}: slots = {move.slots} and expert_memory both say how many experts"
            f" {technique.technique} holds; give one of them"
        )
        return
    given = "" if memory.n_bytes is None else f" expert_memory {memory.n_bytes} bytes, in slots of {memory.form}:"
    try:
        n_bytes = loading.n_held * loading.slot_bytes
    except EngineError as error:
        yield f"engine {engine.label}:{given} {_with_bytes(error, loading.slot_bytes)}"
        return
    there = usable_memory()
    if _is_here(engine.spec, devices) and n_bytes > there.n_bytes:
        take, has = told_apart(n_bytes, there.n_bytes)
        yield f"engine {engine.label}:{given} {loading.n_held} experts take {take}, and {there.told(has)}; give fewer"


def _is_here(engine: EngineSpec, devices: Sequence[DeviceSpec]) -> bool:
    """Whether it computes in this machine's memory."""
    return any(device.computes == "cpu" and mismatch(engine, device) is None for device in devices)


def together_warning(
    engines: Sequence[Part[EngineSpec]], model: ModelSpec, devices: Sequence[DeviceSpec], facts: CheckpointFacts
) -> str | None:
    """Of arms whose slots and buffers fit one by one, and not all at once: a run keeps them to its end."""
    taken: dict[str, int] = {}
    for engine in engines:
        loading = _loading(engine, model, facts) if _is_here(engine.spec, devices) else None
        if loading is not None and not loading.is_given_twice:
            with contextlib.suppress(EngineError):  # told of the engine
                taken[engine.label] = loading.n_held * loading.slot_bytes
    there, in_all = usable_memory(), sum(taken.values())
    if in_all <= there.n_bytes or any(n_bytes > there.n_bytes for n_bytes in taken.values()):
        return None
    take, has = told_apart(in_all, there.n_bytes)
    return (
        f"engines {', '.join(taken)}: their experts together take {take}, and {there.told(has)}; all arms of a run keep"
        " them to its end: give each less, or run them one by one"
    )


def weights_warning(
    engine: Part[EngineSpec], model: ModelSpec, devices: Sequence[DeviceSpec], facts: CheckpointFacts
) -> str | None:
    """Of a model that is larger than the memory for this process, in an arm that holds it whole."""
    if expert_memory(engine.spec, model).loads(engine.spec.technique) or not _is_here(engine.spec, devices):
        return None
    try:
        shape = replace(own_shape(facts.source, facts.config), bytes_per_value=4 if model.dtype == "float32" else 2)
        shape = quantised(shape, engine.spec.quantise)
        n_bytes = int(shape.routed_bytes + shape.others_bytes)
    except EngineError:
        return None  # its layers are not known
    there = usable_memory()
    if n_bytes <= there.n_bytes:
        return None
    take, has = told_apart(n_bytes, there.n_bytes)
    return (
        f"engine {engine.label}: its weights take {take}, and {there.told(has)}: the system ends the run, or reads them"
        " from the disk again and again; narrow them (quantise), or take a cache of experts (lru)"
    )


def unlimited_warning(engine: Part[EngineSpec], model: ModelSpec, facts: CheckpointFacts) -> str | None:
    """Where a budget holds all experts, so that it limits nothing."""
    loading = _loading(engine, model, facts)
    if loading is None or loading.memory.n_bytes is None or loading.is_given_twice:
        return None
    n_all = loading.sizes.n_experts * loading.sizes.n_sparse_layers
    needed = n_all * loading.slot_bytes
    if loading.memory.n_bytes < needed:
        return None
    name, form = engine.spec.technique.technique, loading.memory.form
    does = (
        "each is copied once, and none is missed again"
        if isinstance(loading.move, CacheParameters)
        else "but only those of two layers are kept, and each is copied anew"
    )
    return (
        f"engine {engine.label}: expert_memory {loading.memory.n_bytes} bytes would hold all {n_all} experts, which"
        f" take {needed} ({with_prefix(needed, 'B', digits=3)}) in slots of {form}: {does}; is less meant for {name}?"
    )


def _with_bytes(error: EngineError, slot_bytes: int) -> str:
    """The error, and what to write where the memory holds too few."""
    if not isinstance(error, FewSlotsError):
        return str(error)
    n_bytes = error.n_needed * slot_bytes
    instead = f", or {error.instead}" if error.instead else ""
    return f"{error.what}; write expert_memory = {n_bytes} ({with_prefix(n_bytes, 'B', digits=3)}) or more{instead}"


def kept_problems(
    engine: Part[EngineSpec], model: ModelSpec, devices: Sequence[Part[DeviceSpec]], facts: CheckpointFacts
) -> Iterator[str]:
    """Of experts that a technique keeps in a GPU's memory: on a modelled device those of the model that is priced."""
    move, own = _keeping(engine.spec), own_sizes(facts.config)
    if move is None or own is None:
        return
    for device in devices:
        if mismatch(engine.spec, device.spec) is not None:
            continue
        try:
            sizes = sizes_there(engine.spec, model, facts, device.spec, None) if device.spec.is_modelled else own
        except EngineError:
            continue  # told of the device
        if sizes is None:
            continue
        reason = not_kept(engine.spec, sizes, device.spec)
        if reason is not None:
            yield f"engine {engine.label}: {reason}"


def not_kept(engine: EngineSpec, sizes: ModelSizes, device: DeviceSpec) -> str | None:
    """Why the GPU cannot keep what the technique keeps in its memory, or None. sizes: of the model that is priced."""
    move, n_bytes = _keeping(engine), engine.expert_memory
    if move is None:
        return None
    if isinstance(move, CacheParameters) and move.slots is None:
        return None if n_bytes is not None else "the cache has no slots in the GPU's memory; write technique.slots"
    on_sheet = f" on {device.name}{f' as {device.priced_as}' if device.priced_as else ''}" if device.is_modelled else ""
    held = sheet_of(device).capacity_bytes("gpu") if device.is_modelled else None
    if n_bytes is not None and held is not None and n_bytes > held:
        asked, holds = told_apart(n_bytes, held)
        return f"expert_memory {n_bytes} bytes are {asked}, and the GPU of {device.name} holds {holds}; lower it"
    try:
        n_slots, n = _kept(move, sizes, None if n_bytes is None else n_bytes // sizes.expert_bytes)
    except EngineError as error:
        is_narrow = sizes.expert_bytes != 2 * 3 * sizes.hidden * sizes.expert_width
        width = f"of experts of {sizes.expert_bytes} bytes" if is_narrow else "at two bytes a weight"
        given = "" if n_bytes is None else f"expert_memory {n_bytes} bytes{on_sheet}, {width}: "
        return f"{given}{_with_bytes(error, sizes.expert_bytes)}"
    if held is None or n * sizes.expert_bytes <= held:
        return None
    asked, holds = told_apart(n * sizes.expert_bytes, held)
    default = "" if move.slots is not None or n_bytes is not None else ", as many as a token chooses,"
    return (
        f"slots = {n_slots}{default} in each of {sizes.n_sparse_layers} layers are {n} experts,"
        f" {asked}, and the GPU of {device.name} holds {holds};"
        f" {'give fewer slots' if default else 'lower it'}"
    )


def _kept(move: SlicesParameters | CacheParameters, sizes: ModelSizes, n_held: int | None) -> tuple[int, int]:
    """Experts of each layer, and of all layers together. Raises `EngineError`."""
    return move.slots_of_layer(sizes, n_held), round(kept_on_gpu(move, ("gpu",), sizes, n_held))


def _keeping(engine: EngineSpec) -> SlicesParameters | CacheParameters | None:
    """Of a technique that keeps experts in a GPU's memory, which this host only counts."""
    return _prefetching(engine) or _cache_on_gpu(engine)


def _cache_on_gpu(engine: EngineSpec) -> CacheParameters | None:
    technique = engine.technique
    move = technique.choices.move if isinstance(technique, Composed) else None
    return move if isinstance(move, CacheParameters) and not technique.loads_from_file else None


def _prefetching(engine: EngineSpec) -> SlicesParameters | None:
    """Of a technique that keeps experts in a GPU's memory, which this host only counts."""
    technique = engine.technique
    move = technique.choices.move if isinstance(technique, Composed) else None
    return move if isinstance(move, SlicesParameters) and move.prefetch else None
