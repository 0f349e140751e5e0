"""Whole requests of the engine as work to measure, and what a sheet makes of the same: prefill, and a decoded token."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from devices.base import Unit
from devices.models.sheet import Sheet
from devices.models.timeline import Timeline
from engines.base import PhaseListener, unheard
from engines.curves.pieces import most_few_flops
from engines.curves.rounds import Piece
from engines.dispatch import DispatchPlan
from engines.observers import StepPhase
from engines.pricing.block import Block
from engines.pricing.modelled import ModelledEngine, ObservedEngine
from engines.pricing.schedule import NUMBER_BYTES, experts_by_rows
from engines.pricing.shapes import ModelShape
from engines.pricing.steps import Steps
from engines.reference import ReferenceEngine
from results.records import Completion, Request


class Phases(NamedTuple):
    """Seconds of a request: to its first token, and of a later one (the median)."""

    prefill_s: float
    decode_s: float


class Answers(Protocol):
    """An engine, as far as it is asked here."""

    def run(self, request: Request, on_phase: PhaseListener) -> Completion: ...
    def reset(self) -> None: ...


def request_of(n_prompt: int, n_new: int, vocabulary: int, seed: int = 1) -> Request:
    """Random tokens."""
    random = torch.Generator().manual_seed(seed)
    prompt = torch.randint(1, vocabulary, (n_prompt,), generator=random).tolist()
    return Request(
        request_id="made",
        sample_id="made",
        kind="generate",
        prompt_ids=prompt,
        max_new_tokens=n_new,
        ignore_end_tokens=True,
    )


def phases_of(completion: Completion) -> Phases:
    """Of a request of two tokens or more."""
    assert completion.prefill_end_s is not None  # it generated
    times_s = completion.token_times_s
    gaps = [after - before for before, after in pairwise(times_s)]
    return Phases(completion.prefill_end_s - completion.start_s, statistics.median(gaps))


@dataclass(frozen=True)
class EngineRun:
    """`engines.curves.rounds.Work` of two pieces. name: for the reader. Nothing of one time is left for the next."""

    name: str
    engine: Answers
    shape: ModelShape
    request: Request
    chunk: int
    fetching_layers: float = 0.0
    """Of a decoded token: layers whose experts must travel."""
    prompt_fetches: float = 0.0
    """Of all steps that read the prompt: experts that must travel."""
    many_rows_bytes: float = 0.0
    """Of a decoded token: weights of experts that get more than few rows."""

    @property
    def pieces(self) -> Sequence[Piece]:
        n_prompt, n_layers = len(self.request.prompt_ids), self.shape.n_layers
        n_steps = -(-n_prompt // self.chunk)
        numbers = NUMBER_BYTES * n_layers * (1 + self.shape.top_k)
        prefill: dict[str, float] = {
            "step.launches": n_steps,
            "layer.launches": n_steps * n_layers,
            "layer.moved_bytes": numbers * n_prompt,
        }
        if self.prompt_fetches:
            prefill["prompt_fetch.launches"] = self.prompt_fetches
        decode: dict[str, float] = {"decode_step.launches": 1, "decode_layer.launches": n_layers}
        if self.fetching_layers:
            decode["fetching_layer.launches"] = self.fetching_layers
        if self.many_rows_bytes:
            decode["many_rows.moved_bytes"] = self.many_rows_bytes
        told = f"{self.name}; prompt of {n_prompt} in chunks of {self.chunk}"
        return Piece("prefill", told, prefill), Piece("decode", told, decode)

    def seconds(self) -> Sequence[float]:
        self.engine.reset()
        return phases_of(self.engine.run(self.request, unheard))


class Counted(NamedTuple):
    """In the plans of a request: in all steps that read its prompt, and in a decoded token."""

    of_prompt: float
    of_token: float


class _Seen:
    """A `StepObserver`: what is counted in the plans of each step, by phase."""

    def __init__(self, in_prompt: Callable[[DispatchPlan], float], in_token: Callable[[DispatchPlan], float]) -> None:
        self._in_prompt, self._in_token = in_prompt, in_token
        self.of_prompt = 0.0
        self.of_tokens: list[float] = []

    def step(self, n_tokens: int, kv_length: int, phase: StepPhase, plans: Sequence[DispatchPlan | None]) -> None:
        own = [plan for plan in plans if plan is not None]
        if phase == "decode":
            self.of_tokens.append(sum(map(self._in_token, own)))
        else:
            self.of_prompt += sum(map(self._in_prompt, own))


def _counted_in(
    engine: ReferenceEngine,
    request: Request,
    in_prompt: Callable[[DispatchPlan], float],
    in_token: Callable[[DispatchPlan], float],
) -> Counted:
    """Of tokens the median, as `Phases.decode_s` is: the mean would have the first tokens, whose cache lacks more."""
    seen = engine.observer = _Seen(in_prompt, in_token)
    try:
        engine.reset()
        engine.run(request, unheard)
    finally:
        engine.observer = None
    return Counted(seen.of_prompt, statistics.median(seen.of_tokens))


def fetches(engine: ReferenceEngine, request: Request) -> Counted:
    """Experts that must travel while the prompt is read, and layers of a decoded token whose experts must."""
    return _counted_in(engine, request, lambda plan: len(plan.transfers), lambda plan: len(plan.transfers) > 0)


def bytes_of_many_rows(engine: ReferenceEngine, request: Request, shape: ModelShape) -> float:
    """Of a decoded token of that request: `EngineRun.many_rows_bytes`."""
    block, most_few = Block(shape, "cpu", None, None), most_few_flops("expert_ffn", shape.bytes_of("experts"))

    def counted(plan: DispatchPlan) -> float:
        steps = Steps()
        block.add_to(steps, plan, 0, {})
        return sum(one.weight_bytes for one in experts_by_rows(steps.operations, most_few).many)

    return _counted_in(engine, request, lambda plan: 0, counted).of_token


def priced(engine: ObservedEngine, sheet: Sheet, shape: ModelShape, backbone: Unit, request: Request) -> Phases:
    """By the schedule of the plans that the engine makes of the request."""
    engine.reset()
    modelled = ModelledEngine(engine, Timeline(sheet), backbone, shape)
    return phases_of(modelled.run(request, unheard))
