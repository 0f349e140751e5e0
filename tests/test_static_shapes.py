"""The Neuron guide (004): its rules read a second time, slowly. Its worked examples: tests/test_reproduce_neuron.py."""

from __future__ import annotations

import math
from itertools import groupby, product
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.calls import Calls
from engines.dispatch import DispatchPlan, Routing
from engines.model.architecture import RouterConfig
from engines.pricing.priced_step import PricedStep
from engines.pricing.published_shapes import PHI_3_5_MOE
from engines.pricing.schedule import operations
from engines.techniques.context import BuildContext, ChunkPhase, HasModel, LayerInput, ModelSizes
from engines.techniques.layout.blocks import intensity, n_blocks
from engines.techniques.parameters import CustomParameters
from engines.techniques.presets import preset_parameters
from tests.techniques import built

pytestmark = pytest.mark.numbers


def routed(choices: list[list[int]], n_experts: int, weights: list[list[float]] | None = None) -> Routing:
    ids_TK = torch.tensor(choices)
    weights_TK = torch.ones(ids_TK.shape) if weights is None else torch.tensor(weights)
    return Routing(ids_TK, weights_TK, n_experts)


def planned(name: str, routing: Routing, phase: ChunkPhase = "prefill", **parameters: object) -> DispatchPlan:
    technique = built(name, chunk=len(routing.expert_ids_TK), **parameters)
    return technique.plan(LayerInput(0, phase, routing))


def blocks_of(plan: DispatchPlan) -> list[tuple[int, list[int]]]:
    """(expert, tokens of its rows) of each call."""
    return [
        (call.experts[0], plan.token_R[call.first_row : call.first_row + call.n_rows].tolist()) for call in plan.calls
    ]


# --- blocks ----------------------------------------------------------------------------------------------------------


def test_block_counts_of_the_guide() -> None:
    """1000 tokens, top 2 of 8, blocks of 256: 15 provisioned; the reference code's count is tighter."""
    assert n_blocks(2000, 8, 256, "sufficient") == 15
    assert n_blocks(2000, 8, 256, "tight") == math.ceil(1993 / 256) + 7 == 15
    assert n_blocks(3, 8, 256, "tight") == 3, "never more than pairs"


@pytest.mark.parametrize("n_experts", [1, 2, 3, 4])
def test_tight_blocks_are_as_many_as_the_worst_routing_takes(n_experts: int) -> None:
    """Of all ways to deal so many pairs to the experts, the one whose last blocks are emptiest."""
    for n_pairs, size in product(range(1, 12), range(1, 6)):
        dealt = (own for own in product(range(n_pairs + 1), repeat=n_experts) if sum(own) == n_pairs)
        worst = max(sum(math.ceil(n / size) for n in own) for own in dealt)
        assert n_blocks(n_pairs, n_experts, size, "tight") == worst
        assert n_blocks(n_pairs, n_experts, size, "sufficient") >= worst


def test_blocks_that_are_all_padding_are_skipped() -> None:
    routing = routed([[e] for e in (0, 1, 2, 3, 4, 5)], 6)
    # ceil(6 / 2) + 5 = 8 provisioned, 6 needed.
    every = planned("blockwise", routing, block_size=2, skip_padding_blocks=False)
    needed = planned("blockwise", routing, block_size=2)
    assert (len(every.calls), len(needed.calls)) == (8, 6)
    assert [call.n_valid for call in every.calls][-2:] == [0, 0]


def test_smallest_block_that_the_machine_cannot_feed_faster() -> None:
    """B n_blocks / E of 4096 pairs, 8 experts: 64 x 71 / 8 = 568 FLOP a byte, 128 x 39 / 8 = 624, 256 x 23 / 8 = 736.
    From 4096 rows on there are 8 blocks, of B FLOP a byte: 16,384 rows reach 10,000."""
    assert intensity(4096, 8, 64, "sufficient") == 64 * 71 / 8
    routing = routed([[t % 8] for t in range(4096)], 8)
    for aim, size in ((500.0, 64), (568.0, 64), (569.0, 128), (625.0, 256), (10_000.0, 16_384)):
        plan = planned("blockwise", routing, block_size="intensity", flop_per_byte=aim)
        assert plan.calls.rows_S[0] == size, aim


