"""Rows of NPUMoE (000) that follow from a model's sizes, or from the rules of its techniques: worked examples.

Sizes are those of published configurations (`engines.pricing.shapes`); examples are what our techniques plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch

from engines.dispatch import DispatchPlan, Routing
from engines.pricing.published_shapes import NAMED_SHAPES, PHI_3_5_MOE
from engines.pricing.shapes import ModelShape, sizes_of
from engines.profile import Profile
from engines.techniques.context import BuildContext, LayerInput
from engines.techniques.layout.tiers import expected_load
from engines.techniques.presets import preset_parameters
from harness.reproduce.npumoe import places
from harness.reproduce.npumoe.places import TABLE_5, claim
from results.units import GIB, MIB

MODELS = ("phi-3.5-moe", "phi-tiny-moe", "qwen3-30b-a3b")
"""Rows of Table 1."""


def table_1(name: str) -> tuple[float, ...]:
    """Layers, parameters and active parameters in 1e9, E, K, E / K. Active: with the embedding, as the makers count."""
    shape = NAMED_SHAPES[name]
    total, active = shape.parameters
    n_experts, top_k = shape.n_experts, shape.top_k
    embedded = active + shape.vocabulary * shape.hidden
    return shape.n_layers, total / 1e9, embedded / 1e9, n_experts, top_k, n_experts / top_k


def other_counts(name: str) -> str:
    """Why active parameters are not as Table 1 prints them."""
    shape = NAMED_SHAPES[name]
    met, table = shape.parameters.active, shape.vocabulary * shape.hidden
    return (
        f"Ours counts embedding and head. It is {met / 1e9:.2f} without the embedding, {(met - table) / 1e9:.2f}"
        " without both; none rounds to theirs."
    )


def checkpoint_gb(shape: ModelShape) -> float:
    """In FP16, with what is no matrix: norms of weight and bias, and biases of attention and head, as Phi has them."""
    hidden, head_dim = shape.hidden, shape.head_dim
    norms = 2 * hidden * (2 * shape.n_layers + 1)
    biases = shape.n_layers * ((shape.n_heads + 2 * shape.n_kv_heads) * head_dim + hidden) + shape.vocabulary
    return (shape.parameters.total + (norms + biases if shape.name.startswith("phi") else 0)) * 2 / 1e9


def sizes() -> dict[str, tuple[float, ...]]:
    """By claim."""
    found: dict[str, tuple[float, ...]] = {}
    for first, name in zip((22, 27, 32), MODELS, strict=True):
        layers, total, active, n_experts, top_k, sparsity = table_1(name)
        found |= {
            claim(first): (layers,),
            claim(first + 1): (total,),
            claim(first + 2): (active,),
            claim(first + 3): (n_experts, top_k),
            claim(first + 4): (sparsity,),
        }
    checkpoints = {claim(37 + i): (checkpoint_gb(NAMED_SHAPES[name]),) for i, name in enumerate(MODELS[:2])}
    qwen = NAMED_SHAPES[MODELS[2]]
    eight_bit_gib = qwen.parameters.total / GIB
    expert_mib = PHI_3_5_MOE.expert_weights * PHI_3_5_MOE.bytes_per_value / MIB
    return {**found, **checkpoints, claim(39): (checkpoint_gb(qwen), eight_bit_gib), claim(21): (expert_mib,)}


def examples() -> dict[str, tuple[float, ...]]:
    """By claim: the busiest expert of §4.1, the graph limit and the packing of §4.2, and the graphs of Table 5."""
    relative_load = [Fraction(load) for load in (2, 2, 2, 2, 0, 0, 0, 0)]
    busiest = max(expected_load(relative_load, chunk=256, top_k=1))  # its formula has no K
    graphs = {places.table_5(config, "graphs"): (float(n_graphs(config[0])),) for config in TABLE_5}
    return {**graphs, claim(19): (float(busiest),), claim(20): (largest_graph_gib(),)}


def n_graphs(group_size: int) -> int:
    """Of a layer of Phi-3.5-MoE whose experts share one tier."""
    return len(_tiers(group_size, tuple([2] * 16)).calls)


def largest_graph_gib() -> float:
    """Groups of 16 are asked for; the experts of Phi-3.5-MoE go into one graph as far as its weights allow."""
    most = max(len(call.experts) for call in _tiers(16, tuple([2] * 16)).calls)
    return most * PHI_3_5_MOE.expert_weights * PHI_3_5_MOE.bytes_per_value / GIB


class Packed(NamedTuple):
    """Tokens of each expert of a graph, rows of each, and the padded ones in percent."""

    tokens: tuple[int, ...]
    capacity: int
    padded: float


def packing() -> Packed:
    """Four experts in one graph of C = 64 (§4.2)."""
    parameters = preset_parameters("npumoe-tg").model_validate({"multiples": (2,), "align": 1})
    technique = parameters.build(BuildContext(128, sizes_of(PHI_3_5_MOE), Profile({0: (1,) * 4}, 1, 1)))
    plan = technique.plan(_layer((64, 32, 32, 0)))
    (call,) = plan.calls
    counted = plan.counters()
    return Packed(call.valid_per_expert, call.rows_per_expert[0], 100 * counted.padded_rows / counted.computed_rows)


def _tiers(group_size: int, loads: Sequence[int]) -> DispatchPlan:
    """A layer in groups of one tier."""
    parameters = preset_parameters("npumoe-tg").model_validate({"group_size": group_size})
    technique = parameters.build(BuildContext(256, sizes_of(PHI_3_5_MOE), Profile({0: (1,) * len(loads)}, 2, 1)))
    return technique.plan(_layer(loads))


def _layer(loads: Sequence[int]) -> LayerInput:
    """A layer whose experts have so many tokens, one expert a token."""
    experts = torch.tensor([expert for expert, load in enumerate(loads) for _ in range(load)])[:, None]
    routing = Routing(experts, torch.ones(experts.shape), len(loads))
    return LayerInput(0, "prefill", routing, torch.ones(len(experts)))
