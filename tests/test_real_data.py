"""The demo's arms on real data sets, where there are any, and the tables say where the items came from."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pandas as pd
import pytest

from tests.command import joulebench
from tests.data_folder import data_folder
from tests.plans import write_plan

DEMO = Path(__file__).parents[1] / "plans" / "demo.toml"


def demo_on_data(folder: Path) -> Path:
    """The demo's plan, with the workloads' own items instead of generated ones."""
    raw = tomllib.loads(DEMO.read_text(encoding="utf-8"))
    for workload in raw["workload"]:
        workload.pop("data", None)
    return write_plan(folder / "plan.toml", raw)


@pytest.mark.slow
def test_the_demo_runs_on_real_hellaswag_boolq_and_sharegpt(tmp_path: Path) -> None:
    data = data_folder()
    settings = ("workload.limit=2", "workload.sharegpt.max_new_tokens=4", "protocol.repeats=1", "protocol.idle_s=0")
    arguments = [a for setting in settings for a in ("--set", setting)]
    done = joulebench("run", str(demo_on_data(tmp_path)), "--out", str(tmp_path / "run"), *arguments, data=data)
    assert done.code == 0, done.stderr
    trials, requests = (pd.read_csv(tmp_path / "run" / f"{name}.csv") for name in ("trials", "requests"))
    assert set(trials["status"]) == {"ok"}
    sources = pd.read_csv(tmp_path / "run" / "summary.csv").groupby("workload")["data_source"].unique()
    for name in ("hellaswag", "boolq", "sharegpt"):
        (source,) = sources[name]
        assert Path(source).is_relative_to(data)
    assert list(sources["ruler_niah_multikey_1"]) == ["generated"]
    # Two items each: four answers of HellaSwag, two of BoolQ, for every arm and repeat.
    asked = requests.merge(trials, on=["cell", "repeat", "device", "time_method"])
    per_arm = asked.groupby(["workload", "engine", "device"])["request_id"].nunique().groupby("workload").unique()
    assert list(per_arm["hellaswag"]) == [8]
    assert list(per_arm["boolq"]) == [4]
    accuracy = pd.read_csv(tmp_path / "run" / "accuracy.csv")
    assert set(accuracy.loc[accuracy["workload"] == "boolq", "metric"]) >= {"acc"}
    assert set(accuracy.loc[accuracy["workload"] == "hellaswag", "metric"]) >= {"acc", "acc_norm"}
    assert not trials["workload"].str.contains("sample").any()


def test_a_data_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = joulebench("plan", "check", str(demo_on_data(tmp_path)), data=tmp_path / "nowhere")
    assert done.code == 2
    assert "Traceback" not in done.stderr
    assert {line.split(":")[1].strip() for line in done.problems} == {
        "workload hellaswag",
        "workload boolq",
        "workload sharegpt",
    }
    assert all(str(tmp_path / "nowhere") in line for line in done.problems)
