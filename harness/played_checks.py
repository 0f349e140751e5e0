"""Checks of a plan whose model does not run: shape, routing, and what each arm would need of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from devices.base import DeviceError
from engines.errors import EngineError, lines_of
from engines.pricing.cells import build, check_places_nothing, foresight_of, lacks_room_for
from engines.pricing.playing import MOST_TOKENS, most_tokens
from engines.pricing.shapes import sizes_of
from engines.techniques.idle import changed
from engines.techniques.parameters import Composed
from harness.combinations import mismatch, sheet_of
from harness.device_specs import DeviceSpec
from harness.fitted_sheets import fit_warning
from harness.matrix import Part, Parts, external_engines, own_engines
from harness.memory_checks import not_kept
from harness.model_specs import PlayedModelSpec
from harness.played_parts import NO_TEXT, PlayedFacts, played_cell
from harness.run_parts import RunParts
from harness.schema import EngineSpec
from harness.technique_problems import too_many_there
from harness.workload_problems import problem_of
from harness.workload_specs import SPEC_OF, WorkloadSpec
from workloads.base import WorkloadError
from workloads.fitting import reasons_for_none

FEW_TOKENS = 64
"""That a profile is counted over for a check: what fits does not hang on counts."""
OF_COMPUTING = {
    "profile": "was learnt from a model that runs; counts are those of the routing",
    "threads": "computes nothing faster",
    "reuse_prefix": "has no prompts to compare",
    "last_layer": "computes no prompt",
    "long_rope": "turns no token",
    "copy_bytes_per_s": "copies nothing",
    "decoding": "computes no token",
}
"""Settings of an engine that only a model which runs reads."""
OF_LEARNING = {
    "source": "predictions have the recall that model.recall states, whatever they are made from",
    "predictor": "predictions have the recall that model.recall states, whoever makes them",
    "calibration_prompts": "counts are those of the routing",
}
"""The same of a technique."""


@dataclass
class PlayedFindings:
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    empty: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    """By workload and model: why there is nothing to ask."""


def played_problems(named: Parts, run_parts: RunParts) -> PlayedFindings:
    """All of them; nothing of a plan whose models run."""
    found = PlayedFindings()
    models = {model.spec: model.wrong for model in named.models if isinstance(model.spec, PlayedModelSpec)}
    if not models:
        return found
    for device in named.devices:
        if not device.spec.is_modelled:
            found.problems.append(
                f"device {device.label}: measures what runs, and no model runs where shape is given; take"
                " modelled devices (`joulebench list devices`), or give model.source"
            )
        elif device.spec.priced_as:
            found.problems.append(
                f"device {device.label}: priced_as stands for another shape than the model's, and here the model is a"
                " shape; remove the line"
            )
    for other in external_engines(named.engines):
        found.problems.append(
            f"engine {other.label}: runs a model, and no model runs where shape is given; take it out, or give"
            " model.source"
        )
    for engine in own_engines(named.engines):
        found.problems += _engine_problems(engine)
    for workload in named.workloads:
        _look_at_workload(workload, models, run_parts, found)
    for spec, wrong in models.items():
        _look_at_model(spec, wrong, named, run_parts, found)
    return found


def _engine_problems(engine: Part[EngineSpec]) -> Iterator[str]:
    for key, why in OF_COMPUTING.items():
        if getattr(engine.spec, key) not in (None, False, "at_once"):
            yield f"engine {engine.label}: {key}: no model runs, and this {why}; remove the line"
    technique = engine.spec.technique
    if not isinstance(technique, Composed):
        yield f"engine {engine.label}: oracle checks what others compute, and no model runs; take dropless"
        return
    given = technique.given("route") | ({"calibration_prompts"} & changed(technique))
    for key, why in OF_LEARNING.items():
        if key in given:
            yield f"engine {engine.label}: technique.{key}: no model runs, and {why}; remove it"


def _look_at_workload(
    part: Part[WorkloadSpec], models: Iterable[PlayedModelSpec], run_parts: RunParts, found: PlayedFindings
) -> None:
    """Its requests, held to the context of each model as those of a model that runs are."""
    if not part.spec.asks_lengths:
        lengths = [name for name, spec in SPEC_OF.items() if spec.asks_lengths]
        found.problems.append(
            f"workload {part.label}: asks texts, and no model runs that could read them; take {' or '.join(lengths)}"
        )
        return
    for spec in models:
        try:
            most = most_tokens(run_parts.played(spec).shape)
        except EngineError:
            most = MOST_TOKENS  # what is wrong with the shape is told there
        try:
            workload = run_parts.workload_named(part.label, part.spec)
            if not workload.requests(NO_TEXT, most):
                found.empty[part.label, spec.source] = reasons_for_none(workload, part.label, most)
        except WorkloadError as error:
            found.problems.append(problem_of(part.label, error))


def _look_at_model(
    spec: PlayedModelSpec, wrong: frozenset[str], named: Parts, run_parts: RunParts, found: PlayedFindings
) -> None:
    """wrong: keys that are told already."""
    predicting = [engine.label for engine in own_engines(named.engines) if _predicts(engine.spec)]
    if predicting and spec.recall is None and "recall" not in wrong:
        found.problems.append(
            f"model.recall: missing; {', '.join(predicting)} predict{'s' * (len(predicting) == 1)} experts, and"
            f" no model runs that could; state the share that is right, such as recall = 0.9 (source 003)"
        )
    if spec.recall is not None and not predicting:
        found.problems.append(f"model.recall: {spec.recall} is of predictions, and no engine makes any; remove it")
    try:
        facts = run_parts.played(spec)
    except EngineError as error:
        for text in lines_of(error):
            if not text.startswith("routing: "):
                found.problems.append(f"model.shape: {text}")
            elif "routing" not in wrong:
                found.problems.append(f"model.{text}")
        return
    for engine in own_engines(named.engines):
        if not isinstance(engine.spec.technique, Composed) or (_predicts(engine.spec) and spec.recall is None):
            continue  # told
        for device in named.devices:
            if device.spec.is_modelled and mismatch(engine.spec, device.spec, plays=True) is None:
                _look_at_arm(spec, facts, engine, device.spec, found)


def _look_at_arm(
    spec: PlayedModelSpec, facts: PlayedFacts, engine: Part[EngineSpec], device: DeviceSpec, found: PlayedFindings
) -> None:
    """Builds the technique as the run will, with a smaller profile."""
    try:
        cell = played_cell(spec, facts, engine.spec, sheet_of(device), FEW_TOKENS)
        sizes = sizes_of(cell.shape)
        kept = None if sizes is None else not_kept(engine.spec, sizes, device)
        choices = engine.spec.technique.choices if isinstance(engine.spec.technique, Composed) else None
        if kept is None and sizes is not None and choices is not None:
            kept = too_many_there(choices, sizes, sizes, device)
        if kept is not None:
            found.problems.append(f"engine {engine.label}: {kept}")
        elif (lacks := lacks_room_for(cell)) is not None:
            found.warnings.append(f"engine {engine.label}: its cells will say {lacks}")
        elif (doubt := fit_warning(device, cell.shape)) is not None:
            found.warnings.append(doubt)
        elif facts.sizes is None:
            check_places_nothing(cell)
        else:
            technique = build(cell, facts.sizes, foresight_of(cell, facts.sizes))
            name = engine.spec.technique.technique
            if technique.asks.hidden_state:
                found.problems.append(f"engine {engine.label}: {name} reads hidden states, and no model runs")
            if technique.needs_saliency:
                found.warnings.append(
                    f"engine {engine.label}: {name} drops the least salient tokens, and no model runs that says"
                    " which: of those that overflow, the later ones go"
                )
    except (EngineError, DeviceError) as error:
        found.problems.append(f"engine {engine.label}: {error}")


def _predicts(engine: EngineSpec) -> bool:
    technique = engine.technique
    return isinstance(technique, Composed) and technique.choices.route.kind == "predicted"
