from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engines.decode_layout import DecodeLayout
from engines.dispatch import DispatchPlan, Routing
from engines.errors import EngineError
from engines.model.experts import execute
from engines.oracle import mix_experts
from engines.profile import Profile
from engines.techniques.base import Technique
from engines.techniques.context import BuildContext, ModelSizes
from engines.techniques.layout.blocks import BlocksParameters
from engines.techniques.layout.tiers import Tiers, TiersParameters, expected_load, frozen_capacities, tier_rows
from engines.techniques.parameters import CustomParameters
from tests.techniques import built, seen
from tests.test_experts import random_experts, random_routing

pytestmark = pytest.mark.numbers

PHI = ModelSizes(
    n_experts=16, top_k=2, hidden=4096, expert_width=6400, expert_bytes=150 * 2**20, n_layers=1, n_sparse_layers=1
)
"""Phi-3.5-MoE in fp16 (§5.1)."""


def technique(chunk: int, counts: tuple[int, ...], top_k: int = 2, **parameters: object) -> Technique:
    profile = Profile({0: counts}, top_k=top_k, n_prompts=1)
    return built("npumoe-tg" if parameters.pop("grouped", False) else "npumoe-t", chunk, profile, **parameters)


def layout(
    chunk: int, counts: tuple[int, ...], top_k: int = 2, sizes: ModelSizes | None = None, **parameters: object
) -> Tiers:
    profile = Profile({0: counts}, top_k=top_k, n_prompts=1)
    return TiersParameters.model_validate(parameters).build(BuildContext(chunk, sizes, profile))


def kept_pairs(plan: DispatchPlan) -> dict[tuple[int, int], float]:
    """(token, expert) -> weight of the valid rows; padding must carry no weight."""
    kept = {}
    for call in plan.calls:
        ((expert,), (n_rows,), (n_valid,)) = call.experts, call.rows_per_expert, call.valid_per_expert
        for offset in range(n_rows):
            token, weight = int(plan.token_R[call.first_row + offset]), float(plan.weight_R[call.first_row + offset])
            if offset < n_valid:
                assert (token, expert) not in kept
                kept[token, expert] = weight
            else:
                assert (token, weight) == (-1, 0.0)
    return kept


# --- capacities ------------------------------------------------------------------------------------------------------


def test_busiest_expert_of_the_sources_example() -> None:
    """§4.1 of 000: B = 256, E = 8, r = 2 -> 2 * 256 / 8 = 64 rows where a token has one expert; two have twice that."""
    relative_load = [Fraction(load) for load in (2, 2, 2, 2, 0, 0, 0, 0)]
    assert max(expected_load(relative_load, chunk=256, top_k=1)) == 64
    assert max(expected_load(relative_load, chunk=256, top_k=2)) == 128


@pytest.mark.parametrize(("chunk", "capacities"), [(256, (64, 32, 16)), (512, (128, 64, 32))])
@pytest.mark.parametrize("base", ["BK/E", "B/E"])
def test_the_printed_tiers_are_the_same_in_both_forms_at_two_experts_a_token(
    base: str, chunk: int, capacities: tuple[int, ...]
) -> None:
    """Phi-3.5-MoE, E = 16, K = 2: the 64 and 32 of chunk 256, the 128 and 64 of chunk 512 (§5.1)."""
    assert tier_rows(TiersParameters(base=base), 16, chunk, top_k=2) == capacities


def test_the_forms_part_at_other_numbers_of_experts_and_the_load_does_not() -> None:
    """K = 8 of E = 64 at chunk 512: BK/E is 64, B/E is 8; an expert of mean load expects 64 rows in both."""
    assert tier_rows(TiersParameters(), 64, 512, top_k=8) == (128, 64, 32)
    assert tier_rows(TiersParameters(base="B/E"), 64, 512, top_k=8) == (32, 16, 16)
    mean = [Fraction(1)] * 64
    assert set(frozen_capacities(TiersParameters(), mean, 512, 8)) == {64}
    assert set(frozen_capacities(TiersParameters(base="B/E"), mean, 512, 8)) == {32}, "none holds 64"


