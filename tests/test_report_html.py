"""The page's text without a browser: methods, reasons, escaping, structure."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.records import PowerTrace
from results.report.arms import arms_of
from results.report.figures import power_figures
from results.report.html import html_text, json_in_script, page_context, write_html
from results.report.plan_text import toml_text
from tests.run_builders import HOSTILE, cell, example_run, failed, reading, run, trial


class Outline(HTMLParser):
    """Visible text, tags with attributes, and which elements were not closed in order."""

    void = frozenset({"meta", "link", "br", "img", "hr", "input", "wbr"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in {"script", "style"}:
            self.text.append(data)


@pytest.fixture(scope="module")
def page() -> Outline:
    return Outline(html_text(example_run()))


def words(outline: Outline) -> str:
    return " ".join(" ".join(outline.text).split())


def test_page_is_well_formed_and_ids_are_unique(page: Outline) -> None:
    assert page.open == []
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = {(attrs["href"] or "")[1:] for tag, attrs in page.tags if tag == "a"}
    assert targets <= set(ids), "every link on the page leads somewhere"


def test_page_refers_to_nothing_outside_itself(page: Outline) -> None:
    addresses = [attrs.get(name) for _, attrs in page.tags for name in ("src", "href", "srcset", "data", "action")]
    assert {(a or "#")[0] for a in addresses if a != "data:,"} == {"#"}


def test_accessible_structure(page: Outline) -> None:
    assert [attrs.get("lang") for tag, attrs in page.tags if tag == "html"] == ["en"]
    assert all(attrs.get("scope") in {"col", "row", "rowgroup", "colgroup"} for tag, attrs in page.tags if tag == "th")
    charts = [attrs for _, attrs in page.tags if attrs.get("class") == "chart"]
    assert charts
    assert all(len(attrs.get("aria-label") or "") > 40 for attrs in charts)
    assert [tag for tag, _ in page.tags].count("h1") == 1


def test_a_hostile_message_is_shown_and_adds_no_element(page: Outline) -> None:
    assert HOSTILE in words(page)
    types = [attrs.get("type") for tag, attrs in page.tags if tag == "script"]
    assert types == ["application/json", None, None, "application/json", None, None], "charts, samples, sorting"


def test_a_reading_that_is_no_number_costs_its_trial_the_picture_and_not_the_run_its_page() -> None:
    """A sensor that showed "nan" for a moment ended the run with a ValueError and without a page."""
    made = example_run()

    def traces(trial_id: str) -> tuple[PowerTrace, ...]:
        [one] = made.load_traces(trial_id)
        is_first = trial_id.endswith("-t0")
        return (replace(one, values=np.where(one.times_s < 0.2, np.nan, one.values)) if is_first else one,)

    figures = power_figures(replace(made, load_traces=traces), arms_of(made.cells))
    assert [figure.spec is None for figure in figures] == [False, False]
    assert ", trial 2;" in figures[0].caption


def test_missing_values_point_to_their_reason(page: Outline) -> None:
    text = words(page)
    assert "cpu-sheet package: gap of 1.2 s in the readings 0.3 s into the window" in text
    assert "5 of 5 trials failed (<script>" in text
    assert not [t for t in page.text if t.strip() in {"-", "–", "—", "nan", "NaN", "None"}]


def test_modelled_is_said_in_the_heading_of_its_column(page: Outline) -> None:
    text = words(page)
    assert "60 trials: 53 ok, 6 failed, 1 marked, whose times and joules are in no mean." in text
    assert text.index("Joules modelled ± 20 %") < text.index("1× baseline")
    assert "host. Time is measured. Energy is modelled, not measured (cpu-sheet; CPU time x 3.2 W a core" in text
    assert "tiny-moe: random weights." in text
    assert "gsm8k, hellaswag: only the few items that come with the program" in text


def test_random_weights_are_not_ranked_by_accuracy(page: Outline) -> None:
    assert "Most accurate: the weights are random: scores say nothing about the method." in words(page)


def test_an_empty_run_still_makes_a_page() -> None:
    text = words(Outline(html_text(run([], []))))
    assert "0 trials" in text
    assert "No trial failed" in text


def test_a_run_of_failures_still_makes_a_page() -> None:
    text = words(Outline(html_text(run([cell()], [failed(error="no such model: see `joulebench models`")]))))
    assert "1 of 1 trials failed (no such model: see `joulebench models`)" in text
    assert "No trial gave a time. Energy is missing; the tables say why." in text


def test_trials_are_numbered_as_on_the_terminal() -> None:
    """ "repeat 0" stood where the terminal said "trial 1"."""
    page = Outline(html_text(run([cell()], [failed(), failed(repeat=2), trial("c1", 1, marks=("contended",))])))
    assert "trials 1, 3, cell c1" in words(page)
    assert "trial 2, c1-t1" in words(page)


def test_many_trials_that_are_left_out_for_the_same_have_one_row() -> None:
    """A series of endurance had 212, above all tables."""
    shares = [0.3 + 0.002 * i for i in range(212)]
    busy = [trial("c1", i, marks=("contended",), foreign_cpu_share=share) for i, share in enumerate(shares)]
    apart = [trial("c1", 212, marks=("stopped",)), trial("c1", 213)]
    page = Outline(html_text(run([cell()], [*busy, *apart])))
    assert words(page).count("contended; other processes took up to 72 % of the CPU") == 1
    assert "212 trials, from trial 1 to 212; each is in trials.csv" in words(page)
    assert "trial 213, c1-t212" in words(page)
    assert "trial 101" not in words(page)


def test_write_html_replaces_a_page_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    write_html(run([cell()], [trial()]), path)
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


# --- panels ----------------------------------------------------------------------------------------------------------


def test_modelled_and_measured_never_share_a_panel() -> None:
    counted, modelled = ("counter", "nvml"), ("modelled", "cpu-sheet")
    energies = {"c1": counted, "c2": modelled, "c3": counted, "c4": modelled}
    cells = [cell(c, engine=c) for c in energies]
    trials = [
        trial(c, i, energy=tuple(reading(p, 6.0, method=m, meter=meter) for p in ("prefill", "decode", "all")))
        for c, (m, meter) in energies.items()
        for i in range(2)
    ]
    shown = page_context(run(cells, trials))["figures"]
    for _, figure in shown["energy"]:
        together = {row["arm"] for row in _inline_rows(figure.spec) if row["energy"]}
        assert together in ({"c1", "c3"}, {"c2", "c4"})


def _inline_rows(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for rows in spec["datasets"].values() for row in rows]


# --- parts -----------------------------------------------------------------------------------------------------------


def test_cells_of_one_arm_share_its_symbol_and_arms_of_one_name_are_told_apart() -> None:
    cells = [
        cell("c1"), cell("c2", workload="mmlu"), cell("c3", technique="npumoe"), cell("c4", device="model:m2-ultra"),
        cell("c5", technique="npumoe", technique_parameters={"tiers": 3}), cell("c6", engine="int4"),
    ]  # fmt: skip
    arms = arms_of(cells)
    assert [arms[c.cell_id].index for c in cells] == [0, 0, 1, 0, 2, 3]
    assert [arms[c].name for c in ("c1", "c3", "c5", "c6")] == [
        "reference, on-demand, host", "reference, npumoe, host", "reference, npumoe (tiers=3), host", "int4"
    ]  # fmt: skip
    on_two_devices = arms_of([cell("c1"), cell("c2", device="model:m2-ultra", model="small priced as large")])
    assert {arm.name for arm in on_two_devices.values()} == {"reference"}, "no table compares these"
    of_two_models = arms_of([cell("c1"), cell("c2", model="large")])
    assert [arm.name for arm in of_two_models.values()] == ["reference, tiny-moe", "reference, large"]


@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_in_a_script_reads_back_and_cannot_end_the_script(value: Any) -> None:
    text = json_in_script(value)
    assert not re.search(r"[<>&\u2028\u2029]", text)
    assert json.loads(text) == value


scalars = st.text() | st.integers(-(2**62), 2**62) | st.booleans() | st.floats(allow_nan=False)
keys = st.text(min_size=1)
plans = st.recursive(
    st.dictionaries(keys, scalars | st.lists(scalars), max_size=4),
    lambda inner: st.dictionaries(keys, inner | scalars | st.lists(inner, max_size=2), max_size=4),
    max_leaves=6,
)


@given(plans)
def test_a_plan_reads_back_from_its_toml_text(plan: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text(plan)) == plan


def test_what_a_plan_leaves_unset_is_a_comment() -> None:
    assert toml_text({"a": None, "b": {"c": None}}) == "# a is not set\n\n[b]\n# c is not set\n"
