"""`docs/tables.md` names every table of a run and each of its columns, where the table is told."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from harness import conclusions
from harness.cross import table
from harness.reproduce import sensitivity
from harness.reproduce.findings import Judged, verdict_of
from harness.reproduce.ledger import ledger
from harness.reproduce.outcome import Reproduced
from harness.reproduce.sources import SOURCES
from harness.reproduce.told import csv_rows
from harness.tuning.choice_table import choice_records
from harness.tuning.display import candidate_records, probe_records
from harness.tuning.profile import CheckedRatio
from results.achieved import ACHIEVED_METRICS
from results.asked_tables import asked_rows
from results.endurance import round_rows, step_rows
from results.export import TRACES, WHAT, export
from results.metrics import CHARGE_METRIC, ENERGY_METRICS, LATENCY_METRICS, LOAD_METRICS
from results.report.csv import frames_of_run
from results.run_frames import RunFrames
from results.trial_tables import placement_rows
from tests.run_builders import cell, run, trial
from tests.test_tune_presets import checked, raced

PAGE = (Path(__file__).parent.parent / "docs" / "tables.md").read_text("utf-8")
OF_COMMANDS = PAGE.partition("\n## Tables of other commands\n")[2]
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


def columns_of_commands() -> dict[str, set[str]]:
    """By the words with which the page begins to tell a table: two commands have a `sensitivity.csv`."""
    claim = next(iter(ledger()))
    judged = Judged(claim, None, verdict_of(claim, None, lambda id_: (0.0, 0.0)))
    session, found = raced()
    ratio = CheckedRatio(phase="decode", quantity="energy", ratio=0.9, low=0.8, high=1.0, method="counter")
    return {
        "`cross.csv` of": {*table.COLUMNS, "asked"},
        "`sensitivity.csv` of `joulebench cross": {*conclusions.COLUMNS, "asked"},
        "`candidates.csv` of": set(candidate_records(session, found)[0]),
        "`probes.csv` of": set(probe_records(session, found)[0]),
        "`choice.csv` of": set(choice_records(session, checked("energy", ratio))[0]),
        "`reproduced.csv` of": set(csv_rows([Reproduced(SOURCES[0], (judged,), ())])[0]),
        "`sensitivity.csv` of `joulebench reproduce": set(sensitivity.COLUMNS),
    }


COLUMNS_OF_COMMANDS = columns_of_commands()


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


@pytest.mark.parametrize("told", COLUMNS_OF_COMMANDS)
def test_the_page_names_each_column_of_a_command(told: str) -> None:
    """In the paragraphs from the one that begins so to that of the next table."""
    text = OF_COMMANDS[OF_COMMANDS.index(f"\n{told}") + 1 :]
    own = text.partition("\n\n`")[0]
    named = set(re.findall(r"`(\w+)`", own + PAGE.partition("\n## ")[0]))
    unnamed = COLUMNS_OF_COMMANDS[told] - named
    assert {column for column in unnamed if column.removesuffix("_low").removesuffix("_high") not in named} == set()


def test_the_page_names_each_metric() -> None:
    assert METRICS - named_for("latency") - named_for("energy") == set()


def test_the_page_names_no_column_that_is_gone() -> None:
    known = (
        METRICS
        | {column for columns in [*COLUMNS.values(), *COLUMNS_OF_COMMANDS.values()] for column in columns}
        | {"part", "component", "kind", "time_s"}
    )
    words = {"measured", "derived", "missing", "reference", "score_METRIC", "acc_stderr"}
    marks = {"_s", "_ms", "_j", "_w", "_bytes", "_percent", "_low", "_high"}
    assert set(re.findall(r"`(\w+)`", PAGE)) - known - words - marks == set()
