"""The queue in front of an engine, against queueing theory and the recursion that defines it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import PhaseListener, unheard
from engines.errors import EngineError
from harness.schema import TrialProtocol
from harness.serving import Served, at_once, serve
from harness.session import PreparedCell, run_trial
from results.derivation import phase_intervals
from results.records import Completion, PowerTrace, Request
from results.requests import requests_sha256
from tests.fakes.machine import (
    DECODE_W,
    IDLE_W,
    PREFILL_S,
    PREFILL_W,
    TOKEN_S,
    FakeBench,
    FakeDevice,
    FakeEngine,
    FakeMachine,
    FakeMeter,
    FakeWorkload,
    fake_requests,
)
from workloads.base import WorkloadError

BARE = TrialProtocol(warmup=0, repeats=1, idle_s=0)


def arriving(arrivals_s: Sequence[float], n_new: Sequence[int] | None = None) -> list[Request]:
    lengths = n_new or [1] * len(arrivals_s)
    return [
        Request(
            request_id=f"r{i}",
            sample_id=f"s{i}",
            kind="generate",
            prompt_ids=(1, 2),
            max_new_tokens=n,
            arrival_s=float(at_s),
        )
        for i, (at_s, n) in enumerate(zip(arrivals_s, lengths, strict=True))
    ]


def served(requests: Sequence[Request], max_batch: int = 1, batching: bool = False) -> tuple[Served, float]:
    """What came of the requests, and when the window began."""
    machine = FakeMachine()
    engine = (BatchingEngine if batching else FakeEngine)(machine, FakeDevice(machine, []))
    start_s = machine.now_s()
    return serve(engine, machine, requests, start_s, unheard, max_batch), start_s


class BatchingEngine(FakeEngine):
    """Prefill of all, then a step a token for all that are left: as `ReferenceEngine.run_batch` does."""

    def run_batch(self, requests: Sequence[Request], on_phase: PhaseListener) -> list[Completion]:
        machine = self._machine
        start_s = machine.now_s()
        prefill_ends_s = []
        for _ in requests:
            machine.work(PREFILL_S, PREFILL_W)
            prefill_ends_s.append(machine.now_s())
            on_phase("prefill end", machine.now_s())
        steps_s = []
        for _ in range(max(r.max_new_tokens for r in requests) - 1):
            machine.work(TOKEN_S, DECODE_W)
            steps_s.append(machine.now_s())
        on_phase("request end", machine.now_s())
        found = []
        for request, prefill_end_s in zip(requests, prefill_ends_s, strict=True):
            times_s = (prefill_end_s, *steps_s[: request.max_new_tokens - 1])
            found.append(
                Completion(
                    request_id=request.request_id,
                    sample_id=request.sample_id,
                    n_prompt_tokens=len(request.prompt_ids),
                    start_s=start_s,
                    prefill_end_s=prefill_end_s,
                    end_s=times_s[-1],
                    token_ids=tuple(range(len(times_s))),
                    token_times_s=times_s,
                )
            )
        return found


# --- one at a time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_the_mean_wait_of_poisson_arrivals_is_that_of_an_m_d_1_queue(load: float) -> None:
    service_s = PREFILL_S  # one new token: prefill alone, always as long
    gaps_s = np.random.default_rng(1).exponential(service_s / load, 20_000)
    found, _ = served(arriving(np.cumsum(gaps_s)))
    waits_s = [c.queueing_s for c in found.completions]
    expected_s = load * service_s / (2 * (1 - load))  # Pollaczek and Khinchine
    assert np.mean(waits_s) == pytest.approx(expected_s, rel=0.05)
    # An arrival that finds the engine idle (PASTA: a share 1 - load of them) does not wait at all.
    assert np.mean([w == 0 for w in waits_s]) == pytest.approx(1 - load, abs=0.01)
    busy_s = sum(c.e2e_s for c in found.completions)
    first_s = found.completions[0].arrival_s or 0.0
    assert busy_s / (found.completions[-1].end_s - first_s) == pytest.approx(load, rel=0.02)


def test_arrivals_as_regular_as_the_service_never_wait() -> None:
    found, start_s = served(arriving([i * PREFILL_S for i in range(50)]))
    assert {c.queueing_s for c in found.completions} == {0.0}
    assert found.completions[-1].end_s - start_s == 50 * PREFILL_S


# Multiples of 1/8 s, so that sums are exact.
EIGHTHS = st.integers(0, 12).map(lambda n: n / 8)


@settings(max_examples=60)
@given(st.lists(st.tuples(EIGHTHS, st.integers(1, 8)), min_size=1, max_size=30))
def test_each_request_starts_when_it_is_there_and_the_one_before_is_answered(work: list[tuple[float, int]]) -> None:
    arrivals_s = np.cumsum([gap_s for gap_s, _ in work])
    requests = arriving(arrivals_s, [n for _, n in work])
    found, start_s = served(requests)
    assert [c.request_id for c in found.completions] == [r.request_id for r in requests]  # none lost, none overtakes
    wait_s = 0.0
    for before, now, (gap_s, _) in zip(found.completions, found.completions[1:], work[1:], strict=False):
        wait_s = max(0.0, wait_s + before.e2e_s - gap_s)  # Lindley's recursion
        assert now.queueing_s == wait_s
    for completion, at_s in zip(found.completions, arrivals_s, strict=True):
        assert completion.arrival_s == start_s + at_s
        assert completion.ttft_from_arrival_s == completion.token_times_s[0] - (start_s + at_s)


def test_without_arrivals_there_is_no_queue() -> None:
    found, _ = served(fake_requests())
    assert [(c.arrival_s, c.queueing_s, c.ttft_from_arrival_s) for c in found.completions] == [(None, None, None)] * 2
    assert all(b.start_s == a.end_s for a, b in pairwise(found.completions))


# --- in a window ------------------------------------------------------------------------------------------------------


def window_of(
    requests: Sequence[Request], protocol: TrialProtocol = BARE
) -> tuple[FakeMachine, FakeEngine, PreparedCell]:
    machine = FakeMachine()
    device = FakeDevice(machine, [FakeMeter(machine)])
    engine = FakeEngine(machine, device)
    return machine, engine, PreparedCell("c", engine, FakeWorkload(scored=False), device, machine, requests)


def test_waiting_for_arrivals_belongs_to_the_window_and_to_no_phase() -> None:
    requests = arriving([1.0, 4.0], [3, 3])
    _, _, arm = window_of(requests)
    trial, _ = run_trial(arm, BARE, repeat=0)
    energy = {r.phase: r for r in trial.energy if r.component == "total"}
    service_s = PREFILL_S + 2 * TOKEN_S
    idle_s = 1.0 + (4.0 - 1.0 - service_s)
    assert energy["all"].duration_s == 4.0 + service_s
    busy_j = 2 * (PREFILL_S * PREFILL_W + 2 * TOKEN_S * DECODE_W)
    assert energy["all"].energy_j == pytest.approx(busy_j + idle_s * IDLE_W, rel=1e-12)
    assert energy["prefill"].energy_j == pytest.approx(2 * PREFILL_S * PREFILL_W, rel=1e-12)
    assert energy["decode"].energy_j == pytest.approx(4 * TOKEN_S * DECODE_W, rel=1e-12)


def test_the_warm_up_waits_for_no_arrival() -> None:
    requests = arriving([50.0, 60.0])
    machine, engine, arm = window_of(requests)
    before_s = machine.now_s()
    trial, _ = run_trial(arm, BARE.model_copy(update={"warmup": 1}), repeat=0)
    assert trial.window_start_s == before_s + PREFILL_S
    assert [r for r, _ in engine.answered] == ["r0", "r0", "r1"]
    assert {r.arrival_s for r in at_once(requests)} == {None}


def test_a_trial_keeps_the_hash_of_what_it_was_asked() -> None:
    trial, _ = run_trial(FakeBench().arm_of("c"), BARE, repeat=0)
    assert trial.requests_sha256 == requests_sha256(fake_requests())


# --- batches ----------------------------------------------------------------------------------------------------------


def test_those_that_wait_are_answered_together() -> None:
    # r0 alone; while it runs r1, r2, r3 come; then r1 and r2 as a batch of at most two, then r3, then r4 by itself.
    requests = arriving([0.0, 0.125, 0.25, 0.375, 9.0])
    found, start_s = served(requests, max_batch=2, batching=True)
    assert [c.request_id for c in found.completions] == [r.request_id for r in requests]
    assert [c.start_s - start_s for c in found.completions] == [0.0, 0.5, 0.5, 1.5, 9.0]


def test_a_request_that_has_not_come_is_in_no_batch() -> None:
    found, start_s = served(arriving([0.0, 0.125, 0.625]), max_batch=3, batching=True)
    assert [c.start_s - start_s for c in found.completions] == [0.0, 0.5, 1.0]


def test_a_batch_holds_no_turn_beside_the_one_that_it_follows() -> None:
    first, second = (r.model_copy(update={"arrival_s": None}) for r in arriving([0.0, 0.0]))
    other = second.model_copy(update={"request_id": "other"})
    follower = second.model_copy(update={"follows": "r0"})
    machine = FakeMachine()
    engine = BatchingEngine(machine, FakeDevice(machine, []))
    engine.tokenizer = EndTokens()
    found = serve(engine, machine, [first, other, follower], machine.now_s(), unheard, max_batch=3)
    starts_s = [c.start_s for c in found.completions]
    assert starts_s[0] == starts_s[1] < starts_s[2]
    assert [r.prompt_ids for r in found.requests] == [(1, 2), (1, 2), (1, 2, 0, 1, 2)]


class EndTokens:
    eos_token_ids = (99,)


def test_the_phases_of_a_batch_are_told_apart() -> None:
    found, start_s = served(arriving([0.0, 0.0], [5, 3]), max_batch=2, batching=True)
    # Both prompts, 0.5 s each; then four steps of 0.125 s. The first waits for the second's prompt: that is prefill.
    intervals = phase_intervals(found.completions, (start_s, start_s + 1.5))
    assert intervals == {
        "prefill": [(start_s, start_s + 1.0)],
        "decode": [(start_s + 1.0, start_s + 1.5)],
        "all": [(start_s, start_s + 1.5)],
    }


def test_the_joules_of_a_batchs_phases_are_no_more_than_the_windows() -> None:
    machine = FakeMachine()
    device = FakeDevice(machine, [FakeMeter(machine)])
    arm = PreparedCell(
        "c",
        BatchingEngine(machine, device),
        FakeWorkload(scored=False),
        device,
        machine,
        arriving([0.0, 0.0, 0.0], [5, 3, 1]),
        max_batch=3,
    )
    trial, traces = run_trial(arm, BARE, repeat=0)
    assert isinstance(traces["window"][0], PowerTrace)
    energy = {r.phase: r.energy_j for r in trial.energy if r.component == "total"}
    assert energy["prefill"] == pytest.approx(3 * PREFILL_S * PREFILL_W)
    assert energy["decode"] == pytest.approx(4 * TOKEN_S * DECODE_W)
    assert energy["all"] == pytest.approx(energy["prefill"] + energy["decode"])


# --- what is refused --------------------------------------------------------------------------------------------------


def test_an_engine_without_batches_says_so() -> None:
    with pytest.raises(EngineError, match="max_batch 2: the engine on host answers one request at a time"):
        served(fake_requests(), max_batch=2)


def test_requests_out_of_order_are_refused() -> None:
    with pytest.raises(WorkloadError, match=r"r1 arrives 1\.0 s into the window, the one before it at 2\.0 s"):
        served(arriving([2.0, 1.0]))


class OneShort(FakeEngine):
    """Ends every answer a token early."""

    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        return super().run(request.model_copy(update={"max_new_tokens": request.max_new_tokens - 1}), on_phase)


def test_an_answer_that_is_not_as_long_as_asked_fails_the_trial() -> None:
    machine = FakeMachine()
    engine = OneShort(machine, FakeDevice(machine, []))
    exact = [r.model_copy(update={"ignore_end_tokens": True}) for r in fake_requests()]
    with pytest.raises(EngineError, match="a#0: 3 prompt tokens and 4 new ones, asked for exactly 3 and 5"):
        serve(engine, machine, exact, machine.now_s(), unheard)
    serve(engine, machine, fake_requests(), machine.now_s(), unheard)
