"""Residency and what an engine shows its technique: by hand-checked events, and through a technique that moves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engines.calls import Calls, ExpertCall, Width
from engines.dispatch import FILE, DispatchPlan, LayerExpert, Prediction, Routing, Transfer, Transfers
from engines.errors import EngineError
from engines.residency import Counts, Residency, Slots
from engines.shown import Shown
from engines.techniques.base import Moved
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import Asks, BuildContext, HiddenState, LayerInput, ModelSizes
from engines.techniques.layout.exact import Exact
from engines.techniques.place.units import OneUnitParameters

WIDTH = 12
SIZES = ModelSizes(4, 2, 8, WIDTH, 100, 3, 3)


TWO = Slots(2)


def residency(slots: Slots = TWO, unit: str = "gpu") -> Residency:
    return Residency(3, 4, WIDTH, {unit: slots})


def plan(called: tuple[int, ...], *transfers: Transfer) -> DispatchPlan:
    calls = Calls.of(ExpertCall((e,), (1,), (1,), i) for i, e in enumerate(called))
    n = len(called)
    return DispatchPlan(1, torch.zeros(n), torch.zeros(n), calls, n, 0, Transfers.of(transfers, WIDTH))


def fetch(expert: int, layer: int = 0, replaces: tuple[int, int] | None = None, width: Width | None = None) -> Transfer:
    place = None if replaces is None else LayerExpert(*replaces)
    return Transfer(expert, layer, "cpu", "gpu", 100, width, place)


def test_transfers_are_the_same_one_by_one_and_as_arrays() -> None:
    one_by_one = [
        Transfer(3, 0, FILE, "cpu", 7),
        Transfer(1, 2, "cpu", "gpu", 3, Width(4, 8), LayerExpert(1, 2)),
        Transfer(0, 1, FILE, "cpu", 5, Width(0, WIDTH)),
    ]
    made = Transfers.of(one_by_one, WIDTH)
    assert list(made)[1:] == one_by_one[1:]
    assert made[0] == Transfer(3, 0, FILE, "cpu", 7, Width(0, WIDTH))  # a whole one beside a part says so
    assert list(Transfers.of(one_by_one[:1])) == one_by_one[:1]
    assert (made.n_bytes, made.links) == (15, ((FILE, "cpu"), ("cpu", "gpu")))


def test_what_arrives_lies_there_until_it_is_replaced() -> None:
    held = residency()
    held.apply(0, plan((1, 3), fetch(1), fetch(3)))
    assert held.holds_E("gpu", 0).tolist() == [False, True, False, True]
    assert not held.holds_E("gpu", 1).any()
    assert held.n_free("gpu", 0) == 0
    held.apply(0, plan((0,), fetch(0, replaces=(0, 1))))
    assert held.holds_E("gpu", 0).tolist() == [True, False, False, True]


def test_what_lies_there_from_the_start_lies_there_after_a_reset() -> None:
    held = residency(Slots(2, "model", (LayerExpert(0, 3), LayerExpert(2, 1))))
    assert (held.holds_E("gpu", 0).tolist(), held.n_free("gpu", 0)) == ([False, False, False, True], 0)
    held.apply(0, plan((1,), fetch(1, replaces=(0, 3))))
    assert held.holds_E("gpu", 0).tolist() == [False, True, False, False]
    held.reset()
    assert held.whole_LE("gpu").nonzero()[0].tolist() == [0, 2]
    assert held.columns_E2("gpu", 2)[1].tolist() == [0, WIDTH]
    with pytest.raises(EngineError, match="its 1 slots a model hold"):
        residency(Slots(1, "model", (LayerExpert(0, 3), LayerExpert(2, 1))))


def test_what_only_passes_takes_no_slot() -> None:
    """A memory with one slot: what passes is gone when its layer ran, and what stays lies there."""
    held = residency(Slots(1))
    passing = replace(fetch(0), stays=False)
    transfers = Transfers.of((passing, fetch(1), replace(fetch(2), stays=False)), WIDTH)
    assert [t.stays for t in transfers] == [False, True, False]
    held.apply(0, replace(plan((0, 1, 2)), transfers=transfers))
    assert held.holds_E("gpu", 0).tolist() == [False, True, False, False]
    assert transfers.n_bytes == 300


def test_experts_that_stream_through_one_slot_leave_the_last() -> None:
    """Each replaces the one before in the same plan; an expert may come, go and come again."""
    held = residency(Slots(1))
    streams = (fetch(0), fetch(2, replaces=(0, 0)), fetch(0, replaces=(0, 2)), fetch(3, replaces=(0, 0)))
    held.apply(0, plan((0, 2, 3), *streams))
    assert held.holds_E("gpu", 0).tolist() == [False, False, False, True]


def test_slices_take_their_share_of_a_slot() -> None:
    held = residency(Slots(1))
    held.apply(1, plan((0,), fetch(0, 1, width=Width(0, 6)), fetch(2, 1, width=Width(6, 9))))
    assert held.columns_E2("gpu", 1).tolist() == [[0, 6], [0, 0], [6, 9], [0, 0]]
    assert not held.holds_E("gpu", 1).any()
    assert held.n_free("gpu", 1) == 0.25


def test_more_experts_than_slots_are_refused() -> None:
    with pytest.raises(EngineError, match="brings more experts to gpu than its 2 slots a layer hold"):
        residency().apply(0, plan((0, 1, 2), fetch(0), fetch(1), fetch(2)))
    shared = residency(Slots(2, "model"))
    shared.apply(0, plan((0,), fetch(0), fetch(1, layer=1)))
    with pytest.raises(EngineError, match="its 2 slots a model hold"):
        shared.apply(2, plan((0,), fetch(0, layer=2)))


def test_uses_count_plans_and_last_use_is_the_number_of_the_plan() -> None:
    """Slices of one expert are one use."""
    held = residency()
    held.apply(0, plan((1, 1, 2)))
    held.apply(1, plan((1,)))
    held.apply(0, plan((1,)))
    assert held.uses_LE[0].tolist() == [0, 2, 1, 0]
    assert held.last_use_LE.tolist() == [[0, 3, 1, 0], [0, 2, 0, 0], [0, 0, 0, 0]]
    held.reset()
    assert not held.uses_LE.any()
    assert not held.last_use_LE.any()


def test_a_prefetch_that_nobody_calls_is_counted_once() -> None:
    """Of four: one is called, one replaced before it is, one lies unused at the end, one comes a second time."""
    held = residency(Slots(3))
    held.apply(0, plan((0,), fetch(0), fetch(1, 1), fetch(2, 1), fetch(3, 1)))
    held.apply(1, plan((1,), fetch(0, 1, replaces=(1, 2))))
    assert held.take_unused() == 2
    held.apply(1, plan((3,)))
    assert held.take_unused() == 0
    held.apply(0, plan((0,), fetch(2, 1, replaces=(1, 3))))
    held.apply(1, plan((2,)))
    assert held.take_unused() == 0


def test_a_memory_that_is_not_watched_is_left_alone() -> None:
    held = residency(unit="npu")
    held.apply(0, plan((0, 1, 2), fetch(0), fetch(1), fetch(2)))
    assert not held.holds_E("npu", 0).any()
    assert held.take_unused() is None


def test_counts_are_of_each_phase() -> None:
    counts = Counts(2, 4)
    counts.add(1, "prefill", torch.tensor([[0, 3], [3, 1], [3, 0]]))
    counts.add(1, "decode", torch.tensor([[2, 3]]))
    assert counts.prefill_LE.tolist() == [[0] * 4, [2, 1, 0, 3]]
    assert counts.decode_LE.tolist() == [[0] * 4, [0, 0, 1, 1]]
    counts.add(1, "prefill", torch.tensor([[1, 3], [2, 3]]))
    counts.add(0, "prefill", torch.tensor([[1, 3]]))
    assert counts.busiest_L.tolist() == [1, 3], "of one step, not of all"
    counts.reset()
    assert not counts.prefill_LE.any()
    assert not counts.busiest_L.any()


def routing(*experts: int) -> Routing:
    ids = torch.tensor([experts])
    return Routing(ids, torch.full(ids.shape, 0.5), 4)


class FirstTwoNext:
    """Executes what was predicted, and predicts experts 0 and 1 for the next layer."""

    asks = Asks(hidden_state=True)

    def executed(self, seen: LayerInput) -> Routing:
        assert seen.hidden_state is not None
        assert seen.hidden_state.residual_TH.tolist() == [[float(seen.layer)]]
        return seen.routing if seen.predicted is None else seen.predicted

    def predict(self, seen: LayerInput) -> Prediction | None:
        return Prediction(seen.layer + 1, routing(0, 1)) if seen.layer < 2 else None


class FetchesPrediction:
    """Of the experts that lie nowhere, those called and those predicted."""

    asks = Asks(counts=True, slots={"gpu": Slots(4)})
    prefetches = True
    keeps_what_lies = False

    def moved(self, seen: LayerInput, calls: Calls, prediction: Prediction | None) -> Moved:
        assert seen.residency is not None
        wanted = [(seen.layer, calls.expert_S)]
        if prediction is not None:
            wanted.append((prediction.layer, prediction.routing.expert_ids_TK[0].numpy()))
        missing = [(layer, e[~seen.residency.holds_E("gpu", layer)[e]]) for layer, e in wanted]
        transfers = [fetch(int(e), layer) for layer, experts in missing for e in experts]
        n_misses = len(missing[0][1])
        return Moved(Transfers.of(transfers), (), len(calls.expert_S) - n_misses, n_misses)


def test_a_predicted_route_is_executed_and_its_experts_are_fetched_ahead() -> None:
    """Layer 0 routes truly; the layers behind it compute what was predicted, and find it fetched."""
    context = BuildContext(1, SIZES)
    exact, gpu = Exact(), OneUnitParameters(unit="gpu").build(context, Exact())
    layouts = {"prefill": exact, "decode": exact}
    technique = ComposedTechnique("guessing", FirstTwoNext(), gpu, layouts, FetchesPrediction(), context)  # type: ignore[arg-type]
    assert technique.decode_layout(0) is None  # something is decided between router and experts
    shown = Shown(technique.asks, SIZES)
    plans = []
    for step in range(2):
        shown.start_step(0)
        for layer in range(3):
            state = HiddenState(torch.tensor([[float(layer)]]), torch.zeros(1, 1), None)
            seen = shown.layer(layer, "decode", routing(2, 3), None, state)
            plans.append(technique.plan(seen))
            shown.ran(seen, plans[-1])
        assert shown.counts is not None
        assert shown.counts.decode_LE[1].tolist() == [0, 0, step + 1, step + 1]  # the router's own choice
    assert [p.calls.expert_S.tolist() for p in plans] == [[2, 3], [0, 1], [0, 1]] * 2
    assert [p.executed is None for p in plans] == [True, False, False] * 2
    assert [(p.hits, p.misses, p.prefetched) for p in plans] == [(0, 2, 2), (2, 0, 2), (2, 0, 0), *[(2, 0, 0)] * 3]
    assert [p.counters().bytes_moved for p in plans] == [400, 200, 0, 0, 0, 0]
    assert shown.take_unused() == 0


def test_predictions_live_for_one_step_and_counts_for_one_request() -> None:
    shown = Shown(Asks(counts=True), SIZES)
    shown.start_step(7)
    first = shown.layer(0, "prefill", routing(2, 3), None, None)
    assert (first.prefill_left, first.predicted, first.residency) == (7, None, None)
    guessing = plan((2, 3))
    object.__setattr__(guessing, "prediction", Prediction(1, routing(0, 1)))
    shown.ran(first, guessing)
    assert shown.layer(1, "prefill", routing(2, 3), None, None).predicted is guessing.prediction.routing  # type: ignore[union-attr]
    shown.start_step(0)
    assert shown.layer(1, "decode", routing(2, 3), None, None).predicted is None
    assert shown.counts is not None
    assert np.array_equal(shown.counts.prefill_LE[0], [0, 0, 1, 1])
    shown.start_request()
    assert not shown.counts.prefill_LE.any()


def test_two_decisions_that_size_one_memory_differently_are_refused() -> None:
    class Route(FirstTwoNext):
        asks = Asks(slots={"gpu": Slots(3)})

    context = BuildContext(1, SIZES)
    exact = Exact()
    gpu = OneUnitParameters(unit="gpu").build(context, exact)
    with pytest.raises(EngineError, match="the memory of gpu has 3 slots and 4"):
        ComposedTechnique("two", Route(), gpu, {"prefill": exact, "decode": exact}, FetchesPrediction(), context)
