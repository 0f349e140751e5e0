"""Experts in the GPU's memory beside NDP units (001): fetched by what the prompt chose, up to E_max, and counted.

Prices are plain numbers, so that E_max follows by hand. N units, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.base import unheard
from engines.dispatch import DispatchPlan, Routing
from engines.errors import EngineError
from engines.expert_memory import ExpertMemory
from engines.model.checkpoints import load_checkpoint
from engines.reference import ReferenceEngine
from engines.sizes import own_sizes
from engines.techniques.presets import preset_parameters
from tests.ndp_units import EIGHT, Anything, Engine, Plain, built, generation, on_gpu, routed
from tests.test_ndp import SIZES, columns_of

pytestmark = pytest.mark.numbers


def answered(engine: Engine, prompt: Routing, *decoded: Sequence[int]) -> list[DispatchPlan]:
    """A request: its prompt, then tokens one by one."""
    engine.shown.start_request()
    engine.plan(prompt, "prefill")
    return [engine.plan(routed(token), "decode") for token in decoded]


PROMPT = routed([3, 1], [3, 1], [3, 2], [0, 4])
"""Choices: 3 three times, 1 twice, 0, 2 and 4 once."""


@pytest.mark.parametrize("name", ["ndp-tp-pre", "ndp"])
@pytest.mark.parametrize(("slots", "fetched"), [(1, [3]), (2, [1, 3]), (3, [0, 1, 3]), (6, [0, 1, 2, 3, 4])])
def test_the_most_chosen_of_the_prompt_are_fetched(name: str, slots: int, fetched: list[int]) -> None:
    """Ties go to the lower number; expert 5 was never chosen, and stays where it is."""
    engine = Engine(built(name, Plain(1, 1, 1), slots=slots))
    first, second = answered(engine, PROMPT, [5, 0], [5, 1])
    ahead = [t for t in first.transfers if t.stays]
    assert [(t.expert, t.n_bytes, t.replaces, t.layer) for t in ahead] == [
        (expert, SIZES.expert_bytes, None, 0) for expert in fetched
    ]
    assert engine.held() == set(fetched)
    assert (first.hits, first.misses) == (0, 2), "too late for the first token of the first layer"
    assert (second.hits, second.misses) == ((1, 1) if slots > 1 else (0, 2))
    assert not any(t.stays for t in second.transfers)


def test_what_was_fetched_is_computed_on_the_gpu_and_the_rest_in_slices() -> None:
    """T_w = T_n = 1, T_g = T_a = 1/10, N = K = 2: E_max = 2.3 / 1.1, both of a token's experts; without any,
    E_g = 1 + (3/10 + 1 - 1) / (2 + 1/20) = 1 + 6/41, that is an expert and 4 columns of the other."""
    for name in ("ndp-tp-pre", "ndp"):
        engine = Engine(built(name, Plain(1, 0.1, 1, 0.1), ndps=2, slots=2))
        _, both, one, none = answered(engine, PROMPT, [5, 0], [3, 1], [3, 0], [0, 5])
        assert set(on_gpu(both)) == {1, 3}
        assert (both.hits, both.misses, both.exchanges, len(both.transfers)) == (2, 0, (), 0)
        assert on_gpu(one) == {3: (0, 24)}
        assert (one.hits, one.misses, len(one.transfers)) == (1, 1, 0)
        assert columns_of(one)[0] == [(0, 12), (12, 24)]
        assert on_gpu(none) == ({0: (0, 24), 5: (0, 4)} if name == "ndp" else {})
        assert none.counters().bytes_moved == (SIZES.expert_bytes * 28 // 24 if name == "ndp" else 0)
        assert (none.hits, none.misses) == (0, 2)


@pytest.mark.parametrize("name", ["ndp-tp-pre", "ndp"])
@pytest.mark.parametrize(("gpu", "most"), [(1, 4), (3, 2), (7, 1), (1 / 3, 6)])
def test_no_more_than_e_max_run_on_the_gpu(name: str, gpu: float, most: int) -> None:
    """Eq. 3 of 8 experts with T_n 1: E_max = 8 / (T_g + 1), 4, 2, 1 and 6. All eight lie there; those of the lower
    numbers run, the others are hits that the units compute."""
    sizes = EIGHT._replace(top_k=8)
    engine = Engine(built(name, Plain(1, gpu, 1), sizes, ndps=2, slots=12), sizes)
    engine.plan(routed(range(8), n_experts=12), "prefill")
    for _ in range(2):
        plan = engine.plan(routed([7, 6, 5, 4, 3, 2, 1, 0], n_experts=12), "decode")
    assert set(on_gpu(plan)) == set(range(most))
    assert plan.hits == 8
    assert len(plan.transfers) == 0


@pytest.mark.parametrize("name", ["ndp-tp-pre", "ndp"])
@pytest.mark.parametrize(("top_k", "gpu", "runs"), [(1, 0.9, True), (1, 1.1, False), (2, 1.9, True), (2, 2.1, False)])
def test_where_e_max_is_a_part_of_an_expert_the_sooner_side_computes_it(
    name: str, top_k: int, gpu: float, runs: bool
) -> None:
    """T_n = 1, T_a = 0: E_max is K / (T_g + 1), below one beside T_g > K - 1. One expert on the GPU ends after
    max(T_g, K - 1), none there after K. Both of a token's experts lie there, and one is as much as may run."""
    engine = Engine(built(name, Plain(100, gpu, 1), SIZES._replace(top_k=top_k), ndps=2, slots=2))
    prompt, token = routed([3, 1][:top_k]), [3, 1][:top_k]
    plan = answered(engine, prompt, token, token)[-1]
    assert (plan.hits, plan.misses, len(plan.transfers)) == (top_k, 0, 0)
    assert on_gpu(plan) == ({min(token): (0, 24)} if runs else {})


