"""Problems of a plan's arms with this machine, with what they learn from, and with each model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from engines.errors import EngineError
from engines.kernels.compile import lacks_for
from engines.model.checkpoints import CheckpointFacts
from engines.model.wanted_tensors import check_quantisation
from engines.prediction import why_not
from engines.techniques.base import TechniqueParameters
from engines.techniques.parameters import Composed
from engines.techniques.route import PredictedParameters
from harness.combinations import mismatch
from harness.core_sets import CoreSets
from harness.device_specs import DeviceSpec, HostSpec
from harness.external.base import ExternalSpec
from harness.external.coreml import CoremlSpec
from harness.matrix import Part
from harness.profiles import whose_guesses
from harness.rank_problems import rank_problems_with_model
from harness.run_parts import RunParts
from harness.schema import EngineSpec
from results.core_lists import parse_cores


def engine_problems(engine: Part[EngineSpec], computes: bool) -> Iterator[str]:
    """computes: whether a model runs, which learns by itself."""
    technique = engine.spec.technique
    if engine.spec.profile is not None:
        if not technique.wanted_prompts:
            yield f"engine {engine.label}: technique {technique.technique} learns nothing offline; remove profile"
        elif "calibration_prompts" in technique.model_fields_set:
            yield f"engine {engine.label}: a profile replaces calibration_prompts; remove one of them"
    elif computes and "estimator" in technique.learns:
        yield (
            f"engine {engine.label}: technique {technique.technique} needs a profile with an estimator; make one with"
            " `joulebench calibrate --estimator` and name it as profile"
        )
    from engines.cores import why_not_bound

    yield from _core_problems(engine.label, engine.spec.cores, why_not_bound)


def last_layer_problems(engine: Part[EngineSpec], devices: Sequence[DeviceSpec]) -> Iterator[str]:
    """Of an arm whose last layer shall leave tokens of a prompt out."""
    spec = engine.spec
    if spec.last_layer is None:
        return
    technique, told = spec.technique, f'engine {engine.label}: last_layer = "asked" leaves tokens of a prompt out'
    if not (isinstance(technique, Composed) and technique.choices.tokens_stand_alone):
        yield f"{told}, and {technique.technique} plans them together or with other layers; remove last_layer"
    for device in devices:
        if device.is_modelled and mismatch(spec, device) is None:
            yield f"{told}, and {device.name} prices all; name other devices in the engine, or remove last_layer"


def _core_problems(
    label: str, cores: CoreSets | None, why_not: Callable[[frozenset[int]], str | None]
) -> Iterator[str]:
    """Cores that this machine lacks, or that this process may not use: one line where both phases have them."""
    listed = {phase: own for phase, own in cores or () if own is not None}
    both = len(listed) == 2 and len(set(listed.values())) == 1
    for phase, own in listed.items():
        if reason := why_not(parse_cores(own)):
            yield f'engine {label}: cores "{own}"{"" if both else f" for {phase}"}: {reason}'
        if both:
            return


def other_core_problems(engine: Part[ExternalSpec], devices: Sequence[DeviceSpec]) -> Iterator[str]:
    """Where it goes onto this host."""
    named = engine.spec.devices
    if any(isinstance(device, HostSpec) and (named is None or device.name in named) for device in devices):
        yield from _core_problems(engine.label, engine.spec.cores, engine.spec.why_not_on)


def engine_problems_with_model(engine: Part[EngineSpec], facts: CheckpointFacts, run_parts: RunParts) -> Iterator[str]:
    technique = engine.spec.technique
    yield from rank_problems_with_model(engine, facts)
    if facts.config.moe is None and technique.wanted_prompts:
        yield (
            f"engine {engine.label}: technique {technique.technique} places experts, and {facts.source} is dense;"
            " use dropless"
        )
    route = technique.choices.route if isinstance(technique, Composed) else None
    if isinstance(route, PredictedParameters) and (reason := why_not(facts.config)) is not None:
        yield f"engine {engine.label}: technique {technique.technique} predicts experts: {reason}"
    quantise = engine.spec.quantise
    # Where this processor lacks the arithmetic the arm is left out.
    if (quantise.asked or quantise.rounding) and lacks_for(quantise) is None:
        try:
            check_quantisation(facts.config, quantise)
        except EngineError as error:
            yield f"engine {engine.label}: {error}"
    if engine.spec.profile is not None and technique.wanted_prompts and facts.config.moe is not None:
        yield from _profile_problems(engine.label, engine.spec.profile, technique, facts, run_parts)


def graph_problems(label: str, spec: CoremlSpec, facts: CheckpointFacts, run_parts: RunParts) -> Iterator[str]:
    from engines.coreml.conversion import model_in_the_way

    in_the_way = model_in_the_way(facts, spec.technique)
    yield from (f"engine {label}: {problem}" for problem in in_the_way)
    if spec.profile is not None and spec.technique.wanted_prompts and not in_the_way:
        yield from _profile_problems(label, spec.profile, spec.technique, facts, run_parts)


def _profile_problems(
    label: str, profile: str, technique: TechniqueParameters, facts: CheckpointFacts, run_parts: RunParts
) -> Iterator[str]:
    reason = run_parts.profile_mismatch(profile, facts) or run_parts.profile_lacks(profile, technique.learns)
    if reason:
        yield f"engine {label}: {reason}"


def hybrid_warning(engine: Part[EngineSpec], facts: CheckpointFacts, run_parts: RunParts) -> str | None:
    """Of a profile that has no problem."""
    name, technique = engine.spec.profile, engine.spec.technique
    if name is None or any(_profile_problems(engine.label, name, technique, facts, run_parts)):
        return None
    told = whose_guesses(run_parts.profile(name), technique)
    return told and f"engine {engine.label}: by profile {name} {told}"


def calibrated(engines: list[Part[EngineSpec]]) -> dict[str, int]:
    """Techniques that are calibrated on prompts, and the most that one of their engines asks for."""
    wanted: dict[str, int] = {}
    for technique in (engine.spec.technique for engine in engines if engine.spec.profile is None):
        if technique.wanted_prompts:
            most = max(wanted.get(technique.technique, 0), technique.wanted_prompts)
            wanted[technique.technique] = most
    return wanted
