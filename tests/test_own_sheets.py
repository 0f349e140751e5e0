"""A user's hardware sheet: found from the plan's folder, kept with the run, noticed when it changes; what is wrong with
one is told at once."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from devices.models.sheet import KEYS, Sheet, SheetError, load_sheet, sheet_path
from engines.pricing.cells import Cell, parameters, price_cell
from engines.pricing.routing_sources import UniformRouting
from engines.pricing.shapes import NAMED_SHAPES
from harness.matrix import CellPlan
from harness.plan import PlanError, load_plan
from tests.command import Finished, joulebench
from tests.plans import FAST, raw_plan, write_plan
from tests.test_links import LINKED_TOML
from tests.toy_sheet import figure

CPU_W, COMM_W = 8.4481, 2.5405
"""Of sheet m2-ultra."""
BUSY = f"busy_w = {{ value = {CPU_W}"
HOSTILE = "<script>alert('sheet')</script>[bold red]"


def own_sheet(path: Path, *changes: tuple[str, str]) -> Path:
    """A copy of the M2 Ultra's under its own name."""
    text = sheet_path("m2-ultra").read_text().replace('name = "m2-ultra"', f"name = {json.dumps(path.stem)}")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def write_own_plan(path: Path, *sheets: str, **changes: object) -> Path:
    raw = raw_plan(
        engine=[{"name": "cpu", "technique": {"name": "coreml-cpu"}}],
        workload=[{"name": "fixed_lengths", "prompt_tokens": 16, "new_tokens": 3, "limit": 1}],
        device=[{"sheet": sheet} for sheet in sheets],
        protocol=FAST,
    )
    return write_plan(path, raw | changes)


def cells_of(plan: Path) -> tuple[CellPlan, ...]:
    return load_plan(plan).cells


def problems_of(plan: Path) -> tuple[str, ...]:
    with pytest.raises(PlanError) as raised:
        load_plan(plan)
    return raised.value.problems


def joules(run: Path) -> float:
    """Of the whole window: all of it on the CPU, at its watts and those of communication."""
    with (run / "energy.csv").open(newline="") as file:
        (row,) = [row for row in csv.DictReader(file) if (row["phase"], row["metric"]) == ("all", "energy")]
    return float(row["mean"])


# --- where it is, and what it is called -------------------------------------------------------------------------------


def test_a_sheet_is_found_from_the_plans_folder_and_names_its_device(tmp_path: Path) -> None:
    own_sheet(tmp_path / "mine.toml")
    (cell,) = cells_of(write_own_plan(tmp_path / "plan.toml", "mine.toml"))
    assert cell.cell.device == "model:mine"
    elsewhere = own_sheet(tmp_path / "far" / "other.toml")
    (absolute,) = cells_of(write_own_plan(tmp_path / "plan.toml", str(elsewhere)))
    assert absolute.cell.device == "model:other"


def test_a_cell_is_the_same_wherever_its_plan_and_sheet_lie(tmp_path: Path) -> None:
    ids = set()
    for folder in (tmp_path / "here", tmp_path / "there"):
        own_sheet(folder / "mine.toml")
        ids.add(cells_of(write_own_plan(folder / "plan.toml", "mine.toml"))[0].cell.cell_id)
    assert len(ids) == 1


def test_sheets_are_swept_like_any_key(tmp_path: Path) -> None:
    own_sheet(tmp_path / "slow.toml")
    own_sheet(tmp_path / "fast.toml")
    plan = write_own_plan(tmp_path / "plan.toml", "slow.toml", sweep={"device.sheet": ["slow.toml", "fast.toml"]})
    assert [c.cell.device for c in cells_of(plan)] == ["model:slow[sheet=slow.toml]", "model:fast[sheet=fast.toml]"]


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    own_sheet(tmp_path / "a" / "mine.toml")
    own_sheet(tmp_path / "b" / "mine.toml")
    plan = write_own_plan(tmp_path / "plan.toml", "a/mine.toml", sweep={"device.sheet": ["a/mine.toml", "b/mine.toml"]})
    assert any("would both be 'model:mine'" in problem for problem in problems_of(plan))


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        ({"sheet": "gone.toml"}, "gone.toml': cannot be read (No such file or directory)"),
        ({"sheet": "."}, "': is no regular file; name a TOML file"),
        ({"sheet": 7}, "device[0].sheet: must be a text, found 7"),
        ({"sheet": "m2-ultra.toml"}, "m2-ultra is a sheet of joulebench; give the file another name"),
        ({"name": "model:his", "sheet": "mine.toml"}, "has the name of its file, model:mine; remove the line"),
        ({"name": "host", "sheet": "mine.toml"}, "device[0].sheet: only for modelled devices; remove the line"),
        ({"name": "adb:R58M", "sheet": "mine.toml"}, "device[0].sheet: has no effect on a phone; remove the line"),
        ({"name": "model:none"}, 'device[0].name: no sheet \'none\'; known: a100, a6000'),
    ],
)  # fmt: skip
def test_what_names_no_sheet_is_refused_with_the_remedy(tmp_path: Path, device: object, problem: str) -> None:
    own_sheet(tmp_path / "mine.toml")
    (tmp_path / "m2-ultra.toml").write_text(sheet_path("m2-ultra").read_text())
    plan = write_own_plan(tmp_path / "plan.toml", device=[device])
    assert any(problem in found for found in problems_of(plan)), problems_of(plan)


