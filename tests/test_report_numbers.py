"""Every chart of a report has its numbers under it, also where no script runs."""

from __future__ import annotations

import re

from results import tables
from results.report.html import html_text, page_context
from tests.run_builders import example_run


def test_each_chart_and_each_picture_of_arms_has_a_table_in_its_figure() -> None:
    run = example_run()
    context = page_context(run)
    text = html_text(run)
    n_panels = sum(len(s.panels) + len(s.speed_panels) for s in context["screens"])
    n_charts = sum(f.spec is not None for own in context["figures"].values() for _, f in own)
    assert n_panels > 0
    assert n_charts > 0
    assert text.count('<summary class="small">In numbers</summary>') == n_panels + n_charts
    drawn = [figure for own in context["figures"].values() for _, figure in own if figure.spec]
    assert all(figure.numbers is not None and figure.numbers.rows for figure in drawn)


def test_the_numbers_of_energy_are_those_of_the_table() -> None:
    run = example_run()
    frame = tables.tidy(run)
    energy = next(f for _, f in page_context(run)["figures"]["energy"] if f.numbers.rows)
    [(arm, phase, told)] = [row for row in energy.numbers.rows if row[2] != "missing"][:1]
    assert phase in ("prefill", "decode")
    unit = energy.numbers.headings[2].rpartition(" ")[2]
    scale = {"J/token": 1.0, "mJ/token": 1e-3, "µJ/token": 1e-6}[unit]
    rows = frame[(frame["metric"] == "energy_per_token") & (frame["phase"] == phase)]
    means = [mean / scale for mean in rows["mean"].dropna()]
    value = float(re.split(r"[ \[]", told)[0])
    assert any(abs(value - mean) <= 0.01 * mean for mean in means), (arm, told, means)


def test_paper_shows_what_is_folded() -> None:
    text = html_text(example_run())
    in_print = text[text.index("@media print") :]
    assert "details::details-content { content-visibility: visible" in in_print
    assert 'addEventListener("beforeprint"' in text
