"""Accuracy beside energy: what is compared with the reference, what is refused, and how the report says it."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from results import tables
from results.accuracy_energy import COLUMNS, IS_REFERENCE, NO_REFERENCE, accuracy_energy
from results.compare import mcnemar
from results.environments import Road
from results.records import Score
from results.report.accuracy import AccuracyTable
from results.report.figure_tables import Entry
from results.report.html import page_context
from results.runs import RunData
from results.trials import Trial
from tests.run_builders import cell, reading, run
from tests.scored_runs import arm, scored, two_arms

N = 20


def compared(data: RunData) -> pd.DataFrame:
    return accuracy_energy(data, tables.tidy(data))


def row(data: RunData, cell_id: str, quantity: str) -> pd.Series:
    frame = compared(data)
    chosen = frame[(frame["cell"] == cell_id) & (frame["quantity"] == quantity)]
    assert len(chosen) == 1, frame
    return chosen.iloc[0]


def test_accuracy_changes_by_what_mcnemar_says_of_the_same_samples() -> None:
    data = two_arms("1" * 15 + "0" * 5, "1" * 11 + "0" * 8 + "1")
    found, expected = row(data, "tiers", "acc"), mcnemar(n10=4, n01=1, n=N)
    assert found["change"] == pytest.approx(-3 / N)
    assert (found["change_low"], found["change_high"], found["p"]) == (expected.low, expected.high, expected.p)
    assert (found["n_pairs"], found["n_changed"], found["test"]) == (N, 5, "McNemar, exact")
    assert found["change_percent"] == pytest.approx(-20.0)
    assert (found["reference"], found["standard_error"], found["n_of"]) == ("exact", pytest.approx(0.1), "samples")


def test_a_reference_with_nothing_right_has_a_change_and_no_percent() -> None:
    found = row(two_arms("0" * N, "1" * 9 + "0" * 11), "tiers", "acc")
    assert found["change"] == pytest.approx(9 / N)
    assert found["p"] == pytest.approx(mcnemar(n10=0, n01=9, n=N).p)
    assert pd.isna(found["change_percent"])


def test_joules_are_compared_repeat_by_repeat() -> None:
    """8 tokens; differences of the windows -3, -2.9, -2.8 J."""
    found = row(two_arms("10", "10"), "tiers", "energy_per_token")
    assert found["change"] == pytest.approx(-2.9 / 8)
    # s = 0.1, t_{0.975,2} = 4.302653.
    assert found["change_low"] == pytest.approx((-2.9 - 4.302653 * 0.1 / 3**0.5) / 8)
    assert (found["method"], found["meter"]) == ("counter", "nvml")
    assert found["meter_uncertainty_percent"] == pytest.approx(5)


def test_a_change_in_percent_is_of_the_pairs_that_its_change_is_of() -> None:
    """A repeat that the reference alone has is in no pair: over 6.1 J in the mean the pairs differ by -2.9 J."""
    data = two_arms("10", "10")
    alone = next(t for t in data.trials if t.cell_id == "exact")
    dear = alone.model_copy(
        update={
            "trial_id": "alone",
            "repeat": 9,
            "energy": tuple(e.model_copy(update={"energy_j": 9 * (e.energy_j or 0)}) for e in alone.energy),
        }
    )
    found = row(replace(data, trials=(*data.trials, dear)), "tiers", "energy_per_token")
    assert found["n_pairs"] == 3
    assert found["change"] == pytest.approx(-2.9 / 8)
    assert found["change_percent"] == pytest.approx(-100 * 2.9 / 6.1)


def test_the_reference_and_rates_have_no_change_and_say_so() -> None:
    data = two_arms("10", "10")
    assert row(data, "exact", "acc")["change_reason"] == IS_REFERENCE
    assert row(data, "tiers", "drop_rate")["value"] == pytest.approx(1.5)
    assert pd.isna(row(data, "tiers", "drop_rate")["change"])
    assert tuple(compared(data).columns) == COLUMNS


def test_unlike_samples_are_refused_in_a_sentence() -> None:
    found = row(two_arms("1011", "101"), "tiers", "acc")
    assert pd.isna(found["change"])
    assert "not compared with exact: not the same samples: 1 of 4 only in the first" in found["change_reason"]


def test_accuracy_is_compared_over_devices_and_joules_are_not() -> None:
    data = two_arms("1111", "1011", device="model:m2-ultra")
    assert row(data, "tiers", "acc")["change"] == pytest.approx(-0.25)
    assert "obtained in the same way: exact" in row(data, "tiers", "energy_per_token")["change_reason"]


def test_joules_of_another_method_are_not_compared() -> None:
    data = two_arms("10", "10")
    modelled = tuple(
        t.model_copy(update={"energy": (reading("all", 1.0, method="modelled", meter="sheet"),)})
        if t.cell_id == "tiers"
        else t
        for t in data.trials
    )
    assert pd.isna(row(replace(data, trials=modelled), "tiers", "energy_per_token")["change"])


ROADS = {
    d: Road(arithmetic="kernels", prefill="grouped", decoding=d, n_threads=2, instruction_set="AVX2")
    for d in ("fused", "plan by plan")
}


def on_roads(exact: str, tiers: str) -> RunData:
    """How each arm decoded."""
    data, decoding = two_arms("10", "11"), {"exact": exact, "tiers": tiers}
    return replace(data, trials=tuple(t.model_copy(update={"road": ROADS[decoding[t.cell_id]]}) for t in data.trials))


def test_costs_have_no_change_across_roads_and_say_which() -> None:
    """Joules hold the decoding; the time to the first token holds the prefill alone, which both did alike."""
    apart, alike = on_roads("fused", "plan by plan"), on_roads("fused", "fused")
    found = row(apart, "tiers", "energy_per_token")
    assert found[["change", "change_low", "change_percent", "p"]].isna().all()
    assert found["change_reason"] == (
        "computed in another way (decoding plan by plan; exact: decoding fused): that would be in a change too, so"
        " there is none"
    )
    assert row(alike, "tiers", "energy_per_token")["change"] == pytest.approx(-2.9 / 8)
    assert row(apart, "tiers", "ttft")["change"] == row(alike, "tiers", "ttft")["change"] == 0
    assert row(apart, "tiers", "acc")["change"] == pytest.approx(0.5), "answers are compared on every road"
    entry = shown(apart).rows[1].energy_change
    assert (entry.text, entry.below) == ("none", ())


def test_modelled_joules_have_a_change_and_no_p() -> None:
    """Three repeats scatter little around the change; how wrong the model is none of them can show."""
    data = two_arms("10", "10")
    modelled = replace(
        data,
        trials=tuple(
            t.model_copy(
                update={
                    "energy": tuple(
                        e.model_copy(update={"method": "modelled", "uncertainty_j": e.energy_j / 2}) for e in t.energy
                    )
                }
            )
            for t in data.trials
        ),
    )
    measured, found = (row(one, "tiers", "energy_per_token") for one in (data, modelled))
    assert measured["p"] < 0.001
    assert (found["change"], found["change_low"]) == (measured["change"], measured["change_low"])
    assert pd.isna(found["p"])
    assert found["test"] is None
    assert found["change_reason"].startswith("modelled, ± 50 %: the interval holds the scatter of the repeats")
    table = shown(modelled)
    entry = table.rows[1].energy_change
    assert entry.below[-1] == "3 pairs"
    assert table.notes[(entry.note or 0) - 1] == found["change_reason"]


def test_a_plan_without_a_lossless_arm_and_an_old_run_have_no_change_but_a_reason() -> None:
    data = run([cell("c1")], [scored("c1", "10")])
    assert row(data, "c1", "acc")["change_reason"] == NO_REFERENCE


def test_a_score_that_is_no_mean_over_samples_has_a_change_and_no_test() -> None:
    def perplexity(cell_id: str, value: float) -> Trial:
        return scored(cell_id, "12", scores=(Score(metric="perplexity", value=value, n=2, higher_is_better=False),))

    data = run([arm("exact"), arm("int4")], [perplexity("exact", 20.0), perplexity("int4", 25.0)])
    found = row(data, "int4", "perplexity")
    assert (found["change"], found["change_percent"]) == (5.0, 25.0)
    assert pd.isna(found["p"])
    assert "no sample has a score of its own" in found["change_reason"]


# --- the report ------------------------------------------------------------------------------------------------------


def shown(data: RunData) -> AccuracyTable:
    (table,) = page_context(data)["accuracy_tables"]
    assert isinstance(table, AccuracyTable)
    return table


def test_the_report_names_the_reference_and_puts_changes_beside_values() -> None:
    table = shown(two_arms("1" * 15 + "0" * 5, "1" * 11 + "0" * 8 + "1"))
    assert table.reference == "exact (on-demand)"
    assert table.headings == [("acc", "more is better")]
    exact, tiers = table.rows
    assert exact.scores[0].change.text == "reference"
    # scipy.stats.binomtest(15, 20).proportion_ci(method="wilson"): [0.5313, 0.8881].
    assert exact.scores[0].value == Entry("0.75", ("[0.53, 0.89]", "s.e. 0.100, n = 20"))
    change = tiers.scores[0].change
    # Bonett and Price by hand: -3 / 22 -+ 1.96 sqrt((7 - 9 / 22) / 22 / 22).
    assert (change.text, change.below) == ("-0.150", ("[-0.4, 0.1]", "p = 0.38, 5 of 20 changed"))
    assert (tiers.dropped.text, tiers.padded.text) == ("1.50", "25.0")
    assert tiers.energy.below[-1] == "counter ± 5 %"
    assert table.energy_unit == "mJ/token"


def test_random_weights_are_said_and_a_missing_change_has_its_note() -> None:
    data = two_arms("1011", "101")
    cells = tuple(c.model_copy(update={"model_note": "random weights"}) for c in data.cells)
    table = shown(replace(data, cells=cells))
    assert "random" in (table.warning or "")
    assert table.rows[1].scores[0].change.text == "none"
    assert "not the same samples" in table.notes[(table.rows[1].scores[0].change.note or 0) - 1]
