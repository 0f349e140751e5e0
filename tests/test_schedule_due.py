"""A pass over the schedule: what becomes of each end that a run can have."""

from __future__ import annotations

import os
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from harness.schedule.due import Ended, Happened, NotNowError, next_at
from harness.schedule.entries import Book, Entry, Kept
from harness.schedule.times import Every, QuietHours, Rhythm
from tests.fakes.schedule_world import (
    N_TRIALS,
    START,
    FakeWorld,
    Killed,
    LoseAnything,
    MortalBook,
    book_with,
    entry,
    one_pass,
)


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld(START)


def test_the_oldest_is_first_and_each_once(tmp_path: Path, world: FakeWorld) -> None:
    late = Rhythm(every=Every(n=1, unit="h"), first="2026-01-01T11:00:00+00:00", zone="UTC")
    book = book_with(tmp_path, entry("a", rhythm=late), entry("b"))
    one_pass(book, world)
    assert [name for name, _, _ in world.begun] == ["b", "a"]
    assert one_pass(book, world) == []


def test_missed_times_are_run_once_and_said(tmp_path: Path, world: FakeWorld) -> None:
    book = book_with(tmp_path, entry())
    one_pass(book, world)
    world.true += timedelta(days=21)
    happened = one_pass(book, world)
    assert [one.words for one in happened if one.kind == "note"] == [
        "20 earlier times were missed; this run stands for them"
    ]
    assert [folder.name for _, folder, _ in world.begun] == ["night-2026-01-01T0130Z", "night-2026-01-22T0130Z"]


def test_a_run_that_was_killed_is_gone_on_with(tmp_path: Path, world: FakeWorld) -> None:
    book = book_with(tmp_path, entry())
    world.codes = ["killed"]
    with pytest.raises(Killed):
        one_pass(book, world)
    world.true += timedelta(days=2)
    one_pass(book, world)
    [(_, folder, _)] = world.begun
    assert world.resumed == [folder]
    # The time that came meanwhile is a run of its own.
    one_pass(book, world)
    assert [folder.name for _, folder, _ in world.begun][1:] == ["night-2026-01-03T0130Z"]


def test_a_run_that_ended_before_a_kill_is_not_made_again(tmp_path: Path, world: FakeWorld) -> None:
    book = MortalBook(tmp_path)
    mortal = LoseAnything(START, random.Random(1), 0.0)
    book.world = mortal
    with book.lock("night"):
        book.write(Kept(entry=entry()))
    mortal.tell = lambda entry, message: None  # type: ignore[method-assign]
    run = mortal.run

    def die_at_its_end(entry: Entry, folder: Path, resume: bool) -> Ended:
        run(entry, folder, resume)
        raise Killed

    mortal.run = die_at_its_end  # type: ignore[method-assign]
    with pytest.raises(Killed):
        one_pass(book, mortal)
    mortal.run = run  # type: ignore[method-assign]
    one_pass(book, mortal)
    assert len(mortal.begun) == 1
    assert mortal.trials[mortal.begun[0][1]] == N_TRIALS


def test_one_entry_is_not_run_by_two_processes(tmp_path: Path, world: FakeWorld) -> None:
    book = book_with(tmp_path, entry())
    with Book(tmp_path).lock("night"):
        [happened] = one_pass(book, world)
    assert happened.kind == "waits"
    assert f"run by process {os.getpid()} since" in happened.words
    assert not world.begun


def test_a_clock_that_was_years_ahead_stops_nothing(tmp_path: Path, world: FakeWorld) -> None:
    book = book_with(tmp_path, entry())
    world.offset = timedelta(days=4000)
    one_pass(book, world)
    world.offset = timedelta()
    one_pass(book, world)
    world.true += timedelta(days=1)
    one_pass(book, world)
    assert [folder.name for _, folder, _ in world.begun][1:] == ["night-2026-01-02T0130Z"]


def test_a_clock_set_back_a_little_runs_nothing_again(tmp_path: Path, world: FakeWorld) -> None:
    book = book_with(tmp_path, entry())
    one_pass(book, world)
    world.offset = timedelta(days=-1)
    assert one_pass(book, world) == []
    world.offset = timedelta()
    assert one_pass(book, world) == []