def test_slots_for_a_routed_pair_are_those_of_table_3() -> None:
    """1.25 (its 1.250, 1.251, 1.254): of 16 experts four above the mean load, twelve below it and above half of it.

    4 x 64 + 12 x 32 = 640 rows for 512 pairs, so 1.25; tiers of {4, 2, 1} BK/E would hold twice that."""
    relative_load = [Fraction(3, 2)] * 4 + [Fraction(5, 6)] * 12
    assert sum(relative_load) == 16
    printed = frozen_capacities(TiersParameters(), relative_load, chunk=256, top_k=2)
    assert Fraction(sum(printed), 256 * 2) == Fraction(5, 4)
    wide = frozen_capacities(TiersParameters(multiples=(4, 2, 1)), [Fraction(4)] * 4 + [Fraction(2)] * 12, 256, 2)
    assert Fraction(sum(wide), 256 * 2) == Fraction(5, 2)


def test_expert_gets_the_smallest_tier_that_holds_it_and_the_largest_when_none_does() -> None:
    # Mean 10; base BK/E = 128 * 2 / 4 = 64; tiers 128, 64, 32; loads 153.6, 64, 32, 6.4.
    parameters = TiersParameters(multiples=(2, 1, 0.5))
    relative_load = [Fraction(load) for load in ("2.4", "1", "0.5", "0.1")]
    assert frozen_capacities(parameters, relative_load, chunk=128, top_k=2) == (128, 64, 32, 32)


