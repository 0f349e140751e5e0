"""The HTML report in a real browser: it draws, asks the network for nothing, and runs no text of a run as code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from results.records import Sample
from results.report.changes_page import OPEN, ChangesPage, Drawn, write_changes_page
from results.report.html import html_text
from tests.run_builders import cell, completion, example_run, run, trial

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on the PATH")

PROBE = """<script>addEventListener("load", () => setTimeout(() => {
  const page = document.documentElement, seen = window.parent.document.documentElement.dataset;
  seen.widths = page.scrollWidth + " " + page.clientWidth;
  seen.paper = getComputedStyle(page).backgroundColor;
  seen.line = getComputedStyle(document.querySelector(".picture .mark.arm-0")).stroke;
  const arms = document.querySelector("table.arms");
  seen.arms = [...arms.rows].map((row) => Math.round(row.cells[0].getBoundingClientRect().left)).join();
  arms.closest(".scroll").scrollLeft = 1000;
  seen.scrolled = [...arms.rows].map((row) => Math.round(row.cells[0].getBoundingClientRect().left)).join();
}, 1500));</script>"""
"""What only a script can see, told to the enclosing page. It replaces the report's policy, which forbids it."""


@dataclass(frozen=True)
class Visit:
    dom: str
    console: list[str]
    requested: list[str]
    """http(s) URLs that the page asked for; the browser's own background requests carry no page."""

    def measured(self, name: str) -> str:
        found = re.search(rf'<html[^>]* data-{name}="([^"]*)"', self.dom)
        assert found, f"the page has no data-{name}: {self.dom[:300]}"
        return found.group(1)


def visit(html: str, folder: Path, *options: str) -> Visit:
    page, profile, net_log = folder / "page.html", folder / "profile", folder / "net.json"
    page.write_text(html, encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={profile}", f"--log-net-log={net_log}", "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr", "--v=0", "--virtual-time-budget=10000", *options, "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE:" in line]
    return Visit(done.stdout, console, _requests_of_page(json.loads(net_log.read_text())))


def _requests_of_page(log: dict[str, Any]) -> list[str]:
    start = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    params = [e["params"] for e in log["events"] if e["type"] == start and "url" in e.get("params", {})]
    return [
        p["url"]
        for p in params
        if p["url"].startswith(("http:", "https:")) and p["network_isolation_key"].startswith("file:")
    ]


@pytest.fixture(scope="module")
def report() -> str:
    return html_text(example_run())


@pytest.fixture(scope="module")
def opened(report: str, tmp_path_factory: pytest.TempPathFactory) -> Visit:
    return visit(unfolded(report), tmp_path_factory.mktemp("browser"))


def unfolded(report: str) -> str:
    """As a reader sees it who opens every fold; charts are drawn when theirs is opened."""
    return report.replace('<details class="fold"', '<details open class="fold"')


def probed(report: str) -> str:
    without_policy = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report)
    assert without_policy != report
    return at_end(without_policy, PROBE)


def at_end(page: str, addition: str) -> str:
    """The charting library has a </body> in its text: the page's own is the last one."""
    body, end, rest = page.rpartition("</body>")
    return body + addition + end + rest


def test_the_probe_sees_requests_and_console_lines_of_a_page_that_makes_them(tmp_path: Path) -> None:
    seen = visit('<img src="http://example.invalid/x.png"><script>console.error("boom")</script>', tmp_path)
    assert seen.requested == ["http://example.invalid/x.png"]
    assert "boom" in seen.console[0]


def test_the_report_asks_the_network_for_nothing(opened: Visit) -> None:
    assert opened.requested == []


def test_the_report_leaves_the_console_empty(opened: Visit) -> None:
    assert opened.console == []


def test_single_repeats_and_log_likelihoods_leave_the_console_empty(tmp_path: Path) -> None:
    seen = visit(unfolded(html_text(example_run(n_repeats=1))), tmp_path)
    assert seen.console == []
    assert 'class="marks"' in seen.dom


