"""Every choice of each decision with every other: it runs and gives what it must, or the plan check says why not."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from engines.model.checkpoints import load_checkpoint
from engines.model.quantised import Quantisation
from engines.oracle import OracleParameters
from engines.reference import ReferenceEngine
from engines.techniques.parameters import CustomParameters
from harness.model_specs import ModelSpec
from harness.plan import PlanError, draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts, expert_memory
from harness.schema import EngineSpec
from results.counters import EngineCounters
from tests.cases import marked
from tests.fakes.random_models import BUNDLED
from tests.plans import raw_plan
from tests.test_expert_slots import all_logits

pytestmark = pytest.mark.numbers

TOLERANCE = 1e-5
ROUTES: dict[str, dict[str, Any]] = {
    "router": {},
    "predicted": {"route": {"kind": "predicted", "source": "s"}},
    "hints": {"route": {"kind": "predicted", "source": "s", "executes": "router"}},
}
PLACES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "npu": {"place": {"kind": "one_unit", "unit": "npu"}},
    "shards": {"place": {"kind": "shards", "shard": "blocks"}},
    "by_cost": {"place": {"kind": "by_cost"}},
    "tp": {"place": {"kind": "tensor_parallel"}},
    "ep": {"place": {"kind": "expert_parallel"}},
    "tp_ep": {"place": {"kind": "tp_ep"}},
    "eplb": {"place": {"kind": "eplb"}},
    "ndp": {"place": {"kind": "ndp", "ndps": 3}},
    "ndp, balanced": {"place": {"kind": "ndp", "balanced": True}},
    "ndp, resident": {"place": {"kind": "ndp", "balanced": True, "resident": True}},
}
RANKED = {"tp", "ep", "tp_ep", "eplb"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "exact": {"layout": {"kind": "exact"}},
    "blocks": {"layout": {"kind": "blocks", "block_size": 16}},
    "selective": {"layout": {"kind": "selective"}},
    "blocks, selective": {"layout": {"kind": "blocks", "block_size": 16}, "decode": {"kind": "selective"}},
    "all experts": {"layout": {"kind": "all_experts"}},
    "wide capacity": {"layout": {"kind": "capacity", "factor": 8.0}},
    "wide tiers": {"layout": {"kind": "tiers", "multiples": [8], "decode_graphs": "cpu"}},
    "capacity": {"layout": {"kind": "capacity", "factor": 1.0}},
    "tiers": {"layout": {"kind": "tiers", "grouped": True}},
}
LOSSY = {"capacity", "tiers"}
"""At 8 = E / K times the fair share nothing is ever dropped."""
MOVES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "on demand": {"move": {"kind": "two_buffers", "prefetch": False}},
    "two buffers": {"move": {"kind": "two_buffers"}},
    "slices": {"move": {"kind": "slices"}},
    "slices, prefetch": {"move": {"kind": "slices", "prefetch": True}},
    "lru": {"move": {"kind": "cache", "slots": 3}},
    "lru, prefetch": {"move": {"kind": "cache", "slots": 3, "prefetch": True}},
    "static, prefetch": {"move": {"kind": "cache", "evict": "static", "slots": 3, "prefetch": True}},
}
FORMS: dict[str, dict[str, Any]] = {"fp32": {}, "int8": {"quantise": {"experts": "int8"}}}
Key = tuple[str, str, str, str, str]
ALL: tuple[Key, ...] = tuple(itertools.product(ROUTES, PLACES, LAYOUTS, MOVES, FORMS))


def raw_engine(key: Key) -> dict[str, Any]:
    route, place, layout, move, form = key
    technique = {"name": "custom"} | ROUTES[route] | PLACES[place] | LAYOUTS[layout] | MOVES[move]
    ranks = {"ranks": 2, "threads": 1} if place in RANKED else {}
    return {"name": " / ".join(key), "technique": technique} | ranks | FORMS[form]


@cache
def refused() -> dict[Key, list[str]]:
    """What the plan check says of each, all in one plan: as a draft first, then with the model."""
    found: dict[Key, list[str]] = {}
    for keys in (ALL, None):
        asked = [key for key in ALL if key not in found] if keys is None else list(keys)
        draft = draft_plan(raw_plan(engine=[raw_engine(key) for key in asked]))
        lines = list(draft.problems)
        if keys is None:
            with RunPartsOf(draft) as parts:
                try:
                    preflight(draft, parts)
                except PlanError as error:
                    lines = list(error.problems)
        for line in lines:
            number, name = re.match(r"engine(?:\[(\d+)\]| ([^:]+):)", line).groups()  # type: ignore[union-attr]
            key = asked[int(number)] if number is not None else tuple(name.split(" / "))
            found.setdefault(key, []).append(line)  # type: ignore[arg-type]
    return found


class RunPartsOf:
    def __init__(self, draft: Any) -> None:
        self._parts = RunParts(draft.plan.protocol)

    def __enter__(self) -> RunParts:
        return self._parts

    def __exit__(self, *told: object) -> None:
        self._parts.close()


def run(key: Key) -> tuple[torch.Tensor, EngineCounters]:
    form = key[-1]
    spec = EngineSpec.model_validate(raw_engine(key))
    technique = CustomParameters.model_validate({k: v for k, v in raw_engine(key)["technique"].items() if k != "name"})
    made = ReferenceEngine(
        _checkpoint(form, technique.loads_from_file), technique, 32, expert_memory=expert_memory(spec, MODEL)
    )
    if made.needs_calibration:
        made.calibrate([list(range(10, 74))])
    found = all_logits(made)
    return found, made.take_counters()


MODEL = ModelSpec(source=str(BUNDLED))


@cache
def _checkpoint(form: str, as_filed: bool) -> Any:
    quantise = Quantisation(**FORMS[form].get("quantise", {}))
    return load_checkpoint(str(BUNDLED), torch.float32, quantise, experts_as_filed=as_filed)


@cache
def expected(route: str, layout: str, form: str) -> torch.Tensor:
    """The oracle's where nothing is guessed and nothing dropped; else the same choices with all weights at hand."""
    if route != "predicted" and layout == "exact":
        return all_logits(ReferenceEngine(_checkpoint(form, False), OracleParameters(), 32))
    return run(("router" if route == "hints" else route, "cpu", layout, "nothing", form))[0]


