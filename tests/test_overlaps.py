"""Overlap@K: whether the experts that one text chooses most are those that another does, phase by phase."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from results.heat import heat_of_cells, overlaps
from tests.command import joulebench
from tests.conftest import FinishedRun
from tests.heats import heat_of, run_of
from tests.run_builders import cell


def test_overlaps_within_and_across_data_sets() -> None:
    """Three layers of four experts, K = 2, by hand; the reference arm speaks for its workload. Phases were not kept."""
    a = heat_of((9, 8, 1, 0), (9, 8, 1, 0), (9, 8, 1, 0))
    tiers = heat_of((0, 0, 9, 9), (0, 0, 9, 9), (0, 0, 9, 9), profiled=((9, 8, 0, 0), (9, 0, 8, 0), (0, 0, 9, 8)))
    b = heat_of((9, 0, 8, 0), (9, 0, 8, 0), (9, 8, 0, 0))
    cells = [
        cell("tiers", workload="A", reference_id="a"),
        cell("a", workload="A", reference_id="a"),
        cell("b", workload="B", reference_id="b"),
        cell("other model", workload="B", model="another"),
    ]
    run = run_of({"tiers": [(tiers, {})], "a": [(a, {})], "b": [(b, {})], "other model": [(b, {})]}, cells)
    table = overlaps(run, heat_of_cells(run), [2])
    assert table.values.tolist() == [
        ["tiny-moe", "A", "profile", "A", "all", 2, 2 / 4, 0.5, 0.0, 1.0, 3, "derived", None],
        ["tiny-moe", "A", "profile", "B", "all", 2, 2 / 4, 0.5, 0.0, 1.0, 3, "derived", None],
        ["tiny-moe", "A", "window", "B", "all", 2, 2 / 4, 0.5, 0.5, 1.0, 3, "derived", None],
        ["tiny-moe", "B", "window", "A", "all", 2, 2 / 4, 0.5, 0.5, 1.0, 3, "derived", None],
    ]


def test_prefill_and_decoding_overlap_apart_for_each_k() -> None:
    """Five experts, by hand. Prefill: A chose 0, 1 most, B 0, 2. Decoding: A and B both 3, 4. The prompts: 3, 0."""
    a = heat_of((9, 8, 1, 7, 7), decoded=((0, 0, 0, 6, 7),), profiled=((8, 0, 0, 9, 7),))
    b = heat_of((9, 1, 8, 6, 6), decoded=((0, 0, 0, 5, 6),))
    c = heat_of((1, 2, 3, 4, 5), decoded=((0, 0, 0, 0, 0),))
    cells = [cell(name, workload=name) for name in "ABC"]
    run = run_of({"A": [(a, {}), (a, {})], "B": [(b, {})], "C": [(c, {})]}, cells)
    table = overlaps(run, heat_of_cells(run), [2, 3, 8])
    found = {(by, one, two, phase, k): share for _, one, by, two, phase, k, _, share, *_ in table.values.tolist()}
    assert {key[:4] for key in found} == {
        *(("profile", "A", then, "prefill") for then in "ABC"),
        *(("profile", "A", then, "decode") for then in "AB"),
        *(("window", one, two, "prefill") for one in "ABC" for two in "ABC" if one != two),
        *(("window", one, two, "decode") for one in "AB" for two in "AB" if one != two),
    }, "C decoded nothing"
    assert found["profile", "A", "A", "prefill", 2] == 1 / 2
    assert found["profile", "A", "A", "decode", 2] == 1 / 2
    assert found["window", "A", "B", "prefill", 2] == 1 / 2
    assert found["window", "A", "B", "decode", 2] == 1.0
    assert found["window", "A", "C", "prefill", 2] == 0.0
    assert found["profile", "A", "C", "prefill", 3] == 2 / 3
    reasons = table.set_index(["by", "chosen_first_in", "then_in", "phase", "k"])[["overlap", "chance", "reason"]]
    assert reasons["overlap"].isna().equals(reasons["reason"].notna())
    assert reasons.loc[("window", "A", "B", "decode", 3), "reason"] == (
        "in each layer fewer than 3 experts were chosen in one of the two"
    )
    assert reasons.loc[("window", "A", "B", "prefill", 8)].tolist()[1:] == [
        1.0,
        "a layer has 5 experts, so all are among the 8 most chosen",
    ]


def test_k_is_four_and_eight_as_in_the_source() -> None:
    """§5.8 of 000-npumoe: "86%/94% for top-4/top-8 experts"."""
    cells = [cell(name, workload=name) for name in "AB"]
    own = heat_of(tuple(range(1, 17)), decoded=((0,) * 16,))
    run = run_of({c.cell_id: [(own, {})] for c in cells}, cells)
    assert overlaps(run, heat_of_cells(run))[["k", "overlap"]].values.tolist() == [[4, 1.0], [8, 1.0]] * 2


def test_a_sweep_over_many_workloads_is_told_of_the_first() -> None:
    """Of 41 texts the last is in no row, and of the 40 before it each stands beside 39 others."""
    cells = [cell(f"c{i}", workload=f"w{i}") for i in range(41)]
    own = heat_of((2, 1))
    table = overlaps(run_of({c.cell_id: [(own, {})] for c in cells}, cells), {c.cell_id: own for c in cells}, [1])
    assert len(table) == 40 * 39
    assert "w40" not in {*table["chosen_first_in"], *table["then_in"]}


def test_a_profile_that_a_plan_names_is_told_by_its_name() -> None:
    own = heat_of((1, 0, 0), profiled=((0, 1, 0),))
    cells = [cell("c1", workload="A", engine_parameters={"profile": "mine (sha256 0123)"})]
    table = overlaps(run_of({"c1": [(own, {})]}, cells), {"c1": own}, [1])
    assert table.values.tolist() == [
        ["tiny-moe", "mine (sha256 0123)", "profile", "A", "all", 1, 1 / 3, 0.0, 0.0, 0.0, 1, "derived", None]
    ]


def test_a_model_that_is_priced_as_another_routes_as_itself() -> None:
    """It chooses on a modelled device what it chooses on the host: no second model, and no rows twice."""
    own = heat_of((9, 8, 1, 0))
    cells = [cell(f"{w}{m}", workload=w, model=m) for w in "AB" for m in ("tiny", "tiny priced as phi-3.5-moe")]
    table = overlaps(run_of({c.cell_id: [(own, {})] for c in cells}, cells), {c.cell_id: own for c in cells}, [2])
    assert table[["model", "chosen_first_in", "then_in"]].values.tolist() == [["tiny", "A", "B"], ["tiny", "B", "A"]]


def test_the_report_tells_the_overlap_of_the_k_that_is_asked_for(finished_run: FinishedRun, tmp_path: Path) -> None:
    """Its two workloads decode (generations) or do not (questions with given answers)."""
    wanted = ("--overlap-k", "3", "--overlap-k", "5", "--overlap-k", "3")
    done = joulebench("report", str(finished_run.directory), *wanted, "--out", str(tmp_path))
    assert done.code == 0, done.stderr
    told = pd.read_csv(tmp_path / "overlaps.csv")
    profiled = told[told["by"] == "profile"]
    assert {*zip(profiled["then_in"], profiled["phase"], profiled["k"], strict=True)} == {
        *(("boolq", "prefill", k) for k in (3, 5)),
        *(("sharegpt", phase, k) for phase in ("prefill", "decode") for k in (3, 5)),
    }
    refused = joulebench("report", str(finished_run.directory), "--overlap-k", "0", "--out", str(tmp_path))
    assert refused.code == 2
