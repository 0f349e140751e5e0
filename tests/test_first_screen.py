"""The first screen says no more than is known: whose error, which repeats, which arms, how far behind."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from rich.console import Console

from harness.problems import nearest
from harness.summary import print_summary
from results import tables
from results.ratios import Ratio, widened
from results.records import EnergyReading
from results.report.first_screen import ArmFigure
from results.report.html import page_context
from results.report.page_units import PageUnits
from results.report.sentences import interval_words
from results.run_frames import RunFrames
from results.runs import RunData
from results.trials import Trial
from tests.run_builders import cell, failed, reading, run
from tests.test_standings import groups, lasting, named, noisy, screen, standing


def figures(data: RunData, column: int) -> dict[str, ArmFigure]:
    return {row.arm.name: row.figures[column] for row in screen(data).table.rows}


def with_joules(name: str, seconds: list[float], *kinds: dict[str, object]) -> list[Trial]:
    """Trials with one reading a kind, at 10 W or at `watts`; uncertain: relative, of that reading."""
    found = []
    for t, s in zip(lasting(name, seconds), seconds, strict=True):
        readings: list[EnergyReading] = []
        for kind in kinds:
            own = dict(kind)
            joules = float(str(own.pop("watts", 10.0))) * s
            readings.append(reading("all", joules, uncertainty_j=float(str(own.pop("uncertain"))) * joules, **own))
        found.append(t.model_copy(update={"energy": tuple(readings)}))
    return found


SHEET = {"method": "modelled", "meter": "cpu-sheet", "uncertain": 0.5}
COUNTER = {"method": "counter", "meter": "nvml", "uncertain": 0.001}


def test_a_second_meters_error_is_not_the_models() -> None:
    """The sheet is good to 50 %, the counter beside it to 0.1 %; half the joules are within the sheet's error."""
    trials = [
        *with_joules("first", noisy(2.0), SHEET, COUNTER),
        *with_joules("second", noisy(1.0, -1), SHEET, COUNTER),
    ]
    data = run(named("first", "second"), trials)
    ((group, _),) = groups(data)
    assert not group.verdicts["energy"].is_certain
    assert standing(group, "second", "energy").model_error == pytest.approx(0.5)
    assert screen(data).table.headings[1].below == "modelled ± 50 %"


def test_what_a_meters_readings_say_of_themselves_is_in_the_interval() -> None:
    """10 against 12 J: with 60 % each nothing is certain. Repeats do not narrow it."""
    gauge = {"method": "battery gauge", "meter": "gauge", "uncertain": 0.6, "relative_gain_error": None}
    trials = [*with_joules("first", noisy(1.0) * 5, gauge), *with_joules("second", noisy(1.2, -1) * 5, gauge)]
    data = run(named("first", "second"), trials)
    ((group, _),) = groups(data)
    ratio = standing(group, "second", "energy").ratio
    assert ratio is not None
    assert ratio.low is not None
    assert ratio.low < 1.2 * math.exp(-1.96 * math.hypot(0.6, 0.6))
    assert not group.verdicts["energy"].is_certain
    assert screen(data).table.headings[1].below == "battery gauge ± 60 %"


def test_a_gain_error_that_the_arms_share_is_not_in_their_ratio() -> None:
    trials = []
    for name, seconds in (("first", noisy(1.0)), ("second", noisy(1.2, -1))):
        trials += with_joules(name, seconds, COUNTER | {"uncertain": 0.2, "relative_gain_error": 0.2})
    ((group, _),) = groups(run(named("first", "second"), trials))
    assert group.verdicts["energy"].is_certain


def test_an_uncertainty_that_no_pair_shows_widens_a_ratio_in_quadrature() -> None:
    seen = Ratio(2.0, 2.0 / math.exp(0.3), 2.0 * math.exp(0.3), 5)
    wide = widened(seen, 0.4 / 1.959963984540054)
    assert (wide.low, wide.high) == (pytest.approx(2 * math.exp(-0.5)), pytest.approx(2 * math.exp(0.5)))
    assert widened(Ratio(2.0, 0.0, 5.0, 5), 0.1).low == 0


def test_an_arm_without_a_figure_is_not_among_those_that_the_best_is_better_than() -> None:
    trials = [*lasting("first", noisy(1.0)), failed("second", error="out of memory"), *lasting("third", noisy(4.0, -1))]
    data = run(named("first", "second", "third"), trials)
    shown = screen(data)
    assert shown.sentences[0][1].startswith("Fastest of those that have a figure for certain: first, the baseline; ")
    assert shown.sentences[0][1].endswith("; second has no figure.")
    assert not any(figure.is_best for row in shown.table.rows for figure in row.figures)


