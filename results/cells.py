"""Cells of a run: what they are called, which of their trials enter a mean, and what is said of the others."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from results.graph_placement import EXPERTS_NOT_ON_ANE, PLACEMENT_NOT_TOLD
from results.records import NO_MODEL, Cell, Method
from results.runs import RunData
from results.trials import Trial
from results.units import format_share

CONTENDED = "contended"
"""The mark of a trial in whose window other processes took too much of the CPU."""
THROTTLED = "throttled"
"""The mark of a trial in which the device said that it holds itself back."""
CLOCK_LIMITS_CHANGED = "clock limits changed"
"""The mark of a trial within which, or since the idle time before it, something set other limits to the clocks."""
STOPPED = "stopped"
"""The mark of a trial in which joulebench itself was stopped for a while, by Ctrl-Z or SIGSTOP."""
CORES_NOT_KEPT = "cores not kept"
"""The mark of a trial whose threads were found elsewhere than its plan asked; its notes say where."""


CACHE_NOT_KNOWN = "prefix cache not known"
"""The mark of a trial whose engine may have held prompts of earlier requests, and does not say so."""

SERVER_BUSY = "server was busy"
"""The mark of a trial in which a server had no room for a request at first: the wait is in its times and joules, and
others had the server meanwhile."""

INTERPRETED = "computed by the interpreter"
"""The mark of a trial whose Core ML graphs were computed in numpy on this machine: its times say nothing of a Mac."""

OF_TIME_ALONE = frozenset(
    {
        CONTENDED,
        STOPPED,
        CORES_NOT_KEPT,
        CACHE_NOT_KNOWN,
        SERVER_BUSY,
        INTERPRETED,
        EXPERTS_NOT_ON_ANE,
        PLACEMENT_NOT_TOLD,
    }
)
"""Marks that keep a trial out of means of times and joules alone: its answers are no others for it."""

NO_ERROR = "no error was recorded"
"""Of a failed trial without a reason."""

WRONG_ANSWERS = "wrong answers"
"""The mark of a trial of another engine that does not answer short questions as the same weights do here."""


def trials_of(run: RunData) -> dict[str, list[Trial]]:
    """Trials by cell, in the order of their repeats."""
    found: dict[str, list[Trial]] = {cell.cell_id: [] for cell in run.cells}
    for trial in sorted(run.trials, key=attrgetter("repeat")):
        found[trial.cell_id].append(trial)
    return found


def usable(trials: Iterable[Trial]) -> list[Trial]:
    """What may enter a mean of times or joules: ok, and without marks."""
    return [t for t in trials if t.status == "ok" and not t.marks]


def by_device(run: RunData) -> dict[str, list[Trial]]:
    device_of = {cell.cell_id: cell.device for cell in run.cells}
    found: defaultdict[str, list[Trial]] = defaultdict(list)
    for trial in run.trials:
        found[device_of[trial.cell_id]].append(trial)
    return dict(found)


def answering(trials: Iterable[Trial]) -> list[Trial]:
    """What may enter an accuracy."""
    return [t for t in trials if t.status == "ok" and set(t.marks) <= OF_TIME_ALONE]


def counters_of(trials: Iterable[Trial]) -> str | None:
    """Which layers the counters of a cell are of, where others are timed; None where they are of all."""
    known = (t.counters.counted_layers for t in usable(trials) if t.counters is not None)
    return next((layers.words for layers in known if layers is not None), None)


def technique_name(cell: Cell) -> str:
    """Name, and the parameters that the plan changed: "npumoe-tg (align=8)". All of them stand in summary.csv."""
    told = cell.technique_parameters if cell.technique_changes is None else cell.technique_changes
    parameters = ", ".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in told.items())
    return f"{cell.technique} ({parameters})" if parameters else cell.technique


def counted_by(cell: Cell) -> Method:
    """How choices of experts, and what followed from them, came to be: those of a model that ran on the host are its
    own, also where a sheet priced them; where none ran, its routing was played."""
    return "modelled" if cell.model_note == NO_MODEL else "measured"


def model_name(cell: Cell) -> str:
    return f"{cell.model} ({cell.model_note})" if cell.model_note else cell.model


def data_sources(run: RunData) -> dict[str, str | None]:
    """Where each workload's items came from, as any of its trials says (a failed trial may not have got that far)."""
    workload_of = {cell.cell_id: cell.workload for cell in run.cells}
    found: dict[str, str | None] = {cell.workload: None for cell in run.cells}
    for trial in run.trials:
        found[workload_of[trial.cell_id]] = found[workload_of[trial.cell_id]] or trial.data_source
    return found


