"""Cores and threads by phase in a plan: what they mean, what is refused and in which words."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.plan import PlanError, build_plan, draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts, phase_cores
from harness.schema import EngineSpec, PlanFile
from results.environments import PhaseThreads
from results.store import Store
from tests.command import EXECUTABLE, environment
from tests.plans import DROPLESS, HOST, M2_ULTRA, SHAREGPT, raw_plan, write_plan


def arm(**changes: Any) -> EngineSpec:
    return build_plan(raw_plan(engine=[DROPLESS | changes])).cells[0].engine


def problems(**changes: Any) -> tuple[str, ...]:
    return draft_plan(raw_plan(engine=[DROPLESS | changes])).problems


def by_phase(value: Any) -> tuple[Any, Any]:
    return value.prefill, value.decode


def test_one_value_is_of_both_phases() -> None:
    both = arm(cores="1,0", threads=2)
    assert (by_phase(both.cores), by_phase(both.threads)) == (("0-1", "0-1"), (2, 2))
    each = arm(cores={"prefill": "0-3", "decode": "0,1"}, threads={"decode": 1})
    assert (by_phase(each.cores), by_phase(each.threads)) == (("0-3", "0-1"), (None, 1))
    assert (arm().cores, arm().threads) == (None, None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cores": "0-3"}, {"cores": "0-3"}),
        ({"cores": {"prefill": "0-3", "decode": "0,1"}}, {"cores": "0-3 for prefill, 0-1 for decode"}),
        ({"cores": {"decode": "0"}, "threads": 1}, {"cores": "0 for decode", "threads": "1"}),
        ({"threads": {"prefill": 2, "decode": 1}}, {"threads": "2 for prefill, 1 for decode"}),
    ],
)
def test_cells_say_what_was_asked(changes: Any, words: dict[str, str]) -> None:
    (cell,) = build_plan(raw_plan(engine=[DROPLESS | changes])).cells
    told = {k: v for k, v in cell.cell.engine_parameters.items() if k in ("cores", "threads")}
    assert told == words


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"cores": ""}, 'engine[0].cores: names no core; write "0-3" or "0,2" (found \'\')'),
        ({"cores": "0-2,1"}, "engine[0].cores: names core 1 twice; name each once (found '0-2,1')"),
        ({"cores": {"decode": "big"}}, 'engine[0].cores.decode: is no list of cores; write "0-3" or "0,2" (found'),
        ({"cores": {}}, "engine[0].cores: says nothing of any phase; give prefill, decode, or both"),
        ({"cores": {"decoding": "0"}}, "engine[0].cores.decoding: unknown key, found '0'; did you mean decode?"),
        ({"cores": 4}, 'engine[0].cores: must be a list of cores like "0-3", or a table like'),
        ({"threads": 0}, "engine[0].threads: input should be greater than or equal to 1"),
        ({"threads": "2"}, "engine[0].threads: must be a whole number, or a table like"),
        ({"threads": {"prefill": 0}}, "engine[0].threads.prefill: input should be greater than or equal to 1"),
        (
            {"cores": {"decode": "0,1"}, "threads": 4},
            'engine[0].threads: 4 for decode on cores "0-1"; at most one on each core, 2',
        ),
    ],
)
def test_what_means_nothing_is_one_line(changes: Any, problem: str) -> None:
    (found,) = problems(**changes)
    assert found.replace("must be greater", "input should be greater").startswith(problem)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no thread")
def test_cores_that_the_machine_lacks_are_told_before_anything_runs() -> None:
    n = os.cpu_count() or 0
    draft = draft_plan(raw_plan(engine=[DROPLESS | {"cores": {"prefill": f"0-{n}", "decode": str(n)}}]))
    with pytest.raises(PlanError) as caught:
        preflight(draft, RunParts(draft.plan.protocol))
    assert [problem.partition(";")[0] for problem in caught.value.problems] == [
        f'engine dropless: cores "0-{n}" for prefill: this machine has no core {n}',
        f'engine dropless: cores "{n}" for decode: this machine has no core {n}',
    ]


def test_a_modelled_device_takes_no_cores() -> None:
    arms = [DROPLESS, DROPLESS | {"name": "bound", "cores": "0"}]
    plan = build_plan(raw_plan(engine=arms, device=[HOST, M2_ULTRA]))
    on_model = [c.cell.engine for c in plan.cells if c.is_modelled]
    assert "bound" not in on_model
    (reason,) = [s for s in plan.skipped if "bound" in s]
    assert "cores are of this host, and a modelled device prices none of its time" in reason


def test_editors_are_told_of_both_forms() -> None:
    schema = json.dumps(PlanFile.model_json_schema()["$defs"]["EngineSpec"]["properties"]["cores"])
    assert '"string"' in schema
    assert "CoreSets" in schema


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no thread")
def test_an_arm_has_a_thread_for_each_core_or_what_its_plan_says() -> None:
    core = min(os.sched_getaffinity(0))
    assert phase_cores(arm(cores=str(core))).n_threads == 1
    assert phase_cores(arm(threads={"prefill": 3, "decode": 2})).n_threads == 3


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_run_keeps_what_was_asked_and_what_was_found(tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    bound = DROPLESS | {"name": "bound", "cores": {"prefill": str(first), "decode": str(second)}}
    raw = raw_plan(engine=[DROPLESS | {"threads": 1}, bound], workload=[SHAREGPT])
    plan = write_plan(tmp_path / "plan.toml", raw)
    out = tmp_path / "run"
    subprocess.run(
        [str(EXECUTABLE), "run", str(plan), "--out", str(out)],
        env=environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    store = Store.view(out)
    plain, pinned = (next(t for t in store.trials() if t.cell_id == c.cell_id) for c in store.data().cells)
    store.close()
    assert plain.road is not None
    assert pinned.road is not None
    assert (plain.road.prefill_threads, plain.road.decoding_threads) == (None, None)
    assert pinned.road.prefill_threads == PhaseThreads(n_threads=1, cores=str(first), found=(str(first),))
    assert pinned.road.decoding_threads == PhaseThreads(n_threads=1, cores=str(second), found=(str(second),))
    assert "cores not kept" not in pinned.marks
    assert [c.token_ids for c in pinned.completions] == [c.token_ids for c in plain.completions]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert f"prefill on cores {first} with 1 thread" in page