def test_where_the_baseline_failed_the_next_arm_with_a_figure_is_it() -> None:
    trials = [failed("first"), *lasting("second", noisy(2.0)), *lasting("third", noisy(1.0, -1))]
    data = run(named("first", "second", "third"), trials)
    table = screen(data).table
    assert (table.baseline, table.baseline_remark) == ("second", "first has no figure")
    assert [f.ratio for f in figures(data, 0).values()] == ["missing", "1×", "0.50×"]
    assert "Fastest of those that have a figure for certain: third, 0.50× [0.4" in screen(data).sentences[0][1]


def test_where_only_the_baselines_joules_are_missing_the_time_keeps_it() -> None:
    lost = reading("all", None, reason="the counter stood still")
    trials = [
        *lasting("first", noisy(1.0), energy=(lost,)),
        *lasting("second", noisy(2.0)),
        *lasting("third", noisy(1.0, -1)),
    ]
    data = run(named("first", "second", "third"), trials)
    assert figures(data, 0)["first"].is_baseline
    assert [f.ratio for f in figures(data, 1).values()] == ["missing", "1×", "0.50×"]
    assert figures(data, 1)["second"].is_baseline
    assert screen(data).table.headings[1].below == "counter ± 5 %, times second"


def test_a_ratio_of_fewer_repeats_than_the_figure_below_it_says_so() -> None:
    trials = [*lasting("first", [1.0, 1.1, 0.9, 1.4]), *lasting("second", [2.0, 2.1])]
    data = run(named("first", "second"), trials)
    shown = figures(data, 0)["second"]
    assert shown.note is not None
    assert screen(data).table.notes[shown.note - 1].startswith("as times first: over the 2 repeats that both have")


def test_a_ratio_of_one_repeat_is_told_in_the_singular() -> None:
    data = run(named("first", "second"), [*lasting("first", [1.0, 1.1, 0.9]), *lasting("second", [2.0])])
    shown = figures(data, 0)["second"]
    assert shown.note is not None
    assert "as times first: over the one repeat that both have;" in screen(data).table.notes[shown.note - 1]


def test_a_ratio_of_unlike_counts_of_repeats_says_from_which_to_which() -> None:
    """Of three repeats one workload lost one, and the other two: "over the 2, 1 repeats" said neither of what."""
    names, asked = ("first", "second"), ("boolq", "gsm8k")
    cells = [cell(f"{name}{w}", engine=name, workload=w) for name in names for w in asked]
    whole = [t for w in asked for t in lasting(f"first{w}", [1.0, 1.1, 0.9])]
    data = run(cells, [*whole, *lasting("secondboolq", [2.0, 2.1]), *lasting("secondgsm8k", [2.0])])
    shown = figures(data, 0)["second"]
    assert shown.note is not None
    assert "over the 1 to 2 repeats of a workload that both have;" in screen(data).table.notes[shown.note - 1]


def test_each_arm_that_may_be_as_good_has_its_own_reason() -> None:
    once = lasting("third", [1.05])
    trials = [*lasting("first", [1.0, 1.2, 0.9, 1.1]), *lasting("second", [1.1, 1.0, 1.1, 1.1]), *once]
    (_, told), *_ = screen(run(named("first", "second", "third"), trials)).sentences
    assert told == (
        "Fastest: not certain between first, second (their difference may be 0),"
        " third (n = 1: no interval from one pair)."
    )


def test_the_closest_arms_behind_are_told_and_how_many_more_there_are() -> None:
    names = [f"arm{i}" for i in range(9)]
    seconds = dict(zip(names, (1.0, 9.0, 8.0, 7.0, 2.0, 3.0, 4.0, 5.0, 1.005), strict=True))
    rng = np.random.default_rng(0)
    trials = [t for name in names[:8] for t in lasting(name, list(seconds[name] * rng.uniform(0.99, 1.01, 4)))]
    trials += lasting("arm8", [1.0, 1.2, 0.9, 1.1])
    (_, told), *_ = screen(run(named(*names), trials)).sentences
    behind = told.partition("behind arm0 for certain: ")[2]
    assert [part.split(",")[0] for part in behind.split("; ")] == ["arm4", "arm5", "arm6", "4 more up to arm1"]


def test_where_the_baseline_is_the_best_the_sentence_says_by_how_much() -> None:
    trials = [*lasting("first", noisy(1.0)), *lasting("slow", noisy(4.0, -1)), *lasting("second", noisy(2.0, -1))]
    (_, told), *_ = screen(run(named("first", "slow", "second"), trials)).sentences
    assert told.startswith("Fastest for certain: first, the baseline; the next is second, 1.99× [1.88, 2.10] first.")