# --- what stands in it ------------------------------------------------------------------------------------------------


def test_every_problem_of_a_sheet_is_told_at_once_beside_those_of_the_plan(tmp_path: Path) -> None:
    text = LINKED_TOML.replace('name = "linked"', 'name = "mine"').replace("value = 5.0", "value = -5.0")
    text = text.replace("value = 20.0", "value = nan").replace("value = 300.0", 'value = "many"')
    text = text.replace('target = "ndp"', 'target = "rank"').replace("count = 2", "count = 1_000_000")
    (tmp_path / "mine.toml").write_text(text.replace('source = "hand"', "colour = 3"))
    plan = write_own_plan(tmp_path / "plan.toml", "mine.toml", workload=[{"name": "nothing"}])
    found = joulebench("plan", "check", str(plan))
    assert found.code == 2
    for problem in (
        "units.gpu.busy_w.value: must be greater than or equal to 0, found -5.0",
        "links.pcie.bytes_per_s.value: must be a finite number, found nan",
        "memories.gpu.value: must be a valid number, found 'many'",
        "units.ndp.count: must be less than or equal to 64, found 1000000",
        "colour: unknown key; remove it",
        "source: missing; add it",
        "links: bus: ends at rank, and the sheet has no such unit; name one of its units",
        "workload[0].name: unknown name 'nothing'",
    ):
        assert problem in found.stderr
    lines = [line for line in found.problems if "device[0].sheet" in line]
    assert len(lines) == 7, "where the keys are is no problem of its own"
    assert [line.endswith(f"; {KEYS}") for line in lines] == [*[False] * 6, True]


def test_every_key_of_a_sheet_stands_on_the_page() -> None:
    page = Path(__file__).parents[1].joinpath("docs", "sheets.md").read_text()
    told = " ".join(re.findall(r"```.*?```|`[^`]+`", page, re.DOTALL))
    keys: dict[str, set[str]] = {}

    def read(annotation: object) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if annotation.__name__ in keys:
                return
            keys[annotation.__name__] = {*annotation.model_fields}
            for field in annotation.model_fields.values():
                read(field.annotation)
        for part in get_args(annotation):
            read(part)

    read(Sheet)
    assert "s_per_naive_launch" in keys["UnitSheet"]
    lacking = {
        table: missing
        for table, own in keys.items()
        if (missing := {key for key in own if re.search(rf"\b{key}\b", told) is None})
    }
    assert not lacking


def test_the_sheet_that_the_page_shows_loads(tmp_path: Path) -> None:
    page = Path(__file__).parents[1].joinpath("docs", "sheets.md").read_text()
    (shown,) = [block.partition("```")[0] for block in page.split("```toml")[1:] if "[units" in block]
    (tmp_path / "mine.toml").write_text(shown)
    gpu = load_sheet(tmp_path / "mine.toml").units["gpu"]
    assert gpu.roofline is not None
    assert gpu.roofline.seconds(1, 1e9, 0.0, 64e9) == pytest.approx(5e-6 + 64e9 / (8e13 * 0.4))  # 64 is half way


def test_the_sheet_that_the_page_shows_gives_joules(tmp_path: Path) -> None:
    """The CPU computes nothing, and waits at 25 W for as long as the GPU or the link works; all three have joules."""
    page = Path(__file__).parents[1].joinpath("docs", "sheets.md").read_text()
    (shown,) = [block.partition("```")[0] for block in page.split("```toml")[1:] if "[units" in block]
    (tmp_path / "mine.toml").write_text(shown)
    cell = Cell(
        load_sheet(tmp_path / "mine.toml"), NAMED_SHAPES["olmoe-1b-7b"], parameters("gpu"), UniformRouting(), 64, 4
    )
    priced = price_cell(cell)
    assert priced.no_joules is None
    prefill, decode = priced.phases
    for phase in (prefill, decode):
        gpu = phase.use.of("gpu")
        assert phase.joules["gpu"] == pytest.approx(300 * gpu.busy_s + 60 * gpu.waiting_s + 20 * gpu.idle_s)
        awake_s = phase.use.window_s - phase.use.idle_s
        assert phase.joules["cpu"] == pytest.approx(25 * awake_s + 10 * phase.use.idle_s)
        assert phase.total_j == pytest.approx(sum(one or 0.0 for one in phase.joules.values()))
        assert awake_s > 0


