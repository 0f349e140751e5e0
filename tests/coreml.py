"""The bundled model as packages of Core ML, and engines that answer with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engines.coreml.conversion import Asked, Conversion
from engines.coreml.interpreter import Arithmetic, Interpreter
from engines.coreml.manifest import Manifest, Weights
from engines.coreml.transformer import CoremlTransformer, Variant
from engines.dispatch import DispatchPlan
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.profile import Profile
from engines.profile_files import profile_folder, read_profile
from engines.reference import ReferenceEngine
from engines.techniques.base import Technique, TechniqueParameters
from engines.techniques.context import ChunkPhase, LayerInput
from engines.techniques.presets import preset_parameters
from harness.coreml_convert import convert_all
from results.records import Request

BUNDLED = "bundled:tiny-qwen3-moe"
CHUNK, CONTEXT = 64, 256
NO_DIGEST = "0" * 64


class Converted(NamedTuple):
    folder: Path
    manifest: Manifest
    checkpoint: Checkpoint
    profile: Profile
    interpreters: dict[Arithmetic, Interpreter]
    """Those that have read the packages: `model_of` reads them once in each arithmetic."""


def bundled_profile() -> Profile:
    return read_profile(profile_folder(BUNDLED))


def converted(name: str, folder: Path, weights: Weights = "float16", attention: str = "both") -> Converted:
    """With weights rounded to fp16, as packages hold them, in both the packages and torch."""
    checkpoint = load_checkpoint(BUNDLED, torch.float16)
    profile = bundled_profile()
    allowed = weights == "int4"
    asked = Asked(preset_parameters(name)(), CHUNK, CONTEXT, weights, attention, allow_int4_known_to_crash=allowed)
    conversion = Conversion(BUNDLED, asked, profile, NO_DIGEST, checkpoint=checkpoint)
    convert_all(conversion, folder)
    return Converted(folder, conversion.manifest, checkpoint, profile, {})


def engine_of(
    found: Converted, technique: TechniqueParameters, model: CoremlTransformer | None = None
) -> ReferenceEngine:
    engine = ReferenceEngine(found.checkpoint, technique, CHUNK, threads=1, model=model)
    if engine.needs_calibration:
        engine.use_profile(found.profile)
    return engine


def model_of(found: Converted, arithmetic: Arithmetic, variant: Variant = "stateless") -> CoremlTransformer:
    if arithmetic not in found.interpreters:
        found.interpreters[arithmetic] = Interpreter(found.folder, arithmetic)
    return CoremlTransformer(found.checkpoint, found.manifest, found.interpreters[arithmetic], variant)


def prompt(checkpoint: Checkpoint, n_tokens: int) -> tuple[int, ...]:
    return tuple(checkpoint.tokenizer.encode_prompt("The needle of the tower is 48213. " * 20)[:n_tokens])


def generation(prompt_ids: Sequence[int], n_tokens: int) -> Request:
    return Request(
        request_id="generation",
        sample_id="generation",
        kind="generate",
        prompt_ids=tuple(prompt_ids),
        max_new_tokens=n_tokens,
        ignore_end_tokens=True,
    )


class Recorded(NamedTuple):
    """Of a prompt read chunk by chunk, and of tokens decoded one by one: logits of all positions, and of each step and
    layer the plan and what it was made of."""

    logits_TL: Tensor
    plans: list[DispatchPlan]
    seen: list[LayerInput]


class EndedError(Exception):
    """Nobody asks for what would be computed next."""


class Planner:
    """A technique that keeps its plans, or one that gives kept plans again, whatever the routers say then: what is
    left between two readers of the same plans is their arithmetic. ends: whether nobody asks for more than this plan,
    by its place."""

    def __init__(
        self,
        technique: Technique,
        plans: list[DispatchPlan] | None = None,
        ends: Callable[[int, DispatchPlan], bool] | None = None,
    ) -> None:
        self._technique, self._left, self._ends = technique, None if plans is None else list(plans), ends
        self.asks = technique.asks._replace(hidden_state=True)
        self.plans: list[DispatchPlan] = []
        self.seen: list[LayerInput] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._technique, name)

    def plan(self, seen: LayerInput) -> DispatchPlan:
        made = self._technique.plan(seen) if self._left is None else self._left.pop(0)
        self.plans.append(made)
        self.seen.append(seen)
        if self._ends is not None and self._ends(len(self.plans) - 1, made):
            raise EndedError
        return made


@torch.inference_mode()
def recorded(
    engine: ReferenceEngine,
    tokens: Sequence[int],
    plans: list[DispatchPlan] | None = None,
    decoded: Sequence[int] = (),
    ends: Callable[[int, DispatchPlan], bool] | None = None,
) -> Recorded:
    """decoded: what follows the prompt, whatever the model would choose. Plans of these are recorded and followed where
    each layer waits for its plan: `tests.half_reader.PlannedReader`. ends: see `Planner`; the step of its last plan has
    no logits."""
    from engines.shown import Shown

    technique = Planner(engine._ready(), plans, ends)
    cache = engine._model.new_cache()
    cache.start(len(tokens) + len(decoded))
    shown = Shown(technique.asks, engine._sizes)
    steps: list[tuple[Tensor, ChunkPhase]] = [(one, "prefill") for one in torch.split(torch.tensor(tokens), CHUNK)]
    steps += [(torch.tensor([token]), "decode") for token in decoded]
    hidden: list[Tensor] = []
    with suppress(EndedError):
        for chunk_T, phase in steps:
            found_TH, _ = engine._model.forward(chunk_T, cache, technique, phase, shown=shown)  # type: ignore[arg-type]
            hidden.append(found_TH)
    logits_TL = (
        engine._model.logits(torch.cat(hidden)) if hidden else torch.empty(0, engine._model.config.vocabulary_size)
    )
    return Recorded(logits_TL, technique.plans, technique.seen)
