"""When decode steps computed, copied and waited: by hand, in counters, and in the page."""

from __future__ import annotations

import re
import time
from itertools import pairwise

import pytest

from engines.base import unheard
from results import tables
from results.copies import (
    CopySpan,
    DecodeStep,
    LayerEnd,
    StepTimes,
    WaitSpan,
    layer_times,
    on_demand_s,
    prefetching_s,
    step_times,
)
from results.counters import EngineCounters
from results.report.html import html_text, page_context
from results.report.step_timelines import _tick
from tests.run_builders import cell, run, trial
from tests.test_copies import ROOM, engine
from tests.test_expert_slots import BUNDLED, EXPERT, request
from tests.test_tables import one_cell, row


def step(
    duration_s: float,
    layers: dict[int, float],
    waits: list[tuple[int, float, float]],
    *copies: tuple[int, float, float],
) -> DecodeStep:
    return DecodeStep(
        duration_s=duration_s,
        layers=tuple(LayerEnd(layer=layer, end_s=end) for layer, end in layers.items()),
        waits=tuple(WaitSpan(layer=layer, begin_s=begin, end_s=end) for layer, begin, end in waits),
        copies=tuple(
            CopySpan(layer=layer, begin_s=begin, end_s=end, n_experts=2, n_bytes=8, is_ahead=layer > 0)
            for layer, begin, end in copies
        ),
    )


ON_DEMAND = step(10.0, {0: 5.0, 1: 10.0}, [(0, 1.0, 3.0), (1, 6.0, 9.0)], (0, 1.0, 3.0), (1, 6.0, 9.0))
"""Layers compute 3 and 2, their experts are copied in 2 and 3, in turn."""
PREFETCHING = step(8.0, {0: 5.0, 1: 8.0}, [(0, 1.0, 3.0), (1, 5.5, 6.0)], (0, 1.0, 3.0), (1, 3.0, 6.0))
"""The same; layer 1's experts are copied while layer 0 computes, and half a second is waited for."""


def test_times_of_hand_made_steps() -> None:
    def times(own: DecodeStep) -> StepTimes:
        waits = [(wait.begin_s, wait.end_s) for wait in own.waits]
        return step_times(own.duration_s, waits, [(copy.begin_s, copy.end_s) for copy in own.copies])

    assert times(ON_DEMAND) == (10.0, 5.0, 5.0, 0.0, 5.0)
    assert times(PREFETCHING) == (8.0, 2.5, 5.0, 2.5, 5.0)
    # A copy that goes on when the step has ended, and one from before it: what lies inside counts.
    assert step_times(4.0, [], [(-1.0, 1.0), (3.0, 9.0)]) == (4.0, 0.0, 2.0, 2.0, 2.0)
    assert step_times(4.0, [(0.0, 2.0)], [(1.0, 3.0)]) == (4.0, 2.0, 2.0, 1.0, 2.0)


def test_identities_of_the_source_hold_on_hand_made_steps() -> None:
    """TPOT on demand is the sum of computing and copying; with prefetches the first copy, then maxima."""
    assert layer_times(ON_DEMAND) == [(3.0, 2.0), (2.0, 3.0)]
    assert on_demand_s(layer_times(ON_DEMAND)) == ON_DEMAND.duration_s
    assert layer_times(PREFETCHING) == [(3.0, 2.0), (2.5, 3.0)]
    assert prefetching_s(layer_times(PREFETCHING)) == 2.0 + max(3.0, 3.0) + 2.5
    assert prefetching_s([]) == on_demand_s([]) == 0.0


@pytest.mark.alone  # what takes the CPU between two copies is in neither
def test_an_engine_tells_its_decode_steps_and_adds_them_up() -> None:
    """Seven steps after the first token, of four layers; on demand every copy is waited for, and none is hidden but
    what other threads of this machine take."""
    made = engine(BUNDLED, "on-demand", ROOM["all"], rate=50e6, threads=1)
    made.run(request(20, 8), unheard)
    found, steps = made.take_counters(), made.take_decode_steps()
    assert len(steps) == 7
    assert made.take_decode_steps() == ()
    assert [layer.layer for layer in steps[0].layers] == [0, 1, 2, 3]
    # Copies of a layer are told as one unless the machine was busy between them.
    assert list(dict.fromkeys(copy.layer for copy in steps[0].copies)) == [0, 1, 2, 3]
    assert not any(copy.is_ahead for own in steps for copy in own.copies)
    assert sum(copy.n_bytes for copy in steps[3].copies) == 4 * 2 * EXPERT * 2
    # Two experts of 147 kB at 50 MB/s are 5.9 ms a layer.
    assert found.decode_copied_s is not None
    assert found.decode_copied_s > 7 * 4 * 0.0058
    assert found.copy_rate is not None
    assert found.copy_rate < 50.5e6
    assert found.wait_share is not None
    assert found.wait_share == pytest.approx(1 - found.compute_share)
    assert found.hidden_share is not None
    assert found.hidden_share < 0.25
    assert engine(BUNDLED, "on-demand", None).take_decode_steps() == ()


