"""What a plan whose model does not run is built of: its shape, its source of routing, and a cell to play."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from devices.models.sheet import Sheet
from engines.errors import EngineError
from engines.model.config_values import told as told_value
from engines.model.model_config import CONFIG_FILE
from engines.pricing.cells import Cell
from engines.pricing.playing import TokenCounts
from engines.pricing.routing_sources import RoutingSource, UniformRouting
from engines.pricing.routing_specs import routing_of_spec
from engines.pricing.shapes import ModelShape, config_of_shape, quantised, shape_named, sizes_of
from engines.techniques.context import ModelSizes
from engines.techniques.parameters import Composed
from harness.model_specs import PlayedModelSpec, routing_path
from harness.schema import EngineSpec

NO_TEXT = TokenCounts()


@dataclass(frozen=True)
class PlayedFacts:
    """sizes, routing: None of a dense model."""

    shape: ModelShape
    sizes: ModelSizes | None
    routing: RoutingSource | None

    def named(self, label: str) -> str:
        """The model as every table calls it: with its source of routing."""
        return label if self.routing is None else f"{label}; routing: {self.routing.name}"


def played_facts(spec: PlayedModelSpec) -> PlayedFacts:
    """Raises `EngineError`."""
    shape = shape_named(spec.shape)
    sizes = sizes_of(shape)
    if sizes is None:
        if spec.routing is not None:
            raise EngineError(f"routing: {shape.name} is dense, and nothing is routed; remove the line")
        return PlayedFacts(shape, None, None)
    if spec.routing is None:
        raise EngineError(
            "routing: missing; a model that does not run says where its routing comes from, such as"
            ' routing = { kind = "uniform" }'
        )
    try:
        return PlayedFacts(shape, sizes, routing_of_spec(spec.routing, sizes))
    except EngineError as error:
        raise EngineError(f"routing: {error}") from error


def played_cell(
    spec: PlayedModelSpec, facts: PlayedFacts, engine: EngineSpec, sheet: Sheet, calibration_tokens: int = 4096
) -> Cell:
    """Where and how requests are computed; of no length. Raises `EngineError`."""
    technique = engine.technique
    if not isinstance(technique, Composed):
        raise EngineError(f"{technique.technique} checks what others compute, and no model runs; take dropless")
    shape = quantised_shape(facts, engine)
    n_bytes = engine.expert_memory
    return Cell(
        sheet,
        shape,
        technique,
        facts.routing or UniformRouting(),
        prompt_tokens=1,
        chunk=engine.prefill_chunk,
        recall=spec.recall if technique.choices.route.kind == "predicted" else None,
        expert_slots=None if n_bytes is None else int(n_bytes / shape.expert_bytes),
        calibration_tokens=calibration_tokens,
        ranks=engine.ranks or 1,
    )


def quantised_shape(facts: PlayedFacts, engine: EngineSpec) -> ModelShape:
    """As the engine stores its weights. Raises `EngineError` for components that the shape does not have."""
    shape, asked = facts.shape, engine.quantise.asked
    if "experts" in asked and not shape.n_experts:
        raise EngineError(f"quantise.experts = {told_value(asked['experts'])}: {shape.name} is dense; name dense")
    if "dense" in asked and not (shape.dense_width or shape.shared_width):
        raise EngineError(
            f"quantise.dense = {told_value(asked['dense'])}: {shape.name} has no dense layer and no shared expert;"
            " remove it"
        )
    return quantised(shape, engine.quantise) if asked else shape


def played_files(spec: PlayedModelSpec) -> dict[str, Path]:
    """The files that its figures come from, by what they are."""
    found, path = {}, config_of_shape(spec.shape)
    if path is not None:
        found[f"{CONFIG_FILE} of shape {spec.label}"] = path
    own = routing_path(spec)
    if own is not None:
        found[f"routing {own}"] = own
    return found
