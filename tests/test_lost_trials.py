"""What a lost device took is measured again by a resume, in its own place; the failed trials stay beside it."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from devices.base import DeviceError, GoneError, NotReadyError, TransientDeviceError, UnendedProgramError
from engines.errors import EngineError, NoServerError, OutOfMemoryError
from harness.plan import Plan
from harness.runner import RunOutcome
from results import store as store_module
from results.compare import compare_trials
from results.database import DATABASE
from results.sealed_rows import gone_trials
from results.store import Store, StoreError
from results.trials import Failure, Trial
from tests.fakes.machine import PREFILL_S, TOKEN_S, FakeBench
from tests.run_builders import failed, trial
from tests.store_checks import CELLS, INFO
from tests.test_runner import Elsewhere, planned, run

E2E_S = (2 * PREFILL_S + 6 * TOKEN_S) / 2
"""Of a request of the fake workload, on average: 5 and 3 tokens, the first of each with its prefill."""


def lost_at(*requests: int, error: Exception | None = None) -> FakeBench:
    """A bench whose link drops at these requests, from 0; a trial asks two, and one that fails ends there."""
    bench = FakeBench()
    one = error or TransientDeviceError("unplugged")
    bench.engine.errors = [one if i in requests else None for i in range(40)]
    return bench


def on_another_machine() -> FakeBench:
    bench = FakeBench()
    bench.fake_device = Elsewhere(bench.machine, bench.fake_device.meters)
    return bench


def places(trials: list[Trial], plan: Plan) -> list[tuple[str, int, str]]:
    named = {c.cell.cell_id: c.cell.engine for c in plan.cells}
    return [(named[t.cell_id], t.repeat, t.status) for t in trials]


def replaced_in(folder: Path) -> tuple[Trial, ...]:
    with Store.view(folder) as store:
        return store.replaced()


# --- what is measured again ------------------------------------------------------------------------------------------


def test_a_resume_measures_again_what_a_lost_device_took_in_its_place(tmp_path: Path) -> None:
    """The second of three rounds was lost for the first arm, and the third round for both."""
    plan = planned({"repeats": 3, "retries": 0})
    outcome, _, before = run(plan, lost_at(6, 7, 8), tmp_path / "run")
    assert outcome == RunOutcome(n_ok=3, n_failed=3, n_lost=3)
    assert [status for *_, status in places(before, plan)] == ["ok", "ok", "ok", "failed", "failed", "failed"]

    outcome, heard, after = run(plan, FakeBench(), tmp_path / "run", resume=True)
    assert outcome == RunOutcome(n_ok=6, n_failed=0)
    assert heard.expected == (6, 3)
    assert after[:3] == before[:3]
    assert places(after[3:], plan) == [("dropless", 1, "ok"), ("dropless", 2, "ok"), ("tiers", 2, "ok")]
    assert [t.sitting for t in after] == [0, 0, 0, 1, 1, 1]
    assert replaced_in(tmp_path / "run") == tuple(before[3:])

    again, heard, last = run(plan, FakeBench(), tmp_path / "run", resume=True)
    assert (again, heard.expected, heard.finished, last) == (outcome, (6, 6), [], after)


def test_an_arm_whose_device_was_away_all_the_time_has_its_pairs_after_the_resume(tmp_path: Path) -> None:
    """Trials that were made up as further repeats paired with none of the other arm."""
    plan = planned({"repeats": 3, "retries": 0, "order": "sequential"})
    run(plan, lost_at(6, 7, 8), tmp_path / "run")
    _, _, trials = run(plan, FakeBench(), tmp_path / "run", resume=True)
    first, second = ([t for t in trials if t.cell_id == c.cell.cell_id] for c in plan.cells)
    found = compare_trials(first, second, "e2e", "all")
    assert (found.n, found.mean, found.base) == (3, 0.0, pytest.approx(E2E_S))


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (TransientDeviceError("unplugged"), True),
        (NotReadyError("the battery is at 10 %"), True),
        (GoneError("the zone vanished"), True),
        (NoServerError("no server answers"), True),
        (UnendedProgramError("llama-bench has not ended after 600 s; it was killed"), False),
        (DeviceError("two phones are attached"), False),
        (EngineError("too long"), False),
        (OutOfMemoryError("9 GiB asked"), False),
        (ZeroDivisionError("in the engine"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_what_may_be_there_another_day_is_measured_again(tmp_path: Path, error: Exception, is_lost: bool) -> None:
    plan = planned({"retries": 0})
    outcome, _, before = run(plan, lost_at(0, error=error), tmp_path / "run")
    assert outcome.n_lost == is_lost
    outcome, heard, after = run(plan, FakeBench(), tmp_path / "run", resume=True)
    assert len(heard.finished) == is_lost
    assert (outcome.n_ok, len(replaced_in(tmp_path / "run"))) == (1 + is_lost, is_lost)
    assert (before == after) == (not is_lost)


def test_a_failure_of_before_the_flag_was_kept_is_not_measured_again() -> None:
    then = '{"kind": "transient", "error": "link", "traceback": "", "result": null, "by_device": true}'
    assert not Failure.model_validate_json(then).lost


def test_what_is_lost_again_is_measured_again_once_more_and_each_failure_stays(tmp_path: Path) -> None:
    plan = planned({"repeats": 2, "retries": 0})
    _, _, first = run(plan, lost_at(0), tmp_path / "run")
    outcome, _, second = run(plan, lost_at(0), tmp_path / "run", resume=True)
    assert outcome == RunOutcome(n_ok=3, n_failed=1, n_lost=1)
    assert replaced_in(tmp_path / "run") == (first[0],)
    outcome, _, third = run(plan, FakeBench(), tmp_path / "run", resume=True)
    assert outcome == RunOutcome(n_ok=4, n_failed=0)
    assert replaced_in(tmp_path / "run") == (first[0], second[-1])
    assert (third[-1].repeat, third[-1].sitting) == (0, 2)


def test_an_interrupt_of_a_resume_keeps_what_it_measured_and_the_next_one_goes_on(tmp_path: Path) -> None:
    plan = planned({"repeats": 2, "retries": 0})
    run(plan, lost_at(0, 1, 2, 3), tmp_path / "run")
    bench = FakeBench()
    bench.engine.errors = [None, None, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        run(plan, bench, tmp_path / "run", resume=True)
    with Store.view(tmp_path / "run") as store:
        assert [t.status for t in store.trials()] == ["failed", "failed", "failed", "ok"]
        told = store.data().remarks[0]
    assert told.startswith("the run has not come to its end: 1 of at most 4 trials are there.")
    outcome, heard, trials = run(plan, FakeBench(), tmp_path / "run", resume=True)
    assert (outcome, heard.expected) == (RunOutcome(n_ok=4, n_failed=0), (4, 1))
    assert [t.sitting for t in trials] == [1, 2, 2, 2]


# --- stopping rules --------------------------------------------------------------------------------------------------

NARROW = {"stop": {"min_repeats": 3, "max_repeats": 10}, "retries": 0}
"""The fake machine takes the same time for ever: three trials are enough."""


def test_what_was_lost_is_not_measured_where_the_others_suffice(tmp_path: Path) -> None:
    plan = planned(NARROW)
    outcome, heard, _ = run(plan, lost_at(0), tmp_path / "run")
    assert outcome == RunOutcome(n_ok=6, n_failed=1, n_spare=1)
    assert heard.left_out == [7, 6]
    outcome, heard, _ = run(plan, FakeBench(), tmp_path / "run", resume=True)
    assert (outcome, heard.expected, heard.finished) == (RunOutcome(n_ok=6, n_failed=1, n_spare=1), (6, 6), [])


def test_a_half_run_says_no_more_trials_are_to_come_than_may_be_measured(tmp_path: Path) -> None:
    """The first arm has its three without the lost one. Of the second two are there, and eight may follow."""
    plan = planned(NARROW | {"order": "sequential"})
    first, again = lost_at(0), FakeBench()
    first.engine.errors[9] = KeyboardInterrupt()  # the lost trial asks once, and each other twice
    again.engine.errors = [None, None, KeyboardInterrupt()]
    for bench, resume in ((first, False), (again, True)):
        with pytest.raises(KeyboardInterrupt):
            run(plan, bench, tmp_path / "run", resume=resume)
    with Store.view(tmp_path / "run") as store:
        assert [t.status for t in store.trials()] == ["failed", *["ok"] * 5]
        told = store.data().remarks[0]
    assert told.startswith("the run has not come to its end: 5 of at most 13 trials are there.")


def test_a_resume_measures_as_many_of_the_lost_as_the_interval_needs(tmp_path: Path) -> None:
    """Eight of ten were lost: one more is enough, and takes the place of the first."""
    plan = planned(NARROW)
    outcome, _, _ = run(plan, lost_at(*range(1, 5), *range(7, 20)), tmp_path / "run")
    n_ok, n_lost = outcome.n_ok, outcome.n_lost
    assert n_ok + outcome.n_failed == 20
    assert n_lost > 10
    outcome, heard, trials = run(plan, FakeBench(), tmp_path / "run", resume=True)
    assert outcome.n_ok == 6
    assert outcome.n_lost == 0
    assert heard.expected == (20, n_ok)
    assert len(heard.finished) == 6 - n_ok
    assert 20 - sum(heard.left_out) == 6
    measured = {(t.cell_id, t.repeat) for t in trials if t.sitting}
    assert {repeat for _, repeat in measured} <= {0, 1, 2}


def test_a_round_of_endurance_is_not_measured_again(tmp_path: Path) -> None:
    plan = planned({"stop": {"minutes": 1}, "retries": 0})
    outcome, _, before = run(plan, lost_at(0, 3), tmp_path / "run")
    assert outcome.n_failed == 2
    assert outcome.n_lost == 0
    assert before[0].failure is not None
    assert before[0].failure.lost
    outcome, heard, after = run(plan, FakeBench(), tmp_path / "run", resume=True)
    assert (heard.finished, after) == ([], before)


# --- kills -----------------------------------------------------------------------------------------------------------


def killed(what: Callable[[], object]) -> None:
    """In a process of its own, which `what` ends by SIGKILL."""
    child = os.fork()
    if child == 0:
        try:
            what()
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["in a trial", "before the commit", "behind the commit"])
def test_a_kill_in_a_resume_costs_the_trial_that_ran(tmp_path: Path, moment: str) -> None:
    plan, folder = planned({"repeats": 2, "retries": 0}), tmp_path / "run"
    _, _, before = run(plan, lost_at(0, 1), tmp_path / "run")
    assert [t.status for t in before] == ["failed", "failed", "ok", "ok"]

    def resume() -> None:
        bench = FakeBench()
        if moment == "in a trial":
            bench.fake_workload.score = die  # type: ignore[assignment]
        elif moment == "before the commit":
            store_module.write_traces = die  # type: ignore[assignment]
        else:
            # Of the trial's commit; the note that the run goes on again was written before.
            begun = Store.add_trials
            Store.add_trials = lambda own, trials: (begun(own, trials), die())  # type: ignore[assignment,method-assign]
        run(plan, bench, folder, resume=True)

    killed(resume)
    n_measured = int(moment == "behind the commit")
    kept = {t.trial_id: t for t in before}
    with Store.view(folder) as store:
        there = {t.trial_id: t for t in (*store.trials(), *store.replaced())}
        assert len(store.trials()) == 4
        assert len(store.replaced()) == n_measured
    assert {i: there[i] for i in kept} == kept
    assert len(there) == 4 + n_measured
    outcome, heard, _ = run(plan, FakeBench(), folder, resume=True)
    assert outcome == RunOutcome(n_ok=4, n_failed=0)
    assert heard.expected == (4, 2 + n_measured)
    assert len(replaced_in(folder)) == 2


# --- the store -------------------------------------------------------------------------------------------------------


def lost(cell_id: str, repeat: int, name: str) -> Trial:
    why = Failure(kind="transient", error="unplugged", by_device=True, lost=True)
    return failed(cell_id, repeat).model_copy(update={"failure": why, "trial_id": name})


def test_a_lost_trial_gives_its_place_and_no_other_does(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Store.create(folder, INFO, CELLS) as store:
        store.add_trial(lost("c1", 0, "lost"), {})
        store.add_trial(failed("c1", 1), {})
        assert store.finished() == {("c1", 1)}
        assert store.next_sitting() == 1
        store.add_trial(trial("c1", 0).model_copy(update={"trial_id": "again"}), {})
        assert [t.trial_id for t in store.trials()] == ["c1-t1", "again"]
        assert [t.trial_id for t in store.replaced()] == ["lost"]
        for repeat in (0, 1):
            with pytest.raises(StoreError, match="a finished trial is never replaced"):
                store.add_trial(trial("c1", repeat).model_copy(update={"trial_id": "more"}), {})
    with Store.open(folder) as store:
        data = store.data()
        assert (data.trials, data.replaced) == (store.trials(), store.replaced())
        assert store.n_trials == 2
    with closing(sqlite3.connect(folder / DATABASE)) as db:
        assert gone_trials(db) == []
        assert [order for (order,) in db.execute("SELECT finished_order FROM trial ORDER BY 1")] == [2, 3]


def test_the_last_trial_that_finished_may_be_the_one_that_gives_its_place(tmp_path: Path) -> None:
    """Its number is not given twice: rows that are gone are known by the numbers that lack."""
    with Store.create(tmp_path / "run", INFO, CELLS) as store:
        store.add_trial(trial("c1", 0), {})
        store.add_trial(lost("c2", 0, "lost"), {})
        store.add_trial(trial("c2", 0), {})
    with closing(sqlite3.connect(tmp_path / "run" / DATABASE)) as db:
        assert [order for (order,) in db.execute("SELECT finished_order FROM trial ORDER BY 1")] == [1, 3]
        assert gone_trials(db) == []


def test_a_flipped_bit_in_a_replaced_trial_is_found(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run", INFO, CELLS) as store:
        store.add_trial(lost("c1", 0, "lost"), {})
        store.add_trial(trial("c1", 0), {})
    with closing(sqlite3.connect(tmp_path / "run" / DATABASE)) as db, db:
        db.execute("UPDATE replaced SET record = replace(record, 'unplugged', 'unplugges')")
    with Store.view(tmp_path / "run") as store, pytest.raises(StoreError, match="is not what was written there"):
        store.data()


def test_a_flipped_bit_in_a_lost_trial_is_found_before_another_takes_its_place(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run", INFO, CELLS) as store:
        store.add_trial(lost("c1", 0, "lost"), {})
        with closing(sqlite3.connect(tmp_path / "run" / DATABASE)) as db, db:
            db.execute("UPDATE trial SET record = replace(record, 'unplugged', 'unplugges')")
        with pytest.raises(StoreError, match="is not what was written there"):
            store.add_trial(trial("c1", 0), {})
        assert store.replaced() == ()


def test_a_resume_that_is_refused_leaves_the_run_to_the_version_that_wrote_it(tmp_path: Path) -> None:
    folder, plan = tmp_path / "run", planned({"repeats": 2, "retries": 0})
    run(plan, lost_at(0), folder)

    def schema() -> str:
        with closing(sqlite3.connect(folder / DATABASE)) as db:
            return str(db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()[0])

    newest = schema()
    with closing(sqlite3.connect(folder / DATABASE)) as db, db:
        db.execute("DROP TABLE replaced")
        db.execute("UPDATE meta SET value = '6' WHERE key = 'schema_version'")
    for other, its_plan in ((FakeBench(), planned({"repeats": 3})), (on_another_machine(), plan)):
        with pytest.raises(StoreError, match=r"another (plan|machine)"):
            run(its_plan, other, folder, resume=True)
        assert schema() == "6"
    outcome, _, _ = run(plan, FakeBench(), folder, resume=True)
    assert (outcome.n_ok, outcome.n_failed, schema()) == (4, 0, newest)


def test_a_run_from_before_trials_were_replaced_is_looked_at_and_gone_on_with(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Store.create(folder, INFO, CELLS) as store:
        store.add_trial(lost("c1", 0, "lost"), {})
    with closing(sqlite3.connect(folder / DATABASE)) as db, db:
        db.execute("DROP TABLE replaced")
        db.execute("UPDATE meta SET value = '6' WHERE key = 'schema_version'")
    with Store.view(folder) as store:
        assert store.data().replaced == ()
    with Store.open(folder) as store:
        store.add_trial(trial("c1", 0), {})
        assert [t.trial_id for t in store.data().replaced] == ["lost"]
