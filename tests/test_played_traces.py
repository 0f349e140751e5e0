"""Recorded routing through the caches: a toy trace by hand, gpt-oss-20b against caches written apart."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.dispatch import Integers
from engines.residency import Counts
from engines.techniques.context import BuildContext, ModelSizes
from engines.techniques.presets import preset_parameters
from tests.data_folder import data_folder
from tests.played_traces import (
    GPT_OSS_20B,
    Event,
    calls_by_layer,
    counted,
    fewest_loads,
    gpt_oss_sequences,
    played,
)
from tests.test_caches import slow_misses

TOY = ModelSizes(n_experts=4, top_k=2, hidden=8, expert_width=8, expert_bytes=100, n_layers=3, n_sparse_layers=3)


def toy_events() -> list[dict[str, str]]:
    path = data_folder() / "traces" / "moe" / "conformance_toy" / "events.csv"
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def toy_sequence() -> Integers:
    """experts_TLK of the events, which are by step and layer."""
    ids = [list(map(int, event["requested_experts"].split())) for event in toy_events()]
    return np.array(ids).reshape(-1, 3, 2)


def through(
    name: str, sequences: Sequence[Integers], sizes: ModelSizes, slots: int, **parameters: object
) -> list[Event]:
    profile = counted(sequences, sizes)
    parameters = {"slots": slots, **parameters}
    technique = preset_parameters(name).model_validate(parameters).build(BuildContext(1, sizes, profile))
    return list(played(technique, sequences, sizes))


def travels(event: Event) -> list[tuple[int, int | None]]:
    """Who is loaded, and whom it replaces."""
    return [(t.expert, None if t.replaces is None else t.replaces.expert) for t in event.plan.transfers]


@pytest.mark.parametrize("name", ["lru", "lfu"])
def test_the_toy_trace_at_two_slots_is_what_its_makers_and_our_hands_say(name: str) -> None:
    """Each layer: 0 and 1 fill it; then 0 stays, for every step calls it, and the other goes. Hits and misses of each
    event are the file's own, of another project; evictions by hand: 2 for 1, 1 for 2, 3 for 1, 1 for 3."""
    found = through(name, [toy_sequence()], TOY, 2)
    assert [(e.plan.hits, e.plan.misses) for e in found] == [(int(e["hits"]), int(e["misses"])) for e in toy_events()]
    by_hand = [[(0, None), (1, None)], [(2, 1)], [(1, 2)], [(3, 1)], [(1, 3)]]
    for layer in range(3):
        assert [travels(event) for event in found if event.layer == layer] == by_hand
    assert sum(event.plan.hits or 0 for event in found) == 12
    assert sum(len(event.plan.transfers) for event in found) == 18
    assert sum(t.replaces is not None for event in found for t in event.plan.transfers) == 12


@pytest.mark.parametrize(
    ("name", "slots", "by_hand"),
    [
        # Steps call 01 02 01 03 01. Three slots: 2 finds the third free; 3 takes that of 2, used longest ago and least.
        ("lru", 3, [[(0, None), (1, None)], [(2, None)], [], [(3, 2)], []]),
        ("lfu", 3, [[(0, None), (1, None)], [(2, None)], [], [(3, 2)], []]),
        # Four hold all: each is loaded once.
        ("lru", 4, [[(0, None), (1, None)], [(2, None)], [], [(3, None)], []]),
    ],
)
def test_the_toy_trace_at_more_slots_by_hand(
    name: str, slots: int, by_hand: list[list[tuple[int, int | None]]]
) -> None:
    found = through(name, [toy_sequence()], TOY, slots)
    for layer in range(3):
        assert [travels(event) for event in found if event.layer == layer] == by_hand


def test_the_toy_trace_with_experts_that_stay_by_hand() -> None:
    """0 stays in each layer, the most chosen and the first; all others go through two slots that the layers share.

    Step 0: layer 0 loads 0, and 1 into the first shared slot; layer 1 takes the second; layer 2 that of layer 0, whose
    1 was used longest ago. Step 1: layer 0 loads 2 in place of layer 1's 1, and so on: never a hit but for 0.
    """
    for name in ("static", "moe-ondemand"):
        found = through(name, [toy_sequence()], TOY, 1)
        assert [(e.plan.hits, e.plan.misses) for e in found] == [(0, 2)] * 3 + [(1, 1)] * 12
        gone = [t.replaces for event in found for t in event.plan.transfers if t.replaces is not None]
        assert gone[:4] == [(0, 1), (1, 1), (2, 1), (0, 2)]
        assert len(gone) == 5 * 3 - 2