def test_a_batch_takes_the_busiest_of_those_on_the_gpu() -> None:
    """Of 1 and 3, which lie there, three tokens choose 3. Three experts with 2 rows on average, T_g = T_n = 1 a row:
    E_max = 3 x 2 / 4 = 1.5."""
    engine = Engine(built("ndp", Plain(1, 1, 1, by_rows=True), ndps=2, slots=2))
    answered(engine, PROMPT, [5, 0])
    plan = engine.plan(routed([1, 3], [3, 0], [3, 0]), "decode")
    assert on_gpu(plan) == {3: (0, 24)}
    assert (plan.hits, plan.misses) == (2, 1)


@given(
    st.lists(st.permutations(range(6)), min_size=1, max_size=6),
    st.lists(st.permutations(range(6)), min_size=1, max_size=6),
)
def test_prefetch_sees_the_prompt_alone(one: list[list[int]], other: list[list[int]]) -> None:
    """Whatever is decoded after, as many tokens as may be: what was fetched is the same."""
    fetched = []
    for decoded in (one, other):
        engine = Engine(built("ndp", Plain(1, 1, 1), slots=2))
        plans = answered(engine, PROMPT, *(token[:2] for token in decoded))
        fetched.append([(t.expert, t.layer) for plan in plans for t in plan.transfers if t.stays])
        assert engine.held() == {1, 3}
    assert fetched[0] == fetched[1] == [(1, 0), (3, 0)]


requests = st.lists(
    st.tuples(
        st.lists(st.tuples(st.permutations(range(6)), st.permutations(range(6))), min_size=1, max_size=5),
        st.lists(st.tuples(st.permutations(range(6)), st.permutations(range(6))), max_size=4),
    ),
    min_size=1,
    max_size=4,
)


