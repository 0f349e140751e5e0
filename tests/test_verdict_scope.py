"""A verdict says what it is over: which workloads, whose error, which road; and where its leader is behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from harness.summary import _change
from results.compare import compare_exponentials
from results.environments import Road
from results.ratios import ONE_PAIR
from results.records import OF_A_RECORDING, Score
from results.report.against import MODELLED_ONCE
from results.report.html import html_text
from results.report.standings import standings_table
from results.run_frames import RunFrames
from results.runs import RunData
from results.trials import Trial
from tests.run_builders import cell, reading, run, trial
from tests.test_standings import groups, lasting, named, noisy, screen, standing

KERNELS = Road(arithmetic="kernels", decoding="fused", n_threads=1, instruction_set="AVX2", build="0123456789ab")
BY_LAYER = KERNELS.model_copy(update={"decoding": "layer by layer"})


def of_texts(cell_id: str, nll: Sequence[float], metric: str = "perplexity", repeat: int = 0) -> Trial:
    """A trial that scored texts, one figure a text and e to their mean."""
    single = tuple(
        Score(metric="nll_nats", value=v, sample_id=f"s{i}", higher_is_better=False) for i, v in enumerate(nll)
    )
    value = math.exp(sum(nll) / len(nll))
    whole = Score(metric=metric, value=value, stderr=0.1, n=len(nll), higher_is_better=False)
    return trial(cell_id, repeat, scores=(whole, *single))


REFERENCE = (0.9, 0.5, 0.7, 0.65, 0.8, 0.6)
WORSE = (1.31, 0.9, 1.08, 1.1, 1.17, 0.97)


def asked_both(other: Sequence[float] = WORSE) -> RunData:
    """Two arms that answer six questions alike, and differ in the perplexity of texts."""
    cells = [
        cell(f"{a}-{w}", engine=a, workload=w, reference_id=f"first-{w}")
        for w in ("boolq", "fidelity")
        for a in ("first", "second")
    ]
    trials = [t for a in ("first", "second") for t in lasting(f"{a}-boolq", noisy(1.0), "111011")]
    trials += [of_texts("first-fidelity", REFERENCE), of_texts("second-fidelity", other)]
    return run(cells, trials)


# --- what an accuracy is over ----------------------------------------------------------------------------------------


def test_an_accuracy_over_a_part_of_the_scored_workloads_says_of_which_and_names_no_most_accurate() -> None:
    shown = screen(asked_both())
    assert shown.table.headings[2].below == "right answers of boolq only; fidelity stands by workload"
    told = [words for _, words in shown.sentences]
    assert not any(words.startswith("Most accurate") for words in told)
    assert told[2].startswith("Most right answers, boolq alone: not certain between first, second")
    assert told[3].startswith("Lowest perplexity on fidelity for certain: first, the baseline; the next is second, 1.4")


def test_over_a_part_nothing_is_marked_the_most_accurate_though_it_is_certain_there() -> None:
    data = asked_both()
    right = {"first-boolq": "1" * 20, "second-boolq": "1111" + "0" * 16}
    trials = [t for t in data.trials if "fidelity" in t.cell_id]
    trials += [t for c, digits in right.items() for t in lasting(c, noisy(1.0), digits)]
    shown = screen(run(data.cells, trials))
    assert shown.sentences[2][1].startswith("Most right answers, boolq alone for certain: first")
    assert not any(row.figures[2].is_best for row in shown.table.rows)


def test_an_accuracy_over_all_scored_workloads_needs_no_such_words() -> None:
    cells = [cell(f"{a}-{w}", engine=a, workload=w) for w in ("boolq", "gsm8k", "fixed") for a in ("first", "second")]
    trials = [t for c in cells for t in lasting(c.cell_id, noisy(1.0), "" if c.workload == "fixed" else "1101")]
    shown = screen(run(cells, trials))
    assert shown.table.headings[2].below == "right answers"
    assert shown.sentences[2][1].startswith("Most accurate: not certain between")


# --- perplexities are paired by text ---------------------------------------------------------------------------------


def test_perplexities_of_the_same_texts_have_a_ratio_with_the_interval_of_their_paired_logarithms() -> None:
    ((_, (_, fidelity)),) = groups(asked_both())
    found = standing(fidelity, "second", "accuracy")
    oracle = stats.ttest_rel(WORSE, REFERENCE).confidence_interval(0.95)
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(math.exp(np.mean(WORSE) - np.mean(REFERENCE)))
    assert (found.ratio.low, found.ratio.high) == pytest.approx((math.exp(oracle.low), math.exp(oracle.high)))
    assert found.is_certain
    assert (found.value, found.n) == (pytest.approx(math.exp(np.mean(WORSE))), 6)


def test_perplexities_that_differ_by_the_order_of_sums_alone_are_not_said_to_differ_for_certain() -> None:
    """Every text a little higher, as another order of sums leaves it: certain by any test, and nothing."""
    little = asked_both([nll + 6e-8 + 1e-9 * n for n, nll in enumerate(REFERENCE)])
    ((_, (_, fidelity)),) = groups(little)
    found = standing(fidelity, "second", "accuracy")
    assert found.ratio is not None
    assert found.ratio.low is not None
    assert found.ratio.low > 1
    assert not found.is_certain
    told = [words for _, words in screen(little).sentences]
    assert "Lowest perplexity on fidelity: not certain between first, second" in told[3]
    assert "no more than the order of sums makes" in told[3]


def test_a_change_of_perplexity_has_the_interval_of_the_delta_method() -> None:
    """With all texts of the reference alike, P - P0 scatters as P times the arm's logarithms do."""
    before = {f"s{i}": [0.7] for i in range(len(WORSE))}
    found = compare_exponentials(before, {f"s{i}": [v] for i, v in enumerate(WORSE)})
    perplexity = math.exp(float(np.mean(WORSE)))
    half = float(stats.t.ppf(0.975, len(WORSE) - 1)) * perplexity * float(np.std(WORSE, ddof=1)) / math.sqrt(len(WORSE))
    assert found.mean == pytest.approx(perplexity - math.exp(0.7))
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half))
    assert found.p == pytest.approx(stats.ttest_1samp(WORSE, 0.7).pvalue)


