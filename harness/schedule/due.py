"""What is due, and one pass over it: the oldest first, each entry once, every step kept before the next.

Nothing here waits. A device that another process has, a phone that charges or cools and quiet hours leave an entry due;
the next pass asks again. A pass may be killed anywhere: before a run begins its number and folder are kept, and the
next pass goes on with what is in that folder.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple
from typing import Protocol as TypingProtocol

from harness.schedule.entries import (
    MAX_CRASHES,
    Book,
    Entry,
    EntryBusyError,
    EntryError,
    Kept,
    Outcome,
    Progress,
    Unfinished,
    told_time,
)
from harness.schedule.times import quiet_until
from harness.terminal import (
    EXIT_BAD_PLAN,
    EXIT_DEVICE_NOT_READY,
    EXIT_NONE_USABLE,
    EXIT_NOT_WRITTEN,
    EXIT_SOME_FAILED,
)

Kind = Literal["done", "note", "waits", "failed"]
NOT_BEGUN_CODES = (EXIT_DEVICE_NOT_READY, EXIT_NOT_WRITTEN)
"""Of runs whose time stays due: the phone may be there later, and the disk may have room."""
ENDED_CODES = (0, EXIT_SOME_FAILED, EXIT_NONE_USABLE)
"""Of runs that came to their end, whatever is in them."""
MEASURED_AGAIN = "the next pass measures what a lost device took again, once"
INTERRUPTED_CODES = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
"""Of runs that were asked to end: no fault of theirs."""


class Ended(NamedTuple):
    """How a run's process ended. why: its own last word of an error. of_plan: the plan was refused, and no run that was
    begun: what it names may be there later."""

    code: int
    why: str = ""
    of_plan: bool = False


class NotNowError(Exception):
    """Devices are not ready for a run now. is_fault: not by themselves in some time."""

    def __init__(self, reason: str, is_fault: bool = False) -> None:
        super().__init__(reason)
        self.is_fault = is_fault


class World(TypingProtocol):
    """What a pass meets: the clock, runs, devices, files of plans, and the owner."""

    def now(self) -> datetime:
        """UTC."""
        ...

    def plan_sha256(self, entry: Entry) -> str | None:
        """None where the plan is gone."""
        ...

    def holds_run(self, folder: Path) -> bool: ...

    def has_lost(self, folder: Path) -> bool:
        """Whether a resume of the run there measures trials again that failed because their device was lost."""
        ...

    def devices(self, entry: Entry) -> AbstractContextManager[None]:
        """Its devices, locked, charged and cool. Raises `NotNowError`."""
        ...

    def run(self, entry: Entry, folder: Path, resume: bool) -> Ended: ...

    def tell(self, entry: Entry, message: str) -> str | None:
        """The owner; what went wrong with that, if anything did."""
        ...


class Happened(NamedTuple):
    """To an entry, in a pass. code: of what failed."""

    name: str
    kind: Kind
    words: str
    code: int = 0


@dataclass(frozen=True)
class Due:
    """A time whose run is owed."""

    number: int
    n_missed: int
    """Times before it that were let go. Where the clock was set back and put right, those that were run are none."""


def sha256_of(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def as_of(kept: Kept, world: World) -> Progress:
    """Where the clock was set back, times that lie ahead again are not settled, if they were not run themselves. A run
    that has no trial yet is no unfinished one: the last time that has come is run, and not the one of then."""
    progress, latest = kept.progress, max(kept.entry.rhythm.latest(world.now()), -1)
    if progress.unfinished is not None and not world.holds_run(Path(progress.unfinished.folder)):
        progress = progress.model_copy(update={"unfinished": None})
    return progress.model_copy(update={"settled": latest}) if latest < progress.settled else progress


def due_of(entry: Entry, progress: Progress, now: datetime) -> Due | None:
    """The last time that has come, where it was not run; earlier ones are missed, and it stands for them."""
    if progress.unfinished is not None:
        return Due(progress.unfinished.number, 0)
    latest = entry.rhythm.latest(now)
    if latest <= progress.settled or latest in progress.runs:
        return None
    n_run = sum(progress.settled < number < latest for number in progress.runs)
    return Due(latest, latest - progress.settled - 1 - n_run)


def next_at(entry: Entry, progress: Progress, now: datetime) -> datetime:
    """When the next run is due; now or before where one is."""
    due = due_of(entry, progress, now)
    if due is not None:
        return entry.rhythm.at(due.number)
    number = entry.rhythm.latest(now) + 1
    while number in progress.runs:
        number += 1
    return entry.rhythm.at(number)


def run_due(book: Book, world: World, told: Callable[[Happened], None]) -> list[Happened]:
    """One pass. Returns what failed or waits, too. Raises `OSError`; KeyboardInterrupt passes through."""
    happened: list[Happened] = []
    seen: set[str] = set()

    def tell(one: Happened) -> None:
        happened.append(one)
        told(one)

    while True:
        name, broken = _oldest(book, world, seen)
        for one in broken:
            tell(one)
        if name is None:
            return happened
        seen.add(name)
        try:
            with book.lock(name):
                for one in _of_entry(book, world, book.read(name)):
                    tell(one)
        except EntryError as error:
            tell(Happened(name, "waits", str(error)))


def _oldest(book: Book, world: World, seen: set[str]) -> tuple[str | None, list[Happened]]:
    """The entry that has been due for the longest, and those that cannot be read."""
    due, broken = [], []
    now = world.now()
    for name in book.names():
        if name in seen:
            continue
        try:
            kept = _after_a_clock_set_back(book, world, name)
        except EntryError as error:
            seen.add(name)
            words = str(error).removeprefix(f"{name}: ")  # which stands before what happened to an entry
            broken.append(Happened(name, "failed", words, EXIT_BAD_PLAN))
            continue
        if (found := due_of(kept.entry, as_of(kept, world), now)) is not None:
            due.append((kept.entry.rhythm.at(found.number), name))
    return min(due, default=(None, None))[1], broken


def _after_a_clock_set_back(book: Book, world: World, name: str) -> Kept:
    """An entry, once what is settled no more is kept so: else the next look, with those times behind it, would not know
    that they came anew. Raises `EntryError`."""
    kept = book.read(name)
    if as_of(kept, world).settled == kept.progress.settled:
        return kept
    with suppress(EntryBusyError), book.lock(name):
        kept = book.read(name)
        kept = kept.model_copy(update={"progress": as_of(kept, world)})
        book.write(kept)
    return kept


def _of_entry(book: Book, world: World, kept: Kept) -> Iterable[Happened]:
    """Of one that this process has alone."""
    entry, now = kept.entry, world.now()
    progress = as_of(kept, world)
    due = due_of(entry, progress, now)
    if due is None:  # another pass was faster
        return
    if (until := quiet_until(entry.quiet, entry.rhythm.zone, now)) is not None:
        yield Happened(entry.name, "waits", f"quiet hours: no run starts before {until} ({entry.rhythm.zone})")
        return
    digest = world.plan_sha256(entry)
    if digest is None:
        why = f"its plan {entry.plan} is gone; put it back, or `joulebench schedule remove` the entry"
        yield _owed(book, world, kept.entry, progress, why, EXIT_BAD_PLAN)
        return
    given_up = _changed_meanwhile(entry, progress.unfinished, digest)
    if given_up is not None and progress.unfinished is not None:
        yield _closed(book, world, entry, progress, progress.unfinished, given_up, EXIT_BAD_PLAN)
        return
    try:
        with world.devices(entry):
            yield from _run(book, world, entry, progress, due, digest)
    except NotNowError as reason:
        if reason.is_fault:
            yield _owed(book, world, entry, progress, str(reason), EXIT_DEVICE_NOT_READY)
        else:
            yield Happened(entry.name, "waits", str(reason))


def _changed_meanwhile(entry: Entry, unfinished: Unfinished | None, digest: str) -> str | None:
    """Why an unfinished run cannot be gone on with."""
    if unfinished is None or unfinished.plan_sha256 == digest:
        return None
    return (
        f"its plan was changed while the run of {entry.rhythm.at(unfinished.number):%Y-%m-%d %H:%M} UTC was unfinished;"
        f" what was finished is kept in {unfinished.folder}, and the next run takes the plan as it is now"
    )


def _run(book: Book, world: World, entry: Entry, progress: Progress, due: Due, digest: str) -> Iterable[Happened]:
    begun = progress.unfinished
    if digest != entry.plan_sha256:
        note = f"its plan has changed since it was added, and is run as it is now: {entry.plan}"
        yield Happened(entry.name, "note", note)
        world.tell(entry, f"joulebench schedule: {entry.name}: {note}")
        entry = entry.model_copy(update={"plan_sha256": digest})
    if due.n_missed:
        missed = "1 earlier time was" if due.n_missed == 1 else f"{due.n_missed} earlier times were"
        stands = "it" if due.n_missed == 1 else "them"
        yield Happened(entry.name, "note", f"{missed} missed; this run stands for {stands}")
    folder = entry.run_folder(due.number) if begun is None else Path(begun.folder)
    crashes = 0 if begun is None else begun.crashes
    begun = Unfinished(
        number=due.number, folder=str(folder), plan_sha256=digest, begun_at=told_time(world.now()), crashes=crashes,
        is_again=begun is not None and begun.is_again,
    )  # fmt: skip
    progress = progress.model_copy(update={"unfinished": begun, "owed": None})
    book.write(Kept(entry=entry, progress=progress))
    resume = world.holds_run(folder)
    ended = world.run(entry, folder, resume)
    why = ended.why or f"it ended with code {ended.code}"
    if ended.code in INTERRUPTED_CODES:
        yield Happened(entry.name, "waits", f"{why}; the next pass goes on with {folder}", ended.code)
    elif ended.code in ENDED_CODES and ended.code and not begun.is_again and world.has_lost(folder):
        again = begun.model_copy(update={"is_again": True, "crashes": 0})
        progress = progress.model_copy(update={"unfinished": again})
        yield _owed(book, world, entry, progress, f"{why}; {MEASURED_AGAIN}: {folder}", ended.code)
    elif ended.code in ENDED_CODES:
        yield _closed(book, world, entry, progress, begun, why if ended.code else None, ended.code)
    elif ended.code in NOT_BEGUN_CODES or (ended.code == EXIT_BAD_PLAN and (ended.of_plan or not resume)):
        yield _owed(book, world, entry, progress, why, ended.code)
    elif ended.code == EXIT_BAD_PLAN or crashes + 1 >= MAX_CRASHES:
        times = "" if ended.code == EXIT_BAD_PLAN else f"{crashes + 1} times in a row: "
        yield _closed(book, world, entry, progress, begun, f"{times}{why}; what was finished is kept", ended.code)
    else:
        crashed = begun.model_copy(update={"crashes": crashes + 1})
        progress = progress.model_copy(update={"unfinished": crashed})
        yield _owed(book, world, entry, progress, f"{why}; the next pass goes on with {folder}", EXIT_SOME_FAILED)


def _closed(
    book: Book, world: World, entry: Entry, progress: Progress, begun: Unfinished, failure: str | None, code: int
) -> Happened:
    """A run that is over: its time is due no more."""
    outcome = Outcome(number=begun.number, folder=begun.folder, ended_at=told_time(world.now()), failure=failure)
    progress = progress.with_run(begun.number).model_copy(update={"last": outcome})
    book.write(Kept(entry=entry, progress=progress))
    if failure is None:
        return Happened(entry.name, "done", f"done: {begun.folder}")
    return _told(world, Happened(entry.name, "failed", f"{failure}; {begun.folder}", code or EXIT_SOME_FAILED), entry)


def _owed(book: Book, world: World, entry: Entry, progress: Progress, why: str, code: int) -> Happened:
    """A run that could not be, and stays due. The owner hears of it once for each time that comes meanwhile, too."""
    happened = Happened(entry.name, "failed", f"{why}; it stays due", code)
    progress = progress.model_copy(update={"owed": why})
    key = hashlib.sha256(f"{entry.rhythm.latest(world.now())} {why}".encode()).hexdigest()[:16]
    if key not in progress.told:
        happened = _told(world, happened, entry)
        progress = progress.model_copy(update={"told": (*progress.told, key)[-16:]})
    book.write(Kept(entry=entry, progress=progress))
    return happened


def _told(world: World, happened: Happened, entry: Entry) -> Happened:
    fault = world.tell(entry, f"joulebench schedule: {happened.name}: {happened.words}")
    return happened if fault is None else happened._replace(words=f"{happened.words} ({fault})")
