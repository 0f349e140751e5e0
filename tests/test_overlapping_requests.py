"""A request takes longer in a batch, whose window may be shorter: tables give both, and call neither arm faster."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from harness.history_command import figures_told
from harness.summary import print_summary
from results.history.points import cell_points, run_point
from results.records import Completion, Score
from results.report.csv import write_csv
from results.report.html import html_text, page_context
from results.run_frames import RunFrames
from results.runs import RunData
from results.trials import Trial
from tests.run_builders import completion, reading, run, trial
from tests.test_standings import groups, named, noisy, screen, standing


def one_by_one(s: float) -> list[Completion]:
    """Four requests of so many seconds."""
    return [completion(f"s{i}", i * s, token_times_s=(i * s + s / 2, (i + 1) * s)) for i in range(4)]


def together(s: float) -> list[Completion]:
    """Four that begin and end at once."""
    return [completion(f"s{i}", 0.0, token_times_s=(s / 2, s)) for i in range(4)]


def trials_of(name: str, repeats: list[list[Completion]]) -> list[Trial]:
    return [trial(name, i, completions=own) for i, own in enumerate(repeats)]


def batched(batch_s: float, n_repeats: int = 4, first_batched: bool = False) -> RunData:
    """First: 1 s a request, so 4 s a window. Second: a batch of four that takes so long."""
    first = trials_of("first", [one_by_one(s) for s in noisy(1.0)[:n_repeats]])
    second = trials_of("second", [together(s) for s in noisy(batch_s, -1)[:n_repeats]])
    cells = named("second", "first") if first_batched else named("first", "second")
    return run(cells, [*first, *second])


def test_a_batch_whose_window_is_shorter_is_not_told_as_slower(tmp_path: Path) -> None:
    """3 s a request and 3 s a window, against 1 s and 4 s."""
    data = batched(3.0)
    ((group, _),) = groups(data)
    found = standing(group, "second", "time")
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(3.0, rel=0.03)
    assert found.ratio.is_clear, "the mean request does take longer"
    assert not found.is_certain
    assert found.remark == "requests of second overlap: the whole window took 0.75× that of first"
    page = screen(data)
    assert page.table.headings[0].title == "Time of a request"
    assert page.sentences[0] == (
        False,
        "Fastest: not certain between first, second (their requests overlap, and second and first stand the other way"
        " round by their windows).",
    )
    assert "the whole window took 0.75× that of first" in html_text(data)
    write_csv(data, tmp_path)
    arms = pd.read_csv(tmp_path / "arms.csv").query("arm == 'second' and quantity == 'time'").iloc[0]
    assert not arms["certain_difference"]
    assert "the whole window took 0.75× that of first" in arms["reason"]
    told = io.StringIO()
    print_summary(RunFrames(data), Console(file=told, width=160))
    assert "Time of a request, measured" in told.getvalue()
    assert "the whole window took 0.75× that of first" in told.getvalue()


def test_a_baseline_whose_requests_overlap_is_told_in_every_other_row() -> None:
    ((group, _),) = groups(batched(3.0, first_batched=True))
    windows = f"{4 * sum(noisy(1.0)) / sum(noisy(3.0, -1)):.2f}"
    told = standing(group, "first", "time").remark
    assert told == f"requests of second overlap: the whole window took {windows}× that of second"


def test_a_batch_that_is_slower_by_both_stays_slower_for_certain() -> None:
    data, windows = batched(5.0), f"{sum(noisy(5.0, -1)) / (4 * sum(noisy(1.0))):.2f}"
    ((group, _),) = groups(data)
    assert standing(group, "second", "time").is_certain
    assert group.verdicts["time"].is_certain
    assert (standing(group, "second", "time").remark or "").endswith(f"{windows}× that of first")


def test_one_repeat_says_that_its_window_is_of_one() -> None:
    ((group, _),) = groups(batched(3.0, n_repeats=1))
    assert (standing(group, "second", "time").remark or "").endswith(", in one repeat")


def test_requests_that_arrive_by_themselves_have_windows_of_their_arrivals() -> None:
    """Both windows are as long as the arrivals: what counts is how long a request takes."""
    first, second = (
        [
            trial(name, i, completions=[c.model_copy(update={"arrival_s": 0.0}) for c in own])
            for i, own in enumerate([together(s) for s in seconds])
        ]
        for name, seconds in (("first", noisy(1.0)), ("second", noisy(3.0, -1)))
    )
    ((group, _),) = groups(run(named("first", "second"), [*first, *second]))
    assert standing(group, "second", "time").remark is None
    assert standing(group, "second", "time").is_certain


def arriving(is_scored: bool = False) -> RunData:
    """Four come at once. First takes one by one, for 1 s each; second takes them together, for 2 s."""

    def at_once(completions: list[Completion]) -> list[Completion]:
        return [c.model_copy(update={"arrival_s": 0.0}) for c in completions]

    first = trials_of("first", [at_once(one_by_one(s)) for s in noisy(1.0)])
    second = trials_of("second", [at_once(together(s)) for s in noisy(2.0, -1)])
    scores = (
        *(Score(metric="acc", value=1.0, sample_id=f"s{i}") for i in range(4)),
        Score(metric="acc", value=1.0, stderr=0.1, n=4),
    )
    more: dict[str, object] = {"window_start_s": 0.0, "window_end_s": 20.0, "energy": (reading(),)}
    more |= {"scores": scores} if is_scored else {}
    cells = [c.model_copy(update={"reference_id": "first"}) for c in named("first", "second")]
    return run(cells, [t.model_copy(update=more) for t in (*first, *second)])


def test_an_arm_that_keeps_requests_waiting_is_not_faster_than_one_that_takes_them_together(tmp_path: Path) -> None:
    """Four come at once. One by one an engine has each for 1 s, and they are answered after 1, 2, 3 and 4 s; together
    it has each for 2 s, and all are answered after 2 s: 0.8 times as long, and not twice."""

    data = arriving()
    ((group, _),) = groups(data)
    found = standing(group, "second", "time")
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(2.0 / 2.5, rel=0.03)
    assert found.is_best
    page = screen(data)
    assert page.table.headings[0].below == "measured, with the queue"
    (panel,) = page.panels
    assert "E2E + queueing" in str(panel), "the picture is of the same seconds"
    write_csv(data, tmp_path)
    arms = pd.read_csv(tmp_path / "arms.csv")
    assert set(arms.query("with_queue")["quantity"]) == {"time"}
    assert set(arms.query("not with_queue")["quantity"]) == set(arms["quantity"]) - {"time"} != set()
    assert screen(batched(3.0)).table.headings[0].below == "measured", (
        "of requests that do not arrive there is no queue"
    )


def test_the_list_of_runs_counts_the_time_from_the_arrival_as_the_verdict_does() -> None:
    """Answered after 1 to 4 s, or all after 2 s: 2.5 s and 2 s a request. By the engine's own time it said 1 to 2 s."""
    data = arriving()
    told = figures_told(run_point(data, "monday", cell_points(data)))
    ends = sum(noisy(2.0, -1)) / 4, 2.5 * sum(noisy(1.0)) / 4
    assert told.startswith(f"time of a request, with the queue {ends[0]:.2f} to {ends[1]:.2f} s; energy of a request")
    alone = batched(3.0)
    assert figures_told(run_point(alone, "monday", cell_points(alone))).startswith("time of a request 1.0")


def test_times_beside_the_accuracy_count_from_the_arrival() -> None:
    """The first tokens come after 0.5, 1.5, 2.5 and 3.5 s, or all after 1 s: half as late, and not twice."""
    data = arriving(is_scored=True)
    compared = RunFrames(data).compared.query("cell == 'second'").set_index("quantity")
    assert compared.loc["e2e_from_arrival", "change_percent"] == pytest.approx(-20, abs=3)
    assert compared.loc["ttft_from_arrival", "change_percent"] == pytest.approx(-50, abs=3)
    assert compared.loc["ttft_from_arrival", "n_pairs"] == 4
    assert not {"e2e", "ttft"} & set(compared.index)
    (table,) = page_context(data)["accuracy_tables"]
    assert [row.ttft.text for row in table.rows] == ["2.00", "1.00"]
    assert "TTFT + queueing<span" in html_text(data)


def test_requests_one_after_another_have_no_second_ratio() -> None:
    cells = named("first", "second")
    data = run(cells, [*trials_of("first", [one_by_one(1.0)]), *trials_of("second", [one_by_one(2.0)])])
    ((group, _),) = groups(data)
    assert standing(group, "second", "time").remark is None
