"""Requests that the model which runs holds, and the shape at which they are priced does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engines.model.checkpoints import CheckpointFacts
from engines.pricing.published_shapes import NAMED_SHAPES
from harness.device_specs import DeviceSpec
from harness.matrix import Part
from harness.run_parts import RunParts
from harness.workload_specs import WorkloadSpec
from workloads.base import TellsEarly, WorkloadError, n_tokens


def context_warnings(
    devices: Sequence[DeviceSpec], parts: Sequence[Part[WorkloadSpec]], facts: CheckpointFacts, run_parts: RunParts
) -> Iterator[str]:
    """Of workloads whose requests stand; what is wrong with others is told as a problem."""
    for device in devices:
        shape = NAMED_SHAPES.get(device.priced_as or "")
        if shape is None or shape.max_length is None or shape.max_length >= facts.config.max_length:
            continue
        for part in parts:
            try:
                is_longer = _asks_more(part, shape.max_length, facts, run_parts)
            except WorkloadError:
                continue
            if is_longer:
                yield (
                    f"device {device.name}: workload {part.label} asks more than the {shape.max_length:,} tokens that"
                    f" {shape.name} holds by its config.json; such a model would refuse what is priced here"
                )


def _asks_more(part: Part[WorkloadSpec], max_length: int, facts: CheckpointFacts, run_parts: RunParts) -> bool:
    """Raises `WorkloadError`."""
    workload, most = run_parts.workload_named(part.label, part.spec), facts.config.max_length
    if isinstance(workload, TellsEarly):
        return max_length < workload.most_tokens <= most
    return any(n_tokens(request) > max_length for request in workload.requests(facts.tokenizer, most))
