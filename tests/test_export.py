"""Parquet of a run and its card: the same figures as the CSV files, and nothing of the run is markup."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import stat
from pathlib import Path
from typing import get_args

import pandas as pd
import pytest

from results.export import TRACES, WHAT, card_text, escaped, export, fenced, foreign_files
from results.graph_placement import GraphPlacement
from results.records import TraceKind
from results.report.csv import frames_of_run
from results.run_frames import RunFrames
from results.store import Store
from tests.command import joulebench
from tests.conftest import FinishedRun
from tests.run_builders import HOSTILE, TABLES, cell, failed, run, trial


@pytest.fixture(scope="module")
def exported(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "set"
    ended = joulebench("export", str(finished_run.directory), "--out", str(out))
    assert ended.code == 0, ended.stderr
    assert {Path(line).name for line in ended.stdout.splitlines()} == {p.name for p in out.iterdir()}
    return out


@pytest.mark.parametrize("name", TABLES)
def test_each_table_says_what_its_csv_says(exported: Path, finished_run: FinishedRun, name: str) -> None:
    ours = pd.read_parquet(exported / f"{name}.parquet")
    csv = pd.read_csv(finished_run.directory / f"{name}.csv", keep_default_na=False, na_values=[""])
    assert list(ours.columns) == list(csv.columns)
    assert len(ours) == len(csv)
    for column in csv.columns:
        if pd.api.types.is_float_dtype(csv[column]) and pd.api.types.is_numeric_dtype(ours[column]):
            pd.testing.assert_series_equal(ours[column].astype(float), csv[column], rtol=1e-12, check_names=False)


def test_an_export_that_was_killed_is_made_again(exported: Path, finished_run: FinishedRun) -> None:
    (exported / "energy.tmp").write_text("half")
    assert joulebench("export", str(finished_run.directory), "--out", str(exported)).code == 0
    assert not (exported / "energy.tmp").exists()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("n_renamed", [0, 1, 2, 8, len(TABLES) + 1])
def test_no_card_stands_beside_tables_that_are_not_its_own_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_renamed: int
) -> None:
    """Of the renames, the first is of the half card, the last of the card."""

    def files(folder: Path) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in folder.iterdir()}

    graph = GraphPlacement(package="p", function="f", role="experts", predictions=1, operations={"cpu": ("add",)})
    earlier = run([cell()], [trial(placement=(graph,)), trial(repeat=1)])
    later = run([cell(engine="another")], [trial()])
    out = tmp_path / "set"
    export(later, tmp_path / "whole", with_traces=False)
    export(earlier, out)
    whole, before = files(tmp_path / "whole"), files(out)
    renames: list[Path] = []

    def rename(source: Path, target: Path) -> None:
        if len(renames) == n_renamed:
            patched.setattr(os, "unlink", lambda path: None)
            raise Killed
        os.rename(source, target)
        renames.append(target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", rename)
        with pytest.raises(Killed):
            export(later, out, with_traces=False)
    left = files(out)
    assert left.keys() - before.keys() - whole.keys(), "halves are there"
    assert left | before == left if n_renamed == 0 else "README.md" not in left
    assert foreign_files(out) == []
    export(later, out, with_traces=False)
    assert files(out) == whole


def test_what_takes_a_name_is_on_the_disk_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole files, each before it has its name; then the folder: its names of tables before that of the card."""
    out = tmp_path / "set"
    flushed: list[os.stat_result] = []
    named: list[set[str]] = []
    fsync = os.fsync

    def seen(descriptor: int) -> None:
        fsync(descriptor)
        flushed.append(os.fstat(descriptor))
        named.append({p.name for p in out.iterdir() if p.suffix != ".tmp" and not p.name.startswith(".")})

    export(run([cell()], [trial()]), out)
    before = {p.name for p in out.iterdir()}
    monkeypatch.setattr(os, "fsync", seen)
    export(run([cell()], [trial(), trial(repeat=1)]), out)
    folder = out.stat().st_ino
    tables = before - {"README.md"}
    for path in out.iterdir():
        of_this = [i for i, one in enumerate(flushed) if one.st_ino == path.stat().st_ino]
        assert of_this, path.name
        assert flushed[of_this[-1]].st_size == path.stat().st_size > 0
        assert max(of_this) < min(i for i, one in enumerate(flushed) if one.st_ino == folder), path.name
    assert [there for there, one in zip(named, flushed, strict=True) if one.st_ino == folder] == [
        tables,
        tables,
        before,
    ]


