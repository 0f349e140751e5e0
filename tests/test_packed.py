"""A report of trials that are held packed is the report of the same trials: every file, byte by byte."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path

import pytest

from results import packed
from results.counters import EngineCounters
from results.packed import PackedRecords, column_of
from results.records import Score
from results.report.csv import write_csv
from results.report.html import write_html
from results.run_frames import RunFrames
from results.store import Store
from results.trials import Trial
from tests.benchmarks.large_run import write_large_run
from tests.conftest import FinishedRun


def written(folder: Path, out: Path, packed_from: int | None) -> dict[str, bytes]:
    out.mkdir()
    with Store.view(folder) as store:
        run = store.data(packed_from)
        assert isinstance(run.trials[0].completions, PackedRecords) == (packed_from is not None)
        derived = RunFrames(run)
        write_csv(run, out, derived)
        write_html(run, out / "report.html", derived)
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def test_a_packed_report_is_the_same_report(
    finished_run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So few that records are made again and again.
    monkeypatch.setattr(packed, "MOST_MADE", 3)
    shutil.copytree(finished_run.directory, tmp_path / "run")
    plain, ours = written(tmp_path / "run", tmp_path / "a", None), written(tmp_path / "run", tmp_path / "b", 1)
    assert plain.keys() == ours.keys()
    assert [name for name in plain if plain[name] != ours[name]] == []


def test_packed_trials_are_the_trials(tmp_path: Path) -> None:
    write_large_run(tmp_path / "run", 60)
    with Store.view(tmp_path / "run") as store:
        plain, ours = store.trials(), store.trials(is_packed=True)
    assert plain == ours
    assert [repr(tuple(t.completions)) for t in ours] == [repr(t.completions) for t in plain]
    assert [repr(tuple(t.energy)) for t in ours] == [repr(t.energy) for t in plain]
    assert [c.ttft_s for t in ours for c in t.completions] == [c.ttft_s for t in plain for c in t.completions]
    for name in ("text", "token_ids", "token_times_s"):
        seen = [list(column_of(t.completions, name)) for t in ours]
        assert seen == [[getattr(c, name) for c in t.completions] for t in plain]


def test_numbers_that_compare_as_equal_stay_as_they_are_written() -> None:
    shared: packed.Shared = {}
    values = [(0.0, None), (-0.0, None), (1.0, 0.0), (1.0, -0.0), (1.0, 1.0)]
    found = []
    for value, stderr in values:
        score = Score(metric="acc", value=value, stderr=stderr)
        # Of a mixed column, too.
        trial = Trial(
            trial_id="t",
            cell_id="c",
            repeat=0,
            status="ok",
            started_at="",
            scores=(score, Score(metric="acc", value=value)),
            counters=EngineCounters(),
        )
        found.append(packed.packed(trial, shared))
    assert [repr((t.scores[0].value, t.scores[0].stderr)) for t in found] == [repr(value) for value in values]


def test_equal_scores_are_held_once(tmp_path: Path) -> None:
    write_large_run(tmp_path / "run", 400)
    with Store.view(tmp_path / "run") as store:
        ours = store.trials(is_packed=True)
    held = {id(t.scores) for t in ours}
    assert len(held) < len(ours)
    columns = chain.from_iterable(t.completions._columns for t in ours if isinstance(t.completions, PackedRecords))
    # Names, texts and prompt lengths stand once, whatever the number of trials.
    assert len({id(c) for c in columns if isinstance(c, tuple) and not any(isinstance(x, tuple) for x in c)}) < 1000
