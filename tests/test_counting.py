"""What an engine counts of the techniques that it runs: of alike plans one is made, and all are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.base import unheard
from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.model.checkpoints import Checkpoint, inspect_checkpoint, load_checkpoint
from engines.observers import SparseLayerStep
from engines.parallel.engine import ParallelEngine
from engines.parallel.running import RanksAsked
from engines.reference import ReferenceEngine
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import LayerInput
from engines.techniques.place.ranks import RanksParameters
from engines.techniques.presets import PRESETS, preset_parameters
from results.counters import EngineCounters
from results.records import Request
from tests.cases import marked
from tests.fakes.random_models import BUNDLED, write_random_model
from tests.kernel_forms import needs_compiler

N_LAYERS, TOP_K, N_NEW = 4, 2, 25
REQUEST = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=tuple(range(5, 45)), max_new_tokens=N_NEW)
WANTS_MORE = {"est-pf", "hybrid-pf", "moe-ondemand", "lru", "lfu", "static"}
"""An estimator, or room for experts."""
RUN_ALONE = [
    name
    for name, preset in PRESETS.items()
    if name not in WANTS_MORE and not isinstance(preset.choices.place, RanksParameters)
]


class Watcher:
    """Adds up what each plan says of itself, one by one."""

    def __init__(self) -> None:
        self.counters = EngineCounters()

    def step(self, n_tokens: int, kv_length: int, phase: str, plans: Sequence[DispatchPlan | None]) -> None:
        for plan in plans:
            if plan is not None:
                self.counters = EngineCounters.total([self.counters, plan.counters()])


class LayerByLayer:
    """Has each layer computed by itself, and tells what its router chose."""

    def __init__(self) -> None:
        self.chosen: dict[int, Counter[int]] = {}

    def layer(self, seen: SparseLayerStep) -> None:
        if seen.phase == "decode":
            self.chosen.setdefault(seen.layer, Counter()).update(seen.routing.expert_ids_TK.reshape(-1).tolist())


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint(str(BUNDLED), torch.float32)


def engine_of(checkpoint: Checkpoint, name: str = "dropless") -> ReferenceEngine:
    engine = ReferenceEngine(checkpoint, preset_parameters(name)(), prefill_chunk=64)
    if engine.needs_calibration:
        engine.calibrate([list(range(3 + n, 60 + n)) for n in range(4)])
    return engine


@pytest.mark.parametrize("name", RUN_ALONE)
def test_what_is_counted_is_the_sum_of_all_plans(checkpoint: Checkpoint, name: str) -> None:
    watched, counted = engine_of(checkpoint, name), engine_of(checkpoint, name)
    watched.observer = watcher = Watcher()
    watched.run(REQUEST, unheard)
    counted.run(REQUEST, unheard)
    counters, expected = counted.take_counters(), watcher.counters
    assert counters.routed_pairs == (40 + N_NEW - 1) * TOP_K * N_LAYERS
    # What leaves with the request is no plan's, and what was really copied is the engine's to tell.
    told = counters.model_copy(update={"prefetched_unused": expected.prefetched_unused, "bytes_copied": None})
    assert told == expected


RANKS = {"expert-parallel": 3, "tensor-parallel": 2, "tp-ep": 4, "eplb": 3}


def test_all_presets_over_ranks_are_among_those_that_are_counted() -> None:
    assert RANKS.keys() == {n for n, p in PRESETS.items() if isinstance(p.choices.place, RanksParameters)}


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", marked(RANKS, pytest.mark.slow, but=("expert-parallel", "eplb")))
def test_what_is_counted_over_ranks_is_the_sum_of_all_plans(name: str) -> None:
    """By the first rank, which plans for all."""
    parameters = preset_parameters(name).model_validate({"spare_slots": 1} if name == "eplb" else {})
    asked = RanksAsked(inspect_checkpoint(str(BUNDLED)), parameters, RANKS[name], prefill_chunk=64, threads=1)
    engine = ParallelEngine(asked)
    try:
        if engine.needs_calibration:
            engine.calibrate([list(range(3 + n, 60 + n)) for n in range(4)])
        engine.reset()
        first_rank = engine._ready().engine
        engine.run(REQUEST, unheard)
        counted = first_rank.take_counters()
        first_rank.observer = watcher = Watcher()
        engine.run(REQUEST, unheard)
    finally:
        engine.close()
    assert counted == watcher.counters
    assert counted.routed_pairs == (40 + N_NEW - 1) * TOP_K * N_LAYERS
    assert counted.bytes_exchanged


@pytest.mark.parametrize("kind", ["qwen3-moe", "qwen3-moe-some-dense"])
def test_choices_are_counted_for_their_own_layers_and_experts(kind: str, tmp_path: Path) -> None:
    write_random_model(tmp_path, kind)
    checkpoint = load_checkpoint(str(tmp_path), torch.float32)
    engine, watched = engine_of(checkpoint), engine_of(checkpoint)
    watched.layer_observer = watcher = LayerByLayer()
    request = REQUEST.model_copy(update={"ignore_end_tokens": True})
    assert engine.run(request, unheard).token_ids == watched.run(request, unheard).token_ids
    heat = engine.take_heat()
    assert heat is not None
    assert heat.layers == tuple(sorted(watcher.chosen))
    for layer, decoded in zip(heat.layers, heat.decoded, strict=True):
        assert list(decoded) == [watcher.chosen[layer][expert] for expert in range(len(decoded))]
        assert len(set(decoded)) > 1, "nothing tells one expert from the other here"


def plans_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A setter of what is done with each decoded token's plan."""
    plan = ComposedTechnique.plan

    def change(changed: Any) -> None:
        def planned(self: ComposedTechnique, seen: LayerInput) -> DispatchPlan:
            made = plan(self, seen)
            return changed(seen, made) if seen.phase == "decode" else made

        monkeypatch.setattr(ComposedTechnique, "plan", planned)

    return change


