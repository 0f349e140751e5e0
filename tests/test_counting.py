"""What an engine counts of the techniques that it runs: of alike plans one is made, and all are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from engines.base import unheard
from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.reference import ReferenceEngine
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import LayerInput
from engines.techniques.place.ranks import RanksParameters
from engines.techniques.presets import PRESETS, DroplessParameters, preset_parameters
from results.counters import EngineCounters
from results.records import Request
from tests.fakes.random_models import BUNDLED
from tests.kernel_forms import needs_compiler

N_LAYERS, TOP_K, N_NEW = 4, 2, 25
REQUEST = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=tuple(range(5, 45)), max_new_tokens=N_NEW)
ON_ONE_RANK = [name for name, preset in PRESETS.items() if not isinstance(preset.choices.place, RanksParameters)]


class Watcher:
    """Adds up what each plan says of itself, one by one."""

    def __init__(self) -> None:
        self.counters = EngineCounters()

    def step(self, n_tokens: int, kv_length: int, phase: str, plans: Sequence[DispatchPlan | None]) -> None:
        for plan in plans:
            if plan is not None:
                self.counters = EngineCounters.total([self.counters, plan.counters()])


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint(str(BUNDLED), torch.float32)


def engine_of(checkpoint: Checkpoint, name: str) -> ReferenceEngine:
    try:
        engine = ReferenceEngine(checkpoint, preset_parameters(name)(), prefill_chunk=64)
        if engine.needs_calibration:
            engine.calibrate([list(range(3 + n, 60 + n)) for n in range(4)])
    except EngineError as error:
        pytest.skip(str(error))
    return engine


@pytest.mark.parametrize("name", ON_ONE_RANK)
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


@needs_compiler
def test_of_alike_plans_of_a_request_one_a_layer_is_made(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, made, plan = ReferenceEngine(checkpoint, DroplessParameters()), Counter[str](), ComposedTechnique.plan

    def planned(self: ComposedTechnique, seen: LayerInput) -> DispatchPlan:
        made[seen.phase] += 1
        return plan(self, seen)

    monkeypatch.setattr(ComposedTechnique, "plan", planned)
    engine.run(REQUEST, unheard)
    heat = engine.take_heat()
    assert made["decode"] == N_LAYERS
    assert heat is not None
    assert [sum(layer) for layer in heat.decoded] == [(N_NEW - 1) * TOP_K] * N_LAYERS
