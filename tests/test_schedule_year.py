"""A year of a schedule on a fake clock: irregular looks, kills at every step, a clock set back and ahead."""

from __future__ import annotations

import os
import random
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from harness.schedule.entries import Book, Entry, Kept
from harness.schedule.times import Every, QuietHours, Rhythm, zone_of
from tests.fakes.schedule_world import START, Killed, LoseAnything, MortalBook, entry, one_pass

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
    assert deadly or max(world.ended.values()) <= 2, "what was lost is measured again once"


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
