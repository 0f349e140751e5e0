"""An engine without a model: it plays routing of a named source through a technique, in the place of one that computes.

Behind it is the modelled engine, which prices what it hears. Tokens are counted and nothing else is known of them: an
answer has a length and no text.

Legend: L layers with experts, T tokens, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NoReturn

import numpy as np
from torch import Tensor

from devices.models.timeline import Timeline
from engines.base import EngineError, HeldWeights, PhaseListener
from engines.calls import Integers
from engines.heat import HeatCounts
from engines.model.tokenizer import Tokenizer
from engines.observers import StepObserver
from engines.pricing.cells import (
    Cell,
    build,
    check_places_nothing,
    drawn,
    foresight_of,
    lacks_room_for,
)
from engines.pricing.counted_plans import CountedPlans
from engines.pricing.modelled import ModelledEngine
from engines.pricing.played import PlayedStep, dense_steps, played_steps, routing_of
from engines.pricing.shapes import ModelShape, sizes_of
from engines.profile import Profile
from engines.shown import Shown
from engines.techniques.base import Technique
from results.counters import EngineCounters
from results.environments import Road
from results.expert_heat import ExpertHeat
from results.records import NO_MODEL, Completion, Request

NO_TOKEN = 0
"""Stands for every token: nobody knows which."""
MOST_TOKENS = 1 << 20
"""Of a request, where a shape states no context."""


def most_tokens(shape: ModelShape) -> int:
    """Of a request, prompt and answer."""
    return MOST_TOKENS if shape.max_length is None else min(shape.max_length, MOST_TOKENS)


class TokenCounts(Tokenizer):
    """In the place of a tokenizer: prompts have a length, and one word counts as one token."""

    def __init__(self) -> None:
        self.name = NO_MODEL
        self.eos_token_ids = ()
        self.bos_token_id = None

    @property
    def vocabulary_size(self) -> int:
        return NO_TOKEN + 1

    def encode(self, text: str) -> list[int]:
        return [NO_TOKEN] * len(text.split())

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return f"({len(token_ids)} tokens of no text: {NO_MODEL})" if token_ids else ""

    def chat(self, messages: Sequence[dict[str, str]]) -> NoReturn:
        raise EngineError(f"a conversation needs a tokenizer, and {NO_MODEL}")


class PlayedEngine:
    """An `engines.pricing.modelled.ObservedEngine`. Request n since the last reset has the n-th sequence of the source;
    what one leaves in caches, the next finds."""

    needs_calibration = False

    def __init__(self, cell: Cell, tokenizer: Tokenizer) -> None:
        """cell: where and how it is computed; its lengths are those of the requests. Raises `NoRoomError` where the
        experts fit nowhere, and as `price_cell`."""
        if (lacks := lacks_room_for(cell)) is not None:
            raise lacks
        self.tokenizer = tokenizer
        self.observer: StepObserver | None = None
        self.max_length = most_tokens(cell.shape)
        self._cell, self._sizes = cell, sizes_of(cell.shape)
        self._technique: Technique | None = None
        if self._sizes is None:
            check_places_nothing(cell)
        else:
            self._foresight = foresight_of(cell, self._sizes)
            self._technique = build(cell, self._sizes, self._foresight)
            self._shown = Shown(self._technique.asks, self._sizes)
        self._counted, self._heat = CountedPlans(), HeatCounts()
        self._n_answered = 0

    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        """Its times are the listener's to say. Raises `EngineError` for a request whose text matters."""
        if request.kind != "generate" or request.stop:
            raise EngineError(f"request {request.request_id} asks for the text of an answer, and {NO_MODEL}")
        for played in self._steps(len(request.prompt_ids), max(0, request.max_new_tokens - 1)):
            if self.observer is not None:
                self.observer.step(played.step.n_tokens, played.step.kv_length, played.phase, played.plans)
            for layer, plan in enumerate(played.plans):
                if plan is not None:
                    self._counted.add(plan)
                    if plan.foretold is not None:
                        self._heat.foretold(layer, plan.foretold)
        self._n_answered += 1
        return Completion(
            request_id=request.request_id,
            sample_id=request.sample_id,
            n_prompt_tokens=len(request.prompt_ids),
            start_s=0.0,
            prefill_end_s=0.0,
            end_s=0.0,
            token_ids=(NO_TOKEN,) * request.max_new_tokens,
        )

    def _steps(self, n_prompt: int, n_decode: int) -> Iterator[PlayedStep]:
        cell, sizes = self._cell, self._sizes
        if sizes is None or self._technique is None:
            return dense_steps(cell.shape.n_layers, 1, cell.chunk, n_prompt, n_decode)
        ids_LTK = drawn(cell.routing, sizes, n_prompt + n_decode, self._n_answered)
        first = sizes.n_layers - sizes.n_sparse_layers
        for layer, ids_TK in enumerate(ids_LTK, first):
            self._hold(layer, ids_TK[:n_prompt], "prefill")
            self._hold(layer, ids_TK[n_prompt:], "decode")
        return played_steps(self._technique, self._shown, [ids_LTK], sizes, cell.chunk, n_prompt, self._foresight)

    def _hold(self, layer: int, ids_TK: Integers, phase: Literal["prefill", "decode"]) -> None:
        if self._sizes is not None and len(ids_TK):
            self._heat.hold(layer, routing_of(np.ascontiguousarray(ids_TK), self._sizes.n_experts), phase)

    def reset(self) -> None:
        """As before the first request, whose sequence comes again."""
        self._n_answered = 0
        if self._technique is not None:
            self._shown.reset()
            if self._foresight is not None:
                self._foresight.restart()

    def take_counters(self) -> EngineCounters:
        counted, self._counted = self._counted, CountedPlans()
        if self._technique is not None:
            counted.prefetched_unused = self._shown.take_unused()
        return counted.counters()

    def take_heat(self) -> ExpertHeat | None:
        return self._heat.take(None)

    def take_road(self) -> Road | None:
        """None: nothing was computed."""
        return None

    def calibrate(self, prompts: Sequence[Sequence[int]]) -> None:
        """A profile is counted over tokens of the source, when the engine is built."""

    def use_profile(self, profile: Profile) -> None:
        raise EngineError(f"a profile is of a model that runs, and {NO_MODEL}")

    def show_log_probabilities(self, request: Request, listener: Callable[[Tensor], object]) -> None:
        raise EngineError(f"request {request.request_id} asks for probabilities, and {NO_MODEL}")


class PlayedModelEngine(ModelledEngine):
    """Priced on virtual time, at a shape whose weights nobody has."""

    def __init__(self, cell: Cell, timeline: Timeline, tokenizer: Tokenizer) -> None:
        """timeline: of the cell's sheet. Raises as `PlayedEngine`."""
        super().__init__(PlayedEngine(cell, tokenizer), timeline, cell.unit, cell.shape)
        self._cell = cell

    def held_weights(self) -> HeldWeights:
        """As the shape says: norms and biases are not counted."""
        shape = self._cell.shape
        return HeldWeights(shape.parameters.total, math.ceil(shape.routed_bytes + shape.others_bytes))
