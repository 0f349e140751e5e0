"""Techniques as tests build and ask them."""

from __future__ import annotations

from torch import Tensor

from engines.decode_layout import PLAIN, DecodeLayout
from engines.dispatch import DispatchPlan, Routing
from engines.profile import Profile
from engines.techniques.base import Technique
from engines.techniques.context import NOTHING, BuildContext, ChunkPhase, LayerInput, ModelSizes
from engines.techniques.place.ranks import RanksParameters
from engines.techniques.presets import PRESETS, dropless, preset_parameters

NpumoeT = preset_parameters("npumoe-t")


def built(
    name: str, chunk: int, profile: Profile | None = None, sizes: ModelSizes | None = None, **parameters: object
) -> Technique:
    """A preset with some parameters changed."""
    return preset_parameters(name).model_validate(parameters).build(BuildContext(chunk, sizes, profile))


def that_plan_alone() -> tuple[str, ...]:
    """Presets without other ranks, predictors and weights to fetch: a routing is all that their plans ask for."""
    return tuple(
        name
        for name, p in PRESETS.items()
        if not isinstance(p.choices.place, RanksParameters)
        and (p.choices.route.kind, p.choices.move.kind) == ("router", "nothing")
    )


def seen(
    routing: Routing, phase: ChunkPhase = "prefill", saliency_T: Tensor | None = None, layer: int = 0
) -> LayerInput:
    return LayerInput(layer, phase, routing, saliency_T)


class AsDropless:
    """Plans as dropless does, for tests that look on."""

    name = "as dropless"
    needs_saliency = False
    couples_tokens = False
    asks = NOTHING
    guesses = None
    batches_exactly = False

    def plan(self, seen: LayerInput) -> DispatchPlan:
        return dropless().plan(seen)

    def decode_layout(self, layer: int) -> DecodeLayout | None:
        return PLAIN
