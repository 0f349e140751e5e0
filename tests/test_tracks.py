"""Trace files and the timelines behind them: the format's rules, closed forms of time and joules, hostile names."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devices.models.operation import Operation
from results.copies import CopySpan, DecodeStep, LayerEnd, WaitSpan
from results.ran_operations import StoredOperations
from results.records import PowerTrace
from results.resources import resources_of, shown_resource
from results.store import Store
from results.trace_events import trace_document
from results.tracks import Timelines, operation_tracks, step_spans, timelines
from tests.command import joulebench
from tests.conftest import FinishedRun
from tests.plans import FAST, raw_plan, write_plan
from tests.run_builders import HOSTILE, completion
from tests.test_queues import gpu_work, queued
from tests.test_repricing import CPU_WORK, NPU_WORK, Modelled, run_on
from tests.test_resources import BACK_3_25_S, CPU_1_S, SHEET, STEPS
from tests.toy_sheet import toy_sheet

Event = dict[str, Any]


def of(made: Modelled) -> Timelines:
    one = made.trial
    assert one.window_start_s is not None
    assert one.window_end_s is not None
    return timelines((one.window_start_s, one.window_end_s), made.parts, one.completions, one.decode_steps)


def events(found: Timelines, title: str = "a step") -> list[Event]:
    """Through the text of a file, and checked against the rules that the format has for each event."""
    document = json.loads(json.dumps(trace_document(found, title, {"run": title}), allow_nan=False))
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    required = {
        "X": {"name": str, "cat": str, "ts": float, "dur": float, "pid": int, "tid": int, "args": dict},
        "C": {"name": str, "ts": float, "pid": int, "tid": int, "args": dict},
        "M": {"name": str, "pid": int, "tid": int, "args": dict},
    }
    for event in document["traceEvents"]:
        kinds = required[event["ph"]]
        assert set(event) == {"ph", *kinds}
        assert all(isinstance(event[key], kind) for key, kind in kinds.items())
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    found_events: list[Event] = document["traceEvents"]
    # Perfetto takes a thread with the number of its process for the main one, and shows it before the others.
    assert all(event["tid"] != event["pid"] for event in found_events if event["ph"] == "X")
    assert_apart(found_events)
    return found_events


def assert_apart(found: list[Event]) -> None:
    """Slices of a thread may nest, and never overlap in part: ours stand one after another."""
    threads = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((round(1000 * event["ts"]), round(1000 * event["dur"])))
    for own in threads.values():
        assert all(begin + length <= after for (begin, length), (after, _) in pairwise(sorted(own)))


def names(found: list[Event], what: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["ph"] == "M" and e["name"] == what}


def seconds_by_thread(found: list[Event]) -> dict[str, float]:
    threads, seconds = names(found, "thread_name"), defaultdict(float)
    for event in found:
        if event["ph"] == "X":
            seconds[threads[event["pid"], event["tid"]]] += event["dur"] / 1e6
    return dict(seconds)


def test_threads_last_as_long_as_units_and_links_were_busy() -> None:
    made = run_on(SHEET, STEPS)
    found = events(of(made))
    assert seconds_by_thread(found) == pytest.approx({"requests": 8.25, "cpu": 3.0, "gpu": 1.5, "pcie": 5.25}, abs=1e-8)
    busy = {shown_resource(r.resource): r.use.busy_s for r in resources_of(*made) if r.phase == "all" and r.use}
    assert {name: s for name, s in seconds_by_thread(found).items() if name in busy} == pytest.approx(busy, abs=1e-8)
    assert list(names(found, "process_name").values()) == ["requests", "units", "links", "power"]
    (copy,) = (event for event in found if event["name"] == "copy")
    assert (copy["ts"], copy["dur"]) == pytest.approx((1e6, 5.25e6))
    assert copy["args"] == {"launches": 1, "moved_bytes": 100.0, "joules": pytest.approx(0.8)}


def test_a_step_alone_is_cut_at_its_ends() -> None:
    """Results on their way when the token is known go on into the next step: of 3.25 s, 1 s and 2.25 s."""
    made = run_on(SHEET, [[CPU_1_S], [BACK_3_25_S, CPU_1_S], [CPU_1_S, CPU_1_S, CPU_1_S]])
    (done,) = made.trial.completions
    found = of(made)
    spans = step_spans(done)
    assert [end - begin for begin, end in spans] == pytest.approx([1.0, 1.0, 3.0])
    for (begin_s, end_s), back_s in zip(spans[1:], (1.0, 2.25), strict=True):
        step = events(found.between(begin_s, end_s))
        assert seconds_by_thread(step)["pcie (back)"] == pytest.approx(back_s)
        assert max(e["ts"] + e["dur"] for e in step if e["ph"] == "X") <= (end_s - begin_s) * 1e6 + 1e-3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 6), st.integers(-1, 3)), max_size=25),
    st.integers(-1, 21),
    st.integers(0, 10),
)
def test_a_stretch_of_operations_is_that_of_all(
    ran: list[tuple[int, int, int, int]], begin_s: int, lasting_s: int
) -> None:
    """Names and colours too: operations before it decide both, and one that reaches into it is cut."""
    stored = operations(sorted(ran, key=lambda one: one[1]))
    end_s = begin_s + lasting_s
    whole = Timelines(-np.inf, np.inf, operation_tracks(stored, -np.inf, np.inf))
    assert sum(len(track.slices) for track in whole.tracks if not track.name.startswith("launches")) <= len(ran)
    cut = Timelines(begin_s, end_s, operation_tracks(stored, begin_s, end_s))
    assert cut.between(begin_s, end_s) == whole.between(begin_s, end_s)
    assert all(one.end_s > begin_s and one.begin_s < end_s for track in cut.tracks for one in track.slices)


def operations(ran: list[tuple[int, int, int, int]]) -> StoredOperations:
    """Of each: which of four on two units and a link, when it began, how long it took and its launch before did."""
    names = [("a", "cpu"), ("b", "cpu"), ("a", "gpu"), ("copy", "bus")]
    places, starts_s, taken_s, launch_s = (np.array([one[i] for one in ran], dtype=np.float64) for i in range(4))
    return StoredOperations(
        names,
        [{"flops": place} for place in range(4)],
        [name == "copy" for name, _ in names],
        np.zeros(4),
        np.zeros(4),
        places.astype(np.int64),
        starts_s,
        starts_s + taken_s,
        np.zeros(len(ran)),
        (starts_s - launch_s, starts_s),
        [],
    )


def test_launches_that_are_queued_stand_on_a_track_of_their_own() -> None:
    """0.5 s each, one after another, while the unit works 4 s and then five times 0.1 s. None without a queue."""
    work = [gpu_work(4.0), *[gpu_work(0.1)] * 5]
    found = {track.name: track.slices for track in of(run_on(queued(8), [work])).tracks}
    begin_s = found["requests"][0].begin_s
    launches = [one.begin_s - begin_s for one in found["launches on gpu"]]
    assert launches == pytest.approx([0.5 * i for i in range(6)])
    assert all(one.end_s - one.begin_s == pytest.approx(0.5) for one in found["launches on gpu"])
    assert {one.name for one in found["launches on gpu"]} == {"launches work"}
    works = [(one.begin_s - begin_s, one.end_s - begin_s) for one in found["gpu"]]
    assert works[:2] == [pytest.approx((0.5, 4.5)), pytest.approx((4.5, 4.6))], "what was launched meanwhile waits"
    assert not any("launches" in track.name for track in of(run_on(SHEET, STEPS)).tracks)


def test_power_times_time_is_the_joules() -> None:
    """16 J of the CPU in 2 s, then 1.4 J of the NPU in 0.8 s; 1 W of communication all along."""
    found = of(run_on(toy_sheet(), [[CPU_WORK], [NPU_WORK]]))
    by_name = {one.name: one for one in found.power}
    assert list(by_name) == ["timeline cpu", "timeline npu", "timeline comm"]
    joules = {name: float(np.sum(one.values * np.diff([*one.times_s, found.end_s]))) for name, one in by_name.items()}
    assert joules == pytest.approx({"timeline cpu": 16.0, "timeline npu": 1.4, "timeline comm": 2.8})
    assert by_name["timeline cpu"].values == pytest.approx([8.0, 0.0])
    assert len(by_name["timeline comm"].times_s) == 1  # the same watts are told once
    counters = [event for event in events(found) if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {f"{name} (W)" for name in by_name}


def trace(kind: Any, times_s: list[float], values: list[float], **changes: Any) -> PowerTrace:
    return PowerTrace("m", "cpu", kind, "hardware counter", np.array(times_s), np.array(values), 0.1, **changes)


@pytest.mark.parametrize(
    ("given", "watts"),
    [
        (trace("counter", [0.0, 1.0, 3.0], [0.0, 5.0, 7.0]), [(0.0, 5.0), (1.0, 1.0)]),
        (trace("counter", [0.0, 1.0, 2.0], [90.0, 98.0, 4.0], wrap_at_j=100.0), [(0.0, 8.0), (1.0, 6.0)]),
        (trace("power", [0.0, 1.0, 2.0], [3.0, float("nan"), 4.0]), [(0.0, 3.0), (2.0, 4.0)]),
        (trace("raw", [0.0, 1.0], [3.0, 4.0]), []),
        (trace("counter", [0.0, 1.0], [float("nan")] * 2), []),
    ],
)
def test_readings_become_watts_from_then_on(given: PowerTrace, watts: list[tuple[float, float]]) -> None:
    found = timelines((0.0, 2.5), {"window": [given]})
    assert [pair for one in found.power for pair in zip(one.times_s, one.values, strict=True)] == watts


def test_watts_of_a_difference_are_told_without_its_rounding() -> None:
    """1.5 J in 0.075 s are 20 W; the differences of the joules and of the times give 1.2e-11 less."""
    given = trace("counter", [1000.0, 1000.075], [5000.0, 5001.5])
    (one,) = timelines((1000.0, 1000.075), {"window": [given]}).power
    assert one.values[0] != 20.0
    counters = [event for event in events(timelines((1000.0, 1000.075), {"window": [given]})) if event["ph"] == "C"]
    assert [event["args"] for event in counters] == [{"W": 20.0}]


def test_steps_of_a_measured_engine_end_when_their_tokens_are_known() -> None:
    step = DecodeStep(
        duration_s=0.4,
        layers=(LayerEnd(layer=0, end_s=0.2), LayerEnd(layer=1, end_s=0.35)),
        waits=(WaitSpan(layer=0, begin_s=0.05, end_s=0.15),),
        copies=(CopySpan(layer=0, begin_s=0.02, end_s=0.15, n_experts=2, n_bytes=50, is_ahead=False),),
    )
    done = completion("s", 0.0, token_times_s=(1.0, 1.5, 1.9))
    found = events(timelines((0.0, 2.0), {}, [done], [step, step]))
    assert seconds_by_thread(found) == pytest.approx({"requests": 1.9, "computes": 0.8, "copies": 0.26})
    told = [(e["name"], round(e["ts"]), round(e["dur"])) for e in found if e["ph"] == "X" and e["cat"] == "threads"]
    assert told[:5] == [
        ("computes layer 0", 1_100_000, 50_000),
        ("waits for layer 0", 1_150_000, 100_000),
        ("computes layer 0", 1_250_000, 50_000),
        ("computes layer 1", 1_300_000, 150_000),
        ("computes what follows the last layer with experts", 1_450_000, 50_000),
    ]
    assert told[5][1] == 1_500_000  # the second step begins where the first one's token was known
    assert ("copies 2 of layer 0 on demand", 1_120_000, 130_000) in told


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 5)), min_size=1, max_size=12))
def test_requests_that_overlap_stand_beside_each_other(spans: list[tuple[int, int]]) -> None:
    done = [completion(f"s{i}", begin, token_times_s=(begin + n / 2, begin + n)) for i, (begin, n) in enumerate(spans)]
    found = events(timelines((0.0, 20.0), {}, done))
    most = max(sum(begin <= at < begin + n for begin, n in spans) for at in range(20))
    assert len(names(found, "thread_name")) == most
    assert sum(seconds_by_thread(found).values()) == pytest.approx(sum(n for _, n in spans))


def test_hostile_names_are_text_of_one_line() -> None:
    name = f"{HOSTILE}\x1b[31m\n\x00"
    found = events(of(run_on(toy_sheet(), [[Operation(name, "cpu", "expert_ffn", flops=1000)]])), name)
    (slice_,) = (event for event in found if event["ph"] == "X" and event["cat"] == "units")
    assert slice_["name"].startswith("<script>alert(1)")
    assert slice_["name"].isprintable()


def test_the_command_writes_a_step_of_a_run(finished_run: FinishedRun, tmp_path: Path) -> None:
    run = str(finished_run.directory)
    out = tmp_path / "step.json"
    several = joulebench("trace", run, "--out", str(out))
    assert several.code == 2
    assert "the run has several cells; name one with --cell: " in several.stderr
    cell = several.stderr.split("--cell: ")[1].split(" (")[0]
    listed = joulebench("trace", run)
    assert listed.code == 0, listed.stderr
    with Store.view(finished_run.directory) as store:
        for own in store.data().cells:
            assert own.cell_id in listed.stdout
            assert own.engine in listed.stdout
    nowhere = joulebench("trace", run, "--cell", cell)
    assert (nowhere.code, nowhere.stderr) == (2, "error: --out: names no file; write --out trace.json\n")
    whole = joulebench("trace", run, "--cell", cell, "--out", str(out))
    assert whole.code == 0, whole.stderr
    assert_apart(json.loads(out.read_text())["traceEvents"])
    one = joulebench("trace", run, "--cell", cell, "--request", "1", "--step", "0", "--out", str(out))
    assert one.code == 0, one.stderr
    document = json.loads(out.read_text())
    assert document["otherData"]["part"] == "request 1, step 0"
    assert {e["name"] for e in document["traceEvents"] if e.get("cat") == "requests"} == {"prefill 1"}
    for wrong, why in (
        (("--cell", "none"), "the run has no such cell"),
        (("--trial", "none"), "the run has no such trial"),
        (("--cell", cell, "--request", "99"), "--request 99: the trial answered"),
        (("--cell", cell, "--step", "9999"), "--step 9999: request 1 has steps 0 (the prompt) to"),
    ):
        refused = joulebench("trace", run, *wrong, "--out", str(out))
        assert refused.code == 2
        assert why in refused.stderr
    refused = joulebench("trace", run, "--cell", "none", "--trial", "nothing", "--out", str(out))
    assert [line.split(";")[0] for line in refused.problems] == [
        "error: --cell none: the run has no such cell", "error: --trial nothing: the run has no such trial",
    ]  # fmt: skip


def test_a_trial_of_another_cell_is_refused(finished_run: FinishedRun, tmp_path: Path) -> None:
    with Store.view(finished_run.directory) as store:
        own, other = list({trial.cell_id: trial for trial in store.trials() if trial.status == "ok"}.values())[:2]
    asked = ("trace", finished_run.directory, "--trial", own.trial_id, "--out", tmp_path / "trace.json", "--cell")
    assert joulebench(*asked, own.cell_id).code == 0
    refused = joulebench(*asked, other.cell_id)
    assert (refused.code, f"--trial {own.trial_id}: of cell {own.cell_id}, and --cell" in refused.stderr) == (2, True)


def test_standard_output_is_the_trace_alone(finished_run: FinishedRun) -> None:
    with Store.view(finished_run.directory) as store:
        trial = next(one.trial_id for one in store.trials() if one.status == "ok")
    done = joulebench("trace", finished_run.directory, "--trial", trial, "--out", "/dev/stdout")
    assert json.loads(done.stdout)["traceEvents"]
    assert "events in" in done.stderr


def test_the_command_says_where_threads_were_not_kept(tmp_path: Path) -> None:
    """The prompt's threads are never kept; the first decode step's are."""
    lengths = {"name": "fixed_lengths", "prompt_tokens": 8, "new_tokens": 3, "limit": 1}
    lru = {"name": "lru", "technique": {"name": "lru", "slots": 6}}
    plan = write_plan(tmp_path / "plan.toml", raw_plan(engine=[lru], workload=[lengths], protocol=FAST))
    run, out = tmp_path / "run", tmp_path / "step.json"
    assert joulebench("run", plan, "--out", run).code == 0
    told = {step: joulebench("trace", run, "--step", step, "--out", out).stderr for step in ("0", "1")}
    words = "is kept of the first 2 decode steps of the window, and none of them is in this part"
    assert [words in " ".join(told[step].split()) for step in ("0", "1")] == [True, False], told