def those_that_run() -> Iterator[Key]:
    return (key for key in ALL if key not in refused() and key[1] not in RANKED)


def test_what_cannot_be_combined_says_why_in_one_line() -> None:
    for key, lines in refused().items():
        assert len(lines) == 1, (key, lines)
        assert "\n" not in lines[0]
        assert len(lines[0]) < 300
        assert re.search(r"use |remove|set |give|leave|take ", lines[0]), lines[0]


@pytest.mark.parametrize(
    "key",
    [
        *[("router", "cpu", "exact", move, "int8") for move in ("nothing", "on demand", "lru")],
        *[("router", place, "exact", "nothing", "int8") for place in ("tp", "ep", "tp_ep", "eplb", "by_cost")[:4]],
        *[("predicted", "cpu", layout, "two buffers", form) for layout in ("tiers", "capacity") for form in FORMS],
        *[("router", "ep", layout, "nothing", form) for layout in ("blocks", "blocks, selective") for form in FORMS],
        *[
            (route, "cpu", "exact", move, form)
            for route in ("predicted", "hints")
            for move in ("lru, prefetch", "static, prefetch")
            for form in FORMS
        ],
    ],
)
def test_what_the_sources_combine_is_not_refused(key: Key) -> None:
    """Quantised experts with any, tiers with prefetch, blockwise with EP, caches with prediction."""
    assert key not in refused()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("form", marked(FORMS, pytest.mark.slow, but=["fp32"]))
def test_what_can_be_combined_gives_what_it_must(route: str, form: str) -> None:
    """Logits of prefill and decoding: the oracle's, or those of the same choices where nothing moves."""
    n = 0
    for key in those_that_run():
        if (key[0], key[-1]) != (route, form):
            continue
        _, place, layout, move, _ = key
        if place == "by_cost" and layout == "tiers":
            continue  # what it computes on the CPU is exact: another technique than tiers alone
        found, counters = run(key)
        like = expected(route, layout if layout in LOSSY else "exact", form)
        off = float((found - like).norm() / like.norm())
        assert off < TOLERANCE, (key, off)
        assert (counters.misses is None) == (move in ("nothing", "slices")), key
        assert (counters.prefetched is None) == ("prefetch" not in move and move != "two buffers")
        n += 1
    assert n > 20


@pytest.mark.parametrize("evict", ["lru", "static"])
def test_hints_that_a_cache_fetches_save_the_steps_that_wait(evict: str) -> None:
    """The same answers, and fewer experts that a layer waited for; what was fetched for nothing is counted."""
    moves = {
        prefetch: {"kind": "cache", "evict": evict, "slots": 3, "prefetch": prefetch} for prefetch in (False, True)
    }
    found = {}
    for prefetch, move in moves.items():
        route = ROUTES["hints" if prefetch else "router"]
        technique = CustomParameters.model_validate({"move": move} | route)
        made = ReferenceEngine(_checkpoint("fp32", True), technique, 32)
        if made.needs_calibration:
            made.calibrate([list(range(10, 74))])
        logits = all_logits(made)
        found[prefetch] = logits, made.take_counters()
    assert torch.equal(found[True][0], found[False][0])
    waited, hinted = found[False][1], found[True][1]
    assert waited.misses is not None
    assert hinted.misses is not None
    assert hinted.prefetched
    assert hinted.misses < waited.misses
    assert hinted.prefetched_unused is not None
    assert hinted.prefetched_unused < hinted.prefetched