def terminal_change(data: RunData) -> str:
    rows = RunFrames(data).compared
    (row,) = (r for _, r in rows.iterrows() if r["quantity"].endswith("perplexity") and r["engine"] == "second")
    return _change(row)


def test_the_terminal_says_a_change_of_perplexity_with_its_interval_and_test() -> None:
    assert terminal_change(asked_both()).startswith("second +0.972 [0.8")
    assert ", p < 0.001" in terminal_change(asked_both())


def test_a_change_that_nothing_tests_says_why_on_the_terminal() -> None:
    """A perplexity a word is no mean over texts: they differ in their words."""
    cells = [cell(a, engine=a, workload="wikitext", reference_id="first") for a in ("first", "second")]
    trials = [of_texts(a, nll, "word_perplexity") for a, nll in (("first", REFERENCE), ("second", WORSE))]
    told = terminal_change(run(cells, trials))
    assert told.startswith("second +0.972")
    assert told.endswith("(no interval: no sample has a score of its own, so nothing can be paired)")


# --- a model that states no error ------------------------------------------------------------------------------------


def replayed(name: str, seconds: Sequence[float]) -> list[Trial]:
    """Of a recording of 10 W."""
    return [
        one.model_copy(update={"energy": (reading("all", 10 * s, method="replayed", meter="replay"),)})
        for s, one in zip(seconds, lasting(name, seconds), strict=True)
    ]


def test_no_arm_has_the_fewest_joules_of_a_recording_although_the_fastest_is_certain() -> None:
    trials = [*replayed("first", noisy(1.0)), *replayed("second", noisy(9.0, -1))]
    told = [one[1] for one in screen(run(named("first", "second"), trials)).sentences]
    assert told[0].startswith("Fastest for certain: first")
    (joules,) = (one for one in told if one.startswith("Fewest joules"))
    assert joules == f"Fewest joules: not certain between first, second ({OF_A_RECORDING})."


