"""A folder of runs as a history: listed, indexed again where the index is lost, and a page over time."""

from __future__ import annotations

import json
import os
import sqlite3
from datetime import UTC, datetime, timedelta
from multiprocessing import parent_process
from pathlib import Path

import pytest
from rich.cells import cell_len

from devices import cpu_seconds
from harness import history_command
from results.history import index
from results.history.index import INDEX, open_history
from results.records import Score
from results.store import Store
from results.tables import tidy
from tests.command import Finished, joulebench
from tests.histories import START, made_trial, write_history, write_run
from tests.run_builders import cell, failed


def listed(directory: Path, *more: str) -> Finished:
    return joulebench("history", str(directory), *more)


def step(day: int, arm: str) -> float:
    return 2.0 * (1.03 if arm == "npumoe" and day >= 8 else 1.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    write_history(directory, 16, step, arms=("dropless", "npumoe"))
    return directory


def test_a_list_has_a_line_for_each_run_with_its_trials_and_figures(runs: Path) -> None:
    found = listed(runs)
    assert found.code == 0
    head, *lines = found.stdout.splitlines()
    assert head.split()[:3] == ["when", "(UTC)", "run"]
    assert len(lines) == 16
    assert lines[0].split()[:5] == ["2026-01-01", "03:00", "run000", "nightly", "host"]
    assert "dropless, npumoe" in lines[0]
    assert "counter" in lines[0]  # the method of its joules
    assert len(listed(runs, "--last", "3").stdout.splitlines()) == 4


def test_columns_stand_below_each_other_where_letters_are_wide(tmp_path: Path) -> None:
    """An emoji takes two columns of a terminal."""
    for name in ("plain", "🎉🎉", "専門家"):
        write_run(tmp_path / name, [cell("c1")], [made_trial("c1", 0, 1.0)], 0)
    head, *lines = listed(tmp_path).stdout.splitlines()
    places = {
        cell_len(line[: line.index(word)]) for line, word in ((head, "device"), *((one, "host") for one in lines))
    }
    assert (len(lines), len(places)) == (3, 1)


def test_a_run_that_is_dated_ahead_is_told(tmp_path: Path) -> None:
    """`regress` would judge it for years, and no run that is made meanwhile."""
    ahead = (datetime.now(UTC) - START).days + 400
    for name, day in (("past", 0), ("ahead", ahead)):
        write_run(tmp_path / name, [cell("c1")], [made_trial("c1", 0, 1.0)], day)
    until = START + timedelta(days=ahead)
    told = f"ahead: its date, {until:%Y-%m-%d %H:%M} UTC, lies ahead of this machine's clock; until then it counts as"
    for found in (listed(tmp_path), joulebench("regress", "--baseline", "past", str(tmp_path))):
        assert found.stderr.splitlines()[0] == f"{told} newer than every run that is made here"
    assert listed(tmp_path, "--last", "1").stdout.splitlines()[-1].split()[2] == "ahead"


def test_a_run_whose_clock_was_not_set_is_told(tmp_path: Path) -> None:
    """It stood as the oldest, and `regress` never judged it."""
    for name, day in (("now", 0), ("unset", (datetime(1970, 1, 1, 3, tzinfo=UTC) - START).days)):
        write_run(tmp_path / name, [cell("c1")], [made_trial("c1", 0, 1.0)], day)
    told = "unset: its date, 1970-01-01 03:00 UTC, is older than joulebench; the clock was not set, and it counts as"
    assert listed(tmp_path).stderr.splitlines() == [f"{told} older than every other run"]


def test_trials_that_count_beside_other_processes_are_told_in_list_and_verdicts(tmp_path: Path) -> None:
    """A plan may let them count: then a step may be the neighbour's."""
    for day in range(8):
        share = 0.8 if day == 6 else 0.1
        trials = [made_trial("c1", i, 1.0 + 0.001 * i, foreign_cpu_share=share) for i in range(3)]
        write_run(tmp_path / f"run{day}", [cell("c1")], trials, day)
    told = (
        "run6: 3 of 3 trials that count shared the CPU: other processes took up to 80 % of it; their times and joules"
        " are disturbed."
    )
    baseline = [str(tmp_path / f"run{day}") for day in range(4)]
    assert joulebench("baseline", "set", "good", *baseline, "--history", str(tmp_path)).code == 0
    for found in (listed(tmp_path), joulebench("regress", "--baseline", "good", str(tmp_path))):
        assert [line for line in found.stdout.splitlines() if "shared the CPU" in line] == [told]


def test_json_tells_what_the_generator_made(runs: Path) -> None:
    (last,) = json.loads(listed(runs, "--json", "--last", "1").stdout)
    assert (last["n_ok"], last["n_failed"], last["n_cells"]) == (6, 0, 2)
    ranges = {metric: (low, high) for _, metric, _, _, low, high in last["ranges"]}
    low, high = ranges["e2e"]
    assert low == pytest.approx(2.0, rel=0.02)
    assert high == pytest.approx(2.06, rel=0.02)


def test_times_and_joules_of_several_devices_stand_apart(tmp_path: Path) -> None:
    """A range over both would be of neither."""
    phone = "adb:R58M"
    cells = [cell("c1"), cell("c2", device=phone)]
    trials = [made_trial("c1", 0, 0.25, 0.5, (1.0, 0.0)), made_trial("c2", 0, 40.0, 80.0, (1.0, 1.0))]
    write_run(tmp_path / "both", cells, trials)
    write_run(tmp_path / "one", cells[:1], trials[:1], day=1)
    both, one = listed(tmp_path).stdout.splitlines()[1:]
    own = "time of a request 250 ms; energy of a request 500 mJ/response (counter)"
    theirs = "time of a request 40.0 s; energy of a request 80.0 J/response (counter)"
    assert both.split("host, adb:R58M")[1].endswith(f"host: {own}; {phone}: {theirs}; acc 50.0 to 100 %")
    assert one.endswith(f" {own}; acc 50.0 %")
    many = [cell(f"c{i}", device=f"phone{i}") for i in range(5)]
    write_run(tmp_path / "many", many, [made_trial(f"c{i}", 0, 1.0) for i in range(5)], day=2)
    last = listed(tmp_path).stdout.splitlines()[-1]
    assert last.endswith("phone2: time of a request 1.00 s; and of 2 more devices")


def test_an_index_that_is_damaged_or_gone_is_made_again(runs: Path) -> None:
    before = listed(runs).stdout
    (runs / INDEX).write_bytes(b"no database" * 1000)
    assert listed(runs).stdout == before
    (runs / INDEX).unlink()
    assert listed(runs).stdout == before
    with sqlite3.connect(runs / INDEX) as db:
        db.execute("UPDATE run SET record = '{}'")
    db.close()
    assert listed(runs).stdout == before
    with sqlite3.connect(runs / INDEX) as db:
        db.execute("UPDATE meta SET value = '999'")
    db.close()
    assert listed(runs).stdout == before


def test_runs_that_come_change_and_go_are_seen(tmp_path: Path) -> None:
    folders = write_history(tmp_path, 3, step)
    with open_history(tmp_path) as found:
        assert [run.n_ok for run in found.runs] == [3, 3, 3]
    with Store.open(folders[1]) as store:
        store.add_trial(made_trial("cell0000", 7, 2.0), {})
    write_run(tmp_path / "deeper" / "one", [cell("cell0000")], [made_trial("cell0000", 0, 1.0)], day=9)
    for path in sorted(folders[0].rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with open_history(tmp_path) as found:
        assert [(run.folder, run.n_ok) for run in found.runs] == [("run001", 4), ("run002", 3), ("deeper/one", 1)]


@pytest.mark.parametrize("energy_j", [float("nan"), float("inf")])
def test_what_is_no_number_in_one_run_stops_no_history(tmp_path: Path, energy_j: float) -> None:
    """As in a run that somebody sent: `history` and `regress` of all runs ended with "nobody foresaw this"."""
    folders = write_history(tmp_path, 8, lambda day, arm: 1.0, n_repeats=3)
    trials = [made_trial("cell0000", i, 1.0, energy_j=energy_j if i == 1 else 4.0) for i in range(3)]
    write_run(tmp_path / "run008", [cell("cell0000", engine="dropless", label="dropless")], trials, day=8)
    with open_history(tmp_path) as found:
        (own,) = found.cells("run008")
    values = {figure.metric: set(figure.values) for figure in own.figures}
    assert (values["energy_per_response"], values["e2e"]) == ({0, 2}, {0, 1, 2})
    assert listed(tmp_path).code == 0
    assert joulebench("history", str(tmp_path), "--html", str(tmp_path / "h.html")).code == 0
    assert joulebench("regress", "--baseline", folders[0].name, str(tmp_path)).code == 0
    assert joulebench("compare", str(folders[0]), str(tmp_path / "run008")).code == 0


def test_a_damaged_run_is_told_and_skipped_until_it_is_whole_again(tmp_path: Path) -> None:
    folders = write_history(tmp_path, 3, step)
    database = folders[1] / "run.sqlite"
    whole = database.read_bytes()
    database.write_bytes(whole[:4096] + b"\xff" * 4096 + whole[8192:])
    for _ in range(2):
        found = listed(tmp_path)
        assert found.code == 0
        assert "skipped: " in found.stderr
        assert "run001/run.sqlite cannot be used" in found.stderr
        assert [line.split()[2] for line in found.stdout.splitlines()[1:]] == ["run000", "run002"]
    database.write_bytes(whole)
    assert "skipped" not in listed(tmp_path).stderr
    assert len(listed(tmp_path).stdout.splitlines()) == 4


def test_many_runs_are_read_by_other_processes_and_none_is_lost_with_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [folder.name for folder in write_history(tmp_path, 6, step)]
    (tmp_path / "run004" / "run.sqlite").write_bytes(b"no database" * 1000)
    in_turn = list(index.read_in_turn(tmp_path, folders))
    assert [isinstance(one, str) for one in in_turn] == [False, False, False, False, True, False]
    monkeypatch.setattr(history_command, "FEW_RUNS", 2)
    monkeypatch.setattr(history_command, "RUNS_AT_ONCE", 1)
    monkeypatch.setattr(cpu_seconds, "usable_cpus", lambda: frozenset({0, 1}))
    assert list(history_command._read_runs(tmp_path, folders)) == in_turn
    monkeypatch.setattr(index, "read_run", dying_reader)
    assert list(history_command._read_runs(tmp_path, folders)) == [*folders]


def dying_reader(directory: Path, folder: str) -> str:
    """Another process ends at the third run."""
    if parent_process() is not None and folder == "run002":
        os._exit(1)
    return folder


def test_a_folder_that_cannot_be_written_is_listed_all_the_same(tmp_path: Path) -> None:
    write_history(tmp_path, 2, step)
    (tmp_path / INDEX).mkdir()  # nothing can be put there, whoever asks
    assert len(listed(tmp_path).stdout.splitlines()) == 3


def test_a_figure_in_the_index_is_the_mean_of_the_tables(runs: Path) -> None:
    from results.tables import tidy

    with open_history(runs) as found:
        points = {point.cell_id: point for point in found.cells("run003")}
    with Store.view(runs / "run003") as store:
        frame = tidy(store.data())
    compared = 0
    for row in frame[frame["mean"].notna()].to_dict("records"):
        own = [f for f in points[row["cell"]].figures if f.metric == row["metric"] and f.phase in (row["phase"], None)]
        for figure in own:
            assert figure.mean == pytest.approx(row["mean"])
            assert (figure.n, figure.unit, figure.method) == (row["n"], row["unit"], row["method"])
            compared += 1
    assert compared >= 14


def test_trials_that_failed_or_are_marked_are_counted_and_in_no_mean(tmp_path: Path) -> None:
    trials = [
        made_trial("c1", 0, 1.0),
        made_trial("c1", 1, 50.0, marks=("throttled",)),
        failed("c1", 2),
    ]
    write_run(tmp_path / "one", [cell("c1")], trials)
    with open_history(tmp_path) as found:
        (run,) = found.runs
        (point,) = found.cells("one")
    assert (run.n_ok, run.n_failed, run.n_left_out) == (2, 1, 1)
    assert {f.mean for f in point.figures if f.metric == "e2e"} == {1.0}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("{}/nowhere",), "nowhere is not there; give the folder that holds the folders of runs"),
        (("{}/run000",), "run000 is one run, and no folder of runs; give the folder above it"),
        (("{}/empty",), "holds no run yet; `joulebench run PLAN --out"),
        (("{}/two words",), "/two words/NAME'` makes one"),
        (("{}", "--plan", "other"), "--plan other: no run of"),
        (("{}", "--device", "phone"), "it has host"),
        (("{}", "--html", "{}/run000/run.sqlite/page.html"), "cannot be written"),
        (("{}", "--html", "{}/run000/run.sqlite"), "run.sqlite: is there, and its name is of no .html file"),
    ],
)
def test_bad_input_is_one_line(runs: Path, arguments: tuple[str, ...], said: str) -> None:
    for name in ("empty", "two words"):
        (runs / name).mkdir(exist_ok=True)
    found = joulebench("history", *(argument.format(runs) for argument in arguments))
    assert found.code in (2, 7)
    (line,) = found.problems
    assert said in line


