"""Experts that are fetched a layer ahead: what travels, what it changes, and what an engine counts of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engines.base import unheard
from engines.calls import Calls, ExpertCall
from engines.dispatch import FILE, Link, Prediction, Routing
from engines.errors import EngineError
from engines.model.checkpoints import load_checkpoint
from engines.model.transformer import Transformer
from engines.oracle import Oracle
from engines.profile import Profile
from engines.reference import ReferenceEngine
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import BuildContext, ChunkPhase, LayerInput, ModelSizes
from engines.techniques.layout.exact import Exact
from engines.techniques.move.two_buffers import TwoBuffers, TwoBuffersParameters
from engines.techniques.place.units import OneUnitParameters
from engines.techniques.presets import preset_parameters
from engines.techniques.route import PredictedRoute
from results.records import Request
from tests.fakes.families import CASES, write_family
from tests.speculating import BUNDLED, FAMILIES, Ran, Recorded, built, loaded


@pytest.fixture(scope="module")
def bundled() -> tuple[Transformer, ModelSizes, Profile]:
    return loaded(BUNDLED)


# --- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FAMILIES)
def test_hints_change_no_answer_and_perfect_predictions_none_either(case: str, tmp_path: Path) -> None:
    """Every family: fetching on a hint is the oracle, and so is executing predictions that are the truth."""
    write_family(tmp_path, CASES[case])
    model, sizes, profile = loaded(str(tmp_path))
    truth = Recorded()
    oracle = Ran(model, Oracle(), sizes, truth, truth.step)
    for hints in ("prefetch-hint", "on-demand"):
        assert Ran(model, built(hints, model, sizes, profile), sizes).off(oracle) < 1e-5
    perfect = Ran(model, perfectly(truth, model, sizes), sizes, None, truth.step)
    assert perfect.off(oracle) < 1e-5
    decoded = [plan for plan in perfect.of("decode") if plan.recalled is not None]
    assert decoded
    assert all(plan.recalled == plan.routed_pairs and plan.misses == 0 for plan in decoded)
    # The first sparse layer of a step is its router's, fetched on demand; all later ones lay there.
    sparse = sorted(model.config.moe.sparse_layers) if model.config.moe else []
    assert len(perfect.of("decode")) - len(decoded) == 6 == len(perfect.of("decode")) // len(sparse)


def perfectly(truth: Recorded, model: Transformer, sizes: ModelSizes, prefill: bool = True) -> ComposedTechnique:
    context = BuildContext(16, sizes, None, None, model)
    route = PredictedRoute(truth, executes_prediction=True, speculates_prefill=prefill)
    place = OneUnitParameters(unit="gpu").build(context, Exact())
    move = TwoBuffersParameters().build(context)
    return ComposedTechnique("perfect", route, place, {"prefill": Exact(), "decode": Exact()}, move, context)


# --- what travels ----------------------------------------------------------------------------------------------------


def called(*experts: int, unit: str = "gpu") -> Calls:
    return Calls.of(
        ExpertCall((e,), (1,), (1,), row, kind=replace(ExpertCall((0,), (1,), (1,), 0).kind, unit=unit))
        for row, e in enumerate(experts)
    )


def told(*experts: int) -> Routing:
    return Routing(torch.tensor([experts]), torch.full((1, len(experts)), 1 / len(experts)), 6)


def seen(layer: int, phase: ChunkPhase, chosen: Sequence[int], predicted: Routing | None = None) -> LayerInput:
    return LayerInput(layer, phase, told(*chosen), predicted=predicted)


def test_a_toy_step_fetches_what_is_missing_and_then_what_was_predicted() -> None:
    """Layers 2, 3 and 5 have experts. By hand: on demand, then 4 and 1 ahead; then 1 is a hit and 0 a miss."""
    move = TwoBuffers({2: 3, 3: 5}, 6, 100, prefetch=True)
    first = move.moved(seen(2, "decode", (0, 5)), called(0, 5), Prediction(3, told(4, 1)))
    assert [(t.expert, t.layer) for t in first.transfers] == [(0, 2), (5, 2), (1, 3), (4, 3)]
    assert (first.hits, first.misses, first.transfers.n_bytes) == (0, 2, 400)
    assert first.unused == 0
    assert first.transfers.links == (Link("cpu", "gpu"),)
    second = move.moved(seen(3, "decode", (0, 1), told(4, 1)), called(0, 1), Prediction(5, told(0, 1)))
    assert [(t.expert, t.layer) for t in second.transfers] == [(0, 3), (0, 5), (1, 5)]
    assert (second.hits, second.misses, second.unused) == (1, 1, 1)
    last = move.moved(seen(5, "decode", (0, 1), told(0, 1)), called(0, 1), None)
    assert (len(last.transfers), last.hits, last.misses, last.unused) == (0, 2, 0, 0)


def test_a_prefill_without_predictions_loads_all_experts() -> None:
    move = TwoBuffers({2: 3, 3: 5}, 6, 100, prefetch=True)
    first = move.moved(seen(2, "prefill", (0, 5)), called(0, 5), None)
    assert [(t.expert, t.layer) for t in first.transfers] == [(0, 2), (5, 2), *((e, 3) for e in range(6))]
    following = move.moved(seen(5, "prefill", (0, 1)), called(0, 1), None)
    assert (len(following.transfers), following.hits, following.misses, following.unused) == (0, 2, 0, 4)


def test_on_demand_every_expert_is_missing_until_its_layer_asks() -> None:
    move = TwoBuffers({2: 3, 3: 5}, 6, 100, prefetch=False)
    for phase in ("prefill", "decode"):
        found = move.moved(seen(3, phase, (0, 1)), called(1, 0, unit="cpu"), None)
        assert [(t.expert, t.layer) for t in found.transfers] == [(0, 3), (1, 3)]
        assert (found.hits, found.misses, found.transfers.links) == (0, 2, (Link(FILE, "cpu"),))
        assert found.unused is None


def test_hits_of_hints_are_their_recall(bundled: tuple[Transformer, ModelSizes, Profile]) -> None:
    """One token: the experts called are those that its router chose, so that hits are those which were told; and what
    is executed as predicted misses nothing."""
    model, sizes, profile = bundled
    hints = Ran(model, built("prefetch-hint", model, sizes, profile), sizes).of("decode")
    assert [plan.hits for plan in hints] == [plan.recalled or 0 for plan in hints]
    assert [plan.misses for plan in hints] == [2 - (plan.recalled or 0) for plan in hints]
    executed = Ran(model, built("router-pf", model, sizes, profile), sizes).of("decode")
    assert [(plan.hits, plan.misses) for plan in executed] == [(0, 2), (2, 0), (2, 0), (2, 0)] * 6
    assert [plan.prefetched for plan in executed] == [2, 2, 2, 0] * 6


def test_prefill_speculates_when_it_is_told_to(bundled: tuple[Transformer, ModelSizes, Profile]) -> None:
    model, sizes, profile = bundled
    plain = Ran(model, built("router-pf", model, sizes, profile), sizes)
    assert all(plan.recalled is None and plan.executed is None for plan in plain.of("prefill"))
    assert [plan.prefetched for plan in plain.of("prefill")] == [16, 16, 16, 0] * 2
    bold = Ran(model, built("router-pf", model, sizes, profile, speculate_prefill=True), sizes)
    assert [plan.recalled is not None for plan in bold.of("prefill")] == [False, True, True, True] * 2
    assert bold.off(plain) > 1e-3


# --- in an engine ----------------------------------------------------------------------------------------------------


def ask(ids: Sequence[int], n: int = 5) -> Request:
    return Request(request_id="a", sample_id="a", kind="generate", prompt_ids=tuple(ids), max_new_tokens=n)


@pytest.mark.parametrize("name", ["router-pf", "prefetch-hint"])
def test_an_engine_counts_recall_and_learns_default_vectors_on_the_fly(name: str) -> None:
    checkpoint = load_checkpoint(BUNDLED, torch.float32)
    engine = ReferenceEngine(checkpoint, preset_parameters(name)(), 16)
    engine.calibrate([list(range(10, 58))])
    engine.run(ask(range(20, 50)), unheard)
    counters = engine.take_counters()
    # The first of five tokens comes from the prefill, so that four are decoded: three layers, two experts each.
    assert counters.predicted == 4 * 3 * 2
    assert counters.recalled is not None
    assert 0 < counters.recalled < counters.predicted
    assert counters.hits is not None
    assert counters.bytes_moved > 0


def test_decoded_tokens_are_read_again_where_decoding_took_other_experts() -> None:
    """Their keys are of what was predicted: with a shared prefix or without, the next request has the same answer."""
    checkpoint = load_checkpoint(BUNDLED, torch.float32)
    answers = []
    for reuse in (True, False):
        engine = ReferenceEngine(checkpoint, preset_parameters("router-pf")(source="s"), 8, reuse_prefix=reuse)
        first = engine.run(ask(range(20, 50), 12), unheard)
        again = engine.run(ask([*range(20, 50), *first.token_ids, 7, 8], 6), unheard)
        answers.append((first.token_ids, again.token_ids))
        assert again.n_cached_tokens == (24 if reuse else 0)
    assert answers[0] == answers[1]


def test_what_cannot_be_predicted_with_says_what_to_do(bundled: tuple[Transformer, ModelSizes, Profile]) -> None:
    model, sizes, profile = bundled
    for name in ("est-pf", "hybrid-pf"):
        with pytest.raises(EngineError, match=r"needs an estimator; `joulebench calibrate --estimator`"):
            built(name, model, sizes, replace(profile, estimator=None))
    with pytest.raises(EngineError, match="need default vectors"):
        built("router-pf", model, sizes, replace(profile, default_vectors_EH=None))
    assert profile.lacks(frozenset({"counts", "default vectors", "estimator"})) is None
    assert "no estimator" in str(replace(profile, estimator=None).lacks(frozenset({"estimator"})))
    assert "no default vectors" in str(replace(profile, default_vectors_EH=None).lacks(frozenset({"default vectors"})))
