"""Tables that a plan asks for: speed-ups worked out by hand from the seconds of trials."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner

from harness.commands import app
from harness.plan import PlanError, build_plan
from harness.summary import print_summary
from results.asked_tables import AskedTable, asked_rows
from results.environments import Road
from results.report.html import html_text
from results.run_frames import RunFrames
from results.runs import RunData
from results.trials import Failure
from tests.plans import raw_plan, write_plan
from tests.run_builders import HOSTILE, cell, completion, failed, run, trial

Seconds = tuple[float, float]
"""Of a request: its prefill, its decoding."""


def made(
    arms: dict[str, Sequence[Seconds]], tables: Sequence[dict[str, Any]], device: str = "host", **of_trial: Any
) -> RunData:
    """Each arm answers one request in each of its trials."""
    cells = [cell(f"c{i}", engine=name, device=device) for i, name in enumerate(arms)]
    trials = []
    for one, own in zip(cells, arms.values(), strict=True):
        for repeat, (prefill, decode) in enumerate(own):
            done = completion(token_times_s=(prefill, prefill + decode))
            trials.append(trial(one.cell_id, repeat, completions=(done,), **of_trial))
    found = run(cells, trials)
    return replace(found, info=found.info.model_copy(update={"plan": {"table": list(tables)}}))


def drawn(found: RunData) -> list[AskedTable]:
    return RunFrames(found).asked_tables


def speed_ups(table: AskedTable) -> dict[str, list[float | None]]:
    return {
        name: [1.0 if c.is_base else None if c.ratio is None else c.ratio.value for c in cells]
        for name, cells in table.rows
    }


SWEPT: dict[str, Sequence[Seconds]] = {
    "base": [(4.0, 8.0)],
    "shared[ndps=2]": [(2.0, 8.0)],
    "shared[ndps=6]": [(1.0, 2.0)],
}


@pytest.mark.parametrize(("phase", "expected"), [("prefill", [2.0, 4.0]), ("decode", [1.0, 4.0]), ("all", [1.2, 4.0])])
def test_a_cell_is_how_many_times_faster_an_arm_is(phase: str, expected: list[float]) -> None:
    """The values of the sweep stand across; an arm without them is the same in every column."""
    spec = {"title": "Fig. 9", "over": "base", "phase": phase, "columns": "ndps"}
    (table,) = drawn(made(SWEPT, [spec]))
    assert table.columns == ("2", "6")
    found = speed_ups(table)
    assert found.pop("base") == [1.0, 1.0]
    assert found == {"shared": pytest.approx(expected)}


def test_a_swept_arm_may_be_what_the_others_are_compared_with() -> None:
    """Column by column; rows in the order that the plan gives."""
    spec = {"title": "t", "over": "shared", "phase": "decode", "columns": "ndps", "rows": ["shared", "base"]}
    (table,) = drawn(made(SWEPT, [spec]))
    assert [name for name, _ in table.rows] == ["shared", "base"]
    assert speed_ups(table) == {"shared": [1.0, 1.0], "base": [pytest.approx(1.0), pytest.approx(0.25)]}


def test_arms_whose_own_names_have_brackets_have_a_row_each() -> None:
    """No sweep made them: the two were one row, "tiers", and had one figure."""
    arms = {"base": [(1.0, 8.0)], "tiers [cold]": [(1.0, 4.0)], "tiers [hot]": [(1.0, 2.0)], "[all]": [(1.0, 1.0)]}
    (table,) = drawn(made(arms, [{"title": "t", "over": "base", "phase": "decode"}]))
    assert speed_ups(table) == {"base": [1.0], "tiers [cold]": [2.0], "tiers [hot]": [4.0], "[all]": [8.0]}


def test_repeats_give_an_interval_and_a_model_gives_none() -> None:
    """Three pairs of repeats: 4, 4.1 and 3.9 s over 2, 2.02 and 1.99 s are 12 over 6.01."""
    arms = {"slow": [(1.0, 3.0), (1.0, 3.1), (1.0, 2.9)], "fast": [(1.0, 1.0), (1.0, 1.02), (1.0, 0.99)]}
    spec = {"title": "t", "over": "slow"}
    (table,) = drawn(made(arms, [spec]))
    ratio = dict(table.rows)["fast"][0].ratio
    assert ratio is not None
    assert ratio.value == pytest.approx(12 / 6.01)
    assert ratio.low is not None
    assert ratio.high is not None
    assert 1 < ratio.low < 12 / 6.01 < ratio.high
    modelled = made({"slow": [(1.0, 3.0)], "fast": [(1.0, 1.0)]}, [spec], "model:toy", time_method="modelled")
    (table,) = drawn(modelled)
    assert table.methods == ("modelled",)
    assert "end to end, modelled, error not stated; times faster than slow" in html_text(modelled)
    cell = dict(table.rows)["fast"][0]
    assert cell.ratio is not None
    assert (cell.ratio.value, cell.ratio.low) == (pytest.approx(2.0), None)


def test_what_cannot_be_compared_has_no_ratio_and_says_why() -> None:
    arms: dict[str, Sequence[Seconds]] = {"a[n=1]": [(1.0, 1.0)], "a[n=2]": [(1.0, 1.0)], "b": [(1.0, 1.0)]}
    (table,) = drawn(made(arms, [{"title": "t", "over": "a", "rows": ["b", "c"]}]))
    (b, c) = (cells[0] for _, cells in table.rows)
    assert (b.seconds, b.ratio, b.reason) == (2.0, None, "2 arms are called so here (a[n=1], a[n=2]); name one")
    assert (c.seconds, c.reason) == (None, "no such arm ran on this device")


def test_an_arm_that_failed_is_missing_and_its_error_harmless() -> None:
    found = made({"base": [(1.0, 1.0)], "other": [(1.0, 1.0)]}, [{"title": HOSTILE[:200], "over": "base"}])
    found = replace(found, trials=(found.trials[0], failed("c1")))
    page = html_text(found)
    assert "<script>alert" not in page
    (table,) = drawn(found)
    lost = dict(table.rows)["other"][0]
    assert lost.seconds is None
    assert lost.reason is not None
    assert "out of memory" in lost.reason


def test_the_page_and_the_file_have_the_table() -> None:
    found = made(SWEPT, [{"title": "Fig. 11", "over": "base", "phase": "decode", "columns": "ndps"}])
    page = html_text(found)
    assert "Fig. 11" in page
    assert "decode, measured; times faster than base; across: ndps" in page
    assert "4.0×" in page
    rows = asked_rows(drawn(found))
    own = rows[(rows["arm"] == "shared") & (rows["column"] == "6")].iloc[0]
    assert (own["seconds"], own["speed_up"], own["over"], own["method"]) == (2.0, 4.0, "base", "measured")


def test_a_run_whose_plan_asks_for_none_has_none() -> None:
    found = made(SWEPT, [])
    assert drawn(found) == []
    assert "Tables that the plan asks for" not in html_text(found)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"title": "t", "over": "droples"}, "table[0].over: no arm has the name 'droples'; did you mean dropless?"),
        ({"title": "t", "over": "dropless", "rows": ["x"]}, "table[0].rows: no arm has the name 'x'"),
        (
            {"title": "t", "over": "dropless", "columns": "ndps"},
            "table[0].columns: the sweep gives no arm's or workload's 'ndps'",
        ),
        ({"title": "t", "over": "dropless", "phase": "both"}, "table[0].phase"),
        ({"over": "dropless"}, "table[0].title: missing"),
        ({"title": "t", "over": "dropless", "row": []}, "table[0].row: unknown key"),
    ],
)
def test_a_plan_check_tells_what_a_table_names_wrongly(table: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        build_plan(raw_plan(table=[table]))
    (told,) = caught.value.problems
    assert told.startswith(words)


def test_tables_change_no_figure() -> None:
    asking = raw_plan(table=[{"title": "t", "over": "dropless"}])
    assert build_plan(asking).plan_hash == build_plan(raw_plan()).plan_hash


def test_a_phase_is_compared_where_its_own_road_is_one() -> None:
    """One arm decodes in one call of the kernels, the other plan by plan: their prefills compare, the rest does not."""
    titles: dict[str, str] = {"prefill": "P", "decode": "D", "all": "A"}
    found = made(
        {"a": [(2.0, 2.0)], "b": [(1.0, 1.0)]},
        [{"title": title, "over": "a", "phase": phase} for phase, title in titles.items()],
    )
    roads = [
        Road(arithmetic="kernels", device="cpu", dtype="float32", n_threads=1, prefill="grouped", decoding=decoding)
        for decoding in ("fused", "plan by plan")
    ]
    trials = [one.model_copy(update={"road": road}) for one, road in zip(found.trials, roads, strict=True)]
    tables = {table.spec.phase: dict(table.rows)["b"][0] for table in drawn(replace(found, trials=tuple(trials)))}
    assert tables["prefill"].ratio is not None
    assert tables["prefill"].ratio.value == 2.0
    for phase in ("decode", "all"):
        assert tables[phase].ratio is None
        assert (tables[phase].reason or "").startswith(
            "computed in another way (decoding plan by plan; a: decoding fused)"
        )


# --- keys of workloads across, the terminal, and what has no room ----------------------------------------------------


def by_workload(arms: dict[tuple[str, str], Seconds], spec: dict[str, Any]) -> RunData:
    """arms: engine and workload of each cell."""
    cells, trials = [], []
    for i, ((engine, workload), (prefill, decode)) in enumerate(arms.items()):
        cells.append(cell(f"c{i}", engine=engine, workload=workload))
        trials.append(trial(f"c{i}", completions=(completion(token_times_s=(prefill, prefill + decode)),)))
    found = run(cells, trials)
    return replace(found, info=found.info.model_copy(update={"plan": {"table": [spec]}}))


def test_prompt_lengths_stand_across_in_one_table() -> None:
    """Two lengths of one workload; what has no length is in no such table."""
    arms = {
        ("base", "w[length=64]"): (1.0, 2.0),
        ("fast", "w[length=64]"): (1.0, 1.0),
        ("base", "w[length=128]"): (1.0, 6.0),
        ("fast", "w[length=128]"): (1.0, 2.0),
        ("base", "other"): (1.0, 1.0),
        ("fast", "other"): (1.0, 1.0),
    }
    found = by_workload(arms, {"title": "t", "over": "base", "phase": "decode", "columns": "length"})
    (table,) = drawn(found)
    assert (table.workload, table.columns) == ("w", ("64", "128"))
    assert speed_ups(table) == {"base": [1.0, 1.0], "fast": pytest.approx([2.0, 3.0])}


def test_a_swept_value_with_commas_is_one_column() -> None:
    """Cores "0,1" stood as "0", beside the "0" of the arm on one core, and neither had a figure."""
    arms: dict[str, Sequence[Seconds]] = {
        "base": [(4.0, 8.0)],
        "on[cores=0,chunk=7]": [(4.0, 6.0)],
        "on[cores=0,1,chunk=7]": [(2.0, 3.0)],
        "on[cores=prefill=0,1 decode=0,chunk=7]": [(2.0, 6.0)],
    }
    (table,) = drawn(made(arms, [{"title": "t", "over": "base", "columns": "cores"}]))
    assert table.columns == ("0", "0,1", "prefill=0,1 decode=0")
    assert speed_ups(table)["on"] == pytest.approx([1.2, 2.4, 1.5])


def test_keys_of_workloads_and_engines_stand_across_together() -> None:
    """The base takes 2 chunk x limit times as long. Another swept key of the workload keeps its tables apart."""
    arms: dict[tuple[str, str], Seconds] = {}
    for limit, length, chunk in product((1, 2), (3, 5), (7, 11)):
        workload = f"w[length={length},limit={limit}]"
        arms[f"base[chunk={chunk}]", workload] = (2.0 * chunk * limit * length, 1.0)
        arms[f"fast[chunk={chunk}]", workload] = (1.0 * length, 1.0)
    spec = {"title": "t", "over": "base", "phase": "prefill", "columns": ["length", "chunk"]}
    one, two = drawn(by_workload(arms, spec))
    assert (one.workload, two.workload) == ("w[limit=1]", "w[limit=2]")
    assert one.columns == two.columns == ("3 / 7", "3 / 11", "5 / 7", "5 / 11")
    assert speed_ups(one)["fast"] == pytest.approx([14.0, 22.0, 14.0, 22.0])
    assert speed_ups(two)["fast"] == pytest.approx([28.0, 44.0, 28.0, 44.0])


def test_each_of_several_models_has_a_table_of_its_own() -> None:
    cells, trials = [], []
    seconds = {("one", "base"): 4.0, ("one", "fast"): 2.0, ("two", "base"): 9.0, ("two", "fast"): 3.0}
    for i, ((model, engine), s) in enumerate(seconds.items()):
        cells.append(cell(f"c{i}", engine=engine, model=model))
        trials.append(trial(f"c{i}", completions=(completion(token_times_s=(s, 2 * s)),)))
    found = run(cells, trials)
    spec = {"title": "t", "over": "base", "phase": "prefill"}
    one, two = drawn(replace(found, info=found.info.model_copy(update={"plan": {"table": [spec]}})))
    assert (one.workload, two.workload) == (f"{cells[0].workload}, one", f"{cells[0].workload}, two")
    assert [speed_ups(table)["fast"] for table in (one, two)] == [[2.0], [3.0]]


def test_a_plan_may_name_a_swept_key_of_workloads_but_none_of_both() -> None:
    table = {"title": "t", "over": "dropless", "columns": "limit"}
    assert build_plan(raw_plan(table=[table], sweep={"workload.limit": [1, 2]})).cells
    both = {"title": "t", "over": "dropless", "columns": ["limit", "limit"]}
    with pytest.raises(PlanError, match=re.escape("table[0].columns: names a key twice")):
        build_plan(raw_plan(table=[both], sweep={"workload.limit": [1, 2]}))


def test_a_row_that_is_named_twice_is_refused() -> None:
    """The page had the arm's row two times."""
    table = {"title": "t", "over": "dropless", "rows": ["dropless", "dropless"]}
    with pytest.raises(PlanError, match=re.escape("table[0].rows: names an arm twice")):
        build_plan(raw_plan(table=[table]))


