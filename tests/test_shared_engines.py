"""Arms that hold slots or processes hold them once, however many workloads they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.parallel.engine import ParallelEngine
from engines.reference import ReferenceEngine
from harness.matrix import CellPlan
from harness.plan import draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts
from harness.session import run_trial
from results.trials import Trial
from tests.plans import FAST, Raw, raw_plan

LENGTHS: list[Raw] = [
    {"name": "fixed_lengths", "prompt_tokens": n, "new_tokens": 6, "limit": 2, "label": f"of {n}"} for n in (24, 40)
]
LRU: Raw = {"name": "lru", "technique": {"name": "lru", "slots": 3}}
BUFFERS: Raw = {"name": "ahead", "technique": {"name": "router-pf", "source": "s"}, "expert_memory": "3MB"}
STATIC: Raw = {"name": "static", "technique": {"name": "static", "slots": 3}}
PROFILED: Raw = STATIC | {"profile": "bundled:tiny-qwen3-moe"}
RANKS: Raw = {"name": "ranks", "technique": {"name": "expert-parallel"}, "ranks": 2, "threads": 1}
DEALT: Raw = {"name": "dealt", "technique": {"name": "eplb", "calibration_prompts": 1}, "ranks": 2, "threads": 1}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))


def prepared(arm: Raw) -> tuple[list[CellPlan], RunParts]:
    draft = draft_plan(raw_plan(engine=[arm], workload=LENGTHS, protocol=FAST))
    parts = RunParts(draft.plan.protocol)
    return list(preflight(draft, parts).cells), parts


def trials(cells: list[CellPlan], parts: RunParts, turns: int) -> list[Trial]:
    try:
        return [run_trial(parts.arm(c), parts._protocol, turn)[0] for turn in range(turns) for c in cells]
    finally:
        parts.close()


@pytest.mark.parametrize(
    ("arm", "n_engines"), [(LRU, 1), (BUFFERS, 1), (PROFILED, 1), (RANKS, 1), (STATIC, 2), (DEALT, 2)]
)
def test_workloads_share_what_an_arm_holds(arm: Raw, n_engines: int) -> None:
    """But for what is learnt of each workload's own prompts."""
    cells, parts = prepared(arm)
    try:
        engines = [parts._engine(cell, parts.device(cell)) for cell in cells]
        assert len(engines) == 2
        assert all(isinstance(engine, ReferenceEngine | ParallelEngine) for engine in engines)
        assert len({id(engine) for engine in engines}) == n_engines
    finally:
        parts.close()


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("arm", [LRU, BUFFERS, RANKS], ids=["slots", "buffers", "ranks"])
def test_a_window_finds_nothing_of_another_workload(arm: Raw) -> None:
    """In turns on one engine each workload counts and answers as on an engine of its own."""

    def told(trial: Trial) -> Any:
        assert trial.counters is not None
        counted = {key: n for key, n in trial.counters.model_dump().items() if not key.endswith("_s")}
        return counted, [c.token_ids for c in trial.completions]

    shared = [told(trial) for trial in trials(*prepared(arm), turns=2)]
    alone = []
    for i in range(2):
        cells, parts = prepared(arm)
        alone += [told(trial) for trial in trials([cells[i]], parts, turns=1)]
    assert shared == [*alone, *alone]
    assert alone[0] != alone[1]