def test_names_of_runs_reach_the_page_as_text(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    cells = [cell("c1", engine=hostile)]
    for day in range(2):
        write_run(
            tmp_path / f"<b>{day}", cells, [made_trial("c1", 0, 1.0), made_trial("c1", 1, 1.1)], day, name=hostile
        )
    found = listed(tmp_path, "--html", str(tmp_path / "page.html"))
    assert found.code == 0, found.stderr
    text = (tmp_path / "page.html").read_text("utf-8")
    assert hostile not in text
    assert "<b>0" not in text


def test_the_page_draws_each_figure_with_its_changes_and_its_numbers(runs: Path, tmp_path: Path) -> None:
    found = listed(runs, "--html", str(tmp_path / "page.html"))
    assert found.code == 0
    assert "8 charts over 16 runs" in found.stdout
    text = (tmp_path / "page.html").read_text("utf-8")
    assert text.count('class="chart"') == text.count("<summary>The numbers") == 8
    assert "<summary>Time of a request · gsm8k · host</summary>" in text, "measured times say nothing more"
    assert "<summary>Energy of a request · gsm8k · host · counter</summary>" in text
    # Each of 16 runs, 2 arms and 8 figures has a row.
    assert text.count("<td>run003</td>") == 16 + 1
    row = text[text.index("Changes of level") :]
    assert "<td>run008</td>" in row[: row.index("</table>")]


def test_runs_are_printed_also_where_the_page_cannot_be_written(runs: Path) -> None:
    found = joulebench("history", str(runs), "--json", "--html", str(runs / "run000" / "run.sqlite" / "page.html"))
    assert found.code == 7
    assert "cannot be written" in found.problems[-1]
    assert json.loads(found.stdout) == json.loads(joulebench("history", str(runs), "--json").stdout)


def test_names_of_arms_stand_above_their_chart_and_not_on_each_other(tmp_path: Path) -> None:
    arms = [f"{'a-long-name-of-an-arm-' * 4}{i}" for i in range(2)]
    cells = [cell(f"c{i}", engine=arm, label=arm) for i, arm in enumerate(arms)]
    write_run(tmp_path / "run", cells, [made_trial(f"c{i}", 0, 1.0) for i in range(2)])
    found = listed(tmp_path, "--html", str(tmp_path / "page.html"), "--json")
    assert found.code == 0
    (one,) = json.loads(found.stdout)  # beside the page: it was left out
    assert one["n_ok"] == 2
    text = (tmp_path / "page.html").read_text("utf-8")
    legend = text[text.index('<ul class="legend">') : text.index("</ul>")]
    assert [arm for arm in arms if f"</svg>{arm}</li>" in legend] == arms
    charts = json.loads(text.split('id="charts">')[1].split("</script>")[0])["specs"].values()
    marks = [layer["mark"]["type"] for chart in charts for layer in chart["layer"]]
    assert "text" not in marks
    assert ">1 point<" not in text
    assert "2 points" in text


@pytest.mark.parametrize(
    ("days", "said", "form"),
    [((0,), "1 run, 2026-", "%H:%M:%S"), ((0, 3), "2 runs, 2026-", "%b %d"), ((0, 400), "2 runs, 2026-", "%Y-%m-%d")],
)
def test_the_axis_of_time_is_that_of_the_tables(tmp_path: Path, days: tuple[int, ...], said: str, form: str) -> None:
    for day in days:
        write_run(tmp_path / f"run{day}", [cell("c1")], [made_trial("c1", 0, 1.0)], day)
    assert listed(tmp_path, "--html", str(tmp_path / "page.html")).code == 0
    text = (tmp_path / "page.html").read_text("utf-8")
    assert said in text
    assert "(UTC)" in text
    chart = next(iter(json.loads(text.split('id="charts">')[1].split("</script>")[0])["specs"].values()))
    across = chart["layer"][0]["encoding"]["x"]
    assert (across["scale"]["type"], across["axis"]["format"]) == ("utc", form)


def test_a_bar_of_two_trials_that_scatter_reaches_below_no_0_and_hides_no_line(tmp_path: Path) -> None:
    """1 s and 20 s: Student's interval is -110 to 131 s, and a line at 1 s beside it lay on the axis."""
    one = cell("c1", engine="a", label="a")
    for day, seconds in enumerate(((1.0, 1.01), (1.0, 20.0), (1.0, 1.01))):
        write_run(tmp_path / f"run{day}", [one], [made_trial("c1", i, s) for i, s in enumerate(seconds)], day)
    with open_history(tmp_path) as found:
        (e2e,) = [f for f in found.cells("run1")[0].figures if f.metric == "e2e"]
    assert e2e.interval is not None
    assert list(e2e.interval) == pytest.approx([0.0, 10.5 + 12.7062 * 9.5], rel=1e-4)
    assert listed(tmp_path, "--html", str(tmp_path / "page.html")).code == 0
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "Bars that end at three times the point farthest from 0 are longer" in text
    assert '<td class="number">[0, 130]</td>' in text
    drawn = drawn_points(text, "time of a request")
    assert [point["value"] for point in drawn] == pytest.approx([1.005, 10.5, 1.005])
    assert [drawn[1]["low"], drawn[1]["high"]] == pytest.approx([0.0, 3 * 10.5])


@pytest.mark.parametrize(
    ("ends", "drawn_ends", "is_cut"),
    [
        # Student's interval of two values: 6.3531 times their distance to either side of their mean.
        ((-0.042, 0.002), (-0.06, 0.06), True),
        ((-0.021, -0.019), (-0.02 - 0.012706, -0.02 + 0.012706), False),
    ],
)
def test_a_bar_of_a_score_below_0_holds_its_own_point_and_hides_no_line(
    tmp_path: Path, ends: tuple[float, float], drawn_ends: tuple[float, float], is_cut: bool
) -> None:
    trials = [made_trial("c1", i, 1.0, scores=[Score(metric="mcc", value=end, n=9)]) for i, end in enumerate(ends)]
    write_run(tmp_path / "run", [cell("c1")], trials)
    assert listed(tmp_path, "--html", str(tmp_path / "page.html")).code == 0
    text = (tmp_path / "page.html").read_text("utf-8")
    (point,) = drawn_points(text, "mcc")
    # A correlation is no share, so not in %.
    assert point["value"] == pytest.approx(-0.02)
    assert (point["low"], point["high"]) == pytest.approx(drawn_ends, rel=1e-4)
    assert ("Bars that end at" in text) == is_cut


def drawn_points(page: str, figure: str) -> list[dict[str, float]]:
    """What the chart of this figure draws, in order of time."""
    charts = json.loads(page.split('id="charts">')[1].split("</script>")[0])["specs"].values()
    (chart,) = (one for one in charts if one["description"].startswith(f"{figure} over time"))
    data = chart["data"] if "data" in chart else chart["layer"][0]["data"]
    points: list[dict[str, float]] = chart["datasets"][data["name"]]
    return points


def test_an_arm_that_was_set_otherwise_is_told_in_the_list_and_on_the_page(tmp_path: Path) -> None:
    narrowed = {"experts": "int8", "arithmetic": "int8"}
    write_history(
        tmp_path, 16, step, arms=("dropless", "npumoe"),
        settings=lambda day, arm: narrowed if arm == "npumoe" and day >= 8 else {"experts": "int8"},
    )  # fmt: skip
    told = "run008: npumoe is set otherwise than in run007: arithmetic not set → int8"
    assert listed(tmp_path).stdout.splitlines()[17:] == [told]
    # The run before is not in the list.
    assert told in listed(tmp_path, "--last", "8").stdout
    assert "otherwise" not in listed(tmp_path, "--last", "7").stdout
    last = json.loads(listed(tmp_path, "--json", "--last", "1").stdout)[0]
    assert [(one["arm"], one["settings"]["engine"]) for one in last["settings"]] == [
        ("dropless", {"experts": "int8"}), ("npumoe", narrowed),
    ]  # fmt: skip
    assert listed(tmp_path, "--html", str(tmp_path / "page.html")).code == 0
    text = (tmp_path / "page.html").read_text("utf-8")
    change = text[text.index("Changes of level") :]
    assert "<td>set otherwise: arithmetic not set → int8</td>" in change[: change.index("</table>")]
    assert "<td>npumoe: arithmetic not set → int8</td>" in text[text.index("All runs of this page") :]


def test_an_index_of_before_settings_is_made_again(tmp_path: Path) -> None:
    write_history(tmp_path, 2, step, settings=lambda day, arm: {"experts": "int8"})
    open_history(tmp_path).close()
    with sqlite3.connect(tmp_path / INDEX) as db:
        for table in ("run", "cell"):
            db.execute(f"UPDATE {table} SET record = json_remove(record, '$.settings')")
        db.execute("UPDATE meta SET value = '1'")
    db.close()
    with open_history(tmp_path) as found:
        assert [run.settings[0].settings.engine for run in found.runs] == [{"experts": "int8"}] * 2


def test_a_bar_of_many_trials_is_the_interval_of_the_runs_own_table(tmp_path: Path) -> None:
    """30 times of which one is long: Student's interval reaches as far down as up, and BCa's does not."""
    seconds = [1.0 + i / 1000 for i in range(29)] + [3.0]
    folder = write_run(tmp_path / "run", [cell("c1")], [made_trial("c1", i, s) for i, s in enumerate(seconds)])
    with open_history(tmp_path) as found:
        (e2e,) = [f for f in found.cells("run")[0].figures if f.metric == "e2e"]
    with Store.view(folder) as store:
        table = tidy(store.data())
    (own,) = table[(table["metric"] == "e2e") & (table["phase"] == "all")].to_dict("records")
    assert e2e.interval == pytest.approx((own["ci_low"], own["ci_high"]))
    low, high = e2e.interval or (0.0, 0.0)
    assert high - e2e.mean > 1.5 * (e2e.mean - low)