def test_the_smallest_block_of_a_small_step_may_be_larger_than_the_step() -> None:
    """128 pairs, 16 experts: 128 x 16 / 16 = 128 FLOP a byte, 256 x 16 / 16 = 256, which reaches 230."""
    routing = routed([[t % 16, (t + 1) % 16] for t in range(64)], 16)
    assert planned("blockwise", routing, block_size="intensity").calls.rows_S[0] == 256


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 9))
def test_blocks_hold_every_pair_once_and_in_order(experts: list[int], size: int) -> None:
    plan = planned("blockwise", routed([[e] for e in experts], 6), block_size=size)
    for expert, of_expert in groupby(blocks_of(plan), key=lambda block: block[0]):
        tokens = [token for _, rows in of_expert for token in rows]
        own = [token for token, chosen in enumerate(experts) if chosen == expert]
        assert tokens == own + [-1] * (math.ceil(len(own) / size) * size - len(own))
    assert {e for e, _ in blocks_of(plan)} == set(experts)
    assert n_blocks(len(experts), 6, size, "tight") >= len(plan.calls)


def test_rows_of_padding_are_computed_and_not_fetched() -> None:
    """Blocks of the guide's six tokens: 3 + 1, 2 + 2 and 1 + 3 rows; two more blocks are provisioned, all padding."""
    six = routed([[0], [1], [0], [2], [1], [0]], 3)
    for more, not_fetched in (({}, 6), ({"skip_padding_blocks": False}, 6 + 4)):
        skipping, fetching = (
            planned("blockwise", six, block_size=4, skip_padded_rows=skips, **more) for skips in (True, False)
        )
        assert skipping.counters().rows_not_fetched == not_fetched
        assert fetching.counters().rows_not_fetched is None
        assert skipping.counters().padded_rows == fetching.counters().padded_rows == not_fetched
        assert skipping.token_R.equal(fetching.token_R)


@pytest.mark.parametrize(
    ("skip", "experts", "block_size", "amount", "left"),
    [
        # Six blocks of ten have tokens: 40 % of the FLOP go. All ten read weights, unless a block finds them there.
        ("skip_padding_blocks", (0, 0, 1, 1, 2, 2, 3, 3, 4, 5), 2, "flops", 6 / 10),
        # Blocks [E0, E0, E1, E2, E2] load 3 experts and not 5.
        ("skip_weight_loads", (0, 0, 0, 1, 2, 2, 2), 2, "weight_bytes", 3 / 5),
        # [T0, T2, T5, -1]: a quarter of the rows does not come in.
        ("skip_padded_rows", (0, 0, 0), 4, "moved_bytes", 3 / 4),
    ],
)
def test_a_sheet_charges_what_the_guide_says_a_skip_leaves(
    skip: str, experts: tuple[int, ...], block_size: int, amount: str, left: float
) -> None:
    def priced(skips: bool) -> float:
        routing = routed([[e] for e in experts], max(experts) + 1)
        off = dict.fromkeys(("skip_weight_loads", "skip_padded_rows"), False)
        plan = planned("blockwise", routing, **{**off, "block_size": block_size, skip: skips})
        work = operations(PricedStep(len(experts), len(experts)), [plan], PHI_3_5_MOE, "cpu", None)
        rows = ("gather", "padding") if amount == "moved_bytes" else ("expert FFN",)
        return sum(getattr(operation, amount) for operation in work if operation.name in rows)

    assert priced(True) / priced(False) == pytest.approx(left)


def test_a_block_decoded_leaves_all_rows_but_one() -> None:
    parameters = CustomParameters.model_validate({"layout": {"kind": "blocks", "block_size": 4}})
    token = routed([[2, 0]], 3)
    sizes = ModelSizes(3, 2, 8, 8, 1, 1, 1)
    plan = parameters.build(BuildContext(1, sizes)).plan(LayerInput(0, "decode", token))
    assert plan.counters().rows_not_fetched == 2 * 3


