"""Decode steps of experts in slots are one call of the kernels, which stops only where an expert must be brought.

What they give, load and count is what they do plan by plan, the road of an engine that is observed.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.base import unheard
from engines.dispatch import FILE, DispatchPlan, Transfer, Transfers
from engines.errors import EngineError
from engines.kernels import tables
from engines.kernels.laid_out import HeldTable, layout_table, mix_laid_out
from engines.model.checkpoints import load_checkpoint
from engines.observers import StepPhase
from engines.reference import ReferenceEngine
from engines.techniques.base import Moved
from engines.techniques.composed import ComposedTechnique
from engines.techniques.parameters import CustomParameters
from results.counters import EngineCounters
from results.records import Request
from tests.fakes.families import CASES, write_family
from tests.fakes.random_models import BUNDLED, copy_tokenizer
from tests.test_decode_layouts import Watcher, drawn_layouts
from tests.test_expert_slots import engine

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: torch computes everything"),
]

ARMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("lru", {"slots": 16}),
    ("lru", {"slots": 5}),
    ("lru", {"slots": 1}),
    ("lfu", {"slots": 3}),
    ("static", {"slots": 6}),
    ("moe-ondemand", {"slots": 9}),
    ("custom", {"move": {"kind": "cache", "slots": 4}, "layout": {"kind": "blocks", "block_size": 4}}),
    ("custom", {"move": {"kind": "cache", "slots": 13}, "layout": {"kind": "all_experts"}}),
    ("custom", {"move": {"kind": "cache", "slots": 3},
                "layout": {"kind": "blocks", "block_size": 1, "skip_padding_blocks": False}}),
)  # fmt: skip


def request(seed: int, n_prompt: int = 40, n_new: int = 12) -> Request:
    draw = random.Random(seed)
    prompt = tuple(draw.randrange(5, 1900) for _ in range(n_prompt))
    return Request(
        request_id="a", sample_id="a", kind="generate", prompt_ids=prompt, max_new_tokens=n_new, ignore_end_tokens=True
    )


def cached(source: str | Path, name: str, parameters: dict[str, Any], **others: Any) -> ReferenceEngine:
    if name != "custom":
        return engine(source, name, parameters=parameters, **others)
    checkpoint = load_checkpoint(str(source), torch.float32, experts_as_filed=True)
    return ReferenceEngine(checkpoint, CustomParameters.model_validate(parameters), 32, **others)


def logits_of(made: ReferenceEngine, asked: Sequence[Request]) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    capped = made._model._capped
    made._model._capped = lambda logits_TL: seen.append(capped(logits_TL)) or seen[-1]  # type: ignore[func-returns-value,method-assign]
    for one in asked:
        made.run(one, unheard)
    return seen


def executed_plans(made: ReferenceEngine) -> list[DispatchPlan]:
    """Is told the plans of one token that slots compute."""
    assert made._shown.slots is not None
    execute, found = made._shown.slots.execute, list[DispatchPlan]()

    def listening(layer: int, plan: DispatchPlan, hidden_TH: torch.Tensor) -> torch.Tensor:
        if len(hidden_TH) == 1:
            found.append(plan)
        return execute(layer, plan, hidden_TH)

    made._shown.slots.execute = listening  # type: ignore[method-assign]
    return found


def counted(made: ReferenceEngine) -> dict[str, Any]:
    """Without what is measured: seconds."""
    return {name: n for name, n in made.take_counters().model_dump().items() if not name.endswith("_s")}


def assert_same_roads(
    made: ReferenceEngine, observed: ReferenceEngine, asked: Sequence[Request], road: str, tolerance: float = 0.0
) -> None:
    """One decides as it goes, the other plans each layer first: same logits, same counters, same slots."""
    observed.layer_observer = Watcher()
    for own, expected in zip(logits_of(made, asked), logits_of(observed, asked), strict=True):
        torch.testing.assert_close(own, expected, atol=tolerance, rtol=tolerance)
    assert (made.take_road().decoding, observed.take_road().decoding) == (road, "plan by plan")
    counters = counted(made)
    assert counters == counted(observed)
    assert counters["hits"] is not None
    assert made._shown.residency is not None
    assert observed._shown.residency is not None
    assert made._shown.residency.is_as(observed._shown.residency)
    assert made._shown.residency.n_plans_1[0] > 0


@pytest.mark.parametrize(("name", "parameters"), ARMS)
def test_what_is_loaded_used_and_counted_is_what_plans_would(name: str, parameters: dict[str, Any]) -> None:
    """Several requests on one set of slots, with hits and misses in the middle of steps."""
    made, observed = (cached(BUNDLED, name, parameters) for _ in range(2))
    assert_same_roads(made, observed, [request(seed) for seed in range(4)], "fused")


@pytest.mark.parametrize("family", ["olmoe", "deepseek-v2", "deepseek-v3", "phi-moe", "qwen2-moe", "mixtral"])
@pytest.mark.parametrize("slots", [2, 5])
def test_routers_of_other_families_stop_alike(family: str, slots: int, tmp_path: Path) -> None:
    write_family(tmp_path, CASES[family])
    copy_tokenizer(tmp_path)
    made, observed = (cached(tmp_path, "lru", {"slots": slots}) for _ in range(2))
    road = "fused" if made._model.decodes_in_one_call else "layer by layer"
    assert_same_roads(made, observed, [request(seed, 20, 8) for seed in range(3)], road)


def test_tokens_that_are_turned_anew_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    """A prompt is read between two decode steps, whose plans are made before."""
    write_family(tmp_path, CASES["phi-moe-long-rope"])
    copy_tokenizer(tmp_path)
    made, observed = (cached(tmp_path, "lru", {"slots": 3}, long_rope="when_reached") for _ in range(2))
    assert_same_roads(made, observed, [request(1, 10, 12), request(2, 10, 12)], "layer by layer")


def test_the_step_stops_where_an_expert_is_missing_and_nowhere_else() -> None:
    made = cached(BUNDLED, "lru", {"slots": 16})
    stops = executed_plans(made)
    made.run(request(1), unheard)
    first = len(stops)
    assert first > 0
    assert all(len(plan.transfers) for plan in stops)
    assert sum(plan.misses or 0 for plan in stops) <= (made.take_counters().misses or 0)
    made.run(request(1), unheard)
    assert len(stops) == first, "all that it calls lies there"
    counters = made.take_counters()
    assert (counters.misses, counters.hits) == (0, counters.expert_calls)


def test_experts_on_their_way_are_waited_for() -> None:
    """Residency says that they lie there, and a copy may still run: the layer is left to its plan, which waits."""
    made, whole = cached(BUNDLED, "lru", {"slots": 16}), engine(BUNDLED, "dropless")
    made.run(request(3), unheard)
    slots = made._shown.slots
    assert slots is not None
    stops = executed_plans(made)
    made._shown.settle()
    slots.at_hand_LE[2] = False
    assert torch.equal(torch.cat(logits_of(made, [request(3)])), torch.cat(logits_of(whole, [request(3)])))
    assert len(stops) == 11, "of each token one layer; the first of 12 is of the prompt"
    assert not any(len(plan.transfers) for plan in stops)


def test_what_a_step_loaded_stays_known_where_a_later_layer_fails() -> None:
    made, whole = cached(BUNDLED, "lru", {"slots": 4}), engine(BUNDLED, "dropless")
    slots = made._shown.slots
    assert slots is not None
    execute, calls = slots.execute, 0

    def failing(layer: int, plan: DispatchPlan, hidden_TH: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += len(hidden_TH) == 1
        if calls == 5:
            raise EngineError("the disk is gone")
        return execute(layer, plan, hidden_TH)

    slots.execute = failing  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="the disk is gone"):
        made.run(request(1), unheard)
    slots.execute = execute  # type: ignore[method-assign]
    made.take_counters()
    assert torch.equal(torch.cat(logits_of(made, [request(2)])), torch.cat(logits_of(whole, [request(2)])))
    assert made._shown.residency is not None
    assert np.array_equal(made._shown.residency.whole_LE("cpu"), slots.at_hand_LE)


def test_a_plan_that_would_have_brought_what_lay_there_ends_the_request() -> None:
    made = cached(BUNDLED, "lru", {"slots": 16})
    technique = made._technique
    assert isinstance(technique, ComposedTechnique)
    moved = technique._move.moved  # type: ignore[union-attr]

    def loads_again(*seen: Any) -> Moved:
        found = moved(*seen)
        if seen[0].phase == "prefill" or found.misses:
            return found
        again = Transfer(0, seen[0].layer, FILE, "cpu", 1)
        return found._replace(transfers=Transfers.of([again]))

    made.run(request(1), unheard)
    technique._move.moved = loads_again  # type: ignore[union-attr,method-assign]
    with pytest.raises(EngineError, match="planned to bring experts to layer 0, and all lay there"):
        made.run(request(1), unheard)


class Listener:
    def __init__(self) -> None:
        self.counters: list[EngineCounters] = []

    def step(self, n_tokens: int, kv_length: int, phase: StepPhase, plans: Sequence[DispatchPlan | None]) -> None:
        self.counters += [plan.counters() for plan in plans if plan is not None]


def test_an_observer_of_steps_is_told_the_plan_of_that_moment() -> None:
    made, observed = (cached(BUNDLED, "lfu", {"slots": 3}) for _ in range(2))
    made.observer, observed.observer, observed.layer_observer = Listener(), Listener(), Watcher()
    for one in (made, observed):
        one.run(request(5), unheard)
    assert made.observer.counters == observed.observer.counters
    assert counted(made) == counted(observed)


FETCHED = {"kind": "fetch", "gpu_slots": 20, "stay": "first"}


def test_what_is_counted_and_not_copied_needs_no_stop() -> None:
    """Weights that lie in one memory here: transfers follow from the plans, which are made afterwards."""
    technique = CustomParameters.model_validate({"move": FETCHED, "place": {"kind": "one_unit", "unit": "gpu"}})
    checkpoint = load_checkpoint(str(BUNDLED), torch.float32)
    made, observed = (ReferenceEngine(checkpoint, technique, 32) for _ in range(2))
    # Without slots a plan adds experts up by their numbers, and the step in the router's order.
    assert_same_roads(made, observed, [request(seed) for seed in range(2)], "fused", tolerance=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_kernels_count_as_used_what_a_layout_calls(seed: int) -> None:
    """Against the layout's docstring: the chosen, their groups, and the last expert where there is padding."""
    draw, n_experts, hidden, width = random.Random(seed), 12, 64, 64
    one = torch.eye(width), torch.eye(width), torch.eye(hidden)
    experts = tables.expert_table([one] * n_experts)
    if experts is None:
        pytest.skip("no kernels here")
    for drawn in drawn_layouts(seed, n_experts, hidden, width):
        layout = replace(drawn, widths=(), hidden=())
        table = layout_table([None, layout], n_experts, [[], []])
        at_hand_LE = np.ones((2, n_experts), dtype=np.bool_)
        at_hand_LE[:, draw.randrange(n_experts)] = draw.random() < 0.5
        uses_LE, last_LE, n_plans_1 = (np.zeros(shape, np.int64) for shape in ((2, n_experts), (2, n_experts), 1))
        n_plans_1[0] = 41
        held = HeldTable(at_hand_LE, uses_LE, last_LE, n_plans_1)
        chosen = draw.sample(range(n_experts), 3)
        groups = layout.group_of_E or range(n_experts)
        called = [e for e in range(n_experts) if groups[e] in {groups[c] for c in chosen}]
        called = sorted({*called, *([n_experts - 1] if layout.n_padding_calls else [])})
        found = mix_laid_out(
            torch.randn(1, hidden), experts, table, 1, torch.tensor([chosen]), torch.full((1, 3), 0.3), held
        )
        is_there = bool(at_hand_LE[1][called].all())
        assert (found is not None) == is_there
        assert uses_LE[0].sum() == last_LE[0].sum() == 0
        assert uses_LE[1].nonzero()[0].tolist() == (called if is_there else [])
        assert set(uses_LE[1][called]) == {int(is_there)}
        assert set(last_LE[1][called]) == {42 * is_there}
        assert n_plans_1[0] == 41 + is_there
