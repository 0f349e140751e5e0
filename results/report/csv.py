"""CSV files of a run, safe to open in a spreadsheet, numbers in full precision (the shortest text that reads back)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from results import tables
from results.answers import answer_table
from results.asked_tables import asked_rows
from results.endurance import round_rows, step_rows
from results.heat import experts_of
from results.report.files import replace_text
from results.report.standings import standings_table
from results.run_frames import RunFrames
from results.runs import RunData
from results.trial_tables import placement_rows, request_frames, trials

_EXECUTED = re.compile(r"^(\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n])")
"""Text that a spreadsheet takes for a formula (full-width signs too), or that a tab or line break moves on."""
_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_NUMBERS = re.compile(rf"{_NUMBER}(?:; {_NUMBER})*|-", re.ASCII)
"""Numbers alone, or the dash of a place without one, compute nothing: with a ' they could not be read back."""


def write_csv(run: RunData, directory: Path, derived: RunFrames | None = None) -> list[Path]:
    """The CSV files of a run (latency, energy, accuracy, ...) in `directory`; each appears whole.

    derived: the run's frames, where the caller has them already.
    """
    paths = []
    for name, content in frames_of_run(run, derived or RunFrames(run)).items():
        paths.append(directory / f"{name}.csv")
        parts = iter([content] if isinstance(content, pd.DataFrame) else content)
        replace_text(paths[-1], (csv_text(part, header=i == 0) for i, part in enumerate(parts)))
    return paths


def frames_of_run(run: RunData, derived: RunFrames) -> dict[str, pd.DataFrame | Iterator[pd.DataFrame]]:
    """Every table by its name; one of hundreds of thousands of rows in parts."""
    frames: dict[str, pd.DataFrame | Iterator[pd.DataFrame]] = {
        "arms": standings_table(derived.standings),
        "latency": tables.latency_rows(derived.tidy),
        "energy": tables.energy_rows(derived.tidy),
        "accuracy": tables.accuracy_rows(derived.tidy),
        "accuracy_energy": derived.compared,
        "experts": derived.experts,
        "overlaps": derived.overlaps,
        "heat": experts_of(run, derived.heats),
        "operations": derived.operations,
        "resources": derived.resources,
        "samples": answer_table(run, derived.answered),
        "trials": trials(run, derived.operations),
        "requests": request_frames(run),
        "summary": derived.summary,
    }
    if derived.asked_tables:
        frames["asked_tables"] = asked_rows(derived.asked_tables)
    if any(trial.placement for trial in run.trials):
        frames["placement"] = placement_rows(run)
    if derived.endurance:
        frames["endurance"] = round_rows(run, derived.endurance)
        frames["endurance_steps"] = step_rows(run, derived.endurance)
    return frames


def csv_text(frame: pd.DataFrame, header: bool = True) -> str:
    """A frame as CSV with LF line ends; a text cell or heading that a spreadsheet would execute gets a leading '.

    Numbers stay as they are, in columns of text too."""
    safe = frame.rename(columns=neutralised)
    for column in safe.columns:
        if not pd.api.types.is_numeric_dtype(safe[column]):
            # Most text stands in many rows: each is looked at once.
            executed = {t: neutralised(t) for t in safe[column].unique() if isinstance(t, str) and neutralised(t) != t}
            if executed:
                safe[column] = safe[column].map(lambda t, own=executed: own.get(t, t), na_action="ignore")
    return safe.to_csv(index=False, header=header, lineterminator="\n")


def json_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Its rows for programs, with every digit (pandas' own JSON ends at the tenth behind the point); None where a cell
    is empty, or no number."""
    full = frame.astype(object)
    known = full.where(frame.notna() & ~frame.isin([math.inf, -math.inf]), None)
    return [{str(column): value for column, value in row.items()} for row in known.to_dict("records")]


def neutralised(text: str) -> str:
    """ "=1+1" -> "'=1+1": shown as text, not computed."""
    return f"'{text}" if _EXECUTED.match(text) and not _NUMBERS.fullmatch(text) else text