@pytest.mark.parametrize("shard", ["hidden", "intermediate", "blocks"])
def test_slices_share_the_rows_that_are_not_fetched(shard: str) -> None:
    place = {"kind": "shards", "shard": shard, "cores": 2}
    parameters = CustomParameters.model_validate({"place": place, "layout": {"kind": "blocks", "block_size": 4}})
    sizes = ModelSizes(3, 1, 8, 8, 1, 1, 1)
    six = routed([[0], [1], [0], [2], [1], [0]], 3)
    assert parameters.build(BuildContext(6, sizes)).plan(LayerInput(0, "prefill", six)).counters().rows_not_fetched == 6


def test_a_rank_provisions_blocks_for_all_pairs_and_its_own_experts() -> None:
    """6 pairs in blocks of 2, two of four experts a rank: ceil(6 / 2) + 2 - 1 = 4 blocks on each, as all 6 may come to
    it (5 + 1 rows need 3 + 1). Blocks of padding run its last expert."""
    parameters = CustomParameters.model_validate(
        {
            "place": {"kind": "expert_parallel"},
            "layout": {"kind": "blocks", "block_size": 2, "skip_padding_blocks": False},
        }
    )
    technique = parameters.build(BuildContext(6, ModelSizes(4, 1, 8, 8, 384, 1, 1), ranks=2))
    for choices, blocks in (
        ((0, 1, 0, 2, 1, 0), [(0, 0, 2), (0, 0, 1), (0, 1, 2), (0, 1, 0), (1, 2, 1), *[(1, 3, 0)] * 3]),
        ((0, 0, 0, 0, 0, 1), [(0, 0, 2), (0, 0, 2), (0, 0, 1), (0, 1, 1), *[(1, 3, 0)] * 4]),
    ):
        plan = technique.plan(LayerInput(0, "prefill", routed([[e] for e in choices], 4)))
        assert [(int(call.kind.unit[5:]), call.experts[0], call.n_valid) for call in plan.calls] == blocks
        assert {call.n_rows for call in plan.calls} == {2}


# --- dropping --------------------------------------------------------------------------------------------------------


def dropped_slowly(choices: list[list[int]], weights: list[list[float]], factor: float) -> dict[tuple[int, int], float]:
    """(token, expert) -> weight of what stays: tokens come in turn, an expert that is full takes no more."""
    n_tokens, top_k, n_experts = len(choices), len(choices[0]), 6
    capacity = min(n_tokens, math.ceil(round(n_tokens * top_k * factor / n_experts, 9)))
    left, kept = [capacity] * n_experts, {}
    for token, (experts, own) in enumerate(zip(choices, weights, strict=True)):
        staying = []
        for expert, weight in zip(experts, own, strict=True):
            if left[expert]:
                left[expert] -= 1
                staying.append((expert, weight))
        for expert, weight in staying:
            kept[token, expert] = weight * sum(own) / sum(w for _, w in staying)
    return kept


def kept_of(plan: DispatchPlan) -> dict[tuple[int, int], float]:
    kept = {}
    for call in plan.calls:
        for row in range(call.first_row, call.first_row + call.n_rows):
            token, weight = int(plan.token_R[row]), float(plan.weight_R[row])
            if token >= 0:
                assert (token, call.experts[0]) not in kept
                kept[token, call.experts[0]] = weight
            else:
                assert weight == 0
    return kept


choices_of_two = st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True), min_size=1, max_size=40)


@given(choices_of_two, st.sampled_from([0.25, 0.5, 1.0, 1.25, 3.0]), st.integers(0, 1000))
def test_dropping_drops_what_the_rule_drops(choices: list[list[int]], factor: float, seed: int) -> None:
    weights = np.random.default_rng(seed).uniform(0.1, 1, (len(choices), 2)).tolist()
    plan = planned("dropping", routed(choices, 6, weights), factor=factor)
    assert kept_of(plan) == pytest.approx(dropped_slowly(choices, weights, factor), rel=1e-5)


