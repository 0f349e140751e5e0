"""Expert heat on the page: a picture a workload, of arms that route alike, with its figures and those of a profile."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pandas as pd

from results.expert_heat import ExpertHeat
from results.report.arms import arms_of
from results.report.csv import write_csv
from results.report.heat_pictures import HeatPicture, heat_pictures
from results.report.html import html_text
from results.run_frames import RunFrames
from results.runs import RunData
from tests.run_builders import cell, run, trial

EVEN = ((25, 25, 25, 25), (70, 10, 20, 0))
NEARLY = ((26, 24, 25, 25), (69, 11, 20, 0))
OTHER = ((25, 25, 25, 25), (10, 70, 20, 0))


def chosen(counts: dict[str, tuple[tuple[int, ...], ...]], **changes: object) -> RunData:
    """An arm a name, of two layers of experts, 0 and 2."""
    cells = [cell(name, engine=name, workload="boolq", reference_id="exact") for name in counts]
    heats = {f"{name}-t0": ExpertHeat(layers=(0, 2), chosen=own, **changes) for name, own in counts.items()}
    return replace(run(cells, [trial(name) for name in counts]), load_heat=heats.get)


def pictures(data: RunData) -> list[HeatPicture]:
    derived = RunFrames(data)
    return heat_pictures(data, derived.heats, derived.overlaps, arms_of(data.cells))


def test_arms_that_route_alike_share_a_picture_and_one_that_does_not_has_its_own() -> None:
    """Of NEARLY 1 in 100 choices is another expert's; of OTHER 60 in 100, in one layer."""
    found = pictures(chosen({"tiers": NEARLY, "dropping": OTHER, "exact": EVEN}))
    assert [(p.title, p.arms) for p in found] == [("boolq", "exact, tiers"), ("boolq", "dropping")]


def test_a_picture_has_a_shade_a_figure_under_the_pointer_and_the_imbalance_of_each_layer() -> None:
    (picture,) = pictures(chosen({"exact": EVEN}))
    svg = str(picture.svg)
    # The darkest is 70 of 100; the others by their share of it. Imbalance: 25 / 25, 70 / 25.
    shades = [float(v) for v in re.findall(r'fill-opacity="([^"]*)"', svg)]
    assert shades == [0.357, 0.357, 0.357, 0.357, 1.0, 0.143, 0.286, 0.0]
    assert "<title>layer 2, expert 0: 70.0 % of its choices (70)</title>" in svg
    assert "layer 0: 1.00; layer 2: 2.80" in svg
    bars = [float(w) for w in re.findall(r'class="uneven"><rect[^>]* width="([^"]*)"', svg)]
    assert bars[1] / bars[0] == 110 / 39.29


def test_its_table_says_the_same_in_numbers() -> None:
    (picture,) = pictures(chosen({"exact": EVEN}, profiled=((10, 0, 0, 0), (1, 1, 1, 1))))
    first, second = picture.rows
    assert (first.layer, first.chosen, first.imbalance, first.profiled, first.never_chosen) == (
        0,
        100,
        "1.00",
        "4.00",
        0,
    )
    assert (second.layer, second.imbalance, second.profiled, second.never_chosen) == (2, "2.80", "1.00", 1)
    assert second.most_chosen == "0: 70.0 %, 2: 20.0 %, 1: 10.0 %"


def test_where_a_profile_was_used_its_overlap_with_what_was_seen_is_told() -> None:
    """Five experts, so the four chosen most can differ: 3 of 4 in one layer, 4 of 4 in the other."""
    seen, profiled = ((9, 8, 7, 6, 1), (9, 8, 7, 6, 1)), ((9, 8, 7, 1, 6), (6, 7, 8, 9, 1))
    (picture,) = pictures(chosen({"exact": seen}, profiled=profiled))
    assert picture.caption == (
        "Of the 4 experts chosen most here, the profile of boolq has 87.5 % among its own 4 (75 % to 100 %). By chance"
        " it would be 80 %. Median of 2 layers, least to most."
        " Of the 8 experts chosen most nothing is told: a layer has 5 experts, so all are among the 8 most chosen."
    )
    (plain,) = pictures(chosen({"exact": seen}))
    assert plain.caption == ""


def test_overlaps_of_prefill_and_of_decoding_are_told_apart() -> None:
    """Prefill chose experts 0 to 3 most, as the prompts did; decoding 1 to 4."""
    seen, decoded, profiled = ((9, 8, 7, 6, 5),), ((0, 1, 1, 1, 2),), ((9, 8, 7, 6, 1),)
    cells = [cell("exact", engine="exact", workload="boolq", reference_id="exact")]
    heat = ExpertHeat(layers=(0,), chosen=seen, decoded=decoded, profiled=profiled)
    data = replace(run(cells, [trial("exact")]), load_heat={"exact-t0": heat}.get)
    derived = RunFrames(data, overlap_k=(4,))
    (picture,) = heat_pictures(data, derived.heats, derived.overlaps, arms_of(data.cells))
    told = "Of the 4 experts chosen most here in {}, the profile of boolq has {} among its own 4 ({} to {})."
    rest = "By chance it would be 80 %. Median of 1 layer, least to most."
    assert picture.caption == (
        f"{told.format('prefill', *['100 %'] * 3)} {rest} {told.format('decoding', *['75 %'] * 3)} {rest}"
    )


def test_a_matrix_of_thousands_has_a_title_a_layer() -> None:
    wide = (tuple(range(1200)), tuple(range(1200)))
    (picture,) = pictures(chosen({"exact": wide}))
    assert str(picture.svg).count("<title>") == 2
    assert "<title>layer 0, chosen most: 1199: " in str(picture.svg)


def test_the_page_folds_it_and_a_run_without_experts_has_no_such_fold() -> None:
    page = html_text(chosen({"<b>exact": EVEN}))
    assert '<details class="fold" id="heat">' in page
    assert "<b>exact" not in page
    assert 'id="heat"' not in html_text(run([cell()], [trial()]))


def test_every_count_is_in_a_file(tmp_path: Path) -> None:
    paths = {p.name: p for p in write_csv(chosen({"exact": EVEN, "tiers": OTHER}), tmp_path)}
    frame = pd.read_csv(paths["heat.csv"])
    assert len(frame) == 16
    row = frame[(frame["engine"] == "tiers") & (frame["layer"] == 2) & (frame["expert"] == 1)].iloc[0]
    assert (row["chosen"], row["share"], row["workload"]) == (70, 0.7, "boolq")
    assert frame["profiled"].isna().all()