def test_every_chart_is_drawn(opened: Visit) -> None:
    places = re.findall(r'<div class="chart[^"]*"[^>]*id="(chart-[^"]+)"', opened.dom)
    assert len(places) == 8, "6 of energy, 2 of power"
    assert len(re.findall(r"<svg[^>]*class=\"marks\"", opened.dom)) == len(places)
    assert "could not be drawn" not in re.sub(r"<script.*?</script>", "", opened.dom, flags=re.DOTALL)


HOSTILE_TEXT = "<img src=x onerror=document.documentElement.dataset.broken=1></script><script>alert(2)</script>"


CHOICES = {
    "asked": "s0,s1,s2",
    "seconds": "s2,s1,s0",
    "disagreement": "s0,s2,s1",
    "asked answers": "s0",
    "asked verdicts": "",
    "asked all > 1": "s1",
}
"""Order, filter and words chosen in the form of the samples: the samples that are then shown."""


def browsed() -> str:
    """A page of one workload whose texts are hostile, with a reader who makes all `CHOICES` one after another."""
    cells = [cell(c, engine=c, workload="boolq") for c in ("left", "right")]
    said = {"left": [HOSTILE_TEXT, "same", "same"], "right": ["other", "same", "same"]}
    trials = []
    for c, texts in said.items():
        done = [
            completion(f"s{i}", 10.0 * i, 4, (10.0 * i + 1, 10.0 * i + 2 + i)).model_copy(update={"text": text})
            for i, text in enumerate(texts)
        ]
        trials.append(trial(c, completions=done))
    made = run(cells, trials)
    samples = tuple(Sample(sample_id=f"s{i}", question=f"{HOSTILE_TEXT} {i}", expected="same") for i in range(3))
    page = html_text(replace(made, samples={("boolq", "tiny-moe"): samples}))
    script = f"""<script>addEventListener("load", () => {{
      const form = document.getElementById("sample-form"), seen = document.documentElement.dataset;
      seen.asked = document.querySelector(".sample .sample-text").textContent;
      seen.orders = JSON.stringify({json.dumps(list(CHOICES))}.map((choice) => {{
        const [order, filter = "all", ...words] = choice.split(" ");
        form.elements.order.value = order;
        form.elements.filter.value = filter;
        form.elements.words.value = words.join(" ");
        form.dispatchEvent(new Event("input"));
        return [...document.querySelectorAll(".sample h3")].map((e) => e.textContent).join();
      }}));
    }});</script>"""
    return at_end(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page), script)


def test_samples_are_sorted_and_filtered_and_their_texts_never_run_even_without_the_policy(tmp_path: Path) -> None:
    seen = visit(browsed(), tmp_path)
    assert dict(zip(CHOICES, json.loads(unescape(seen.measured("orders"))), strict=True)) == CHOICES
    assert unescape(seen.measured("asked")) == f"{HOSTILE_TEXT} 0"
    assert "data-broken" not in re.findall("<html[^>]*>", seen.dom)[0]
    assert seen.console == []


def test_a_hostile_error_message_is_text(opened: Visit) -> None:
    assert "&lt;script&gt;alert(1)&lt;/script&gt; out of memory" in opened.dom
    assert "<script>alert(1)" not in opened.dom


def test_a_script_that_escaping_would_miss_is_stopped_by_the_policy(report: str, tmp_path: Path) -> None:
    injected = '<script>document.documentElement.dataset.injected = "yes"</script>'
    seen = visit(at_end(unfolded(report), injected), tmp_path)
    assert 'data-injected="yes"' not in seen.dom
    (line,) = seen.console
    assert "Content Security Policy" in line
    assert seen.dom.count('class="marks"') == 8, "the page's own scripts still run"


def test_nothing_overflows_a_phone(report: str, tmp_path: Path) -> None:
    # A headless window is never narrower than 500 px; a frame is.
    frame = f'<iframe width="390" height="844" style="border: 0" srcdoc="{escape(probed(report))}"></iframe>'
    seen = visit(f"<!DOCTYPE html><html><body>{frame}</body></html>", tmp_path)
    content, viewport = map(int, seen.measured("widths").split())
    assert content <= viewport <= 390