def test_times_that_were_run_are_not_missed_once_a_clock_that_went_back_is_right(
    tmp_path: Path, world: FakeWorld
) -> None:
    """As of a computer that forgets the time without power."""
    book = book_with(tmp_path, entry())
    for _ in range(5):
        one_pass(book, world)
        world.true += timedelta(days=1)
    world.offset = timedelta(days=-60)
    assert one_pass(book, world) == []
    world.offset = timedelta()
    world.true += timedelta(days=2)
    happened = one_pass(book, world)
    assert [one.words for one in happened if one.kind == "note"] == [
        "2 earlier times were missed; this run stands for them"
    ]


@pytest.mark.parametrize(("code", "kind"), [(5, "failed"), (6, "failed"), (0, "done")])
def test_a_run_that_came_to_its_end_is_due_no_more(tmp_path: Path, world: FakeWorld, code: int, kind: str) -> None:
    book = book_with(tmp_path, entry())
    world.codes = [code]
    [happened] = one_pass(book, world)
    assert (happened.kind, happened.code) == (kind, code)
    assert world.told == ([f"joulebench schedule: night: {happened.words}"] if code else [])
    assert one_pass(book, world) == []
    last = book.read("night").progress.last
    assert last is not None
    assert (last.failure is None) == (code == 0)


@pytest.mark.parametrize("code", [4, 7])
def test_a_run_that_could_not_begin_stays_due_and_is_told_once(tmp_path: Path, world: FakeWorld, code: int) -> None:
    book = book_with(tmp_path, entry())
    world.codes = [code, code]
    for _ in range(2):
        [happened] = one_pass(book, world)
        assert (happened.kind, happened.code) == ("failed", code)
    assert len(world.told) == 1
    assert [one.kind for one in one_pass(book, world)] == ["done"]


def test_a_run_that_crashes_thrice_is_given_up(tmp_path: Path, world: FakeWorld) -> None:
    book = book_with(tmp_path, entry())
    world.codes = [-9, -9, -9]
    words = [one_pass(book, world)[0].words for _ in range(3)]
    assert "the next pass goes on with" in words[0]
    assert words[2].startswith("3 times in a row: it broke; what was finished is kept")
    assert one_pass(book, world) == []


def test_a_run_that_was_asked_to_end_is_no_failure(tmp_path: Path, world: FakeWorld) -> None:
    book = book_with(tmp_path, entry())
    world.codes = [143] * 5
    for _ in range(5):
        [happened] = one_pass(book, world)
        assert happened.kind == "waits"
    assert world.told == []
    assert [one.kind for one in one_pass(book, world)] == ["done"]


def test_a_plan_that_is_gone_is_told_and_stays_due(tmp_path: Path, world: FakeWorld) -> None:
    book = book_with(tmp_path, entry())
    world.digest = None
    [happened] = one_pass(book, world)
    assert happened.code == 2
    assert "its plan /plan.toml is gone; put it back" in happened.words
    assert world.told == [f"joulebench schedule: night: {happened.words}"]
    world.digest = "aa"
    assert [one.kind for one in one_pass(book, world)] == ["done"]


def test_a_plan_that_changed_is_told_once_and_run(tmp_path: Path, world: FakeWorld) -> None:
    book = book_with(tmp_path, entry())
    world.digest = "bb"
    assert [one.kind for one in one_pass(book, world)] == ["note", "done"]
    assert "its plan has changed since it was added" in world.told[0]
    world.true += timedelta(days=1)
    assert [one.kind for one in one_pass(book, world)] == ["done"]
    assert len(world.told) == 1


def test_a_plan_that_changed_under_an_unfinished_run_closes_it(tmp_path: Path, world: FakeWorld) -> None:
    book = book_with(tmp_path, entry())
    world.codes = [-9]
    one_pass(book, world)
    world.digest = "bb"
    [happened] = one_pass(book, world)
    assert happened.code == 2
    assert "its plan was changed while the run of 2026-01-01 01:30 UTC was unfinished" in happened.words
    world.true += timedelta(days=1)
    assert [one.kind for one in one_pass(book, world)] == ["note", "done"]


