"""Which expert a cache gives up: hand-checked traces, and a slow cache written separately.

Legend: E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.dispatch import FILE, Prediction, Routing
from engines.errors import EngineError
from engines.prediction import KnownState
from engines.profile import Profile
from engines.shown import Shown
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import BuildContext, HiddenState, ModelSizes
from engines.techniques.layout.exact import Exact
from engines.techniques.move.caches import CacheParameters
from engines.techniques.parameters import CustomParameters
from engines.techniques.place.units import OneUnitParameters
from engines.techniques.presets import preset_parameters
from engines.techniques.route import PredictedRoute

E = 5


def sizes(n_layers: int = 1, top_k: int = 2) -> ModelSizes:
    return ModelSizes(E, top_k, 8, 12, 100, n_layers, n_layers)


def played(
    name: str, steps: Sequence[tuple[int, Sequence[int]]], n_layers: int = 1, top_k: int = 2, **parameters: object
) -> list[tuple[list[int], list[int]]]:
    """Of each step (layer, experts of one token): the experts fetched, and whom they replace (-1: a free slot)."""
    technique = preset_parameters(name).model_validate(parameters).build(BuildContext(1, sizes(n_layers, top_k)))
    shown, found = Shown(technique.asks, sizes(n_layers, top_k)), []
    for layer, experts in steps:
        ids = torch.tensor([experts])
        seen = shown.layer(layer, "decode", Routing(ids, torch.ones(ids.shape), E), None, None)
        plan = technique.plan(seen)
        shown.ran(seen, plan)
        assert plan.hits is not None
        assert (plan.hits + len(plan.transfers), plan.misses) == (len(experts), len(plan.transfers))
        assert all((t.source, t.target, t.n_bytes) == (FILE, "cpu", 100) for t in plan.transfers)
        replaced = [-1 if t.replaces is None else t.replaces.expert for t in plan.transfers]
        found.append(([t.expert for t in plan.transfers], replaced))
    return found


def one_layer(*steps: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
    return [(0, experts) for experts in steps]


def test_lru_gives_up_what_was_used_longest_ago() -> None:
    """Slots 2. 0, 1 fill them; 0 is used again, so 2 takes the slot of 1; then 1 takes that of 0."""
    assert played("lru", one_layer([0], [1], [0], [2], [1], [2]), top_k=1, slots=2) == [
        ([0], [-1]), ([1], [-1]), ([], []), ([2], [1]), ([1], [0]), ([], [])
    ]  # fmt: skip


def test_lfu_gives_up_what_was_used_least_of_equal_ones_the_longest_ago() -> None:
    """Slots 2. 0 twice, 1 once: 2 takes the slot of 1. 1 was used once before, and its uses go on: with its second it
    replaces 2, which has one; then 0 and 1 have two each, and 0 was used longer ago."""
    assert played("lfu", one_layer([0], [0], [1], [2], [1], [3]), top_k=1, slots=2) == [
        ([0], [-1]), ([], []), ([1], [-1]), ([2], [1]), ([1], [2]), ([3], [0])
    ]  # fmt: skip


def test_what_a_step_calls_is_kept_while_anything_else_can_go() -> None:
    """Slots 3 hold 0, 1, 2, of which 0 was used longest ago: a step of 0 and 3 gives 1 up."""
    assert played("lru", one_layer([0, 1], [1, 2], [0, 3]), slots=3)[-1] == ([3], [1])


def test_more_experts_than_slots_go_through_them_one_after_another() -> None:
    """Slots 1 hold 1: a step of 0 and 1 gives it up for 0, and fetches it again when 0 has run."""
    assert played("lru", one_layer([0, 1], [0, 1]), slots=1) == [([0, 1], [-1, 0]), ([0, 1], [1, 0])]


def test_layers_have_slots_of_their_own() -> None:
    steps = [(0, [0]), (1, [0]), (0, [1]), (1, [0])]
    assert played("lru", steps, n_layers=2, top_k=1, slots=1) == [([0], [-1]), ([0], [-1]), ([1], [0]), ([], [])]


def test_static_keeps_its_experts_and_sends_the_others_through_shared_slots() -> None:
    """One of each layer stays, expert 0; one slot is shared by all others."""
    steps = [(0, [0]), (1, [3]), (0, [1]), (1, [0]), (0, [0]), (1, [3])]
    assert played("moe-ondemand", steps, n_layers=2, top_k=1, slots=1) == [
        ([0], [-1]), ([3], [-1]), ([1], [3]), ([0], [-1]), ([], []), ([3], [1])
    ]  # fmt: skip


def test_static_keeps_the_most_chosen_of_calibration() -> None:
    profile = Profile({0: (3, 9, 1, 9, 4)}, 1, 1)
    technique = preset_parameters("static").model_validate({"slots": 2}).build(BuildContext(1, sizes(1, 1), profile))
    shown = Shown(technique.asks, sizes(1, 1))
    for expert in (1, 3, 0, 4, 2):
        seen = shown.layer(0, "decode", Routing(torch.tensor([[expert]]), torch.ones(1, 1), E), None, None)
        shown.ran(seen, technique.plan(seen))
    assert shown.residency is not None
    assert shown.residency.holds_E("cpu", 0).tolist() == [False, True, True, True, False]


def slow_misses(policy: str, n_slots: int, steps: Sequence[Sequence[int]]) -> list[int]:
    """One step after the other, one expert after the other; lists are searched from end to end. Slots hold all that a
    step calls."""
    held: list[int] = []
    history: list[int] = []
    misses = []
    for called in steps:
        n = 0
        before = list(history)
        for expert in called:
            if expert in held:
                continue
            n += 1
            if len(held) == n_slots:
                others = [e for e in held if e not in called]

                def last(e: int, before: list[int] = before) -> int:
                    return max((i for i, used in enumerate(before) if used == e), default=-1)

                if policy == "lru":
                    goes = min(others, key=lambda e: (last(e), e))
                else:
                    goes = min(others, key=lambda e: (before.count(e), last(e), e))
                held.remove(goes)
            held.append(expert)
        history += called
        misses.append(n)
    return misses


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["lru", "lfu"]),
    st.integers(2, 5),
    st.lists(st.permutations(range(E)).map(lambda p: tuple(p[:2])), max_size=25),
)
def test_hits_are_those_of_a_slow_cache(policy: str, n_slots: int, steps: list[tuple[int, int]]) -> None:
    """As many slots as a token chooses, or more: nothing that a step calls goes."""
    found = [len(fetched) for fetched, _ in played(policy, one_layer(*map(sorted, steps)), slots=n_slots)]
    assert found == slow_misses(policy, n_slots, [tuple(sorted(step)) for step in steps])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["lru", "lfu", "static", "moe-ondemand"]),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 12)), max_size=12),
    st.integers(0, 2**20),
)
def test_slots_are_never_exceeded_and_every_call_finds_its_expert(
    name: str, slots: int, steps: list[tuple[int, int]], seed: int
) -> None:
    """Of chunks and tokens; the transfers of a plan are played one by one, each call when its expert is there."""
    profile = Profile({0: (1, 2, 3, 4, 5), 1: (5, 4, 3, 2, 1)}, 2, 1)
    technique = preset_parameters(name).model_validate({"slots": slots}).build(BuildContext(12, sizes(2), profile))
    shown, generator = Shown(technique.asks, sizes(2)), torch.Generator().manual_seed(seed)
    held: set[tuple[int, int]] = set()
    for layer, n_tokens in steps:
        ids = torch.rand(n_tokens, E, generator=generator).argsort(-1)[:, :2]
        routing = Routing(ids, torch.ones(ids.shape), E)
        seen = shown.layer(layer, "decode" if n_tokens == 1 else "prefill", routing, None, None)
        plan = technique.plan(seen)
        shown.ran(seen, plan)
        waiting = list(plan.transfers)
        for expert in plan.calls.expert_S.tolist():
            while (layer, expert) not in held:
                transfer = waiting.pop(0)
                if transfer.replaces is not None:
                    held.remove(tuple(transfer.replaces))  # type: ignore[arg-type]
                held.add((transfer.layer, transfer.expert))
        assert not waiting
        n_own = min(slots, E)
        most = {"static": 2 * n_own + 2, "moe-ondemand": 2 * n_own + 2}.get(name, 2 * n_own)
        assert len(held) <= most
        assert shown.residency is not None
        whole_LE = shown.residency.whole_LE("cpu")
        assert held == {(own, e) for own in range(2) for e in range(E) if whole_LE[own, e]}


@pytest.mark.parametrize(
    ("name", "n_slots", "words"),
    [
        ("lru", 3, "holds 3, and a cache of 1 in each of 4 layers needs 4"),
        ("static", 5, "holds 5, and a cache of 1 in each of 4 layers and 2 that all share needs 6"),
        ("lfu", None, "the cache has no expert_memory; give it slots"),
    ],
)
def test_a_memory_that_holds_too_few_is_refused(name: str, n_slots: int | None, words: str) -> None:
    context = BuildContext(1, sizes(4), Profile({0: (1,) * E}, 2, 1), expert_slots=n_slots)
    with pytest.raises(EngineError, match=words):
        preset_parameters(name)().build(context)


def test_slots_follow_from_the_memory() -> None:
    """13 experts in 4 layers are 3 in each; with 2 shared by all, 2 in each."""
    context = BuildContext(1, sizes(4), Profile(dict.fromkeys(range(4), (1,) * E), 2, 1), expert_slots=13)
    assert preset_parameters("lru")().build(context).asks.slots["cpu"][:2] == (3, "layer")
    assert preset_parameters("static")().build(context).asks.slots["cpu"][:2] == (2 * 4 + 2, "model")


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"move": {"kind": "cache"}, "place": {"kind": "shards"}}, "place shards computes on core:0, core:1"),
        ({"move": {"kind": "cache"}, "place": {"kind": "one_unit", "unit": "npu"}}, "one_unit computes on npu"),
        ({"move": {"kind": "cache", "evict": "lfu", "stay": "first"}}, 'stay needs evict = "static"'),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(chosen: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CustomParameters.model_validate(chosen)


# --- with predictions ------------------------------------------------------------------------------------------------


class Told:
    """Guesses that a test gives, of the next layer."""

    def __init__(self, experts: Sequence[Sequence[int] | None]) -> None:
        self._experts = iter(experts)

    def predict(self, known: KnownState) -> Prediction | None:
        experts = next(self._experts)
        if experts is None:
            return None
        ids = torch.tensor([experts])
        return Prediction(known.layer + 1, Routing(ids, torch.ones(ids.shape), E))

    def rule(self, layer: int) -> None: ...


def prefetched(
    evict: str, slots: int, top_k: int, steps: Sequence[tuple[int, Sequence[int], Sequence[int] | None]]
) -> list[list[tuple[int, int, int]]]:
    """Of each step (layer, experts of a token, experts told for the next layer): (layer, expert, expert replaced)."""
    parameters = CacheParameters(
        evict=evict, slots=slots, stay="first" if evict == "static" else "popular", prefetch=True
    )  # type: ignore[arg-type]
    context = BuildContext(1, sizes(2, top_k))
    place = OneUnitParameters().build(replace(context, units=("cpu",)), Exact())
    move = parameters.build(replace(context, units=("cpu",)))
    route = PredictedRoute(Told([told for _, _, told in steps]), executes_prediction=False, speculates_prefill=False)
    technique = ComposedTechnique("told", route, place, {"prefill": Exact(), "decode": Exact()}, move, context)
    shown, found = Shown(technique.asks, sizes(2, top_k)), []
    for layer, experts, _ in steps:
        if layer == 0:
            shown.start_step(0)
        ids = torch.tensor([experts])
        state = HiddenState(torch.zeros(1, 8), torch.zeros(1, 8), None)
        seen = shown.layer(layer, "decode", Routing(ids, torch.ones(ids.shape), E), None, state)
        plan = technique.plan(seen)
        shown.ran(seen, plan)
        assert plan.prefetched == sum(t.layer > layer for t in plan.transfers)
        found.append([(t.layer, t.expert, -1 if t.replaces is None else t.replaces.expert) for t in plan.transfers])
    assert shown.residency is not None
    assert all(shown.residency.n_free("cpu", layer) >= 0 for layer in (0, 1))
    return found


def test_what_was_predicted_lies_there_when_it_is_called() -> None:
    """Two slots a layer. Layer 0 tells 3 and 4 for layer 1, which then fetches nothing; the next token's guess of 4 and
    0 finds 4 there and takes the slot of 3; 2 is called and was not told: it takes that of 0, the older one."""
    steps = [(0, [1, 2], [3, 4]), (1, [3, 4], None), (0, [1, 2], [4, 0]), (1, [4, 2], None)]
    assert prefetched("lru", 2, 2, steps) == [
        [(0, 1, -1), (0, 2, -1), (1, 3, -1), (1, 4, -1)], [], [(1, 0, 3)], [(1, 2, 0)]
    ]  # fmt: skip


def test_what_was_predicted_and_lies_there_is_not_fetched_again() -> None:
    """The guess of 1 finds it in its slot; 3 was not there, and takes that of 2."""
    steps = [(0, [0, 4], [1, 2]), (1, [1, 2], None), (0, [0, 4], [1, 3]), (1, [1, 3], None)]
    assert prefetched("lru", 2, 2, steps)[2:] == [[(1, 3, 2)], []]


def test_what_was_predicted_goes_for_nothing_else_that_was() -> None:
    """One slot a layer and two guesses: the first is fetched, the second waits until it is called."""
    assert prefetched("lfu", 1, 2, [(0, [1, 2], [3, 4]), (1, [3, 4], None)]) == [
        [(0, 1, -1), (0, 2, 1), (1, 3, -1)], [(1, 4, 3)]
    ]  # fmt: skip


def test_static_prefetches_into_the_slots_that_all_layers_share() -> None:
    """Expert 0 of each layer stays; two slots are shared. Layer 0 calls 1 and 2, which fill them; of what it told for
    layer 1, 0 has a slot of its own, and 3 takes that of 1, which ran first."""
    assert prefetched("static", 1, 2, [(0, [1, 2], [0, 3]), (1, [0, 3], None)]) == [
        [(0, 1, -1), (0, 2, -1), (1, 0, -1), (1, 3, 1)], []
    ]  # fmt: skip
