"""Where replicas of busy experts lie, so that ranks have equal work: expert-parallel load balancing (EPLB).

As DeepSeek publishes it (github.com/deepseek-ai/EPLB), in three greedy steps:

    replicate   every further slot goes to the expert whose replicas have the most work each
    pack        the replica with the most work goes to the rank with the least so far that has a slot free
    hierarchy   groups of experts are packed into nodes first; replicas are then made and packed inside each node, so
                that the tokens of a group travel to one node

Greedy is not best: `tests/test_packing.py` holds it against all packings of small cases, and shows the gap.

Legend: E experts, N ranks, G groups, S slots of a rank, B bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heapreplace

Packed = tuple[tuple[int, ...], ...]
"""Of each bin what lies in it; of ranks, experts with multiplicity, in ascending order."""


def replicas(load_E: Sequence[int], n_slots: int) -> list[int]:
    """How many of each expert there are in n_slots slots, at least one each. Equal loads: the lower expert first.

    Best for the largest load of a replica: a proof by exchange, and a test against all ways.
    """
    n_E = [1] * len(load_E)
    # Of most work per replica first; of equal ones the lower index.
    heap = [(Fraction(-load), expert) for expert, load in enumerate(load_E)]
    heapify(heap)
    for _ in range(n_slots - len(load_E)):
        expert = heap[0][1]
        n_E[expert] += 1
        heapreplace(heap, (Fraction(-load_E[expert], n_E[expert]), expert))
    return n_E


def packed(loads: Sequence[Fraction], n_bins: int) -> Packed:
    """Items into bins of equally many, the largest first, each into the bin with the least load that has room.

    len(loads) is a multiple of n_bins.
    """
    room = len(loads) // n_bins
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    load_B = [Fraction(0)] * n_bins
    for item in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        best = min((b for b in range(n_bins) if len(bins[b]) < room), key=lambda b: (load_B[b], b))
        bins[best].append(item)
        load_B[best] += loads[item]
    return tuple(tuple(sorted(own)) for own in bins)


def flat(load_E: Sequence[int], n_ranks: int, slots: int) -> Packed:
    """The experts of each rank. n_ranks * slots is at least E."""
    n_E = replicas(load_E, n_ranks * slots)
    # All experts once, then their replicas: of equal loads different experts come first, and share a rank.
    physical = [expert for turn in range(max(n_E)) for expert, n in enumerate(n_E) if n > turn]
    own = packed([Fraction(load_E[e], n_E[e]) for e in physical], n_ranks)
    return tuple(tuple(sorted(physical[i] for i in of_rank)) for of_rank in own)


def hierarchical(load_E: Sequence[int], n_ranks: int, slots: int, n_groups: int, n_nodes: int) -> Packed:
    """The experts of each rank, ranks of a node one after another. Groups are runs of E / G experts; n_nodes divides
    both n_groups and n_ranks."""
    size = len(load_E) // n_groups
    group_loads = [Fraction(sum(load_E[g * size : (g + 1) * size])) for g in range(n_groups)]
    ranks: list[tuple[int, ...]] = []
    for groups in packed(group_loads, n_nodes):
        experts = [e for g in groups for e in range(g * size, (g + 1) * size)]
        inside = flat([load_E[e] for e in experts], n_ranks // n_nodes, slots)
        ranks += [tuple(sorted(experts[i] for i in own)) for own in inside]
    return tuple(ranks)


def heaviest(load_E: Sequence[int], ranks: Packed) -> Fraction:
    """The work of the busiest rank, where each expert's is shared evenly by its replicas."""
    n_E = [sum(own.count(expert) for own in ranks) for expert in range(len(load_E))]
    return max(sum((Fraction(load_E[e], n_E[e]) for e in own), Fraction(0)) for own in ranks)