def test_what_is_wrong_between_tables_is_told_beside_what_is_wrong_within_them(tmp_path: Path) -> None:
    """A depth that is none and a share above 1 in a unit, a link and a memory of units that are not there, a link of a
    unit with itself, and a unit that draws more while it rests."""
    own = f"""
name = "mine"
description = "d"
source = "s"
[units.cpu]
busy_w = {figure(10.0)}
idle_w = {figure(20.0)}
waiting_w = {figure(30.0)}
queue_depth = {figure(0.5)}
[memories]
npu = {figure(1e9)}
[links.nowhere]
source = "cpu"
target = "gpu"
kind = "shared"
bytes_per_s = {figure(-1.0)}
[links.loop]
source = "cpu"
target = "cpu"
kind = "shared"
bytes_per_s = {figure(1.0)}
"""
    (tmp_path / "mine.toml").write_text(own)
    with pytest.raises(SheetError) as raised:
        load_sheet(tmp_path / "mine.toml")
    found = "\n".join(raised.value.problems)
    for problem in (
        "units.cpu.queue_depth: must be a whole number from 1 to 1024",
        "links.nowhere.bytes_per_s.value: must be greater than or equal to 0, found -1.0",
        "units.cpu: idle_w 20 is above busy_w 10",
        "units.cpu: waiting_w 30 is above busy_w 10",
        "memories: npu: the sheet has no such unit",
        "links: nowhere: ends at gpu, and the sheet has no such unit",
        "links: loop: joins cpu with itself",
    ):
        assert problem in found
    assert len(raised.value.problems) == 7
    told = joulebench("sheets", str(tmp_path / "mine.toml")).stderr.splitlines()
    assert [line.startswith(f"error: sheet {tmp_path / 'mine.toml'}: ") for line in told] == [True] * 7
    assert str(raised.value).endswith(f"; {KEYS}")


def test_names_numbers_of_units_and_points_of_a_curve_are_told_beside_bad_figures(tmp_path: Path) -> None:
    """Another name than the file's, no CPU, units without a count, two points at one shape, and cores that are not
    there, beside a power below 0 and a share above 1."""
    point = 'at = 5, kind = "assumed", origin = "x"'
    own = f"""
name = "other"
description = "d"
source = "s"
[units.gpu]
busy_w = {figure(-1.0)}
[units.gpu.roofline]
bytes_per_s = {figure(1.0)}
flops_per_s = {figure(1.0)}
[units.gpu.roofline.flops_share]
by = "flops"
points = [{{ {point}, share = 2.0 }}, {{ {point}, share = 0.5 }}]
[units.ndp]
[units.core]
count = 3
[clusters.big]
n_cores = 2
core = "A77"
kind = "prime"
[states.mine]
engine = "e"
model = "m"
cores = {{ big = 7, "b\\u001bad" = 1 }}
"""
    (tmp_path / "mine.toml").write_text(own)
    with pytest.raises(SheetError) as raised:
        load_sheet(tmp_path / "mine.toml")
    found = raised.value.problems
    for problem in (
        "units.gpu.busy_w.value: must be greater than or equal to 0, found -1.0",
        "units.gpu.roofline.flops_share.points.0.share: must be less than or equal to 1, found 2.0",
        "units.gpu.roofline.flops_share.points: at must rise from each to the next, found [5, 5]",
        "units: ndp: such units are numbered; say how many with count, or name it ndp:0",
        "units: units are ['core', 'gpu', 'ndp']; a sheet needs `cpu`, where everything can fall back to",
        "clusters: has 2 cores, and units 3; give [units.core] the count of all clusters",
        "states: mine: big has 2 cores, not 7",
        "states: mine: the sheet has no cluster b\\x1bad; name one of its clusters",
        "calls itself 'other'; name the file after it",
    ):
        assert problem in found
    assert len(found) == 10, "the last is what a name may have"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("target = \"ndp\"", "target = \"rank\""), "bus: ends at rank, and the sheet has no such unit"),
        (("[memories]\ngpu", "[memories]\nnpu"), "npu: the sheet has no such unit"),
        (("value = 10.0", "value = 1e300"), r"must be less than or equal to 10+, found 1e\+300"),
        (("value = 10.0", "value = 1e-300"), "must be at least 1e-09"),
        (("value = 10.0", "value = 0.0"), "must be above 0"),
        (("value = 10.0", "value = " + "9" * 5000), "holds a number of thousands of digits"),
        (("[memories]", "[memories]\nx = " + "[" * 100_000), "not TOML|lists too deep"),
        (("\"assumed\"", "\"guessed\""), "kind: must be 'stated', 'fitted' or 'assumed', found 'guessed'"),
        (("[memories]", "[memories]\ncpu = 7"), r"memories.cpu: must be a table, found 7; write \{ ... \}"),
        (('source = "', 'source = "" # '), "source: is empty; write it"),
        (("[units.ndp]", "[units.toaster]"), "units.toaster: no unit is called so; units are cpu, gpu, npu"),
        (("target = \"ndp\"", "target = \"dram\""), r"^sheet \S+: links.bus.target.0: no unit is called so; a link"
            r" ends at [^;]*: file, found 'dram'; `joulebench sheets a100 --out NEW.toml` writes one with all keys$"),
        (("target = \"ndp\"", "target = []"), "links.bus.target: must have at least 1, found 0"),
        (("[links.bus]", "[links.BUS]"), "links.BUS: a name has small letters"),
    ],
)  # fmt: skip
def test_hostile_sheets_are_refused(tmp_path: Path, change: tuple[str, str], problem: str) -> None:
    path = tmp_path / "linked.toml"
    path.write_text(LINKED_TOML.replace(*change))
    with pytest.raises(SheetError, match=problem):
        load_sheet(path)


