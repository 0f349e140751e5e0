"""Which graphs a technique needs, asked of the technique itself: what it plans for routings that say everything.

No list of techniques is here. A plan is made of routings that give every expert a row, or all tokens one choice of
experts, and its calls on the NPU are the graphs. Where one set of experts has calls of several sizes, the technique
follows the routing, and no frozen shape is its own: then there is a graph for each power of two between the sizes, of
which a call takes the smallest that holds it.

A graph has a multiple of 32 rows (64 bytes of fp16), whatever the plan's capacity is. The plan is not changed: a call
of 16 rows is predicted with 16 rows of zeros behind them, which cost room and work on the NPU, and no token.

Legend: T tokens, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from engines.calls import Calls
from engines.dispatch import Routing
from engines.errors import EngineError
from engines.shown import Shown
from engines.techniques.base import Technique
from engines.techniques.context import ChunkPhase, ModelSizes

Sizes = Mapping[tuple[int, ...], tuple[int, ...]]
"""Rows of each expert, ascending, by the experts of a call."""
ALIGN = 32
"""Rows that a graph is rounded up to: 64 bytes of fp16, to which the Neural Engine is reported to align the last axis.
000 §3.2 rounds capacities to 16; those stay the plan's."""


def npu_graphs(technique: Technique, sizes: ModelSizes, layer: int, chunk: int) -> Sizes:
    """Of a sparse layer. Raises `EngineError` for calls that no graph of whole experts computes."""
    found: dict[tuple[int, ...], dict[ChunkPhase, set[int]]] = {}
    for phase, routing in _routings(sizes, chunk):
        for calls in _calls(technique, sizes, layer, phase, routing, chunk):
            for call in calls:
                if call.unit == "cpu":
                    continue
                if call.unit != "npu":
                    raise EngineError(f"{technique.name} computes on {call.unit}; Core ML graphs run on npu and cpu")
                if not call.kind.is_whole:
                    raise EngineError(f"{technique.name} computes slices of experts, and a graph has whole ones")
                rows = set(call.rows_per_expert)
                if len(rows) != 1:
                    raise EngineError(f"{technique.name} has tiers {sorted(rows)} in one call, and a graph has one")
                if rows != {0}:
                    found.setdefault(call.experts, {}).setdefault(phase, set()).update(rows)
    return {experts: _steps(of_phases) for experts, of_phases in sorted(found.items())}


def _steps(of_phases: Mapping[ChunkPhase, set[int]]) -> tuple[int, ...]:
    steps: set[int] = set()
    for rows in of_phases.values():
        size, most = aligned(min(rows)), aligned(max(rows))
        while size < most:
            steps.add(size)
            size *= 2
        steps.add(size)
    return tuple(sorted(steps))


def aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _calls(
    technique: Technique, sizes: ModelSizes, layer: int, phase: ChunkPhase, routing: Routing, chunk: int
) -> Iterator[Calls]:
    shown = Shown(technique.asks, sizes)
    if phase == "decode" and shown.counts is not None:
        # The graphs of a prefill that was as uneven as any.
        for n_tokens in (1, chunk):
            shown.counts.reset()
            shown.counts.add(layer, "prefill", torch.arange(sizes.top_k).expand(n_tokens, -1))
            seen = shown.layer(layer, phase, routing, torch.ones(len(routing.expert_ids_TK)), None)
            yield technique.plan(seen).calls
        return
    yield technique.plan(shown.layer(layer, phase, routing, torch.ones(len(routing.expert_ids_TK)), None)).calls


def _routings(sizes: ModelSizes, chunk: int) -> Iterator[tuple[ChunkPhase, Routing]]:
    """Prefill of whole chunks and of one token, spread over all experts or heaped on some; decode of each expert."""
    n_experts, top_k = sizes.n_experts, sizes.top_k
    every = [[(first + k) % n_experts for k in range(top_k)] for first in range(0, n_experts, top_k)]
    phases: tuple[ChunkPhase, ...] = ("prefill", "decode")
    for n_tokens in dict.fromkeys((1, min(chunk, len(every)), chunk)):
        for first in range(0, len(every), n_tokens):
            chosen = [every[(first + t) % len(every)] for t in range(n_tokens)]
            yield "prefill", _routing(chosen, n_experts)
    for choice in every:
        for phase in phases:
            yield phase, _routing([choice] * (chunk if phase == "prefill" else 1), n_experts)


def _routing(chosen: Sequence[Sequence[int]], n_experts: int) -> Routing:
    ids_TK = torch.tensor(chosen, dtype=torch.int64)
    return Routing(ids_TK, torch.full(ids_TK.shape, 1 / ids_TK.shape[1]), n_experts)
