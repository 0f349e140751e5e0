"""What all meters share that are read by polling: a sampler between `start` and `stop`, traces out of its rows."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from devices.base import Channel, Clock, DeviceError, GoneError, InterruptedWindowError, TransientDeviceError
from devices.boundary import library_errors
from devices.sampler import AT_RANDOM, Sampler, find_gaps
from results.liveness import at_rest
from results.records import Method, PowerTrace, TraceKind

Array = NDArray[np.float64]

log = logging.getLogger(__name__)

RENEWALS = 5
"""Of each counter, seen before a window: their distances tell how often it renews its value."""
LOOK_S = 0.3
"""For so long they are looked for: a slower counter repeats its value between two samples of the usual 50 ms."""
METHODS: Final[dict[TraceKind, Method]] = {
    "counter": "counter",
    "power": "integrated power",
    "held": "battery gauge",
}
"""How a measured channel becomes joules."""


@contextmanager
def answered_before() -> Iterator[None]:
    """Of a meter that was opened: what it refuses or lacks now is no fault of the plan, and may be there another day.

    Raises what is raised inside, as the error of a device that is lost.
    """
    try:
        yield
    except DeviceError as error:
        if error.is_lost:
            raise
        raise GoneError(str(error)) from error


class PolledMeter(ABC):
    """A meter whose `read` gives one value per channel. Subclasses set `name`, `method`, and `channels` in `open`.

    A counter is also read around the window: `results.energy` knows the age of a value from the power before it. Before
    the window it is read as often as it answers, until it was seen to renew its value some times: how often it does is
    in the trace then, and no data sheet is believed. A slow one must have been seen to tick behind the window too.
    """

    name: str
    method: Method
    fresh_on_read: bool = False
    """True where a reading is up to date at any time, so that `mark` at a phase edge is worth its cost."""

    def __init__(self, interval_s: float, clock: Clock) -> None:
        self.channels: tuple[Channel, ...] = ()
        self._interval_s = interval_s
        self._clock = clock
        self._sampler: Sampler | None = None
        self._has_lived: set[str] = set()
        """Components that have moved, or shown power, since the meter was made."""

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def read(self) -> Sequence[float]:
        """One value per channel, in W or J; a subclass may append what its `traces` reads besides.

        Raises `DeviceError` when the instrument is lost.
        """

    def close(self) -> None:
        if self._sampler is not None:
            sampler, self._sampler = self._sampler, None
            # A lost device was told by `stop`, or is not asked for any more; the other meters still want closing.
            with suppress(DeviceError):
                sampler.stop()

    def start(self) -> None:
        if self._sampler is not None:
            raise DeviceError(f"meter {self.name} is already running; stop it before another window starts")
        counts = any(channel.kind == "counter" for channel in self.channels)
        spread = 0.0 if counts else AT_RANDOM
        sampler = Sampler(self.read, self._interval_s, self._clock, self._look(), spread)
        with answered_before(), library_errors(self.name, "its reader"):
            sampler.start()
        self._sampler = sampler
        if self.fresh_on_read:
            self.mark()
        else:
            self._wait_for_tick()

    def _look(self) -> Callable[[Sequence[float]], bool]:
        """Whether each counter that moves has been seen to change `RENEWALS` times, or the time for that is over."""
        n_changes = {i: 0 for i, c in enumerate(self.channels) if c.kind == "counter" and c.update_period_s > 0}
        rows: list[Sequence[float]] = []
        end_s = self._clock.now_s() + LOOK_S

        def is_known(row: Sequence[float]) -> bool:
            for i in n_changes:
                n_changes[i] += bool(rows) and row[i] != rows[-1][i]
            rows[:] = [row]
            moving = [n for n in n_changes.values() if n]
            return not n_changes or self._clock.now_s() > end_s or (bool(moving) and min(moving) >= RENEWALS)

        return is_known

    def _wait_for_tick(self) -> None:
        told_within_s = max((channel.told_within_s for channel in self.channels), default=0.0)
        if told_within_s > 0:
            self._wait(told_within_s + self._interval_s)

    def _wait(self, duration_s: float) -> None:
        self._clock.sleep_until_s(self._clock.now_s() + duration_s)

    def mark(self) -> None:
        if self.fresh_on_read and self._sampler is not None:
            self._sampler.mark()

    def stop(self) -> Sequence[PowerTrace]:
        if self._sampler is None:
            raise DeviceError(f"meter {self.name} is not running; start it first")
        if not self.fresh_on_read:
            self._wait_for_tick()
        sampler, self._sampler = self._sampler, None
        try:
            # Whatever stands in a sensor's file, or its library makes of it.
            with answered_before(), library_errors(self.name, "its reader"):
                readings = sampler.stop()
            with library_errors(self.name, "its reader"):
                return self.traces(*readings)
        except InterruptedWindowError:
            raise
        except TransientDeviceError as error:
            raise InterruptedWindowError(str(error), self._kept(sampler)) from error
        except DeviceError as error:
            error.traces = self._kept(sampler)
            raise

    def _kept(self, sampler: Sampler) -> Sequence[PowerTrace]:
        """Traces of what was received."""
        times_s, values = sampler.received()
        try:
            with library_errors(self.name, "its reader"):
                return self.traces(times_s, values) if len(times_s) else ()
        except InterruptedWindowError as error:
            return error.traces
        except DeviceError as error:
            log.info("%s: nothing to keep: %s", self.name, error)
            return ()

    def traces(self, times_s: Array, values: Array) -> Sequence[PowerTrace]:
        """The window's traces. values: [readings, what `read` gives]."""
        gaps_s = find_gaps(times_s, self._interval_s)
        found = [
            channel.trace(self.name, self.method_of(channel), times_s, values[:, i], self._interval_s, gaps_s)
            for i, channel in enumerate(self.channels)
        ]
        return [self._remembered(trace) for trace in found]

    def _remembered(self, trace: PowerTrace) -> PowerTrace:
        """With what earlier windows, idle ones too, have shown of its component: that it lives."""
        known = replace(trace, has_lived=trace.component in self._has_lived)
        if not at_rest(trace):
            self._has_lived.add(trace.component)
        return known

    def method_of(self, channel: Channel) -> Method:
        """The meter's, where it has one kind of channel only."""
        return self.method
