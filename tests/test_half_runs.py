"""Half runs, and runs that lost trials, among others of a folder: told, and no verdict is theirs alone."""

from __future__ import annotations

import json
import math
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from results.history.index import INDEX, HistoryError, open_history
from results.history.judged import Judgement
from results.history.marks import mark
from results.history.points import Figure
from results.history.regress import Asked, regress
from results.history.series import series_of
from results.store import Store
from tests.command import joulebench
from tests.histories import made_trial, write_history, write_run
from tests.run_builders import cell

HALF = "the run has not come to its end: 1 of at most 5 trials are there. It goes on, or was broken off;"
LOST = "finished trials that are gone from run.sqlite: 1 (in order of time number 2)"
DROPLESS = cell("cell0000", engine="dropless", label="dropless")


def half(directory: Path, name: str, day: int, e2e_s: float) -> None:
    """One trial of five: its first repeat, which is as far off as its maker says."""
    folder = write_run(directory / name, [DROPLESS], [made_trial("cell0000", 0, e2e_s, energy_j=4 * e2e_s)], day)
    with Store.open(folder) as store:
        store.note_unfinished(5)


def lose_the_second(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "run.sqlite")) as db:
        db.execute("DELETE FROM trial WHERE finished_order = 2")
        db.commit()


def verdicts(directory: Path, baseline: int) -> Judgement:
    with open_history(directory) as found:
        mark(found, "good", [f"run{day:03d}" for day in range(baseline)], add=False)
        return regress(found, "good", Asked(metrics=("e2e",)))


@pytest.mark.parametrize("n_runs", [6, 12])
def test_half_runs_are_in_no_verdict_and_each_says_so(tmp_path: Path, n_runs: int) -> None:
    """Five of them, half as fast again: of levels, and of a baseline's noise alone, they were a regression."""
    write_history(tmp_path, n_runs, lambda day, arm: 1.0)
    for i in range(5):
        half(tmp_path, f"half{i}", n_runs + i, 1.5)
    (one,) = (found := verdicts(tmp_path, 5)).judged
    assert (one.verdict, len(one.series.points), found.n_runs) == ("PASS", n_runs, n_runs)
    assert one.left_out == ("it has not come to its end (5 runs)",)
    assert [line.startswith(f"half{i}: {HALF}") for i, line in enumerate(one.remarks)] == [True] * 5
    csv, page = tmp_path / "verdicts.csv", tmp_path / "verdicts.html"
    asked = ("regress", "--baseline", "good", str(tmp_path), "--metric", "e2e")
    done = joulebench(*asked, "--csv", str(csv), "--html", str(page))
    assert done.code == 0
    assert f"half3: {HALF}" in done.stdout
    assert "More such remarks of runs: 1; --json and --csv name them." in done.stdout
    (told,) = pd.read_csv(csv)["remarks"]
    assert told.count("the run has not come to its end") == 5
    assert f"half3: {HALF}" in page.read_text()


def test_a_half_run_is_no_baseline_and_a_run_that_went_on_is_one(tmp_path: Path) -> None:
    write_history(tmp_path, 2, lambda day, arm: 1.0)
    half(tmp_path, "half", 5, 1.0)
    with open_history(tmp_path) as found, pytest.raises(HistoryError, match=r"^baseline half: half: the run has not"):
        regress(found, "half", Asked())
    with Store.open(tmp_path / "half") as store:
        store.add_trial(made_trial("cell0000", 1, 1.0), {})
        store.note_unfinished(None)
    with open_history(tmp_path) as found:
        assert [run.folder for run in regress(found, "half", Asked()).baseline] == ["half"]


def test_two_runs_of_which_one_is_half_are_too_few(tmp_path: Path) -> None:
    write_history(tmp_path, 1, lambda day, arm: 1.0)
    half(tmp_path, "half", 5, 1.0)
    done = joulebench("regress", "--baseline", "run000", str(tmp_path))
    (line,) = done.problems
    assert (done.code, "holds one run only that has come to its end; run the plan again" in line) == (2, True)


