"""A run is followed on a terminal, and can be read back from a log."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from harness.progress import LiveProgress, PlainProgress, WaitLines, outcome
from tests import run_builders as build


def test_a_log_has_a_line_a_trial_and_says_what_was_resumed() -> None:
    text = io.StringIO()
    progress = PlainProgress(Console(file=text, width=40))
    with progress:
        progress.begin(n_trials=5, n_done=2)
        progress.trial_finished("arm · boolq · host", build.trial(energy=[build.reading()]))
        progress.cell_finished("arm · boolq · host", n_trials_left_out=1)
        progress.trial_finished("arm · boolq · host", build.failed(error="[red]gone[/red]"))
    assert text.getvalue().splitlines() == [
        "resuming: 2 of 5 trials are there",
        "[3/5] arm · boolq · host · trial 1 · 1.5 s · 1 request · 6 J counter",
        "arm · boolq · host: interval is narrow enough, 1 trial not needed",
        "[4/4] arm · boolq · host · trial 1 · FAILED: [red]gone[/red]",
    ]
    tried = build.failed(error="the line is gone", attempts=3)
    assert outcome(tried) == "FAILED after 3 attempts: the line is gone"


def test_rounds_are_counted_without_an_end_that_nobody_knows() -> None:
    text = io.StringIO()
    progress = PlainProgress(Console(file=text, width=40))
    progress.begin(n_trials=0, n_done=0)
    for _ in range(2):
        progress.trials_added(1)
        progress.trial_finished("arm · boolq · host", build.trial())
    assert [line.split()[0] for line in text.getvalue().splitlines()] == ["[1]", "[2]"]


def test_rounds_that_are_there_are_not_told_as_more_than_all() -> None:
    """It said "resuming: 53 of 50 trials are there": 50 of an arm that had ended, and 3 of one that had not."""
    text = io.StringIO()
    PlainProgress(Console(file=text, width=60)).begin(n_trials=53, n_done=53)
    assert text.getvalue() == "resuming: 53 trials are there\n"


def test_a_terminal_keeps_only_what_failed() -> None:
    text = io.StringIO()
    progress = LiveProgress(Console(file=text, force_terminal=True, width=100))
    with progress:
        progress.begin(n_trials=3, n_done=1)
        progress.preparing("arm")
        progress.trial_started("arm", 0)
        progress.trial_finished("arm", build.trial())
        progress.trial_finished("arm", build.failed(error="out of [memory]"))
    lines = [line for line in text.getvalue().splitlines() if "failed:" in line]
    assert len(lines) == 1
    assert lines[0].endswith("failed: arm · trial 1: out of [memory]")
    assert "3/3" in text.getvalue()


def test_a_log_says_once_what_is_waited_for_and_why_a_trial_is_taken_again() -> None:
    text = io.StringIO()
    progress = PlainProgress(Console(file=text, width=40))
    for left_s, battery_c in ((600.0, 43.1), (595.0, 43.0), (590.0, 42.8)):
        progress.waiting("adb:R58M", f"the battery is at {battery_c} degC", left_s)
    progress.trial_started("arm", 0)
    progress.trial_repeated("arm", 0, "other processes took 50 % of the CPU")
    progress.waiting("adb:R58M", "the battery is at 43.1 degC", 600.0)
    waits = "adb:R58M: the battery is at 43.1 degC; waiting, at most 600 s"
    assert text.getvalue().splitlines() == [
        waits,
        "arm · trial 1 · again: other processes took 50 % of the CPU",
        waits,
    ]


def test_a_long_wait_shows_a_sign_of_life_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    lines: list[str] = []
    waits = WaitLines(lines.append)
    for left_s in range(600, 0, -5):
        waits.waiting("adb:R58M", "a charger is on", float(left_s))
        now_s[0] += 5.0
    assert lines == [f"adb:R58M: a charger is on; waiting, at most {left_s} s" for left_s in range(600, 0, -60)]


@pytest.mark.parametrize("device", ["ios:", "adb:"])
def test_the_only_phone_in_reach_is_told_with_one_colon(device: str) -> None:
    lines: list[str] = []
    WaitLines(lines.append).waiting(device, "a charger is on", 5.0)
    assert lines == [f"{device} a charger is on; waiting, at most 5 s"]


def test_a_terminal_counts_down_also_before_the_run_begins() -> None:
    text = io.StringIO()
    with LiveProgress(Console(file=text, force_terminal=True, width=120)) as progress:
        progress.waiting("adb:R58M", "the battery is at 43.1 degC", 595.4)
        progress._bar.refresh()
        assert "adb:R58M · gives up in 9:55 · the battery is at 43.1 degC" in text.getvalue()
        progress.begin(n_trials=2, n_done=0)
        progress.trial_repeated("arm", 1, "link dropped")
        progress._bar.refresh()
        assert "arm · trial 2 · again: link dropped" in text.getvalue()


def test_an_outcome_says_method_and_what_is_missing() -> None:
    assert outcome(build.trial()) == "1.5 s · 1 request · no meter"
    unresolved = build.reading(energy_j=None, reason="unresolved, the window is 3 ms")
    assert outcome(build.trial(energy=[unresolved])).endswith("no energy: unresolved, the window is 3 ms")
    modelled = build.trial(time_method="modelled", energy=[build.reading(method="modelled")])
    assert outcome(modelled) == "1.5 s modelled · 1 request · 6 J modelled"
