"""What changed beside the figures of a history: settings, weights, machines, variables. Each change is told once."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from results.history.index import open_history
from results.history.marks import mark
from results.history.otherwise import otherwise_than_before
from results.history.regress import Asked, regress
from results.report.regress_page import why
from tests.command import joulebench
from tests.histories import judged, made_trial, slower, write_history, write_run
from tests.run_builders import ENVIRONMENT, cell

OTHER_CPU = ENVIRONMENT.model_copy(update={"cpu_model": "another"})


def test_runs_of_another_machine_are_left_out_and_told(tmp_path: Path) -> None:
    write_history(tmp_path, 24, slower(20, 14), arms=("a", "b"), environments=dict.fromkeys(range(14, 24), OTHER_CPU))
    one = judged(tmp_path)["b"]
    assert one.verdict == "PASS"
    assert len(one.series.points) == 14
    assert one.left_out == ("other machines (CPU EPYC 7B13; another) (10 runs)",)
    assert judged(tmp_path, allowed=frozenset({"machines"}))["b"].verdict == "REGRESSION"


def narrower_since(since: int, *narrowed: str) -> Callable[[int, str], dict[str, str]]:
    """Arms whose plan asks for int8 arithmetic from a run on."""
    return lambda day, arm: {"experts": "int8"} | ({"arithmetic": "int8"} if arm in narrowed and day >= since else {})


def test_an_arm_that_was_set_otherwise_is_not_judged_without_a_word(tmp_path: Path) -> None:
    write_history(tmp_path, 24, slower(2, 14), arms=("a", "b"), settings=narrower_since(14, "b"))
    found = judged(tmp_path)
    assert (found["a"].verdict, found["b"].verdict) == ("PASS", "REGRESSION")
    assert (found["a"].settings_changed, found["b"].settings_changed) == ((), ("run014: arithmetic not set → int8",))
    done = joulebench(
        "regress", "--baseline", "good", str(tmp_path), "--metric", "e2e",
        "--csv", str(tmp_path / "verdicts.csv"), "--html", str(tmp_path / "verdicts.html"),
    )  # fmt: skip
    told = "set otherwise since run014: arithmetic not set → int8"
    assert done.code == 1
    assert told in done.stdout
    assert "Set otherwise: b, since run014: arithmetic not set → int8. A change may be of that." in done.stdout
    assert told in (tmp_path / "verdicts.html").read_text("utf-8")
    table = pd.read_csv(tmp_path / "verdicts.csv").set_index("arm").settings_changed
    assert (table["b"], math.isnan(table["a"])) == ("run014: arithmetic not set → int8", True)


def test_a_number_that_runs_of_before_kept_otherwise_is_no_change(tmp_path: Path) -> None:
    """It was told: "threads 1 → 1". Nor is a key without a value one, nor the order of a table's keys."""

    def settings(day: int, arm: str) -> dict[str, object]:
        cores = {"prefill": "0-1", "decode": "0"} if day < 8 else {"decode": "0", "prefill": "0-1"}
        unset = {"dtype": None} if day < 9 else {}
        return {"threads": 1 if day < 10 else "1" if day < 15 else "2", "cores": cores, **unset}

    write_history(tmp_path, 20, slower(0, 0), arms=("a",), settings=settings)
    assert judged(tmp_path)["a"].settings_changed == ("run015: threads 1 → 2",)


def test_weights_that_were_replaced_under_their_name_are_not_judged_without_a_word(tmp_path: Path) -> None:
    name = "model.safetensors of model tiny-moe"
    write_history(
        tmp_path, 24, slower(2, 14), arms=("a", "b"),
        inputs=lambda day: {name: f"sha256:{'7' * 64}" if day >= 14 else f"sha256:{'1' * 64}"},
    )  # fmt: skip
    words = f"{name} sha256 {'1' * 12} → sha256 {'7' * 12}"
    told = f"run014: the run's {words}"
    assert {arm: one.settings_changed for arm, one in judged(tmp_path).items()} == {"a": (told,), "b": (told,)}
    listed = joulebench("history", str(tmp_path)).stdout.splitlines()
    than = "other files, variables, clock rules or protocol than run013"
    assert listed[-1] == f"run014: the run rests on {than}: {words}"


def test_a_variable_that_changed_is_told_once_of_arms_that_were_last_measured_in_different_runs(tmp_path: Path) -> None:
    inputs = {0: {"OMP_NUM_THREADS": "1", "MKL_DYNAMIC": "0"}, 1: {"OMP_NUM_THREADS": "1", "MKL_DYNAMIC": "1"}}
    last = {"OMP_NUM_THREADS": "2", "MKL_DYNAMIC": "2"}
    write_history(tmp_path, 3, slower(0, 0), arms=("a", "b"), inputs=lambda day: inputs.get(day, last))
    with open_history(tmp_path) as history:
        first, second, third = history.runs
    second = second.model_copy(update={"settings": tuple(own for own in second.settings if own.arm == "a")})
    told = otherwise_than_before([first, second, third])[third.folder]
    assert [one.sentence.split(" than ")[1] for one in told] == [
        "run001: MKL_DYNAMIC 1 → 2, OMP_NUM_THREADS 1 → 2",
        "run000: MKL_DYNAMIC 0 → 2",
    ]


def test_a_run_that_did_not_keep_what_it_rests_on_hides_no_change(tmp_path: Path) -> None:
    write_history(
        tmp_path, 10, slower(0, 0), arms=("a", "b"),
        inputs=lambda day: {} if day == 5 else {"OMP_NUM_THREADS": "1" if day < 5 else "2"},
    )  # fmt: skip
    words = "OMP_NUM_THREADS 1 → 2"
    assert judged(tmp_path)["b"].settings_changed == (f"run006: the run's {words}",)
    listed = joulebench("history", str(tmp_path)).stdout.splitlines()
    than = "other files, variables, clock rules or protocol than run004"
    assert listed[11:] == [f"run006: the run rests on {than}: {words}"]