def test_a_history_tells_half_runs_and_lost_trials_in_list_json_and_page(tmp_path: Path) -> None:
    folders = write_history(tmp_path, 2, lambda day, arm: 1.0)
    half(tmp_path, "half", 5, 1.5)
    open_history(tmp_path).close()
    lose_the_second(folders[1])
    page = tmp_path / "h.html"
    done = joulebench("history", str(tmp_path), "--json", "--html", str(page))
    records = {record["folder"]: record for record in json.loads(done.stdout)}
    assert [records[name]["is_unfinished"] for name in ("run000", "run001", "half")] == [False, False, True]
    listed, text = joulebench("history", str(tmp_path)).stdout, page.read_text()
    for told in (f"half: {HALF}", f"run001: {LOST}"):
        assert (told in listed, told in text) == (True, True), told
    assert not any(line.startswith("run000: ") for line in listed.splitlines())


def test_lost_trials_are_told_beside_the_verdict(tmp_path: Path) -> None:
    folders = write_history(tmp_path, 12, lambda day, arm: 1.0, n_repeats=5)
    lose_the_second(folders[9])
    found = verdicts(tmp_path, 3)
    (one,) = found.judged
    assert (one.verdict, len(one.series.points)) == ("PASS", 12)
    assert [line.startswith(f"run009: {LOST}") for line in one.remarks] == [True]
    assert any(line.startswith(f"run009: {LOST}") for line in found.notes)


def test_an_index_from_before_half_runs_were_told_is_made_again(tmp_path: Path) -> None:
    half(tmp_path, "half", 0, 1.0)
    open_history(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / INDEX)) as db:
        db.execute("UPDATE run SET record = json_remove(record, '$.remarks', '$.is_unfinished')")
        db.execute("UPDATE meta SET value = '6'")
        db.commit()
    with open_history(tmp_path) as found:
        (run,) = found.runs
        assert run.is_unfinished


def figure(*values: float) -> Figure:
    return Figure(
        metric="e2e", phase="all", unit="s", kind="time", better="lower", method="measured",
        values=dict(enumerate(values)),
    )  # fmt: skip


def test_a_run_of_one_repeat_weighs_by_the_scatter_of_all_repeats(tmp_path: Path) -> None:
    """It had no error bar, and weighed most. Repeats scatter by the variance of -1 %, 0, +1 % and 0: 2/3 of 0.01^2."""
    write_history(tmp_path, 3, lambda day, arm: 1.0)
    with open_history(tmp_path) as found:
        seen = [(run, found.cells(run.folder)[0]) for run in found.runs]
    values = [(0.99, 1.0, 1.01, 1.0), (1.0,), (0.99, 1.0, 1.01, 1.0)]
    series = series_of((run, own, figure(*v)) for (run, own), v in zip(seen, values, strict=True))
    of_one = 0.01 * math.sqrt(2 / 3)
    assert [point.error for point in series.points] == pytest.approx([of_one / 2, of_one, of_one / 2], rel=1e-9)


@pytest.mark.parametrize(("n_newer", "verdict"), [(25, "REGRESSION"), (1, "UNRELIABLE")])
def test_a_newer_run_of_one_repeat_is_not_held_to_the_noise_of_whole_runs(
    tmp_path: Path, n_newer: int, verdict: str
) -> None:
    """Repeats scatter by 3 %, means of 25 of them by 0.6 %: 8 % are much of a whole run, and chance of one repeat."""
    rng = np.random.default_rng(3)
    for day in range(6):
        level, n = (1.08, n_newer) if day == 5 else (1.0, 25)
        off = 0.03 * rng.standard_normal(n) if n > 1 else np.zeros(1)
        trials = [made_trial("cell0000", k, level * math.exp(one)) for k, one in enumerate(off)]
        write_run(tmp_path / f"run{day:03d}", [DROPLESS], trials, day)
    (one,) = verdicts(tmp_path, 5).judged
    assert one.verdict == verdict
