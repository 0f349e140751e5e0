"""Figures that pages other than the engine's quote from measurements: each is that of the measurement."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.benchmarks.measurement import read_json

DOCS = Path(__file__).parents[1] / "docs"


def words_of(name: str) -> str:
    return " ".join((DOCS / name).read_text(encoding="utf-8").split())


def test_errors_of_a_phones_gauge_are_those_of_the_meters_truth() -> None:
    rows = json.loads((DOCS / "measurements" / "meter-truth.json").read_text(encoding="utf-8"))["rows"]
    known = {row["waveform"]: row for row in rows if row["meter"] == "gauge, 250 ms, instants"}
    told = re.findall(
        r"^\| (.+?) \| ([\d.]+) % \| (\d+) % \|$", (DOCS / "devices/android.md").read_text(), re.MULTILINE
    )
    assert len(told) == 5
    for waveform, rms, within in told:
        row = known[waveform]
        assert (rms, int(within)) == (f"{100 * row['rms_error']:.2g}", row["within_two"]), waveform


@pytest.mark.parametrize(
    ("how", "quiet", "words"),
    [
        ("without the queue", None, "takes at most {} ms in the median and {} ms at the 99th percentile"),
        ("on the clock", True, "On the clock it takes at most {} ms and {} ms on a quiet machine"),
        ("on the clock", False, "with neighbours {} ms and {} ms"),
    ],
)
def test_a_switch_of_cores_takes_what_was_measured(how: str, quiet: bool | None, words: str) -> None:
    """A run on a quiet machine is one of which each request was quiet."""
    rows = [row for row in read_json("core-switch") if row.metric.endswith(how)]
    disturbed = {row.date for row in rows if row.note != "120 of the requests quiet"}
    chosen = [row for row in rows if quiet is None or (row.date not in disturbed) == quiet]
    most = (max(row.ours for row in chosen if share in row.metric) for share in ("median", "99th percentile"))
    assert words.format(*(f"{value:.2g}" for value in most)) in words_of("techniques/core-sets.md")


@pytest.mark.parametrize("bits", ["fp32", "bf16"])
def test_misses_of_fitted_sheets_are_those_of_the_validation(bits: str) -> None:
    medians: dict[str, list[str]] = {}
    for row in read_json("model-validation"):
        if row.metric == "miss, median" and f"weights in {bits}" in row.conditions:
            medians.setdefault(row.conditions.split(";")[0].split(",")[0], []).append(f"{row.ours:.1f} %")
    names = {"cache": "a cache of half the experts"}
    page = words_of("model-fit.md")
    for name, (prompts, token) in medians.items():
        if bits == "fp32":
            assert re.search(rf"\| {names.get(name, name)}( \(.*?\))? \| {prompts} \| {token} \|", page), name
        else:
            assert re.search(rf"{name} (is missed )?by {prompts} and {token}", page), name


def test_idle_power_that_strays_is_quoted_as_it_was_simulated() -> None:
    two, three, longer_two, longer_three = (f"{row.ours:.0f}" for row in read_json("idle-strays"))
    assert (
        f"for half a second, idle times of 7.5 s, a window of 20 s: {two} of 100 windows lie within twice the ± and"
        f" {three} within three times; where it strays for 2 s, [{longer_two} and {longer_three}]("
        in words_of("figures.md")
    )
