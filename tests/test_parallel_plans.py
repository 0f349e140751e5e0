"""Plans with ranks: what is refused before anything runs, and a run in which a rank dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from devices.peak_memory import PeakMemory
from engines.parallel import links
from engines.parallel.engine import ParallelEngine
from engines.parallel.running import usable_cores
from engines.techniques.context import ModelSizes
from engines.techniques.place.ranks import ExpertParallelParameters, TensorParallelParameters
from harness.opening import open_run
from harness.plan import PlanError, draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts
from harness.runner import Runner
from harness.session import memory_together
from tests.plans import BOOLQ, DROPLESS, FAST, HERE, HOST, M2_ULTRA, NPUMOE, raw_plan
from tests.ranks import LINKS
from tests.test_runner import Heard

EP: dict[str, Any] = {"name": "ep", "technique": {"name": "expert-parallel"}, "ranks": 2, "threads": 1}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))


def problems(*engines: dict[str, Any], **changes: Any) -> list[str]:
    draft = draft_plan(raw_plan(engine=list(engines), **changes))
    with pytest.raises(PlanError) as caught:
        preflight(draft, RunParts(draft.plan.protocol))
    return list(caught.value.problems)


def technique(name: str, **parameters: Any) -> dict[str, Any]:
    return EP | {"technique": {"name": name} | parameters}


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (DROPLESS | {"ranks": 2}, "engine dropless: technique dropless computes in one process; remove ranks, or take"),
        (EP | {"ranks": None}, "engine ep: technique expert-parallel computes in several processes; say how many"),
        (technique("tp-ep") | {"ranks": 3}, "engine ep: ranks = 3 cannot be dealt in groups of tensor_ranks = 2"),
        (technique("eplb", nodes=2, groups=2) | {"ranks": 3}, "engine ep: ranks = 3 cannot be dealt to nodes = 2"),
        (technique("eplb", nodes=3, groups=3) | {"ranks": 3}, "engine ep: 16 experts make no groups = 3 of one size"),
        (technique("eplb", groups=4), "groups needs nodes above 1"),
        (
            technique("expert-parallel", sequence_parallel=False, exchange="all_gather"),
            "exchange needs sequence_parallel = true",
        ),
        (
            technique("tensor-parallel", sequence_parallel=False, router_gather="logits"),
            "router_gather needs sequence_parallel = true",
        ),
        (
            technique("custom", place={"kind": "expert_parallel"}, layout={"kind": "capacity"}),
            "place expert_parallel drops no pair; found layout capacity; use exact, blocks, selective or all_experts",
        ),
        (
            technique("custom", place={"kind": "expert_parallel"}, backbone="gpu"),
            "place expert_parallel has attention on every rank; found backbone gpu",
        ),
        (
            EP | {"decoding": "plan by plan"},
            "engine ep: decoding is of an engine in one process; remove decoding or ranks",
        ),
        (EP | {"cores": "0"}, "engine ep: every rank would use the same cores"),
        (
            EP | {"threads": {"prefill": 2, "decode": 1}},
            "engine ep: ranks use the same number of threads in both phases",
        ),
    ],
)
def test_ranks_that_cannot_be_are_refused_in_one_line(engine: dict[str, Any], expected: str) -> None:
    (line,) = problems({k: v for k, v in engine.items() if v is not None})
    assert expected in line


@pytest.mark.parametrize(
    ("computes", "told"),
    [
        ("cuda", "ranks = 2 on cuda: each rank takes a GPU, and torch"),
        ("mps", "ranks = 2 cannot send each other anything on mps"),
    ],
)
def test_ranks_on_an_accelerator_that_is_not_there_are_refused(computes: str, told: str) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("this machine has a GPU for each rank")
    found = problems(EP, device=[HOST | {"computes": computes}])
    assert [line for line in found if told in line]


def test_more_ranks_than_four_or_than_experts_are_refused() -> None:
    assert any(line.startswith("engine[0].ranks: ") for line in problems(EP | {"ranks": 5}))
    sizes = ModelSizes(n_experts=3, top_k=2, hidden=8, expert_width=2, expert_bytes=96, n_layers=1, n_sparse_layers=1)
    assert "4 ranks cannot share 3 experts" in str(ExpertParallelParameters().problem(4, sizes))
    assert "4 ranks cannot share 2 columns" in str(TensorParallelParameters().problem(4, sizes))
    assert ExpertParallelParameters().problem(3, sizes) is None


def test_ranks_that_cannot_reach_each_other_are_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LOOPBACK", "192.0.2.1")  # an address for documents, which no machine has (RFC 5737)
    (line,) = problems(EP)
    assert line.startswith("engine ep: ranks cannot reach each other over 192.0.2.1 (")


def test_more_threads_than_cores_are_told() -> None:
    draft = draft_plan(raw_plan(engine=[EP | {"threads": usable_cores()}]))
    (note,) = preflight(draft, RunParts(draft.plan.protocol)).warnings
    assert note.startswith(f"engine ep: 2 ranks of {usable_cores()} thread")


@pytest.mark.parametrize(
    ("changes", "n"),
    [
        ({"threads": usable_cores()}, None),
        ({"threads": usable_cores() + 1}, usable_cores() + 1),
        ({"threads": {"prefill": 1, "decode": usable_cores() + 2}}, usable_cores() + 2),
        ({"threads": 1, "cores": "0"}, None),
    ],
)
@pytest.mark.parametrize("arm", [DROPLESS, {"name": "l", "runs": "llama.cpp"}], ids=("own", "another"))
def test_more_threads_than_this_host_has_cores_are_told(
    arm: dict[str, Any], changes: dict[str, Any], n: int | None
) -> None:
    draft = draft_plan(raw_plan(engine=[arm | changes]))
    notes = preflight(draft, RunParts(draft.plan.protocol)).warnings
    told = [] if n is None else [f"engine {arm['name']}: {n} threads on {usable_cores()} core"]
    assert [note[: len(told[0])] if told else note for note in notes] == told


def test_an_arm_of_ranks_goes_onto_no_modelled_device() -> None:
    draft = draft_plan(raw_plan(engine=[EP, NPUMOE | HERE], device=[HOST, M2_ULTRA]))
    cells = preflight(draft, RunParts(draft.plan.protocol)).cells
    assert {c.cell.device for c in cells if c.cell.engine == "ep"} == {"host"}


def test_memory_of_several_processes_is_added_and_said_so() -> None:
    together = memory_together([PeakMemory(100), PeakMemory(20)])
    assert together.n_bytes == 120
    assert "2 processes added" in str(together.remark)
    assert memory_together([PeakMemory(100), PeakMemory(None, "why")]) == PeakMemory(None, "why")
    assert memory_together([PeakMemory(7)]) == PeakMemory(7)


class Killer(Heard):
    """Kills a rank of an arm when its second trial starts."""

    def __init__(self, parts: RunParts) -> None:
        super().__init__()
        self._parts = parts
        self.seen: set[int] = set()

    def trial_started(self, cell: str, repeat: int) -> None:
        (engine,) = (e for e in self._parts._engines.values() if isinstance(e, ParallelEngine))
        ranks = engine.process_ids()[1:]
        self.seen.update(ranks)
        if repeat == 1:
            os.kill(ranks[0], signal.SIGKILL)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
def test_a_run_goes_on_with_the_next_trial_when_a_rank_dies(tmp_path: Path) -> None:
    """Of a calibrated technique, whose profile the new ranks get too."""
    engine = technique("eplb", spare_slots=1, calibration_prompts=2) | {"ranks": 3}
    raw = raw_plan(engine=[engine], workload=[BOOLQ], protocol=FAST | {"repeats": 3})
    draft = draft_plan(raw)
    parts = RunParts(draft.plan.protocol)
    plan = preflight(draft, parts)
    killer = Killer(parts)
    try:
        with open_run(plan, tmp_path / "run", False, parts) as store:
            Runner(plan, store, parts, killer).run()
            trials = list(store.trials())
    finally:
        parts.close()
    assert [t.status for t in trials] == ["ok", "failed", "ok"]
    failure = trials[1].failure
    assert failure is not None
    assert "rank 1 of 3 (process " in failure.error
    assert "ended by signal 9 (SIGKILL)" in failure.error
    first, last = trials[0], trials[2]
    assert first.road is not None
    assert (first.road.n_processes, first.road.links) == (3, LINKS)
    answers = [[(c.loglikelihood, c.is_greedy) for c in t.completions] for t in (first, last)]
    assert answers[0] == answers[1]
    assert len(killer.seen) == 4, "two ranks, and two others after the death"
    assert not any(Path(f"/proc/{pid}").exists() for pid in killer.seen)
    assert "3 processes added" in str(last.peak_memory_remark)
