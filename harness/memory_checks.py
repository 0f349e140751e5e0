"""Checks of engines that load experts from the checkpoint file: before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from engines.errors import EngineError
from engines.expert_memory import ExpertMemory
from engines.model.checkpoints import CheckpointFacts
from engines.sizes import own_sizes
from engines.techniques.move.caches import CacheParameters
from engines.techniques.parameters import Composed
from harness.matrix import Part
from harness.schema import DeviceSpec, EngineSpec, ModelSpec


def moving_problems(engine: Part[EngineSpec], devices: Sequence[DeviceSpec]) -> Iterator[str]:
    """Of a technique on the devices that its engine goes onto."""
    spec, name = engine.spec, engine.spec.technique.technique
    if not spec.technique.loads_from_file:
        if spec.expert_memory is not None:
            yield (
                f"engine {engine.label}: expert_memory limits the experts that a technique loads, and {name} loads"
                " none; use lru, lfu, static or moe-ondemand, or remove it"
            )
        return
    for device in devices:
        if spec.devices is not None and device.name not in spec.devices:
            continue
        if device.computes != "cpu":
            yield (
                f"engine {engine.label}: technique {name} loads experts for the CPU, and {device.name} computes on"
                f" {device.computes}; leave computes out"
            )
    if spec.quantise.experts is not None:
        yield (
            f"engine {engine.label}: technique {name} keeps experts in the checkpoint file as they are, and"
            " quantise.experts makes others; remove it"
        )


def slot_problems(engine: Part[EngineSpec], model: ModelSpec, facts: CheckpointFacts) -> Iterator[str]:
    """Of the budget, for one model."""
    technique = engine.spec.technique
    move = technique.choices.move if isinstance(technique, Composed) else None
    if not isinstance(move, CacheParameters):
        return
    sizes = own_sizes(facts.config)
    if sizes is None:
        yield f"engine {engine.label}: technique {technique.technique} loads experts, and {facts.source} is dense"
        return
    memory = ExpertMemory(engine.spec.expert_memory, getattr(torch, model.dtype))
    try:
        move.slots_of_model(sizes, memory.n_slots(sizes))
    except EngineError as error:
        given = "" if memory.n_bytes is None else f" expert_memory {memory.n_bytes} bytes, in slots of {model.dtype}:"
        yield f"engine {engine.label}:{given} {error}"
