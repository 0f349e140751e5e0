"""A trial whose engine or meter told no number: its figure is missing with that reason, and all else is reported."""

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from harness.summary import print_summary
from results import tables
from results.records import Completion
from results.report.csv import csv_text, frames_of_run
from results.report.html import html_text
from results.run_frames import RunFrames
from results.runs import RunData
from results.trials import Trial
from tests.run_builders import example_run

Change = Callable[[Trial], Trial]


def no_times(trial: Trial) -> Trial:
    first, *others = trial.completions
    return trial.model_copy(update={"completions": (_without_times(first), *others)})


def no_window(trial: Trial) -> Trial:
    return trial.model_copy(update={"window_start_s": math.nan})


def no_joules(trial: Trial) -> Trial:
    return trial.model_copy(update={"energy": tuple(r.model_copy(update={"energy_j": math.nan}) for r in trial.energy)})


def infinite_joules(trial: Trial) -> Trial:
    return trial.model_copy(update={"energy": tuple(r.model_copy(update={"energy_j": math.inf}) for r in trial.energy)})


def _without_times(completion: Completion) -> Completion:
    return completion.model_copy(update=dict.fromkeys(("start_s", "prefill_end_s", "end_s"), math.nan))


def changed(run: RunData, change: Change) -> RunData:
    """With the first trial of each cell so."""
    return replace(run, trials=tuple(change(t) if t.repeat == 0 and t.status == "ok" else t for t in run.trials))


@pytest.mark.parametrize(("change", "n_repeats"), [(no_times, 1), (no_window, 1), (no_joules, 3)])
def test_a_run_with_figures_that_are_no_numbers_is_reported(change: Change, n_repeats: int) -> None:
    """It ended with "nobody foresaw this", and no table of the run could be had."""
    run = changed(example_run(n_repeats), change)
    derived = RunFrames(run)
    for content in frames_of_run(run, derived).values():
        for part in [content] if hasattr(content, "columns") else content:
            assert csv_text(part)
    page, terminal = html_text(run, derived), io.StringIO()
    print_summary(derived, Console(file=terminal, width=160))
    assert re.search(r">\s*nan\b", page) is None
    assert re.search(r"\bnan\b(?!,)", terminal.getvalue()) is None, "only in the reason"


@pytest.mark.parametrize(
    ("change", "metric", "phase", "value"),
    [
        (no_times, "ttft", "prefill", "nan"),
        (no_times, "e2e", "all", "nan"),
        (no_joules, "energy", "all", "nan"),
        (infinite_joules, "energy", "all", "inf"),
    ],
)
def test_such_a_trial_is_in_no_mean_and_the_row_says_why(change: Change, metric: str, phase: str, value: str) -> None:
    run = example_run(3)
    without = replace(run, trials=tuple(t for t in run.trials if t.repeat != 0))
    told, expected = (
        tables.tidy(data).set_index(["cell", "metric", "phase"]).loc["cell000", metric, phase].squeeze()
        for data in (changed(run, change), without)
    )
    assert (told["n"], told["mean"]) == (expected["n"], pytest.approx(expected["mean"], rel=1e-12))
    assert f"{metric} came out as {value}, which is no number to go by" in told["reason"]
