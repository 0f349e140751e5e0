"""Verdicts over histories whose steps a generator made."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from pathlib import Path

import pandas as pd
import pytest

from results.history.index import open_history
from results.history.marks import mark
from results.history.regress import Asked, regress
from tests.command import joulebench
from tests.compared_runs import between, row
from tests.histories import judged, made_trial, slower, write_history, write_run
from tests.run_builders import ENVIRONMENT, cell, failed

NEWER = ENVIRONMENT.model_copy(update={"packages": ENVIRONMENT.packages | {"torch": "2.14.0"}})


def test_a_slower_arm_is_a_regression_and_the_other_passes(tmp_path: Path) -> None:
    write_history(tmp_path, 24, slower(2, 14), arms=("a", "b"), environments=dict.fromkeys(range(14, 24), NEWER))
    found = judged(tmp_path)
    assert (found["a"].verdict, found["b"].verdict) == ("PASS", "REGRESSION")
    one = found["b"]
    assert one.since is not None
    assert one.since.folder == "run014"
    assert one.low is not None
    assert one.high is not None
    assert one.low < 0.0198 < one.high  # log(1.02)
    assert one.noise == pytest.approx(0.003, rel=0.7)
    done = joulebench("regress", "--baseline", "good", str(tmp_path), "--metric", "e2e")
    assert done.code == 1
    assert "1 REGRESSION, 0 UNRELIABLE, 0 IMPROVED, 1 PASS" in done.stdout
    assert "since run014 (2026-01-15); with it changed: torch 2.13.0; 2.14.0" in done.stdout
    assert "can't be told from chance" in done.stdout


def test_more_tokens_a_second_is_an_improvement_and_fewer_a_regression(tmp_path: Path) -> None:
    write_history(tmp_path, 20, slower(-3, 10), arms=("a", "b"))
    assert judged(tmp_path, "throughput")["b"].verdict == "IMPROVED"
    assert judged(tmp_path, "energy_per_response")["b"].verdict == "IMPROVED"
    assert joulebench("regress", "--baseline", "good", str(tmp_path)).code == 0
    # From the later level, as a baseline, nothing changed.
    with open_history(tmp_path) as found:
        mark(found, "fast", ["run011"], add=False)
        verdicts = {one.verdict for one in regress(found, "fast", Asked()).judged}
    assert verdicts == {"PASS"}


def test_a_change_below_what_counts_passes(tmp_path: Path) -> None:
    write_history(tmp_path, 30, slower(1.5, 15), arms=("a", "b"))
    assert judged(tmp_path)["b"].verdict == "REGRESSION"
    one = judged(tmp_path, least=0.03)["b"]
    assert (one.verdict, "is below what counts" in one.reason) == ("PASS", True)


def test_a_score_that_changed_is_told_of_its_samples_alone(tmp_path: Path) -> None:
    """One other answer of 40 is a level of its own for certain. By McNemar's test it says nothing of other samples."""
    for day in range(16):
        right = [1.0] * 39 + [float(day < 8)]
        trials = [made_trial("c1", i, 1.0, right=right) for i in range(2)]
        write_run(tmp_path / f"run{day:03d}", [cell("c1", engine="a", label="a")], trials, day)
    one = judged(tmp_path, "acc")["a"]
    assert (one.verdict, one.change) == ("REGRESSION", pytest.approx(-1 / 40))
    assert "of these 40 samples, whatever others would say: `joulebench compare` tests that" in one.reason
    assert row(between(tmp_path / "run000", tmp_path / "run015"), "acc").verdict == "not certain"


def test_an_anchor_takes_the_drift_of_the_machine_out(tmp_path: Path) -> None:
    """The machine gets 6 % slower for all arms, and b 2 % faster beside it."""
    write_history(
        tmp_path, 24, slower(-2, 14), arms=("a", "b"), machine=lambda day: 1.06 if day >= 14 else 1.0, noise=0.002
    )
    alone = judged(tmp_path)
    assert {alone["a"].verdict, alone["b"].verdict} == {"REGRESSION"}
    beside = judged(tmp_path, anchor="a")
    assert beside["b"].verdict == "IMPROVED"
    assert beside["b"].change == pytest.approx(-0.0202, abs=0.004)
    assert beside["a"].is_anchor
    done = joulebench("regress", "--baseline", "good", str(tmp_path), "--anchor", "a")
    assert (done.code, "anchor: REGRESSION" in done.stdout) == (0, True)


