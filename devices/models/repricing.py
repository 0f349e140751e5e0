"""A modelled trial at the prices of another sheet, or of the same one as it is now: no new run.

The operations that ran are run again on a timeline of their own; stamps of requests move to where the same operations
stand there. What the first sheet decided stays as it was: which unit took what, and which graphs were too large for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from devices.models.device import TimelineMeter
from devices.models.operations import Ran, operations_of
from devices.models.sheet import Sheet
from devices.models.timeline import Timeline
from results.records import Completion, PowerTrace
from results.rederivation import NotDerivedAgainError
from results.trace_files import IDLE_AFTER, IDLE_BEFORE, WINDOW, raw_part
from results.trials import Trial

Parts = Mapping[str, Sequence[PowerTrace]]
ARRIVE = "its requests arrive by themselves, and would wait otherwise at other prices; run it again"


def repriced(trial: Trial, parts: Parts, sheet: Sheet) -> tuple[Trial, Parts]:
    """(the trial on the new timeline, its traces). As it was, where its operations were not kept.

    Raises `DeviceError` where the sheet lacks a price, `TraceFileError` where what ran cannot be read,
    `NotDerivedAgainError` where it cannot be replayed.
    """
    ran = operations_of(parts)
    if ran is None or trial.window_start_s is None or trial.window_end_s is None:
        return trial, parts
    if any(c.arrival_s is not None for c in trial.completions):
        raise NotDerivedAgainError(ARRIVE)
    timeline = Timeline(sheet)
    timeline.sleep_until_s(trial.window_start_s)
    window, again = _metered(timeline, ran)
    now_s: list[float] = [*_line_s(timeline), timeline.now_s()]
    then_s: list[float] = ran.starts_s[~np.array([one.aside for one in ran.distinct])[ran.places]].tolist()

    def moved(at_s: float) -> float:
        """Where the first operation of the line from that stamp on begins now; behind the last one, its end."""
        return now_s[bisect_left(then_s, at_s)]

    completions = tuple(_moved(completion, moved) for completion in trial.completions)
    new = trial.model_copy(update={"completions": completions, "window_end_s": moved(trial.window_end_s)})
    idle = {part: _idle(parts[part], sheet) for part in (IDLE_BEFORE, IDLE_AFTER) if parts.get(part)}
    return new, {**parts, **idle, WINDOW: window, raw_part(WINDOW): again}


def _metered(timeline: Timeline, ran: Ran) -> tuple[Sequence[PowerTrace], Sequence[PowerTrace]]:
    """(joules, the operations as they stand on the timeline)."""
    meter = TimelineMeter(timeline)
    meter.start()
    timeline.run(ran.program())
    return meter.stop(), meter.raw_traces()


def _line_s(timeline: Timeline) -> list[float]:
    """When the operations began that the clock waits for: those aside may begin long after they were asked."""
    starts_s, places, distinct = timeline.operations(0)
    found: list[float] = starts_s[~np.array([one.aside for one, _ in distinct])[places]].tolist()
    return found


def _idle(traces: Sequence[PowerTrace], sheet: Sheet) -> Sequence[PowerTrace]:
    """The same time of doing nothing."""
    timeline = Timeline(sheet)
    timeline.sleep_until_s(float(traces[0].times_s[0]))
    meter = TimelineMeter(timeline)
    meter.start()
    timeline.sleep_until_s(float(traces[0].times_s[-1]))
    return meter.stop()


def _moved(completion: Completion, moved: Callable[[float], float]) -> Completion:
    return completion.model_copy(
        update={
            "start_s": moved(completion.start_s),
            "prefill_end_s": moved(completion.prefill_end_s),
            "end_s": moved(completion.end_s),
            "token_times_s": tuple(map(moved, completion.token_times_s)),
        }
    )
