"""Which arm to take: as times which baseline, what is certain, and what is not named."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from results import tables
from results.records import Cell, Score
from results.report.first_screen import ArmTable, DeviceScreen
from results.report.html import html_text, page_context
from results.report.standings import Group, NoArmError, Quantity, Standing, device_groups, standings_table
from results.runs import RunData
from results.trials import Trial
from tests.run_builders import cell, completion, failed, reading, run, trial
from tests.scored_runs import scored

NOISE = (0.0, 0.02, -0.02, 0.01)


def lasting(cell_id: str, seconds: Sequence[float], right: str = "", **changes: Any) -> list[Trial]:
    """One trial a repeat, each of one request that takes so long, at 10 W; one sample a digit."""
    single = tuple(Score(metric="acc", value=float(digit), sample_id=f"s{i}") for i, digit in enumerate(right))
    whole = (Score(metric="acc", value=sum(s.value for s in single) / len(single), n=len(single)),) if single else ()
    return [
        trial(
            cell_id,
            i,
            scores=(*single, *whole),
            **({"energy": (reading("all", 10 * s),), "completions": [completion("s", 0.0, 4, (s / 2, s))]} | changes),
        )
        for i, s in enumerate(seconds)
    ]


def noisy(seconds: float, sign: int = 1) -> list[float]:
    return [seconds * (1 + sign * noise) for noise in NOISE]


def named(*names: str, **changes: Any) -> list[Cell]:
    return [cell(name, engine=name, **changes) for name in names]


def groups(data: RunData, baseline: str | None = None) -> list[tuple[Group, list[Group]]]:
    return device_groups(data, tables.tidy(data), baseline)


def standing(group: Group, arm: str, quantity: Quantity) -> Standing:
    return next(row[quantity] for row in group.rows if row[quantity].arm.engine == arm)


THREE = ("first", "second", "third")


def three_arms(**changes: Any) -> RunData:
    """First 2 s, second 1 s, third 8 s, each within 2 %."""
    third = [8.0 * (1 + noise) for noise in (0.01, 0.0, -0.02, 0.0)]
    trials = [*lasting("first", noisy(2.0)), *lasting("second", noisy(1.0, -1)), *lasting("third", third)]
    return run(named(*THREE, **changes), trials)


def test_the_first_arm_is_the_baseline_where_nothing_names_another() -> None:
    ((group, _),) = groups(three_arms())
    assert group.baseline.name == "first"
    assert standing(group, "third", "time").ratio is not None
    assert [standing(group, name, "time").value for name in THREE] == pytest.approx([2.005, 0.9975, 7.98])


def test_the_reference_is_the_baseline_before_the_first_arm() -> None:
    ((group, _),) = groups(three_arms(reference_id="second"))
    assert group.baseline.name == "second"


def test_the_plan_names_a_baseline_and_the_reader_another() -> None:
    data = three_arms(reference_id="second")
    info = data.info.model_copy(update={"plan": {"baseline": "third"}})
    ((by_plan, _),) = groups(replace(data, info=info))
    ((by_reader, _),) = groups(replace(data, info=info), "first")
    assert (by_plan.baseline.name, by_reader.baseline.name) == ("third", "first")
    with pytest.raises(NoArmError, match="no arm of this run is named 'fourth'; take one of first, second, third"):
        groups(data, "fourth")


def test_of_the_arms_of_a_sweep_the_first_is_the_baseline_that_their_name_means() -> None:
    names = ("plain", "int4[chunk=256]", "int4[chunk=512]")
    data = run(named(*names), [t for name in names for t in lasting(name, noisy(1.0))])
    ((by_name, _),), ((by_value, _),) = groups(data, "int4"), groups(data, names[2])
    assert (by_name.baseline.name, by_value.baseline.name) == names[1:]


def test_arms_stand_as_times_the_baseline_in_seconds_and_joules() -> None:
    ((group, _),) = groups(three_arms())
    for quantity in ("time", "energy"):
        third = standing(group, "third", quantity)
        assert third.ratio is not None
        assert third.ratio.value == pytest.approx(7.98 / 2.005)
        assert third.is_certain
        assert standing(group, "second", quantity).is_best
    assert group.verdicts["time"].is_certain


def test_arms_that_scatter_across_each_other_have_no_best() -> None:
    trials = [*lasting("first", [1.0, 1.2, 0.9, 1.1]), *lasting("second", [1.1, 1.0, 1.05, 0.9])]
    ((group, _),) = groups(run(named("first", "second"), trials))
    assert not any(row["time"].is_best or row["time"].is_certain for row in group.rows)
    assert [(r.standing.arm.name, r.why) for r in group.verdicts["time"].rivals] == [
        ("first", "their difference may be 0")
    ]


def modelled(seconds: dict[str, float], percent: float) -> RunData:
    trials = []
    for name, s in seconds.items():
        joules = reading("all", 10 * s, method="modelled", meter="m", uncertainty_j=10 * s * percent / 100)
        trials += lasting(name, [s], energy=(joules,), time_method="modelled")
    return run(named(*seconds, device="model:m2-ultra"), trials)


def test_nothing_inside_the_models_own_error_is_named_the_best() -> None:
    """Two figures of 5 % each: 1.96 sqrt(2) 0.05 = 0.139 in the logarithm, so 0.87 times is the least that counts."""
    ((near, _),) = groups(modelled({"first": 1.0, "second": 0.9}, 5.0))
    ((far, _),) = groups(modelled({"first": 1.0, "second": 0.85}, 5.0))
    assert not near.verdicts["energy"].is_certain
    assert near.verdicts["energy"].rivals[0].why == "within the error of the model"
    assert far.verdicts["energy"].is_certain
    assert standing(far, "second", "energy").is_best


def test_a_model_that_states_no_error_of_its_times_names_no_fastest() -> None:
    ((group, _),) = groups(modelled({"first": 1.0, "second": 0.1}, 5.0))
    assert not group.verdicts["time"].is_certain
    assert not standing(group, "second", "time").is_certain


def test_repeats_do_not_make_a_model_more_certain() -> None:
    """Joules from CPU time, half as many, within 2 % between repeats; the sheet is good to 50 %."""
    trials = []
    for name, seconds, sign in (("first", 2.0, 1), ("second", 1.0, -1)):
        for i, s in enumerate(noisy(seconds, sign)):
            joules = reading("all", 10 * s, method="modelled", meter="cpu", uncertainty_j=5 * s)
            trials += [
                t.model_copy(update={"repeat": i, "trial_id": f"{name}{i}"})
                for t in lasting(name, [s], energy=(joules,))
            ]
    ((group, _),) = groups(run(named("first", "second"), trials))
    assert group.verdicts["time"].is_certain
    assert not group.verdicts["energy"].is_certain
    second = standing(group, "second", "energy").ratio
    assert second is not None
    assert second.is_clear, "the repeats alone would say so"


def test_accuracy_is_certain_where_mcnemars_test_agrees() -> None:
    """10 of 40 lost, all one way: p = 2 / 2^10. 5 of 40: p = 0.0625, which the interval alone would not tell."""

    def told(n_lost: int) -> Standing:
        right = {"first": "1" * 40, "second": "1" * (40 - n_lost) + "0" * n_lost}
        trials = [t for name in right for t in lasting(name, noisy(1.0), right[name])]
        ((group, _),) = groups(run(named(*right), trials))
        return standing(group, "second", "accuracy")

    assert told(10).is_certain
    assert (told(10).value, told(10).n) == (0.75, 40)
    assert not told(5).is_certain


def test_accuracy_is_no_surer_where_a_sweep_asks_the_same_items_again() -> None:
    """7 of 100 answers lost and 1 won are not certain (p = 0.07), and no more so in each of three workloads: they were,
    as 21 and 3 of 300."""

    def told(n_workloads: int) -> Standing:
        workloads = [f"gsm8k[max_new_tokens={128 << i}]" for i in range(n_workloads)]
        answers = {"first": "1" * 67 + "0" * 33, "second": "0" * 7 + "1" * 61 + "0" * 32}
        cells = [cell(f"{arm}{w}", engine=arm, workload=w) for arm in answers for w in workloads]
        trials = [scored(f"{arm}{w}", right) for arm, right in answers.items() for w in workloads]
        ((whole, _),) = groups(run(cells, trials))
        return standing(whole, "second", "accuracy")

    once, thrice = told(1), told(3)
    assert (once.is_certain, thrice.is_certain) == (False, False)
    assert once.ratio is not None
    assert thrice.ratio is not None
    assert (thrice.ratio.low, thrice.ratio.high) == pytest.approx((once.ratio.low, once.ratio.high))
    assert once.remark is None
    assert thrice.remark == (
        "several workloads ask the same: 300 samples are of 100 items, and the interval is over the items"
    )


def test_accuracy_is_no_surer_where_the_items_of_one_task_are_asked_in_the_words_of_another() -> None:
    """7 of 100 lost and 1 won, in each of three tasks over the same rows; and in three over rows of their own."""

    def told(*tasks: str) -> Standing:
        answers = {"first": "1" * 67 + "0" * 33, "second": "0" * 7 + "1" * 61 + "0" * 32}
        cells = [cell(f"{arm}{task}", engine=arm, workload=task) for arm in answers for task in tasks]
        trials = []
        for one, right in ((c, answers[c.engine]) for c in cells):
            asked = scored(one.cell_id, right)
            own = (
                s if s.sample_id is None else s.model_copy(update={"sample_id": f"{one.workload}/{s.sample_id}"})
                for s in asked.scores
            )
            trials.append(asked.model_copy(update={"scores": tuple(own)}))
        ((whole, _),) = groups(run(cells, trials))
        return standing(whole, "second", "accuracy")

    assert not told("gsm8k", "gsm8k_cot", "gsm8k_cot_zeroshot").is_certain
    assert told("gsm8k", "boolq", "hellaswag").is_certain


def test_random_weights_are_not_compared() -> None:
    trials = [*lasting("first", noisy(1.0), "1" * 20), *lasting("second", noisy(1.0), "0" * 20)]
    ((group, _),) = groups(run(named("first", "second", model_note="random weights"), trials))
    assert standing(group, "second", "accuracy").value is None
    assert "the weights are random" in (standing(group, "second", "accuracy").reason or "")


def test_a_score_where_less_is_better_is_ranked_downwards() -> None:
    values = {"first": 9.0, "second": 3.0}
    trials = [
        trial(name, 0, scores=(Score(metric="perplexity", value=v, stderr=0.1, n=50, higher_is_better=False),))
        for name, v in values.items()
    ]
    ((group, _),) = groups(run(named(*values), trials))
    leader = group.verdicts["accuracy"].leader
    assert leader is not None
    assert (leader.arm.name, leader.value) == ("second", 3.0)
    assert "nothing tests it" in group.verdicts["accuracy"].rivals[0].why
    assert not group.verdicts["accuracy"].is_certain


def test_all_workloads_together_are_one_pass_over_all_that_was_asked() -> None:
    """1 s and 9 s against 2 s and 10 s: 10 / 12 of the time, 5 s a request against 6."""
    cells = [cell(f"{name}{w}", engine=name, workload=w) for w in ("gsm8k", "boolq") for name in ("first", "second")]
    seconds = {"firstgsm8k": 2.0, "secondgsm8k": 1.0, "firstboolq": 10.0, "secondboolq": 9.0}
    trials = [t for c, s in seconds.items() for t in lasting(c, [s, s * 1.0001], "11" if "first" in c else "10")]
    ((whole, single),) = groups(run(cells, trials))
    assert [g.workload for g in single] == ["gsm8k", "boolq"]
    second = standing(whole, "second", "time")
    assert second.ratio is not None
    assert (second.ratio.value, second.value) == (pytest.approx(10 / 12), pytest.approx(5.0, rel=1e-3))
    assert (standing(whole, "second", "accuracy").value, standing(whole, "second", "accuracy").n) == (0.5, 4)


def test_an_arm_that_failed_a_workload_is_missing_from_all_of_them_and_says_why() -> None:
    cells = [cell(f"{name}{w}", engine=name, workload=w) for w in ("gsm8k", "boolq") for name in ("first", "second")]
    trials = [t for c in cells[:3] for t in lasting(c.cell_id, noisy(1.0))]
    ((whole, _),) = groups(run(cells, [*trials, failed("secondboolq", error="out of memory")]))
    second = standing(whole, "second", "time")
    assert (second.value, second.ratio) == (None, None)
    assert "boolq: 1 of 1 trials failed (out of memory)" in (second.reason or "")


def test_joules_over_all_workloads_say_where_trials_lack_them() -> None:
    """On the second workload the meter of one arm died in two of four windows: its sum counts the other two."""
    cells = [cell(f"{arm}{n}", engine=arm, workload=f"w{n}") for arm in "ab" for n in (1, 2)]
    trials = [t for c in cells for t in lasting(c.cell_id, noisy(2.0))]
    died = (reading("all", None, reason="gap of 1.2 s"),)
    trials = [t.model_copy(update={"energy": died}) if t.cell_id == "b2" and t.repeat > 1 else t for t in trials]
    data = run(cells, trials)
    why = "2 of 4 trials without a counter figure: gap of 1.2 s"
    ((whole, (first, second)),) = groups(data)
    joules = standing(whole, "b", "energy")
    assert (joules.n, (joules.remark or "").startswith(f"w2: {why};")) == (2, True)
    assert (standing(second, "b", "energy").remark or "").startswith(f"{why};")
    assert {standing(first, "b", "energy").remark, standing(whole, "a", "energy").remark} == {None}
    assert standing(whole, "b", "time").remark is None
    assert f"w2: {why}" in html_text(data)


def test_devices_and_ways_of_measuring_are_never_compared() -> None:
    data = run(
        [*named("first", "second"), cell("third", engine="third", device="model:m2-ultra")],
        [
            *lasting("first", noisy(1.0)),
            *lasting("second", noisy(0.5), energy=(reading("all", 5.0, method="modelled", meter="cpu"),)),
            *lasting("third", noisy(0.1)),
        ],
    )
    found = groups(data)
    assert [g.device for g, _ in found] == ["host", "model:m2-ultra"]
    second = standing(found[0][0], "second", "energy")
    assert second.ratio is None
    assert second.reason == "not compared: second is modelled, cpu; first is counter, nvml"
    assert not found[0][0].verdicts["energy"].is_certain


def test_the_table_for_a_file_holds_every_arm_and_quantity() -> None:
    frame = standings_table(groups(three_arms()))
    assert len(frame) == 9
    first, second = (frame[(frame["arm"] == name) & (frame["quantity"] == "time")].iloc[0] for name in THREE[:2])
    assert (first["ratio"], first["baseline"]) == (1.0, "first")
    assert bool(second["certainly_best"])
    assert second["ratio_low"] < second["ratio"] < second["ratio_high"] < 1


# --- the page --------------------------------------------------------------------------------------------------------


def screen(data: RunData) -> DeviceScreen:
    (found,) = page_context(data)["screens"]
    assert isinstance(found, DeviceScreen)
    return found


def marks(table: ArmTable) -> list[tuple[str, bool]]:
    return [(row.arm.name, figure.is_best) for row in table.rows for figure in row.figures[:1]]


def test_the_page_names_the_fastest_and_how_far_the_others_are() -> None:
    shown = screen(three_arms())
    certain, sentence = shown.sentences[0]
    assert certain
    assert sentence.startswith("Fastest for certain: second, 0.50× [0.4")
    assert marks(shown.table) == [("first", False), ("second", True), ("third", False)]
    first, _, third = (row.figures[0] for row in shown.table.rows)
    assert (first.ratio, first.value) == ("1×", "2.00 s")
    assert third.ratio == "3.98×"
    assert third.order == pytest.approx(3.98, abs=0.01)


def test_the_page_says_between_whom_it_is_not_certain_and_who_is_behind() -> None:
    trials = [
        *lasting("first", [1.0, 1.2, 0.9, 1.1]),
        *lasting("a, b", [1.1, 1.0, 1.05, 0.9]),
        *lasting("slow", [4.0, 4.4, 4.2, 4.1]),
    ]
    sentence = screen(run(named("first", "a, b", "slow"), trials)).sentences[0][1]
    assert sentence.startswith(
        "Fastest: not certain between “a, b”, first (their difference may be 0); behind “a, b” for certain"
    )
    # 4.175 s against 1.0125 s.
    assert "slow, 4.1× [" in sentence


def test_the_picture_names_each_arm_by_its_symbol_and_starts_at_zero() -> None:
    trials = [*lasting("first", noisy(1.0), "1" * 20), *lasting("second", noisy(0.5), "1" * 10 + "0" * 10)]
    (panel,) = screen(run(named("first", "second"), trials)).panels
    svg = str(panel.svg)
    assert "first: 1." in svg
    assert "second: " in svg
    assert "50 %" in svg
    assert ">0</text>" in svg
    assert svg.count('class="point"') == 2


def test_an_arm_that_computes_less_is_drawn_by_joules_a_token_that_was_asked() -> None:
    """4 prompt and 2 generated tokens each: 10.025 J and 5.0125 J a request."""
    cells = [cell("c1", engine="plain"), cell("c2", engine="reusing", engine_parameters={"reuse_prefix": True})]
    kept = [completion("s", 0.0, 4, (0.25, 0.5)).model_copy(update={"n_cached_tokens": 3})]
    trials = [*lasting("c1", noisy(1.0), "11"), *lasting("c2", noisy(0.5), "11", completions=kept, prefill_tokens=1)]
    (panel,) = screen(run(cells, trials)).panels
    assert "J/token asked across" in str(panel.svg)
    assert "plain: 1.67, 100 %; reusing: 0.835, 100 %" in str(panel.svg)


def test_a_name_from_a_plan_is_text_in_table_picture_and_sentence() -> None:
    hostile = '<b onclick=alert(1)>&amp;"x'
    trials = [*lasting("first", noisy(1.0), "1" * 9 + "0"), *lasting("second", noisy(0.5, -1), "1" * 10)]
    cells = [cell("first", engine="first"), cell("second", engine=hostile)]
    data = run(cells, trials)
    page = html_text(data)
    assert "<b onclick" not in page
    (panel,) = screen(data).panels
    assert "&lt;b onclick=alert(1)&gt;&amp;amp;" in str(panel.svg)
    assert screen(data).sentences[0][1].startswith(f"Fastest for certain: “{hostile}”, 0.50×")


def test_a_shared_axis_starts_where_every_interval_is_whole() -> None:
    """9 and 10 of 10: Wilson's intervals reach down to 0.60 and 0.72, so the axis starts at 50 %, its ticks at 60."""
    trials = [*lasting("first", noisy(1.0), "1" * 9 + "0"), *lasting("second", noisy(0.5, -1), "1" * 10)]
    (panel,) = screen(run(named("first", "second"), trials)).panels
    ticks = re.findall(r'text-anchor="end">([^<]*)<', str(panel.svg))
    assert (ticks[0], ticks[-1]) == ("60", "100")


