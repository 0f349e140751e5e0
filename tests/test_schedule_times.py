"""Intervals, wall times through summer and winter time, quiet hours over midnight: against instants known from tz data.

Changes of 2026 (IANA tz 2025b): Berlin 29 March 02:00 and 25 October 03:00; New York 8 March and 1 November 02:00; Lord
Howe moves by half an hour, on 5 April and 4 October at 02:00. Samoa had no 30 December 2011.
"""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.schedule.times import (
    Every,
    QuietHours,
    Rhythm,
    TimeError,
    are_all_day,
    local_zone,
    parse_clock,
    parse_every,
    parse_quiet,
    quiet_until,
    rhythm,
)

DAY = Every(n=1, unit="d")


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("zone", "first", "number", "instant"),
    [
        ("Europe/Berlin", "2026-03-28T02:30", 0, "2026-03-28T01:30"),
        ("Europe/Berlin", "2026-03-28T02:30", 1, "2026-03-29T01:30"),  # there is no 02:30: 03:30 in summer time
        ("Europe/Berlin", "2026-03-28T02:30", 2, "2026-03-30T00:30"),
        ("Europe/Berlin", "2026-10-24T02:30", 1, "2026-10-25T00:30"),  # the first of two
        ("Europe/Berlin", "2026-10-24T02:30", 2, "2026-10-26T01:30"),
        ("America/New_York", "2026-03-07T02:30", 1, "2026-03-08T07:30"),
        ("America/New_York", "2026-10-31T01:30", 1, "2026-11-01T05:30"),
        ("America/New_York", "2026-10-31T01:30", 2, "2026-11-02T06:30"),
        ("Australia/Lord_Howe", "2026-10-03T02:15", 1, "2026-10-03T15:45"),
        ("Australia/Lord_Howe", "2026-10-03T02:15", 2, "2026-10-04T15:15"),
    ],
)
def test_days_are_of_the_wall_clock(zone: str, first: str, number: int, instant: str) -> None:
    assert Rhythm(every=DAY, first=first, zone=zone).at(number) == utc(instant)


def test_hours_are_elapsed_time() -> None:
    found = rhythm(Every(n=12, unit="h"), None, "Europe/Berlin", utc("2026-03-28T12:00:40"))
    assert [found.at(n) for n in range(3)] == [
        utc("2026-03-28T12:00"), utc("2026-03-29T00:00"), utc("2026-03-29T12:00")
    ]  # fmt: skip


def test_a_day_that_a_zone_leaves_out_makes_no_time_twice() -> None:
    found = Rhythm(every=DAY, first="2011-12-28T02:00", zone="Pacific/Apia")
    assert [found.at(n) for n in range(5)] == [
        utc("2011-12-28T12:00"), utc("2011-12-29T12:00"), utc("2011-12-30T12:00"), utc("2011-12-30T12:00"),
        utc("2011-12-31T12:00"),
    ]  # fmt: skip
    assert found.latest(utc("2011-12-30T12:00")) == 3
    assert found.latest(utc("2011-12-30T11:59")) == 1


@given(
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia", "Asia/Kathmandu"]),
    st.integers(1, 40),
    st.times(),
    st.datetimes(datetime(2011, 1, 1), datetime(2027, 1, 1)),
)
def test_the_latest_time_is_the_last_that_has_come(zone: str, n: int, at: time, now: datetime) -> None:
    first = datetime.combine(datetime(2011, 6, 1), at.replace(second=0, microsecond=0))
    found = Rhythm(every=Every(n=n, unit="d"), first=first.isoformat(), zone=zone)
    latest = found.latest(now.replace(tzinfo=UTC))
    assert latest < 0 or found.at(latest) <= now.replace(tzinfo=UTC)
    assert latest < -1 or found.at(latest + 1) > now.replace(tzinfo=UTC)


def test_the_first_time_is_now_or_the_next_time_of_day() -> None:
    now = utc("2026-11-24T18:40:12")
    assert rhythm(DAY, None, "Europe/Berlin", now).at(0) == utc("2026-11-24T18:40")
    assert rhythm(DAY, time(19, 40), "Europe/Berlin", now).at(0) == utc("2026-11-24T18:40")
    assert rhythm(DAY, time(19, 39), "Europe/Berlin", now).at(0) == utc("2026-11-25T18:39")
    assert str(rhythm(Every(n=1, unit="w"), time(2, 30), "UTC", now)) == "every week on Wednesdays at 02:30 (UTC)"