def modelled(joules: dict[str, float], **changes: Any) -> list[Trial]:
    """Times as the joules, of a sheet that is good to 4 % of joules and says nothing of its times."""
    found = []
    for name, j in joules.items():
        energy = reading("all", j, method="modelled", meter="sheet", uncertainty_j=0.04 * j)
        found += lasting(name, [j], energy=(energy,), time_method="modelled", **changes)
    return found


def test_times_of_a_sheet_that_states_no_error_are_not_said_to_be_within_it() -> None:
    told = screen(run(named("first", "second"), modelled({"first": 1.0, "second": 0.1}))).sentences
    assert told[0][1] == (
        "Fastest: not certain between second, first (the sheet states no error of its times, so nothing is certain)."
    )
    assert told[1][0], "of its joules it states one"


# --- a leader who is behind somewhere --------------------------------------------------------------------------------


def test_a_leader_over_all_workloads_names_those_where_it_is_behind() -> None:
    """100 J against 60 on the long one, 10 against 15 on the short one: 75 of 110 J, and 1.5 times there."""
    cells = [cell(f"{a}-{w}", engine=a, workload=w) for w in ("long", "short") for a in ("first", "second")]
    joules = {"first-long": 100.0, "second-long": 60.0, "first-short": 10.0, "second-short": 15.0}
    data = run(cells, modelled(joules))
    shown = screen(data)
    assert shown.sentences[1][1].startswith("Fewest joules beyond the model's own error: second, 0.68×")
    assert shown.sentences[1][1].endswith("; but behind for certain on short: 1.50× first.")
    noted = next(row.figures[1] for row in shown.table.rows if row.arm.name == "second")
    assert noted.is_best
    assert noted.note is not None
    assert shown.table.notes[noted.note - 1].endswith("behind another arm for certain on short")


def test_a_leader_who_is_ahead_everywhere_names_none() -> None:
    cells = [cell(f"{a}-{w}", engine=a, workload=w) for w in ("long", "short") for a in ("first", "second")]
    joules = {"first-long": 100.0, "second-long": 60.0, "first-short": 20.0, "second-short": 15.0}
    assert "behind" not in screen(run(cells, modelled(joules))).sentences[1][1]


# --- arms on unlike roads --------------------------------------------------------------------------------------------


def on_roads(first: Road, second: Road) -> RunData:
    trials = [*lasting("first", noisy(2.0), road=first), *lasting("second", noisy(1.0, -1), road=second)]
    return run(named("first", "second"), trials)


def test_arms_on_unlike_roads_have_no_certain_time_nor_joules_and_the_verdict_says_so() -> None:
    shown = screen(on_roads(KERNELS, BY_LAYER))
    why = "computed in another way (decoding fused; second: decoding layer by layer)"
    for column, (certain, words) in enumerate(shown.sentences[:2]):
        assert not certain
        assert why in words
        figures = [row.figures[column] for row in shown.table.rows]
        assert not any(f.is_best or f.is_certain for f in figures)
        assert figures[1].note is not None
        note = shown.table.notes[figures[1].note - 1]
        assert note.startswith("computed in another way (decoding layer by layer; first: decoding fused)")


def test_a_road_that_many_arms_share_is_told_once() -> None:
    trials = lasting("first", noisy(1.0), road=KERNELS)
    others = ("second", "third", "fourth")
    trials += [one for n, name in enumerate(others) for one in lasting(name, noisy(2.0 + n), road=BY_LAYER)]
    words = screen(run(named("first", *others), trials)).sentences[0][1]
    assert words.count("computed in another way") == 1
    assert "second, third, fourth (computed in another way (decoding layer by layer; first: decoding fused)" in words


