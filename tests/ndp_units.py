"""Techniques with a GPU beside NDP units as tests build them, at plain prices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from devices.base import Unit
from engines.calls import Width
from engines.dispatch import DispatchPlan, Routing
from engines.shown import Shown
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import BuildContext, ChunkPhase, ModelSizes
from engines.techniques.presets import preset_parameters
from results.records import Request
from tests.test_ndp import SIZES, WIDTH

ON_GPU = ("ndp-tp-lb", "ndp-tp-pre", "ndp")
EIGHT = SIZES._replace(n_experts=12, top_k=8)


class Plain:
    """Seconds of an expert, whatever its rows: fetched, on the GPU, in slices on all units; and of a token's
    activations."""

    def __init__(self, fetch: float, gpu: float, ndp: float, activation: float = 0.0, by_rows: bool = False) -> None:
        self.times = fetch, gpu, ndp, activation
        self._by_rows = by_rows

    def call_s(self, unit: Unit, n_experts: int, n_rows: float, share: float = 1.0) -> float:
        assert n_experts == 1
        return self.times[1 if unit == "gpu" else 2] * (n_rows if self._by_rows else 1)

    def call_j(self, unit: Unit, n_experts: int, n_rows: float, share: float = 1.0) -> float:
        raise AssertionError("placed by seconds")

    def transfer_s(self, source: Unit, target: Unit, n_bytes: float) -> float:
        if (source, target) == ("cpu", "gpu"):
            assert n_bytes == SIZES.expert_bytes
            return self.times[0]
        assert source == "gpu"
        assert n_bytes == SIZES.hidden * SIZES.activation_bytes
        return self.times[3]

    def capacity_bytes(self, unit: Unit) -> float | None:
        return None


TWO_AND_A_THIRD = Plain(2, 6, 1)
"""With N = 2, K = 8: E_g = 7/3 (tests/test_balance.py)."""


def built(name: str, costs: Any, sizes: ModelSizes = SIZES, held: int | None = None, **given: object) -> Any:
    context = BuildContext(64, sizes, costs=costs, expert_slots=held)
    found = preset_parameters(name).model_validate(given).build(context)
    assert isinstance(found, ComposedTechnique)
    return found


class Engine:
    """What an engine does with plans: shows what happened, applies each once."""

    def __init__(self, technique: ComposedTechnique, sizes: ModelSizes = SIZES) -> None:
        self.technique, self.shown = technique, Shown(technique.asks, sizes)

    def plan(self, routing: Routing, phase: ChunkPhase, layer: int = 0, left: int = 0) -> DispatchPlan:
        if layer == 0:
            self.shown.start_step(left)
        seen = self.shown.layer(layer, phase, routing, None, None)  # type: ignore[arg-type]
        plan = self.technique.plan(seen)
        self.shown.ran(seen, plan)
        return plan

    def held(self, layer: int = 0) -> set[int]:
        assert self.shown.residency is not None
        return set(self.shown.residency.holds_E("gpu", layer).nonzero()[0].tolist())


def routed(*tokens: Sequence[int], n_experts: int = 6) -> Routing:
    return Routing(torch.tensor(tokens), torch.ones(len(tokens), len(tokens[0])), n_experts)


def on_gpu(plan: DispatchPlan) -> dict[int, Width]:
    calls = [call for call in plan.calls if call.unit == "gpu"]
    return {call.experts[0]: call.kind.width or Width(0, WIDTH) for call in calls}


class Anything(Plain):
    """Of experts of any size."""

    def transfer_s(self, source: Unit, target: Unit, n_bytes: float) -> float:
        return self.times[0 if target == "gpu" else 3]


def generation(prompt_ids: Sequence[int]) -> Request:
    return Request(
        request_id="r", sample_id="r", kind="generate", prompt_ids=tuple(prompt_ids), max_new_tokens=6,
        ignore_end_tokens=True,
    )  # fmt: skip