def test_only_its_owner_may_read_an_export_unless_they_let_others(tmp_path: Path) -> None:
    """Its tables and card hold prompts and answers."""
    modes = []
    for mode in (0o644, 0o640):
        paths = export(run([cell()], [trial()]), tmp_path)
        modes.append({stat.S_IMODE(path.stat().st_mode) for path in paths})
        for path in paths:
            path.chmod(mode)
    assert modes == [{0o600}, {0o644}]


def test_tables_that_an_earlier_version_left_open_are_closed(tmp_path: Path) -> None:
    """Their card was their owner's alone, and they had the rights of any new file."""
    for path in export(run([cell()], [trial()]), tmp_path)[1:]:  # behind the card
        path.chmod(0o644)
    again = export(run([cell()], [trial()]), tmp_path)
    assert {stat.S_IMODE(path.stat().st_mode) for path in again} == {0o600}


def test_nothing_of_an_earlier_export_stays_beside_another_card(finished_run: FinishedRun, tmp_path: Path) -> None:
    """A run of endurance and the traces were there before."""
    for name in ("endurance", "endurance_steps", "traces", "my_own"):
        pd.DataFrame({"run_id": ["another"]}).to_parquet(tmp_path / f"{name}.parquet")
    assert joulebench("export", str(finished_run.directory), "--out", str(tmp_path), "--no-traces").code == 0
    assert {p.stem for p in tmp_path.glob("*.parquet")} == {*TABLES, "my_own"}


