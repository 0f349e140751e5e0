"""Experts over ranks: what each holds, what travels, and how uneven the work is.

Legend: T tokens, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from engines.dispatch import Routing
from engines.pricing.shapes import ModelShape, sizes_of
from engines.techniques.context import ModelSizes
from engines.techniques.place.packing import Packed, flat, heaviest
from engines.techniques.place.units import slices
from harness.reproduce.neuron.plans import counted, drawn_alike, planned_over

N_TOKENS = 1024
DEGREES = (2, 4, 8, 16)


class Worst(NamedTuple):
    """Work of the busiest group over the mean: the largest of all layers."""

    in_runs: float
    eplb: float
    """With one spare slot a rank, filled by the load."""


def worst_group(n_ranks: int) -> Worst:
    """Of the counted routing of the bundled model."""
    loads = list(counted().tokens_per_expert.values())
    return Worst(
        max(_over_mean(load_E, _runs(len(load_E), n_ranks)) for load_E in loads),
        max(_over_mean(load_E, flat(load_E, n_ranks, -(-len(load_E) // n_ranks) + 1)) for load_E in loads),
    )


def _runs(n_experts: int, n_ranks: int) -> Packed:
    """As the preset `expert-parallel` deals them."""
    return tuple(tuple(range(part.first, part.end)) for part in slices(n_experts, n_ranks))


def _over_mean(load_E: Sequence[int], ranks: Packed) -> float:
    return float(heaviest(load_E, ranks) / Fraction(sum(load_E), len(ranks)))


class Sent(NamedTuple):
    """Bytes a token that ranks send each other for the experts of a layer, routing included."""

    tensor_parallel: float
    all_gather: float
    all_to_all: float


def sent_bytes(shape: ModelShape, n_ranks: int) -> Sent:
    """In prefill, tokens dealt to the ranks, choices drawn with all experts alike."""
    sizes = sizes_of(shape)
    assert sizes is not None  # shapes of the guide have experts
    routing = drawn_alike(N_TOKENS, shape.n_experts, shape.top_k)
    return Sent(
        _bytes("tensor-parallel", routing, sizes, n_ranks),
        _bytes("expert-parallel", routing, sizes, n_ranks, exchange="all_gather"),
        _bytes("expert-parallel", routing, sizes, n_ranks, exchange="all_to_all"),
    )


def _bytes(name: str, routing: Routing, sizes: ModelSizes, n_ranks: int, **parameters: object) -> float:
    plan = planned_over(n_ranks, name, routing, sizes, "prefill", **parameters)
    return (plan.counters().bytes_exchanged or 0) / N_TOKENS


def rank_gb(shape: ModelShape, tensor: int, expert: int) -> float:
    """Of all experts, what a rank of tensor * expert ranks holds at most."""
    columns = -(-shape.expert_width // tensor)
    own = -(-shape.n_experts // expert)
    return shape.n_sparse_layers * own * 3 * shape.hidden * columns * shape.bytes_per_value / 1e9


def widest_tensor_parallel(shape: ModelShape, least_columns: int) -> int:
    """The largest power of two that leaves a rank so many columns of an expert."""
    fitting = [1 << n for n in range(12) if shape.expert_width >> n >= least_columns]
    return fitting[-1]
