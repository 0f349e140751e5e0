"""Modelled time and joules by operation, a table for each device and workload: operations down, arms across."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from results.report.arms import Arm
from results.units import format_quantity


@dataclass(frozen=True)
class OperationTable:
    """rows: an operation with its unit, and of each arm (seconds, joules) as text; empty where the arm has none."""

    title: str
    arms: tuple[Arm, ...]
    rows: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


def operation_tables(frame: pd.DataFrame, arms: Mapping[str, Arm]) -> list[OperationTable]:
    """frame: of `results.operations.operations_table`."""
    found = []
    for (device, workload), own in frame.groupby(["device", "workload"], sort=False):
        cells = list(dict.fromkeys(own["cell"]))
        columns = (own[name].tolist() for name in ("cell", "operation", "unit", "seconds", "share_of_time", "joules"))
        spent = {
            (cell, operation, unit): (
                f"{format_quantity(seconds, 's')} ({100 * share:.3g} %)",
                format_quantity(joules, "J"),
            )
            for cell, operation, unit, seconds, share, joules in zip(*columns, strict=True)
        }
        rows = tuple(
            (f"{operation} on {unit}", tuple(spent.get((cell, operation, unit), ("", "")) for cell in cells))
            for operation, unit in dict.fromkeys(zip(own["operation"], own["unit"], strict=True))
        )
        found.append(OperationTable(f"{workload} · {device}", tuple(arms[cell] for cell in cells), rows))
    return found
