"""Machines and meters: what the harness asks of them, and how they fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import StringConstraints

from results.cpu_time import CpuSeconds
from results.environments import Conditions, Environment
from results.printable import printable
from results.records import Method, PowerTrace, TraceKind

Unit = Annotated[str, StringConstraints(pattern=r"^((cpu|gpu|npu)|(ndp|rank|core):[0-9]+)$")]
"""Where work runs and what draws energy: `cpu`, `gpu`, `npu`, and of several alike `ndp:2`, `rank:1`, `core:0`."""


class DeviceError(Exception):
    """A stable failure of a device or meter: what, the value found, the remedy. Not retried.

    A device's own words may be in it: it is made printable here.
    """

    is_lost: ClassVar[bool] = False
    """Whether it says that a device or meter was gone, or not in the state in which it may be measured: another day it
    may be there. Not of what comes again with the same plan."""
    traces: Sequence[PowerTrace] = ()
    """What was received until then, where a window ends with it: a recording keeps that."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class TransientDeviceError(DeviceError):
    """A failure that may pass (a dropped link, a busy meter). The runner retries and counts it."""

    is_lost = True


class InterruptedWindowError(TransientDeviceError):
    """The link broke in a window, or a part of its readings cannot count. A trial is repeated.

    A recording keeps `traces`: what was received, with the gap in it.
    """

    def __init__(self, words: str, traces: Sequence[PowerTrace] = ()) -> None:
        super().__init__(words)
        self.traces = traces


class UnendedProgramError(TransientDeviceError):
    """A program that hung, or was gone before its end. Another attempt may pass; the device is there all the time."""

    is_lost = False


class GoneError(DeviceError):
    """What answered before answers no more, or not us. Not retried: somebody has to look after it."""

    is_lost = True


class NotReadyError(DeviceError):
    """A device that may be measured in a certain state only was waited for, and did not get into it."""

    is_lost = True


class MeterUnavailableError(DeviceError):
    """This machine does not have the meter, or may not read it. Carries the remedy."""


class Clock(Protocol):
    """Seconds on a clock that never steps back."""

    def now_s(self) -> float: ...
    def sleep_until_s(self, at_s: float) -> None: ...


@dataclass(frozen=True)
class Channel:
    """One component of a meter, as it will be traced. See `PowerTrace` for the fields."""

    component: str
    kind: TraceKind
    update_period_s: float = 0.0
    resolution: float = 0.0
    relative_accuracy: float | None = 0.0
    wrap_at_j: float | None = None
    additive: bool = True
    can_rest: bool = False
    max_power_w: float | None = None
    note: str | None = None
    computes: Unit = "cpu"
    """What draws this energy: `auto` takes no meter that does not see the unit on which the engine computes."""
    hardware_id: str | None = None
    """Of the board that it is of, where its library tells: two meters number the same GPUs differently."""
    averaged_s: float | None = None

    @property
    def told_within_s(self) -> float:
        """So long after an instant all readings are there that tell of it."""
        return self.update_period_s + (self.averaged_s or 0.0)

    def __post_init__(self) -> None:
        """Rails, sensors and GPUs are named by drivers and phones."""
        object.__setattr__(self, "component", printable(self.component))
        if self.note is not None:
            object.__setattr__(self, "note", printable(self.note))

    def trace(
        self,
        meter: str,
        method: Method,
        times_s: NDArray[np.float64],
        values: NDArray[np.float64],
        sample_interval_s: float,
        gaps_s: tuple[tuple[float, float], ...] = (),
        left_out: str | None = None,
    ) -> PowerTrace:
        """This channel's readings, with all that is known of it. left_out: what else was read, and is not in them."""
        return PowerTrace(
            meter=meter,
            component=self.component,
            kind=self.kind,
            method=method,
            times_s=times_s,
            values=values,
            sample_interval_s=sample_interval_s,
            update_period_s=self.update_period_s,
            averaged_s=self.averaged_s,
            resolution=self.resolution,
            relative_accuracy=self.relative_accuracy,
            wrap_at_j=self.wrap_at_j,
            additive=self.additive,
            can_rest=self.can_rest,
            max_power_w=self.max_power_w,
            note="; ".join(filter(None, (self.note, left_out))) or None,
            gaps_s=gaps_s,
            left_out=left_out,
        )


class Meter(Protocol):
    """An instrument. Collection only: joules are derived in `results.derivation`.

    Life: `open` (raises `MeterUnavailableError`), then any number of `start` ... `stop`, then `close`.
    """

    name: str
    channels: tuple[Channel, ...]

    @property
    def method(self) -> Method: ...
    def open(self) -> None: ...
    def start(self) -> None: ...
    def mark(self) -> None:
        """Takes one more reading now where the instrument gives a fresh value at any time; else does nothing."""
        ...

    def stop(self) -> Sequence[PowerTrace]: ...
    def close(self) -> None: ...


def sees_all_cpus(meter: Meter) -> bool:
    """A package, a board or a battery draws for every process on it; a model counts our own CPU time."""
    is_measured = meter.method not in ("modelled", "replayed")
    return is_measured and any(channel.computes == "cpu" for channel in meter.channels)


@runtime_checkable
class KeepsRaw(Protocol):
    """A meter whose power follows from what its instrument said by a decision: of a unit, of a sign."""

    def raw_traces(self) -> Sequence[PowerTrace]:
        """What it said in the last window, of kind `raw`: the decision can be made again from it."""
        ...


@runtime_checkable
class SeesState(Protocol):
    """A meter that reads the state of its device beside its own readings."""

    def states(self) -> Sequence[Conditions]:
        """Those of the last window, in order; also of one that failed."""
        ...


@runtime_checkable
class Tended(Protocol):
    """A meter that a window of hours does not lose: where its link breaks, it keeps what it has, and goes on.

    What it kept comes out of its `stop`: in an `InterruptedWindowError` where something is missing.
    """

    def tend(self) -> str | None:
        """Called every half second of a recording. Goes on reading where that has ended.

        What is wrong now, so that nothing is read; None where nothing is.
        """
        ...


@runtime_checkable
class CarriesMarks(Protocol):
    """A meter that knows what taints the readings of its last window: a recording that was marked, say."""

    def marks(self) -> tuple[str, ...]: ...


@runtime_checkable
class WatchesState(Protocol):
    """A device whose state may change within a window."""

    @property
    def watch_every_s(self) -> float | None:
        """Between two readings in a window; None: it need not be read there, before and after are enough."""
        ...

    def watched_state(self) -> Conditions:
        """What may change (power source, boot id, heat, screen, level), read cheaply, on a thread of its own.

        Raises `DeviceError`.
        """
        ...


class Device(Protocol):
    """A machine with its meters."""

    name: str

    @property
    def meters(self) -> Sequence[Meter]: ...
    def open(self) -> None:
        """Raises `DeviceError` when the device cannot measure now."""
        ...

    def environment(self) -> Environment: ...
    def conditions(self) -> Conditions: ...
    def cpu_seconds(self) -> CpuSeconds | None:
        """Since some fixed start; None where unreadable."""
        ...

    def close(self) -> None: ...