@given(requests, st.integers(1, 6), st.sampled_from(["ndp-tp-pre", "ndp"]))
def test_the_gpu_never_holds_more_than_its_slots(
    asked: list[tuple[list[Any], list[Any]]], slots: int, name: str
) -> None:
    """Two layers, request after request: after the first decode step each layer holds the most chosen of this prompt,
    what was there before and is wanted stays without a byte, and no layer ever holds more than its slots."""
    sizes = SIZES._replace(n_layers=2, n_sparse_layers=2)
    engine = Engine(built(name, Plain(1, 1, 1), sizes, slots=slots), sizes)
    for prompt, decoded in asked:
        engine.shown.start_request()
        before = [engine.held(layer) for layer in (0, 1)]
        for number, token in enumerate(prompt):
            for layer in (0, 1):
                engine.plan(routed(token[layer][:2]), "prefill", layer, left=len(prompt) - number - 1)
        assert [engine.held(layer) for layer in (0, 1)] == before
        arrived = []
        for token in decoded:
            for layer in (0, 1):
                plan = engine.plan(routed(token[layer][:2]), "decode", layer)
                arrived += [(t.layer, t.expert) for t in plan.transfers if t.stays]
                assert all(len(engine.held(own)) <= slots for own in (0, 1))
        if decoded:
            wanted = [most_chosen([token[layer][:2] for token in prompt], slots) for layer in (0, 1)]
            assert all(wanted[layer] <= engine.held(layer) for layer in (0, 1))
            assert sorted(arrived) == sorted((layer, e) for layer in (0, 1) for e in wanted[layer] - before[layer])


def most_chosen(choices: list[list[int]], n: int) -> set[int]:
    every = [expert for own in choices for expert in own]
    return set(sorted(set(every), key=lambda expert: (-every.count(expert), expert))[:n])


@pytest.mark.parametrize(
    ("held", "slots", "each"), [(None, None, 2), (None, 5, 5), (11, None, 3), (12, None, 4), (12, 4, 4), (99, None, 6)]
)
def test_slots_are_as_many_as_the_memory_holds_in_every_layer_alike(
    held: int | None, slots: int | None, each: int
) -> None:
    """Three layers; a token chooses 2 of 6. One more in some layers only is none, as the source counts x up for all."""
    sizes = SIZES._replace(n_layers=3, n_sparse_layers=3)
    asked = built("ndp", Plain(1, 1, 1), sizes, held, slots=slots).asks.slots["gpu"]
    assert (asked.n, asked.of) == (each, "layer")


def test_a_memory_that_holds_no_expert_of_each_layer_is_refused() -> None:
    sizes = SIZES._replace(n_layers=3, n_sparse_layers=3)
    with pytest.raises(EngineError, match="the memory for experts holds 2, and 1 in each of 3 layers need 3; give it"):
        built("ndp", Plain(1, 1, 1), sizes, 2)
    with pytest.raises(EngineError, match="holds 8, and 3 in each of 3 layers need 9"):
        built("ndp", Plain(1, 1, 1), sizes, 8, slots=3)


@pytest.mark.parametrize(("budget", "each"), [(None, 2), (13, 3)])
def test_the_engine_counts_what_a_request_fetched_and_found(budget: int | None, each: int) -> None:
    """Four layers of 16 experts, a token chooses 2. Five decode steps look for 40; x experts of each layer come once,
    those of three later layers ahead; the same prompt again finds all of them there, until the engine is reset.
    13 experts of memory are 3 in each layer."""
    checkpoint = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)
    sizes = own_sizes(checkpoint.config)
    assert sizes is not None
    memory = ExpertMemory(None if budget is None else budget * sizes.expert_bytes)
    costs = Anything(1, 0.1, 1, 0.1)
    engine = ReferenceEngine(checkpoint, preset_parameters("ndp-tp-pre")(), 16, costs=costs, expert_memory=memory)
    fetched = []
    for again in (False, False, True):
        if again:
            engine.reset()
        engine.run(generation(range(10, 50)), unheard)
        counted = engine.take_counters()
        assert counted.hits is not None
        assert counted.misses is not None
        assert counted.hits + counted.misses == 5 * 4 * 2
        fetched.append((counted.bytes_moved // sizes.expert_bytes, counted.prefetched))
    assert fetched == [(4 * each, 3 * each), (0, 0), (4 * each, 3 * each)]
