"""Samples to be browsed in the report: what was asked, what each arm said, right or wrong, and what it cost.

A page cannot hold every sample of a large run. Of each workload and device it holds those that cost most and those on
which the arms disagree most (`SHOWN_BY_COST`, `SHOWN_BY_DISAGREEMENT`), long texts cut in the middle; all of it, uncut,
is in samples.csv. The page's script writes these texts as text, never as markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results.answers import Answer, Answered
from results.report.arms import Arm
from results.units import format_quantity

SHOWN_BY_COST = SHOWN_BY_DISAGREEMENT = 30
QUESTION_CHARACTERS, ANSWER_CHARACTERS = (400, 1000), (500, 200)
"""Kept at the start and at the end of a text: a question's end is what is asked, an answer's start what is said."""
BROWSE_SAMPLES = (Path(__file__).parent / "browse_samples.js").read_text(encoding="utf-8")
RIGHT_OR_WRONG = {1.0: "right", 0.0: "wrong"}
"""Of scores that are 0 or 1 for each sample, where a right answer is known. Between them repeats differ: then how many
of them were right is said."""


def sample_panels(answered: Sequence[Answered], arms: dict[str, Arm]) -> list[dict[str, Any]]:
    """For the page's script: one panel a workload and device, as plain JSON values."""
    keys = dict.fromkeys((one.workload, one.device) for one in answered)
    return [_panel([one for one in answered if (one.workload, one.device) == key], arms) for key in keys]


def chosen(answered: Sequence[Answered]) -> list[Answered]:
    """Those that cost most and those on which arms disagree most, in the order in which they were asked."""
    positions = range(len(answered))
    by_cost = sorted(positions, key=lambda i: _cost(answered[i]), reverse=True)[:SHOWN_BY_COST]
    by_disagreement = sorted(positions, key=lambda i: _disagreement(answered[i]), reverse=True)[:SHOWN_BY_DISAGREEMENT]
    return [answered[i] for i in sorted({*by_cost, *by_disagreement})]


def shortened(text: str, kept: tuple[int, int]) -> str:
    """The start and the end of a long text, and how much was left out between."""
    head, tail = kept
    n_left = len(text) - head - tail
    return text if n_left <= 0 else f"{text[:head]} [… {n_left} characters …] {text[len(text) - tail :]}"


def _cost(one: Answered) -> tuple[float, float]:
    return one.energy_j or 0.0, one.e2e_s


def _disagreement(one: Answered) -> tuple[float, float]:
    return one.verdicts_differ, one.answers_differ


def _panel(answered: Sequence[Answered], arms: dict[str, Arm]) -> dict[str, Any]:
    shown = chosen(answered)
    methods = dict.fromkeys(
        f"joules {a.energy_method} ({a.energy_meter})" if a.energy_j is not None else "some joules missing"
        for one in answered
        for a in one.answers
    )
    times = dict.fromkeys(f"Time {a.time_method}" for one in answered for a in one.answers)
    return {
        "title": f"{answered[0].workload} on {answered[0].device}",
        "how": ", ".join([*times, *methods]),
        "total": len(answered),
        "samples": [_sample(one, position, arms) for position, one in enumerate(shown)],
    }


def _sample(one: Answered, position: int, arms: dict[str, Arm]) -> dict[str, Any]:
    verdicts, said = _disagreement(one)
    judged = one.binary if one.sample.expected is not None else frozenset()
    return {
        "id": one.sample.sample_id,
        "position": position,
        "question": shortened(one.sample.question, QUESTION_CHARACTERS),
        "expected": None if one.sample.expected is None else shortened(one.sample.expected, ANSWER_CHARACTERS),
        "choices": [shortened(choice, ANSWER_CHARACTERS) for choice in one.sample.choices],
        "joules": one.energy_j,
        "seconds": one.e2e_s,
        "disagreement": verdicts + said / 2,
        "verdictsDiffer": verdicts > 0,
        "answersDiffer": said > 0,
        "answers": [_answer(answer, arms[answer.cell.cell_id], judged) for answer in one.answers],
    }


def _answer(answer: Answer, arm: Arm, judged: frozenset[str]) -> dict[str, Any]:
    """judged: scores that say right or wrong. An answer is wrong by the first of them."""
    verdicts = {
        m: RIGHT_OR_WRONG.get(value, f"right in {round(value * answer.n_trials)} of {answer.n_trials}")
        for m, value in answer.scores.items()
        if m in judged
    }
    scores = [(metric, verdicts.get(metric) or f"{value:.3g}") for metric, value in answer.scores.items()]
    joules, why = None, answer.energy_reason
    if answer.energy_j is not None:
        joules = format_quantity(answer.energy_j, "J", answer.energy_uncertainty_j)
    return {
        "name": arm.name,
        "said": shortened(answer.said, ANSWER_CHARACTERS),
        "varies": answer.varies,
        "scores": scores,
        "wrong": next(iter(verdicts.values()), None) == "wrong",
        "tokens": f"{answer.prompt_tokens} + {answer.generated_tokens}",
        "joules": joules,
        "why": why,
        "time": "missing" if answer.e2e_s is None else format_quantity(answer.e2e_s, "s"),
    }