def test_arms_that_differ_much_get_a_logarithmic_axis() -> None:
    trials = [*lasting("first", noisy(1.0), "11"), *lasting("second", noisy(100.0, -1), "11")]
    (panel,) = screen(run(named("first", "second"), trials)).panels
    ticks = re.findall(r'text-anchor="middle">([^<]*)<', str(panel.svg))[:-2]
    assert [float(b) / float(a) for a, b in itertools.pairwise(ticks)] == pytest.approx([10.0] * (len(ticks) - 1))


def test_an_interval_that_leaves_out_1_does_not_touch_it_by_rounding() -> None:
    """Half a width of 0.47 leaves one digit, and 1.03 would be shown as 1.0."""
    trials = [*lasting("first", [1.0, 1.2, 0.9, 1.1, 1.0]), *lasting("second", [1.2, 2.4, 1.2, 2.0, 1.3])]
    shown = screen(run(named("first", "second"), trials))
    figure = shown.table.rows[1].figures[0]
    assert figure.is_certain
    assert float(figure.interval.strip("[]").split(", ")[0]) > 1


def test_an_interval_below_0_ends_at_the_axis_and_makes_it_neither_negative_nor_logarithmic() -> None:
    trials = [*lasting("first", [1.0, 9.0, 1.0], "11"), *lasting("second", [2.0, 1.0, 3.0], "11")]
    (panel,) = screen(run(named("first", "second"), trials)).panels
    ticks = [float(t) for t in re.findall(r'text-anchor="middle">([^<]*)<', str(panel.svg))[:-2]]
    assert ticks[0] == 0
    assert np.diff(ticks) == pytest.approx(ticks[1])


def test_a_ratio_with_a_wide_interval_is_not_rounded_to_nothing() -> None:
    trials = [*lasting("first", [10.0, 11.0, 9.0]), *lasting("second", [1.0, 9.0, 2.0])]
    shown = screen(run(named("first", "second"), trials)).table.rows[1].figures[0]
    assert shown.interval.startswith("[0")
    assert shown.ratio == "0.4×"


def test_a_reason_names_the_arm_that_scatters_too_widely_and_counts_pairs() -> None:
    """In a verdict that is who leads: "the baseline" was another arm, and samples were "repeats"."""
    (whole, _), *_ = groups(run(named("first", "second"), [*lasting("first", (9, 10)), *lasting("second", (0.1, 8))]))
    told = "second scatters too widely over 2 pairs for an interval"
    assert whole.baseline.engine == "first"
    assert whole.verdicts["time"].leader is not None
    assert whole.verdicts["time"].leader.arm.engine == "second"
    assert [rival.why for rival in whole.verdicts["time"].rivals] == [told]