def test_arms_measured_in_several_ways_say_which_is_which_in_their_row() -> None:
    trials = [*with_joules("first", noisy(1.0), COUNTER), *with_joules("second", noisy(2.0), SHEET)]
    shown = figures(run(named("first", "second"), trials), 1)
    assert shown["first"].value == "10.0 J, counter, nvml"
    assert shown["second"].value == "20 J, modelled, cpu-sheet", "good to 50 %"


def test_a_figure_of_zero_says_why_it_is_no_multiple() -> None:
    trials = [*lasting("first", noisy(1.0), "0000"), *lasting("second", noisy(2.0), "0000")]
    data = run(named("first", "second"), trials)
    shown = figures(data, 2)["second"]
    assert shown.ratio == "none"
    assert shown.note is not None
    assert screen(data).table.notes[shown.note - 1] == "first has 0, and nothing is a multiple of 0"
    assert "may be 0" not in screen(data).sentences[2][1]


def test_a_ratio_without_an_interval_has_few_digits() -> None:
    trials = [*lasting("first", [1.0]), *lasting("second", [0.9876])]
    assert figures(run(named("first", "second"), trials), 0)["second"].ratio == "0.99×"
    trials = [*lasting("first", [1.0]), *lasting("second", [0.07463])]
    assert figures(run(named("first", "second"), trials), 0)["second"].ratio == "0.075×"


@pytest.mark.parametrize("low", [1.004556, 1.0000123])
def test_an_interval_that_leaves_out_1_is_shown_with_the_digits_that_say_so(low: float) -> None:
    shown = [float(end) for end in interval_words(low, 1.14).strip("[]").split(", ")]
    assert 1 < shown[0] == pytest.approx(low, abs=1e-3)


@pytest.mark.parametrize(("low", "high"), [(0.728, 6.665), (0.3, 1.04), (0.496, 22.9), (1.2, 6.665)])
def test_an_interval_ends_on_the_side_of_1_where_it_is_shown(low: float, high: float) -> None:
    """[0.73, 6.7], rounded as its width asks, would be [1, 7]: slower for certain, and its ratio of 0.9 not in it."""
    shown = [float(end) for end in interval_words(low, high).strip("[]").split(", ")]
    assert [end > 1 for end in shown] == [low > 1, high > 1]
    assert 1 not in shown


def test_the_symbols_of_many_arms_are_all_unlike() -> None:
    names = [f"arm{i}" for i in range(30)]
    data = run(named(*names), [t for name in names for t in lasting(name, [1.0])])
    assert len({str(row.symbol) for row in screen(data).table.rows}) == 30


def test_arms_of_one_technique_say_what_sets_them_apart() -> None:
    settings = ({}, {"reuse_prefix": True}, {"reuse_prefix": False, "quantise": {"experts": "int4-g32", "head": None}})
    cells = [cell(f"c{i}", engine=f"arm{i}", engine_parameters=own) for i, own in enumerate(settings)]
    data = run(cells, [t for c in cells for t in lasting(c.cell_id, [1.0])])
    assert [row.arm.how for row in screen(data).table.rows] == [
        "on-demand",
        "on-demand, reuse_prefix=True",
        "on-demand, quantise.experts=int4-g32",
    ]


def test_what_a_technique_does_not_do_sets_its_arm_apart_and_so_does_a_zero() -> None:
    settings = ({"layout": {"skips": True}, "spare": 1}, {"layout": {"skips": False}, "spare": 0})
    cells = [cell(f"c{i}", engine=f"arm{i}", technique_parameters=own) for i, own in enumerate(settings)]
    data = run(cells, [t for c in cells for t in lasting(c.cell_id, [1.0])])
    assert [row.arm.how for row in screen(data).table.rows] == [
        "on-demand, layout.skips=True, spare=1",
        "on-demand, layout.skips=False, spare=0",
    ]


def test_an_arm_that_is_called_as_its_technique_says_so_once() -> None:
    """Cells of these builders hold the technique "on-demand"."""
    cells = [
        cell("c0", engine="on-demand"),
        cell("c1", engine="on-demand[chunk=64]"),
        cell("c2", engine="hot", placement="attention npu, experts cpu"),
        cell("c3", engine="on-demand", placement="attention npu, experts cpu"),
    ]
    data = run(cells, [t for c in cells for t in lasting(c.cell_id, [1.0])])
    assert [row.arm.how for row in screen(data).table.rows] == [
        "", "", "on-demand, attention npu, experts cpu", "attention npu, experts cpu",
    ]  # fmt: skip


def test_an_arm_that_is_not_drawn_has_its_own_reason() -> None:
    trials = [
        *with_joules("first", noisy(1.0), COUNTER),
        *with_joules("second", noisy(1.0), COUNTER),
        *with_joules("third", noisy(2.0), SHEET),
        failed("fourth"),
    ]
    (panel,) = screen(run(named("first", "second", "third", "fourth"), trials)).panels
    assert "a figure is missing: fourth. Not drawn, measured or modelled in another way: third." in panel.caption