def test_capacities_are_rounded_up_to_the_alignment() -> None:
    # Mean 100 * 2 / 8 = 25 rows: tiers 100, 50, 25 become 112, 64, 32; load 32 still fits the last.
    relative_load = [Fraction(rows, 25) for rows in (32, 33, 75, 0, 0, 0, 0, 0)]
    assert frozen_capacities(TiersParameters(multiples=(4, 2, 1)), relative_load, chunk=100, top_k=2) == (
        32, 64, 112, 32, 32, 32, 32, 32,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("multiple", "n_experts", "top_k", "chunk", "align", "rows"),
    # 1.8 * 1000 * 8 / 60 = 240 and 1.1 * 400 / 8 = 55: floats come out above both.
    [(1.8, 60, 8, 1000, 16, 240), (1.1, 8, 1, 400, 55, 55)],
)
def test_rows_that_divide_evenly_get_no_step_more(
    multiple: float, n_experts: int, top_k: int, chunk: int, align: int, rows: int
) -> None:
    parameters = TiersParameters(multiples=(multiple,), align=align)
    assert frozen_capacities(parameters, [Fraction(1)] * n_experts, chunk, top_k) == (rows,) * n_experts


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 2000), st.integers(1, 64), st.data())
def test_rows_are_those_of_whole_numbers(
    n_experts: int, top_k: int, chunk: int, align: int, data: st.DataObject
) -> None:
    """A multiple of n tenths: n B K / (10 E) rows, at most B, in steps of `align`, by division of integers alone. An
    expert that was chosen c times of N expects c B K / N rows."""
    tenths = sorted(data.draw(st.sets(st.integers(1, 100), min_size=1, max_size=4)), reverse=True)
    counts = data.draw(st.lists(st.integers(1, 500), min_size=n_experts, max_size=n_experts))
    tiers = [-(-min(n * chunk * top_k, 10 * n_experts * chunk) // (10 * n_experts * align)) * align for n in tenths]
    wanted = []
    for count in counts:
        holding = [tier for tier in tiers if count * chunk * top_k <= tier * sum(counts)]
        wanted.append(min(holding, default=tiers[0]))
    relative_load = Profile({0: tuple(counts)}, top_k, 1).relative_load(0)
    parameters = TiersParameters(multiples=tuple(float(f"{n // 10}.{n % 10}") for n in tenths), align=align)
    assert frozen_capacities(parameters, relative_load, chunk, top_k) == tuple(wanted)


def test_load_of_exactly_a_tier_gets_that_tier() -> None:
    """An expert chosen 69 times of 138 expects 96 * 69 / 138 = 48 rows; in floats 48.00000000000001."""
    counts = (69, 11, *[1] * 58)
    assert (len(counts), sum(counts)) == (60, 138)
    assert layout(96, counts, 1, multiples=(60, 30)).capacities(0, "prefill")[0] == 48


def test_capacity_never_exceeds_the_chunk_since_a_token_chooses_an_expert_once() -> None:
    assert frozen_capacities(TiersParameters(multiples=(1000,)), [Fraction(1)] * 2, chunk=40, top_k=1) == (
        48,
        48,
    )


# --- groups ----------------------------------------------------------------------------------------------------------


def test_experts_of_one_tier_share_graphs_in_order_of_popularity() -> None:
    """§4.2 at chunk 256: 16 experts of 150 MiB, four of them hot: one graph of 4 x 64 and three of 4 x 32."""
    # Loads in multiples of the mean 32: experts 3, 2, 1, 0 above it, the rest at most at it.
    counts = (12, 13, 14, 15, *[8] * 6, *[7] * 6)
    graphs = layout(256, counts, sizes=PHI, grouped=True).graphs(0)
    assert graphs.experts == [(3, 2, 1, 0), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert graphs.rows_S.tolist() == [64] * 4 + [32] * 12


@pytest.mark.parametrize(("asked", "most"), [(8, 8), (16, 8), (4, 4)])
def test_a_graph_keeps_below_the_limit_of_its_weights(asked: int, most: int) -> None:
    """Eight experts of 150 MiB are 1.2 GB and run in one graph; sixteen do not (§4.2, Table 5)."""
    graphs = layout(256, (1,) * 16, sizes=PHI, grouped=True, group_size=asked).graphs(0)
    assert [len(experts) for experts in graphs.experts] == [most] * (16 // most)


def test_a_graph_computes_all_its_experts_and_one_without_tokens_is_not_launched() -> None:
    """Chunk 64, mean 16: graphs (0, 1) and (2, 3) of 16 rows; only expert 2 has tokens."""
    routing = Routing(torch.full((5, 1), 2), torch.ones(5, 1), 4)
    plan = technique(64, (4, 3, 2, 1), top_k=1, multiples=(1,), grouped=True, group_size=2).plan(
        seen(routing, saliency_T=torch.ones(5))
    )
    assert [(c.experts, c.rows_per_expert, c.valid_per_expert) for c in plan.calls] == [((2, 3), (16, 16), (5, 0))]
    assert plan.counters().padded_rows == 32 - 5


# --- decode ----------------------------------------------------------------------------------------------------------


def decode_calls(graphs: str, **parameters: object) -> list[tuple[tuple[int, ...], tuple[int, ...], bool]]:
    """Of one token with experts 0 and 2; chunk 512, E = 4, K = 2: mean 256, loads 512, 256, 128, 128."""
    routing = Routing(torch.tensor([[2, 0]]), torch.ones(1, 2), 4)
    tiers = technique(512, (4, 2, 1, 1), decode_graphs=graphs, **parameters)
    return [(c.experts, c.rows_per_expert, c.static) for c in tiers.plan(seen(routing, "decode")).calls]


def test_decoding_launches_a_graph_of_its_own_for_each_chosen_expert() -> None:
    """1 x 32, the smallest capacity of the source's at chunk 256."""
    assert decode_calls("single") == [((0,), (32,), True), ((2,), (32,), True)]
    assert decode_calls("single", grouped=True, decode_rows=8) == [((0,), (8,), True), ((2,), (8,), True)]


@pytest.mark.parametrize(("rows", "kept", "n_dropped"), [(2, {1, 2}, 1), (3, {0, 1, 2}, 0)])
def test_a_batch_that_gives_an_expert_more_tokens_than_its_graph_has_rows_drops_the_rest(
    rows: int, kept: set[int], n_dropped: int
) -> None:
    """Three answers decode a token each, all by expert 0. Token 0 is the least salient."""
    routing = Routing(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), 4)
    saliency_T = torch.tensor([0.1, 0.5, 0.3])
    plan = technique(512, (4, 2, 1, 1), top_k=1, decode_rows=rows).plan(seen(routing, "decode", saliency_T))
    assert {token for token, _ in kept_pairs(plan)} == kept
    assert plan.counters().dropped_pairs == n_dropped
    on_cpu = technique(512, (4, 2, 1, 1), top_k=1, decode_graphs="cpu").plan(seen(routing, "decode"))
    assert on_cpu.counters().dropped_pairs == 0


def test_decoding_may_launch_the_graphs_of_prefill() -> None:
    assert decode_calls("same") == [((0,), (512,), True), ((2,), (128,), True)]
    assert decode_calls("same", grouped=True) == [((0,), (512,), True), ((2, 3), (128, 128), True)]


def test_decoding_may_go_to_the_cpu_with_exact_rows() -> None:
    assert decode_calls("cpu") == [((0,), (1,), False), ((2,), (1,), False)]


def test_decoding_on_the_cpu_is_the_decode_layouts_choice_where_there_is_one() -> None:
    tiers = TiersParameters(decode_graphs="cpu")
    custom = CustomParameters(layout=BlocksParameters(block_size=4), decode=tiers)
    technique = custom.build(BuildContext(8, None, Profile({0: (1, 1)}, top_k=1, n_prompts=1)))
    assert technique.decode_layout(0) == DecodeLayout()
    routing = Routing(torch.tensor([[1]]), torch.ones(1, 1), 2)
    assert [(c.rows_per_expert, c.static) for c in technique.plan(seen(routing, "decode")).calls] == [((1,), False)]


# --- prefill ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [1, 3, 64])
def test_short_last_chunk_uses_the_full_chunks_shape(n_tokens: int) -> None:
    hidden, routing = random_routing(n_tokens)
    plan = technique(64, (1,) * 6, multiples=(4, 2, 1), align=8).plan(seen(routing, saliency_T=hidden.norm(dim=-1)))
    # Mean load 64 * 2 / 6 = 21.3, rounded up to 24, for whatever the chunk brings.
    assert plan.calls
    assert {call.rows_per_expert for call in plan.calls} == {(24,)}
    assert all(call.static for call in plan.calls)


# --- overflow --------------------------------------------------------------------------------------------------------


def test_least_salient_token_is_dropped_first_and_of_equals_the_later_one() -> None:
    routing = Routing(torch.zeros(5, 1, dtype=torch.int64), torch.full((5, 1), 0.7), 2)
    saliency = torch.tensor([1.0, 3.0, 2.0, 2.0, 9.0])
    # Two experts, K = 1, chunk 5: base 2.5 -> 3 rows. Tokens 4, 1 and the earlier of 2 and 3 stay.
    plan = technique(5, (1, 1), top_k=1, multiples=(1,), align=1).plan(seen(routing, saliency_T=saliency))
    assert kept_pairs(plan) == {(4, 0): pytest.approx(0.7), (1, 0): pytest.approx(0.7), (2, 0): pytest.approx(0.7)}
    assert (plan.routed_pairs, plan.dropped_pairs) == (5, 2)


@given(st.integers(1, 50), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(0, 2**31))
def test_plans_keep_what_a_sort_by_hand_keeps(n_tokens: int, top_k: int, align: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(n_tokens, 6, generator=generator).argsort(-1)[:, :top_k]
    weights_TK = torch.rand(n_tokens, top_k, generator=generator)
    saliency_T = torch.randint(0, 5, (n_tokens,), generator=generator).float()  # few values, many ties
    counts = tuple(torch.randint(1, 20, (6,), generator=generator).tolist())
    chosen: dict[str, object] = {"align": align, "multiples": (1.5, 0.5)}
    tiers = layout(max(n_tokens, 8), counts, top_k, **chosen)
    plan = technique(max(n_tokens, 8), counts, top_k, **chosen).plan(
        seen(Routing(ids_TK, weights_TK, 6), saliency_T=saliency_T)
    )

    expected = {}
    for expert, capacity in enumerate(tiers.capacities(0, "prefill")):
        tokens = [t for t in range(n_tokens) if expert in ids_TK[t].tolist()]
        for token in sorted(tokens, key=lambda t: (-float(saliency_T[t]), t))[:capacity]:
            expected[token, expert] = float(weights_TK[token, ids_TK[token].tolist().index(expert)])
    assert kept_pairs(plan) == expected
    assert plan.dropped_pairs == n_tokens * top_k - len(expected)
    assert plan.token_R.shape[0] == plan.counters().computed_rows


def test_call_without_a_valid_row_is_not_launched() -> None:
    routing = Routing(torch.tensor([[3], [3]]), torch.ones(2, 1), 4)
    plan = technique(16, (1, 1, 1, 1), top_k=1, align=4).plan(seen(routing, saliency_T=torch.ones(2)))
    assert [call.experts for call in plan.calls] == [(3,)]


def test_survivors_keep_their_weights_or_make_up_for_the_dropped_one() -> None:
    # Expert 0 has one row and token 1 is the more salient; so token 0 loses its choice of expert 0.
    ids, weights = torch.tensor([[0, 1], [0, 2]]), torch.tensor([[0.6, 0.3], [0.5, 0.5]])
    routing, saliency = Routing(ids, weights, 3), torch.tensor([1.0, 2.0])
    kept = {
        renormalise: kept_pairs(
            technique(
                2, (1, 1, 1), multiples=(0.5,), align=1, renormalise_survivors=renormalise
            ).plan(seen(routing, saliency_T=saliency))
        )
        for renormalise in (False, True)
    }  # fmt: skip
    assert kept[False] == pytest.approx({(0, 1): 0.3, (1, 0): 0.5, (1, 2): 0.5})
    assert kept[True] == pytest.approx({(0, 1): 0.9, (1, 0): 0.5, (1, 2): 0.5})


def test_token_that_lost_all_its_experts_gets_zeros() -> None:
    routing = Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 2)
    tiers = technique(2, (1, 1), top_k=1, multiples=(1,), align=1, renormalise_survivors=True)
    hidden = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    plan = tiers.plan(seen(routing, saliency_T=torch.tensor([1.0, 2.0])))
    out = execute(plan, hidden, random_experts(2))
    assert out[0].abs().max() == 0
    torch.testing.assert_close(
        out[1:], mix_experts(hidden[1:], Routing(torch.zeros(1, 1).long(), torch.ones(1, 1), 2), random_experts(2))
    )


@pytest.mark.parametrize("renormalise", [False, True])
def test_unlimited_capacity_equals_the_oracle(renormalise: bool) -> None:
    experts, (hidden, routing) = random_experts(), random_routing(64)
    tiers = technique(64, (9, 1, 1, 1, 1, 1), multiples=(1e6,), renormalise_survivors=renormalise)
    plan = tiers.plan(seen(routing, saliency_T=hidden.norm(dim=-1)))
    assert plan.dropped_pairs == 0
    torch.testing.assert_close(
        execute(plan, hidden, experts), mix_experts(hidden, routing, experts), atol=1e-5, rtol=1e-5
    )


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiples", [(), (1.0, 2.0), (2.0, 2.0), (1.0, 0.0), (float("nan"),), (float("inf"),)])
def test_multiples_that_do_not_descend_above_zero_are_refused(multiples: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError):
        TiersParameters(multiples=multiples)


def test_building_without_calibration_says_what_to_do() -> None:
    with pytest.raises(EngineError, match="tiers have no profile; calibrate with prompts"):
        TiersParameters().build(BuildContext(512))


def test_planning_without_saliency_is_refused() -> None:
    """Where something overflows: two rows for the three tokens of expert 0."""
    routing = Routing(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), 2)
    with pytest.raises(EngineError, match="npumoe-t ranks overflow by saliency; pass the norm"):
        technique(3, (1, 1), top_k=1, multiples=(1,), align=1).plan(seen(routing))