def test_a_last_run_that_stands_off_is_unreliable_and_more_like_it_are_a_regression(tmp_path: Path) -> None:
    write_history(tmp_path, 21, slower(5, 20), arms=("a", "b"))
    one = judged(tmp_path)["b"]
    assert one.verdict == "UNRELIABLE"
    assert "last run stands off by +5" in one.reason
    assert "the ends of a series are unsure: 3 more runs tell" in one.reason
    write_history(tmp_path / "more", 24, slower(5, 20), arms=("a", "b"))
    assert judged(tmp_path / "more")["b"].verdict == "REGRESSION"


@pytest.mark.parametrize(
    ("baseline", "verdict", "percent"), [(3, "REGRESSION", 5), (3, "IMPROVED", -5), (1, "UNRELIABLE", 5)]
)
def test_what_changes_right_behind_the_baseline_does_not_pass(
    tmp_path: Path, baseline: int, verdict: str, percent: int
) -> None:
    """Runs of a baseline that are fewer than a level takes were put on the level of the runs behind them."""
    write_history(tmp_path, 20, slower(percent, baseline), arms=("a", "b"))
    found = judged(tmp_path, baseline=baseline)
    assert (found["a"].verdict, found["b"].verdict) == ("PASS", verdict)
    if baseline == 3:
        assert found["b"].since is not None
        # A level takes four runs: by chance the first of the new ones is on the old one.
        assert found["b"].since.folder in ("run003", "run004")
        assert found["b"].change == pytest.approx(math.log(1 + percent / 100), abs=0.015)
    else:
        assert "the baseline's runs stand off by" in found["b"].reason


@pytest.mark.parametrize("factor", [1.49, 0.7])
def test_a_baseline_that_is_off_its_level_hides_no_change_far_above_that(tmp_path: Path, factor: float) -> None:
    """Three runs, five that are 3 % slower, ten at another speed altogether."""

    def level(day: int, arm: str) -> float:
        return 1.0 if arm == "a" or day < 3 else 1.03 if day < 8 else factor

    write_history(tmp_path, 18, level, arms=("a", "b"))
    one = judged(tmp_path)["b"]
    assert one.verdict == ("REGRESSION" if factor > 1 else "IMPROVED")
    assert one.change == pytest.approx(math.log(factor), abs=0.03)


def test_a_baseline_on_two_levels_is_none(tmp_path: Path) -> None:
    write_history(tmp_path, 20, slower(5, 10), arms=("a", "b"))
    one = judged(tmp_path, baseline=15)["b"]
    assert (one.verdict, "baseline's own runs are on several levels" in one.reason) == ("UNRELIABLE", True)


def test_much_noise_proves_nothing(tmp_path: Path) -> None:
    write_history(tmp_path, 16, slower(0, 0), noise=0.08)
    one = judged(tmp_path)["dropless"]
    assert (one.verdict, "too much noise: only a change above" in one.reason) == ("UNRELIABLE", True)


def test_changes_of_many_times_the_figure_are_told_as_times(tmp_path: Path) -> None:
    """A floor of 22974356.7 % is no figure that anybody can use."""
    write_history(tmp_path, 5, slower(0, 0))
    series = judged(tmp_path)["dropless"].series
    assert series.is_log
    assert series.shown(math.log(10.9)) == "+990.0 %"
    assert series.shown(math.log(12.3)) == "12 times"
    assert series.shown(math.log(229744.567)) == "230,000 times"
    assert series.shown(math.log(1e-6)) == "-100.0 %"


def test_few_runs_are_held_against_runs_of_the_baseline_itself(tmp_path: Path) -> None:
    write_history(tmp_path, 7, slower(30, 5), arms=("a", "b"))
    found = judged(tmp_path, baseline=5)
    assert (found["a"].verdict, found["b"].verdict) == ("PASS", "REGRESSION")
    alone = judged(tmp_path, baseline=1)["b"]
    assert (alone.verdict, "too few to know the noise: it takes 8, or 3" in alone.reason) == ("UNRELIABLE", True)