def test_on_a_phone_no_sentence_or_choice_of_an_open_page_ends_beyond_the_screen(tmp_path: Path) -> None:
    cells = [cell(f"c{i}", engine=f"arm-{i}", workload=f"{30 * 'w'}-{i}", device="d" * 60) for i in (0, 1)]
    page = unfolded(html_text(run(cells, [trial(c.cell_id, i) for c in cells for i in range(2)])))
    script = """<script>addEventListener("load", () => {
      const seen = window.parent.document.documentElement.dataset;
      const edges = (choice) => [...document.querySelectorAll(choice)].map((e) => e.getBoundingClientRect().right);
      const end = (choice) => Math.round(Math.max(...edges(choice)));
      seen.edges = [end("caption"), end(".controls label, .controls select")].join();
      const word = document.createRange(), title = [...document.querySelectorAll(".arms .title")].pop();
      word.selectNodeContents(title);
      seen.title = title.textContent + word.getClientRects().length;
    });</script>"""
    inner = at_end(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page), script)
    frame = f'<iframe width="390" height="844" style="border: 0" srcdoc="{escape(inner)}"></iframe>'
    seen = visit(f"<!DOCTYPE html><html><body>{frame}</body></html>", tmp_path)
    captions, choices = map(int, seen.measured("edges").split(","))
    assert 100 < captions <= 390
    assert 100 < choices <= 390
    assert seen.measured("title") == "Accuracy1"


def test_on_a_phone_the_arm_stays_in_sight_while_its_figures_scroll(report: str, tmp_path: Path) -> None:
    frame = f'<iframe width="280" height="844" style="border: 0" srcdoc="{escape(probed(report))}"></iframe>'
    seen = visit(f"<!DOCTYPE html><html><body>{frame}</body></html>", tmp_path)
    assert seen.measured("arms") == seen.measured("scrolled")


def test_a_closed_fold_draws_nothing_and_the_first_screen_needs_no_script(report: str, tmp_path: Path) -> None:
    seen = visit(report, tmp_path)
    assert 'class="marks"' not in seen.dom
    assert seen.console == []
    first_screen = report[: report.index('class="about"')]
    assert "<script" not in first_screen
    assert 'class="picture"' in first_screen


def test_a_click_on_a_heading_sorts_the_arms_with_missing_ones_last(tmp_path: Path) -> None:
    cells = [cell(c, engine=c) for c in ("slow", "quick", "lost")]
    trials = [
        trial(c, i, completions=[completion("s", 0.0, 4, (s, s + i))])
        for c, s in (("slow", 9.0), ("quick", 1.0))
        for i in (0, 1)
    ]
    script = """<script>addEventListener("load", () => {
      const table = document.querySelector("table.arms"), order = [];
      const look = () => order.push([...table.tBodies[0].rows].map((row) => row.dataset.arm).join());
      look();
      const [, time] = table.querySelectorAll("thead button");
      for (const _ of [0, 1]) { time.click(); look(); }
      document.documentElement.dataset.order = order.join(" ");
      document.documentElement.dataset.sorted = table.querySelector("[aria-sort]").ariaSort;
    });</script>"""
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html_text(run(cells, trials)))
    seen = visit(at_end(page, script), tmp_path)
    assert seen.measured("order").split() == ["slow,quick,lost", "quick,slow,lost", "slow,quick,lost"]
    assert seen.measured("sorted") == "descending"
    assert seen.console == []