@pytest.mark.parametrize(("text", "n", "unit"), [("1d", 1, "d"), (" 12 H", 12, "h"), ("30m", 30, "m"), ("2w", 2, "w")])
def test_an_interval(text: str, n: int, unit: str) -> None:
    assert parse_every(text) == Every(n=n, unit=unit)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "1", "d", "0d", "-1d", "1.5h", "1y", "1mo", "367d", "1d2h", "daily"])
def test_what_is_no_interval_is_told(text: str) -> None:
    with pytest.raises(TimeError) as caught:
        parse_every(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("22-06", ["22:00", "23:59", "00:00", "05:59"], ["06:00", "21:59", "12:00"]),
        ("9:30-17", ["09:30", "16:59"], ["09:29", "17:00", "00:00"]),
        ("00-06", ["00:00", "05:59"], ["06:00", "23:59"]),
    ],
)
def test_quiet_hours(text: str, inside: list[str], outside: list[str]) -> None:
    found = parse_quiet(text)
    assert all(found.holds(time.fromisoformat(one)) for one in inside)
    assert not any(found.holds(time.fromisoformat(one)) for one in outside)


@pytest.mark.parametrize("text", ["", "22", "22-", "22-22", "22:00-22", "24-6", "22-6-8", "22:60-6"])
def test_what_are_no_quiet_hours_is_told(text: str) -> None:
    with pytest.raises(TimeError, match=r"write two times of day, such as 22-06"):
        parse_quiet(text)


def test_quiet_hours_go_by_the_wall_clock_of_the_zone() -> None:
    hours = (QuietHours(since="22:00", until="06:00"),)
    assert quiet_until(hours, "Europe/Berlin", utc("2026-07-01T20:00")) == "06:00"
    assert quiet_until(hours, "Europe/Berlin", utc("2026-12-01T20:00")) is None
    # Both readings of 02:30 in the night that has it twice.
    assert quiet_until(hours, "Europe/Berlin", utc("2026-10-25T00:30")) == "06:00"
    assert quiet_until(hours, "Europe/Berlin", utc("2026-10-25T01:30")) == "06:00"


def test_quiet_hours_that_meet_end_where_the_last_of_them_does() -> None:
    hours = tuple(map(parse_quiet, ("02-06:30", "22-02", "05-06", "12-13")))
    ends = {at: quiet_until(hours, "UTC", utc(f"2026-07-01T{at}")) for at in ("22:00", "01:59", "05:30", "12:00")}
    assert ends == {"22:00": "06:30", "01:59": "06:30", "05:30": "06:30", "12:00": "13:00"}
    assert quiet_until(hours, "UTC", utc("2026-07-01T06:30")) is None


@pytest.mark.parametrize(
    ("texts", "is_so"),
    [
        (["00-12", "12-00"], True),
        (["20-08", "07-14", "13:59-20"], True),
        (["20-08", "07-14", "14-19:59"], False),
        (["22-06"], False),
        ([], False),
    ],
)
def test_hours_that_leave_no_time_of_day(texts: list[str], is_so: bool) -> None:
    assert are_all_day([parse_quiet(text) for text in texts]) is is_so


def test_the_zone_of_this_machine(tmp_path: Path) -> None:
    assert local_zone({"TZ": ":Europe/Berlin"}) == "Europe/Berlin"
    assert local_zone({"TZ": "CET-1CEST"}) is None
    link = tmp_path / "localtime"
    link.symlink_to("/usr/share/zoneinfo/Europe/Berlin")
    assert local_zone({}, link) == "Europe/Berlin"
    link.unlink()
    link.write_bytes(b"TZif2")
    assert local_zone({}, link) is None


def test_a_time_of_day_is_read_as_written() -> None:
    assert parse_clock("7") == time(7)
    with pytest.raises(TimeError, match=r"'7.30' is no time of day; write it as 02:30"):
        parse_clock("7.30")


def test_a_day_of_the_wall_clock_has_23_or_25_hours_once_a_year() -> None:
    found = Rhythm(every=DAY, first="2026-01-01T12:00", zone="Europe/Berlin")
    gaps = [found.at(n + 1) - found.at(n) for n in range(365)]
    assert sorted(gap for gap in gaps if gap != timedelta(days=1)) == [timedelta(hours=23), timedelta(hours=25)]