def test_an_arm_that_failed_in_the_first_run_of_the_baseline_is_judged_by_the_others(tmp_path: Path) -> None:
    """It was left out without a word, and the command ended with 0."""
    write_history(tmp_path, 24, slower(20, 14), arms=("a", "b"))
    first = tmp_path / "run000"
    cells = [cell(f"cell{i:04d}", engine=arm, label=arm, engine_parameters={}) for i, arm in enumerate(("a", "b"))]
    shutil.rmtree(first)
    write_run(first, cells, [*(made_trial("cell0000", i, 1.0, energy_j=4.0) for i in range(3)), failed("cell0001")])
    found = judged(tmp_path)
    assert (found["a"].verdict, found["b"].verdict) == ("PASS", "REGRESSION")
    assert joulebench("regress", "--baseline", "good", str(tmp_path)).code == 1


def test_an_arm_that_failed_in_all_of_the_baseline_is_told(tmp_path: Path) -> None:
    write_history(tmp_path, 9, slower(0, 0), arms=("a", "b"))
    cells = [cell(f"cell{i:04d}", engine=arm, label=arm, engine_parameters={}) for i, arm in enumerate(("a", "b"))]
    shutil.rmtree(tmp_path / "run000")
    write_run(tmp_path / "run000", cells, [made_trial("cell0000", 0, 1.0), failed("cell0001")])
    with open_history(tmp_path) as history:
        mark(history, "good", ["run000"], add=False)
        found = regress(history, "good", Asked())
    assert {one.arm for one in found.judged} == {"a"}
    assert "No run of the baseline has a figure of these, so they are not judged: b." in found.notes


def test_an_arm_that_the_baseline_lacks_is_told(tmp_path: Path) -> None:
    write_history(tmp_path, 9, slower(0, 0), arms=("a",))
    newest = [cell("cell0000", engine="a", label="a"), cell("new", engine="new", label="the new arm")]
    write_run(tmp_path / "run009", newest, [made_trial(one.cell_id, 0, 1.0) for one in newest], day=9)
    other = [cell("other", engine="other", label="of another plan")]
    write_run(tmp_path / "run010", other, [made_trial("other", 0, 1.0)], day=10, name="another")
    with open_history(tmp_path) as history:
        mark(history, "good", ["run000", "run001"], add=False)
        notes = regress(history, "good", Asked()).notes
    assert "No run of the baseline has a figure of these, so they are not judged: the new arm." in notes
    assert not any("of another plan" in note for note in notes)


def test_nothing_newer_than_the_baseline_ends_with_6(tmp_path: Path) -> None:
    write_history(tmp_path, 9, slower(0, 0))
    done = joulebench("regress", "--baseline", "run008", str(tmp_path))
    assert done.code == 6
    assert "no run like the baseline is newer than it" in done.stderr


def test_json_has_each_figure_with_its_verdict(tmp_path: Path) -> None:
    write_history(tmp_path, 16, slower(0, 0))
    done = joulebench("regress", "--baseline", "run002", str(tmp_path), "--json")
    found = json.loads(done.stdout)
    assert (done.code, found["regressed"], found["runs"]) == (0, False, 16)
    assert {one["verdict"] for one in found["judged"]} == {"PASS"}


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    write_history(tmp_path, 3, slower(0, 0))
    write_history(tmp_path / "one", 1, slower(0, 0))
    (tmp_path / "none").mkdir()
    for arguments, said in (
        (("--baseline", "good", str(tmp_path)), "--baseline good: no baseline and no run of"),
        (
            ("--baseline", "good", str(tmp_path)),
            f"`joulebench baseline set NAME RUN --history {shlex.quote(str(tmp_path))}` makes one",
        ),
        (
            ("--baseline", "run000", str(tmp_path), "--anchor", "x"),
            "--anchor x: run000 has no such arm; it has dropless",
        ),
        (("--baseline", "run000", str(tmp_path), "--metric", "x"), "--metric x: run000 has no such figure; it has"),
        (("--baseline", "run000", str(tmp_path), "--allow", "x"), "--allow x: no such kind; take one of requests"),
        (("--baseline", "run000", str(tmp_path / "one")), "holds one run only"),
        (("--baseline", "run000", str(tmp_path / "none")), "holds no run yet"),
    ):
        done = joulebench("regress", *arguments)
        (line,) = done.problems
        assert (done.code, said in line) == (2, True), line


