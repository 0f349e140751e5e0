"""What units and links of a modelled machine did in a window: busy, waiting, idle, overlap, and joules of each state.

From the operations that the trial stored and its joules at every boundary; `results.resource_use` says what the words
mean. By phase too: a phase is the stretches of `results.derivation.phase_intervals`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from results.cells import trials_of, usable
from results.derivation import phase_intervals
from results.operations import share_words
from results.ran_operations import StoredOperations, joules_of_operations, stored_operations
from results.records import BACK, COMM, PHASES, PowerTrace
from results.resource_use import Curve, MachineUse, Ran, ResourceUse, StateJoules, joules_by_state, machine_use
from results.runs import RunData
from results.trace_files import TraceFileError
from results.trials import Trial

UNIT_KINDS = ("cpu", "npu", "gpu", "ndp", "rank", "core")
_COLUMNS = (
    "cell", "device", "engine", "technique", "model", "workload", "phase", "resource", "window_s", "busy_s",
    "waiting_s", "idle_s", "overlap_s", "busy_share", "waiting_share", "idle_share", "overlap_share", "busy_joules",
    "waiting_joules", "idle_joules", "trial", "method",
)  # fmt: skip


class ResourceRow(NamedTuple):
    """Of a unit, a direction of a link, or what all units share, in a phase. use: None of the last, which has joules
    and no work of its own. joules: None where they are missing."""

    phase: str
    resource: str
    window_s: float
    use: ResourceUse | None
    joules: StateJoules | None


def resources_table(run: RunData) -> pd.DataFrame:
    """One row for each modelled cell, phase and resource, of the cell's first window.

    A window whose file cannot be read has none, and is noted in `run.lost_traces`.
    """
    trials, rows = trials_of(run), []
    for cell in run.cells:
        own = next((t for t in usable(trials[cell.cell_id]) if t.time_method == "modelled"), None)
        if own is None:
            continue
        try:
            found = resources_of(own, run.load_parts(own.trial_id))
        except TraceFileError as error:
            run.lost_traces[own.trial_id] = str(error)
            continue
        named = (cell.cell_id, cell.device, cell.engine, cell.technique, cell.model, cell.workload)
        for row in found:
            use = row.use
            seconds = 4 * (None,) if use is None else (use.busy_s, use.waiting_s, use.idle_s, use.overlap_s)
            shares = (None if one is None or not row.window_s else one / row.window_s for one in seconds)
            joules = (None, None, None) if row.joules is None else row.joules
            rows.append(
                (*named, row.phase, row.resource, row.window_s, *seconds, *shares, *joules, own.trial_id, "modelled")
            )
    numbers = {name: "float64" for name in _COLUMNS if name.endswith(("_s", "_share", "_joules"))}
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype(numbers)


def shown_resource(resource: str) -> str:
    """A direction of a link in words."""
    return f"{resource.removesuffix(BACK)} (back)" if resource.endswith(BACK) else resource


def resource_notes(frame: pd.DataFrame) -> list[str]:
    """For a terminal, of `resources_table`: how busy what was, a line for each modelled device and workload."""
    found = []
    whole = frame[(frame["phase"] == "all") & frame["busy_s"].notna()]
    for (device, workload), own in whole.groupby(["device", "workload"], sort=False):
        busy: dict[str, list[str]] = {}
        for arm, resource, share in zip(own["engine"], own["resource"], own["busy_share"], strict=True):
            busy.setdefault(arm, []).append(f"{shown_resource(resource)} {share_words(share)}")
        told = "; ".join(f"{arm}: {', '.join(shares)}" for arm, shares in busy.items())
        found.append(f"{device} · {workload}: busy, of the window: {told}.")
    return found


def resources_of(trial: Trial, parts: Mapping[str, Sequence[PowerTrace]]) -> list[ResourceRow]:
    """Of one modelled trial; empty where its operations were not kept. Raises `TraceFileError`."""
    stored = stored_operations(parts)
    if stored is None:
        return []
    begin_s, end_s = trial.window_start_s, trial.window_end_s
    window = stored.window if begin_s is None or end_s is None else (begin_s, end_s)
    spans_of = phase_intervals(trial.completions, window)
    ran, views = stored.ran(), _views(stored)
    found = []
    for phase in PHASES:
        spans = spans_of[phase]
        if not spans:
            continue
        use = _sum_of_uses([machine_use(ran, *span) for span in spans])
        joules = _sum_of_joules([joules_by_state(view, *span, curves) for span in spans for view, curves in views])
        for resource in sorted({*ran.resources, *joules}, key=resource_place):
            own = joules.get(resource)
            known = None if own is None or np.isnan([*own]).any() else own
            if resource in ran.resources or (known is not None and any(known)):
                found.append(ResourceRow(phase, resource, use.window_s, _seconds(use, resource), known))
    return found


def resource_place(resource: str) -> tuple[int, str, int, str]:
    """Units first, by number; then links; then what all share."""
    kind, _, number = resource.partition(":")
    n = int(number) if number.isdecimal() else -1
    return (2 if resource == COMM else 0 if kind in UNIT_KINDS else 1), kind, n, number


def _seconds(use: MachineUse, resource: str) -> ResourceUse | None:
    return None if resource == COMM else use.of(resource)


def _views(stored: StoredOperations) -> list[tuple[Ran, dict[str, Curve]]]:
    """Operations, and the counters that are read over them: each unit's and link's own over all operations; what all
    units share, over those of units alone."""
    ran = stored.ran()
    is_transfer = np.array(stored.is_transfer, dtype=np.bool_)[stored.places]
    counters = {one.component: (one.times_s, one.values) for one in stored.counters}
    of_links = {ran.resources[place] for place in np.unique(ran.resource_P[is_transfer]).tolist()}
    own = {name: curve for name, curve in counters.items() if name in ran.resources and name not in of_links}
    shared = {name: curve for name, curve in counters.items() if name not in {*own, *of_links}}
    by_unit = _only(ran, ~is_transfer)
    directions = {name: _so_far(stored, ran, name) for name in of_links}
    return [(ran, own | directions), (by_unit, shared)]


def _only(ran: Ran, kept: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Ran:
    return replace(ran, resource_P=ran.resource_P[kept], start_P=ran.start_P[kept], end_P=ran.end_P[kept])


def _so_far(stored: StoredOperations, ran: Ran, resource: str) -> Curve:
    """Joules of one direction of a link: its counter has both."""
    own = ran.resource_P == ran.resources.index(resource)
    joules = joules_of_operations(stored, shared=False)[own]
    so_far = np.concatenate([[0.0], np.cumsum(joules)])
    times_s = np.stack([ran.start_P[own], ran.end_P[own]], axis=1).reshape(-1)
    return times_s, np.stack([so_far[:-1], so_far[1:]], axis=1).reshape(-1)


def _sum_of_uses(uses: Sequence[MachineUse]) -> MachineUse:
    whole = uses[0]
    for one in uses[1:]:
        whole = whole + one
    return whole


def _sum_of_joules(found: Sequence[Mapping[str, StateJoules]]) -> dict[str, StateJoules]:
    whole: dict[str, StateJoules] = {}
    for one in found:
        for name, joules in one.items():
            before = whole.get(name, StateJoules(0.0, 0.0, 0.0))
            whole[name] = StateJoules(*(a + b for a, b in zip(before, joules, strict=True)))
    return whole
