"""A schedule's world: a clock that is set, plans that change, runs that end in any way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from harness.schedule.due import Ended, Happened, NotNowError, run_due
from harness.schedule.entries import Book, Entry, Kept
from harness.schedule.times import Every, Rhythm

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
        self.loses = False
        """Whether what fails is lost."""

    def now(self) -> datetime:
        return self.true + self.offset

    def plan_sha256(self, entry: Entry) -> str | None:
        return self.digest

    def holds_run(self, folder: Path) -> bool:
        return folder in self.trials

    def has_lost(self, folder: Path) -> bool:
        return self.loses

    @contextmanager
    def devices(self, entry: Entry) -> Iterator[None]:
        if self.not_now is not None:
            raise self.not_now
        yield

    def run(self, entry: Entry, folder: Path, resume: bool) -> Ended:
        # `joulebench run` refuses both: to begin where there is a run, and to go on where there is none.
        assert resume == (folder in self.trials)
        code = self.codes.pop(0) if self.codes else 0
        if code == "away":
            return Ended(2, "no server answers", of_plan=True)
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

    def has_lost(self, folder: Path) -> bool:
        self.may_die()
        return self.chance.random() < 0.5

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


def book_with(folder: Path, *entries: Entry) -> Book:
    book = Book(folder)
    for one in entries:
        with book.lock(one.name):
            book.write(Kept(entry=one))
    return book


def one_pass(book: Book, world: FakeWorld) -> list[Happened]:
    return run_due(book, world, lambda one: None)
