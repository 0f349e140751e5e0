"""What a finished run leaves: its tables and its report, as the command line writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd

from tests.command import joulebench
from tests.conftest import FinishedRun
from tests.run_builders import TABLES
from tests.test_cli import assert_refused


def read(run: FinishedRun, name: str) -> pd.DataFrame:
    return pd.read_csv(run.directory / f"{name}.csv")


def test_a_run_writes_its_tables_and_its_report(finished_run: FinishedRun) -> None:
    written = {p.name for p in finished_run.directory.iterdir() if p.suffix in (".csv", ".html")}
    assert written == {*(f"{name}.csv" for name in TABLES), "report.html"}
    listed = finished_run.process.stdout.splitlines()[-len(TABLES) - 1 :]
    assert [Path(line) for line in listed] == [
        finished_run.directory / name for name in (*(f"{t}.csv" for t in TABLES), "report.html")
    ]
    assert finished_run.process.stderr == ""


def test_progress_is_a_line_a_trial_where_there_is_no_terminal(finished_run: FinishedRun) -> None:
    lines = [line for line in finished_run.process.stdout.splitlines() if line.startswith("[") and "/10]" in line]
    assert [line.split("]")[0] for line in lines] == [f"[{i}/10" for i in range(1, 11)]


def test_tidy_tables_have_the_columns_that_are_documented(finished_run: FinishedRun) -> None:
    documented = [
        "run_id", "cell", "device", "engine", "technique", "model", "workload", "phase", "metric", "unit", "method",
        "meter", "n", "n_failed", "mean", "median", "p50", "p90", "p99", "ci_low", "ci_high", "reason",
    ]  # fmt: skip
    for name in ("latency", "energy", "accuracy"):
        assert list(read(finished_run, name).columns) == documented


def test_no_row_mixes_methods_and_modelled_is_said(finished_run: FinishedRun) -> None:
    single = {"counter", "integrated power", "modelled", "measured", "derived", "missing"}
    for name in ("latency", "energy", "accuracy"):
        table = read(finished_run, name)
        assert set(table["method"]) <= single
        assert table.groupby(["cell", "metric", "phase", "meter", "method"], dropna=False).size().max() == 1
        missing = table["method"] == "missing"
        assert table.loc[missing, "mean"].isna().all()
        assert table.loc[missing, "reason"].notna().all()
        assert table.loc[~missing, "mean"].notna().all()
    latency, energy = read(finished_run, "latency"), read(finished_run, "energy")
    on_model = latency["device"] == "model:m2-ultra"
    assert set(latency.loc[on_model, "method"]) <= {"modelled", "missing"}
    assert set(latency.loc[~on_model, "method"]) <= {"measured", "derived", "missing"}
    assert set(energy["method"]) <= {"modelled", "missing"}  # both meters of this plan are models
    trials = read(finished_run, "trials")
    assert set(trials.loc[trials["device"] == "model:m2-ultra", "time_method"]) == {"modelled"}
    assert set(trials.loc[trials["device"] == "host", "time_method"]) == {"measured"}


def test_a_modelled_cell_has_one_trial_and_no_interval(finished_run: FinishedRun) -> None:
    summary = read(finished_run, "summary")
    modelled = summary[summary["device"] == "model:m2-ultra"]
    measured = summary[summary["device"] == "host"]
    assert set(modelled["n"]) == {1}
    assert set(measured["n"]) == {2}
    assert modelled["e2e_ms_low"].isna().all()
    assert measured["e2e_ms_low"].notna().all()


def test_sample_ids_join_the_same_sample_over_arms(finished_run: FinishedRun) -> None:
    shared = ["cell", "repeat", "device", "time_method"]
    trials = read(finished_run, "requests").merge(read(finished_run, "trials"), on=shared)
    for _, own in trials.groupby("workload"):
        of_arm = [set(arm["sample_id"]) for _, arm in own.groupby(["engine", "device"])]
        assert len(of_arm) == 3
        assert all(ids == of_arm[0] for ids in of_arm)
        # The same sample is the same prompt in every arm.
        assert (own.groupby("request_id")["prompt_tokens"].nunique() == 1).all()
    scored = trials[trials["workload"].str.startswith("boolq")]
    assert scored["score_acc"].notna().all()
    assert trials.loc[trials["workload"].str.startswith("sharegpt"), "score_acc"].isna().all()


def test_report_writes_the_same_files_again(finished_run: FinishedRun) -> None:
    before = {name: (finished_run.directory / f"{name}.csv").read_bytes() for name in TABLES}
    done = joulebench("report", str(finished_run.directory), "--json")
    assert done.code == 0, done.stderr
    told = json.loads(done.stdout)
    assert len(told["files"]) == len(TABLES) + 1
    assert len(told["summary"]) == 6
    assert {name: (finished_run.directory / f"{name}.csv").read_bytes() for name in TABLES} == before


def test_a_reader_chooses_the_baseline_of_a_finished_run(finished_run: FinishedRun, tmp_path: Path) -> None:
    folder = shutil.copytree(finished_run.directory, tmp_path / "copy")
    done = joulebench("report", str(folder), "--baseline", "tiers", "--json")
    assert done.code == 0, done.stderr
    on_host = [row for row in json.loads(done.stdout)["arms"] if row["device"] == "host"]
    assert {row["baseline"] for row in on_host} == {"tiers"}
    assert {row["ratio"] for row in on_host if row["arm"] == "tiers" and row["quantity"] == "time"} == {1.0}
    refused = joulebench("report", str(folder), "--baseline", "tires")
    assert_refused(refused.code, refused.stderr, ["--baseline: no arm of this run is named 'tires'; take one of"])
