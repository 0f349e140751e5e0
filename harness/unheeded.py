"""Keys of a plan that are valid and change nothing in it, or less than they say. Told, for whoever wrote one waits for
what it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engines.model.checkpoints import CheckpointFacts
from engines.model.quantised import ROUNDED_FORMS, plain_form
from engines.model.rope_config import LongScaling
from engines.techniques.idle import changed
from engines.techniques.parameters import Composed
from harness.combinations import mismatch
from harness.core_sets import in_words
from harness.device_specs import DeviceSpec
from harness.matrix import Part
from harness.model_specs import ModelSpec
from harness.run_parts import RunParts
from harness.schema import EnduranceSpec, EngineSpec, TrialProtocol
from harness.workload_specs import WorkloadSpec
from results.swept import swept_values
from workloads.base import TellsEarly, WorkloadError

OF_MEASURED = {
    "cooldown_s": (0.0, "a modelled device does not heat"),
    "sample_interval_s": (None, "a modelled device has a reading at each operation"),
    "max_foreign_cpu_share": (1.0, "other processes take nothing from a modelled device"),
    "contention_retries": (0, "other processes take nothing from a modelled device"),
    "retries": (0, "no failure of a modelled device passes when it is tried again"),
}
"""The value that asks for what a modelled device does anyway, and why others change nothing there."""
OF_PHONES = ("max_temperature_c", "min_charge_percent", "gate_wait_s")


def unheeded_of_protocol(protocol: TrialProtocol, devices: Sequence[DeviceSpec]) -> Iterator[str]:
    given = changed(protocol)

    def told(key: str, why: str) -> str:
        value = getattr(protocol, key)
        is_plain = isinstance(value, int | float)
        return f"protocol.{key}{f' = {value}' if is_plain else ''} changes nothing: {why}; remove it"

    if devices and all(device.is_modelled for device in devices):
        for key in ("repeats", "stop"):
            # One repeat is what it gets.
            if key in given and getattr(protocol, key) != 1:
                yield told(key, "a modelled device gives the same figures each time, and is priced once")
        for key, (harmless, why) in OF_MEASURED.items():
            if key in given and getattr(protocol, key) != harmless:
                yield told(key, why)
    else:
        if "repeats" in given and protocol.stop is not None:
            yield told("repeats", "stop decides how often a window is taken")
        if "contention_retries" in given and protocol.max_foreign_cpu_share == 1:
            yield told("contention_retries", "with max_foreign_cpu_share = 1 no window is taken again")
    if "seed" in given and protocol.order != "shuffled":
        yield told("seed", f'it is of order = "shuffled", and the order is "{protocol.order}"')
    if devices and not any(device.is_phone for device in devices):
        for key in OF_PHONES:
            # A series that ends at a level of the battery begins above it, on a laptop too.
            if key in given and not (key == "min_charge_percent" and isinstance(protocol.stop, EnduranceSpec)):
                yield told(key, "it is of a phone's battery, and no device of the plan is a phone")


def unheeded_of_engine(engine: Part[EngineSpec], facts: CheckpointFacts) -> str | None:
    if engine.spec.long_rope == "at_once" or isinstance(facts.config.rope.scaling, LongScaling):
        return None
    return f"engine {engine.label}: long_rope changes nothing: {facts.source} has no LongRoPE; remove it"


def unheeded_forms(engine: Part[EngineSpec], models: Sequence[ModelSpec]) -> str | None:
    """Of components of an arm whose weights every model of the plan holds so anyway; a sweep may name them."""
    quantise, swept = engine.spec.quantise, swept_values(engine.suffix)
    plain = {plain_form(model.dtype) for model in models}
    # bf16 arithmetic asks for a component that says bf16.
    needed = ROUNDED_FORMS.get(quantise.arithmetic, ())
    idle = [key for key, form in quantise.asked.items() if plain == {form} and form not in needed]
    if not idle or not swept.keys().isdisjoint({*idle, "quantise"}):
        return None
    named = " and ".join(f'quantise.{key} = "{quantise.asked[key]}"' for key in idle)
    changes, them = ("changes", "it") if len(idle) == 1 else ("change", "them")
    held = f'model.dtype = "{models[0].dtype}" holds all weights so'
    return f"engine {engine.label}: {named} {changes} nothing: {held}; remove {them}"


def unheeded_attention(engine: Part[EngineSpec], model: ModelSpec) -> str | None:
    """Of an arm; a sweep may name what is so anyway."""
    quantise = engine.spec.quantise
    asked = quantise.attention_arithmetic
    without = quantise.model_copy(update={"attention_arithmetic": None})
    form = quantise.attention or plain_form(model.dtype)
    if asked is None or without.attention_of(form) != asked or "attention_arithmetic" in swept_values(engine.suffix):
        return None
    told = f'quantise.attention_arithmetic = "{asked}" changes nothing: attention is computed so without it'
    return f"engine {engine.label}: {told}; remove it"


def unheeded_decoding(engine: Part[EngineSpec], devices: Sequence[DeviceSpec]) -> str | None:
    """Of a road of decoding that an arm has without it, on each of its devices."""
    spec = engine.spec
    onto = [device for device in devices if mismatch(spec, device) is None]
    if spec.decoding is None or not onto:
        return None
    told = f"engine {engine.label}: decoding changes nothing"
    if all(device.is_modelled for device in onto):
        return f"{told}: a modelled device prices what is called, however it is decoded here; remove it"
    if any(device.computes == "cpu" and not device.is_modelled for device in onto):
        technique = spec.technique
        copies = spec.expert_memory is not None
        if isinstance(technique, Composed) and not technique.choices.decides_in_the_step(copies):
            return None
        return f"{told}: each layer of {technique.technique} waits for its plan without it; remove it"
    return f"{told}: on an accelerator each layer waits for its plan without it; remove it"


def unheeded_threads(engine: Part[EngineSpec], devices: Sequence[DeviceSpec]) -> str | None:
    """Of an arm that goes onto modelled devices alone."""
    onto = [device for device in devices if mismatch(engine.spec, device) is None]
    if engine.spec.threads is None or not onto or not all(device.is_modelled for device in onto):
        return None
    told = f"engine {engine.label}: threads = {in_words(engine.spec.threads)}"
    return f"{told} changes nothing: a sheet prices its unit as a whole; remove it"


def warmup_warnings(
    protocol: TrialProtocol, parts: Sequence[Part[WorkloadSpec]], facts: CheckpointFacts, run_parts: RunParts
) -> Iterator[str]:
    """Of warm-ups that are shorter than the protocol says."""
    for part in parts if protocol.warmup > 1 else ():
        try:
            workload = run_parts.workload_named(part.label, part.spec)
            # Samples of one size are built when they are asked, as many as the limit says.
            early = part.spec.limit if isinstance(workload, TellsEarly) else None
            n = len(workload.requests(facts.tokenizer, facts.config.max_length)) if early is None else early
        except WorkloadError:
            continue
        if 0 < n < protocol.warmup:
            yield (
                f"protocol.warmup = {protocol.warmup}: workload {part.label} has {n} request{'s' if n > 1 else ''},"
                " and a warm-up answers each of them once; lower it"
            )


def sample_warnings(parts: Sequence[Part[WorkloadSpec]], facts: CheckpointFacts, run_parts: RunParts) -> Iterator[str]:
    """Of limits that the few items which come with the project do not reach: other data was meant. Of workloads that
    differ in their limit alone, the largest."""
    largest: dict[str, Part[WorkloadSpec]] = {}
    for part in sorted(parts, key=lambda part: part.spec.limit or 0):
        if part.spec.limit is not None:
            largest[part.spec.model_dump_json(exclude={"limit", "label"})] = part
    for part in largest.values():
        try:
            workload = run_parts.workload_named(part.label, part.spec)
            if workload.data_source != "sample":
                continue
            n = len({r.sample_id for r in workload.requests(facts.tokenizer, facts.config.max_length)})
        except WorkloadError:
            continue
        if part.spec.limit is not None and n < part.spec.limit:
            yield (
                f"workload {part.label}: limit {part.spec.limit} is more than the {n} items of the sample that comes"
                ' with joulebench; for the data set set JOULEBENCH_DATA, or data = "hub"'
            )