@pytest.mark.parametrize(
    ("router", "asked", "left"),
    [
        (RouterConfig("softmax", 2, normalise=True), "model", 0.8),
        (RouterConfig("softmax of chosen", 2), "model", 0.8),
        (RouterConfig("softmax", 2), "model", 0.2),
        (RouterConfig("sparsemixer", 2), "model", 0.2),
        (RouterConfig("softmax", 2), True, 0.8),
        (RouterConfig("softmax", 2, normalise=True), False, 0.2),
    ],
)
def test_survivors_are_scaled_where_the_routers_weights_add_up(
    router: RouterConfig, asked: bool | str, left: float
) -> None:
    """C = ceil(1.25 x 3 x 2 / 4) = 2: the third token loses expert 0, and keeps expert 3 with 0.2 of 0.6 + 0.2."""
    routing = routed([[0, 1], [0, 2], [0, 3]], 4, [[0.6, 0.2]] * 3)
    moe = SimpleNamespace(router=router, sparse_layers=(0,))
    model = cast(HasModel, SimpleNamespace(config=SimpleNamespace(moe=moe)))
    parameters = preset_parameters("dropping").model_validate({"renormalise_survivors": asked})
    plan = parameters.build(BuildContext(3, model=model)).plan(LayerInput(0, "prefill", routing))
    kept = {(0, 0): 0.6, (0, 1): 0.2, (1, 0): 0.6, (1, 2): 0.2, (2, 3): left}
    assert kept_of(plan) == pytest.approx(kept, rel=1e-6)


def test_a_factor_of_experts_over_choices_never_drops() -> None:
    """cf >= E / K: an expert that every token chooses has room."""
    everyone = routed([[0, 1]] * 40, 6)
    assert planned("dropping", everyone, factor=3.0).dropped_pairs == 0
    assert planned("dropping", everyone, factor=2.9).dropped_pairs == 2 * (40 - math.ceil(40 * 2 * 2.9 / 6))


# --- which weights are loaded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "n_loads"), [(1.0, 256), (0.8, 256), (1.01, 163)])
def test_loads_switch_to_all_experts_where_most_are_needed(alpha: float, n_loads: int) -> None:
    """DeepSeek at batch 32 needs 256 loads of 256, if it is counted by pairs; by experts it is some 163 of them."""
    generator = np.random.default_rng(7)
    choices = [generator.permutation(256)[:8].tolist() for _ in range(32)]
    unique = len({e for of_token in choices for e in of_token})
    plan = planned("selective", routed(choices, 256), "decode", switch_alpha=alpha)
    assert plan.counters().weight_loads == (n_loads if n_loads == 256 else unique)
    assert unique == pytest.approx(256 * (1 - (1 - 8 / 256) ** 32), abs=8)
    assert len(plan.token_R) == (256 * 32 if n_loads == 256 else 256)


def test_all_experts_compute_every_token() -> None:
    plan = planned("all-experts", routed([[0], [2], [2]], 4))
    assert [(c.experts, c.n_rows, c.n_valid) for c in plan.calls] == [
        ((0,), 3, 1),
        ((1,), 3, 0),
        ((2,), 3, 2),
        ((3,), 3, 0),
    ]


def test_calls_made_one_by_one_are_those_of_the_plan() -> None:
    plan = planned("blockwise", routed([[0], [1], [0], [2], [1], [0]], 3), block_size=4)
    assert Calls.of(plan.calls) == plan.calls


# --- what couples the tokens of a chunk -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "couples"),
    [
        ({"rows": "max", "overflow": "order"}, False),
        ({"rows": 40}, False),
        ({"rows": 39}, True),
        ({"rows": 33, "align": 40}, False),
        ({"factor": 3.0}, False),
        ({"factor": 2.9}, True),
    ],
)
def test_tokens_are_coupled_where_one_expert_may_get_too_many(layout: dict[str, object], couples: bool) -> None:
    """A chunk of 40 tokens, 6 experts, top 2: at most 40 tokens choose one expert; cf >= E / K = 3 has room for all."""
    parameters = CustomParameters.model_validate({"layout": {"kind": "capacity", **layout}})
    built = parameters.build(BuildContext(40, ModelSizes(6, 2, 8, 8, 384, 1, 1)))
    assert built.couples_tokens is couples
