"""A pass over the schedule: a year of it on a fake clock, and what becomes of each end that a run can have."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from harness.schedule.due import Ended, Happened, NotNowError, next_at, run_due
from harness.schedule.entries import Book, Entry, Kept
from harness.schedule.times import Every, QuietHours, Rhythm, zone_of

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
N_TRIALS = 3


def entry(name: str = "night", **changes: object) -> Entry:
    made = Entry(
        name=name, plan="/plan.toml", plan_sha256="aa", folder="/", out="/runs", carried=(), environment={},
        rhythm=Rhythm(every=Every(n=1, unit="d"), first="2026-01-01T02:30", zone="Europe/Berlin"),
    )  # fmt: skip
    return made.model_copy(update=changes)


class Killed(BaseException):
    """kill -9."""


class FakeWorld:
    """A clock that is set, plans that change, runs of three trials in folders that remember."""

    def __init__(self, now: datetime) -> None:
        self.true = now
        self.offset = timedelta()
        self.digest: str | None = "aa"
        self.trials: dict[Path, int] = {}
        self.begun: list[tuple[str, Path, datetime]] = []
        """Runs that were not gone on with: (entry, folder, the clock)."""
        self.ended: Counter[Path] = Counter()
        self.resumed: list[Path] = []
        self.told: list[str] = []
        self.codes: list[int | str] = []
        """How the next runs end."""
        self.not_now: NotNowError | None = None

    def now(self) -> datetime:
        return self.true + self.offset

    def plan_sha256(self, entry: Entry) -> str | None:
        return self.digest

    def holds_run(self, folder: Path) -> bool:
        return folder in self.trials

    @contextmanager
    def devices(self, entry: Entry) -> Iterator[None]:
        if self.not_now is not None:
            raise self.not_now
        yield

    def run(self, entry: Entry, folder: Path, resume: bool) -> Ended:
        # `joulebench run` refuses both: to begin where there is a run, and to go on where there is none.
        assert resume == (folder in self.trials)
        code = self.codes.pop(0) if self.codes else 0
        if code in (2, 4):
            return Ended(code, "no")  # type: ignore[arg-type]
        if not resume:
            self.begun.append((entry.name, folder, self.now()))
        else:
            self.resumed.append(folder)
        self.trials.setdefault(folder, 0)
        if isinstance(code, str) or code not in (0, 5, 6):
            self.trials[folder] = min(N_TRIALS, self.trials[folder] + 1)
            if code == "killed":
                raise Killed
            return Ended(code, "it broke")  # type: ignore[arg-type]
        self.trials[folder] = N_TRIALS
        self.ended[folder] += 1
        return Ended(code, "3 trials failed" if code else "")

    def tell(self, entry: Entry, message: str) -> str | None:
        self.told.append(message)
        return None


def book_with(folder: Path, *entries: Entry) -> Book:
    book = Book(folder)
    for one in entries:
        with book.lock(one.name):
            book.write(Kept(entry=one))
    return book


def one_pass(book: Book, world: FakeWorld) -> list[Happened]:
    return run_due(book, world, lambda one: None)


# --- a year ----------------------------------------------------------------------------------------------------------


class LoseAnything(FakeWorld):
    """May be killed at each step, by chance."""

    def __init__(self, now: datetime, chance: random.Random, deadly: float) -> None:
        super().__init__(now)
        self.chance = chance
        self.deadly = deadly

    def may_die(self) -> None:
        if self.chance.random() < self.deadly:
            raise Killed

    def plan_sha256(self, entry: Entry) -> str | None:
        self.may_die()
        return self.digest

    def run(self, entry: Entry, folder: Path, resume: bool) -> Ended:
        self.may_die()
        if self.chance.random() < self.deadly:
            self.codes = ["killed"]
        elif self.chance.random() < 0.05:
            self.codes = [self.chance.choice([1, 4, 5, -9, 143])]
        ended = super().run(entry, folder, resume)
        self.true += timedelta(minutes=self.chance.randint(0, 180))
        self.may_die()
        return ended


class MortalBook(Book):
    """A kill just before or just after a file is replaced."""

    world: LoseAnything

    def write(self, kept: Kept) -> None:
        self.world.may_die()
        super().write(kept)
        self.world.may_die()


ENTRIES = (
    entry("berlin"),
    entry(
        "new-york",
        rhythm=Rhythm(every=Every(n=2, unit="d"), first="2026-01-01T02:30", zone="America/New_York"),
        quiet=(QuietHours(since="22:00", until="06:00"),),
    ),
    entry("lord-howe", rhythm=Rhythm(every=Every(n=1, unit="w"), first="2026-01-03T02:15", zone="Australia/Lord_Howe")),
    entry("twelve", rhythm=Rhythm(every=Every(n=12, unit="h"), first="2026-01-01T00:00:00+00:00", zone="UTC")),
)
STEPS = (timedelta(minutes=-7), timedelta(hours=-5), timedelta(days=-3), timedelta(hours=5), timedelta(days=40))


@pytest.mark.slow
@settings(
    max_examples=6,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.03]), st.booleans())
def test_a_year_loses_no_run_and_doubles_none(
    tmp_path_factory: pytest.TempPathFactory, seed: int, deadly: float, steps: bool
) -> None:
    """Looks at irregular times, weeks without any, kills at every step, the clock set back, ahead and right."""
    chance = random.Random(seed)
    world = LoseAnything(START, chance, deadly)
    book = MortalBook(tmp_path_factory.mktemp("year"))
    world.deadly = 0.0
    book.world = world
    for one in ENTRIES:
        with book.lock(one.name):
            book.write(Kept(entry=one))
    world.deadly = deadly
    since_step = world.now()
    owed: set[Path] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # no power fails here, and a year has thousands
        while world.true < START + timedelta(days=365):
            away = chance.random() < 0.01
            world.true += timedelta(weeks=chance.randint(1, 4)) if away else timedelta(hours=chance.uniform(0.2, 16))
            if steps and chance.random() < 0.02:
                world.offset = chance.choice(STEPS) if not world.offset else timedelta()
                since_step = world.now()
            if clean(book, world):
                for one in ENTRIES:
                    number = one.rhythm.latest(world.now())
                    if is_quiet(one, world.now()) or number < 0 or one.rhythm.at(number) <= since_step:
                        continue
                    owed.add(one.run_folder(number))
    for name, folder, clock in world.begun:
        own = next(one for one in ENTRIES if one.name == name)
        number = own.rhythm.latest(clock)
        assert folder == own.run_folder(number), "a run stands for the last time that has come"
        assert not is_quiet(own, clock)
    begun = Counter(folder for _, folder, _ in world.begun)
    assert set(begun.values()) == {1}, "no time has two runs"
    lost = owed - world.ended.keys()
    assert not lost
    assert len(owed) > 300


def clean(book: Book, world: LoseAnything) -> bool:
    """Looks until a look neither is killed nor has anything left that could be run: whether it came so far."""
    for _ in range(8):
        try:
            happened = one_pass(book, world)
        except Killed:
            continue
        if not any(one.kind in ("done", "failed") or one.code for one in happened):
            return True
    return False


def is_quiet(one: Entry, clock: datetime) -> bool:
    """In its own words: New York's nights."""
    return bool(one.quiet) and not 6 <= clock.astimezone(zone_of(one.rhythm.zone)).hour < 22


# --- single steps ----------------------------------------------------------------------------------------------------


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
