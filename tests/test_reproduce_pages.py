"""`joulebench reproduce` as a reader meets it: terminal, CSV, pages; and what a hostile text becomes."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path

import pytest

from harness.reproduce.charts import ratio_chart, table_chart
from harness.reproduce.findings import Finding, judged
from harness.reproduce.ledger import ledger
from harness.reproduce.outcome import Reproduced, reproduce
from harness.reproduce.pages import SUMMARY, page_name, write_pages
from harness.reproduce.printed import Span
from harness.reproduce.redrawn import Entry, SourceTable
from harness.reproduce.sources import SOURCES
from harness.reproduce_command import default_folder
from tests.benchmarks import reproduce_page
from tests.command import joulebench

HOSTILE = '<script>alert("1")</script>'


def test_a_source_gives_a_summary_a_csv_and_pages(tmp_path: Path) -> None:
    done = joulebench("reproduce", "004", cwd=tmp_path)
    assert done.code == 0, done.stderr
    out = tmp_path / "reproduced-004"  # never over the table of all sources
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert "yes  all exact rows are exact: 23 of 23" in done.stdout
    with (out / "reproduced.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 41
    assert all(row["verdict"] for row in rows)
    by_claim = {row["claim"]: row for row in rows}
    assert by_claim["004-011"]["theirs"] == by_claim["004-011"]["ours"] == "87.5"
    assert by_claim["004-001"]["theirs"] == "~0.07"
    assert by_claim["004-001"]["verdict"] == "contradicted by its source"
    pages = sorted(path.name for path in out.glob("*.html"))
    assert pages == ["004-neuron.html", "index.html"]
    page = (out / "004-neuron.html").read_text(encoding="utf-8")
    # 1000 tokens of one hot expert, two each: the guide prints no pairs, and a dash before ours would be a minus.
    assert re.search(r'>one hot expert</th><td class="number"><span class="ours">2000</span>', page)
    assert '<span class="theirs">~50</span> <span class="ours">50</span>' in page
    assert not re.search(r'class="theirs">–</span> <span class="ours">\d', page)


def test_a_folder_is_named_by_the_sources_that_were_asked() -> None:
    assert default_folder([]) == Path("reproduced")
    assert default_folder(["003", "001", "003"]) == Path("reproduced-001-003")


def test_single_claims_are_told_in_the_terminal_and_nothing_is_written(tmp_path: Path) -> None:
    done = joulebench("reproduce", "004-006..008", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert re.findall(r"004-\d{3}", done.stdout) == ["004-006", "004-007", "004-008"]
    assert list(tmp_path.iterdir()) == []
    told = json.loads(joulebench("reproduce", "004-006", "--json", cwd=tmp_path).stdout)
    assert [(row["claim"], row["ours"], row["verdict"]) for row in told] == [("004-006", 2000, "as printed")]


def test_what_constants_did_to_an_earlier_table_does_not_stay_beside_another(tmp_path: Path) -> None:
    for name in ("reproduced.csv", "sensitivity.csv", "mine.csv"):
        (tmp_path / name).write_text("earlier")
    done = joulebench("reproduce", "004-006", "--out", str(tmp_path))
    assert done.code == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"reproduced.csv", "mine.csv"}
    assert "004-006" in (tmp_path / "reproduced.csv").read_text()


@pytest.mark.parametrize("word", ["900", "004-999", "neuron", "../004", "\x1b[31m"])
def test_what_nobody_knows_is_one_line(word: str) -> None:
    done = joulebench("reproduce", word)
    assert done.code == 2
    (line,) = done.problems
    assert line.startswith("error: '")
    assert line.isprintable()


def test_a_file_where_a_folder_is_asked_for_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    done = joulebench("reproduce", "004-006", "--out", str(tmp_path / "taken"))
    assert done.code == 2
    assert done.problems == [f"error: --out {tmp_path / 'taken'} is no folder; name another one"]
    # Told before anything is computed, so nothing of a source was begun.
    assert "Neuron" not in done.stderr
    assert done.stdout == ""


def hostile_source() -> Reproduced:
    book, source = ledger(), SOURCES[4]
    findings = [Finding("004-006", 2000.0, "plan", note=HOSTILE), Finding("004-008", 9.0, "plan", explanation=HOSTILE)]
    rows = judged(book, findings, ["004-006", "004-008"])
    rows = [dataclasses.replace(row, claim=dataclasses.replace(row.claim, quantity=HOSTILE)) for row in rows]
    table = SourceTable(
        HOSTILE, HOSTILE, HOSTILE, HOSTILE,
        (Entry(HOSTILE, HOSTILE, 1.0, theirs=2.0, note=HOSTILE), Entry("b", HOSTILE, None, theirs="N.S.")),
        HOSTILE, picture="bars",
    )  # fmt: skip
    return Reproduced(source, tuple(rows), (table,))


def test_everything_is_escaped(tmp_path: Path) -> None:
    # On a full disk no page has links to pages that are not there.
    assert write_pages(ledger(), [hostile_source()], tmp_path)[-1].name == SUMMARY
    for name in (SUMMARY, page_name(SOURCES[4])):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert HOSTILE not in text
        assert "&lt;script&gt;alert" in text


def test_a_table_shows_theirs_ours_and_their_ratio(tmp_path: Path) -> None:
    entries = (
        Entry("best", "pairs", 2500.0, claim="004-006"),
        Entry("best", "blocks", None, theirs="N.S.", note="no room"),
        Entry("worst", "blocks", 3.0),
        Entry("worst", "pairs", None, theirs="-"),
    )
    table = SourceTable("Table 1", "padding", "", "case", entries, "by plans", picture="bars")
    write_pages(ledger(), [Reproduced(SOURCES[4], (), (table,))], tmp_path)
    text = (tmp_path / page_name(SOURCES[4])).read_text(encoding="utf-8")
    best, worst = re.findall(r"<tr><th scope=\"row\">(?:best|worst)</th>.*?</tr>", text, re.DOTALL)
    assert re.sub(r"<[^>]+>", " ", best).split() == ["best", "2000", "2500", "1.25", "N.S.", "–", "1"]
    assert re.sub(r"<[^>]+>", " ", worst).split() == ["worst", "–", "3"], "one dash for none of both"
    assert "no room" in text


def test_charts_have_both_series(tmp_path: Path) -> None:
    entries = tuple(Entry(str(n), "a", float(n), theirs=float(n) + 1) for n in (1, 2, 4))
    bars, lines = (SourceTable("Fig. 1", "t", "ms", "batch", entries, "x", picture=p) for p in ("bars", "lines"))
    write_pages(ledger(), [Reproduced(SOURCES[4], (), (bars, lines))], tmp_path)
    text = (tmp_path / page_name(SOURCES[4])).read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL)
    assert found
    specs = json.loads(found[1])["specs"]
    assert set(specs) == {"chart-1", "chart-2"}
    for spec in specs.values():
        points = set(re.findall(r'"series": "(\w+)", "value": ([\d.]+)', json.dumps(spec)))
        assert points >= {(s, v) for s, v in [("theirs", "2.0"), ("ours", "1.0"), ("theirs", "5.0"), ("ours", "4.0")]}


@pytest.mark.parametrize(("values", "ends"), [((1.0, 4.0), [0.0, 5.0]), ((-8.0, -2.0), [-8.0, 2.0])])
def test_behind_the_longest_bar_is_room_for_its_number(values: tuple[float, ...], ends: list[float]) -> None:
    """A quarter of the bars' length. On a phone a number was cut at the page's edge."""
    entries = tuple(Entry(str(n), "a", value) for n, value in enumerate(values))
    spec = table_chart(ledger(), SourceTable("Fig. 1", "t", "ms", "batch", entries, "x", picture="bars"))
    assert spec["layer"][0]["encoding"]["x"]["scale"]["domain"] == ends


def test_a_printed_range_is_drawn_between_its_ends() -> None:
    """000-072: 52 to 137 mJ. And so is ours, where it is one."""
    entries = (Entry("a", "NPUMoE", Span(92.0, 112.0), claim="000-072"), Entry("a", "GPU", 50.0))
    table = SourceTable("Fig. 15", "t", "mJ", "arm", entries, "n", picture="bars")
    told = json.dumps(table_chart(ledger(), table))
    assert json.dumps({"series": "theirs", "from": 52.0, "value": 137.0, "said": "52-137"})[1:-1] in told
    assert json.dumps({"series": "ours", "from": 92.0, "value": 112.0, "said": "92 to 112"})[1:-1] in told
    alone = SourceTable("Fig. 15", "t", "mJ", "arm", entries[1:], "n", picture="bars")
    assert '"said"' not in json.dumps(table_chart(ledger(), alone))


def test_a_scatter_has_a_dot_for_each_row_with_both_figures() -> None:
    """Theirs of arm `a` has no y, so nothing is drawn of it."""
    entries = (
        Entry("a", "TTFT, s", 2.0, theirs=3.0), Entry("a", "energy, mJ", 50.0),
        Entry("b", "TTFT, s", 4.0, theirs=5.0), Entry("b", "energy, mJ", 60.0, theirs=70.0),
    )  # fmt: skip
    table = SourceTable("Fig. 13", "t", "s; mJ", "arm", entries, "n", picture="dots")
    told = json.dumps(table_chart(ledger(), table))
    for dot in ({"x": 2.0, "y": 50.0}, {"x": 4.0, "y": 60.0}, {"x": 5.0, "y": 70.0}):
        assert json.dumps(dot)[1:-1] in told
    assert '"x": 3.0' not in told
    with pytest.raises(ValueError, match="two columns, x and y, and it has 1"):
        SourceTable("Fig. 13", "t", "s", "arm", entries[:1], "n", picture="dots")


def test_a_table_has_no_place_twice() -> None:
    with pytest.raises(ValueError, match="stands there twice"):
        SourceTable("Table 1", "t", "", "r", (Entry("a", "b", 1.0), Entry("a", "b", 2.0)), "n")
    with pytest.raises(ValueError, match="has no entry"):
        SourceTable("Table 1", "t", "", "r", (), "n")


def test_an_input_of_which_ours_differs_is_told_among_what_differs(tmp_path: Path) -> None:
    findings = [Finding("004-041", 256.0, "plan"), Finding("004-037", 1.0, "plan")]
    rows = judged(ledger(), findings, ["004-041", "004-037"])
    assert [row.differs for row in rows] == [True, False]
    write_pages(ledger(), [Reproduced(SOURCES[4], tuple(rows), ())], tmp_path)
    text = (tmp_path / SUMMARY).read_text(encoding="utf-8")
    assert "input, and ours differs, not explained" in text
    assert "input, as printed" not in text


def test_ratios_of_predicted_and_consistent_rows_alone_are_drawn() -> None:
    """000-042 is a prediction; 000-116 was fitted on; 000-022 is an input."""
    findings = [Finding("000-042", 3.0, "priced"), Finding("000-116", 3.62, "sheet"), Finding("000-022", 32.0, "shape")]
    rows = judged(ledger(), findings, ["000-042", "000-116", "000-022", "000-003"])
    spec = ratio_chart(rows)
    points = set(re.findall(r'"claim": "([\d-]+)", "ratio": ([\d.]+)', json.dumps(spec)))
    theirs = ledger().figure("000-042")
    assert points == {("000-042", str(3.0 / theirs)), ("000-116", "1.0")}
    assert ratio_chart(rows[2:]) is None


@pytest.mark.slow
def test_the_page_is_what_the_product_gives() -> None:
    book = ledger()
    done = reproduce(book, list(book.claims), False, lambda line: None)
    assert sum(len(one.rows) for one in done) == 987
    told = "python -m tests.benchmarks.reproduce_page writes it"
    assert reproduce_page.PAGE.read_text(encoding="utf-8") == reproduce_page.page(book, done), told
