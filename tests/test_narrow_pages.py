"""Pages on a narrow screen: what is wider scrolls by itself, and the page does not."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

import pytest

from results.report.changes_page import ChangesPage, write_changes_page
from tests.test_report_browser import CHROMIUM, at_end, visit

ROOT = Path(__file__).parent.parent
TEMPLATES = [p for folder in ("harness", "results") for p in sorted((ROOT / folder).rglob("*.html.j2"))]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_every_table_of_a_page_can_be_scrolled(template: Path) -> None:
    """A table of three columns of `tune` was wider than a phone, and the whole page moved with it."""
    before = template.read_text(encoding="utf-8").split("<table")[:-1]
    assert [part[-80:] for part in before if part.rfind('class="scroll') <= part.rfind("</table>")] == []


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on the PATH")
def test_a_long_word_of_a_sentence_breaks(tmp_path: Path) -> None:
    """units.cpu.kernels.expert_ffn+attention+lm_head.s_per_weight_byte stands in sentences of `cross`."""
    asked = ChangesPage(
        title="t", lead="a " + "units.cpu.kernels.expert_ffn+attention+lm_head.s_per_weight_byte", axis="change",
        verdicts=[], order=[], looks={}, drawn=[], columns=["arm"], numbers=set(), rows=[("arm",)], orders=[{}],
    )  # fmt: skip
    write_changes_page(asked, tmp_path / "changes.html")
    script = """<script>addEventListener("load", () => {
      const page = document.documentElement, seen = window.parent.document.documentElement.dataset;
      seen.widths = page.scrollWidth + " " + page.clientWidth;
    });</script>"""
    page = (tmp_path / "changes.html").read_text(encoding="utf-8")
    inner = at_end(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page), script)
    frame = f'<iframe width="390" height="844" style="border: 0" srcdoc="{escape(inner)}"></iframe>'
    content, width = map(int, visit(f"<!DOCTYPE html><body>{frame}</body>", tmp_path).measured("widths").split())
    assert content <= width <= 390


def test_pictures_whose_names_are_as_wide_as_a_phone_scroll() -> None:
    """Names of candidates, and ends of lines, were cut at the edge of the picture."""
    told = {
        "tune.html.j2": "{{ phase.front_chart }}",
        "sensitivity.html.j2": "{{ chart }}",
        "source.html.j2": "{{ flips }}",
        "cross.html.j2": "{{ machine.chart }}",
    }
    for template in TEMPLATES:
        if chart := told.pop(template.name, None):
            before = template.read_text(encoding="utf-8").partition(f'id="{chart}"')[0]
            assert before.endswith('aria-label="Picture"><div class="chart wide" '), template
    assert not told
