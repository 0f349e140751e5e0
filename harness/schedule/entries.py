"""The schedule on disk: one file an entry, in the user's state folder.

A file holds what was asked for and how far it came, and is replaced as a whole; the one before stays beside it. Where
the newer one cannot be read, the one before is taken: at worst it knows nothing of the last run, whose folder has the
name of its time, so that it is gone on with there and not made again. One file that is damaged stops no other entry.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from urllib.parse import quote, unquote

from pydantic import ValidationError

from devices.device_lock import BusyError, lock_file
from harness.schedule.times import QuietHours, Rhythm, TimeError, zone_of
from results.records import Record
from results.report.files import replace_text

FOLDER = "schedule"
SUFFIX, BEFORE = ".json", ".before"
MOST_NAME = 200
"""Characters of an entry's name as files of it have it; behind it stands more, and a file system takes 255 bytes."""
MOST_RUNS = 1000
"""Numbers of times that were run, as many as are kept of them."""
MAX_CRASHES = 3
"""After so many ends that say nothing, a run is given up."""


class EntryError(Exception):
    """An entry that is not there, or cannot be read."""


class EntryBusyError(EntryError):
    """Another process runs it."""


class Charging(Record):
    """How a phone is brought to its charge before a run."""

    to_percent: float
    on: tuple[str, ...] | None = None
    """A program and its arguments, such as uhubctl's."""
    off: tuple[str, ...] | None = None


class Entry(Record):
    """What is to be run, and when."""

    name: str
    plan: str
    plan_sha256: str
    devices: tuple[str, ...] = ()
    """In the place of the plan's; empty: those of the plan."""
    settings: tuple[str, ...] = ()
    allow_code: bool = False
    folder: str
    """Where relative paths start."""
    out: str
    """The folder of its runs; each has one of its own in it."""
    carried: tuple[str, ...]
    """Names of variables that decide a run, as `harness.variables.CARRIED` had them when it was added."""
    environment: dict[str, str]
    """Those of them that were set then: timers have another environment."""
    rhythm: Rhythm
    quiet: tuple[QuietHours, ...] = ()
    notify: tuple[str, ...] | None = None
    """A program and its arguments."""
    charging: Charging | None = None

    def run_folder(self, number: int) -> Path:
        return Path(self.out) / f"{self.name}-{self.rhythm.at(number):%Y-%m-%dT%H%MZ}"


class Unfinished(Record):
    """A run that was begun, and of whose end nothing is known; or one that ended without what a lost device took."""

    number: int
    folder: str
    plan_sha256: str
    begun_at: str
    crashes: int = 0
    is_again: bool = False
    """It came to its end before, and what a lost device took is measured again."""


class Outcome(Record):
    """How the last run ended."""

    number: int
    folder: str
    ended_at: str
    failure: str | None = None
    """Why it failed; None of one that did not."""


class Progress(Record):
    """How far an entry came. Numbers are of its rhythm."""

    settled: int = -1
    """Nothing up to this one is due: it was run, or a later one was in its place."""
    runs: tuple[int, ...] = ()
    unfinished: Unfinished | None = None
    last: Outcome | None = None
    told: tuple[str, ...] = ()
    """What of the time that is due now was told already."""
    owed: str | None = None
    """Why what is due was not run when it was tried last."""

    def with_run(self, number: int) -> Progress:
        """Once a run of this number has come to its end, or was given up."""
        runs = tuple(sorted({*self.runs, number}))[-MOST_RUNS:]
        return self.model_copy(
            update={"runs": runs, "settled": max(self.settled, number), "unfinished": None, "told": (), "owed": None}
        )


class Kept(Record):
    """A file."""

    entry: Entry
    progress: Progress = Progress()


class Book:
    """All entries."""

    def __init__(self, state: Path) -> None:
        self.folder = state / FOLDER
        self.held: dict[str, int] = {}
        """Descriptors of the locks that this process has, by entry."""

    def names(self) -> list[str]:
        """Of those that are there, whether or not they can be read. Raises `OSError`."""
        found = set()
        with suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                name = path.name.removesuffix(BEFORE)
                if name.endswith(SUFFIX) and not name.startswith("."):
                    found.add(unquote(name.removesuffix(SUFFIX)))
        return sorted(found)

    def read(self, name: str) -> Kept:
        """Raises `EntryError`."""
        path = self.path(name)
        reasons = []
        for one in (path, _before(path)):
            try:
                return _of_known_zone(Kept.model_validate_json(one.read_text(encoding="utf-8")))
            except FileNotFoundError:
                continue
            except (OSError, ValidationError, UnicodeDecodeError) as error:
                reasons.append(error.strerror if isinstance(error, OSError) else "it is no entry, or another version's")
        if not reasons:
            raise EntryError(f"{name}: no such entry; `joulebench schedule list` shows them")
        raise EntryError(
            f"{name}: {path} cannot be read ({reasons[0]}), nor can the one before; `joulebench schedule remove` takes"
            " it out, and `add` makes it anew"
        )

    def write(self, kept: Kept) -> None:
        """Raises `OSError`."""
        path = self.path(kept.entry.name)
        text = kept.model_dump_json(indent=1) + "\n"
        if self._is_sound(path):
            beside = path.with_name(f".{path.name}.linked")
            with suppress(FileNotFoundError):
                beside.unlink()
            os.link(path, beside)
            os.replace(beside, _before(path))
        replace_text(path, text)

    def remove(self, name: str) -> None:
        """Raises `EntryError`, `OSError`."""
        path = self.path(name)
        if not path.exists() and not _before(path).exists():
            raise EntryError(f"{name}: no such entry; `joulebench schedule list` shows them")
        with self.lock(name):
            for one in (_before(path), path):
                one.unlink(missing_ok=True)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Whoever inherits its descriptor has it too. Raises `EntryBusyError`."""
        try:
            descriptor = lock_file(self.folder / f"{in_files(name)}.lock")
        except BusyError as error:
            raise EntryBusyError(f"{name} is run by {error.holder}") from error
        self.held[name] = descriptor
        try:
            yield
        finally:
            del self.held[name]
            os.close(descriptor)

    def is_locked(self, name: str) -> bool:
        try:
            with self.lock(name):
                return False
        except EntryBusyError:
            return True

    def log(self, name: str) -> Path:
        """Of its last run."""
        return self.folder / f"{in_files(name)}.log"

    def path(self, name: str) -> Path:
        return self.folder / f"{in_files(name)}{SUFFIX}"

    @staticmethod
    def _is_sound(path: Path) -> bool:
        """One that cannot be read is no one to go back to."""
        try:
            Kept.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return False
        return True


def in_files(name: str) -> str:
    """An entry's name, as names of files have it."""
    return quote(name, safe="")


def _of_known_zone(kept: Kept) -> Kept:
    """Raises `EntryError`: an update of the system may take names away. The version before may have other times."""
    rhythm = kept.entry.rhythm
    try:
        zone_of(rhythm.zone)
    except TimeError as error:
        raise EntryError(
            f"{kept.entry.name}: this machine does not know its time zone {rhythm.zone} any more: install it, as"
            " tzdata-legacy, or take the entry out with `joulebench schedule remove` and `add` it with another --zone"
        ) from error
    return kept


def _before(path: Path) -> Path:
    return path.with_name(path.name + BEFORE)


def told_time(at: datetime) -> str:
    return at.isoformat(timespec="seconds")
