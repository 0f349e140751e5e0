"""Dispatch plans of the guide's systems, of routings that are written down or drawn.

Legend: T tokens, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from engines.dispatch import DispatchPlan, Routing
from engines.pricing.generated_routing import DrawnRouting
from engines.pricing.routing_sources import RoutingSource, UniformRouting
from engines.profile import Profile
from engines.profile_files import BUNDLED_PROFILES, read_profile
from engines.techniques.context import BuildContext, ChunkPhase, LayerInput, ModelSizes
from engines.techniques.presets import preset_parameters

BUNDLED_MODEL = "tiny-qwen3-moe"


def routed(choices: Sequence[Sequence[int]], n_experts: int) -> Routing:
    """Of each token its experts, all of one weight."""
    ids_TK = torch.tensor(choices)
    return Routing(ids_TK, torch.ones(ids_TK.shape), n_experts)


def of_loads(loads: Sequence[int]) -> Routing:
    """A token for each pair: loads that no routing of top 2 gives have a plan too."""
    return routed([[expert] for expert, load in enumerate(loads) for _ in range(load)], len(loads))


def in_turn(n_tokens: int, n_experts: int, top_k: int) -> Routing:
    """Equal loads; tokens share no expert as long as there are others."""
    return routed([[(t * top_k + k) % n_experts for k in range(top_k)] for t in range(n_tokens)], n_experts)


def drawn_alike(n_tokens: int, n_experts: int, top_k: int, seed: int = 0) -> Routing:
    """Each token draws its experts, all alike."""
    return _first_layer(UniformRouting(seed), n_tokens, n_experts, top_k)


def drawn_as(counts_E: Sequence[int], n_tokens: int, top_k: int) -> Routing:
    """Each token draws its experts with the chances of these counts."""
    chances_E = np.array(counts_E, dtype=np.float64) * top_k / sum(counts_E)
    return _first_layer(DrawnRouting("counts", chances_E[None], top_k), n_tokens, len(counts_E), top_k)


def _first_layer(source: RoutingSource, n_tokens: int, n_experts: int, top_k: int) -> Routing:
    sizes = ModelSizes(n_experts, top_k, hidden=1, expert_width=1, expert_bytes=1, n_layers=1, n_sparse_layers=1)
    return routed(source.ids_LTK(sizes, n_tokens)[0].tolist(), n_experts)


def planned(name: str, routing: Routing, phase: ChunkPhase = "prefill", **parameters: object) -> DispatchPlan:
    """Of a preset with some parameters changed."""
    return planned_over(1, name, routing, None, phase, **parameters)


def planned_over(
    ranks: int,
    name: str,
    routing: Routing,
    sizes: ModelSizes | None,
    phase: ChunkPhase = "prefill",
    **parameters: object,
) -> DispatchPlan:
    """The same over ranks."""
    context = BuildContext(len(routing.expert_ids_TK), sizes, ranks=ranks)
    technique = preset_parameters(name).model_validate(parameters).build(context)
    return technique.plan(LayerInput(0, phase, routing))


def weight_loads_of(plan: DispatchPlan) -> int:
    found = plan.counters().weight_loads
    assert found is not None  # of plans that are played, not read from old records
    return found


def blocks_of(plan: DispatchPlan) -> list[tuple[int, list[int]]]:
    """(expert, tokens of its rows, -1 for padding) of each call."""
    return [
        (call.experts[0], plan.token_R[call.first_row : call.first_row + call.n_rows].tolist()) for call in plan.calls
    ]


@cache
def counted() -> Profile:
    """Which experts the bundled model chose over its calibration prompts: the one counted routing that is always
    here."""
    return read_profile(BUNDLED_PROFILES / BUNDLED_MODEL)