def test_a_sheet_of_tens_of_thousands_of_units_is_refused_soon(tmp_path: Path) -> None:
    units = "".join(f'[units."ndp:{i}"]\n' for i in range(9000)) + "".join(f'[units."rank:{i}"]\n' for i in range(9000))
    path = tmp_path / "linked.toml"
    path.write_text(LINKED_TOML + units)
    with pytest.raises(SheetError, match="units: Dictionary should have at most 256 items"):
        load_sheet(path)


def test_a_megabyte_is_no_sheet(tmp_path: Path) -> None:
    path = tmp_path / "linked.toml"
    path.write_text(LINKED_TOML + "#" * (1 << 20))
    with pytest.raises(SheetError, match="has more than 1,048,576 bytes"):
        load_sheet(path)


# --- a run of one -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_keeps_its_sheet_and_prices_again_by_the_one_that_is_there(tmp_path: Path) -> None:
    """The CPU's watts are doubled, then halved in another file; then the sheet is gone, and the run's copy prices."""
    hostile = [(f'{key} = "', f'{key} = "{HOSTILE}') for key in ("description", "source")]
    sheet = own_sheet(tmp_path / "mine.toml", *hostile)
    own_sheet(tmp_path / "other.toml", (BUSY, f"busy_w = {{ value = {CPU_W / 2}"))
    plan, run = write_own_plan(tmp_path / "plan.toml", "mine.toml"), tmp_path / "run"

    def told(*arguments: str) -> Finished:
        found = joulebench(*arguments, cwd=tmp_path)
        assert found.code == 0, found.stderr
        return found

    told("run", str(plan), "--out", "run")
    first_j = joules(run)
    assert first_j > 0
    page = (run / "report.html").read_text()
    assert HOSTILE not in page
    assert "&lt;script&gt;alert(" in page

    own_sheet(sheet, (BUSY, f"busy_w = {{ value = {2 * CPU_W}"))
    refused = joulebench("run", str(plan), "--out", "run", "--resume", cwd=tmp_path)
    assert refused.code == 2
    assert "begun with other inputs (hardware sheet mine sha256" in refused.stderr
    told("report", "run", "--rederive")
    assert joules(run) == pytest.approx(first_j * (2 * CPU_W + COMM_W) / (CPU_W + COMM_W))
    assert "priced these times and joules by the sheet that is here now" in (run / "report.html").read_text()
    told("report", "run", "--rederive", "--sheet", "model:mine=other.toml")
    assert joules(run) == pytest.approx(first_j * (CPU_W / 2 + COMM_W) / (CPU_W + COMM_W))

    sheet.unlink()
    assert "nothing changed" in told("report", "run", "--rederive").stdout
    assert joules(run) == pytest.approx(first_j)
    for wrong, why in (
        (("--sheet", "model:mine=other.toml"), "works only together with --rederive"),
        (("--rederive", "--sheet", "model:his=other.toml"), "names no modelled device of the run; it has model:mine"),
        (("--rederive", "--sheet", "model:mine=gone.toml"), "gone.toml: cannot be read"),
    ):
        refused = joulebench("report", "run", *wrong, cwd=tmp_path)
        assert refused.code == 2
        assert why in refused.stderr
