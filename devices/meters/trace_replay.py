"""Plays a trace file back in place of a meter: the window of a recording, or of a trial, with everything it was.

Kinds, update periods, gains and notes are those of the meter that was recorded, so that the same reading gives the same
joules with the same uncertainty. Every window replays it from the recorded window's start, readings before it included;
a window longer than the recording has no energy. Method "replayed": these joules are not of this run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from devices.base import Channel, Clock, MeterUnavailableError
from devices.meters.playback import Playback
from devices.meters.power_csv import MAX_W, least_power_w
from results.records import PowerTrace
from results.trace_files import TraceFileError, read_marks, read_traces, read_window

MAX_J = 1e15
"""A gigawatt for eleven days: a counter that shows more was not written by a meter."""


class TraceReplayMeter(Playback):
    """The traces of a Parquet file. Of several meters only the first is summed: they may have seen the same energy."""

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(path, clock)
        self._traces: tuple[PowerTrace, ...] = ()
        self._recorded_start_s = 0.0
        self._marks: tuple[str, ...] = ()

    def open(self) -> None:
        try:
            traces, window = read_traces(self._path), read_window(self._path)
            self._marks = tuple(f"{mark} when recorded" for mark in read_marks(self._path))
        except TraceFileError as error:
            raise MeterUnavailableError(f"replay: {error}") from error
        if not traces or any(len(t.times_s) < 2 for t in traces):
            raise MeterUnavailableError(
                f"replay: {self._path} holds no trace of at least 2 readings; record one with `joulebench record`"
            )
        if any(t.method == "relative gauge" for t in traces):
            raise MeterUnavailableError(f"replay: {self._path} is of a relative gauge, which has no joules to replay")
        for trace in traces:
            _refuse_nonsense(self._path, trace)
        first_meter = traces[0].meter
        several = any(t.meter != first_meter for t in traces)
        self._traces = tuple(
            replace(
                t,
                meter=self.name,
                method=self.method,
                component=f"{t.meter} {t.component}" if several else t.component,
                additive=t.additive and t.meter == first_meter,
                note=f"replayed from {self._path.name}, recorded as {t.method}" + (f": {t.note}" if t.note else ""),
            )
            for t in traces
        )
        self._recorded_start_s = window[0] if window else max(float(t.times_s[0]) for t in traces)
        self.channels = tuple(_channel(t) for t in self._traces)

    def played(self, start_s: float, now_s: float) -> Sequence[PowerTrace]:
        return [self._shifted(t, start_s, now_s) for t in self._traces]

    def marks(self) -> tuple[str, ...]:
        """Those of the recording: what tainted it taints every window that plays it."""
        return self._marks

    def _shifted(self, trace: PowerTrace, start_s: float, now_s: float) -> PowerTrace:
        """The recording as if it had begun at `start_s`, until an update, a mean and a reading behind now."""
        later_s = start_s - self._recorded_start_s
        until_s = now_s - later_s + 2 * (trace.update_period_s + trace.sample_interval_s) + (trace.averaged_s or 0.0)
        n = int(trace.times_s.searchsorted(until_s, side="right")) + 1
        return replace(
            trace,
            times_s=trace.times_s[:n] + later_s,
            values=trace.values[:n],
            gaps_s=tuple((a + later_s, b + later_s) for a, b in trace.gaps_s),
        )


def _refuse_nonsense(path: Path, trace: PowerTrace) -> None:
    """Watts that nothing draws. What is no number has no energy, and that says so itself."""
    if trace.kind == "counter":
        wrong = np.abs(trace.values) > MAX_J
    else:
        least_w = least_power_w(trace.values) - 2 * trace.resolution
        wrong = (trace.values < least_w) | (trace.values > MAX_W)
    if (np.isfinite(trace.values) & wrong).any():
        i = int(np.argmax(np.isfinite(trace.values) & wrong))
        unit = "J" if trace.kind == "counter" else "W"
        raise MeterUnavailableError(
            f"replay: {path}: reading {i + 1} of {trace.meter} {trace.component} is {trace.values[i]:.6g} {unit};"
            " nothing draws that: was it recorded while a battery was filled, or changed since?"
        )


def _channel(trace: PowerTrace) -> Channel:
    return Channel(
        component=trace.component,
        kind=trace.kind,
        update_period_s=trace.update_period_s,
        averaged_s=trace.averaged_s,
        resolution=trace.resolution,
        relative_accuracy=trace.relative_accuracy,
        wrap_at_j=trace.wrap_at_j,
        additive=trace.additive,
        can_rest=trace.can_rest,
        max_power_w=trace.max_power_w,
        note=trace.note,
    )