def test_changes_sort_by_their_values_and_not_by_their_letters(tmp_path: Path) -> None:
    told = (("slow", "1.02 s", 1.02, "+10.0 %"), ("quick", "998 ms", 0.998, "-9.0 %"), ("none", "", None, ""))
    asked = ChangesPage(
        title="t", lead="t", axis="change", verdicts=["a"], order=["a"], looks={}, drawn=[],
        columns=["arm", "now", "change"], numbers={"now", "change"}, rows=[(a, n, c) for a, n, _, c in told],
        orders=[{"now": value} for _, _, value, _ in told],
    )  # fmt: skip
    write_changes_page(asked, tmp_path / "changes.html")
    script = """<script>addEventListener("load", () => {
      const table = document.querySelector("table"), order = [];
      for (const button of table.querySelectorAll("thead button")) {
        button.click();
        order.push([...table.tBodies[0].rows].map((row) => row.cells[0].textContent).join());
      }
      document.documentElement.dataset.order = order.join(" ");
    });</script>"""
    page = (tmp_path / "changes.html").read_text()
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    seen = visit(at_end(page, script), tmp_path)
    assert seen.measured("order").split() == ["none,quick,slow", "quick,slow,none", "quick,slow,none"]
    assert seen.console == []


def test_on_a_phone_names_of_changes_leave_room_for_their_marks(tmp_path: Path) -> None:
    drawn = [Drawn("arm · time of a request · a workload of a long name · host" + 20 * "-", 1.0, -1.0, 3.0, "open")]
    asked = ChangesPage(
        title="t", lead="t", axis="change", verdicts=["open"], order=["open"], looks={"open": OPEN}, drawn=drawn,
        columns=["arm"], numbers=set(), rows=[("arm",)], orders=[{}],
    )  # fmt: skip
    write_changes_page(asked, tmp_path / "changes.html")
    page = unfolded((tmp_path / "changes.html").read_text())
    script = """<script>addEventListener("load", () => setTimeout(() => {
      const page = document.documentElement, seen = window.parent.document.documentElement.dataset;
      const right = (choice) => Math.round(document.querySelector(choice).getBoundingClientRect().right);
      seen.ends = [page.scrollWidth, right(".mark-symbol path"), right("#changes svg")].join();
    }, 1500));</script>"""
    inner = at_end(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page), script)
    frame = f'<iframe width="390" height="844" style="border: 0" srcdoc="{escape(inner)}"></iframe>'
    seen = visit(f"<!DOCTYPE html><html><body>{frame}</body></html>", tmp_path)
    width, mark, picture = map(int, seen.measured("ends").split(","))
    assert width <= 390
    assert mark < picture


def test_charts_follow_the_dark_scheme(report: str, tmp_path: Path) -> None:
    colours = []
    for scheme in ("0", "1"):
        folder = tmp_path / scheme
        folder.mkdir()
        seen = visit(probed(report), folder, f"--blink-settings=preferredColorScheme={scheme}")
        colours.append((seen.measured("paper"), seen.measured("line")))
    assert colours == [("rgb(21, 23, 26)", "rgb(109, 179, 242)"), ("rgb(253, 253, 251)", "rgb(11, 92, 158)")]


def test_no_table_is_clipped_at_1280_px(report: str, tmp_path: Path) -> None:
    script = """<script>addEventListener("load", () => setTimeout(() => {
      const clipped = [...document.querySelectorAll(".scroll")].filter((e) => e.scrollWidth > e.clientWidth);
      document.documentElement.dataset.clipped = clipped.map((e) => e.ariaLabel).join("; ");
      document.documentElement.dataset.tables = document.querySelectorAll(".scroll").length;
    }, 500));</script>"""
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", unfolded(report))
    seen = visit(at_end(page, script), tmp_path, "--window-size=1280,900")
    assert seen.measured("clipped") == ""
    assert int(seen.measured("tables")) >= 10


def test_the_first_answer_stands_on_the_first_screen_of_a_laptop(report: str, tmp_path: Path) -> None:
    script = """<script>addEventListener("load", () => {
      const bottom = (choice) => document.querySelector(choice).getBoundingClientRect().bottom;
      const seen = document.documentElement.dataset;
      seen.answer = Math.round(bottom(".answers")) + " " + Math.round(bottom("table.arms"));
    });</script>"""
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report)
    seen = visit(at_end(page, script), tmp_path, "--window-size=1280,800")
    answers, table = map(int, seen.measured("answer").split())
    assert answers < 300
    assert table < 700


