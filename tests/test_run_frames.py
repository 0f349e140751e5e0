"""What tables and report share is computed once: traces are read, and joules integrated, for the first of them only."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from results.records import PowerTrace
from results.report.csv import write_csv
from results.report.html import write_html
from results.run_frames import RunFrames
from tests.run_builders import example_run


def test_a_report_after_the_tables_reads_no_trial_again_but_its_examples(tmp_path: Path) -> None:
    whole = example_run(n_repeats=2)
    n_read: Counter[str] = Counter()

    def load_traces(trial_id: str) -> tuple[PowerTrace, ...]:
        n_read[trial_id] += 1
        return whole.load_traces(trial_id)

    derived = RunFrames(replace(whole, load_traces=load_traces))
    write_csv(derived.run, tmp_path, derived)
    by_tables = n_read.copy()
    assert len(by_tables) > 10
    write_html(derived.run, tmp_path / "report.html", derived)
    # Of each of the two devices a trial is drawn, and one tells what its meter says of itself.
    assert (n_read - by_tables).total() == 4