def workload_name(workload: str, source: str | None) -> str:
    """The workload, and "(sample)" where its few bundled items stood in for the data set."""
    return f"{workload} (sample)" if source == "sample" else workload


def no_room(trials: Sequence[Trial]) -> str | None:
    """ "N.S." or "oom" where that is what every trial came to."""
    found = {trial.no_room for trial in trials}
    return found.pop() if len(found) == 1 else None


def without_figures(trials: Iterable[Trial]) -> str:
    """ "3 without figures (N.S., oom)": of trials that came to a result which is none; empty where there is none."""
    found = [trial.no_room for trial in trials if trial.no_room is not None]
    return f"{len(found)} without figures ({', '.join(dict.fromkeys(found))})" if found else ""


def left_out_reason(
    trials: Sequence[Trial], with_errors: bool, kept: Callable[[Iterable[Trial]], list[Trial]] = usable
) -> str | None:
    """Which trials are not in the means and why: "1 of 5 trials failed, 2 of 5 trials left out (charging)".

    kept: which are, `usable` or `answering`.
    """
    failed = [t for t in trials if t.has_failed]
    inside = {t.trial_id for t in kept(trials)}
    marked = [t for t in trials if t.status == "ok" and t.trial_id not in inside]
    parts = list(dict.fromkeys(_first_line(t.failure.error) for t in trials if t.failure is not None and t.no_room))
    if failed:
        errors = dict.fromkeys(_first_line(t.failure.error) if t.failure else NO_ERROR for t in failed)
        parts.append(
            f"{len(failed)} of {len(trials)} trials failed" + (f" ({'; '.join(errors)})" if with_errors else "")
        )
    if marked:
        marks = dict.fromkeys(mark for t in marked for mark in t.marks)
        parts.append(f"{len(marked)} of {len(trials)} trials left out ({', '.join(marks)})")
    return ", ".join(parts) or None


def own_reason(reason: str | None, left_out: str) -> str | None:
    """A row's reason without what `left_out_reason` added to every row of its cell."""
    return (reason or "").removesuffix(left_out).removesuffix("; ") or None


def distinct(reasons: Iterable[str | None]) -> list[str]:
    """Reasons in their order, of those that differ only in their numbers just the first (one per trial is noise)."""
    kinds: dict[str, str] = {}
    for reason in filter(None, dict.fromkeys(reasons)):
        kinds.setdefault(re.sub(r"\d[\d.]*", "#", reason), reason)
    return list(kinds.values())


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"


DISTURBING_SHARE = 0.1
"""Share of the machine's CPU time that others took in a window, above which a reader is warned."""


def mark_words(trial: Trial) -> str:
    """A trial's marks, with how much of the CPU others took where that is what taints it."""
    return ", ".join(_contended_words(trial) if mark == CONTENDED else mark for mark in trial.marks)


def _contended_words(trial: Trial) -> str:
    share = format_share(trial.foreign_cpu_share) if trial.foreign_cpu_share is not None else "a part"
    n = len(trial.contention_shares)
    before = (
        f", as in {n} window{'s' if n != 1 else ''} before that {'were' if n != 1 else 'was'} thrown away" if n else ""
    )
    return f"contended: other processes took {share} of the CPU{before}"


class SharedCpu(NamedTuple):
    """n of n_of trials shared the CPU; most: the largest share that others took."""

    n: int
    n_of: int
    most: float

    def words(self, whose: str = "trials") -> str:
        return (
            f"{self.n} of {self.n_of} {whose} shared the CPU: other processes took up to"
            f" {format_share(self.most)} of it; their times and joules are disturbed"
        )


def shared_cpu(trials: Iterable[Trial]) -> SharedCpu | None:
    """None where no trial was disturbed."""
    return shared_by([t.foreign_cpu_share for t in trials if t.foreign_cpu_share is not None])


def shared_by(shares: Sequence[float]) -> SharedCpu | None:
    """shares: that others took, of each trial."""
    n = sum(share > DISTURBING_SHARE for share in shares)
    return SharedCpu(n, len(shares), max(shares)) if n else None
