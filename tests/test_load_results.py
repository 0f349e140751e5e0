"""What tables and reports say of requests that arrive by themselves, and of arms that were not asked the same."""

from __future__ import annotations

from typing import Any

import pytest

from results import tables
from results.compare import UnlikeError, compare_trials
from results.records import Completion
from results.report.against import ASKED_OTHERWISE
from results.report.arms import arms_of
from results.report.figure_tables import asked_of, figure_tables
from results.report.html import html_text
from results.report.page_units import PageUnits
from results.report.standings import device_groups
from results.run_notes import run_notes
from results.runs import RunData
from results.same_requests import asked_alike, unlike_notes
from results.summary import summary
from results.trial_tables import request_frames, trials
from results.trials import Trial
from tests.run_builders import cell, completion, failed, power_trace, reading, run, trial

LOAD = ("queueing", "ttft_from_arrival", "e2e_from_arrival", "utilisation")


def arrived(name: str, arrival_s: float, start_s: float, *token_times_s: float) -> Completion:
    return completion(name, start_s, 4, token_times_s).model_copy(update={"arrival_s": arrival_s})


def loaded(repeat: int = 0, **changes: Any) -> Trial:
    """A window of 20 s: two requests come at 1 s and 2 s, the engine works from 1 to 4 and from 4 to 6."""
    completions = [arrived("a", 1.0, 1.0, 2.0, 4.0), arrived("b", 2.0, 4.0, 5.0, 6.0)]
    fields: dict[str, Any] = {"completions": completions, "window_start_s": 0.0, "window_end_s": 20.0}
    return trial(repeat=repeat, **(fields | changes))


def rows(data: RunData) -> dict[str, Any]:
    frame = tables.latency(data)
    return {str(r["metric"]): r for r in frame.to_dict("records") if r["cell"] == "c1"}


def test_waits_and_utilisation_under_load_have_rows_of_their_own() -> None:
    found = rows(run([cell()], [loaded()]))
    assert (found["queueing"]["mean"], found["queueing"]["unit"]) == ((0.0 + 2.0) / 2, "s")
    assert (found["ttft_from_arrival"]["mean"], found["ttft_from_arrival"]["phase"]) == ((1.0 + 3.0) / 2, "prefill")
    assert (found["e2e_from_arrival"]["mean"], found["e2e_from_arrival"]["phase"]) == ((3.0 + 4.0) / 2, "all")
    assert (found["ttft"]["mean"], found["e2e"]["mean"]) == (
        1.0,
        (3.0 + 2.0) / 2,
    )  # the engine's own, without the queue
    assert (found["utilisation"]["mean"], found["utilisation"]["unit"]) == (100 * 5 / 20, "%")
    assert {found[metric]["method"] for metric in LOAD} == {"measured"}


def test_an_interval_of_a_share_ends_at_100_percent() -> None:
    """Student's of 25 and 100 % is 62.5 -+ 476: no engine is busy for more than the window."""
    found = rows(run([cell()], [loaded(), loaded(1, window_start_s=1.0, window_end_s=6.0)]))["utilisation"]
    assert (found["mean"], found["ci_low"], found["ci_high"]) == (62.5, 0, 100)


def test_a_tail_of_waits_is_pooled_over_all_requests() -> None:
    # 2 x 50 waits of 0, 1, ..., 99 s: linear interpolation gives p90 = 89.1 s, p99 = 98.01 s.
    trials = [
        trial(
            repeat=repeat,
            completions=[arrived(f"r{w}", 0.0, float(w), w + 1.0) for w in range(50 * repeat, 50 * repeat + 50)],
            window_start_s=0.0,
            window_end_s=101.0,
        )
        for repeat in range(2)
    ]
    found = rows(run([cell()], trials))["queueing"]
    assert found["mean"] == pytest.approx((24.5 + 74.5) / 2)
    assert (found["p90"], found["p99"]) == pytest.approx((89.1, 98.01))


