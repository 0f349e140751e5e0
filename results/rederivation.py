"""A run's joules derived again from its raw records, and what that changes in what its tables say.

A trial whose traces are lost keeps what was derived when it ran, and the digest of the code that did so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from results.cells import trials_of, usable
from results.cpu_time import foreign_share, with_cpu_joules
from results.derivation import PricedBy, derived_by, energies_of, is_by_this_code, remarks_on
from results.in_step import is_met_alike, met_alike
from results.records import PowerTrace
from results.runs import RunData
from results.tables import tidy
from results.trace_files import WINDOW, TraceFileError
from results.trial_traces import NO_TRACES
from results.trials import Trial


class NotDerivedAgainError(TraceFileError):
    """Raw records are there, and do not tell what would have come out: the trial keeps what was derived when it ran."""


SAME = 1e-9
"""Relative difference below which a figure is the same: its sum was rounded in another order."""
Parts = Mapping[str, Sequence[PowerTrace]]


class Again(NamedTuple):
    """A trial whose computed records were made again. priced_by: None of a machine that was read."""

    trial: Trial
    parts: Parts
    priced_by: PricedBy | None = None


Computed = Callable[[Trial, Parts], Again]
"""What was computed and not read, computed again before joules are derived: a modelled trial at its sheet's prices."""

DERIVED = ("energy", "idle", "foreign_cpu_share", "completions", "window_end_s")
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


def rederived(run: RunData, again: Computed = Again) -> Rederived:
    """Everything that follows from raw records, anew. What is lost is noted in `run.lost_traces` too.

    A trial that comes out the same keeps its figures and traces as they are: sums in another order end in other digits.
    """
    by_id = {trial.trial_id: trial for trial in run.trials}
    label_of = {cell.cell_id: cell.label for cell in run.cells}
    trials: list[Trial] = []
    kept: dict[str, str] = {}
    derived: set[str] = set()
    changed: set[str] = set()
    for trial in run.trials:
        now, why_kept = _derived(run, trial, again)
        if why_kept is not None:
            kept[trial.trial_id] = f"{label_of[trial.cell_id]}, trial {trial.repeat + 1}: {why_kept}"
        elif trial.energy or now.energy:
            derived.add(trial.trial_id)
        if _are_same(now, trial):
            now = trial.model_copy(update={"derived_by": now.derived_by, "notes": now.notes})
        else:
            changed.add(trial.trial_id)
        trials.append(now)

    def load_parts(trial_id: str) -> Mapping[str, tuple[PowerTrace, ...]]:
        parts = run.load_parts(trial_id)
        if trial_id not in changed:
            return parts
        return {part: tuple(own) for part, own in again(by_id[trial_id], parts).parts.items()}

    def load_traces(trial_id: str) -> tuple[PowerTrace, ...]:
        return with_cpu_joules(load_parts(trial_id), WINDOW) if trial_id in changed else run.load_traces(trial_id)

    new = replace(
        run,
        trials=tuple(trials),
        load_traces=load_traces,
        load_parts=load_parts,
        derived_again=frozenset(derived),
        remarks=(*run.remarks, *_kept_remarks(kept, run)),
    )
    changes = tuple(_changes(run, new)) if changed else ()
    return Rederived(new, changes, len(derived), len(changed), tuple(kept.values()))


def _kept_remarks(kept: Mapping[str, str], run: RunData) -> Iterator[str]:
    """Of trials whose traces are not lost; of those that are, `results.trial_traces` tells."""
    others = [why for trial_id, why in kept.items() if trial_id not in run.lost_traces]
    if others:
        yield f"the figures of {len(others)} of {len(run.trials)} trials are those of when they ran ({others[0]})."


def purpose_words(device: str, only_for: str) -> str:
    return f"{device}: its sheet is only for {only_for}; take no figure here for that machine."


def derivation_notes(run: RunData) -> list[str]:
    """What a reader must know of joules that other code than this derived, or another sheet priced."""
    told = [*run.remarks, *(purpose_words(device, only_for) for device, only_for in run.info.only_for.items())]
    metered = [t for t in run.trials if t.energy]
    others = sum(not is_by_this_code(t.derived_by) for t in metered)
    if not others:
        return told
    remedy = "`joulebench report DIR --rederive` derives them again and says what changes"
    if run.derived_again:
        remedy = "they could not be derived again"
    return [
        *told,
        f"the joules of {others} of {len(metered)} trials were derived by another version of joulebench; {remedy}.",
    ]


def _derived(run: RunData, trial: Trial, again: Computed) -> tuple[Trial, str | None]:
    """(the trial, derived again where it can be; why it cannot, where it has joules)."""
    if trial.window_start_s is None or trial.window_end_s is None:
        return trial, None
    try:
        new, parts, priced_by = again(trial, run.load_parts(trial.trial_id))
        window = (trial.window_start_s, new.window_end_s or trial.window_end_s)
        found = energies_of(new.completions, parts, window) if parts.get(WINDOW) else None
    except NotDerivedAgainError as error:
        return trial, str(error)
    except TraceFileError as error:
        run.lost_traces[trial.trial_id] = str(error)
        return trial, str(error)
    share = foreign_share(trial.cpu_before, trial.cpu_after)
    shared = {} if share is None else {"foreign_cpu_share": share}
    if found is None:
        if trial.energy:
            run.lost_traces[trial.trial_id] = NO_TRACES
        return trial.model_copy(update=shared), NO_TRACES if trial.energy else None
    remarks = remarks_on(trial.energy)
    kept = (note for note in trial.notes if note not in remarks and not is_met_alike(note))
    alike = met_alike(with_cpu_joules(parts, WINDOW), new.completions, found.readings)
    notes = (*kept, *remarks_on(found.readings), *alike)
    changed: dict[str, object] = {"energy": found.readings, "idle": found.idle, "notes": notes}
    changed |= {"derived_by": derived_by(priced_by)}
    return new.model_copy(update=changed | shared), None


def _are_same(trial: Trial, other: Trial) -> bool:
    for name in DERIVED:
        one, two = getattr(trial, name), getattr(other, name)
        if one != two and not _is_close(trial.model_dump(include={name}), other.model_dump(include={name})):
            return False
    return True


def _is_close(one: Any, two: Any) -> bool:
    """The same words, and numbers that differ by rounding only."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_is_close(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(map(_is_close, one, two))
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=SAME)
    return bool(one == two)


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
