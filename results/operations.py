"""What a modelled window was spent on: seconds and joules by operation and unit, in the form of Table 4 of 000-npumoe.

From what the trial stored: which operations ran and when each began, and the meter's joules at every boundary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from results.cells import trials_of, usable
from results.ran_operations import StoredOperations, joules_of_operations, stored_operations
from results.records import PowerTrace
from results.runs import RunData
from results.trace_files import TraceFileError

EXTRAPOLATED: Final = "extrapolated beyond what the sheet was fitted on"
_COLUMNS = (
    "cell", "device", "engine", "technique", "model", "workload", "operation", "runs_on", "n", "seconds",
    "share_of_time", "joules", "seconds_outside_fit", "first_start_s", "last_end_s", "waited_s", "trial", "method",
)  # fmt: skip


class Spent(NamedTuple):
    """n: how many ran. seconds: of the unit. joules: of the unit, and communication, which units that work at the same
    time share alike. outside_s: of the seconds, those of launches unlike all that their price was fitted on: they are
    extrapolated. None where that was not kept, or where nothing was fitted. joules: None where they are missing.
    first_start_s, last_end_s: since the first operation of the window. waited_s: in which the unit or link was free and
    waited for what the operations name: 0 where they name none."""

    operation: str
    unit: str
    n: int
    seconds: float
    joules: float | None
    outside_s: float | None = None
    first_start_s: float = 0.0
    last_end_s: float = 0.0
    waited_s: float = 0.0


def operations_table(run: RunData) -> pd.DataFrame:
    """One row for each modelled cell, operation and unit, of the cell's first window; in the order in which they ran.

    share_of_time: of the window, as in `results.resources`: those of units that work at the same time add up to more
    than 1, and launching, in which nothing works, is in none.
    A window whose file cannot be read has none, and is noted in `run.lost_traces`.
    """
    trials, rows = trials_of(run), []
    for cell in run.cells:
        own = next((t for t in usable(trials[cell.cell_id]) if t.time_method == "modelled"), None)
        if own is None:
            continue
        try:
            ran = stored_operations(run.load_parts(own.trial_id))
        except TraceFileError as error:
            run.lost_traces[own.trial_id] = str(error)
            continue
        if ran is None:
            continue
        begin_s, end_s = ran.window
        window_s = end_s - begin_s
        rows += [
            (cell.cell_id, cell.device, cell.engine, cell.technique, cell.model, cell.workload, one.operation, one.unit,
             one.n, one.seconds, one.seconds / window_s if window_s else None, one.joules, one.outside_s,
             one.first_start_s, one.last_end_s, one.waited_s, own.trial_id, own.time_method)
            for one in _spent(ran)
        ]  # fmt: skip
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype({"joules": "float64", "seconds_outside_fit": "float64"})


def outside_share(operations: pd.DataFrame, cells: Collection[str]) -> float | None:
    """Of the cells' modelled seconds, the share of launches unlike all that their price was fitted on.

    operations: of `operations_table`. None where it is not known of one of them.
    """
    own = operations[operations["cell"].isin(list(cells))]
    whole_s = float(own["seconds"].sum())
    known = own.dropna(subset=["seconds_outside_fit"])["cell"].nunique()
    return float(own["seconds_outside_fit"].sum()) / whole_s if whole_s and known == len(set(cells)) else None


def share_words(share: float) -> str:
    return "< 1 %" if 0 < share < 0.005 else "> 99 %" if 0.995 < share < 1 else f"{100 * share:.0f} %"


def extrapolation_notes(operations: pd.DataFrame) -> list[str]:
    """A line for each modelled device and workload with launches unlike all that their price was fitted on."""
    found = []
    for device, workload in dict.fromkeys(zip(operations["device"], operations["workload"], strict=True)):
        own = operations[(operations["device"] == device) & (operations["workload"] == workload)]
        shares = {
            engine: outside_share(own, cells["cell"].unique()) for engine, cells in own.groupby("engine", sort=False)
        }
        told = "; ".join(f"{engine} {share_words(share)}" for engine, share in shares.items() if share)
        if told:
            found.append(f"{device} · {workload}: {EXTRAPOLATED}, of its modelled seconds: {told}.")
    return found


def spent_by_operation(parts: Mapping[str, Sequence[PowerTrace]]) -> list[Spent]:
    """Empty where no operations were kept. Raises `TraceFileError` where their list is damaged."""
    ran = stored_operations(parts)
    return [] if ran is None else _spent(ran)


def _spent(ran: StoredOperations) -> list[Spent]:
    names = [ran.names[place] for place in ran.places.tolist()]
    seconds, begin_s = ran.ends_s - ran.starts_s, ran.starts_s.min()
    spent = pd.DataFrame(
        {
            "operation": [operation for operation, _ in names],
            "unit": [unit for _, unit in names],
            "seconds": seconds,
            "joules": joules_of_operations(ran),
            "outside_s": seconds * ran.is_outside[ran.places],
            "start_s": ran.starts_s - begin_s,
            "end_s": ran.ends_s - begin_s,
            "waited_s": ran.waited_s,
        }
    )
    grouped = spent.groupby(["operation", "unit"], sort=False)
    summed = grouped[["seconds", "joules", "outside_s"]].sum(min_count=1)
    spans = grouped.agg({"start_s": "min", "end_s": "max", "waited_s": "sum"})
    return [
        Spent(
            operation,
            unit,
            n,
            seconds,
            None if np.isnan(joules) else joules,
            None if np.isnan(outside_s) else outside_s,
            *span,
        )
        for (operation, unit), n, (seconds, joules, outside_s), span in zip(
            summed.index.tolist(),
            grouped.size().tolist(),
            summed.to_numpy().tolist(),
            spans.to_numpy().tolist(),
            strict=True,
        )
    ]
