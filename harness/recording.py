"""A recording: the raw traces of a device's meters over some seconds, whatever the device does meanwhile."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from devices.base import Clock, Device, DeviceError, Tended, TransientDeviceError
from devices.boundary import library_errors
from devices.state_watch import changes, watched
from harness.elsewhere import places, stamp
from harness.windows import raw_traces, running_meters, window_marks
from results.derivation import energy_of_spans
from results.environments import Conditions
from results.records import EnergyReading, PowerTrace
from results.report.trace_plot import write_plot
from results.trace_files import WINDOW, raw_part, temporary_of, write_traces

log = logging.getLogger(__name__)

TICK_S = 0.5
"""Between two signs of life to whoever waits."""


@dataclass(frozen=True)
class Recording:
    """Traces and the window they were taken for; some readings lie before and behind it."""

    traces: tuple[PowerTrace, ...]
    window: tuple[float, float]
    raw: tuple[PowerTrace, ...] = ()
    """What the traces were derived from, where a meter keeps that."""
    conditions: tuple[Conditions, ...] = ()
    """Before it, at every change of state that was seen in it, and after it."""
    marks: tuple[str, ...] = ()
    """What taints it, as it would a trial: a charger was on, it slept, ..."""

    interrupted: tuple[str, ...] = ()
    """Why readings are missing in it: a link that broke, a charger."""

    def readings(self) -> list[EnergyReading]:
        """Of each meter: the total, then its components where there are several."""
        found = []
        for meter in dict.fromkeys(t.meter for t in self.traces):
            components = [t.component for t in self.traces if t.meter == meter]
            for component in ["total", *(components if len(components) > 1 else ())]:
                found.append(energy_of_spans(self.traces, [self.window], meter, component))
        return found

    def missing_totals(self) -> list[str]:
        """Why a meter has neither joules nor units of its own of all its parts together."""
        return [
            str(r.reason)
            for r in self.readings()
            if r.component == "total" and r.energy_j is None and r.gauge_units is None
        ]


def record(device: Device, clock: Clock, seconds: float, on_tick: Callable[[float], None]) -> Recording:
    """An opened device's meters for some seconds; Ctrl-C ends it early and keeps it.

    on_tick: told the seconds left, every half second. It may raise the Ctrl-C.

    A link that breaks leaves a gap: what came before it, and behind it where it is there again, is kept. Raises
    `DeviceError` where the recording cannot begin, or nothing was received.
    """
    interrupted: list[str] = []
    with watched(device, may_be_lost=True) as conditions, running_meters(device.meters, interrupted) as traces:
        start_s = clock.now_s()
        try:
            while (left_s := start_s + seconds - clock.now_s()) > 0:
                for meter in device.meters:
                    if isinstance(meter, Tended) and (trouble := meter.tend()) is not None:
                        log.info("%s: %s; tried again", meter.name, trouble)
                on_tick(left_s)
                clock.sleep_until_s(clock.now_s() + min(left_s, TICK_S))
        except KeyboardInterrupt:
            on_tick(0.0)
        end_s = clock.now_s()
    if interrupted and not any(len(trace.times_s) for trace in traces):
        raise TransientDeviceError(f"nothing was received: {'; '.join(interrupted)}")
    return Recording(
        tuple(traces),
        (start_s, end_s),
        tuple(raw_traces(device.meters)),
        changes(conditions),
        tuple(window_marks(conditions, device.meters)),
        tuple(interrupted),
    )


class Written(NamedTuple):
    """What was written of a recording, and what went wrong with it."""

    files: Sequence[Path]
    """The trace file first, where there is one."""
    troubles: Sequence[str]


def target_problem(path: Path) -> str | None:
    """Why a recording has no place there, as far as that shows before hours are spent on it. Raises `OSError` where
    nothing can be written."""
    picture = picture_of(path)
    if not path.parent.is_dir():
        return f"{path}: no folder {path.parent}; make it first"
    for own in (path, picture, temporary_of(path)):
        if own.is_dir():
            return f"{own} is a folder, and a file is written there; name another file"
        with suppress(FileNotFoundError):
            own.lstat()
            if own in (path, picture):
                return f"{own}: exists already and is left as it is; name another file"
    with tempfile.TemporaryFile(dir=path.parent):
        return None


def write_recording(recording: Recording, path: Path) -> Written:
    """The trace file, and a picture of it beside it. Where a file cannot be written there, it is written elsewhere."""
    troubles = []
    for target in (path, *places(f"recording-{stamp()}.parquet", path.parent)):
        try:
            with library_errors(str(target), "pyarrow"):
                _write_file(recording, target)
        except DeviceError as error:
            troubles.append(f"{target} cannot be written ({_why(error)})")
            continue
        if troubles:
            troubles.append(f"the recording is in {target}")
        break
    else:
        return Written((), [*troubles, "the readings are lost"])
    picture = picture_of(target)
    try:
        with library_errors(str(picture), "vl-convert"):
            write_plot(recording.traces, recording.window, picture)
    except DeviceError as error:
        return Written((target,), [*troubles, f"the picture {picture} cannot be written ({_why(error)})"])
    return Written((target, picture), troubles)


def _why(error: DeviceError) -> str:
    cause = error.__cause__
    return (isinstance(cause, OSError) and cause.strerror) or str(cause)


def _write_file(recording: Recording, path: Path) -> None:
    write_traces(
        path,
        {WINDOW: recording.traces, raw_part(WINDOW): recording.raw},
        recording.window,
        recording.marks,
        [state.model_dump(exclude_none=True) for state in recording.conditions],
    )


def picture_of(path: Path) -> Path:
    return path.with_suffix(".png")