def test_joules_modelled_from_a_clock_are_not_said_to_be_the_same_every_time() -> None:
    """One pair of repeats is left: of seconds that a clock gave joules differ, so one pair says nothing for certain."""
    joules = {"first": 100.0, "second": 1.0}
    cells = named(*joules)
    of_clock = [one.model_copy(update={"time_method": "measured"}) for one in modelled(joules)]
    told = screen(run(cells, of_clock))
    assert "modelled once" not in " ".join(told.table.notes)
    assert ONE_PAIR in told.table.notes
    assert not told.table.rows[1].figures[1].is_certain
    of_sheet = [one.model_copy(update={"time_method": "modelled"}) for one in of_clock]
    assert MODELLED_ONCE in screen(run(cells, of_sheet)).table.notes


def test_an_arm_of_one_process_is_said_to_be_that_beside_one_of_several() -> None:
    ranks = KERNELS.model_copy(update={"n_processes": 2, "links": "gloo"})
    why = "computed in another way (2 processes, gloo; first: one process)"
    notes = screen(on_roads(KERNELS, ranks)).table.notes
    assert any(note.startswith(why) for note in notes)


def test_the_file_of_arms_says_why_a_ratio_across_roads_is_not_certain() -> None:
    """Whoever reads arms.csv has no page beside it."""
    unlike = standings_table(groups(on_roads(KERNELS, BY_LAYER))).set_index(["arm", "quantity"])
    assert unlike.loc[("second", "time"), "reason"].startswith("computed in another way (decoding layer by")
    alike = standings_table(groups(on_roads(KERNELS, KERNELS))).set_index(["arm", "quantity"])
    assert alike.loc[("second", "time"), "reason"] is None
    # Seconds and joules of an arm stand; their quotient with those of another road does not.
    for quantity in ("time", "energy"):
        assert math.isnan(unlike.loc[("second", quantity), "ratio"])
        assert alike.loc[("second", quantity), "ratio"] == pytest.approx(0.5, rel=0.05)
        assert unlike.loc[("second", quantity), "value"] == alike.loc[("second", quantity), "value"]


def test_threads_that_a_plan_chose_are_compared() -> None:
    assert screen(on_roads(KERNELS, KERNELS.model_copy(update={"n_threads": 2}))).sentences[0][0]
    assert screen(on_roads(KERNELS, KERNELS)).sentences[0][0]


def test_names_of_workloads_are_text_in_the_new_sentences_too() -> None:
    data = asked_both()
    hostile = "<img src=x onerror=alert(1)>"
    cells = [c.model_copy(update={"workload": hostile}) if c.workload == "fidelity" else c for c in data.cells]
    assert hostile not in html_text(run(cells, data.trials))


def test_arms_on_unlike_roads_are_told_beside_the_name_of_their_device() -> None:
    assert [c.text for c in screen(on_roads(KERNELS, BY_LAYER)).caveats] == ["arms were computed in unlike ways"]
    assert screen(on_roads(KERNELS, KERNELS)).caveats == ()


def test_each_panel_says_itself_which_way_is_better() -> None:
    """Right answers: up. Perplexity and seconds: down."""
    data = asked_both()
    fixed = [cell(f"{a}-fixed", engine=a, workload="fixed") for a in ("first", "second")]
    whole = run([*data.cells, *fixed], [*data.trials, *(t for c in fixed for t in lasting(c.cell_id, noisy(1.0)))])
    joules = (reading("all", 3.0), reading("prefill", 2.0), reading("decode", 1.0))
    trials = [t.model_copy(update={"energy": joules}) for t in whole.trials]
    panels = screen(run(whole.cells, trials)).panels
    assert [(p.title, p.better.split()[1]) for p in panels] == [
        ("boolq", "up"),
        ("fidelity", "down"),
        ("fixed", "down"),
    ]
    assert "up and left is better" in str(panels[0].svg)
    page = html_text(run(whole.cells, trials))
    assert page.count("left is better</span></h3>") == 6, "each workload against its score, and against time"
