"""When an entry is due: an interval, from a first time on, in a zone; and the hours in which no run may start.

Days and weeks are of the wall clock of the entry's zone: "every day at 02:30" stays 02:30 through summer and winter
time, so that two of its times lie 23, 24 or 25 hours apart. A time that a spring night leaves out comes as much later
as the clock leaps (02:30 is 03:30); one that an autumn night has twice is taken once, at the first. Minutes and hours
are elapsed time, and know no zone.

The times of an entry are numbered from 0. All that is kept of them is numbers, and an instant is worked out anew: a run
is never done twice for one number, whatever becomes of the clock.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from pathlib import Path
from typing import Literal
from zoneinfo import ZoneInfo, available_timezones

from results.records import Record

EVERY = re.compile(r"(\d{1,6})\s*([a-z]+)")
UNIT_WORDS = {"m": "minute", "h": "hour", "d": "day", "w": "week"}
MOST = {"m": 525_600, "h": 8_760, "d": 366, "w": 53}
"""About a year of each."""
CLOCK = re.compile(r"([01]?\d|2[0-3])(?::([0-5]\d))?")
WHAT_IS_EVERY = "write a number and m, h, d or w, such as 1d, 12h or 30m"
WHAT_IS_QUIET = "write two times of day, such as 22-06 or 22:30-06:15"


class TimeError(ValueError):
    """A text that is no interval, no time of day or no zone: the actual value, and the remedy."""


class Every(Record):
    """An interval."""

    n: int
    unit: Literal["m", "h", "d", "w"]

    @property
    def is_of_days(self) -> bool:
        return self.unit in "dw"

    @property
    def days(self) -> int:
        return self.n * (7 if self.unit == "w" else 1)

    @property
    def elapsed(self) -> timedelta:
        return timedelta(minutes=self.n) if self.unit == "m" else timedelta(hours=self.n)

    def __str__(self) -> str:
        word = UNIT_WORDS[self.unit]
        return word if self.n == 1 else f"{self.n} {word}s"


class Rhythm(Record):
    """The times at which an entry is due."""

    every: Every
    first: str
    """ISO 8601: of days and weeks a wall time of the zone, without its offset; of minutes and hours UTC."""
    zone: str

    def at(self, number: int) -> datetime:
        """The instant of a number, in UTC."""
        if not self.every.is_of_days:
            return datetime.fromisoformat(self.first) + number * self.every.elapsed
        first = datetime.fromisoformat(self.first)
        day = first.date() + timedelta(days=number * self.every.days)
        return datetime.combine(day, first.time(), zone_of(self.zone)).astimezone(UTC)

    def latest(self, now: datetime) -> int:
        """The last number whose instant has come; below 0 where none has."""
        if not self.every.is_of_days:
            return (now - datetime.fromisoformat(self.first)) // self.every.elapsed
        passed = now.astimezone(zone_of(self.zone)).date() - datetime.fromisoformat(self.first).date()
        # A zone may leave a day out, and the wall time of a day may be before or after this one's.
        number = passed.days // self.every.days + 2
        while number >= 0 and self.at(number) > now:
            number -= 1
        return number

    def __str__(self) -> str:
        if not self.every.is_of_days:
            return f"every {self.every}"
        first = datetime.fromisoformat(self.first)
        day = f" on {first:%A}s" if self.every.unit == "w" else ""
        return f"every {self.every}{day} at {first:%H:%M} ({self.zone})"


class QuietHours(Record):
    """From one wall time to another, over midnight where the second is the earlier: no run starts in them."""

    since: str
    until: str

    def holds(self, wall: time) -> bool:
        since, until = time.fromisoformat(self.since), time.fromisoformat(self.until)
        wall = wall.replace(tzinfo=None, fold=0)
        return since <= wall < until if since < until else wall >= since or wall < until

    def __str__(self) -> str:
        return f"{self.since} to {self.until}"


def parse_every(text: str) -> Every:
    """Raises `TimeError`."""
    match = EVERY.fullmatch(text.strip().lower())
    if match is None or match[2] not in MOST:
        raise TimeError(f"{text[:40]!r} is no interval; {WHAT_IS_EVERY}")
    n, unit = int(match[1]), match[2]
    if not 1 <= n <= MOST[unit]:
        raise TimeError(f"{text[:40]!r}: must be from 1{unit} to {MOST[unit]}{unit}")
    return Every(n=n, unit=unit)


def parse_clock(text: str) -> time:
    """Raises `TimeError`."""
    match = CLOCK.fullmatch(text.strip())
    if match is None:
        raise TimeError(f"{text[:40]!r} is no time of day; write it as 02:30")
    return time(int(match[1]), int(match[2] or 0))


def parse_quiet(text: str) -> QuietHours:
    """Raises `TimeError`."""
    since, dash, until = text.partition("-")
    try:
        found = QuietHours(since=f"{parse_clock(since):%H:%M}", until=f"{parse_clock(until):%H:%M}")
    except TimeError as error:
        raise TimeError(f"{text[:40]!r} are no hours; {WHAT_IS_QUIET}") from error
    if not dash or found.since == found.until:
        raise TimeError(f"{text[:40]!r}: begins when it ends, so it is no time or all time; {WHAT_IS_QUIET}")
    return found


@cache
def zone_of(name: str) -> ZoneInfo:
    """Raises `TimeError`."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:
        raise TimeError(f"{name[:60]!r} is no time zone; write it as Europe/Berlin, or UTC") from error


def local_zone(environment: dict[str, str] | None = None, link: Path = Path("/etc/localtime")) -> str | None:
    """The name of the zone that this machine shows its user; None where it is not known by a name."""
    named = (os.environ if environment is None else environment).get("TZ", "").lstrip(":")
    if named:
        return named if named in available_timezones() else None
    target = str(link.resolve())
    _, found, name = target.partition("zoneinfo/")
    return name if found and name in available_timezones() else None


def rhythm(every: Every, at: time | None, zone: str, now: datetime) -> Rhythm:
    """From now on at once, or from the next `at` of the zone on."""
    now = now.replace(second=0, microsecond=0)
    if not every.is_of_days:
        return Rhythm(every=every, first=now.astimezone(UTC).isoformat(), zone=zone)
    wall = now.astimezone(zone_of(zone)).replace(tzinfo=None, fold=0)
    first = wall if at is None else _next(at, wall)
    return Rhythm(every=every, first=first.isoformat(timespec="minutes"), zone=zone)


def _next(at: time, wall: datetime) -> datetime:
    day: date = wall.date() if at >= wall.time() else wall.date() + timedelta(days=1)
    return datetime.combine(day, at)


def quiet_until(hours: tuple[QuietHours, ...], zone: str, now: datetime) -> str | None:
    """The wall time at which the quiet hours of now end, and those that begin before they do; None where it is not
    quiet."""
    wall, until = now.astimezone(zone_of(zone)).time(), None
    for _ in hours:
        until = next((one.until for one in hours if one.holds(wall)), None) or until
        wall = wall if until is None else time.fromisoformat(until)
    return until


def are_all_day(hours: Sequence[QuietHours]) -> bool:
    """Whether no time of day is left: each of them ends in another one."""
    ends = [time.fromisoformat(one.until) for one in hours]
    return bool(ends) and all(any(one.holds(end) for one in hours) for end in ends)
