"""Tables and pictures of what units and links did: closed forms from operations as a trial stores them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from devices.models.operation import TRANSFER, Operation
from devices.models.sheet import parse_sheet
from results.report.arms import arms_of
from results.report.html import html_text
from results.report.resource_pictures import resource_pictures
from results.report.step_timelines import step_timelines
from results.resource_use import ResourceUse, StateJoules
from results.resources import ResourceRow, resource_notes, resources_of, resources_table
from results.run_frames import RunFrames
from tests.run_builders import HOSTILE
from tests.test_links import LINKED_TOML
from tests.test_modelled_error import two_arms
from tests.test_repricing import run_on
from tests.toy_sheet import figure

SHEET = parse_sheet(
    LINKED_TOML.replace("[units.gpu]", f"[units.gpu]\nwaiting_w = {figure(2.0)}").replace(
        "latency_s", f"pj_per_bit = {figure(1e9)}\nlatency_s"
    ),
    "linked",
)
"""A byte over PCIe is 8 mJ. The GPU draws 5 W busy, 2 W waiting; no watts of the CPU are stated."""
CPU_1_S = Operation("norm", "cpu", "norm", flops=100.0)
GPU_1_5_S = Operation("attention", "gpu", "attention", flops=10_000.0)
COPY_5_25_S = Operation("copy", "pcie", TRANSFER, moved_bytes=100.0, aside=True)
BACK_3_25_S = Operation("results", "pcie:back", TRANSFER, moved_bytes=60.0, aside=True)
CPU_2_S = Operation("scatter", "cpu", "scatter", flops=200.0, after=(2,))
STEPS = [[CPU_1_S], [COPY_5_25_S, GPU_1_5_S, CPU_2_S]]
"""A prompt of 1 s; a token of 7.25 s: the copy, the GPU meanwhile, and the CPU after the copy."""


def rows(*steps: list[Operation]) -> dict[tuple[str, str], ResourceRow]:
    found = resources_of(*run_on(SHEET, steps))
    return {(row.phase, row.resource): row for row in found}


def test_a_copy_a_unit_meanwhile_and_one_behind_it() -> None:
    found = rows(*STEPS)
    assert list(found) == [
        *((phase, one) for phase in ("prefill",) for one in ("cpu", "gpu", "pcie")),
        *((phase, one) for phase in ("decode", "all") for one in ("cpu", "gpu", "pcie")),
    ]
    expected = {
        ("prefill", "cpu"): (1.0, ResourceUse(1.0, 0.0, 0.0, 0.0), None),
        ("prefill", "gpu"): (1.0, ResourceUse(0.0, 0.0, 1.0, 0.0), StateJoules(0.0, 2.0, 0.0)),
        ("decode", "cpu"): (7.25, ResourceUse(2.0, 0.0, 5.25, 0.0), None),
        ("decode", "gpu"): (7.25, ResourceUse(0.0, 1.5, 5.75, 0.0), StateJoules(7.5, 11.5, 0.0)),
        ("decode", "pcie"): (7.25, ResourceUse(3.75, 1.5, 2.0, 0.0), StateJoules(0.8, 0.0, 0.0)),
        ("all", "gpu"): (8.25, ResourceUse(0.0, 1.5, 6.75, 0.0), StateJoules(7.5, 13.5, 0.0)),
    }
    for key, (window_s, use, joules) in expected.items():
        assert found[key].window_s == pytest.approx(window_s)
        assert found[key].use == pytest.approx(use)
        assert found[key].joules == (None if joules is None else pytest.approx(joules))


def test_both_ways_of_a_link_have_the_joules_of_their_own_bytes() -> None:
    """100 bytes there and 60 back at the same time; 5.25 s of CPU keep the window open until both have arrived."""
    wait = Operation("norm", "cpu", "norm", flops=525.0)
    found = rows([CPU_1_S], [COPY_5_25_S, BACK_3_25_S, wait])
    assert found["decode", "pcie"].joules == pytest.approx((0.8, 0.0, 0.0))
    assert found["decode", "pcie:back"].joules == pytest.approx((0.48, 0.0, 0.0))
    assert found["decode", "pcie:back"].use == pytest.approx((0.0, 3.25, 2.0, 0.0))


def test_the_table_has_shares_that_add_up_and_the_line_for_a_terminal_names_every_resource() -> None:
    frame = resources_table(two_arms(run_on(SHEET, STEPS), run_on(SHEET, [[CPU_1_S], [CPU_1_S]])))
    assert (frame["busy_share"] + frame["waiting_share"] + frame["idle_share"]).tolist() == pytest.approx(
        [1.0] * len(frame)
    )
    gpu = frame[(frame["cell"] == "first") & (frame["phase"] == "all") & (frame["resource"] == "gpu")]
    assert gpu["waiting_joules"].item() == pytest.approx(13.5)
    assert math.isnan(frame[frame["resource"] == "cpu"]["busy_joules"].iloc[0])
    assert resource_notes(frame) == [
        "model:toy · asked: busy, of the window: first: cpu 36 %, gpu 18 %, pcie 64 %; second: cpu 100 %, gpu 0 %."
    ]


def test_a_prompt_is_not_drawn_as_a_decode_step() -> None:
    """The second arm answers with one token, as a log-likelihood does: its prompt is all that ran."""
    run = two_arms(run_on(SHEET, STEPS), run_on(SHEET, [[CPU_1_S]]))
    (drawn,) = step_timelines(run, arms_of(run.cells))
    told = {arm.name: words for arm, words in drawn.captions}
    assert "prompt" not in told["first"]
    assert told["second"] == "a prompt, as nothing was decoded: 1.00 s modelled: cpu 1.00 s"


def test_a_bar_is_as_long_as_its_share_and_hostile_names_are_text() -> None:
    run = two_arms(run_on(SHEET, STEPS))
    (own,) = run.cells
    run = replace(run, cells=(own.model_copy(update={"engine": HOSTILE, "label": HOSTILE}),))
    (picture,) = resource_pictures(RunFrames(run).resources, arms_of(run.cells))
    assert [name for name, _ in picture.rows] == ["cpu", "gpu", "pcie"]
    assert picture.rows[1][1] == (("busy 18.2 % (18.2 % with others), waiting 81.8 %", "7.50 J busy, 13.5 J waiting"),)
    widths = [float(part.split('width="')[1].split('"')[0]) for part in picture.svg.split("<rect")[1:]]
    assert sum(widths) == pytest.approx(6 * 300, abs=0.1)  # three resources in two phases, each bar whole
    page = html_text(run)
    assert "Units and links of modelled devices" in page
    assert "A blank cell: nothing of this arm ran there." in page.split('id="resources"')[1].split("<table")[0]
    assert "A blank cell: this arm has no such operation" in page.split('id="operations"')[1].split("<table")[0]
    assert "<script>alert(1)" not in page
