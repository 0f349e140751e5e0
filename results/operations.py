"""What a modelled window was spent on: seconds and joules by operation and unit, in the form of Table 4 of 000-npumoe.

From what the trial stored: which operations ran and when each began, and the meter's joules at every boundary.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from results.cells import trials_of, usable
from results.records import BACK, PowerTrace
from results.runs import RunData
from results.trace_files import WINDOW, TraceFileError, raw_part

OPERATIONS: Final = "operations"
"""The component under which a trace of operations is stored: values are places in the list of its basis."""
ORDER: Final = "order of operations"
"""Beside it, where operations name others: of each of them, which in turn it was asked."""
WAITED: Final = "waits of operations"
"""Beside it then too: seconds in which the unit or link of each was free and waited for what it names."""
SECONDS: Final = "seconds"
"""In that list: how long the operation takes. Stores of before lack it; no units worked at the same time there."""
FITTED: Final = "fitted"
"""In that list: whether the rows that its price was fitted on had any such; None of a price that no rows were fitted
to. Stores of before lack it."""
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

    A window whose file cannot be read has none, and is noted in `run.lost_traces`.
    """
    trials, rows = trials_of(run), []
    for cell in run.cells:
        own = next((t for t in usable(trials[cell.cell_id]) if t.time_method == "modelled"), None)
        if own is None:
            continue
        try:
            spent = spent_by_operation(run.load_parts(own.trial_id))
        except TraceFileError as error:
            run.lost_traces[own.trial_id] = str(error)
            continue
        whole_s = sum(one.seconds for one in spent)
        rows += [
            (cell.cell_id, cell.device, cell.engine, cell.technique, cell.model, cell.workload, one.operation, one.unit,
             one.n, one.seconds, one.seconds / whole_s if whole_s else None, one.joules, one.outside_s,
             one.first_start_s, one.last_end_s, one.waited_s, own.trial_id, own.time_method)
            for one in spent
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
    kept = [trace for trace in parts.get(raw_part(WINDOW), ()) if trace.component == OPERATIONS]
    waits = [trace for trace in parts.get(raw_part(WINDOW), ()) if trace.component == WAITED]
    counters = [trace for trace in parts.get(WINDOW, ()) if trace.kind == "counter" and trace.additive]
    if not kept or not counters:
        return []
    places, starts_s = kept[0].values.astype(np.int64), kept[0].times_s
    try:
        listed = json.loads(kept[0].basis or "")
        names = [(str(one["name"]), str(one["unit"])) for one in listed]
        taken_s = np.array([float(one.get(SECONDS, np.nan)) for one in listed])
        fitted = [one.get(FITTED) for one in listed]
        is_outside = np.array([np.nan if one is None else float(not one) for one in fitted])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceFileError(f"the list of operations cannot be read ({error})") from error
    if np.any((places < 0) | (places >= len(names))):
        raise TraceFileError(f"an operation is none of the {len(names)} that are listed")
    if np.any(taken_s < 0):
        raise TraceFileError("an operation is listed as taking less than no time")
    ends_s = starts_s + taken_s[places]
    if np.isnan(ends_s).any():
        # Ends at the next boundary, before any waiting; where the next one begins at once, it took no time.
        edges_s = counters[0].times_s
        next_s = np.append(starts_s[1:], edges_s[-1])
        following = np.minimum(np.searchsorted(edges_s, starts_s, side="right"), len(edges_s) - 1)
        ends_s = np.minimum(next_s, edges_s[following])
    units = [names[place][1] for place in places.tolist()]
    drawn_by = np.array([unit.removesuffix(BACK) for unit in units])
    spent = pd.DataFrame(
        {
            "operation": [names[place][0] for place in places.tolist()],
            "unit": units,
            "seconds": ends_s - starts_s,
            "joules": _joules(counters, starts_s, ends_s, drawn_by),
            "outside_s": (ends_s - starts_s) * is_outside[places],
            "start_s": starts_s - starts_s.min(),
            "end_s": ends_s - starts_s.min(),
            "waited_s": waits[0].values if waits else 0.0,
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


def _joules(
    counters: Sequence[PowerTrace], starts_s: NDArray[np.float64], ends_s: NDArray[np.float64], units: NDArray[np.str_]
) -> NDArray[np.float64]:
    """Of each operation: its unit's own counter meanwhile, and its part of the counters that are no unit's.

    NaN of a unit whose joules are missing. Where nothing ran on that unit, nobody has a part of them.
    """
    joules = np.zeros(len(starts_s))
    for counter in counters:
        is_own = units == counter.component
        if np.isnan(counter.values).all() and not is_own.any():
            continue
        if is_own.any():
            at_start, at_end = (np.interp(at_s[is_own], counter.times_s, counter.values) for at_s in (starts_s, ends_s))
            joules[is_own] += at_end - at_start
            continue
        edges_s = np.unique(np.concatenate([counter.times_s, starts_s, ends_s]))
        middle_s = (edges_s[1:] + edges_s[:-1]) / 2
        n_working = np.searchsorted(np.sort(starts_s), middle_s) - np.searchsorted(np.sort(ends_s), middle_s)
        shared_j = np.diff(np.interp(edges_s, counter.times_s, counter.values)) / np.maximum(n_working, 1)
        so_far_j = np.concatenate([[0.0], np.cumsum(shared_j)])
        joules += np.interp(ends_s, edges_s, so_far_j) - np.interp(starts_s, edges_s, so_far_j)
    return joules