def test_joules_of_some_trials_that_the_table_does_not_tell_are_not_drawn() -> None:
    """The counter gave half of the first arm's joules, a model the rest. Its way decides of no other arm either."""
    half = [with_joules("first", noisy(1.0), kind) for kind in (SHEET, COUNTER)]
    trials = [
        *(kinds[i % 2] for i, kinds in enumerate(zip(*half, strict=True))),
        *with_joules("second", noisy(1.0), COUNTER),
        *with_joules("third", noisy(2.0), COUNTER),
    ]
    shown = screen(run(named("first", "second", "third"), trials))
    energy = shown.table.rows[0].figures[1]
    assert energy.ratio == "missing"
    assert shown.table.notes[(energy.note or 0) - 1] == "its trials' figures came to be in several ways"
    (panel,) = shown.panels
    assert [row[0] for row in panel.numbers.rows] == ["second", "third"]
    assert panel.caption.endswith("Not drawn, a figure is missing: first.")


def test_a_name_that_two_arms_share_is_listed_once() -> None:
    assert nearest("zzz", ["int4", "dropless", "int4", "dropless"]) == "known: dropless, int4"


def test_joules_a_token_and_a_response_each_have_the_prefix_that_suits_them() -> None:
    """6 tokens a response: 3 J are 0.5 J/token, which stands as 500 mJ; 0.6 J are 600 mJ, 0.1 J/token 100 mJ."""
    for watts, prefix in ((3.0, ""), (0.6, "m")):
        data = run(named("first"), with_joules("first", [1.0], COUNTER | {"watts": watts}))
        units = PageUnits(tables.tidy(data))
        shown = [units.on("host").of(*key)[1] for key in ENERGY_COLUMNS]
        assert shown == ["mJ/token", f"{prefix}J/response"]


def test_each_device_has_units_that_its_figures_read_well_in() -> None:
    """2 ms and 20 mJ a request here, 100 s and 746.92 J on a modelled machine whose sheet is good to 3.8 %."""
    cells = [*named("here"), cell("there", engine="there", device="model:m2-ultra")]
    far = {"method": "modelled", "meter": "sheet", "watts": 7.4692, "uncertain": 0.038}
    data = run(cells, [*with_joules("here", [0.002], COUNTER), *with_joules("there", [100.0], far)])
    context = page_context(data)
    shown = [[f.value for f in s.table.rows[0].figures[:2]] for s in context["screens"]]
    assert shown == [["2.00 ms", "20.0 mJ"], ["100 s", "750 J"]]
    energy = [t for t in context["figure_tables"] if t.title.startswith("Energy")]
    units = {t.title: next(unit for _, unit in t.headings if "/response" in unit) for t in energy}
    assert units == {"Energy and power on host": "mJ/response", "Energy and power on model:m2-ultra": "J/response"}
    told = io.StringIO()
    print_summary(RunFrames(data), Console(file=told, width=100))
    assert [line.split()[-2] for line in told.getvalue().splitlines() if "/token" in line and "n" in line] == [
        "mJ/token",
        "J/token",
    ]


ENERGY_COLUMNS = (("energy_per_token", "all", "J/token"), ("energy_per_response", "all", "J/response"))


def test_accuracy_of_a_workload_whose_trials_all_failed_is_missing_and_not_unscored() -> None:
    """Whether it would have been scored nobody knows."""
    data = run(named("first", "second"), [failed("first", error="boom"), failed("second", error="boom")])
    assert screen(data).table.headings[2].below == "missing"
    unscored = run(named("first", "second"), [*lasting("first", noisy(1.0)), *lasting("second", noisy(2.0))])
    assert screen(unscored).table.headings[2].below == "not scored"


def test_where_no_arm_has_a_figure_each_reason_stands_behind_its_arms_the_commonest_first() -> None:
    """The first arm alone has no room: that is not why the joules of the others are missing."""
    lost = (reading("all", None, reason="the sheet states no power"),)
    trials = [*lasting("second", [1.0], energy=lost), *lasting("third", [2.0], energy=lost)]
    data = run(named("first", "second", "third"), [failed("first", error="boom", kind="stable"), *trials])
    fastest, joules, accurate = (words for _, words in screen(data).sentences)
    assert fastest.endswith("first has no figure.")
    why = "second, third (the sheet states no power), first (gsm8k: 1 of 1 trials failed (boom))"
    assert joules == f"Fewest joules: no arm has a figure: {why}."
    assert accurate == "Most accurate: this workload is not scored."
    alike = run(named("second", "third"), trials)
    assert [w for _, w in screen(alike).sentences][1] == "Fewest joules: the sheet states no power."
