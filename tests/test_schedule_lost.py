"""A scheduled run whose device was lost in the middle: what it took is measured again by the next pass, once."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from harness.schedule.due import run_due, sha256_of
from harness.schedule.entries import Book, Kept, Progress, Unfinished
from harness.schedule.world import RealWorld
from results.database import DATABASE
from results.trials import Failure, Trial
from tests.command import joulebench
from tests.fakes.schedule_world import START, FakeWorld, Killed, book_with, entry, one_pass
from tests.histories import made_trial, write_run
from tests.plans import write_failing_plan
from tests.run_builders import cell, trial


@pytest.fixture
def world() -> FakeWorld:
    found = FakeWorld(START)
    found.loses = True
    return found


@pytest.mark.parametrize("code", [5, 6])
def test_what_a_lost_device_took_is_measured_again_by_the_next_pass(
    tmp_path: Path, world: FakeWorld, code: int
) -> None:
    book = book_with(tmp_path, entry())
    world.codes = [code]
    [happened] = one_pass(book, world)
    [(_, folder, _)] = world.begun
    assert (happened.kind, happened.code) == ("failed", code)
    assert f"the next pass measures what a lost device took again, once: {folder}; it stays due" in happened.words
    assert world.told == [f"joulebench schedule: night: {happened.words}"]
    [done] = one_pass(book, world)
    assert (done.kind, world.resumed, len(world.begun)) == ("done", [folder], 1)
    assert one_pass(book, world) == []


def test_a_device_that_is_lost_again_ends_the_run_and_the_next_night_is_a_new_one(
    tmp_path: Path, world: FakeWorld
) -> None:
    book = book_with(tmp_path, entry())
    world.codes = [5, 5]
    assert [one_pass(book, world)[0].code for _ in range(2)] == [5, 5]
    assert one_pass(book, world) == []
    assert len(world.told) == 2
    world.true += timedelta(days=1)
    assert [one.kind for one in one_pass(book, world)] == ["done"]
    assert [folder.name for _, folder, _ in world.begun] == ["night-2026-01-01T0130Z", "night-2026-01-02T0130Z"]


def test_a_kill_in_between_gives_it_no_third_time(tmp_path: Path, world: FakeWorld) -> None:
    book = book_with(tmp_path, entry())
    world.codes = [5, "killed", 5]
    one_pass(book, world)
    with pytest.raises(Killed):
        one_pass(book, world)
    one_pass(book, world)
    assert len(world.resumed) == 2
    assert one_pass(book, world) == []


def test_a_run_whose_trials_failed_by_themselves_is_over(tmp_path: Path, world: FakeWorld) -> None:
    world.loses = False
    book = book_with(tmp_path, entry())
    world.codes = [5]
    assert [one.code for one in one_pass(book, world)] == [5]
    assert one_pass(book, world) == []
    assert world.resumed == []


@pytest.mark.parametrize("begins", [5, -9])
def test_what_a_plan_names_and_is_away_at_a_resume_gives_up_no_run(
    tmp_path: Path, world: FakeWorld, begins: int
) -> None:
    """A server that is not up yet after the computer started anew: the run was closed as one that cannot go on."""
    book = book_with(tmp_path, entry())
    world.codes = [begins, "away", "away"]
    one_pass(book, world)
    for _ in range(2):
        [happened] = one_pass(book, world)
        assert (happened.kind, happened.code, happened.words) == ("failed", 2, "no server answers; it stays due")
    assert len(world.told) == 2, "each reason once"
    assert [one.kind for one in one_pass(book, world)] == ["done"]
    assert len(world.begun) == 1


def test_a_run_that_cannot_be_gone_on_with_for_days_is_told_each_day(tmp_path: Path, world: FakeWorld) -> None:
    """It was told once for ever, and no later night was measured."""
    book = book_with(tmp_path, entry())
    world.codes = ["killed", *["away"] * 6]
    with pytest.raises(Killed):
        one_pass(book, world)
    for day in range(1, 4):
        for _ in range(2):
            one_pass(book, world)
        assert len(world.told) == day
        world.true += timedelta(days=1)


def unfinished(book: Book, tmp_path: Path) -> tuple[Path, Unfinished]:
    """An entry whose run was begun, with a program as an engine; its database holds nothing."""
    plan, program = write_failing_plan(tmp_path)
    own = entry(plan=str(plan), plan_sha256=sha256_of(plan), folder=str(tmp_path), out=str(tmp_path / "runs"))
    folder = own.run_folder(0)
    folder.mkdir(parents=True)
    (folder / DATABASE).touch()
    begun = Unfinished(number=0, folder=str(folder), plan_sha256=own.plan_sha256, begun_at=own.rhythm.first)
    with book.lock(own.name):
        book.write(Kept(entry=own, progress=Progress(unfinished=begun)))
    return program, begun


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_is_closed_where_it_is_refused_and_not_where_its_plan_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    book = Book(tmp_path)
    program, _ = unfinished(book, tmp_path)
    if not is_there:
        program.unlink()
    [happened] = run_due(book, RealWorld(tmp_path, book, lambda text: None), lambda one: None)
    assert (happened.kind, happened.code) == ("failed", 2)
    assert ("llama-bench" in happened.words) == (not is_there)
    assert (book.read("night").progress.unfinished is None) == is_there
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path))
    [row] = json.loads(joulebench("schedule", "list", "--json").stdout)
    folder = tmp_path / "runs/night-2026-01-01T0130Z"
    assert row["next"].startswith(f"now: goes on with {folder}; last: engine bench: ") == (not is_there)


def test_a_run_is_not_closed_where_what_its_plan_names_comes_up_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart: a server that is away when the run asks for it is there when somebody looks why."""
    book = Book(tmp_path)
    program, _ = unfinished(book, tmp_path)
    here = program.with_suffix(".here")
    program.rename(here)
    refused = ["sh", "-c", f"test -e {program} || {{ mv {here} {program}; echo 'error: no program'; exit 2; }}"]
    monkeypatch.setattr("harness.schedule.world.command_of", lambda *_: refused)
    [happened] = run_due(book, RealWorld(tmp_path, book, lambda text: None), lambda one: None)
    assert (happened.kind, happened.code) == ("failed", 2)
    assert happened.words.endswith("it stays due")
    assert book.read("night").progress.unfinished is not None


def failed(lost: bool) -> Trial:
    return trial("c1", 1, status="failed", completions=(), failure=Failure(kind="stable", error="gone", lost=lost))


def test_whether_a_device_was_lost_stands_in_the_run(tmp_path: Path) -> None:
    found = RealWorld(tmp_path, Book(tmp_path), lambda text: None)
    for lost in (True, False):
        folder = write_run(tmp_path / f"lost-{lost}", [cell("c1")], [made_trial("c1", 0, 1.0), failed(lost)])
        assert found.has_lost(folder) == lost
    assert not found.has_lost(tmp_path / "nothing")


@pytest.mark.parametrize(("n_there", "lost"), [(2, True), (3, False)])
def test_what_the_stopping_rule_does_not_need_is_not_measured_again(tmp_path: Path, n_there: int, lost: bool) -> None:
    """Three of equal length are enough. Of the run that lost one beside them, the next pass measured nothing."""
    trials = [made_trial("c1", repeat, 1.0) for repeat in (0, 2, 3)[:n_there]]
    stop = {"stop": {"min_repeats": 3, "max_repeats": 10}}
    folder = write_run(tmp_path / "run", [cell("c1")], [*trials, failed(lost=True)], protocol=stop)
    assert RealWorld(tmp_path, Book(tmp_path), lambda text: None).has_lost(folder) == lost