def test_a_closed_loop_has_no_rows_of_load() -> None:
    data = run([cell()], [trial()])
    assert not set(LOAD) & set(rows(data))
    columns = ["queueing_ms", "ttft_from_arrival_ms", "e2e_from_arrival_ms", "utilisation_percent"]
    assert summary(data)[columns].isna().all(axis=None)
    (single,) = request_frames(data)
    columns = ["arrival_s", "queueing_s", "ttft_from_arrival_s", "e2e_from_arrival_s"]
    assert single[columns].isna().all(axis=None)


def test_waits_are_latencies_and_no_accuracies() -> None:
    data = run([cell()], [loaded()])
    assert tables.accuracy(data).empty
    wide = summary(data).iloc[0]
    assert (wide["queueing_ms"], wide["ttft_from_arrival_ms"], wide["utilisation_percent"]) == (1000, 2000, 25)
    assert wide["e2e_from_arrival_ms"] == 3500
    (single,) = request_frames(data)
    assert list(single["arrival_s"]) == [1.0, 2.0]
    assert list(single["queueing_s"]) == [0.0, 2.0]
    assert list(single["ttft_from_arrival_s"]) == [1.0, 3.0]
    assert list(single["e2e_from_arrival_s"]) == [3.0, 4.0]


def test_arrivals_in_the_table_count_from_the_windows_start() -> None:
    late = [arrived("a", 501.0, 501.5, 502.0)]
    data = run([cell()], [trial(completions=late, window_start_s=500.0, window_end_s=503.0)])
    (single,) = request_frames(data)
    assert list(single["arrival_s"]) == [1.0]


def test_the_tables_of_figures_show_load_where_there_is_some() -> None:
    def groups(data: RunData) -> set[str]:
        frame = tables.tidy(data)
        found = figure_tables(data, frame, arms_of(data.cells), PageUnits(frame))
        return {title for table in found for title, _ in table.groups}

    both = run([cell("c1"), cell("c2")], [loaded(), failed("c2")])
    titles = {"Queueing", "TTFT + queueing", "E2E + queueing"}
    assert titles <= groups(both)
    assert not titles & groups(run([cell()], [trial()]))
    assert "TTFT + queueing" in html_text(both)


def test_a_request_of_a_batch_has_no_joules_of_its_own() -> None:
    together = [
        completion("a", 0.0, 4, (1.0, 2.0)),
        completion("b", 0.0, 4, (1.5, 2.0)),
        completion("c", 2.0, 4, (3.0,)),
    ]
    trace = power_trace(4.0, 10.0, "nvml", "integrated power")
    data = run([cell()], [trial(completions=together, energy=(reading(),))], {"c1-t0": [trace]})
    (single,) = request_frames(data)
    assert list(single["energy_j"].isna()) == [True, True, False]
    assert set(single["energy_reason"][:2]) == {"answered in a batch of 2: its joules cannot be told from the others'"}
    assert list(single["energy_method"]) == ["missing", "missing", "integrated power"]


# --- who was asked what -----------------------------------------------------------------------------------------------


def asked(cell_id: str, digest: str | None, repeat: int = 0, end_s: float = 2.0) -> Trial:
    done = [completion("s", 0.0, 4, (1.0, end_s))]
    return trial(cell_id, repeat, completions=done, requests_sha256=digest)


def two_arms(first: str | None, second: str | None) -> RunData:
    cells = [cell("c1"), cell("c2", technique="other")]
    trials = [asked("c1", first, r, 2.0 + 0.01 * r) for r in range(3)]
    return run(cells, [*trials, *(asked("c2", second, r, 4.0 + 0.03 * r) for r in range(3))])


SAME, OTHER = "3fa94c127f01" + "0" * 52, "77c1" + "0" * 60


