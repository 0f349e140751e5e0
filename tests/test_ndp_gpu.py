"""What the GPU of a GPU-NDP system computes (001): experts and slices that balance, and experts fetched ahead.

Prices here are plain numbers, so that E_g and E_max follow by hand. N units, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from devices.base import DeviceError, Unit
from engines.base import unheard
from engines.calls import Width
from engines.dispatch import DispatchPlan, Routing
from engines.errors import EngineError
from engines.expert_memory import ExpertMemory
from engines.model.checkpoints import load_checkpoint
from engines.model.experts import execute
from engines.model.transformer import Transformer
from engines.oracle import Oracle, mix_experts
from engines.reference import ReferenceEngine
from engines.shown import Shown
from engines.sizes import own_sizes
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import BuildContext, ChunkPhase, ModelSizes
from engines.techniques.parameters import CustomParameters
from engines.techniques.presets import preset_parameters
from results.records import Request
from tests.fakes.families import CASES, write_family
from tests.techniques import seen
from tests.test_experts import random_experts, random_routing, unusual_experts
from tests.test_ndp import FAMILIES, PHASES, SIZES, WIDTH, columns_of, logits
from tests.test_presets import int8_experts

pytestmark = pytest.mark.numbers

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


# --- balance ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_a_fraction_of_an_expert_is_a_slice_of_its_columns(phase: ChunkPhase) -> None:
    """E_g = 7/3 of 24 columns: two experts whole, 8 columns of a third; the others stay in slices."""
    routing = routed([9, 1, 2, 5, 6, 7, 8, 4], n_experts=12)
    plan = built("ndp-tp-lb", TWO_AND_A_THIRD, EIGHT, ndps=2).plan(seen(routing, phase))
    found = columns_of(plan)
    assert on_gpu(plan) == {1: (0, 24), 2: (0, 24), 4: (0, 8)}
    assert found[4] == [(0, 8), (8, 16), (16, 24)]
    assert all(found[expert] == [(0, 12), (12, 24)] for expert in (5, 6, 7, 8, 9))
    assert [(t.expert, t.width, t.n_bytes, t.stays) for t in plan.transfers] == [
        (1, (0, 24), SIZES.expert_bytes, False),
        (2, (0, 24), SIZES.expert_bytes, False),
        (4, (0, 8), SIZES.expert_bytes // 3, False),
    ]
    assert {(t.source, t.target, t.layer) for t in plan.transfers} == {("cpu", "gpu", 0)}
    out, back = plan.exchanges
    assert (out.kind, back.kind) == ("broadcast", "reduce")
    assert out.units == back.units == ("gpu", "ndp:0", "ndp:1")
    assert sum(map(sum, out.bytes_NN)) == sum(map(sum, back.bytes_NN)) == 2 * 16 * 4


def test_where_nothing_is_left_for_the_units_nothing_is_sent_to_them() -> None:
    """Units that take a million times as long balance nowhere: all K come to the GPU."""
    plan = built("ndp-tp-lb", Plain(1, 1, 1e6), EIGHT).plan(seen(routed(range(8), n_experts=12), "decode"))
    assert on_gpu(plan) == dict.fromkeys(range(8), (0, 24))
    assert plan.exchanges == ()
    assert plan.transfers.width_M2 is None
    assert len(plan.calls) == 8


def test_the_busiest_experts_of_a_step_go_to_the_gpu() -> None:
    """Expert 4 has 3 tokens, 2 and 0 have 2, 5 has 1: mean 2 rows, four experts of four tokens. T_w 1, T_g 0 a row,
    T_n 1 a row, no activations: E_g = 4 x 2 / (1 + 2) = 8/3. Of equal loads the lower number goes first."""
    routing = routed([4, 2], [4, 0], [4, 2], [5, 0])
    plan = built("ndp-tp-lb", Plain(1, 0, 1, by_rows=True), ndps=3).plan(seen(routing, "prefill"))
    assert on_gpu(plan) == {4: (0, 24), 0: (0, 24), 2: (0, 16)}


def test_a_prompt_leaves_the_gpu_less_by_its_activations() -> None:
    """Eq. 2, T_w = T_n = 1, T_g = 0, T_a = 1/8, N = 2, four experts: 2 E_g = 3/8 + 4 - (S - 1) / 4, so each further
    token takes 1/8 of an expert from the GPU: 35/16 of one token, 31/16 of three. In a batch of a decode step too."""
    for phase in PHASES:
        for tokens, whole, columns in ((1, 2, 4.5), (3, 1, 22.5)):
            routing = routed(*[range(4)] * tokens)
            plan = built("ndp-tp-lb", Plain(1, 0, 1, 1 / 8), ndps=2).plan(seen(routing, phase))
            assert [end for _, end in on_gpu(plan).values()] == [24] * whole + [round(columns)]


prices = st.floats(0.05, 20)


@given(
    prices,
    prices,
    prices,
    st.floats(0, 1),
    st.integers(1, 8),
    st.integers(1, 20),
    st.integers(1, 6),
    st.integers(0, 99),
)
def test_every_column_is_computed_once_whatever_balances(
    fetch: float, gpu: float, ndp: float, activation: float, n_units: int, n_tokens: int, top_k: int, seed: int
) -> None:
    """And what the GPU has is what traveled, byte for byte of its columns."""
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(n_tokens, 6, generator=generator).argsort(-1)[:, :top_k]
    routing = Routing(ids_TK, torch.rand(n_tokens, top_k, generator=generator), 6)
    own = built("ndp-tp-lb", Plain(fetch, gpu, ndp, activation), SIZES._replace(top_k=top_k), ndps=n_units)
    for phase in PHASES:
        plan = own.plan(seen(routing, phase))
        found = columns_of(plan)
        assert set(found) == set(ids_TK.reshape(-1).tolist())
        for parts in found.values():
            assert [first for first, _ in parts] == [0, *(end for _, end in parts[:-1])]
            assert parts[-1].end == WIDTH
        traveled = {t.expert: t.width or Width(0, WIDTH) for t in plan.transfers}
        assert traveled == on_gpu(plan)
        assert all(t.n_bytes == SIZES.expert_bytes * (t.width or (0, WIDTH))[1] // WIDTH for t in plan.transfers)


@pytest.mark.parametrize("n_units", range(1, 7))
@pytest.mark.parametrize("kind", ["plain", "biased", "input", "int8", "gelu"])
@pytest.mark.parametrize("n_tokens", [1, 2, 13])
def test_fractions_of_experts_are_the_oracle(n_units: int, kind: str, n_tokens: int) -> None:
    """A bias is added once: by the slice that has the first column."""
    experts = {"plain": random_experts, "int8": int8_experts}.get(kind, lambda: unusual_experts(kind))()
    hidden, routing = random_routing(n_tokens)
    cut = set()
    for ndp in (0.4, 1.1, 3.7, 40):
        own = built("ndp-tp-lb", Plain(1, 0.5, ndp), ndps=n_units)
        for phase in PHASES:
            plan = own.plan(seen(routing, phase))
            cut |= {end for _, end in on_gpu(plan).values()} - {WIDTH}
            assert plan.counters().computed_rows == 2 * n_tokens
            expected = mix_experts(hidden, routing, experts)
            torch.testing.assert_close(execute(plan, hidden, experts), expected, atol=1e-5, rtol=1e-5)
    assert len(cut) >= 2, "fractions of several sizes"


def test_slices_of_one_step_are_not_kept() -> None:
    """Every step of a prompt has other widths: a copy of all experts for each would fill the memory."""
    experts, (hidden, routing) = random_experts(), random_routing(1)
    plan = built("ndp-tp-lb", TWO_AND_A_THIRD, SIZES, ndps=2).plan(seen(routing, "decode"))
    execute(plan, hidden, experts)
    kept = {kind for kind in plan.calls.kinds if (kind.width, kind.hidden, kind.is_first_slice) in experts._parts}
    assert {kind.width for kind in kept} == {(0, 12), (12, 24)}
    assert {kind.width for kind in plan.calls.kinds if kind.once} - {(0, 12), (12, 24)}


# --- experts in the GPU's memory -------------------------------------------------------------------------------------


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


# --- one token as many -----------------------------------------------------------------------------------------------


@given(st.permutations(range(12)), st.sets(st.integers(0, 11)), st.sampled_from(ON_GPU), st.floats(0.1, 9))
def test_one_token_is_planned_as_many_are(order: list[int], lie_there: set[int], name: str, gpu: float) -> None:
    plans = []
    for knows in (True, False):
        engine = Engine(built(name, Plain(2, gpu, 1, 0.1), EIGHT, ndps=3), EIGHT)
        if engine.shown.residency is not None:
            engine.shown.residency._whole_LE["gpu"][0, sorted(lie_there)] = True
            assert engine.shown.counts is not None
            engine.shown.counts.decode_LE[0, 0] = 1
        if not knows:
            engine.technique._known = {0: None}
        weights = torch.arange(8.0)[None]
        engine.shown.start_step(0)
        one = engine.shown.layer(0, "decode", Routing(torch.tensor([order[:8]]), weights, 12), None, None)  # type: ignore[arg-type]
        plans.append(engine.technique.plan(one))
        assert (engine.technique._known[0] is not None) == knows
    a, b = plans
    assert (a.calls, a.exchanges, a.counters()) == (b.calls, b.exchanges, b.counters())
    assert list(a.transfers) == list(b.transfers)
    assert (a.token_R.tolist(), a.weight_R.tolist()) == (b.token_R.tolist(), b.weight_R.tolist())


# --- on models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_gives_the_oracles_answers(case: str, tmp_path: Path) -> None:
    """At the sheet's prices, and at such as cut an expert."""
    write_family(tmp_path, CASES[case])
    checkpoint = load_checkpoint(str(tmp_path), torch.float32)
    model, sizes = Transformer(checkpoint), own_sizes(checkpoint.config)
    expected = logits(model, Oracle(), sizes)
    for name in ON_GPU:
        for costs in (None, Anything(1.0, 0.7, 1.3)):
            own = preset_parameters(name).model_validate({"ndps": 5}).build(BuildContext(16, sizes, None, costs, model))
            assert float((logits(model, own, sizes) - expected).norm() / expected.norm()) < 1e-5


