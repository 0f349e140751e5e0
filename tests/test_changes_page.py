"""The page of `compare` and `regress`: what all figures share is told once, and commands look like commands."""

from __future__ import annotations

import re
from pathlib import Path

from results.report.changes_page import ChangesPage, write_changes_page

COLUMNS = ("verdict", "arm", "workload", "figure", "95 %", "why")


def page_of(folder: Path, *rows: tuple[str, ...], notes: tuple[str, ...] = ()) -> str:
    asked = ChangesPage(
        title="t", lead="t", axis="change", verdicts=[row[0] for row in rows], order=["open"], looks={}, drawn=[],
        columns=COLUMNS, numbers={"95 %"}, rows=rows, orders=[{} for _ in rows], notes=notes,
    )  # fmt: skip
    write_changes_page(asked, folder / "page.html")
    text = (folder / "page.html").read_text("utf-8")
    return text[text.index("<main>") : text.index("</main>")]


def columns(page: str) -> list[str]:
    return re.findall(r"<th[^>]*>([^<]*)</th>", page)


def test_what_all_figures_share_stands_above_the_table(tmp_path: Path) -> None:
    page = page_of(
        tmp_path,
        ("open", "a", "boolq", "time", "", "3 runs are too few"),
        ("open", "b", "boolq", "joules", "", "3 runs are too few"),
    )
    assert columns(page) == ["verdict", "arm", "figure"]
    assert page.count("boolq") == page.count("3 runs are too few") == 1
    assert re.findall(r"<tr>(.*?)</tr>", page)[1:] == [
        "<td>open</td><td>a</td><td>time</td>",
        "<td>open</td><td>b</td><td>joules</td>",
    ]


def test_what_one_figure_lacks_or_has_alone_stays_in_its_row(tmp_path: Path) -> None:
    page = page_of(
        tmp_path, ("open", "a", "boolq", "time", "[1, 2]", ""), ("open", "a", "gsm8k", "time", "", "too few")
    )
    assert columns(page) == ["verdict", "workload", "figure", "95 %", "why"]
    assert "arm: a" in page
    assert columns(page_of(tmp_path, ("open", "a", "boolq", "time", "", "")))[1:3] == ["arm", "workload"]


def test_commands_are_shown_as_such_and_names_as_text(tmp_path: Path) -> None:
    page = page_of(
        tmp_path, ("open", "<b>", "boolq", "time", "", "`joulebench <x>`"), notes=("ask `joulebench regress`",)
    )
    assert "ask <code>joulebench regress</code>" in page
    assert "<code>joulebench &lt;x&gt;</code>" in page
    assert "<td>&lt;b&gt;</td>" in page
