"""Steps of a model under techniques that fetch or execute what was told a layer ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engines.dispatch import DispatchPlan, Prediction, Routing
from engines.estimator import Estimator, EstimatorRecipe, estimator_shapes
from engines.model.checkpoints import load_checkpoint
from engines.model.transformer import Transformer
from engines.observers import SparseLayerStep
from engines.prediction import KnownState
from engines.profile import EstimatorOrigin, LayerAccuracy, Profile, ProfiledPredictions
from engines.profiling import profile_of
from engines.shown import Shown
from engines.sizes import own_sizes
from engines.techniques.base import Technique
from engines.techniques.context import BuildContext, ChunkPhase, ModelSizes
from engines.techniques.presets import preset_parameters

BUNDLED = "bundled:tiny-qwen3-moe"
FAMILIES = [
    "mixtral",
    "olmoe",
    "qwen2-moe",
    "phi-moe",
    "deepseek-v2-groups",
    "deepseek-v3",
    "llama4",
    "glm4-moe",
    "gpt-oss",
    "llama4-top2",
]
STEPS: tuple[tuple[int, ChunkPhase], ...] = ((9, "prefill"), (4, "prefill"), *[(1, "decode")] * 6)


def tokens(n: int = 19) -> Tensor:
    return torch.randint(1, 2000, (n,), generator=torch.Generator().manual_seed(5))


class Ran:
    """Logits of every token, and the plan of each layer of each step."""

    def __init__(
        self,
        model: Transformer,
        technique: Technique,
        sizes: ModelSizes | None,
        observer: Any = None,
        told: Callable[[int], object] = lambda step: None,
    ) -> None:
        shown, cache = Shown(technique.asks, sizes), model.new_cache()
        cache.start(sum(n for n, _ in STEPS))
        hidden: list[Tensor] = []
        self.plans: list[tuple[ChunkPhase, list[DispatchPlan]]] = []
        self.fused_steps = 0
        with torch.inference_mode():
            for number, (chunk, (_, phase)) in enumerate(
                zip(tokens().split([n for n, _ in STEPS]), STEPS, strict=True)
            ):
                shown.start_step(0)
                told(number)
                found, plans = model.forward(chunk, cache, technique, phase, observer, shown=shown)
                hidden.append(found)
                self.fused_steps += plans.is_fused
                self.plans.append((phase, [plan for plan in plans if plan is not None]))
            self.logits = model.logits(torch.cat(hidden))

    def off(self, other: Ran) -> float:
        return float((self.logits - other.logits).norm() / other.logits.norm())

    def of(self, phase: ChunkPhase) -> list[DispatchPlan]:
        return [plan for own, plans in self.plans if own == phase for plan in plans]


def loaded(source: str) -> tuple[Transformer, ModelSizes, Profile]:
    checkpoint = load_checkpoint(source, torch.float32)
    model, sizes = Transformer(checkpoint), own_sizes(checkpoint.config)
    assert sizes is not None
    profile = profile_of(model, model.new_cache(), [list(range(10, 58))], 24, True)
    return model, sizes, with_estimator(profile, sizes, model)


def with_estimator(
    profile: Profile, sizes: ModelSizes, model: Transformer, width: int = 8, largest: float = 0.0
) -> Profile:
    """A random one: what it guesses must be executed, right or wrong. largest: one of its weights."""
    assert model.config.moe is not None
    layers = sorted(model.config.moe.sparse_layers)
    generator = torch.Generator().manual_seed(4)
    shapes = estimator_shapes(len(layers) - 1, sizes.hidden, sizes.n_experts, width, 2)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if largest:
        drawn["reduce_WH"][0, 0] = largest
    estimator = Estimator(tuple(layers[:-1]), **drawn)
    row = LayerAccuracy(
        predictor="estimator", data="calibration", layer=layers[1], n_tokens=1, recall=1.0,
        rank_alignment=(1.0,) * sizes.top_k, cosine=None,
    )  # fmt: skip
    origin = EstimatorOrigin(recipe=EstimatorRecipe(), width=width, n_parameters=estimator.n_parameters, n_tokens=1)
    predictions = ProfiledPredictions(
        every=1, held_out=(), held_out_sha256=None, accuracies=(row,), estimator=origin, estimated_layers=(layers[0],)
    )
    return replace(profile, predictions=predictions, estimator=estimator)


def built(name: str, model: Transformer, sizes: ModelSizes, profile: Profile | None, **changes: object) -> Technique:
    return preset_parameters(name).model_validate(changes).build(BuildContext(16, sizes, profile, None, model))


class Recorded:
    """What routers chose, step by step, to be told again a layer ahead."""

    def __init__(self) -> None:
        self.routings: dict[tuple[int, int], Routing] = {}
        self._now = 0

    def step(self, number: int) -> None:
        self._now = number

    def layer(self, seen: SparseLayerStep) -> None:
        self.routings[self._now, seen.layer] = seen.routing

    def predict(self, known: KnownState) -> Prediction | None:
        later = [layer for step, layer in self.routings if step == self._now and layer > known.layer]
        return Prediction(min(later), self.routings[self._now, min(later)]) if later else None

    def rule(self, layer: int) -> None:
        """It must be asked."""