class Anything(Plain):
    """Of experts of any size."""

    def transfer_s(self, source: Unit, target: Unit, n_bytes: float) -> float:
        return self.times[0 if target == "gpu" else 3]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "move", "told"),
    [
        (
            {"kind": "ndp"},
            {"kind": "slices"},
            "place ndp computes nothing on the GPU, and move slices brings it experts",
        ),
        ({"kind": "ndp", "balanced": True}, {"kind": "nothing"}, "found move nothing; use slices"),
        ({"kind": "ndp", "balanced": True}, {"kind": "fetch"}, "found move fetch; use slices"),
        ({"kind": "ndp", "resident": True}, {"kind": "slices"}, "nothing is kept there; set prefetch = true"),
        (
            {"kind": "ndp", "balanced": True},
            {"kind": "slices", "prefetch": True},
            "none is computed there; set resident",
        ),
        (
            {"kind": "one_unit"},
            {"kind": "slices"},
            "move slices brings experts to the GPU of place ndp, and found place one_unit",
        ),
        ({"kind": "ndp", "costs_of": "m2-ultra"}, {"kind": "nothing"}, "costs_of needs balanced = true or resident"),
        ({"kind": "ndp", "balanced": True}, {"kind": "slices", "slots": 2}, "slots needs prefetch = true"),
    ],
)
def test_what_does_not_go_together_says_why(place: dict[str, object], move: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        CustomParameters.model_validate({"place": place, "move": move})


def test_a_sheet_without_the_units_is_refused() -> None:
    for sheet, told in (("m2-ultra", "m2-ultra"), ("rtx5080-ndp", "ndp:6")):
        with pytest.raises(DeviceError, match=told):
            preset_parameters("ndp").model_validate({"ndps": 7, "costs_of": sheet}).build(BuildContext(64, SIZES))


def test_a_memory_that_holds_no_expert_of_each_layer_is_refused() -> None:
    sizes = SIZES._replace(n_layers=3, n_sparse_layers=3)
    with pytest.raises(EngineError, match="the memory for experts holds 2, and 1 in each of 3 layers need 3; give it"):
        built("ndp", Plain(1, 1, 1), sizes, 2)
    with pytest.raises(EngineError, match="holds 8, and 3 in each of 3 layers need 9"):
        built("ndp", Plain(1, 1, 1), sizes, 8, slots=3)


# --- in the engine ---------------------------------------------------------------------------------------------------


def generation(prompt_ids: Sequence[int]) -> Request:
    return Request(
        request_id="r", sample_id="r", kind="generate", prompt_ids=tuple(prompt_ids), max_new_tokens=6,
        ignore_end_tokens=True,
    )  # fmt: skip


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
