"""Why an arm cannot compute in several processes, told before anything runs; and what may make it slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engines.model.checkpoints import CheckpointFacts
from engines.parallel.links import why_not_on_gpus, why_unreachable
from engines.parallel.running import threads_of_each, usable_cores
from engines.sizes import own_sizes
from engines.techniques.parameters import Composed
from engines.techniques.place.ranks import RanksParameters
from engines.techniques.presets import PRESETS
from harness.combinations import mismatch
from harness.core_sets import ThreadCounts
from harness.device_specs import DeviceSpec, HostSpec
from harness.external.base import ExternalSpec
from harness.matrix import Part
from harness.schema import EngineSpec


def rank_problems(engine: Part[EngineSpec], devices: Sequence[DeviceSpec]) -> Iterator[str]:
    """What no model changes."""
    n_ranks, place = engine.spec.ranks, _place(engine)
    technique = engine.spec.technique.technique
    if place is None and n_ranks is not None:
        with_ranks = [name for name, preset in PRESETS.items() if isinstance(preset.choices.place, RanksParameters)]
        yield (
            f"engine {engine.label}: technique {technique} computes in one process; remove ranks, or take"
            f" {', '.join(with_ranks)}"
        )
    elif place is not None and n_ranks is None and "ranks" not in engine.wrong:
        yield f"engine {engine.label}: technique {technique} computes in several processes; say how many: ranks = 2"
    if n_ranks is not None and engine.spec.cores is not None:
        yield f"engine {engine.label}: every rank would use the same cores; remove cores or ranks"
    if n_ranks is not None and engine.spec.decoding is not None:
        yield f"engine {engine.label}: decoding is of an engine in one process; remove decoding or ranks"
    if n_ranks is not None and engine.spec.last_layer is not None:
        yield f"engine {engine.label}: last_layer is of an engine in one process; remove last_layer or ranks"
    if n_ranks is not None and engine.spec.threads is not None and not _are_the_same(engine.spec.threads):
        yield f"engine {engine.label}: ranks use the same number of threads in both phases; give threads as one number"
    if place is not None and n_ranks is not None and n_ranks > 1:
        reason = why_unreachable()
        if reason is not None:
            yield f"engine {engine.label}: {reason}"
        for device in devices:
            if device.name == "host" and (engine.spec.devices is None or "host" in engine.spec.devices):
                yield from _device_problems(engine, device, n_ranks)


def rank_problems_with_model(engine: Part[EngineSpec], facts: CheckpointFacts) -> Iterator[str]:
    n_ranks, place, sizes = engine.spec.ranks, _place(engine), own_sizes(facts.config)
    if n_ranks is None or place is None:
        return
    if sizes is None:
        yield f"engine {engine.label}: ranks share experts, and {facts.source} is dense; use dropless"
        return
    reason = place.problem(n_ranks, sizes)
    if reason is not None:
        yield f"engine {engine.label}: {reason}"


def launch_problems(engines: Sequence[Part[EngineSpec]], n_launched: int) -> Iterator[str]:
    """Of a run that torchrun started, with so many processes."""
    asked = {engine.label: engine.spec.ranks for engine in engines if engine.spec.ranks is not None}
    if not asked:
        yield f"torchrun started {n_launched} processes, and no engine of the plan has ranks; run it without torchrun"
    for label, n_ranks in asked.items():
        if n_ranks != n_launched:
            yield (
                f"engine {label}: ranks = {n_ranks}, and torchrun started {n_launched} processes; start it with"
                f" --nproc-per-node {n_ranks}, or without torchrun"
            )


def rank_warning(engine: Part[EngineSpec]) -> str | None:
    """Where more threads compute than there are cores: they wait for each other."""
    n_ranks = engine.spec.ranks
    if n_ranks is None:
        return None
    threads = engine.spec.threads
    n_threads, n_cores = (threads and threads.prefill) or threads_of_each(n_ranks), usable_cores()
    if n_ranks * n_threads <= n_cores:
        return None
    return (
        f"engine {engine.label}: {n_ranks} ranks of {n_threads} thread{'s' * (n_threads != 1)} on {n_cores} cores wait"
        " for each other; its times are not those of a machine with enough cores"
    )


def crowded_warning(engine: Part[EngineSpec] | Part[ExternalSpec], devices: Sequence[DeviceSpec]) -> str | None:
    """Likewise of one process on this host. Of cores that are named the plan refuses it."""
    spec = engine.spec
    on_host = any(isinstance(device, HostSpec) and mismatch(spec, device) is None for device in devices)
    if not on_host or spec.threads is None or (isinstance(spec, EngineSpec) and spec.ranks is not None):
        return None
    asked = [n for phase, n in spec.threads if n is not None and getattr(spec.cores, phase, None) is None]
    return crowded_words(f"engine {engine.label}", max(asked, default=0))


def crowded_words(whose: str, n_threads: int) -> str | None:
    """Where this process may use fewer cores than it shall have threads."""
    n_cores = usable_cores()
    if n_threads <= n_cores:
        return None
    return (
        f"{whose}: {n_threads} threads on {n_cores} core{'s' * (n_cores != 1)} wait for each other; times are not"
        " those of a machine with enough cores"
    )


def _are_the_same(threads: ThreadCounts) -> bool:
    return threads.prefill == threads.decode


def _device_problems(engine: Part[EngineSpec], device: DeviceSpec, n_ranks: int) -> Iterator[str]:
    if device.computes == "mps":
        yield (
            f"engine {engine.label}: ranks = {n_ranks} cannot send each other anything on mps;"
            ' use computes = "cpu", or remove ranks'
        )
    if device.computes == "cuda" and (reason := why_not_on_gpus(n_ranks)) is not None:
        yield f"engine {engine.label}: ranks = {n_ranks} on cuda: {reason}"


def _place(engine: Part[EngineSpec]) -> RanksParameters | None:
    technique = engine.spec.technique
    place = technique.choices.place if isinstance(technique, Composed) else None
    return place if isinstance(place, RanksParameters) else None
