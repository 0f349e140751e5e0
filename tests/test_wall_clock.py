"""A run whose wall clock was set back while it went on: its tables and its history say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from results.store import Store
from results.wall_clock import told_set_back
from tests.command import joulebench
from tests.histories import made_trial, write_run
from tests.run_builders import cell, failed

DROPLESS = cell("cell0000", engine="dropless", label="dropless")
BACK = (
    "the wall clock of host went back by 2.0 hours within the run: a trial began at 2026-01-01 12:00:00+00:00, and the"
    " one after it at 2026-01-01 10:00:00+00:00."
)


def written(folder: Path, *started_at: str) -> Path:
    trials = [made_trial("cell0000", i, 1.0, started_at=at) for i, at in enumerate(started_at)]
    return write_run(folder, [DROPLESS], trials)


def test_a_clock_that_was_set_back_within_a_run_is_told_by_report_and_history(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", "2026-01-01T11:00:00Z", "2026-01-01T12:00:00Z", "2026-01-01T10:00:00Z")
    with Store.open(folder) as store:
        (remark,) = store.data().remarks
    assert remark.startswith(BACK)
    history = joulebench("history", str(tmp_path))
    assert f"run: {BACK}" in history.stdout
    joulebench("report", str(folder))
    assert BACK in (folder / "report.html").read_text().replace("&#43;", "+")


@pytest.mark.parametrize(
    "started_at",
    [
        ("2026-01-01T11:00:00Z", "2026-01-01T11:00:00Z", "2026-01-02T12:00:00Z"),
        ("2026-01-01T11:00:00.500Z", "2026-01-01T11:00:00Z"),  # as clocks are set all the time
        ("", "no date", "2026-01-01T11:00:00"),
        # The same instant in two zones.
        ("2026-01-01T11:00:00+00:00", "2026-01-01T12:00:00+01:00"),
    ],
)
def test_a_clock_that_went_on_is_not_told(tmp_path: Path, started_at: tuple[str, ...]) -> None:
    with Store.open(written(tmp_path / "run", *started_at)) as store:
        assert store.data().remarks == ()


def test_each_device_has_its_own_clock_and_who_gave_a_trial_up_another() -> None:
    other = cell("cell0001", device="phone")
    trials = [
        made_trial("cell0001", 0, 1.0, started_at="2026-01-01T12:00:00Z"),
        made_trial("cell0000", 0, 1.0, started_at="2026-01-01T11:00:00Z"),
        failed("cell0000", 1, started_at="2026-01-01T09:00:00Z"),
        made_trial("cell0001", 1, 1.0, started_at="2026-01-01T12:00:05Z"),
        made_trial("cell0000", 2, 1.0, started_at="2026-01-01T11:00:05Z"),
    ]
    assert told_set_back([DROPLESS, other], trials) == ()