def test_the_fewest_loads_of_the_toy_trace_by_hand() -> None:
    """At two slots each step replaces one; at three only 2 and 3 must be loaded besides 0 and 1."""
    for calls_TK in calls_by_layer([toy_sequence()]):
        assert [fewest_loads(calls_TK.tolist(), n) for n in (2, 3, 4)] == [6, 4, 4]


def every_way(events: Sequence[Sequence[int]], n_slots: int) -> int:
    """Fewest loads, over all that may be given up at each event."""

    @cache
    def least(number: int, held: frozenset[int]) -> int:
        if number == len(events):
            return 0
        called = frozenset(events[number])
        missing = called - held
        after = held | called
        return len(missing) + min(least(number + 1, kept) for kept in fitting(after, called, n_slots))

    return least(0, frozenset())


def fitting(after: frozenset[int], called: frozenset[int], n_slots: int) -> Iterator[frozenset[int]]:
    """What may be held: all that is called, and of the rest as much as fits or less."""
    if len(after) <= n_slots:
        yield after
    for own in after - called:
        yield from fitting(after - {own}, called, n_slots)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=2), max_size=7))
def test_no_way_of_giving_up_loads_less_than_the_bound(n_slots: int, events: list[set[int]]) -> None:
    calls = [tuple(sorted(event)) for event in events]
    assert fewest_loads(calls, n_slots) == every_way(calls, n_slots)


def test_counts_of_the_recorded_trace_are_those_published_with_it() -> None:
    """All 26,355 tokens through the engine's own counting."""
    path = data_folder() / "traces" / "moe" / "gpt-oss-20b_expert_counts.json"
    published = json.loads(path.read_text(encoding="utf-8"))
    sequences, counts = gpt_oss_sequences(), Counts(24, 32)
    for sequence in sequences:
        for layer in range(24):
            counts.add(layer, "decode", torch.from_numpy(sequence[:, layer]))
    assert counts.decode_LE.tolist() == published["counts"]
    assert [list(own) for own in counted(sequences).tokens_per_expert.values()] == published["counts"]
    assert (len(sequences), sum(map(len, sequences))) == (142, published["tokens"])


@pytest.mark.parametrize("name", ["lru", "lfu"])
@pytest.mark.parametrize("slots", [4, 11])
def test_a_recorded_answer_hits_as_often_as_in_a_cache_written_apart(name: str, slots: int) -> None:
    """Every layer of the first 90 tokens; and never more often than the best cache."""
    sequence = gpt_oss_sequences()[0][:90]
    found = through(name, [sequence], GPT_OSS_20B, slots)
    for layer, ids_TK in enumerate(calls_by_layer([sequence])):
        own = [event.plan.misses for event in found if event.layer == layer]
        steps = [tuple(sorted(ids)) for ids in ids_TK.tolist()]
        assert own == slow_misses(name, slots, steps)
        assert fewest_loads(steps, slots) <= sum(own)


@pytest.mark.parametrize("kept", [1, 4])
def test_a_prompts_most_chosen_experts_hit_as_often_as_they_are_called(kept: int) -> None:
    """GPU-NDP's prefetch, of two answers one after the other: by lists, the most counted of the first half of each. The
    first token's first layer finds what the answer before left there, for the fetch begins with it."""
    sequences = [sequence[:60] for sequence in gpt_oss_sequences()[4:6]]
    technique = preset_parameters("ndp-tp-pre").model_validate({"slots": kept}).build(BuildContext(1, GPT_OSS_20B))
    found = [event.plan.hits for event in played(technique, sequences, prompt_share=0.5) if event.phase == "decode"]
    expected, lying = [], [set[int]() for _ in range(24)]
    for sequence in sequences:
        prompt, answer = sequence[:30].tolist(), sequence[30:].tolist()
        for step, token in enumerate(answer):
            for layer, called in enumerate(token):
                if (step, layer) != (0, 0):
                    counts = [sum(e in one[layer] for one in prompt) for e in range(32)]
                    lying[layer] = set(sorted(range(32), key=lambda e, c=counts: (-c[e], e))[:kept])
                expected.append(len(lying[layer] & set(called)))
    assert found == expected


def test_static_hits_exactly_what_stays() -> None:
    """A shared slot is overwritten by the layers that follow before its own asks again: 4 slots, 96 calls a token."""
    sequence = gpt_oss_sequences()[3][:60]
    found = through("static", [sequence], GPT_OSS_20B, 8)
    stays_LX = [set(counted([sequence]).popularity(layer)[:8]) for layer in range(24)]
    loaded: set[tuple[int, int]] = set()
    for event, called in zip(found, sequence.reshape(-1, 4).tolist(), strict=True):
        chosen = {(event.layer, expert) for expert in called if expert in stays_LX[event.layer]}
        assert event.plan.hits == len(chosen & loaded)
        loaded |= chosen
