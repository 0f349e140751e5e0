"""What `plan check` says besides problems: arms that are left out, and a sheet that does not stand for its machine."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from devices.models.sheet import load_sheet
from engines.pricing.cells import parameters
from harness.bundled_plans import about_plan, bundled_plans
from harness.combinations import unpriced
from harness.plan import load_plan
from harness.sheets import sheet_purposes
from results.store import Store
from tests.command import joulebench
from tests.plans import DROPLESS, HOST, M2_ULTRA, NPUMOE, SHAREGPT, raw_plan, write_plan

ONLY_FOR = "reproducing Table 4 of its source; m2-ultra stands for the machine"
TOLD = f"model:m2-ultra-table4: its sheet is only for {ONLY_FOR}; take no figure here for that machine."


def test_a_check_says_which_arms_are_left_out_as_a_dry_run_does(tmp_path: Path) -> None:
    gpu = {"name": "gpu arm", "technique": {"name": "gpu"}}
    plan = write_plan(tmp_path / "p.toml", raw_plan(engine=[DROPLESS, gpu], device=[HOST, M2_ULTRA]))
    checked, dry = joulebench("plan", "check", str(plan)), joulebench("run", str(plan), "--dry-run")
    assert (checked.code, dry.code) == (0, 0), checked.stderr
    (line,) = (one for one in checked.stdout.splitlines() if one.startswith("left out: "))
    assert "model:m2-ultra: gpu arm: " in line
    assert "".join(line.split()) in "".join(dry.stdout.split())


def test_an_arm_placed_by_joules_is_left_out_of_a_sheet_without_watts() -> None:
    """Each trial failed. By seconds it needs none."""
    sheet = load_sheet("m2-ultra")
    for unit in ("npu", "cpu"):
        without = sheet.units[unit].model_copy(update={"busy_w": None})
        silent = sheet.model_copy(update={"units": {**sheet.units, unit: without}})
        by_joules, by_seconds = (parameters("npumoe", objective=of) for of in ("joules", "seconds"))
        told = f"its experts are placed by joules, and its sheet states no power of {unit}"
        assert (unpriced(by_joules, silent), unpriced(by_seconds, silent)) == (told, None)
        assert unpriced(by_joules, sheet) is None


def test_a_sheet_for_one_table_says_so_wherever_it_prices(tmp_path: Path) -> None:
    assert (load_sheet("m2-ultra").only_for, load_sheet("m2-ultra-table4").only_for) == (None, ONLY_FOR)
    device = {"name": "model:m2-ultra-table4"}
    arms = [NPUMOE | {"devices": [device["name"]]}, {"name": "cpu", "technique": {"name": "coreml-cpu"}}]
    plan = write_plan(tmp_path / "p.toml", raw_plan(engine=arms, device=[device], workload=[SHAREGPT]))
    assert TOLD in joulebench("plan", "check", str(plan)).stdout.splitlines()
    done = joulebench("run", str(plan), "--out", str(tmp_path / "run"))
    assert done.code == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert said.count(TOLD) == 2, "before it runs, and below its figures"
    assert f"model:m2-ultra-table4 · only for {ONLY_FOR} ·" in said
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert TOLD in page
    assert f"a sheet only for {ONLY_FOR}</a>" in page
    found = pd.read_csv(tmp_path / "run" / "arms.csv")
    assert not found[found["quantity"] != "accuracy"][["certain_difference", "certainly_best"]].any().any()
    with Store.view(tmp_path / "run") as store:
        assert store.info().only_for == {"model:m2-ultra-table4": ONLY_FOR}


def test_a_swept_sheet_keeps_its_caveat(tmp_path: Path) -> None:
    """A swept device has another name than the plan gives it: what its sheet is only for is told under that name."""
    swept = {"device.name": ["model:m2-ultra", "model:m2-ultra-table4"]}
    raw = raw_plan(engine=[{"name": "cpu", "technique": {"name": "coreml-cpu"}}], device=[M2_ULTRA], sweep=swept)
    write_plan(tmp_path / "p.toml", raw)
    plan = load_plan(tmp_path / "p.toml")
    labels = [cell.cell.device for cell in plan.cells]
    (table4,) = {label for label in labels if "table4" in label}
    assert table4 != "model:m2-ultra-table4"
    assert dict(sheet_purposes(plan)) == {table4: ONLY_FOR}


def test_a_bundled_plan_that_needs_a_download_says_so_in_the_list() -> None:
    told = {name: about_plan(path) for name, path in bundled_plans().items()}
    needing = {n for n, path in bundled_plans().items() if "needs JOULEBENCH_DATA" in path.read_text(encoding="utf-8")}
    assert needing == {"arrivals"}
    assert {name for name, words in told.items() if "needs a download" in words} == needing