def test_a_file_of_another_engine_is_told_of_its_arms_alone(tmp_path: Path) -> None:
    name = "libllama.so of llama.cpp"

    def digits(day: int) -> str:
        return ("7" if day >= 5 else "1") * 64

    write_history(
        tmp_path, 10, slower(0, 0), arms=("dropless", "llama.cpp"),
        inputs=lambda day: {name: f"sha256:{digits(day)}"},
        settings=lambda day, arm: {name: f"sha256 {digits(day)[:12]}"} if arm == "llama.cpp" else {},
    )  # fmt: skip
    words = f"{name} sha256 {'1' * 12} → sha256 {'7' * 12}"
    found = judged(tmp_path)
    assert found["dropless"].settings_changed == ()
    assert found["llama.cpp"].settings_changed == (f"run005: {words}",)
    listed = joulebench("history", str(tmp_path)).stdout.splitlines()
    assert listed[11:] == [f"run005: llama.cpp is set otherwise than in run004: {words}"]


def test_what_an_arm_was_set_to_before_the_baseline_is_not_told(tmp_path: Path) -> None:
    write_history(tmp_path, 12, slower(0, 0), arms=("a", "b"), settings=narrower_since(4, "b"))
    with open_history(tmp_path) as found:
        mark(found, "later", ["run004", "run005", "run006"], add=False)
        assert {one.settings_changed for one in regress(found, "later", Asked()).judged} == {()}


def test_a_last_run_that_was_set_otherwise_is_told_though_it_is_no_level_yet(tmp_path: Path) -> None:
    write_history(tmp_path, 21, slower(5, 20), arms=("a", "b"), settings=narrower_since(20, "b"))
    one = judged(tmp_path)["b"]
    assert (one.verdict, one.settings_changed) == ("UNRELIABLE", ("run020: arithmetic not set → int8",))


def test_an_anchor_that_was_set_otherwise_is_told_of_the_arms_over_it(tmp_path: Path) -> None:
    write_history(tmp_path, 24, slower(0, 0), arms=("a", "b"), settings=narrower_since(14, "a"))
    found = judged(tmp_path, anchor="a")
    assert found["b"].settings_changed == ("run014: the anchor's arithmetic not set → int8",)


def test_weights_of_an_anchor_of_another_model_are_told_of_the_arms_over_it(tmp_path: Path) -> None:
    name = "model.safetensors of model m"
    write_history(
        tmp_path, 24, slower(0, 0), arms=("a", "b"), model={"a": "m", "b": "n"}.__getitem__,
        inputs=lambda day: {name: "new" if day >= 14 else "old", "model.safetensors of model n": "same"},
    )  # fmt: skip
    assert judged(tmp_path)["b"].settings_changed == ()
    assert judged(tmp_path, anchor="a")["b"].settings_changed == (f"run014: the run's {name} old → new",)


def test_why_runs_are_left_out_is_told_once(tmp_path: Path) -> None:
    """It stood in the reason and behind it: "left out: other requests (...); left out: other requests (...)"."""
    write_history(tmp_path, 2, slower(0, 0), arms=("a",))
    other = [cell("cell0000", engine="a", label="a")]
    write_run(tmp_path / "run002", other, [made_trial("cell0000", 0, 1.0, requests_sha256="f" * 64)], day=2)
    told = why(judged(tmp_path, baseline=2)["a"])
    assert told.startswith("no run like the baseline is newer than it; left out: other requests")
    assert told.count("left out") == 1


@pytest.mark.parametrize("anchor", [None, "b"])
def test_a_setting_that_changed_in_a_run_without_a_figure_is_told_of_that_run_alone(
    tmp_path: Path, anchor: str | None
) -> None:
    """Figures that the run lacks said "since" the run behind it, so one change stood there twice."""
    settings = narrower_since(5, "a", "b")
    for day in range(10):
        cells = [
            cell(f"cell{i:04d}", engine=arm, label=arm, engine_parameters=settings(day, arm))
            for i, arm in enumerate("ab")
        ]
        trials = [
            made_trial(f"cell{i:04d}", k, 1.0 + 0.001 * k, energy_j=4.0 if day != 5 else None)
            for i in range(2)
            for k in range(3)
        ]
        write_run(tmp_path / f"run{day:03d}", cells, trials, day=day)
    with open_history(tmp_path) as found:
        mark(found, "good", ["run000", "run001", "run002"], add=False)
        result = regress(found, "good", Asked(anchor))
    words = "arithmetic not set → int8"
    told = f"run005: {words}" + (f", the anchor's {words}" if anchor else "")
    judged_arm = [one for one in result.judged if one.arm == "a" and one.figure.kind in ("time", "energy")]
    assert {one.figure.kind for one in judged_arm} == {"time", "energy"}
    assert {one.settings_changed for one in judged_arm} == {(told,)}
    assert sum(words in note for note in result.notes) == 1 + bool(anchor)


def test_newest_runs_that_are_left_out_are_told_of_what_passed(tmp_path: Path) -> None:
    write_history(tmp_path, 16, slower(0, 0), environments=dict.fromkeys(range(14, 16), OTHER_CPU))
    done = joulebench("regress", "--baseline", "run000", str(tmp_path), "--metric", "e2e")
    told = "No verdict of dropless is of the newest runs, run014 to run015: other machines (CPU EPYC 7B13; another)."
    assert (done.code, told in done.stdout) == (0, True)
