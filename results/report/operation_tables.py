"""Modelled time and joules by operation, a table for each device and workload: operations down, arms across."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from results.operations import share_words
from results.report.arms import Arm
from results.units import format_quantity

_READ = ("cell", "operation", "runs_on", "seconds", "share_of_time", "joules", "seconds_outside_fit")


@dataclass(frozen=True)
class OperationTable:
    """rows: an operation with its unit, and of each arm (seconds, joules, what of the seconds is extrapolated) as text;
    empty where the arm has none, joules too where the sheet states no watts."""

    title: str
    arms: tuple[Arm, ...]
    rows: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...]


def operation_tables(frame: pd.DataFrame, arms: Mapping[str, Arm]) -> list[OperationTable]:
    """frame: of `results.operations.operations_table`."""
    found = []
    for (device, workload), own in frame.groupby(["device", "workload"], sort=False):
        cells = list(dict.fromkeys(own["cell"]))
        columns = (own[name].tolist() for name in _READ)
        spent = {
            (cell, operation, unit): (
                f"{format_quantity(seconds, 's')} ({percent(share)})",
                "" if math.isnan(joules) else format_quantity(joules, "J"),
                _extrapolated(seconds, outside_s),
            )
            for cell, operation, unit, seconds, share, joules, outside_s in zip(*columns, strict=True)
        }
        rows = tuple(
            (f"{operation} on {unit}", tuple(spent.get((cell, operation, unit), ("", "", "")) for cell in cells))
            for operation, unit in _as_they_run(
                [list(zip(ran["operation"], ran["runs_on"], strict=True)) for _, ran in own.groupby("cell", sort=False)]
            )
        )
        found.append(OperationTable(f"{workload} · {device}", tuple(arms[cell] for cell in cells), rows))
    return found


def _extrapolated(seconds: float, outside_s: float) -> str:
    """outside_s: NaN where it was not kept."""
    if not outside_s > 0:
        return ""
    return "extrapolated" if outside_s >= seconds else f"{share_words(outside_s / seconds)} extrapolated"


def _as_they_run(of_arms: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """The operations of all arms: one that an arm lacks stands before what follows it in an arm that has it."""
    found: list[tuple[str, str]] = []
    for ran in of_arms:
        place = len(found)
        for one in reversed(ran):
            if one in found:
                place = found.index(one)
            else:
                found.insert(place, one)
    return found


def percent(share: float) -> str:
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"
