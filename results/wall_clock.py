"""The wall clock of a run: dates come from it, and nothing else. That it went back is told, for it orders a history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from results.records import Cell
from results.trials import Trial
from results.units import format_long_duration

LEAST_S = 1.0
"""Clocks are set by less all the time, and two machines of a fleet may differ by it."""


def told_set_back(cells: Iterable[Cell], trials: Iterable[Trial]) -> tuple[str, ...]:
    """What a reader must know where a device's later trial has the earlier date. trials: in the order of their ends.

    A trial that never ran is dated by who gave it up: of a fleet that is another machine.
    """
    device_of: Mapping[str, str] = {cell.cell_id: cell.device for cell in cells}
    latest: dict[str, datetime] = {}
    told: dict[str, tuple[float, str, str]] = {}
    for trial in trials:
        at = _date_of(trial)
        if at is None:
            continue
        device = device_of[trial.cell_id]
        before = latest.get(device)
        back_s = 0.0 if before is None else (before - at).total_seconds()
        if before is not None and back_s > LEAST_S and back_s > told.get(device, (0.0,))[0]:
            told[device] = back_s, before.isoformat(" ", "seconds"), at.isoformat(" ", "seconds")
        latest[device] = at
    return tuple(
        f"the wall clock of {device} went back by {format_long_duration(back_s)} within the run: a trial began at"
        f" {before}, and the one after it at {after}. Times and joules are by another clock; the run's date, by which"
        " a history orders it, may be wrong."
        for device, (back_s, before, after) in told.items()
    )


def _date_of(trial: Trial) -> datetime | None:
    if trial.window_start_s is None:
        return None
    try:
        at = datetime.fromisoformat(trial.started_at)
    except ValueError:
        return None
    return at if at.tzinfo else at.replace(tzinfo=UTC)