@pytest.mark.parametrize("width", [1280, 390])
def test_names_of_a_hundred_letters_leave_page_and_first_table_as_wide_as_the_screen(
    width: int, tmp_path: Path
) -> None:
    names = ["a" * 100, "arm-with-" + "long-" * 18]
    cells = [cell(f"c{i}", engine=name, workload="w" * 100) for i, name in enumerate(names)]
    page = html_text(run(cells, [trial(c.cell_id, i) for c in cells for i in range(2)]))
    script = """<script>addEventListener("load", () => {
      const page = document.documentElement, seen = window.parent.document.documentElement.dataset;
      const wide = [page, document.querySelector("table.arms").closest(".scroll")];
      seen.excess = wide.map((e) => e.scrollWidth - e.clientWidth).join();
    });</script>"""
    inner = at_end(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page), script)
    frame = f'<iframe width="{width}" height="844" style="border: 0" srcdoc="{escape(inner)}"></iframe>'
    seen = visit(f"<!DOCTYPE html><html><body>{frame}</body></html>", tmp_path, "--window-size=1500,900")
    assert seen.measured("excess") == "0,0"


def test_on_a_phone_a_swept_arm_has_its_value_on_a_line_of_its_own_and_no_word_breaks(tmp_path: Path) -> None:
    names = [f"narrow.document_tiers[prefill_chunk={n}]" for n in (64, 128)]
    page = html_text(run([cell(f"c{i}", engine=n) for i, n in enumerate(names)], [trial(f"c{i}") for i in (0, 1)]))
    script = """<script>addEventListener("load", () => {
      const seen = window.parent.document.documentElement.dataset;
      const heads = [...document.querySelector("table.arms").rows].slice(1).map((row) => row.cells[0]);
      const pieces = heads.map((head) => [...head.querySelectorAll(".piece")]);
      seen.pieces = pieces.map((own) => own.length).join();
      seen.torn = pieces.flat().filter((piece) => piece.getClientRects().length > 1).length;
      seen.values = heads.map((head) => head.querySelector(".swept").textContent).join();
      seen.below = heads.every((head) => {
        const name = [...head.querySelectorAll(":scope > .piece")].pop().getBoundingClientRect();
        return head.querySelector(".swept").getBoundingClientRect().top >= name.bottom - 1;
      });
      seen.lines = Math.max(...heads.map((head) => Math.round(head.getBoundingClientRect().height)));
    });</script>"""
    inner = at_end(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page), script)
    frame = f'<iframe width="390" height="844" style="border: 0" srcdoc="{escape(inner)}"></iframe>'
    seen = visit(f"<!DOCTYPE html><html><body>{frame}</body></html>", tmp_path)
    assert seen.measured("values") == "prefill_chunk=64,prefill_chunk=128"
    assert (seen.measured("torn"), seen.measured("below")) == ("0", "true")
    assert seen.measured("pieces") == "6,6"
    assert int(seen.measured("lines")) < 120, "14 lines of 18 px before"


def test_the_first_table_names_model_and_machine_and_its_caveats_lead_to_what_they_say(tmp_path: Path) -> None:
    cells = [cell("c0", model_note="trained on <b>generated</b> text")]
    data = run(cells, [trial("c0", i, foreign_cpu_share=share) for i, share in enumerate((0.0, 0.72))])
    script = """<script>addEventListener("load", () => {
      const link = document.querySelector("h2 .caveat"), seen = document.documentElement.dataset;
      seen.caveat = link.textContent;
      seen.target = document.querySelector(link.getAttribute("href")).textContent.includes("took up to 72 % of it");
      seen.subject = document.querySelector("table.arms caption .subject").textContent;
    });</script>"""
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html_text(data))
    seen = visit(at_end(page, script), tmp_path)
    assert seen.measured("caveat") == "1 of 2 trials shared the CPU, up to 72 % of it"
    assert seen.measured("target") == "true"
    told = unescape(seen.measured("subject"))
    assert told == "tiny-moe (trained on <b>generated</b> text) on EPYC 7B13, 2 cores"
