"""`joulebench compare`: its sides, its table, its page, and what it ends with."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import typer

from harness import compare_command
from results.history.compared import Compared
from results.history.comparison import Comparison, Side
from results.history.points import Figure
from results.report import compare_page
from results.report.changes_page import WORSE, ChangesPage, Drawn, _chart
from tests.command import joulebench
from tests.compared_runs import read, times, written
from tests.histories import made_trial, write_run
from tests.run_builders import cell


def test_no_table_takes_the_place_of_a_plan_or_of_a_run_or_of_its_page(tmp_path: Path) -> None:
    """The store of a run was gone by one word too many."""
    first, second = (str(written(tmp_path / name, times(1.0, i))) for i, name in enumerate("ab"))
    plan, store, both = tmp_path / "my.toml", tmp_path / "a" / "run.sqlite", tmp_path / "both.html"
    plan.write_text("schema = 1")
    before = store.read_bytes()
    for words, told in (
        (["--csv", str(store)], f"--csv {store}: is there, and its name is of no .csv file; name another file"),
        (["--html", str(plan)], f"--html {plan}: is there, and its name is of no .html file; name another file"),
        (["--csv", str(both), "--html", str(both)], f"--csv {both}: is --html too; name two files"),
    ):
        for command in (["compare", first, second], ["regress", "--baseline", "x", str(tmp_path)]):
            done = joulebench(*command, *words)
            assert (done.code, done.stderr) == (2, f"error: {told}\n")
    done = joulebench("trace", first, "--cell", "c1", "--out", str(store))
    assert (done.code, "its name is of no .json file" in done.stderr) == (2, True)
    assert (plan.read_text(), store.read_bytes(), both.exists()) == ("schema = 1", before, False)


def test_the_command_names_sides_writes_files_and_ends_with_1_where_b_is_worse(tmp_path: Path) -> None:
    folder = tmp_path / "odd:name@x"
    cells = [cell("c1", engine="a"), cell("c2", engine="b@1")]
    trials = [
        made_trial(c.cell_id, i, s)
        for c, m in zip(cells, (1.0, 1.2), strict=True)
        for i, s in enumerate(times(m, int(10 * m)))
    ]
    write_run(folder, cells, trials)
    page, table = tmp_path / "c.html", tmp_path / "c.csv"
    done = joulebench("compare", f"{folder}:a", f"{folder}:b@1@host", "--html", str(page), "--csv", str(table))
    assert done.code == 1, done.stderr
    assert "worse" in done.stdout
    assert "Benjamini and Hochberg" in done.stdout
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    told = next(one for one in rows if one["metric"] == "e2e")
    assert float(told["change"]) == pytest.approx(0.2, abs=0.02)
    assert page.read_text("utf-8").count('class="chart wide"') == 1
    back = joulebench("compare", f"{folder}:b@1", f"{folder}:a", "--json")
    assert back.code == 0
    assert {one["verdict"] for one in json.loads(back.stdout)["rows"]} >= {"better"}


def test_a_terminal_of_another_alphabet_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with 1, which says that B is worse."""
    trials = [made_trial("c1", i, seconds) for i, seconds in enumerate(times(1.0, 0))]
    folders = [
        write_run(tmp_path / name, [cell("c1", engine_parameters=settings)], trials)
        for name, settings in (("a", {}), ("b", {"experts": "int8"}))
    ]
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = joulebench("compare", *map(str, folders), fresh=True)
    assert (done.code, done.stderr) == (0, "")
    assert r"experts not set \u2192 int8" in done.stdout


def test_an_interval_of_a_million_percent_hides_no_other_in_the_picture() -> None:
    drawn = [Drawn("wide", -20.0, -99.0, 1e9, "not certain"), Drawn("small", 2.0, 1.0, 3.0, "worse")]
    page = ChangesPage("t", "lead", "change", ["worse"], ["worse"], {"worse": WORSE}, drawn, (), (), (), ())
    spec = json.dumps(_chart(page, drawn, "described"))
    assert '"low": -80.0, "high": 80.0' in spec
    assert '"low": 1.0, "high": 3.0' in spec
    certain = Drawn("certain", 300.0, 200.0, 5000.0, "worse")
    assert '"high": 5000.0' in json.dumps(_chart(page, [*drawn, certain], "described"))


def test_each_value_of_the_table_stands_under_its_own_name(tmp_path: Path) -> None:
    one = Figure(
        metric="e2e", phase="all", unit="s", kind="time", better="lower", method="measured", meter="clock",
        values={0: 1.0, 1: 2.0},
    )  # fmt: skip
    other = one.model_copy(update={"method": "modelled", "meter": "sheet", "values": {0: 4.0, 1: 5.0, 2: 6.0}})
    full = Compared(
        "chat", "host", "a", one, other, "worse", reason="why", change=0.1, low=0.2, high=0.3, p=0.4, adjusted=0.5,
        test="t", effect=0.6, longer=0.7, said=("cpu", "model"),
    )  # fmt: skip
    alone = Compared("chat", "host", "a", one, None, "refused")
    side = Side("A", read(written(tmp_path / "a", times(1.0, 0))))
    frame = compare_page.comparison_frame(Comparison(side, side, (full, alone), ()))
    first, second = frame.astype(object).where(frame.notna(), None).to_dict("records")
    assert first == {
        "verdict": "worse", "arm": "a", "workload": "chat", "device": "host", "metric": "e2e", "phase": "all",
        "unit": "s", "method_a": "measured", "method_b": "modelled", "meter_a": "clock", "meter_b": "sheet", "n_a": 2,
        "n_b": 3, "mean_a": 1.5, "mean_b": 5.0, "change": 0.1, "low": 0.2, "high": 0.3, "change_is": "share", "p": 0.4,
        "p_adjusted": 0.5, "test": "t", "hedges_g": 0.6, "requests_longer": 0.7, "unlike": "cpu; model",
        "reason": "why",
    }  # fmt: skip
    of_b = ("method_b", "meter_b", "n_b", "mean_b", "change", "p", "unlike", "reason")
    assert [second[name] for name in of_b] == [None] * len(of_b)
    assert list(compare_page.comparison_frame(Comparison(side, side, (), ())).columns) == list(first)


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("a page", encoding="utf-8")
    for side, said in ((tmp_path / "x", "no such folder"), (page, "a file, and no folder"), (tmp_path, "holds no run")):
        done = joulebench("compare", str(side), str(tmp_path))
        (line,) = done.problems
        assert (done.code, said in line) == (2, True)


def test_large_runs_are_read_by_two_processes_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [written(tmp_path / name, times(1.0, seed), right=[1.0, 0.0]) for seed, name in enumerate("ab")]
    alone = compare_command._read(folders)
    monkeypatch.setattr(compare_command, "LARGE_BYTES", 0)
    assert compare_command._read(folders) == alone
    (folders[1] / "run.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(typer.Exit) as ended:
        compare_command._read(folders)
    assert ended.value.exit_code == 2
