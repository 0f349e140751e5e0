"""Answers of the arms: what was said, what it cost and what the meter cannot tell, and which of them a page shows."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.answers import NOT_KEPT, Answered, answer_table, answered_samples
from results.derivation import SHARED
from results.records import Completion, PowerTrace, Sample, Score
from results.report.arms import arms_of
from results.report.csv import csv_text
from results.report.samples import (
    ANSWER_CHARACTERS,
    QUESTION_CHARACTERS,
    SHOWN_BY_COST,
    SHOWN_BY_DISAGREEMENT,
    chosen,
    sample_panels,
    shortened,
)
from results.runs import RunData
from results.trials import Trial
from tests.run_builders import cell, completion, reading, run, trial

YES_NO = Sample(sample_id="q", question="Is it?", expected="yes", choices=("no", "yes"))


def constant(watts: float, end_s: float = 20.0, update_s: float = 0.0) -> PowerTrace:
    times_s = np.linspace(0, end_s, int(end_s * 100) + 1)
    return PowerTrace(
        "nvml",
        "gpu",
        "power",
        "integrated power",
        times_s,
        np.full(len(times_s), watts),
        0.01,
        update_period_s=update_s,
    )


def choice(n: int, start_s: float, loglikelihood: float) -> Completion:
    done = completion("q", start_s, 6, ())
    return done.model_copy(update={"request_id": f"q#{n}", "loglikelihood": loglikelihood})


def answering(text: str, sample: str = "q", start_s: float = 0.0, lasting_s: float = 2.0) -> Completion:
    done = completion(sample, start_s, 4, (start_s + lasting_s / 2, start_s + lasting_s))
    return done.model_copy(update={"text": text})


def metered(completions: list[Completion], repeat: int = 0, cell_id: str = "c1", **scores: float) -> Trial:
    return trial(
        cell_id,
        repeat,
        completions=completions,
        energy=(reading("all", 1.0),),
        scores=tuple(Score(metric=m, value=v, sample_id="q") for m, v in scores.items()),
    )


def data(
    *trials: Trial, watts: float = 3.0, trace: PowerTrace | None = None, samples: tuple[Sample, ...] = (YES_NO,)
) -> RunData:
    cells = [cell(c, engine=c) for c in dict.fromkeys(t.cell_id for t in trials)]
    made = run(cells, trials, {t.trial_id: (trace or constant(watts),) for t in trials})
    return replace(made, samples={("gsm8k", "tiny-moe"): samples})


def test_a_multiple_choice_answer_is_its_likeliest_choice_and_costs_all_its_requests() -> None:
    one = metered([choice(0, 0.0, -3.0), choice(1, 1.0, 0.0)], acc=1.0)
    (found,) = answered_samples(data(one))
    (answer,) = found.answers
    assert (answer.said, dict(answer.scores)) == ("yes", {"acc": 1.0})
    assert (answer.prompt_tokens, answer.generated_tokens, answer.e2e_s) == (12, 0, 2.0)
    assert answer.energy_j == pytest.approx(3.0 * 2.0)
    assert answer.energy_method == "integrated power"


def test_windows_of_a_text_are_no_choices() -> None:
    """A text longer than the model's context is asked in windows; its likelihood is their product."""
    text = Sample(sample_id="q", question="A whole page.", expected="A whole page.")
    one = metered([choice(0, 0.0, -30.0), choice(1, 1.0, -2.5)])
    (found,) = answered_samples(data(one, samples=(text,)))
    assert found.answers[0].said == "log-likelihood -32.5, in 2 windows"


def test_a_choice_asked_again_without_its_question_is_no_further_choice() -> None:
    """acc_mutual_info: two choices, then both alone, where one is likelier than anything before it."""
    likelihoods = (-3.0, -1.0, -0.5, -4.0)
    one = metered([choice(i, float(i), likelihood) for i, likelihood in enumerate(likelihoods)])
    assert answered_samples(data(one))[0].answers[0].said == "yes"


def test_figures_are_means_over_trials_and_a_changed_answer_is_told() -> None:
    first = metered([answering("left", lasting_s=2.0)], 0, acc=1.0)
    second = metered([answering("right", lasting_s=4.0)], 1, acc=0.0)
    (found,) = answered_samples(data(first, second))
    (answer,) = found.answers
    assert (answer.said, answer.varies, answer.n_trials) == ("left", True, 2)
    assert (answer.e2e_s, answer.scores["acc"]) == (3.0, 0.5)
    assert answer.energy_j == pytest.approx(3.0 * 3.0)


def test_an_answer_too_short_for_the_meter_has_a_reason_and_no_joules() -> None:
    slow = constant(3.0, update_s=0.25)
    (found,) = answered_samples(data(metered([answering("x")]), trace=slow))
    (answer,) = found.answers
    assert answer.energy_j is None
    assert "8 updates of 250 ms; 10 are needed" in (answer.energy_reason or "")
    assert answer.energy_method == "missing"


def test_requests_that_ran_at_the_same_time_have_no_joules_of_their_own() -> None:
    """Two overlap, the third begins when the longer of them ends."""
    completions = [
        answering("a", "q", 0.0, 4.0),
        answering("b", "r", 1.0, 2.0),
        answering("c", "s", 4.0, 2.0),
    ]
    found = {one.sample.sample_id: one.answers[0] for one in answered_samples(data(metered(completions)))}
    assert (found["q"].energy_reason, found["r"].energy_reason) == (SHARED, SHARED)
    assert found["q"].energy_j is None
    assert found["s"].energy_j == pytest.approx(3.0 * 2.0)