def test_csv_and_page_say_what_the_verdicts_say(tmp_path: Path) -> None:
    arms = ("a", "<b>=1", "c")
    write_history(tmp_path, 24, lambda day, arm: 1.02 if arm == "<b>=1" and day >= 14 else 1.0, arms=arms)
    found = judged(tmp_path)
    csv, page = tmp_path / "verdicts.csv", tmp_path / "verdicts.html"
    asked = ("regress", "--baseline", "good", str(tmp_path), "--metric", "e2e")
    assert joulebench(*asked, "--csv", str(csv), "--html", str(page)).code == 1
    table = pd.read_csv(csv).set_index("arm")
    assert list(table.index) == list(arms)
    one = found["<b>=1"]
    row = table.loc["<b>=1"]
    assert one.change is not None
    assert (row["verdict"], row["since"], row["change_is"]) == ("REGRESSION", "run014", "share")
    assert row["change"] == pytest.approx(math.expm1(one.change), rel=1e-12)
    assert row["low"] < 0.02 < row["high"]
    assert row["now"] / row["baseline"] - 1 == pytest.approx(row["change"], rel=1e-9)
    assert table.loc["a", "verdict"] == "PASS"
    text = page.read_text()
    assert "1 REGRESSION, 2 PASS" in text
    assert "<td>&lt;b&gt;=1</td>" in text
    assert "<b>=1" not in text
    assert "since run014 (2026-01-15)" in text
    missing = csv / "x.csv"  # below a file
    page.unlink()
    done = joulebench(*asked, "--csv", str(missing), "--html", str(page))
    assert (done.code, "--csv" in done.stderr) == (7, True)
    assert "1 REGRESSION" in done.stdout, "what was found is told all the same"
    assert page.exists()


def test_an_arm_that_fails_or_is_gone_in_the_newest_runs_does_not_pass(tmp_path: Path) -> None:
    """It passed by its older runs, and nothing told of the newer ones."""
    write_history(tmp_path, 12, slower(0, 0), arms=("a", "b", "c"))
    cells = [cell(f"cell{i:04d}", engine=arm, label=arm) for i, arm in enumerate("ab")]
    for day in (12, 13):
        own = [made_trial("cell0000", i, 1.0, energy_j=4.0) for i in range(3)]
        write_run(tmp_path / f"run{day:03d}", cells, [*own, failed("cell0001")], day=day)
    found = judged(tmp_path)
    assert {arm: one.verdict for arm, one in found.items()} == {"a": "PASS", "b": "UNRELIABLE", "c": "UNRELIABLE"}
    assert found["b"].reason == "nothing is known of the newest runs, run012 to run013: no trial of it counts"
    assert found["c"].reason == "nothing is known of the newest runs, run012 to run013: the arm is not in it"
    done = joulebench("regress", "--baseline", "good", str(tmp_path))
    assert "No verdict of c is of the newest runs, run012 to run013: the arm is not in it." in done.stdout


def test_a_figure_that_the_newest_runs_lack_is_named_and_not_its_whole_arm(tmp_path: Path) -> None:
    """It said that no verdict of the arm was of the newest runs, and all but one were."""
    for day in range(10):
        own = [made_trial("cell0000", i, 1.0 + 0.001 * i, energy_j=4.0 if day < 8 else None) for i in range(3)]
        write_run(tmp_path / f"run{day:03d}", [cell("cell0000", engine="a", label="a")], own, day=day)
    with open_history(tmp_path) as found:
        mark(found, "good", ["run000", "run001", "run002"], add=False)
        result = regress(found, "good", Asked())
    verdicts = {(one.figure.metric, one.figure.phase): one.verdict for one in result.judged}
    assert verdicts["e2e", "all"] == "PASS"
    (workload,) = {one.workload for one in result.judged}
    lacking = [one.figure.name for one in result.judged if one.figure.kind == "energy"]
    (told,) = (note for note in result.notes if note.startswith("No verdict of"))
    named = "; ".join(f"{workload}: {name}" for name in lacking)
    assert told == f"No verdict of a ({named}) is of the newest runs, run008 to run009: no trial of it counts."


