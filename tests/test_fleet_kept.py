"""A trial that was finished while its coordinator was away, or its worker killed, is the run's, and measured once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from devices.base import DeviceError, GoneError, MeterUnavailableError, TransientDeviceError, UnendedProgramError
from engines.errors import NoServerError
from harness import attempts
from harness.fleet import worker_side
from harness.fleet.messages import Answer, unpacked
from harness.fleet.queue import Lease
from harness.fleet.start import sent_plan
from harness.fleet.work import PlanWork
from harness.fleet.worker_side import Say, WorkerSide
from harness.plan import draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts
from harness.sweep import MAX_CELLS
from tests.plans import FAST, raw_plan

RUN = "small-0123abcd"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture(scope="module")
def work() -> PlanWork:
    draft = draft_plan(raw_plan(protocol=FAST | {"repeats": 2}))
    parts = RunParts(draft.plan.protocol)
    plan = preflight(draft, parts)
    parts.close()
    return PlanWork(plan, sent_plan(plan, Path("plan.toml"), None, False, MAX_CELLS))


class Process:
    """A worker's, from its start to its end."""

    def __init__(self, work: PlanWork, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._work, self._name, self._monkeypatch = work, name, monkeypatch
        self.side = WorkerSide()

    def asked(self, repeat: int, attempt: int, run_id: str = RUN, say: Say = lambda words: None) -> Answer:
        self._monkeypatch.setattr(worker_side, "PROCESS_ID", self._name)
        self._work.run_id = run_id
        ((device, items),) = self._work.orders().items()
        cell_id, _ = next(iter(items))
        lease = Lease(f"lease-{repeat}-{attempt}", device, cell_id, repeat, attempt)
        content = self._work.task(lease, self._name, wants_samples=True)
        answer, _ = unpacked(Answer, self.side.answer(content, say))
        assert (answer.lease_id, answer.process_id) == (lease.lease_id, self._name)
        return answer


@pytest.fixture
def first(work: PlanWork, state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    process = Process(work, "first", monkeypatch)
    yield process
    process.side.close(is_over=True)


def test_a_finished_trial_is_given_again_by_the_next_process(
    work: PlanWork, first: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = first.asked(0, 1)
    assert found.trial is not None
    assert found.trial.status == "ok"
    again = Process(work, "second", monkeypatch)
    told = again.asked(0, 2)
    assert (told.trial, told.heat, told.samples) == (found.trial, found.heat, found.samples)
    # The next one is measured, and takes its place.
    other = again.asked(1, 1).trial
    assert other is not None
    assert other.trial_id != found.trial.trial_id
    last = again.asked(0, 3).trial
    assert last is not None
    assert last.trial_id not in (found.trial.trial_id, other.trial_id)
    again.side.close(is_over=True)


def test_each_trial_says_what_it_does_under_its_own_lease(first: Process) -> None:
    """Those behind a process's first one seemed to begin all the time, and told of no repetition."""
    told: list[list[str]] = [[], []]
    for repeat, own in enumerate(told):
        first.asked(repeat, 1, say=own.append)
    assert [own.count("measures") for own in told] == [1, 1]


def test_another_run_of_the_same_plan_measures_its_own(first: Process) -> None:
    found, other = first.asked(0, 1).trial, first.asked(0, 1, "small-89ef4567").trial
    assert found is not None
    assert other is not None
    assert found.trial_id != other.trial_id


def test_a_worker_that_waited_in_vain_says_where_its_trial_is(
    work: PlanWork, state: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(work, "first", monkeypatch)
    found = process.asked(0, 1).trial
    with caplog.at_level(logging.WARNING):
        process.side.close(is_over=False)
    (file,) = (path for path in (state / "fleet").rglob("*") if path.is_file())
    assert f"{file} keeps the last trial" in caplog.text
    again = Process(work, "second", monkeypatch)
    assert again.asked(0, 1).trial == found
    again.side.close(is_over=True)
    assert not [path for path in (state / "fleet").rglob("*") if path.is_file()]


class Watched:
    """A lock that tells who waits for it, or ends without."""

    def __init__(self) -> None:
        self._lock, self.told = threading.Lock(), threading.Event()
        self.owner: threading.Thread | None = None

    def __enter__(self) -> None:
        if self.owner is None:
            self.owner = threading.current_thread()
        else:
            self.told.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_worker_that_waited_in_vain_ends_its_trial_first(
    work: PlanWork, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(work, "first", monkeypatch)
    lock = Watched()
    monkeypatch.setattr(process.side, "_one_at_a_time", lock)
    measures, goes_on = threading.Event(), threading.Event()

    def say(words: str) -> None:
        if words == "measures" and not measures.is_set():
            measures.set()
            goes_on.wait()

    def close() -> None:
        process.side.close(is_over=False)
        lock.told.set()

    def ask() -> None:
        try:
            process.asked(0, 1, say=say)
        finally:
            measures.set()

    asking = threading.Thread(target=ask)
    closing = threading.Thread(target=close)
    asking.start()
    measures.wait()
    closing.start()
    lock.told.wait()
    waits = closing.is_alive()
    goes_on.set()
    asking.join()
    closing.join()
    assert waits
    assert [path for path in (state / "fleet").rglob("*") if path.is_file()]


def test_what_is_kept_and_damaged_is_measured_again(first: Process, state: Path) -> None:
    found = first.asked(0, 1).trial
    (file,) = (path for path in (state / "fleet").rglob("*") if path.is_file())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    other = first.asked(0, 2).trial
    assert found is not None
    assert other is not None
    assert other.trial_id != found.trial_id


def test_a_state_folder_that_takes_nothing_costs_no_trial(
    work: PlanWork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "file"))
    process = Process(work, "first", monkeypatch)
    with caplog.at_level(logging.WARNING):
        trial = process.asked(0, 1).trial
    assert trial is not None
    assert trial.status == "ok"
    assert "cannot be written" in caplog.text
    process.side.close(is_over=False)


def test_a_trial_that_a_lost_server_took_is_not_given_again(first: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet that goes on asks for it because it failed so: the worker would give it for ever."""
    run_trial = attempts.run_trial

    def away(*of: object) -> object:
        raise NoServerError("no server answers; start it")

    monkeypatch.setattr(attempts, "run_trial", away)
    found = first.asked(0, 1)
    assert found.trial is not None
    assert found.trial.is_lost
    monkeypatch.setattr(attempts, "run_trial", run_trial)
    again = first.asked(0, 2).trial
    assert again is not None
    assert again.status == "ok"


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (TransientDeviceError("the link broke"), True),
        (GoneError("it is unauthorised"), True),
        (UnendedProgramError("the program has not ended after 1800 s"), False),
        (MeterUnavailableError("it has no such meter"), False),
    ],
    ids=["link", "gone", "program", "meter"],
)
def test_a_trial_that_fails_on_a_device_that_is_there_is_not_given_out_again(
    first: Process, monkeypatch: pytest.MonkeyPatch, error: DeviceError, is_lost: bool
) -> None:
    """A program that hung was started by three workers in turn, each of which was then told as lost."""

    def fails(*of: object) -> object:
        raise error

    monkeypatch.setattr(attempts, "run_trial", fails)
    found = first.asked(0, 1)
    assert found.trial is not None
    assert (found.trial.status, found.trial.is_lost, found.device_lost) == ("failed", is_lost, is_lost)