def test_marked_trials_are_left_out_and_old_runs_have_no_words() -> None:
    good, marked = metered([answering("x")]), metered([answering("y")], 1)
    marked = marked.model_copy(update={"marks": ("throttled",)})
    (found,) = answered_samples(data(good, marked, samples=()))
    assert (found.sample.question, found.answers[0].said, found.answers[0].n_trials) == (NOT_KEPT, "x", 1)


def test_disagreement_is_the_share_of_pairs_that_differ() -> None:
    said = {"a": ("left", 1.0), "b": ("left ", 1.0), "c": ("right", 0.0), "d": ("up", 0.0)}
    trials = [metered([answering(text)], cell_id=c, acc=score) for c, (text, score) in said.items()]
    (found,) = answered_samples(data(*trials))
    assert found.verdicts_differ == pytest.approx(4 / 6)
    assert found.answers_differ == pytest.approx(5 / 6)


def test_the_table_has_every_answer_uncut_and_reads_back() -> None:
    long = "=" + "very long " * 1000
    trials = [metered([answering(long)], cell_id=c, acc=1.0) for c in ("a", "b")]
    made = data(*trials)
    table = answer_table(made, answered_samples(made))
    assert list(table["engine"]) == ["a", "b"]
    assert list(table["said"]) == [long, long]
    assert json.loads(table["choices"].iloc[0]) == ["no", "yes"]
    assert table["energy_j"].tolist() == pytest.approx([6.0, 6.0])
    assert f"'{long}" in csv_text(table)
    assert answer_table(run([], []), []).empty


# --- what a page shows -----------------------------------------------------------------------------------------------


def many(n: int) -> list[Answered]:
    """Sample i lasts i seconds in both arms; they differ on the first five."""
    trials = []
    for c in ("a", "b"):
        at_s, completions = 0.0, []
        for i in range(n):
            text = c if i < 5 else "same"
            completions.append(answering(text, f"s{i}", at_s, 0.1 * (i + 1)))
            at_s = completions[-1].end_s
        trials.append(trial(c, 0, completions=completions))
    cells = [cell(c, engine=c) for c in ("a", "b")]
    return answered_samples(run(cells, trials))


def test_a_page_holds_the_dearest_and_the_most_disputed_samples() -> None:
    shown = [one.sample.sample_id for one in chosen(many(100))]
    assert len(shown) <= SHOWN_BY_COST + SHOWN_BY_DISAGREEMENT
    assert {f"s{i}" for i in range(5)} <= set(shown)
    assert {f"s{i}" for i in range(100 - SHOWN_BY_COST, 100)} <= set(shown)
    assert len(chosen(many(8))) == 8


def test_a_panel_says_how_many_samples_there_are() -> None:
    answered = many(100)
    (panel,) = sample_panels(answered, arms_of([a.cell for a in answered[0].answers]))
    assert panel["total"] == 100
    assert len(panel["samples"]) < 100
    assert json.loads(json.dumps(panel, allow_nan=False)) == json.loads(json.dumps(panel))


def panel_answer(*scores: Score, expected: str | None = "yes") -> dict[str, Any]:
    own = tuple(score.model_copy(update={"sample_id": "q"}) for score in scores)
    one = trial(completions=[answering("x")], scores=own)
    made = data(one, samples=(Sample(sample_id="q", question="Is it?", expected=expected),))
    (panel,) = sample_panels(answered_samples(made), arms_of(made.cells))
    shown: dict[str, Any] = panel["samples"][0]["answers"][0]
    return shown


@pytest.mark.parametrize(
    ("score", "shown", "wrong"),
    [
        (Score(metric="acc", value=1.0), "right", False),
        (Score(metric="acc", value=0.0), "wrong", True),
        (Score(metric="bleu_max", value=0.0), "0", False),
        (Score(metric="bleu_diff", value=0.0), "0", False),
        (Score(metric="nll_nats", value=1.0, higher_is_better=False), "1", False),
        (Score(metric="4096", value=0.5), "0.5", False),
    ],
)
def test_only_scores_of_0_or_1_are_called_right_or_wrong(score: Score, shown: str, wrong: bool) -> None:
    answer = panel_answer(score)
    assert answer["scores"] == [(score.metric, shown)]
    assert answer["wrong"] is wrong


def test_an_answer_is_wrong_by_the_first_score_that_can_say_so_and_where_a_right_one_is_known() -> None:
    scores = (Score(metric="bleu_max", value=12.5), Score(metric="bleu_acc", value=0.0))
    assert panel_answer(*scores)["scores"] == [("bleu_max", "12.5"), ("bleu_acc", "wrong")]
    assert panel_answer(*scores)["wrong"] is True
    assert panel_answer(*scores, expected=None)["wrong"] is False


@given(st.text(max_size=3000))
def test_a_shortened_text_keeps_both_ends_and_counts_what_is_left_out(text: str) -> None:
    head, tail = QUESTION_CHARACTERS
    short = shortened(text, QUESTION_CHARACTERS)
    if len(text) <= head + tail:
        assert short == text
    else:
        assert short.startswith(text[:head])
        assert short.endswith(text[-tail:])
        assert f"… {len(text) - head - tail} characters …" in short


def test_the_data_of_a_page_is_bounded_whatever_the_texts() -> None:
    huge = "x" * 1_000_000
    made = data(metered([answering(huge)]), samples=(Sample(sample_id="q", question=huge, expected=huge),))
    panels: list[dict[str, Any]] = sample_panels(answered_samples(made), arms_of(made.cells))
    assert len(json.dumps(panels)) < sum(QUESTION_CHARACTERS) + 2 * sum(ANSWER_CHARACTERS) + 1000
    assert not pd.isna(panels[0]["samples"][0]["seconds"])
    assert math.isfinite(panels[0]["samples"][0]["disagreement"])