def test_a_baseline_of_the_folder_above_is_named_with_the_command_that_makes_it_one_here(tmp_path: Path) -> None:
    """It said that there are no baselines yet, right after one was made."""
    write_history(tmp_path / "runs/n", 10, slower(0, 0))
    runs = tmp_path / "runs"
    made = joulebench(
        "baseline", "set", "good", "n/run000", "n/run001", "n/run002", "--history", str(runs), cwd=tmp_path
    )
    refused = joulebench("regress", "--baseline", "good", "runs/n", cwd=tmp_path)
    assert (made.code, refused.code) == (0, 2)
    assert "runs has a baseline good: give runs as the folder of runs, or mark its runs here too: " in refused.stderr
    command = "joulebench baseline set good run000 run001 run002 --history runs/n"
    assert f"`{command}`" in refused.stderr
    assert joulebench(*command.split()[1:], cwd=tmp_path).code == 0
    assert joulebench("regress", "--baseline", "good", "runs/n", cwd=tmp_path).code == 0


def test_figures_of_which_nothing_can_be_said_stand_in_a_line(tmp_path: Path) -> None:
    """344 rows of a night's history said nothing, and hid what was worse."""
    arms = ("a", "b", "c", "d", "e")
    write_history(tmp_path, 14, slower(5, 10), arms=("a", "b"))
    write_run(
        tmp_path / "run014",
        [cell(f"cell{i:04d}", engine=arm, label=arm) for i, arm in enumerate(arms)],
        [made_trial(f"cell{i:04d}", k, 1.05 if arm == "b" else 1.0) for i, arm in enumerate(arms) for k in range(3)],
        day=14,
    )
    asked = ("regress", "--baseline", "run014", str(tmp_path), "--metric", "e2e")
    short, whole = joulebench(*asked), joulebench(*asked, "--all")
    (line,) = (line for line in short.stdout.splitlines() if line.startswith("UNRELIABLE, "))
    assert line.startswith("UNRELIABLE, 5 figures of a, b, c and 2 more: no run like the baseline is newer than it")
    assert "5 UNRELIABLE, 0 IMPROVED, 0 PASS (--all shows each)" in short.stdout
    assert short.stdout.count("UNRELIABLE") == 2
    assert whole.stdout.count("UNRELIABLE") == 6, "each in a row, and their number"
    assert (short.code, whole.code) == (6, 6)


def test_a_regression_of_an_arm_that_failed_since_stays_one(tmp_path: Path) -> None:
    write_history(tmp_path, 24, slower(20, 14), arms=("a", "b"))
    cells = [cell(f"cell{i:04d}", engine=arm, label=arm) for i, arm in enumerate("ab")]
    write_run(tmp_path / "run024", cells, [made_trial("cell0000", 0, 1.0), failed("cell0001")], day=24)
    assert judged(tmp_path)["b"].verdict == "REGRESSION"


def test_copies_of_a_run_count_once(tmp_path: Path) -> None:
    """A backup in the folder made the noise small, and the runs many."""
    write_history(tmp_path, 6, slower(0, 0), noise=0.02)
    alone = judged(tmp_path)["dropless"]
    for i in range(5):
        shutil.copytree(tmp_path / "run005", tmp_path / f"zcopy{i}")
    # The copy that a baseline names is the one that stays.
    shutil.copytree(tmp_path / "run000", tmp_path / "run000copy")
    beside = judged(tmp_path)["dropless"]
    assert (beside.verdict, beside.noise, len(beside.series.points)) == (alone.verdict, alone.noise, 6)
    with open_history(tmp_path) as history:
        assert [run.folder for run in regress(history, "run000copy", Asked()).baseline] == ["run000copy"]
    for command in (("regress", "--baseline", "good"), ("history",)):
        done = joulebench(*command, str(tmp_path))
        assert "Copies of runs, which count once: run000copy of run000; zcopy0 of run005" in done.stdout


def test_a_baseline_that_is_too_old_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("regress", "series"):
        monkeypatch.setattr(f"results.history.{module}.MOST_POINTS", 10)
    write_history(tmp_path, 12, slower(0, 0), n_repeats=1)
    one = judged(tmp_path, baseline=1)["dropless"]
    assert (one.verdict, "older than the last 10 runs" in one.reason) == ("UNRELIABLE", True)


def test_how_far_the_last_run_is_off_is_not_in_the_noise_that_it_is_held_against(tmp_path: Path) -> None:
    """Eleven runs around 1 s, 1 % to each side, and a last one 9 % above: it passed."""
    write_history(tmp_path, 12, lambda day, arm: 1.09 if day == 11 else 1 + 0.01 * (-1) ** day, noise=0)
    one = judged(tmp_path, most_noise=0.1)["dropless"]
    assert (one.verdict, "the last run stands off by +9" in one.reason) == ("UNRELIABLE", True)
