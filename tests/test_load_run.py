"""Load workloads on the real engine: exact lengths, talks on own answers, arrivals here and on a modelled device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from devices.models.device import ModelDevice
from harness.matrix import CellPlan
from harness.opening import open_run
from harness.plan import PlanError, build_plan, draft_plan
from harness.preflight import preflight
from harness.progress import PlainProgress
from harness.run_parts import RunParts
from harness.runner import Runner
from harness.schema import TrialProtocol
from harness.session import PreparedCell, Traces, run_trial
from results.records import Request
from results.requests import requests_sha256
from results.store import Store, StoreError
from results.trace_files import WINDOW
from results.trials import Trial
from tests.command import joulebench
from tests.fakes.machine import FakeBench, fake_requests
from tests.plans import DROPLESS, FAST, HERE, HOST, M2_ULTRA, NPUMOE, raw_plan, write_plan

BARE = TrialProtocol(warmup=0, repeats=1, idle_s=0)
FIXED = {"name": "fixed_lengths", "prompt_tokens": 24, "new_tokens": 6, "limit": 4}


@pytest.fixture
def bench() -> Iterator[RunParts]:
    run_parts = RunParts(BARE)
    yield run_parts
    run_parts.close()


def cells(**changes: Any) -> tuple[CellPlan, ...]:
    return build_plan(raw_plan(**changes)).cells


def tried(bench: RunParts, cell: CellPlan) -> tuple[PreparedCell, Trial]:
    arm = bench.arm(cell)
    return arm, run_trial(arm, BARE, repeat=0)[0]


# --- exact lengths ----------------------------------------------------------------------------------------------------


def test_an_answer_is_as_long_as_asked_though_every_token_is_an_end_token(bench: RunParts) -> None:
    (cell,) = cells(workload=[FIXED])
    arm = bench.arm(cell)
    arm.engine.tokenizer.eos_token_ids = tuple(range(arm.engine.tokenizer.vocabulary_size))
    trial, _ = run_trial(arm, BARE, repeat=0)
    assert [(c.n_prompt_tokens, c.n_generated) for c in trial.completions] == [(24, 6)] * 4
    assert (trial.prefill_tokens, trial.decode_tokens) == (4 * 24, 4 * 5)
    ending = [r.model_copy(update={"ignore_end_tokens": False}) for r in arm.requests]
    assert {arm.engine.run(r, lambda event, at_s: None).n_generated for r in ending} == {1}


def test_a_grid_of_lengths_has_a_cell_for_each_pair() -> None:
    found = cells(
        workload=[FIXED],
        sweep={"workload.fixed_lengths.prompt_tokens": [64, 256, 1024], "workload.new_tokens": [128, 256, 512]},
    )
    pairs = [(c.workload.prompt_tokens, c.workload.new_tokens) for c in found]
    assert sorted(pairs) == [(p, n) for p in (64, 256, 1024) for n in (128, 256, 512)]
    assert len({c.cell.cell_id for c in found}) == len({c.cell.workload for c in found}) == 9


def test_lengths_that_a_model_cannot_hold_are_left_out_and_told(tmp_path: Path) -> None:
    raw = raw_plan(
        workload=[FIXED | {"too_long": "skip", "limit": 1}],
        sweep={"workload.fixed_lengths.prompt_tokens": [16, 65536]},  # the bundled model holds 8192
    )
    done = joulebench("run", str(write_plan(tmp_path / "plan.toml", raw)), "--out", str(tmp_path / "run"))
    assert done.code == 0, done.stderr
    reason = "fixed_lengths[prompt_tokens=65536]: 1 of 1 requests skipped: longer than 8192 tokens"
    assert f"left out: {reason}" in " ".join(done.stdout.split())  # folded at the width of a pipe
    assert f"left out: {reason}." in (tmp_path / "run" / "report.html").read_text("utf-8")
    summary = pd.read_csv(tmp_path / "run" / "summary.csv")
    assert list(summary["workload"]) == ["fixed_lengths[prompt_tokens=16]"]
    assert summary["requests_sha256"].str.len().item() == 64
    with Store.view(tmp_path / "run") as store:
        assert store.info().left_out == (reason,)


def test_an_arm_that_goes_onto_no_device_is_told_in_the_report(tmp_path: Path) -> None:
    """The terminal said so, and nothing that was kept: who read the page later missed an arm of the plan."""
    arms = [DROPLESS | HERE, NPUMOE | {"quantise": {"cache": "fp16"}}]
    raw = raw_plan(engine=arms, workload=[FIXED | {"limit": 1}], device=[HOST, M2_ULTRA])
    done = joulebench("run", str(write_plan(tmp_path / "plan.toml", raw)), "--out", str(tmp_path / "run"))
    assert done.code == 0, done.stderr
    reason = (
        "model:m2-ultra: npumoe: a modelled device prices arithmetic of two bytes a value, so quantise.cache is for the"
        " host"
    )
    assert f"left out: {reason}." in (tmp_path / "run" / "report.html").read_text("utf-8")
    with Store.view(tmp_path / "run") as store:
        assert store.info().left_out == (reason,)  # and not that dropless is put onto the host alone


@pytest.mark.parametrize(
    ("too_long", "expected"),
    [
        ("skip", "no cell to run: fixed_lengths: 4 of 4 requests skipped: longer than 8192 tokens"),
        ("fail", "4 of 4 requests are longer than the model's 8192 tokens"),
    ],
)
def test_a_plan_of_nothing_but_what_does_not_fit_is_no_plan(bench: RunParts, too_long: str, expected: str) -> None:
    draft = draft_plan(raw_plan(workload=[FIXED | {"too_long": too_long, "prompt_tokens": 9000}]))
    with pytest.raises(PlanError, match=expected):
        preflight(draft, bench)


# --- conversations ----------------------------------------------------------------------------------------------------

TALK = {"name": "sharegpt", "limit": 4, "max_turns": 3, "max_new_tokens": 8, "answers": "generated"}


def test_a_conversation_on_own_answers_is_computed_from_where_it_goes_on(bench: RunParts) -> None:
    again, kept = cells(engine=[DROPLESS, DROPLESS | {"name": "kept", "reuse_prefix": True}], workload=[TALK])
    arm, whole = tried(bench, again)
    _, reused = tried(bench, kept)
    assert [c.token_ids for c in reused.completions] == [c.token_ids for c in whole.completions]
    assert whole.requests_sha256 == reused.requests_sha256 != requests_sha256(arm.requests)
    assert {c.n_cached_tokens for c in whole.completions} == {0}
    asked = {r.request_id: r for r in arm.requests}
    before = {c.request_id: c for c in reused.completions}
    n_followers = 0
    for completion in reused.completions:
        follows = asked[completion.request_id].follows
        if follows is None:
            continue
        n_followers += 1
        # All that was there before, but for the answer's last token: it was chosen and never read.
        assert completion.n_cached_tokens == before[follows].n_prompt_tokens + before[follows].n_generated - 1
    assert n_followers >= 3


def test_each_turn_holds_the_answer_that_was_given(bench: RunParts) -> None:
    (cell,) = cells(workload=[TALK | {"limit": 1}])
    arm, trial = tried(bench, cell)
    first, second, *_ = trial.completions
    followed = arm.requests[1]
    ends = arm.engine.tokenizer.eos_token_ids
    answer = [t for i, t in enumerate(first.token_ids) if i < first.n_generated - 1 or t not in ends]
    prompt_ids = (*arm.requests[0].prompt_ids, *answer, *followed.prompt_ids)
    assert second.n_prompt_tokens == len(prompt_ids)
    alone = Request(
        request_id="x", sample_id="x", kind="generate", prompt_ids=prompt_ids, max_new_tokens=followed.max_new_tokens
    )
    assert arm.engine.run(alone, lambda event, at_s: None).token_ids == second.token_ids


# --- arrivals ---------------------------------------------------------------------------------------------------------


def test_requests_are_taken_as_they_arrive(bench: RunParts) -> None:
    (cell,) = cells(workload=[FIXED | {"arrivals_per_s": 40.0}])
    arm, trial = tried(bench, cell)
    assert trial.window_start_s is not None
    for request, completion in zip(arm.requests, trial.completions, strict=True):
        assert request.arrival_s is not None
        assert completion.arrival_s == trial.window_start_s + request.arrival_s
        assert completion.start_s >= completion.arrival_s
    starts_s, ends_s = ([getattr(c, which) for c in trial.completions] for which in ("start_s", "end_s"))
    assert all(np.asarray(starts_s[1:]) >= np.asarray(ends_s[:-1]))


def test_a_batch_answers_as_single_requests_do(bench: RunParts) -> None:
    # At a million requests a second all are there at once.
    single, batched = cells(
        engine=[DROPLESS, DROPLESS | {"name": "batched", "max_batch": 3}],
        workload=[FIXED | {"arrivals_per_s": 1e6}],
    )
    assert batched.cell.engine_parameters["max_batch"] == 3
    _, one = tried(bench, single)
    _, three = tried(bench, batched)
    assert [c.token_ids for c in three.completions] == [c.token_ids for c in one.completions]
    assert one.requests_sha256 == three.requests_sha256
    assert len({c.start_s for c in one.completions}) == 4
    assert len({c.start_s for c in three.completions}) <= 3
    energy = {r.phase: r.energy_j or 0.0 for r in three.energy if r.component == "total"}
    if all(r.energy_j is not None for r in three.energy):
        assert energy["prefill"] + energy["decode"] <= energy["all"] * 1.0001


def test_a_modelled_device_idles_between_arrivals(bench: RunParts) -> None:
    closed, open_loop = cells(
        engine=[NPUMOE],
        device=[M2_ULTRA],
        workload=[FIXED | {"label": "closed"}, FIXED | {"label": "open", "arrivals_per_s": 0.1}],
    )
    busy, busy_traces = run_trial(bench.arm(closed), BARE, repeat=0)
    arm = bench.arm(open_loop)
    spread, spread_traces = run_trial(arm, BARE, repeat=0)
    service_s = [c.e2e_s for c in busy.completions]
    assert [c.e2e_s for c in spread.completions] == pytest.approx(service_s)
    # Lindley's recursion over the closed loop's service times.
    arrivals_s = [r.arrival_s or 0.0 for r in arm.requests]
    wait_s, end_s, waits_s = 0.0, 0.0, []
    for at_s, own_s in zip(arrivals_s, service_s, strict=True):
        wait_s = max(0.0, end_s - at_s)
        end_s = at_s + wait_s + own_s
        waits_s.append(wait_s)
    assert [c.queueing_s for c in spread.completions] == pytest.approx(waits_s, abs=1e-9)
    assert spread.window_start_s is not None
    assert spread.window_end_s is not None
    assert spread.window_end_s - spread.window_start_s == pytest.approx(end_s)
    # This sheet knows no idle power: the machine draws nothing while it waits, and the same for the same work.
    assert isinstance(arm.device, ModelDevice)
    assert arm.device.timeline.sheet.idle_w is None
    assert counted_j(spread_traces) == pytest.approx(counted_j(busy_traces), rel=1e-12)
    joules = [next(r.energy_j for r in t.energy if (r.phase, r.component) == ("all", "total")) for t in (busy, spread)]
    assert joules == pytest.approx([counted_j(busy_traces)] * 2, rel=1e-4)


def counted_j(traces: Traces) -> float:
    """What the counters of a window say, from its first reading to its last."""
    return float(sum(trace.values[-1] - trace.values[0] for trace in traces[WINDOW]))


def test_a_batch_is_for_the_host_and_keeps_no_prefix() -> None:
    both = build_plan(raw_plan(engine=[DROPLESS | HERE, NPUMOE | {"max_batch": 2}], device=[HOST, M2_ULTRA]))
    assert any("npumoe: a modelled device prices one request at a time" in reason for reason in both.skipped)
    with pytest.raises(PlanError, match=r"engine\[0\]\.max_batch: a batch keeps nothing .* found 2 with reuse_prefix"):
        build_plan(raw_plan(engine=[DROPLESS | {"max_batch": 2, "reuse_prefix": True}]))


# --- resume -----------------------------------------------------------------------------------------------------------


def test_a_resume_refuses_to_ask_other_requests(tmp_path: Path) -> None:
    first, both = raw_plan(), raw_plan(protocol=FAST | {"repeats": 1})
    plan = build_plan(first)
    bench = FakeBench()
    with open_run(plan, tmp_path / "run", False, bench) as store:
        Runner(plan, store, bench, PlainProgress(Console(quiet=True))).run()
    again = FakeBench()
    with open_run(build_plan(both), tmp_path / "run", True, again) as store:
        assert Runner(plan, store, again, PlainProgress(Console(quiet=True))).run().n_ok == 1
    changed = OtherRequests()
    with (
        open_run(plan, tmp_path / "run", True, changed) as store,
        pytest.raises(StoreError, match=r"were asked other requests \(sha256 [0-9a-f]{12}\)"),
    ):
        Runner(plan, store, changed, PlainProgress(Console(quiet=True))).run()


class OtherRequests(FakeBench):
    """As after the data was changed under the run: one token is another."""

    def requests(self, plan: CellPlan) -> tuple[Request, ...]:
        first, second = fake_requests()
        return first, second.model_copy(update={"prompt_ids": (1, 3)})


def test_a_resume_finds_a_conversation_as_its_answers_left_it(tmp_path: Path) -> None:
    plan = build_plan(raw_plan(workload=[TALK], protocol=FAST | {"repeats": 2}))
    for expected in (1, 2):
        run_parts = RunParts(plan.protocol)
        with open_run(plan, tmp_path / "run", expected > 1, run_parts) as store:
            one = build_plan(raw_plan(workload=[TALK], protocol=FAST | {"repeats": expected}))
            assert Runner(one, store, run_parts, PlainProgress(Console(quiet=True))).run().n_ok == expected
        run_parts.close()
