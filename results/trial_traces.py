"""A trial's raw traces for tables and pages: one damaged file costs what is made of it, and nothing else."""

from __future__ import annotations

from typing import NamedTuple

from results.frozen_power import may_stand
from results.packed import column_of
from results.records import PowerTrace
from results.runs import RunData
from results.trace_files import IDLE_AFTER, IDLE_BEFORE, TraceFileError
from results.trials import Trial

NO_TRACES = "the trial has no trace file"
LOST_TRACES = "the trial's trace file is damaged, absent or another trial's; its joules as a whole stand"


class TrialTraces(NamedTuple):
    """meter: the trial's first, None where none was read. lost: why there are no traces, where there should be.

    rests: of the idle times before and after it, where a sensor shows one value for so long that it may stand still.
    """

    meter: str | None
    traces: tuple[PowerTrace, ...] = ()
    lost: str | None = None
    rests: tuple[tuple[PowerTrace, ...], tuple[PowerTrace, ...]] = ((), ())


def traces_of(run: RunData, trial: Trial) -> TrialTraces:
    """What a trial's meters read in its window; joules that were derived when it ran stand without it."""
    meter = next(iter(column_of(trial.energy, "meter")), None)
    if meter is None:
        return TrialTraces(None)
    try:
        traces = run.load_traces(trial.trial_id)
        parts = run.load_parts(trial.trial_id) if any(may_stand(t) for t in traces) else {}
        rests = (parts.get(IDLE_BEFORE, ()), parts.get(IDLE_AFTER, ()))
        return TrialTraces(meter, traces, None if traces else NO_TRACES, rests)
    except TraceFileError as error:
        run.lost_traces[trial.trial_id] = str(error)
        return TrialTraces(meter, lost=LOST_TRACES)


def lost_trace_notes(run: RunData) -> list[str]:
    """What a reader must know of traces that could not be read; to be asked once they were."""
    if not run.lost_traces:
        return []
    n, first = len(run.lost_traces), next(iter(run.lost_traces.values()))
    return [
        f"the traces of {n} of {len(run.trials)} trials are lost ({first}); the joules of these trials stand, those of"
        " their single requests are missing."
    ]


def meter_notes(run: RunData) -> dict[tuple[str, str], str]:
    """By device and meter: what a device's meters say of themselves, from its first trial with energy."""
    notes: dict[tuple[str, str], str] = {}
    seen = set()
    device_of = {cell.cell_id: cell.device for cell in run.cells}
    for trial in run.trials:
        device = device_of[trial.cell_id]
        own = TrialTraces(None) if device in seen else traces_of(run, trial)
        if own.meter is None or own.lost:
            continue
        seen.add(device)
        for trace in own.traces:
            if trace.note:
                notes.setdefault((device, trace.meter), trace.note)
    return notes
