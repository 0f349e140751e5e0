"""Experts with replicas over ranks: against all packings of small cases, DeepSeek's example, and by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.dispatch import Routing
from engines.profile import Profile
from engines.techniques.context import BuildContext, LayerInput, ModelSizes
from engines.techniques.over_ranks import own_segments
from engines.techniques.place.packing import flat, heaviest, hierarchical, packed, replicas
from tests.ranks import technique


def ways_to_replicate(n_experts: int, n_slots: int) -> Iterator[tuple[int, ...]]:
    """Every way to have n_experts experts in n_slots slots, at least one each."""
    for cuts in combinations(range(1, n_slots), n_experts - 1):
        ends = (0, *cuts, n_slots)
        yield tuple(b - a for a, b in pairwise(ends))


def ways_to_pack(items: Sequence[Fraction], n_bins: int, room: int) -> Fraction:
    """The least load of the heaviest bin over all packings of exactly `room` items a bin."""
    best = sum(items, Fraction(0))
    for bins in product(range(n_bins), repeat=len(items)):
        if all(bins.count(b) == room for b in range(n_bins)):
            loads = [
                sum((x for x, own in zip(items, bins, strict=True) if own == b), Fraction(0)) for b in range(n_bins)
            ]
            best = min(best, max(loads))
    return best


def optimum(load_E: Sequence[int], n_ranks: int, slots: int) -> Fraction:
    """Over all replications and all packings."""
    return min(
        ways_to_pack([Fraction(load, n) for load, n in zip(load_E, n_E, strict=True) for _ in range(n)], n_ranks, slots)
        for n_E in ways_to_replicate(len(load_E), n_ranks * slots)
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=2, max_size=4), st.integers(0, 3))
def test_replication_is_best_for_the_heaviest_replica(load_E: list[int], spare: int) -> None:
    found = replicas(load_E, len(load_E) + spare)
    assert sum(found) == len(load_E) + spare
    worst = max(Fraction(load, n) for load, n in zip(load_E, found, strict=True))
    assert worst == min(
        max(Fraction(load, n) for load, n in zip(load_E, n_E, strict=True))
        for n_E in ways_to_replicate(len(load_E), len(load_E) + spare)
    )


def test_greedy_is_within_a_third_of_the_best_on_all_small_cases() -> None:
    """Every four loads of 0 to 4 on two ranks of two and of three slots."""
    worst = Fraction(1)
    for load_E in combinations_with_replacement(range(5), 4):
        for slots in (2, 3):
            ranks = flat(load_E, 2, slots)
            assert all(len(own) == slots for own in ranks)
            assert {e for own in ranks for e in own} == {0, 1, 2, 3}
            best, found = optimum(load_E, 2, slots), heaviest(load_E, ranks)
            assert best <= found
            worst = max(worst, found / best if best else Fraction(1))
    assert 1 < worst <= Fraction(4, 3), "greedy is not best, and not far from it"


@pytest.mark.parametrize(
    ("n_experts", "n_ranks", "worst"), [(4, 2, Fraction(1)), (6, 2, Fraction(7, 6)), (6, 3, Fraction(1))]
)
def test_without_spare_slots_greedy_keeps_to_grahams_bound(n_experts: int, n_ranks: int, worst: Fraction) -> None:
    """4/3 - 1/(3m), proven for the same rule without room to mind; every multiset of loads of 0 to 4. Two ranks meet it
    exactly, for example at 4 2 2 2 1 1: 4 2 1 against 2 2 1, and 4 1 1 against 2 2 2 is best."""
    slots, found = n_experts // n_ranks, Fraction(1)
    for load_E in combinations_with_replacement(range(5), n_experts):
        if any(load_E):
            found = max(found, heaviest(load_E, flat(load_E, n_ranks, slots)) / optimum(load_E, n_ranks, slots))
    assert found == worst
    assert found <= Fraction(4, 3) - Fraction(1, 3 * n_ranks)


GAPS = (
    # loads, slots of each of two ranks, greedy, best
    ((8, 7, 6, 5, 4, 0), 3, Fraction(17), Fraction(15)),
    ((3, 3, 2, 2, 2, 0), 3, Fraction(7), Fraction(6)),
    ((10, 1, 1, 1), 2, Fraction(11), Fraction(11)),
    # 10 in three: 10/3 + 10/3 + 1 against 10/3 + 1 + 1. Best: two of 10 and of a 1, so 5 + 1 + 1/2 on each rank.
    ((10, 1, 1, 1), 3, Fraction(23, 3), Fraction(13, 2)),
    # The busy one gets three of six slots: two on one rank. Best: two of it, one on each.
    ((4, 0, 0, 0), 3, Fraction(8, 3), Fraction(2)),
)


@pytest.mark.parametrize(("load_E", "slots", "greedy", "best"), GAPS)
def test_the_gap_of_greedy_packing(load_E: tuple[int, ...], slots: int, greedy: Fraction, best: Fraction) -> None:
    """Greedy gives 8 5 4 | 7 6 0 for the first, and 8 7 0 | 6 5 4 is best."""
    assert heaviest(load_E, flat(load_E, 2, slots)) == greedy
    assert optimum(load_E, 2, slots) == best


def test_hierarchy_keeps_a_group_in_its_node() -> None:
    """Four groups of two on two nodes of two ranks: 90 | 60 | 40 | 10 pack as {90, 10} and {60, 40}."""
    load_E = [80, 10, 30, 30, 20, 20, 5, 5]
    ranks = hierarchical(load_E, 4, 3, n_groups=4, n_nodes=2)
    assert {e for own in ranks[:2] for e in own} == {0, 1, 6, 7}
    assert {e for own in ranks[2:] for e in own} == {2, 3, 4, 5}
    # Inside the first node 80 gets both spare slots: three replicas of 26 2/3; 53 1/3 + 5 is the heavier rank.
    assert heaviest(load_E, ranks) == Fraction(160, 3) + 5


@pytest.mark.parametrize(
    ("load_E", "printed"),
    [
        ([90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]),
        ([20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]),
    ],
)
def test_the_published_example(load_E: list[int], printed: list[int]) -> None:
    """Both layers of github.com/deepseek-ai/EPLB: 12 experts in 4 groups, 16 replicas on 8 GPUs of 2 nodes. In the
    second, two replicas of expert 8 and expert 9 have 86 each: 8 and 9 share a GPU, and not 8 and 8."""
    expected = tuple((min(pair), max(pair)) for pair in zip(printed[::2], printed[1::2], strict=True))
    assert hierarchical(load_E, 8, 2, n_groups=4, n_nodes=2) == expected


def test_equal_loads_are_dealt_in_equal_numbers() -> None:
    assert sorted(map(len, packed([Fraction(1)] * 6, 3))) == [2, 2, 2]


# --- as a technique places them --------------------------------------------------------------------------------------

FIVE = ModelSizes(n_experts=5, top_k=1, hidden=8, expert_width=8, expert_bytes=768, n_layers=1, n_sparse_layers=1)


def test_ranks_with_replicas_of_an_expert_share_its_rows() -> None:
    """Three ranks of two slots: the expert of most load has the sixth, and half of its seven rows are 3 and 4."""
    profile = Profile({0: (10, 3, 3, 3, 3)}, 1, 22)
    built = technique("eplb", spare_slots=0).build(BuildContext(16, FIVE, profile, ranks=3))
    ids_TK = torch.tensor([[0]] * 7 + [[1], [2], [3], [4], [4]])
    plan = built.plan(LayerInput(0, "prefill", Routing(ids_TK, torch.ones(12, 1), 5)))
    rows = []
    for rank in range(3):
        own = own_segments(plan, rank)
        rows.append(dict(zip(plan.calls.expert_S[own].tolist(), plan.calls.rows_S[own].tolist(), strict=True)))
    assert rows == [{0: 3, 3: 1}, {0: 4, 4: 2}, {1: 1, 2: 1}]


def test_a_rank_has_no_more_slots_than_experts() -> None:
    """Six experts over four ranks are two of a rank at most; four others are left for spare slots."""
    six = FIVE._replace(n_experts=6)
    assert technique("eplb", spare_slots=4).choices.place.problem(4, six) is None
    assert technique("eplb", spare_slots=5).choices.place.problem(4, six) == (
        "spare_slots = 5: a rank has 2 of 6 experts, and there are 4 others; lower it"
    )