def printed(found: RunData) -> str:
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    print_summary(RunFrames(found), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_terminal_has_the_table() -> None:
    told = printed(made(SWEPT, [{"title": "Fig. 11", "over": "base", "phase": "decode", "columns": "ndps"}]))
    own = told[told.index("Fig. 11") :]
    assert re.search(r"shared +1\.0×\(1\) +4\.0×\(1\)", own)
    assert "times faster than base; across: ndps" in " ".join(own.split())
    assert max(map(len, own.splitlines())) <= 80


@pytest.mark.parametrize("result", ["N.S.", "oom"])
def test_what_has_no_room_says_so_in_its_cell_everywhere(result: Literal["N.S.", "oom"]) -> None:
    spec = {"title": "Fig. 9", "over": "base", "columns": "ndps", "rows": ["base", "shared"]}
    found = made(SWEPT, [spec])
    error = f"{result}: 80 GB of experts, and it holds 68"
    failure = Failure(kind="stable", error=error, result=result)
    lost = found.trials[1].model_copy(update={"status": "failed", "completions": (), "failure": failure})
    found = replace(found, trials=(found.trials[0], lost, found.trials[2]))
    (table,) = drawn(found)
    first, second = dict(table.rows)["shared"]
    assert (first.result, first.reason, second.result) == (result, error, None)
    rows = asked_rows([table])
    own = rows[rows["arm"] == "shared"].set_index("column")
    assert (own.loc["2", "result"], own.loc["2", "reason"]) == (result, error)
    assert pd.isna(own.loc["6", "result"])
    page, told = html_text(found), printed(found)
    assert re.search(rf"<td[^>]*>\s*(<[^>]+>)?{re.escape(result)}", page)
    assert f"2 ok, 0 failed, 1 without figures ({result})" in page
    assert re.search(rf"shared +{re.escape(result)}\(1\) +4\.0×", told)
    answers = told[told.index("times base") :]
    assert re.search(rf"shared\[ndps=2\] +{re.escape(result)}", answers), "and not: missing"
    assert f"2 trials ok, 0 failed, 1 without figures ({result})" in " ".join(told.split())
    assert "trials failed" not in page


def test_a_run_whose_only_failures_are_no_room_ends_well(tmp_path: Path) -> None:
    """80.5 GB of experts on two DIMMs of 34.4: the plan check warns, the run says N.S., and its exit code is 0."""
    name = "model:rtx5080-ndp"
    plan = raw_plan(
        engine=[{"name": "a", "technique": {"name": "ndp-tp", "ndps": 2}, "devices": [name]}],
        device=[{"name": name, "priced_as": "phi-3.5-moe"}],
        protocol={"repeats": 1, "warmup": 0, "idle_s": 0.0},
    )
    path = write_plan(tmp_path / "plan.toml", plan)
    done = CliRunner().invoke(app, ["run", str(path), "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert "0 trials ok, 0 failed, 1 without figures (N.S.)" in " ".join(done.output.split())