def test_a_step_ends_when_its_tokens_are_known_whatever_listeners_do_then() -> None:
    """It would lie in the time of the step before."""
    made = engine(BUNDLED, "lru", ROOM["all"], threads=1)
    done = made.run(request(20, 3), lambda event, at_s: time.sleep(0.05))
    steps = made.take_decode_steps()
    between_s = [until_s - since_s for since_s, until_s in pairwise(done.token_times_s)]
    assert [own.duration_s <= most_s for own, most_s in zip(steps, between_s, strict=True)] == [True, True]


def test_prefetched_copies_are_told_as_such_and_some_are_hidden() -> None:
    made = engine(BUNDLED, "router-pf", ROOM["all"], parameters={"source": "s"}, rate=400e6, threads=1)
    made.run(request(20, 8), unheard)
    found, steps = made.take_counters(), made.take_decode_steps()
    ahead = [(copy.layer, copy.is_ahead) for copy in steps[2].copies]
    assert {layer for layer, is_ahead in ahead if is_ahead} == {1, 2, 3}
    assert {layer for layer, is_ahead in ahead if not is_ahead} == {0}
    assert found.decode_hidden_s is not None
    assert found.decode_hidden_s > 0
    assert all(own.layers[-1].end_s <= own.duration_s for own in steps)


def test_counters_of_copies_are_measured_times() -> None:
    counters = EngineCounters(
        routed_pairs=8, bytes_moved=600, bytes_copied=600, copying_s=2.0, decode_timed_s=10.0, decode_waited_s=4.0,
        decode_copied_s=5.0, decode_hidden_s=1.0, decode_hideable_s=4.0,
    )  # fmt: skip
    data = one_cell(trial(counters=counters))
    found = {metric: row(data, metric)["mean"] for metric in ("compute_share", "wait_share", "copy_share")}
    assert found == {
        "compute_share": pytest.approx(60),
        "wait_share": pytest.approx(40),
        "copy_share": pytest.approx(50),
    }
    assert (row(data, "hidden_share")["mean"], row(data, "copy_rate")["mean"]) == (25, 300)
    (copied,) = [t for t in page_context(data)["figure_tables"] if t.title == "Copied experts"]
    assert [title for title, _ in copied.headings] == ["copied", "rate", "computing", "waiting", "copying", "hidden"]
    assert [arm.method for _, arms in copied.parts for arm in arms] == [("bytes counted", "times measured")]
    planned = one_cell(trial(counters=EngineCounters(routed_pairs=8, bytes_moved=600, bytes_copied=0)))
    assert row(planned, "bytes_copied")["mean"] == 0
    assert "copy_rate" not in set(tables.tidy(planned)["metric"])


def test_the_page_draws_a_step_of_each_arm_that_copies_and_escapes_names() -> None:
    cells = [cell("a", engine="<demand>"), cell("b", engine="ahead"), cell("c", engine="none")]
    trials = [trial("a", decode_steps=(ON_DEMAND,)), trial("b", decode_steps=(PREFETCHING,)), trial("c")]
    (timeline,) = page_context(run(cells, trials))["step_timelines"]
    assert [arm.name for arm, _ in timeline.captions] == ["<demand>", "ahead"]
    told = {arm.name: words for arm, words in timeline.captions}
    assert told["ahead"].startswith("8000 ms: computing 5500, waiting 2500; copying 5000, of which 2500 while")
    assert "would take 10000 ms in turn and 7000 ms fully overlapped" in told["<demand>"]
    numbers = {arm.name: rows for arm, rows in timeline.numbers}
    for name, step in (("<demand>", ON_DEMAND), ("ahead", PREFETCHING)):
        waits = [row for row in numbers[name] if row.what.startswith("waits")]
        waited_s = sum(wait.end_s - wait.begin_s for wait in step.waits)
        assert sum(float(row.lasting_ms) for row in waits) == pytest.approx(1000 * waited_s)
        copies = [row for row in numbers[name] if row.what.startswith("copies")]
        assert [float(row.first_ms) for row in copies] == [1000 * copy.begin_s for copy in step.copies]
        assert {row.lane for row in waits}.isdisjoint(row.lane for row in copies)
    svg = str(timeline.svg)
    assert "<demand>" not in svg
    assert "&lt;demand&gt;" in svg
    assert len(re.findall('class="wait"', svg)) == 4
    # Ten seconds are 620 px: layer 1's experts arrive in 3 of them.
    assert re.findall(r'class="copy1" x="[\d.]+" y="[\d.]+" width="([\d.]+)"', svg) == ["186.00"] * 2
    assert "<demand>" not in html_text(run(cells, trials)).split('id="steps"')[1].split("</details>")[0]
    assert page_context(run(cells[2:], trials[2:]))["step_timelines"] == []


@pytest.mark.parametrize(("least", "step_ms"), [(0.03, 0.05), (0.7, 1.0), (3.1, 5.0), (11.0, 20.0), (100.0, 100.0)])
def test_ticks_are_round(least: float, step_ms: float) -> None:
    assert _tick(least) == pytest.approx(step_ms)