@needs_compiler
@pytest.mark.parametrize("name", ["dropless", "blockwise"])
def test_of_alike_plans_of_a_request_the_first_and_the_last_of_a_layer_are_made(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine, made = engine_of(checkpoint, name), Counter[int]()

    def counted(seen: LayerInput, plan: DispatchPlan) -> DispatchPlan:
        made[seen.layer] += 1
        return plan

    plans_of(monkeypatch)(counted)
    engine.run(REQUEST, unheard)
    assert made == dict.fromkeys(range(N_LAYERS), 2)


@needs_compiler
def test_plans_that_were_called_alike_and_count_otherwise_are_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, n_made = engine_of(checkpoint), Counter[int]()

    def drifting(seen: LayerInput, plan: DispatchPlan) -> DispatchPlan:
        n_made[seen.layer] += 1
        return replace(plan, hits=n_made[seen.layer])

    plans_of(monkeypatch)(drifting)
    with pytest.raises(EngineError, match="counts two tokens of layer 0 otherwise, and said that they are alike"):
        engine.run(REQUEST, unheard)


def failing_in_layer_2(seen: LayerInput, plan: DispatchPlan) -> DispatchPlan:
    if seen.layer == 2:
        raise EngineError("no such plan")
    return plan


def test_nothing_of_a_request_whose_plans_fail_is_counted_with_the_next(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, fresh = engine_of(checkpoint), engine_of(checkpoint)
    with monkeypatch.context() as patch:
        plans_of(patch)(failing_in_layer_2)
        with pytest.raises(EngineError, match="no such plan"):
            engine.run(REQUEST, unheard)
    engine.take_counters()  # as before each trial
    engine.take_heat()
    for one in (engine, fresh):
        one.run(REQUEST, unheard)
    assert engine.take_counters() == fresh.take_counters()
    assert engine.take_heat() == fresh.take_heat()


def test_what_a_failed_request_copied_is_not_told_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    filed = load_checkpoint(str(BUNDLED), torch.float32, experts_as_filed=True)
    parameters = preset_parameters("lru").model_validate({"slots": 16})
    failed, fresh = (ReferenceEngine(filed, parameters, prefill_chunk=64) for _ in range(2))
    with monkeypatch.context() as patch:
        plans_of(patch)(failing_in_layer_2)
        with pytest.raises(EngineError, match="no such plan"):
            failed.run(REQUEST, unheard)
    for one in (failed, fresh):
        one.take_counters()  # as before each trial
        one.reset()
        one.run(REQUEST, unheard)
    copied = failed.take_counters().bytes_copied
    assert copied
    assert copied == fresh.take_counters().bytes_copied


@needs_compiler
def test_what_ended_a_request_is_told_and_no_plan_that_fails_behind_it(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(checkpoint)
    plans_of(monkeypatch)(failing_in_layer_2)
    enter, n_entered = engine._cores.enter, Counter[str]()

    def interrupted(phase: Any) -> None:
        n_entered[phase] += 1
        if n_entered["decode"] == 3:
            raise KeyboardInterrupt
        enter(phase)

    monkeypatch.setattr(engine._cores, "enter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.run(REQUEST, unheard)
