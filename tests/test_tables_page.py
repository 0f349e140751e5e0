"""`docs/tables.md` names every table of a run and each of its columns, where the table is told."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from results.achieved import ACHIEVED_METRICS
from results.asked_tables import asked_rows
from results.endurance import round_rows, step_rows
from results.export import TRACES, WHAT, export
from results.metrics import CHARGE_METRIC, ENERGY_METRICS, LATENCY_METRICS, LOAD_METRICS
from results.report.csv import frames_of_run
from results.run_frames import RunFrames
from results.trial_tables import placement_rows
from tests.run_builders import cell, run, trial

PAGE = (Path(__file__).parent.parent / "docs" / "tables.md").read_text("utf-8")
OF_METRICS = re.compile(r"score_.*")


def columns_by_table() -> dict[str, list[str]]:
    one = run([cell()], [trial()])
    frames = {
        name: frame if isinstance(frame, pd.DataFrame) else next(frame)
        for name, frame in frames_of_run(one, RunFrames(one)).items()
    }
    frames |= {
        "asked_tables": asked_rows([]),
        "placement": placement_rows(one),
        "endurance": round_rows(one, []),
        "endurance_steps": step_rows(one, []),
    }
    return {name: [str(c) for c in frame.columns] for name, frame in frames.items()}


COLUMNS = columns_by_table()
METRICS = {
    metric for metric, *_ in (*LATENCY_METRICS, *LOAD_METRICS, *ACHIEVED_METRICS, *ENERGY_METRICS, CHARGE_METRIC)
}


def named_for(table: str) -> set[str]:
    """Of the sections that tell it, and of the beginning, which holds for all."""
    beginning, *sections = PAGE.split("\n## ")
    own = [section for section in sections if f"`{table}.csv`" in section or f"`{table}.parquet`" in section]
    return {name for text in (beginning, *own) for name in re.findall(r"`(\w+)`", text)}


def test_the_page_is_of_every_table() -> None:
    assert {*COLUMNS, TRACES} == set(WHAT)


def test_the_page_names_each_column_of_exported_readings(tmp_path: Path) -> None:
    export(run([cell()], [trial()]), tmp_path)
    assert set(pd.read_parquet(tmp_path / f"{TRACES}.parquet").columns) <= named_for(TRACES)


@pytest.mark.parametrize("table", COLUMNS)
def test_the_page_names_each_column_of_a_table(table: str) -> None:
    told = named_for(table)
    ends = ("_low", "_high")
    unnamed = [
        column
        for column in COLUMNS[table]
        if column not in told
        and not OF_METRICS.fullmatch(column)
        and not (column.endswith(ends) and column.removesuffix("_low").removesuffix("_high") in told)
    ]
    assert unnamed == []


def test_the_page_names_each_metric() -> None:
    assert METRICS - named_for("latency") - named_for("energy") == set()


def test_the_page_names_no_column_that_is_gone() -> None:
    known = (
        METRICS
        | {column for columns in COLUMNS.values() for column in columns}
        | {"part", "component", "kind", "time_s"}
    )
    words = {"measured", "derived", "missing", "reference", "score_METRIC", "acc_stderr"}
    marks = {"_s", "_ms", "_j", "_w", "_bytes", "_percent", "_low", "_high"}
    assert set(re.findall(r"`(\w+)`", PAGE)) - known - words - marks == set()