def test_arms_asked_the_same_show_its_hash_once() -> None:
    data = two_arms(SAME, SAME)
    assert asked_alike(data) == {"gsm8k": True}
    assert unlike_notes(data) == []
    (asked_once,) = asked_of(data, arms_of(data.cells))
    assert asked_once.requests == "requests 3fa94c127f01"
    assert "requests 3fa94c127f01" in html_text(data)
    assert set(summary(data)["requests_sha256"]) == set(trials(data)["requests_sha256"]) == {SAME}
    ((group, _),) = device_groups(data, tables.tidy(data))
    assert group.verdicts["time"].is_certain


def test_arms_asked_otherwise_are_told_and_none_is_named_fastest() -> None:
    data = two_arms(SAME, OTHER)
    assert asked_alike(data) == {"gsm8k": False}
    assert unlike_notes(data)[0].startswith("gsm8k: the arms were not asked the same requests")
    (asked_twice,) = asked_of(data, arms_of(data.cells))
    assert "reference, on-demand, host: requests 3fa94c127f01; reference, other, host: requests 77c1" in (
        asked_twice.requests
    )
    assert "not asked the same requests" in html_text(data)
    ((group, _),) = device_groups(data, tables.tidy(data))
    assert not group.verdicts["time"].is_certain
    assert group.verdicts["time"].rivals[0].why == ASKED_OTHERWISE
    with pytest.raises(UnlikeError, match="not asked the same requests"):
        compare_trials(data.trials[:3], data.trials[3:], "e2e", "all")


def test_repeats_of_one_arm_that_differ_are_told_too() -> None:
    data = run([cell()], [asked("c1", SAME, 0), asked("c1", OTHER, 1)])
    assert asked_alike(data) == {"gsm8k": False}
    assert summary(data)["requests_sha256"].item() == f"{SAME} {OTHER}"


def test_runs_of_before_the_hash_are_taken_for_alike() -> None:
    data = two_arms(None, None)
    assert unlike_notes(data) == []
    (asked_before,) = asked_of(data, arms_of(data.cells))
    assert asked_before.requests == "requests not recorded"
    assert summary(data)["requests_sha256"].isna().all()


def test_a_baseline_that_went_onto_no_device_is_told() -> None:
    """Another arm stood in its place, without a word."""
    told = "the plan's baseline, bf16, has no cell in this run: arms are told as times another."

    def notes(baseline: str | None, arm: str) -> list[str]:
        data = run([cell(engine=arm)], [trial()])
        plan = data.info.plan | ({} if baseline is None else {"baseline": baseline})
        info = data.info.model_copy(update={"plan": plan})
        return run_notes(RunData(info, data.cells, data.trials, data.load_traces))

    assert told in notes("bf16", "dropless")
    for baseline, arm in (("bf16", "bf16"), ("bf16", "bf16[threads=1]"), (None, "dropless")):
        assert told not in notes(baseline, arm)


def test_notes_of_repeats_that_count_otherwise_stand_in_one_line() -> None:
    """Of a server each repeat had a line of its own: thirty repeats, thirty lines that said the same."""
    shared = "{} of {} tokens came together with others"
    repeats = [trial(repeat=i, notes=(shared.format(n, 20), "2 of 2 began late")) for i, n in enumerate((12, 6, 8))]
    (workload,) = {cell().workload}
    assert run_notes(run([cell()], repeats))[:2] == [
        f"{workload}: 6 to 12 of 20 tokens came together with others.",
        f"{workload}: 2 of 2 began late.",
    ]


def test_a_cell_left_out_is_told_in_the_report() -> None:
    data = run([cell()], [trial()])
    info = data.info.model_copy(update={"left_out": ("fixed_lengths[prompt_tokens=65536]: 4 of 4 requests skipped",)})
    assert "left out: fixed_lengths[prompt_tokens=65536]: 4 of 4 requests skipped." in html_text(
        RunData(info, data.cells, data.trials, data.load_traces)
    )
