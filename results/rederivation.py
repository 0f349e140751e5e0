"""A run's joules derived again from its raw records, and what that changes in what its tables say.

A trial whose traces are lost keeps what was derived when it ran, and the digest of the code that did so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from results.cells import trials_of, usable
from results.cpu_time import foreign_share, with_cpu_joules
from results.derivation import arithmetic_digest, energies_of, remarks_on
from results.runs import RunData
from results.tables import tidy
from results.trace_files import WINDOW, TraceFileError
from results.trial_traces import NO_TRACES
from results.trials import Trial

SAME = 1e-12
"""Relative difference below which a figure is the same: its sum was rounded in another order."""


DERIVED = ("energy", "idle", "foreign_cpu_share")
"""Of a trial: what follows from its raw records."""


class Change(NamedTuple):
    """One figure of the tables. None: there was none, or there is none now."""

    cell: str
    """Its label."""
    metric: str
    """With its phase and meter."""
    unit: str
    stored: float | None
    now: float | None


class Rederived(NamedTuple):
    """run: with the new figures. n_changed: trials of which any differs, of the n_derived."""

    run: RunData
    changes: tuple[Change, ...]
    n_derived: int
    n_changed: int
    kept: tuple[str, ...]
    """Trials whose traces are lost, and why."""


def rederived(run: RunData) -> Rederived:
    """Everything that follows from raw records, anew. What is lost is noted in `run.lost_traces` too."""
    label_of = {cell.cell_id: cell.label for cell in run.cells}
    trials: list[Trial] = []
    kept: list[str] = []
    n_derived = n_changed = 0
    for trial in run.trials:
        again, why_kept = _again(run, trial)
        trials.append(again)
        if why_kept is not None:
            kept.append(f"{label_of[trial.cell_id]}, repeat {trial.repeat}: {why_kept}")
            run.lost_traces[trial.trial_id] = why_kept
        elif trial.energy or again.energy:
            n_derived += 1
        n_changed += any(getattr(again, name) != getattr(trial, name) for name in DERIVED)
    now = replace(run, trials=tuple(trials), load_traces=lambda i: with_cpu_joules(run.load_parts(i), WINDOW))
    changes = tuple(_changes(run, now)) if n_changed else ()
    return Rederived(now, changes, n_derived, n_changed, tuple(kept))


def derivation_notes(run: RunData) -> list[str]:
    """What a reader must know of joules that other code than this derived."""
    metered = [t for t in run.trials if t.energy]
    others = sum(t.derived_by != arithmetic_digest() for t in metered)
    if not others:
        return []
    return [
        f"the joules of {others} of {len(metered)} trials were derived by another version of joulebench;"
        " `joulebench report DIR --rederive` derives them again and says what changes."
    ]


def _again(run: RunData, trial: Trial) -> tuple[Trial, str | None]:
    """(the trial, derived again where it can be; why it cannot, where it has joules)."""
    if trial.window_start_s is None or trial.window_end_s is None:
        return trial, None
    try:
        parts = run.load_parts(trial.trial_id)
        window = (trial.window_start_s, trial.window_end_s)
        found = energies_of(trial.completions, parts, window) if parts.get(WINDOW) else None
    except TraceFileError as error:
        return trial, str(error)
    share = foreign_share(trial.cpu_before, trial.cpu_after)
    shared = {} if share is None else {"foreign_cpu_share": share}
    if found is None:
        return trial.model_copy(update=shared), NO_TRACES if trial.energy else None
    remarks = remarks_on(trial.energy)
    notes = (*(note for note in trial.notes if note not in remarks), *remarks_on(found.readings))
    changed = {"energy": found.readings, "idle": found.idle, "derived_by": arithmetic_digest(), "notes": notes}
    return trial.model_copy(update=changed | shared), None


def _changes(stored: RunData, now: RunData) -> Iterator[Change]:
    before, after = _figures(stored), _figures(now)
    for key in dict.fromkeys([*before, *after]):
        (was, _), (has, _) = before.get(key, (None, "")), after.get(key, (None, ""))
        if was is None or has is None or not math.isclose(was, has, rel_tol=SAME):
            unit = (before.get(key) or after[key])[1]
            yield Change(key[0], ", ".join(word for word in key[1:] if word), unit, was, has)


def _figures(run: RunData) -> dict[tuple[str, ...], tuple[float, str]]:
    """(mean, unit) by cell, metric, phase, meter and method: all that a table has a figure of, and components."""
    label_of = {cell.cell_id: cell.label for cell in run.cells}
    found: dict[tuple[str, ...], tuple[float, str]] = {}
    for row in tidy(run).to_dict("records"):
        if not math.isnan(row["mean"]):
            key = (label_of[row["cell"]], row["metric"], row["phase"] or "", row["meter"] or "", row["method"])
            found[key] = row["mean"], row["unit"]
    for cell_id, trials in trials_of(run).items():
        parts: dict[tuple[str, ...], list[float]] = {}
        for reading in (r for t in usable(trials) for r in t.energy if r.component != "total"):
            if reading.energy_j is not None:
                key = (label_of[cell_id], f"energy of {reading.component}", "", reading.meter, reading.method)
                parts.setdefault(key, []).append(reading.energy_j)
        shares = [t.foreign_cpu_share for t in usable(trials) if t.foreign_cpu_share is not None]
        if shares:
            found[label_of[cell_id], "CPU time of others"] = 100 * math.fsum(shares) / len(shares), "%"
        found |= {key: (math.fsum(own) / len(own), "J") for key, own in parts.items()}
    return found