def test_a_run_that_cannot_be_gone_on_with_is_closed(tmp_path: Path, world: FakeWorld) -> None:
    """As after an update of the software, which `run --resume` refuses for ever."""
    book = book_with(tmp_path, entry())
    world.codes = [-9, 2]
    one_pass(book, world)
    [happened] = one_pass(book, world)
    assert happened.words.startswith("no; what was finished is kept; /runs/night-2026-01-01T0130Z")
    world.true += timedelta(days=1)
    assert [one.kind for one in one_pass(book, world)] == ["done"]


def test_devices_that_are_not_ready_leave_it_due(tmp_path: Path, world: FakeWorld) -> None:
    book = book_with(tmp_path, entry())
    world.not_now = NotNowError("adb:X: at 43 %, charges to 80 % first")
    assert one_pass(book, world) == [Happened("night", "waits", "adb:X: at 43 %, charges to 80 % first")]
    assert world.told == []
    world.not_now = NotNowError("adb:X is not attached", is_fault=True)
    assert [one_pass(book, world)[0].code for _ in range(2)] == [4, 4]
    assert len(world.told) == 1
    world.not_now = None
    assert [one.kind for one in one_pass(book, world)] == ["done"]


def test_no_run_starts_in_quiet_hours(tmp_path: Path, world: FakeWorld) -> None:
    book = book_with(tmp_path, entry(quiet=(QuietHours(since="11:00", until="13:30"),)))
    [happened] = one_pass(book, world)
    assert happened.words == "quiet hours: no run starts before 13:30 (Europe/Berlin)"
    world.true += timedelta(minutes=31)
    assert [one.kind for one in one_pass(book, world)] == ["done"]


def test_the_next_time_is_told(tmp_path: Path, world: FakeWorld) -> None:
    book = book_with(tmp_path, entry())
    kept = book.read("night")
    assert next_at(kept.entry, kept.progress, world.now()) == datetime(2026, 1, 1, 1, 30, tzinfo=UTC)
    one_pass(book, world)
    kept = book.read("night")
    assert next_at(kept.entry, kept.progress, world.now()) == datetime(2026, 1, 2, 1, 30, tzinfo=UTC)


def test_a_damaged_entry_stops_no_other(tmp_path: Path, world: FakeWorld) -> None:
    book = book_with(tmp_path, entry("a"), entry("b"))
    (tmp_path / "schedule" / "a.json").write_text('{"entry": {"na')
    (tmp_path / "schedule" / "a.json.before").unlink(missing_ok=True)
    happened = one_pass(book, world)
    assert [(one.name, one.kind, one.code) for one in happened] == [("a", "failed", 2), ("b", "done", 0)]
    assert happened[0].words.startswith(f"{tmp_path}/schedule/a.json cannot be read"), "its name is told before it"


def test_a_zone_that_the_system_has_no_more_stops_no_other_entry(tmp_path: Path, world: FakeWorld) -> None:
    """Debian 13 and Ubuntu 24.04 took US/Pacific and others out of tzdata: the pass ended with an error of Python's."""
    there = entry("a")
    gone = there.model_copy(update={"rhythm": there.rhythm.model_copy(update={"zone": "US/Gone"})})
    book = book_with(tmp_path, gone, entry("b"))
    happened = one_pass(book, world)
    assert [(one.name, one.kind, one.code) for one in happened] == [("a", "failed", 2), ("b", "done", 0)]
    assert "does not know its time zone US/Gone any more: install it" in happened[0].words


def test_an_entry_whose_zone_is_gone_does_not_run_at_the_times_it_had_before(tmp_path: Path, world: FakeWorld) -> None:
    """It was written twice: the version before has a zone that is known, and other times."""
    there = entry("a")
    book = book_with(tmp_path, there)
    book.write(Kept(entry=there.model_copy(update={"rhythm": there.rhythm.model_copy(update={"zone": "US/Gone"})})))
    [happened] = one_pass(book, world)
    assert (happened.kind, happened.code) == ("failed", 2)
    assert "US/Gone" in happened.words
