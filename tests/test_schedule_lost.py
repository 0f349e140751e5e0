"""A scheduled run whose device was lost in the middle: what it took is measured again by the next pass, once."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from harness.schedule.entries import Book
from harness.schedule.world import RealWorld
from results.trials import Failure, Trial
from tests.fakes.schedule_world import START, FakeWorld, Killed, book_with, entry, one_pass
from tests.histories import made_trial, write_run
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


def failed(lost: bool) -> Trial:
    return trial("c1", 1, status="failed", completions=(), failure=Failure(kind="stable", error="gone", lost=lost))


def test_whether_a_device_was_lost_stands_in_the_run(tmp_path: Path) -> None:
    found = RealWorld(tmp_path, Book(tmp_path), lambda text: None)
    for lost in (True, False):
        folder = write_run(tmp_path / f"lost-{lost}", [cell("c1")], [made_trial("c1", 0, 1.0), failed(lost)])
        assert found.has_lost(folder) == lost
    assert not found.has_lost(tmp_path / "nothing")