def test_every_table_that_a_run_may_have_is_known_to_exports() -> None:
    """By name, in the code: few runs have all of them."""
    of_code = list(ast.walk(ast.parse(inspect.getsource(frames_of_run))))
    keys = [key for node in of_code if isinstance(node, ast.Dict) for key in node.keys]
    keys += [node.slice for node in of_code if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    names = {key.value for key in keys if isinstance(key, ast.Constant)}
    assert len(names) == len(keys) > len(TABLES)
    assert {*names, TRACES} == WHAT.keys()


def test_placement_is_a_table_of_an_export_as_others_are(tmp_path: Path) -> None:
    placed = {"ane": ("conv", "add"), "cpu": ("gather",)}
    graph = GraphPlacement(package="p", function="f", role="experts", predictions=3, operations=placed)
    export(run([cell()], [trial(placement=(graph,))]), tmp_path)
    table = pd.read_parquet(tmp_path / "placement.parquet")
    assert [*zip(table["unit"], table["operations"], strict=True)] == [("ane", "conv; add"), ("cpu", "gather")]
    assert "| placement.parquet | 2 | the graphs that ran: " in (tmp_path / "README.md").read_text()
    (tmp_path / "placement.tmp").write_text("half, of an export that was killed")
    assert foreign_files(tmp_path) == []
    export(run([cell()], [trial()]), tmp_path)
    assert not [*tmp_path.glob("placement.*")]


def test_traces_have_every_reading(exported: Path, finished_run: FinishedRun) -> None:
    traces = pd.read_parquet(exported / "traces.parquet")
    with Store.view(finished_run.directory) as store:
        data = store.data()
        n = sum(
            len(trace.times_s) for t in data.trials for own in data.load_parts(t.trial_id).values() for trace in own
        )
    assert len(traces) == n > 0
    assert set(traces["trial"]) <= {t.trial_id for t in data.trials}
    assert not traces[["time_s", "value", "method"]].isna().any().any()


def test_card_and_page_say_what_each_kind_of_reading_is(exported: Path) -> None:
    """The CPU seconds of a modelled meter are of kind `raw`, and lie in "window, raw": they looked like watts."""
    traces = pd.read_parquet(exported / "traces.parquet")
    assert "window, raw" in set(traces["part"])
    page = Path(__file__).parents[1] / "docs" / "tables.md"
    told_by_page = page.read_text(encoding="utf-8").partition("`traces.parquet` of an export")[2].partition("\n\n")[0]
    (told_by_card,) = [
        line
        for line in (exported / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| traces.parquet |")
    ]
    for told in (told_by_page, told_by_card):
        named = set(re.findall(r"\w+", told))
        assert set(get_args(TraceKind)) <= named


def test_the_card_says_what_how_and_on_what(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    head, rest = card.split("---\n", 2)[1:]
    files = re.findall(r"data_files: (\S+)", head)
    assert {*files} == {p.name for p in exported.iterdir()} - {"README.md"}
    for word in ("## How it was measured", "modelled, not measured", "## Units", "## Environment", "```toml", "sha256"):
        assert word in rest


def test_the_card_says_what_the_ends_of_columns_mean(exported: Path) -> None:
    """Whoever gets an export has no page beside it: milliseconds and percent were not in the card."""
    columns = {column for path in exported.glob("*.parquet") for column in pd.read_parquet(path).columns}
    ends = {
        end for end in ("_s", "_ms", "_j", "_w", "_bytes", "_percent", "_share") for c in columns if c.endswith(end)
    }
    units = (exported / "README.md").read_text().partition("## Units")[2].partition("## ")[0]
    assert {end for end in ends if f"`{end}`" not in units} == set()
    assert {"_ms", "_percent", "_share"} <= ends


def test_marked_trials_are_not_called_ok_in_the_card() -> None:
    data = run([cell()], [trial(), trial(repeat=1), trial(repeat=2, marks=("contended",))])
    assert "3 trials, 2 of them ok and 1 marked." in card_text(data, RunFrames(data), [])


def test_nothing_of_a_run_is_markup_in_the_card() -> None:
    hostile = run([cell(device="host](http://evil)")], [failed(error=HOSTILE), trial(repeat=1)])
    hostile.info.plan["name"] = "```\n# mine"
    card = card_text(hostile, RunFrames(hostile), [])
    assert "host](http" not in card
    assert "\n# mine" not in card.split("````toml")[0]
    assert escaped("a|b <script> [x]") == r"a\|b \<script\> \[x\]"
    assert fenced("a ``` b", "toml")[0] == "````toml"


def test_a_damaged_trace_costs_its_own_readings_alone(tmp_path: Path) -> None:
    from results.trace_files import TraceFileError

    def broken(_: str) -> dict[str, object]:
        raise TraceFileError("damaged")

    from dataclasses import replace

    one = replace(run([cell()], [trial()]), load_parts=broken)  # type: ignore[arg-type]
    export(one, tmp_path / "set")
    assert len(pd.read_parquet(tmp_path / "set" / "traces.parquet")) == 0
    assert len(pd.read_parquet(tmp_path / "set" / "trials.parquet")) == 1


def test_where_it_is_not_written_and_what_open_says(finished_run: FinishedRun, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    ended = joulebench("export", str(finished_run.directory), "--out", str(tmp_path))
    assert (ended.code, "holds other files (mine.txt)" in ended.stderr) == (2, True)
    readme = tmp_path / "other" / "README.md"
    readme.parent.mkdir()
    readme.write_text("mine")
    ended = joulebench("export", str(finished_run.directory), "--out", str(readme.parent))
    assert (ended.code, "holds other files (README.md); name a new folder" in ended.stderr) == (2, True)
    assert [(p.name, p.read_text()) for p in readme.parent.iterdir()] == [("README.md", "mine")]
    page = finished_run.directory / "report.html"
    assert joulebench("open", str(finished_run.directory), "--print").stdout.strip() == str(page)
    for name, told in (("/dev/null", "is no page"), (str(tmp_path / "none"), "is not there; no such file")):
        lacking = joulebench("open", name)
        assert (lacking.code, f"{name}: {told}" in lacking.stderr) == (2, True)
    lacking = joulebench("open", str(tmp_path))
    assert (lacking.code, "holds no run (run.sqlite is absent)" in lacking.stderr) == (2, True)
    (tmp_path / "run").mkdir()
    shutil.copy(finished_run.directory / "run.sqlite", tmp_path / "run")
    lacking = joulebench("open", str(tmp_path / "run"))
    assert (lacking.code, "joulebench report" in lacking.stderr) == (2, True)
